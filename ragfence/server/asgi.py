"""An ASGI application that performs one request, with its answer held back until the contract has settled it.

The application runs in a task of its own. Its answer is collected up to a limit; the message that completes it (or goes
beyond the limit) is not acknowledged before the answer is settled and sent, so that background tasks, which Starlette
runs after it, run only for an attempt whose answer was given: once where it is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from ragfence.wire.messages import Answer, headers_from

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logging.getLogger("ragfence.server")
_running: set[asyncio.Task[None]] = set()


class BodyTooLarge(Exception):
    pass


class ClientGone(Exception):
    """before its request was complete: nothing was claimed"""


class Superseded(Exception):
    """Raised into an application whose answer is not the one that is given."""


async def read_body(receive: Receive, *, limit: int | None = None) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        piece = message.get("body", b"")
        size += len(piece)
        if limit is not None and size > limit:
            raise BodyTooLarge
        if not message.get("more_body", False):
            return b"".join((*pieces, piece)) if pieces else bytes(piece)
        pieces.append(piece)


async def send_answer(send: Send, answer: Answer) -> None:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": not answer.complete})


class RequestRun:
    """One run of the application, if the contract asks for it."""

    def __init__(self, app: App, scope: Scope, body: bytes, *, limit: int) -> None:
        self._app = app
        # Without extensions the answer comes in two kinds of messages, which can be kept. In place: what is outside of
        # this middleware reads out of the scope what the router has put there.
        scope["extensions"] = {}
        self._scope = scope
        self._body: bytes | None = body
        self._limit = limit
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._size = 0
        self._task: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._answered: asyncio.Future[Answer] = loop.create_future()
        self._settled: asyncio.Future[bool] = loop.create_future()
        self._client: asyncio.Future[Send | None] = loop.create_future()
        self._over = asyncio.Event()

    async def perform(self) -> Answer:
        """The answer of the application, or its beginning; what the application raised before it had one."""
        self._task = task = asyncio.create_task(self._run())
        _running.add(task)
        task.add_done_callback(_running.discard)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(self._answered)
        except asyncio.CancelledError:  # the server ends: so does the work, and its key is given back
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
            raise

    def settle(self, kept: bool) -> None:
        if not self._settled.done():
            self._settled.set_result(kept)

    def go_on(self, send: Send | None) -> None:
        """What the application still sends goes there; to nobody, if the client is gone."""
        if not self._client.done():
            self._client.set_result(send)

    async def ended(self) -> None:
        """Once the background tasks are through. A client that goes meanwhile does not end them."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def forget(self) -> None:
        """Nobody will ask how it ends."""
        self.go_on(None)
        if self._task is None:
            return
        if not self._task.done():
            self._task.add_done_callback(_tell)
        elif not self._task.cancelled():
            self._task.exception()  # looked at, or asyncio complains that nobody did

    @property
    def is_the_answer(self) -> bool:
        return self._settled.done() and self._settled.result()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Whoever waits for an answer of an application that has ended waits no longer."""
        if self._answered.done():
            return
        if task.cancelled():
            self._answered.cancel()
        else:
            self._answered.set_exception(task.exception() or RuntimeError("the application ended without an answer"))
            self._answered.exception()  # looked at, in case that nobody waits any more

    async def _run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        # A client that is gone changes nothing: the work is finished, and kept for its retry.
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._answered.done():
            await self._pass_on(message)
        elif message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            piece = bytes(message.get("body", b""))
            self._pieces.append(piece)
            self._size += len(piece)
            complete = not message.get("more_body", False)
            if complete or self._size > self._limit:
                await self._give(complete=complete)

    async def _give(self, *, complete: bool) -> None:
        body, self._pieces = b"".join(self._pieces), []
        headers = headers_from(self._headers)
        self._answered.set_result(Answer(self._status, headers, body, complete=complete))
        await self._may_go_on()
        if complete:
            self._over.set()

    async def _may_go_on(self) -> Send | None:
        if not await asyncio.shield(self._settled):
            raise Superseded
        return await asyncio.shield(self._client)

    async def _pass_on(self, message: Message) -> None:
        send = await self._may_go_on()
        if message["type"] != "http.response.body":
            return
        if send is not None:
            await send(message)
        if not message.get("more_body", False):
            self._over.set()


def _tell(task: asyncio.Task[None]) -> None:
    if task.cancelled() or (error := task.exception()) is None or isinstance(error, Superseded):
        return
    _log.error("an application failed after its client had stopped waiting", exc_info=error)
