"""The errors that a client raises: those of the library where the server names one, `ApiError` otherwise.

    ApiError             .status, .code, .retryable, .hint; .retry_after_s if the server said
    +-- ApiRefused       also a TerminalError: the same request will be refused again
        +-- ApiUnauthorized  401: the API key is missing, unknown, expired or revoked; .code says which
        +-- ApiForbidden     403: the API key lacks a scope; .needed_scopes
    +-- ApiUnavailable   also a TransientError: there was no answer, or a later one may be different

No message contains the API key: it is removed from what a server says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from ragfence.client.steps import Lost, Reply
from ragfence.core.backoff import retry_after_s
from ragfence.core.http_errors import message_in
from ragfence.errors import ApiForbidden, ApiRefused, ApiUnauthorized, ApiUnavailable, InFlight, RagfenceError
from ragfence.wire.problems import ERRORS, REFUSALS

_IN_PYTHON: Final = (
    ("GET /v1/aliases/NAME", "client.resolve(NAME)"),
    ("GET /v1/aliases", "client.aliases()"),
    ("POST /v1/aliases/ALIAS:swap", "client.swap(ALIAS, index_hash)"),
    ("POST /v1/builds", "client.build()"),
    ("POST /v1/admin/keys/KEY:release", "client.release(KEY)"),
    ("GET /v1/keys", "client.keys()"),
    ('{"force": true, "reason": "..."}', 'client.swap(..., force=True, reason="...")'),
    ('for example Idempotency-Key: "', 'for example idempotency_key="'),
    ("Idempotency-Key", "idempotency_key"),
    ("send Authorization: Bearer and an API key", "pass api_key=, or set RAGFENCE_API_KEY"),
)
"""Requests as a server's hints name them, and what a caller of this client writes instead."""

SENT_AGAIN: Final = frozenset({429, 500, 502, 503, 504})
NO_ANSWER: Final = "DEPENDENCY.unavailable"
TIMEOUT: Final = "DEPENDENCY.timeout"

_KINDS: Final = {kind.code: kind for kind in ERRORS}
_REFUSED: Final[Mapping[int, type[ApiRefused]]] = {401: ApiUnauthorized, 403: ApiForbidden}
_OF_THE_FORM: Final = frozenset({"type", "title", "status", "detail", "code", "retryable", "hint", "retry_after"})
_TAKEN: Final = frozenset({"self", "message", "hint"})
"""parameters of every error; a problem that has such a field would not fit"""


def problem_in(reply: Reply) -> Mapping[str, Any] | None:
    """Returns the problem+json of an answer; None if it is not from ragfence but, for instance, from a proxy."""
    try:
        problem = json.loads(reply.body)
    except ValueError:
        return None
    return problem if isinstance(problem, dict) and isinstance(problem.get("code"), str) else None


def is_retryable(reply: Reply) -> bool:
    """Returns whether the request is sent again: after 429 and 5xx, unless the server says `"retryable": false`."""
    if reply.status not in SENT_AGAIN:
        return False
    problem = problem_in(reply)
    return problem is None or problem.get("retryable") is not False


def is_in_flight(reply: Reply) -> bool:
    problem = problem_in(reply) if reply.status == 409 else None
    return problem is not None and problem["code"] == InFlight.code


def server_pause_s(reply: Reply) -> float | None:
    """Returns Retry-After in seconds from now. A date is compared with the server's own clock, if it sends one."""
    header = reply.headers.get("retry-after")
    return None if header is None else retry_after_s(header, _now_at(reply))


def error_in(reply: Reply, secret: str = "", *, where: str = "") -> RagfenceError:
    """Returns the error that an answer reports."""
    problem = problem_in(reply)
    wait_s = server_pause_s(reply)
    if problem is not None:
        return error_from_problem(problem, secret, status=reply.status, retry_after_s=wait_s)
    said = without_secret(message_in(reply.body[:4000].decode("utf-8", "replace")), secret)
    kind = ApiUnavailable if reply.status in SENT_AGAIN else _REFUSED.get(reply.status, ApiRefused)
    return kind(
        f"{where or 'the server'} answered {reply.status}{said}",
        hint="the answer is not from ragfence: check the address, and any proxy in between",
        code=f"HTTP.{reply.status}",
        status=reply.status,
        retry_after_s=wait_s,
    )


def error_from_problem(
    problem: Mapping[str, Any], secret: str = "", *, status: int = 0, retry_after_s: float | None = None
) -> RagfenceError:
    """Returns the error that a problem+json stands for."""
    code = str(problem.get("code") or "")
    status = status or _number(problem.get("status"))
    message = without_secret(str(problem.get("detail") or problem.get("title") or code), secret)
    hint = in_python(without_secret(str(problem.get("hint") or ""), secret))
    if retry_after_s is None and isinstance(problem.get("retry_after"), int | float):
        retry_after_s = float(problem["retry_after"])
    extras = {name: value for name, value in problem.items() if name not in _OF_THE_FORM | _TAKEN}
    extras |= {"status": status, "retry_after_s": retry_after_s}
    known = _KINDS.get(code)
    if known is not None:
        if retry_after_s is not None:
            extras["retry_after_ms"] = round(retry_after_s * 1000)
        return known(message, hint=hint or None, **extras)
    row = REFUSALS.get(code)
    retryable = problem.get("retryable")
    if not isinstance(retryable, bool):
        retryable = row.retryable if row else status in SENT_AGAIN
    kind = ApiUnavailable if retryable else _REFUSED.get(status, ApiRefused)
    return kind(message, hint=hint, code=code, **extras)


def unanswered_error(what: Lost, where: str, attempts: int, secret: str, url: str) -> ApiUnavailable:
    """Returns the error of a request that got no answer."""
    tries = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    error = ApiUnavailable(
        f"{where} did not answer ({tries}): {without_secret(what.what, secret)}",
        hint=(
            f"nothing listens at {url}, or it cannot be reached: start a server with `ragfence serve`, or set "
            "RAGFENCE_URL to the address of yours"
            if what.unconnected
            else "check that the server runs and can be reached, then call again"
        ),
        code=TIMEOUT if what.timeout else NO_ANSWER,
    )
    error.__cause__ = what.cause
    return error


def in_python(hint: str) -> str:
    """Returns a server's hint, with its requests as calls of this client.

    >>> in_python("build it first: POST /v1/builds")
    'build it first: client.build()'
    """
    for request, call in _IN_PYTHON:
        hint = hint.replace(request, call)
    return hint


def without_secret(text: str, secret: str) -> str:
    return text.replace(secret, "***") if secret else text


def _now_at(reply: Reply) -> datetime:
    try:
        then = parsedate_to_datetime(reply.headers.get("date", ""))
    except ValueError:
        return datetime.now(UTC)
    return then if then.tzinfo else then.replace(tzinfo=UTC)


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
