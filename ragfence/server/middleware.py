"""`IdempotencyMiddleware`: the contract of `ragfence.server` on the writes of any Starlette or FastAPI application."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from ragfence._extras import needs_extra
from ragfence.errors import ValidationError
from ragfence.server.asgi import (
    App,
    BodyTooLarge,
    ClientGone,
    Receive,
    RequestRun,
    Scope,
    Send,
    path_in,
    read_body,
    send_answer,
    template_of,
)
from ragfence.server.contract import Contract, StartedRequest
from ragfence.server.responses import HttpClaim, unexpected
from ragfence.wire.headers import principal_from
from ragfence.wire.messages import Answer, Call, headers_from
from ragfence.wire.problems import refusal

with needs_extra("api", "IdempotencyMiddleware"):
    from starlette.requests import HTTPConnection

if TYPE_CHECKING:
    from ragfence.fence import Fence

WRITES: Final = ("POST", "PUT", "PATCH", "DELETE")
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "CONNECT"})

Principal = Callable[[HTTPConnection], "str | Awaitable[str]"]


class IdempotencyMiddleware:
    """One effect per `Idempotency-Key`, and the same answer for every retry.

    Args:
        app: The application.
        fence: Its tenant is part of every key's scope.
        methods: Methods that are fenced; requests with others pass through.
        paths: Patterns (`/refunds`, `/v1/*`) of the paths that are fenced. Default: all.
        exclude: Patterns of paths that are not fenced.
        principal: Returns the caller of a connection. Default: a digest of the Authorization header.
        route: Returns the template of a request. Default: that of the application's routes.
        status_path: The Location of a 202; None: it has none.

    >>> app.add_middleware(IdempotencyMiddleware, fence=ragfence.open())  # doctest: +SKIP
    """

    def __init__(
        self,
        app: App,
        fence: Fence,
        *,
        methods: Iterable[str] = WRITES,
        paths: Iterable[str] | None = None,
        exclude: Iterable[str] = (),
        principal: Principal | None = None,
        route: Callable[[Scope], str] = template_of,
        status_path: str | None = "/idempotency-status",
    ) -> None:
        self._app = app
        self._methods = frozenset(method.upper() for method in methods)
        if safe := sorted(self._methods & SAFE):
            raise ValidationError(
                f"{', '.join(safe)}: a method that changes nothing needs no key", hint="leave it out of methods="
            )
        self._paths = None if paths is None else _patterns("paths", paths)
        self._exclude = _patterns("exclude", exclude)
        self._principal = principal or _authorization
        self._route = route
        self._status_path = status_path or ""
        self._limits = fence.policy.http
        self.contract = Contract(fence, status_path=self._status_path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._is_fenced(scope):
            await self._fenced(scope, receive, send)
        elif self._status_path and scope["method"] == "GET" and path_in(scope) == self._status_path:
            query = scope.get("query_string", b"").decode("latin-1")
            answer = await self.contract.status(query, await self._caller(scope), root=scope.get("root_path", ""))
            await send_answer(send, answer)
        else:
            await self._app(scope, receive, send)

    def _is_fenced(self, scope: Scope) -> bool:
        path = path_in(scope)
        if scope["method"] not in self._methods or any(fnmatchcase(path, pattern) for pattern in self._exclude):
            return False
        return self._paths is None or any(fnmatchcase(path, pattern) for pattern in self._paths)

    async def _fenced(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
            if length.isdigit() and int(length[:20]) > self._limits.max_body_bytes:
                raise BodyTooLarge
            body = await read_body(receive, limit=self._limits.max_body_bytes)
        except BodyTooLarge:
            await send_answer(send, self._too_large())
            return
        except ClientGone:
            return
        principal, template = await self._caller(scope), self._route(scope)
        reader = self.contract.reader
        head = reader.head_of(scope, principal, template)
        claim: HttpClaim | Answer | None = reader.known(head, body)
        if claim is None:
            call = Call(
                method=scope["method"],
                path=scope["path"],
                route=template,
                query=scope.get("query_string", b"").decode("latin-1"),
                headers=headers_from(scope["headers"]),
                body=body,
                root=scope.get("root_path", ""),
            )
            claim = reader.checked(call, principal, head=head)
        started = await self.contract.start(claim)
        if isinstance(started, Answer):
            await send_answer(send, started)
        else:
            run = RequestRun(self._app, scope, body, limit=self._limits.max_stored_bytes)
            await self._execute(started, run, scope, send)

    async def _execute(self, started: StartedRequest | None, run: RequestRun, scope: Scope, send: Send) -> None:
        try:
            try:
                answer = await self.contract.execute(started, run.perform, run.settle)
            except Exception:
                if started is not None and not _handles_errors(scope):
                    # Middleware outside of this one sees that there is an answer: it logs the error and sends none.
                    await send_answer(send, unexpected(headers_from(scope["headers"])))
                raise
            # Read now: otherwise the answer is a replay, a problem, or came too late for a client with little time.
            own = run.is_the_answer
            await send_answer(send, answer)
        except BaseException:
            run.discard()
            raise
        if own:
            run.send_rest(send)
            await run.wait()
        else:
            run.discard()

    async def _caller(self, scope: Scope) -> str:
        found = self._principal(HTTPConnection(scope))
        principal = await found if inspect.isawaitable(found) else found
        if not isinstance(principal, str):
            raise TypeError(f"principal= must return text, not {type(principal).__name__}")
        return principal

    def _too_large(self) -> Answer:
        most = self._limits.max_body_bytes
        return refusal("VALIDATION.body_too_large", f"at most {most:,} bytes are accepted").answer()


def _handles_errors(scope: Scope) -> bool:
    """Returns whether the application answers unhandled exceptions itself, outside of this middleware."""
    app = scope.get("app")
    handlers = getattr(app, "exception_handlers", {})
    return bool(getattr(app, "debug", False)) or 500 in handlers or Exception in handlers


def _authorization(connection: HTTPConnection) -> str:
    return principal_from(connection.headers.get("authorization", ""))


def _patterns(what: str, given: Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise ValidationError(f"{what}= takes a list of patterns, not one string", hint=f'{what}=["/refunds*"]')
    return tuple(given)
