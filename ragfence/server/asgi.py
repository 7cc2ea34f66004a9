"""ASGI: paths and route templates of a request, and an application that executes one request for the contract.

The application runs in a task of its own, and its answer is held back until the contract has settled it. The answer is
collected up to a limit; the message that completes it (or exceeds the limit) is not acknowledged before the answer is
settled and sent. So background tasks, which Starlette runs after that message, run only for an attempt whose answer was
given: once, if it is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final, TypeAlias

from ragfence.wire.messages import Answer, headers_from

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_PORT: Final = re.compile(r":\d*$")
_log = logging.getLogger("ragfence.server")
_running: set[asyncio.Task[None]] = set()


class BodyTooLarge(Exception):
    pass


class ClientGone(Exception):
    """The client disconnected before its request was complete: nothing was claimed."""


class Superseded(Exception):
    """Raised into an application whose answer is not the one that is sent."""


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
    """One run of the application, if the contract executes the request."""

    def __init__(self, app: App, scope: Scope, body: bytes, *, limit: int) -> None:
        self._app = app
        # Without extensions the answer consists of two kinds of messages, which can be stored. In place, because
        # middleware outside of this one reads from the scope what the router has put there.
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
        self._is_complete = asyncio.Event()

    async def perform(self) -> Answer:
        """Returns the answer of the application, or its beginning. Raises what the application raised before it."""
        self._task = task = asyncio.create_task(self._run())
        _running.add(task)
        task.add_done_callback(_running.discard)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(self._answered)
        except asyncio.CancelledError:  # the server stops: so does the work, and its key is released
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
            raise

    def settle(self, own: bool) -> None:
        if not self._settled.done():
            self._settled.set_result(own)

    def send_rest(self, send: Send | None) -> None:
        """Sends the rest of what the application sends; None discards it, because the client has disconnected."""
        if not self._client.done():
            self._client.set_result(send)

    async def wait(self) -> None:
        """Waits for the background tasks. A client that disconnects meanwhile does not cancel them."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def discard(self) -> None:
        """Lets the application end without a client; its errors are logged."""
        self.send_rest(None)
        if self._task is None:
            return
        if not self._task.done():
            self._task.add_done_callback(_log_failure)
        elif not self._task.cancelled():
            self._task.exception()  # retrieved, or asyncio logs that it never was

    @property
    def is_the_answer(self) -> bool:
        return self._settled.done() and self._settled.result()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Ends the wait for the answer of an application that has ended without one."""
        if self._answered.done():
            return
        if task.cancelled():
            self._answered.cancel()
        else:
            self._answered.set_exception(task.exception() or RuntimeError("the application ended without an answer"))
            self._answered.exception()  # retrieved, in case no one waits any more

    async def _run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        # The application does not see that a client disconnects: its answer is stored for the retry.
        await self._is_complete.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._answered.done():
            await self._forward(message)
        elif message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            piece = bytes(message.get("body", b""))
            self._pieces.append(piece)
            self._size += len(piece)
            complete = not message.get("more_body", False)
            if complete or self._size > self._limit:
                await self._answer(complete=complete)

    async def _answer(self, *, complete: bool) -> None:
        body, self._pieces = b"".join(self._pieces), []
        headers = headers_from(self._headers)
        self._answered.set_result(Answer(self._status, headers, body, complete=complete))
        await self._wait_for_client()
        if complete:
            self._is_complete.set()

    async def _wait_for_client(self) -> Send | None:
        if not await asyncio.shield(self._settled):
            raise Superseded
        return await asyncio.shield(self._client)

    async def _forward(self, message: Message) -> None:
        send = await self._wait_for_client()
        if message["type"] != "http.response.body":
            return
        if send is not None:
            await send(message)
        if not message.get("more_body", False):
            self._is_complete.set()


def _log_failure(task: asyncio.Task[None]) -> None:
    if task.cancelled() or (error := task.exception()) is None or isinstance(error, Superseded):
        return
    _log.error("an application failed after its client had stopped waiting", exc_info=error)


def path_in(scope: Scope) -> str:
    """Returns the path as the application knows it: without the prefix under which it is mounted."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def template_of(scope: Scope) -> str:
    """Returns the template that a request will be matched to (`/refunds/{id}`), before the router has run.

    Starlette's routes say which one matches; FastAPI keeps included routers as branches, which are searched. A request
    without a template is scoped by its path, which is safe: the same key on two paths is then two operations instead of
    a conflict. The template has the prefix of every mount, and the host where routes belong to one (`Host`): the same
    path on another host is another operation.
    """
    routes = getattr(scope.get("app"), "routes", None)
    return _found(routes, scope, "") if routes else ""


def _found(routes: Iterable[Any], scope: Scope, prefix: str) -> str:
    from starlette.routing import Host, Match

    for route in routes:
        branches = getattr(route, "effective_candidates", None)
        if callable(branches):
            if inner := _found(branches(), scope, prefix):
                return inner
            continue
        try:
            match, child = route.matches(scope)
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # a route of another framework
        if match is not Match.FULL:
            continue
        if isinstance(route, Host):
            # The host of the request, since `{team}.example` is another host for every team.
            here = f"{prefix}//{_host_in(scope)}"
            return _found(route.routes, {**scope, **child}, here) or here + path_in(scope)
        here = prefix + str(getattr(getattr(route, "starlette_route", None) or route, "path", ""))
        below = getattr(route, "routes", None)
        # A mount: the mounted application has the rest.
        return _found(below, {**scope, **child}, here) or here if below else here
    return ""


def _host_in(scope: Scope) -> str:
    host = next((value for name, value in scope["headers"] if name == b"host"), b"")
    return _PORT.sub("", host.decode("latin-1").lower())
