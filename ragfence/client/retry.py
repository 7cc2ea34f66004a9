"""When a request is sent again: the loop of every call, without I/O.

Sent again are 429, 500, 502, 503, 504, what was not answered, and 409 IN_FLIGHT, always under the same Idempotency-Key;
a 202 is followed to where its outcome is told. Nothing else: another 4xx will be the same the next time. The pause is
chosen at random between nothing and twice the last limit ("full jitter"), so that clients who failed together do not
come back together. All of it ends with the budget; a server that wants a longer pause than what is left of it is
believed at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Generic
from urllib.parse import urljoin, urlsplit

from ragfence.client.errors import asked_s, error_for, error_in, is_in_flight, may_pass, problem_in
from ragfence.client.steps import GRACE_S, Lost, Pause, Reply, Result, Send, Steps
from ragfence.core.backoff import Backoff
from ragfence.errors import ApiRefused, InFlight, RagfenceError, ValidationError

UNKNOWN_KEY: Final = "VALIDATION.idempotency.key_unknown"
SHORTEST_S: Final = 0.001
"""what `X-Request-Timeout` says at least: no server takes nothing"""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """base_s and cap_s limit the pauses (each is chosen between 0 and `min(cap_s, base_s * 2**n)`); budget_s is for a
    call with all its attempts and pauses. `budget_s=0` sends everything once."""

    base_s: float = 0.1
    cap_s: float = 2.0
    budget_s: float = 10.0

    def __post_init__(self) -> None:
        if not (self.base_s >= 0 and self.cap_s >= 0 and self.budget_s >= 0):
            raise ValidationError(f"no pause and no budget is below 0: {self}")

    def pause_s(self, failures: int, dice: random.Random) -> float:
        """Before the attempt that follows so many failures."""
        return dice.uniform(0.0, Backoff(first_s=self.base_s, longest_s=self.cap_s).limit_s(failures))


@dataclass(frozen=True, slots=True)
class RetryLoop:
    """How the calls of one client behave."""

    url: str
    secret: str = field(repr=False)
    timeout_s: float
    retry: RetryPolicy
    clock: Callable[[], float]
    dice: random.Random


Accept = Callable[[Reply], Result | None]
"""What an answer of 2xx means; None: it was cut off, and is asked for again."""


def exchanged(
    conduct: RetryLoop, send: Send, accept: Accept[Result], *, budget_s: float | None = None
) -> Steps[Result]:
    """What `accept` makes of the answer, however often the request has to be sent."""
    return _Exchange(conduct, send, accept, conduct.retry.budget_s if budget_s is None else budget_s).run()


class _Exchange(Generic[Result]):
    def __init__(self, conduct: RetryLoop, send: Send, accept: Accept[Result], budget_s: float) -> None:
        self._conduct = conduct
        self._send = send
        self._accept = accept
        self._budget_s = budget_s
        self._until = conduct.clock() + budget_s
        self._failures = 0
        self._attempts = 0
        self._where = f"{send.method} {conduct.url}{urlsplit(send.url).path}"

    def run(self) -> Steps[Result]:
        asking = self._send
        while True:
            answer: Reply | Lost = yield self._timed(asking)
            self._attempts += 1
            if isinstance(answer, Lost):
                yield from self._failed(self._unanswered(answer), None)
            elif answer.status == 202:
                if status_url := self._status_url(answer):
                    asking = Send("GET", status_url)
                yield from self._waiting(self._unfinished(answer, status_url), answer)
            elif asking is not self._send and _forgotten(answer):
                # Its performer gave the key back: nobody performs it any more, so it is sent again.
                asking = self._send
                yield from self._failed(error_in(answer, self._conduct.secret, where=self._where), None)
            elif 200 <= answer.status <= 299:
                outcome = self._accept(answer)
                if outcome is not None:
                    return outcome
                yield from self._failed(self._unanswered(Lost("its answer ended in the middle")), None)
            elif is_in_flight(answer):
                yield from self._waiting(error_in(answer, self._conduct.secret), answer)
            elif may_pass(answer):
                error = error_in(answer, self._conduct.secret, where=self._where)
                yield from self._failed(error, asked_s(answer))
            else:
                raise error_in(answer, self._conduct.secret, where=self._where)

    def _timed(self, asking: Send) -> Send:
        # With `budget_s=0` there is one attempt, for as long as the timeout lets it.
        left_s = self._left_s if self._budget_s else self._conduct.timeout_s
        silence_s = max(SHORTEST_S, min(self._conduct.timeout_s, left_s))
        return replace(
            asking,
            headers={**asking.headers, "X-Request-Timeout": f"{silence_s:.3f}"},
            silence_s=silence_s + GRACE_S,
            whole_s=max(left_s, silence_s) + GRACE_S,
        )

    def _failed(self, error: RagfenceError, server_s: float | None) -> Steps[None]:
        self._failures += 1
        yield from self._paused(error, server_s)

    def _waiting(self, error: RagfenceError, answer: Reply) -> Steps[None]:
        """Somebody is at it: no failure, so the pauses do not grow."""
        yield from self._paused(error, asked_s(answer), grow=False)

    def _paused(self, error: RagfenceError, server_s: float | None, *, grow: bool = True) -> Steps[None]:
        jitter_s = self._conduct.retry.pause_s(self._failures if grow else 1, self._conduct.dice)
        # On top of what the server asked for: it says the same to everyone.
        pause_s = (server_s or 0.0) + jitter_s
        if pause_s >= self._left_s:
            pause_s = server_s or 0.0
            if server_s is None or pause_s >= self._left_s:
                raise error
        yield Pause(pause_s)

    def _unanswered(self, what: Lost) -> RagfenceError:
        return error_for(what, self._where, self._attempts, self._conduct.secret, self._conduct.url)

    @property
    def _left_s(self) -> float:
        return self._until - self._conduct.clock()

    def _unfinished(self, answer: Reply, status_url: str) -> InFlight:
        wait_s = asked_s(answer)
        return InFlight(
            f"{self._where} is still being performed, and the time given, {self._budget_s:g} s, is over",
            hint="it goes on: call again later with the same idempotency_key, or ask at details['status_url']",
            key=answer.headers.get("x-idempotency-key", ""),
            status_url=status_url,
            retry_after_ms=None if wait_s is None else round(wait_s * 1000),
        )

    def _status_url(self, answer: Reply) -> str:
        location = answer.headers.get("location", "")
        if not location:
            return ""
        whole = urljoin(self._conduct.url + "/", location)
        if urlsplit(whole)[:2] != urlsplit(self._conduct.url)[:2]:
            # The API key goes with every request, and is for this server only.
            raise ApiRefused(
                f"{self._where} sent us on to another server, {urlsplit(whole).hostname}",
                hint="look at what stands between this client and the server",
                status=answer.status,
            )
        return whole


def _forgotten(answer: Reply) -> bool:
    problem = problem_in(answer) if answer.status == 404 else None
    return problem is not None and problem["code"] == UNKNOWN_KEY
