"""The answers of the contract: what is stored and replayed, conflicts, requests in progress, and expired budgets.

A stored answer is the result of a receipt. Its body is replayed byte for byte.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
from dataclasses import replace
from email.utils import formatdate
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from ragfence.core.operations import Operation
from ragfence.core.policy import Policy
from ragfence.core.receipts import Receipt
from ragfence.core.records import KeyRecord
from ragfence.engine.claim_block import ReplayedClaim, failed
from ragfence.engine.requests import Request
from ragfence.errors import Conflict, FormatCorrupt, FormatTooNew, InFlight, RagfenceError
from ragfence.wire.headers import KEY_HEADER, format_key, parse_key
from ragfence.wire.messages import Answer, Headers, values_of
from ragfence.wire.problems import Problem, RequestRefused, problem_of, refusal, whole_seconds

MAX_CACHED_BYTES: Final = 2 << 10
"""Largest result whose answer is cached in memory."""
RETRY_AFTER_MS: Final = 1000
"""A live lease is renewed, so its expiry says nothing about when the operation ends."""


VERSION: Final = 1

NEVER_STORED: Final = frozenset({401, 403, 408, 409, 412, 425, 429})
"""Statuses of the 4xx that may be different the next time, for the same request."""

# Headers for one user, one connection or one moment; and those of the contract, which are made anew.
NOT_STORED_HEADERS: Final = frozenset(
    """
    set-cookie set-cookie2 authorization www-authenticate authentication-info proxy-authenticate proxy-authorization
    proxy-authentication-info proxy-connection connection keep-alive te trailer trailers transfer-encoding upgrade
    date server content-length idempotency-key idempotency-status idempotency-expires x-idempotency-key
    x-idempotency-status
    """.split()  # noqa: SIM905  # twenty quoted lines would say no more
)


class ReplayedResponse:
    """The last answer of a remembered request: from the same record it is made only once."""

    __slots__ = ("answer", "record")

    def __init__(self) -> None:
        self.record: KeyRecord | None = None
        self.answer: Answer | None = None


class HttpClaim(NamedTuple):
    """An HTTP request that may be claimed."""

    key: str
    request: Request
    place: str
    """Method and template."""
    root: str
    """The prefix under which the application is mounted."""
    budget_s: float | None = None
    """How long the client waits."""
    give_up_at: float | None = None
    """When the client stops waiting, on the clock of the event loop."""
    cached: ReplayedResponse | None = None


class ContractResponses:
    """Makes the answers of one tenant.

    Args:
        policy: The policy of the tenant.
        ttl_ms: How long an outcome is stored; 0: permanently.
        status_path: The Location of a 202; empty: it has none.
    """

    def __init__(self, policy: Policy, ttl_ms: int, status_path: str) -> None:
        self._policy = policy
        self._ttl_ms = ttl_ms
        self._status_path = status_path

    def refused(self, claim: HttpClaim, error: RagfenceError) -> Answer:
        key = claim.key
        if isinstance(error, Conflict):
            problem = Problem(
                status=self._policy.on_conflict.status,
                code=error.code,
                title="The key was used before for another request",
                retryable=False,
                detail=f"Idempotency-Key {key!r} was used before on {claim.place} for another request",
                hint="use a new key for another request, or send the request of the first call",
                extras={"key": key, "diff": _of_the_body(error.diff), "differs": _parts(error.diff)},
            )
            return problem.answer(key_headers(key, "CONFLICT"))
        if isinstance(error, InFlight):
            return self.in_progress(claim)
        return problem_of(error, key=key).answer(key_headers(key, "IN_PROGRESS"))

    def in_progress(self, claim: HttpClaim) -> Answer:
        key = claim.key
        if self._policy.http.in_progress == 202:
            return self.accepted(claim.request.operation, key, claim.root)
        busy = InFlight(
            f"a request with Idempotency-Key {key!r} is being executed",
            hint="wait, then send it again with the same key",
            key=key,
            retry_after_ms=RETRY_AFTER_MS,
        )
        return problem_of(busy).answer(key_headers(key, "IN_PROGRESS"))

    def accepted(self, operation: Operation, key: str, root: str) -> Answer:
        values: dict[str, Any] = {"key": key, "state": "in_progress", "retry_after": whole_seconds(RETRY_AFTER_MS)}
        headers = {"retry-after": str(values["retry_after"]), "cache-control": "no-store"}
        if self._status_path:
            method, _, template = operation.action.partition(" ")
            query = urlencode({"key": key, "method": method, "route": template})
            values["status_url"] = headers["location"] = f"{root}{self._status_path}?{query}"
        body = json.dumps(values, separators=(",", ":")).encode()
        answer = with_length(Answer(202, (("content-type", "application/json"),), body))
        return answer.with_headers(headers | key_headers(key, "IN_PROGRESS"))

    def out_of_time(self, claim: HttpClaim, *, is_running: bool) -> Answer:
        # Before the store has answered there may be no claim, and the Location of a 202 would not know the key.
        if is_running and self._policy.http.in_progress == 202:
            return self.accepted(claim.request.operation, claim.key, claim.root)
        late = refusal(
            "DEPENDENCY.timeout",
            f"not done within {claim.budget_s:g} s; it continues",
            key=claim.key,
            retry_after=whole_seconds(RETRY_AFTER_MS),
        )
        return late.answer(key_headers(claim.key, "IN_PROGRESS"))

    def replay(self, claim: HttpClaim, replayed: ReplayedClaim) -> Answer:
        cached, record = claim.cached, replayed.record
        if cached is None or len(record.result) > MAX_CACHED_BYTES:
            return self.replayed(replayed.receipt(), claim.key)
        # The whole record is compared: one that differs in anything may have another answer.
        if cached.answer is None or cached.record != record:
            cached.record, cached.answer = record, self.replayed(replayed.receipt(), claim.key)
        return cached.answer

    def replayed(self, receipt: Receipt, key: str) -> Answer:
        headers = key_headers(key, "HIT") | {"idempotency-status": "replayed"} | self.expiry(receipt)
        if receipt.failed:  # sealed without an answer
            return problem_of(failed(receipt), key=key).answer(headers)
        stored = from_result(receipt.result, key)
        # None of these headers is ever stored, so nothing has to be replaced.
        return Answer(stored.status, (*stored.headers, *headers.items()), stored.body, stored.complete)

    def expiry(self, receipt: Receipt) -> dict[str, str]:
        if not self._ttl_ms or not receipt.sealed_at_ms:
            return {}
        return {"idempotency-expires": _date((receipt.sealed_at_ms + self._ttl_ms) // 1000)}


def is_stored(status: int) -> bool:
    """Returns whether an answer of this status is the outcome of its key. The others release the key."""
    return 200 <= status < 500 and status not in NEVER_STORED


def to_result(answer: Answer) -> dict[str, Any]:
    """Returns the answer as the result of a receipt."""
    result: dict[str, Any] = {"v": VERSION, "status": answer.status, "headers": _stored_headers(answer.headers)}
    try:
        # Text is stored as text, since people read receipts. It is replayed as the same bytes.
        return result | {"body": answer.body.decode()}
    except UnicodeDecodeError:
        return result | {"base64": base64.b64encode(answer.body).decode("ascii")}


def without_body(answer: Answer) -> dict[str, Any]:
    """Returns the result of an answer that is too long to be stored."""
    return {"v": VERSION, "status": answer.status, "headers": _stored_headers(answer.headers), "too_long": True}


def from_result(result: Any, key: str) -> Answer:
    """Returns the answer to replay. If its body was not stored, that is the problem PROVIDER.duplicate."""
    if not isinstance(result, dict) or "v" not in result:
        raise FormatCorrupt("the result stored for the key is not an HTTP answer")
    if result["v"] != VERSION:
        raise FormatTooNew(f"the stored answer has version {result['v']}, this ragfence knows {VERSION}")
    headers = tuple((str(name), str(value)) for name, value in result["headers"])
    status = int(result["status"])
    if result.get("too_long"):
        detail = f"the answer, of status {status}, was too long to be stored"
        places = {name: value for name, value in headers if name in ("location", "content-location", "etag")}
        return refusal("PROVIDER.duplicate", detail, key=key, original_status=status).answer(places)
    body = base64.b64decode(result["base64"]) if "base64" in result else result["body"].encode()
    return with_length(Answer(status, headers, body))


def with_length(answer: Answer) -> Answer:
    """Adds Content-Length, if an answer of this status may have one."""
    if not answer.complete or answer.status in (204, 304) or answer.status < 200:
        return answer
    kept = tuple(pair for pair in answer.headers if pair[0] not in ("content-length", "transfer-encoding"))
    return replace(answer, headers=(*kept, ("content-length", str(len(answer.body)))))


def _stored_headers(headers: Headers) -> list[list[str]]:
    named_by_connection = {
        part.strip().lower() for name, value in headers if name == "connection" for part in value.split(",")
    }
    return [
        [name, value] for name, value in headers if name not in NOT_STORED_HEADERS and name not in named_by_connection
    ]


@functools.lru_cache(maxsize=1024)
def _date(seconds: int) -> str:
    return formatdate(seconds, usegmt=True)


def key_headers(key: str, status: str) -> dict[str, str]:
    """Returns the headers that name the key, and whether it was known."""
    headers = {"x-idempotency-key": format_key(key)}
    return headers | {"x-idempotency-status": status} if status else headers


def unexpected(headers: Headers) -> Answer:
    """Returns the answer to a request that failed with an unexpected error, with its key in the headers.

    It says nothing of the error: a message may contain what another tenant has sent. The log has all of it.
    """
    named: dict[str, str] = {}
    if len(given := values_of(headers, KEY_HEADER)) == 1:
        with contextlib.suppress(RequestRefused):
            named = key_headers(parse_key(given[0]), "MISS")
    return refusal("TRANSIENT.unexpected").answer(named)


def _of_the_body(diff: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Returns the patch of the body alone: the client has no other document."""
    if diff is None:
        return None
    return [
        {name: value.removeprefix("/body") if name in ("path", "from") else value for name, value in operation.items()}
        for operation in diff
        if _part(operation) == "body"
    ]


def _parts(diff: list[dict[str, Any]] | None) -> list[str] | None:
    return None if diff is None else sorted({_part(operation) for operation in diff})


def _part(operation: dict[str, Any]) -> str:
    return (*str(operation["path"]).split("/"), "body")[1]
