"""When a request is sent again, and under which Idempotency-Key: the loop of every call, without I/O.

A request is sent again after 429, 500, 502, 503, 504, after 409 IN_FLIGHT, and when there was no answer, always under
the same Idempotency-Key. A 202 is followed to the address of its outcome. Any other 4xx would be the same the next
time, so it is raised. A pause is random between 0 and a limit that doubles with each failure ("full jitter"), so that
clients that failed together do not return together. The budget limits all attempts and pauses; if the server asks for
a longer pause than the rest of the budget, the error is raised at once.

Each call has a key of its own, the same for all its attempts. A key made of the content alone would be wrong: after
"A, then B, then A" the third call would be answered with what was stored for the first, and B would stay; a second
retraction would not happen. Repeating a whole run is cheap because of the documents' fence, which needs no key.

With `run`, a name for one pass of a loader, keys are made from content: run, position of the call in the run, method,
path and body. A loader that crashed and starts *from the beginning* under the same name sends the same keys, and is
answered with what was stored. Calls that differ from those of the first pass have other keys, and are executed.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final, Generic
from urllib.parse import urljoin, urlsplit

from ragfence.client.errors import (
    error_in,
    is_in_flight,
    is_retryable,
    problem_in,
    server_pause_s,
    unanswered_error,
    without_secret,
)
from ragfence.client.steps import (
    GRACE_S,
    AttemptStatus,
    Lost,
    OnAttempt,
    Pause,
    Reply,
    RequestAttempt,
    Result,
    Send,
    Steps,
)
from ragfence.core.backoff import Backoff
from ragfence.core.hashing import digest
from ragfence.core.operations import checked_text
from ragfence.errors import ApiRefused, InFlight, RagfenceError, ValidationError
from ragfence.wire.headers import format_key, parse_key
from ragfence.wire.problems import RequestRefused

KEY_HEADER: Final = "Idempotency-Key"
UNKNOWN_KEY: Final = "VALIDATION.idempotency.key_unknown"
SHORTEST_S: Final = 0.001
"""The least that `X-Request-Timeout` says: servers refuse 0."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a call keeps trying.

    Args:
        base_s: Limit of the first pause. The n-th pause is random between 0 and `min(cap_s, base_s * 2**n)`.
        cap_s: Limit of every pause.
        budget_s: Time for a call with all its attempts and pauses. With 0 every request is sent once.
    """

    base_s: float = 0.1
    cap_s: float = 2.0
    budget_s: float = 10.0

    def __post_init__(self) -> None:
        if not (self.base_s >= 0 and self.cap_s >= 0 and self.budget_s >= 0):
            raise ValidationError(f"pauses and budget must not be below 0: {self}")

    def pause_s(self, failures: int, dice: random.Random) -> float:
        """Returns the pause after this number of failures."""
        return dice.uniform(0.0, Backoff(first_s=self.base_s, longest_s=self.cap_s).limit_s(failures))


@dataclass(frozen=True, slots=True)
class CallSettings:
    """What all calls of one client have in common."""

    url: str
    secret: str = field(repr=False)
    timeout_s: float
    retry: RetryPolicy
    clock: Callable[[], float]
    dice: random.Random
    on_attempt: OnAttempt | None = None


Accept = Callable[[Reply], Result | None]
"""Returns the result in an answer of 2xx, or None if the answer is incomplete: then the request is sent again."""


def send_with_retries(
    settings: CallSettings, send: Send, accept: Accept[Result], *, budget_s: float | None = None
) -> Steps[Result]:
    """Sends the request as often as necessary, and returns what `accept` makes of the answer."""
    return _RetryLoop(settings, send, accept, settings.retry.budget_s if budget_s is None else budget_s).run()


class _RetryLoop(Generic[Result]):
    def __init__(self, settings: CallSettings, send: Send, accept: Accept[Result], budget_s: float) -> None:
        self._settings = settings
        self._send = send
        self._accept = accept
        self._budget_s = budget_s
        self._until = settings.clock() + budget_s
        self._failures = 0
        self._attempts = 0
        self._paused_s = 0.0
        self._where = f"{send.method} {settings.url}{urlsplit(send.url).path}"

    def run(self) -> Steps[Result]:
        request = self._send
        while True:
            answer: Reply | Lost = yield self._with_timeouts(request)
            self._attempts += 1
            self._report(request, answer)
            if isinstance(answer, Lost):
                yield from self._pause_after_failure(self._no_answer(answer), None)
            elif answer.status == 202:
                if status_url := self._status_url(answer):
                    request = Send("GET", status_url)
                yield from self._pause_in_progress(self._in_flight(answer, status_url), answer)
            elif request is not self._send and _is_unknown_key(answer):
                # Its owner released the key: it is not being executed any more, so it is sent again.
                request = self._send
                yield from self._pause_after_failure(error_in(answer, self._settings.secret, where=self._where), None)
            elif 200 <= answer.status <= 299:
                outcome = self._accept(answer)
                if outcome is not None:
                    return outcome
                yield from self._pause_after_failure(self._no_answer(Lost("the answer was cut off")), None)
            elif is_in_flight(answer):
                yield from self._pause_in_progress(error_in(answer, self._settings.secret), answer)
            elif is_retryable(answer):
                error = error_in(answer, self._settings.secret, where=self._where)
                yield from self._pause_after_failure(error, server_pause_s(answer))
            else:
                raise error_in(answer, self._settings.secret, where=self._where)

    def _with_timeouts(self, request: Send) -> Send:
        # With `budget_s=0` there is one attempt, for as long as the timeout lets it.
        left_s = self._left_s if self._budget_s else self._settings.timeout_s
        silence_s = max(SHORTEST_S, min(self._settings.timeout_s, left_s))
        return replace(
            request,
            headers={**request.headers, "X-Request-Timeout": f"{silence_s:.3f}"},
            silence_s=silence_s + GRACE_S,
            whole_s=max(left_s, silence_s) + GRACE_S,
        )

    def _pause_after_failure(self, error: RagfenceError, server_s: float | None) -> Steps[None]:
        self._failures += 1
        yield from self._pause(error, server_s)

    def _pause_in_progress(self, error: RagfenceError, answer: Reply) -> Steps[None]:
        """Pauses while the operation is being executed: not a failure, so the pauses do not grow."""
        yield from self._pause(error, server_pause_s(answer), grow=False)

    def _pause(self, error: RagfenceError, server_s: float | None, *, grow: bool = True) -> Steps[None]:
        jitter_s = self._settings.retry.pause_s(self._failures if grow else 1, self._settings.dice)
        # Added to the Retry-After of the server, which is the same for all clients.
        pause_s = (server_s or 0.0) + jitter_s
        if pause_s >= self._left_s:
            pause_s = server_s or 0.0
            if server_s is None or pause_s >= self._left_s:
                raise error
        self._paused_s = pause_s
        yield Pause(pause_s)

    def _report(self, request: Send, answer: Reply | Lost) -> None:
        on_attempt = self._settings.on_attempt
        if on_attempt is None:
            return
        status, notes = _outcome(answer, self._settings.secret)
        on_attempt(
            RequestAttempt(
                method=request.method,
                path=urlsplit(request.url).path,
                idempotency_key=request.headers.get(KEY_HEADER, ""),
                attempt=self._attempts,
                delay_ms=round(self._paused_s * 1000),
                status=status,
                code=None if isinstance(answer, Lost) else answer.status,
                notes=notes,
            )
        )
        self._paused_s = 0.0

    def _no_answer(self, what: Lost) -> RagfenceError:
        return unanswered_error(what, self._where, self._attempts, self._settings.secret, self._settings.url)

    @property
    def _left_s(self) -> float:
        return self._until - self._settings.clock()

    def _in_flight(self, answer: Reply, status_url: str) -> InFlight:
        wait_s = server_pause_s(answer)
        return InFlight(
            f"{self._where} is still being executed after the time given, {self._budget_s:g} s",
            hint="it goes on: call again later with the same idempotency_key, or get details['status_url']",
            key=answer.headers.get("x-idempotency-key", ""),
            status_url=status_url,
            retry_after_ms=None if wait_s is None else round(wait_s * 1000),
        )

    def _status_url(self, answer: Reply) -> str:
        location = answer.headers.get("location", "")
        if not location:
            return ""
        whole = urljoin(self._settings.url + "/", location)
        if urlsplit(whole)[:2] != urlsplit(self._settings.url)[:2]:
            # Every request carries the API key, which is for this server only.
            raise ApiRefused(
                f"{self._where} redirected to another server, {urlsplit(whole).hostname}",
                hint="check the proxies between this client and the server",
                status=answer.status,
            )
        return whole


def _outcome(answer: Reply | Lost, secret: str) -> tuple[AttemptStatus, str]:
    """How a request ended, and what the server or the connection said of it."""
    if isinstance(answer, Lost):
        return "timeout" if answer.timeout else "lost", without_secret(answer.what, secret)
    problem = problem_in(answer) if answer.status >= 300 else None
    notes = without_secret(str(problem["code"]), secret) if problem is not None else ""
    if answer.status == 202 or is_in_flight(answer):
        return "in_progress", notes
    if 200 <= answer.status <= 299:
        return "success", notes
    return "unavailable" if is_retryable(answer) else "refused", notes


def _is_unknown_key(answer: Reply) -> bool:
    problem = problem_in(answer) if answer.status == 404 else None
    return problem is not None and problem["code"] == UNKNOWN_KEY


class Keys:
    """Makes the Idempotency-Key of each call of a client."""

    def __init__(self, run: str | None = None) -> None:
        if run == "":
            raise ValidationError("a run needs a name", hint="one for each pass, such as nightly-2026-03-01")
        self._run = None if run is None else checked_text("run", run)
        self._positions = count()

    def header(self, given: str | None, method: str, path: str, body: bytes | None) -> dict[str, str]:
        """Returns the header of the next call. A key of the caller counts too: later calls keep their positions."""
        position = next(self._positions)
        if given is not None:
            return {KEY_HEADER: _checked(given)}
        if self._run is None:
            return {KEY_HEADER: str(uuid.uuid4())}
        return {KEY_HEADER: content_key(self._run, position, method, path, body or b"")}


def content_key(run: str, position: int, method: str, path: str, body: bytes) -> str:
    """
    >>> content_key("monday", 0, "POST", "/v1/documents", b"{}")[:8]
    '56dd8c22'
    """
    parts = (run.encode(), position.to_bytes(8, "big"), method.encode(), path.encode(), body)
    return digest("ragfence/client-key/1", *parts).hex()


def _checked(key: object) -> str:
    if not isinstance(key, str):
        raise ValidationError(f"an idempotency_key must be text, not {type(key).__name__}")
    try:
        header = format_key(key)
        parse_key(header)
    except RequestRefused as refused:
        raise ValidationError(refused.problem.detail, hint=refused.problem.hint) from None
    return header
