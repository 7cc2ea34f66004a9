"""Backpressure: what a process takes on at once, and how long it waits for slow clients. Pure ASGI, outermost of all.

- At most `max_concurrent` requests are under way. New writes are refused (503, before their body is read) from
  `high_watermark` of that on, so there is room left for reads: who asks how far their work is needs no new work.
- A request whose body is still arriving is not under way: it is counted apart, and limited by `shares`.
- A body is refused by its Content-Length (413), or as soon as more has arrived than is taken.
- A body has `body_timeout_s`, and a second more for every `min_rate` bytes that came (408). The application's own time
  is not counted.
- `/healthz`, `/readyz` and `/metrics` are answered however much there is to do.

Headers that never come, and clients that do not read their answers, are the business of `serving`: no application can
see them. A fair share for every tenant comes from `shares`, and a limit over time from `quotas`.
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
"""in the state of the lifespan: set by the server when it is told to stop"""
EXCHANGE: Final = "ragfence.exchange"
"""in the state of a request: the `BoundedExchange`, by which what stands inside can refuse it"""
LINGER_S: Final = 2.0
LINGER_BYTES: Final = 8 << 20
SMALL_BODY: Final = 16 << 10
"""is thrown away by the server without anybody noticing; for a larger one the connection is closed"""


class LoadShedding:
    """
    app              what is protected
    max_concurrent   requests under way in this process, at most
    high_watermark   the share of them from which on writes are refused
    max_body_bytes   of a request; `max_batch_bytes` of one to `batches`
    body_timeout_s   for the first byte of a body as for its last, and a second more for every `min_rate` bytes
    max_headers      of a request, and `max_header_bytes` of all of them with the address
    beside           how much is under way that no request waits for any more
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
        beside: Callable[[], int] = lambda: 0,
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
        self._beside = beside
        self._state: dict[str, Any] = {}
        self.underway = 0
        """requests that are being answered right now"""
        self.arriving = 0
        """requests whose body is still arriving"""
        self.shed = 0
        """requests that were refused because there was too much to do, so far"""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._state = scope.get("state", self._state)  # the server's own, which it changes later on
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
        await self._performed(scope, receive, send, limit)

    def _refusal(self, scope: Scope, limit: int) -> Problem | None:
        """By what is known before the body has come."""
        headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        size += len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
        if len(headers) > self._max_headers or size > self._max_header_bytes:
            return headers_too_large(
                f"at most {self._max_headers} headers, of {self._max_header_bytes:,} bytes with the address, are taken"
            )
        length = body_length(scope)
        if length is not None and length > limit:
            return _too_large(limit)
        return self._overload(scope)

    def _overload(self, scope: Scope) -> Problem | None:
        most = self._most if scope["method"] in READS else self._most_writes
        if self.underway + self._beside() < most:
            return None
        self.shed += 1
        # Spread, or all who were refused together come back together.
        return refusal("DEPENDENCY.overloaded", retry_after=random.randint(1, 4))

    async def _performed(self, scope: Scope, receive: Receive, send: Send, limit: int) -> None:
        exchange = BoundedExchange(receive, send, limit=limit, timeout_s=self._body_timeout_s, min_rate=self._min_rate)
        arrives = body_length(scope) != 0

        def count(amount: int) -> None:
            if arrives:
                self.arriving += amount
            else:
                self.underway += amount

        def arrived() -> Problem | None:
            nonlocal arrives
            if arrives:
                if (problem := self._overload(scope)) is not None:
                    return problem
                count(-1)
                arrives = False
                count(1)
            return None

        exchange.arrived = arrived
        scope.setdefault("state", {})[EXCHANGE] = exchange
        count(1)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            # Work that did not end within the grace of a shutdown: its key was given back.
            if exchange.started or not self._state.get(STOPPING):
                raise
            await send_answer(send, _stopping().answer({"connection": "close"}))
        except Exception:
            if not exchange.cut_off:  # else it only did not expect to lose its client
                if not exchange.started:  # what stands before the routes has failed, and is told as one of them would
                    await send_answer(send, unexpected(headers_from(scope["headers"])))
                raise
        finally:
            count(-1)
        if exchange.problem is not None and not exchange.started:
            await _refuse(exchange.problem, scope, receive, send)


class BoundedExchange:
    """One request and its answer, with a body that is counted and timed.

    An application whose body is refused is told that its client has gone, and what it answers to that is not sent.
    """

    def __init__(self, receive: Receive, send: Send, *, limit: int, timeout_s: float, min_rate: int) -> None:
        self._receive = receive
        self._send = send
        self._limit = limit
        self._timeout_s = timeout_s
        self._min_rate = min_rate
        self._size = 0
        self._waited_s = 0.0
        self._whole = False
        self.arrived: Callable[[], Problem | None] = lambda: None
        """is told that the body is whole, and may refuse it"""
        self.started = False
        """an answer is on its way"""
        self.problem: Problem | None = None
        self.cut_off = False
        """the application was told that its client had gone, before it had the whole body"""

    async def receive(self) -> Message:
        if self.problem is not None:
            return {"type": "http.disconnect"}
        if self._whole:
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
                    f"{self._size:,} bytes of the body came, too slowly: {self._timeout_s:g} s are given, and one more "
                    f"for every {self._min_rate:,} bytes",
                )
            )
        self._waited_s += time.monotonic() - began
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            self._whole = not message.get("more_body", False)
            if self._size > self._limit:
                return self.refuse(_too_large(self._limit))
            if self._whole and (problem := self.arrived()) is not None:
                return self.refuse(problem)
        else:
            self.cut_off = True
        return message

    def refuse(self, problem: Problem) -> Message:
        """Answers the request with this problem, whatever the application does from now on."""
        self.problem, self.cut_off = problem, True
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.problem is None or self.started:
            self.started = True
            await self._send(message)


async def _refuse(problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
    """Without reading the body; but a client that is still sending it must get to see the answer.

    A connection that is closed with unread bytes is reset, and the answer may be lost with it. So the end of the answer
    is held back while the client notices, for a moment.
    """
    length = body_length(scope)
    if length is not None and length <= SMALL_BODY:
        await send_answer(send, problem.answer())
        return
    answer = problem.answer({"connection": "close"})
    await send_answer(send, Answer(answer.status, answer.headers, answer.body, complete=False))
    thrown_away = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while thrown_away < LINGER_BYTES:
                message = await receive()
                thrown_away += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    break
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def headers_too_large(detail: str) -> Problem:
    return refusal("VALIDATION.headers_too_large", detail)


def _too_large(limit: int) -> Problem:
    return refusal("VALIDATION.body_too_large", f"at most {limit:,} bytes are taken")


def _stopping() -> Problem:
    return refusal(
        "DEPENDENCY.overloaded",
        "this server is being stopped",
        hint="send the same request again, with the same key: another server takes it, or this one when it is back",
        retry_after=random.randint(1, 4),
    )


def body_length(scope: Scope) -> int | None:
    """Of the body; None if nobody knows. The server has seen to it that the header is a number."""
    length = b"0"
    for name, value in scope["headers"]:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            length = value.strip()
    return int(length[:20]) if length.isdigit() else 0
