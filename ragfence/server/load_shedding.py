"""Backpressure: how many requests a process accepts at a time, and how long it waits for slow clients. Pure ASGI.

- At most `max_concurrent` requests are in progress. From `high_watermark` of that on, new writes are refused (503,
  before their body is read), which leaves room for reads: clients can still query the state of their work.
- A request whose body is still arriving is not in progress: it is counted separately, and limited by `fair_shares`.
- A body is refused by its Content-Length (413), or as soon as more bytes have arrived than are accepted.
- A body has `body_timeout_s` to one and a half times that, and one second more for every `min_rate` bytes that arrived
  (408). The time of the
  application does not count.
- `/healthz`, `/readyz` and `/metrics` are always answered.

Headers that never arrive, and clients that do not read their answers, are handled by `connections`: an application
cannot see them. Fair shares for tenants are in `fair_shares`, limits over time in `quotas`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from ragfence.server.asgi import App, Message, Receive, Scope, Send, path_in, send_answer
from ragfence.server.responses import unexpected
from ragfence.wire.messages import Answer, headers_from
from ragfence.wire.problems import Problem, refusal

ALWAYS: Final = ("/healthz", "/readyz", "/metrics")
BATCHES: Final = ("/v1/documents:batch",)
READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
STOPPING: Final = "ragfence.stopping"
"""In the state of the lifespan: set by the server when it stops."""
EXCHANGE: Final = "ragfence.exchange"
"""In the state of a request: its `BoundedExchange`, by which inner layers can refuse it."""
TIMEOUT_SPREAD: Final = 0.5
"""By how much the time for a body is longer at most."""
LINGER_S: Final = 2.0
LINGER_BYTES: Final = 8 << 20
SMALL_BODY: Final = 16 << 10
"""A body of this size is discarded by the server; for a larger one the connection is closed."""


class LoadShedding:
    """Protects an application from more work than it can do.

    Args:
        app: The application.
        max_concurrent: Largest number of requests in progress in this process.
        high_watermark: Share of that number from which on writes are refused.
        max_body_bytes: Largest body of a request.
        max_batch_bytes: Largest body of a request to one of `batches`.
        body_timeout_s: Time for a body; one second more for every `min_rate` bytes.
        min_rate: Bytes per second.
        max_headers: Largest number of headers.
        max_header_bytes: Largest size of all headers and the address.
        batches: Paths with larger bodies.
        always: Paths that are always answered.
        abandoned: Returns the number of requests in progress that no client waits for.
    """

    def __init__(
        self,
        app: App,
        *,
        max_concurrent: int = 256,
        high_watermark: float = 0.8,
        max_body_bytes: int = 4 << 20,
        max_batch_bytes: int = 64 << 20,
        body_timeout_s: float = 10.0,
        min_rate: int = 16 << 10,
        max_headers: int = 100,
        max_header_bytes: int = 32 << 10,
        batches: Iterable[str] = BATCHES,
        always: Iterable[str] = ALWAYS,
        abandoned: Callable[[], int] = lambda: 0,
    ) -> None:
        self._app = app
        self._most = max_concurrent
        self._most_writes = max(1, int(max_concurrent * high_watermark))
        self._max_body = max_body_bytes
        self._max_batch = max_batch_bytes
        self._body_timeout_s = body_timeout_s
        self._min_rate = min_rate
        self._max_headers = max_headers
        self._max_header_bytes = max_header_bytes
        self._batches = frozenset(batches)
        self._always = frozenset(always)
        self._abandoned = abandoned
        self._state: dict[str, Any] = {}
        self.in_progress = 0
        """Requests in progress."""
        self.arriving = 0
        """Requests whose body is still arriving."""
        self.shed = 0
        """Requests refused so far because the server was overloaded."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._state = scope.get("state", self._state)  # of the server, which changes it later
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = path_in(scope)
        if path in self._always:
            if path == "/readyz" and self._state.get(STOPPING):
                await send_answer(send, _stopping().answer())
            else:
                await self._app(scope, receive, send)
            return
        limit = self._max_batch if path in self._batches else self._max_body
        if (problem := self._refusal(scope, limit)) is not None:
            await _refuse(problem, scope, receive, send)
            return
        await self._execute(scope, receive, send, limit)

    def _refusal(self, scope: Scope, limit: int) -> Problem | None:
        """Returns why the request is refused before its body has arrived, if it is."""
        headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        size += len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
        if len(headers) > self._max_headers or size > self._max_header_bytes:
            return headers_too_large(
                f"at most {self._max_headers} headers, {self._max_header_bytes:,} bytes with the address, are accepted"
            )
        length = body_length(scope)
        if length is not None and length > limit:
            return _too_large(limit)
        return self._overload(scope)

    def _overload(self, scope: Scope) -> Problem | None:
        most = self._most if scope["method"] in READS else self._most_writes
        if self.in_progress + self._abandoned() < most:
            return None
        self.shed += 1
        # Random, or clients that were refused together return together.
        return refusal("DEPENDENCY.overloaded", retry_after=random.randint(1, 4))

    async def _execute(self, scope: Scope, receive: Receive, send: Send, limit: int) -> None:
        # Random, or bodies that began together are all refused in the same moment and hold up everyone else.
        timeout_s = self._body_timeout_s * random.uniform(1, 1 + TIMEOUT_SPREAD)
        exchange = BoundedExchange(receive, send, limit=limit, timeout_s=timeout_s, min_rate=self._min_rate)
        is_arriving = body_length(scope) != 0

        def count(amount: int) -> None:
            if is_arriving:
                self.arriving += amount
            else:
                self.in_progress += amount

        def arrived() -> Problem | None:
            nonlocal is_arriving
            if is_arriving:
                if (problem := self._overload(scope)) is not None:
                    return problem
                count(-1)
                is_arriving = False
                count(1)
            return None

        exchange.arrived = arrived
        scope.setdefault("state", {})[EXCHANGE] = exchange
        count(1)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            # Work that did not end within the grace period of a shutdown: its key was released.
            if exchange.is_started or not self._state.get(STOPPING):
                raise
            await send_answer(send, _stopping().answer({"connection": "close"}))
        except Exception:
            if not exchange.is_cut_off:  # otherwise the application only did not expect to lose its client
                if not exchange.is_started:  # a layer outside of the routes has failed
                    await send_answer(send, unexpected(headers_from(scope["headers"])))
                raise
        finally:
            count(-1)
        if exchange.problem is not None and not exchange.is_started:
            await _refuse(exchange.problem, scope, receive, send)


class BoundedExchange:
    """One request and its answer, with a body that is counted and timed.

    An application whose body is refused sees that its client disconnects, and its answer is not sent.
    """

    def __init__(self, receive: Receive, send: Send, *, limit: int, timeout_s: float, min_rate: int) -> None:
        self._receive = receive
        self._send = send
        self._limit = limit
        self._timeout_s = timeout_s
        self._min_rate = min_rate
        self._size = 0
        self._waited_s = 0.0
        self._is_complete = False
        self.arrived: Callable[[], Problem | None] = lambda: None
        """Called when the body is complete; may refuse the request."""
        self.is_started = False
        """Whether an answer is being sent."""
        self.problem: Problem | None = None
        self.is_cut_off = False
        """Whether the application was told that its client had disconnected before the body was complete."""

    async def receive(self) -> Message:
        if self.problem is not None:
            return {"type": "http.disconnect"}
        if self._is_complete:
            return await self._receive()
        began = time.monotonic()
        left_s = self._timeout_s + self._size / self._min_rate - self._waited_s
        try:
            async with asyncio.timeout(left_s):
                message = await self._receive()
        except TimeoutError:
            return self.refuse(
                refusal(
                    "VALIDATION.slow_client",
                    f"only {self._size:,} bytes of the body arrived in {self._timeout_s:g} s, plus 1 s for every "
                    f"{self._min_rate:,} bytes",
                )
            )
        self._waited_s += time.monotonic() - began
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)
            if self._size > self._limit:
                return self.refuse(_too_large(self._limit))
            if self._is_complete and (problem := self.arrived()) is not None:
                return self.refuse(problem)
        else:
            self.is_cut_off = True
        return message

    def refuse(self, problem: Problem) -> Message:
        """Answers the request with this problem, whatever the application does after this."""
        self.problem, self.is_cut_off = problem, True
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.problem is None or self.is_started:
            self.is_started = True
            await self._send(message)


async def _refuse(problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without reading the body, in a way that a client which is still sending it sees the answer.

    A connection that is closed with unread bytes is reset, and the answer may be lost. So the end of the answer is held
    back for a moment, while the client notices.
    """
    length = body_length(scope)
    if length is not None and length <= SMALL_BODY:
        await send_answer(send, problem.answer())
        return
    answer = problem.answer({"connection": "close"})
    await send_answer(send, Answer(answer.status, answer.headers, answer.body, complete=False))
    discarded = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while discarded < LINGER_BYTES:
                message = await receive()
                discarded += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    break
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def headers_too_large(detail: str) -> Problem:
    return refusal("VALIDATION.headers_too_large", detail)


def _too_large(limit: int) -> Problem:
    return refusal("VALIDATION.body_too_large", f"at most {limit:,} bytes are accepted")


def _stopping() -> Problem:
    return refusal(
        "DEPENDENCY.overloaded",
        "this server is stopping",
        hint="send the same request again, with the same key: another server accepts it, or this one after its restart",
        retry_after=random.randint(1, 4),
    )


def body_length(scope: Scope) -> int | None:
    """Returns the length of the body, or None if it is unknown. The server has checked that the header is a number."""
    length = b"0"
    for name, value in scope["headers"]:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            length = value.strip()
    return int(length[:20]) if length.isdigit() else 0
