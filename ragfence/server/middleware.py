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
    read_body,
    send_answer,
)
from ragfence.server.contract import Contract, StartedRequest
from ragfence.server.responses import HttpClaim, unexpected
from ragfence.server.route_templates import path_in, template_of
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

    fence        the fence; its tenant is part of every key's scope
    methods      what is fenced; the rest passes through
    paths        patterns (`/refunds`, `/v1/*`) of the paths that are fenced; all, unless given
    exclude      patterns of paths that are not
    principal    tells who asks, out of the connection; a digest of the Authorization header, unless given
    route        tells the template of a request; asked of the application's routes, unless given
    status_path  where a 202 is asked how far it is; None: nowhere

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
                f"{', '.join(safe)} changes nothing and needs no key", hint="leave it out of methods="
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
            answer = await self.contract.status(query, await self._who(scope), root=scope.get("root_path", ""))
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
        principal, template = await self._who(scope), self._route(scope)
        reading = self.contract.reading
        head = reading.head_of(scope, principal, template)
        asked: HttpClaim | Answer | None = reading.known(head, body)
        if asked is None:
            call = Call(
                method=scope["method"],
                path=scope["path"],
                route=template,
                query=scope.get("query_string", b"").decode("latin-1"),
                headers=headers_from(scope["headers"]),
                body=body,
                root=scope.get("root_path", ""),
            )
            asked = reading.checked(call, principal, head=head)
        begun = await self.contract.begin(asked)
        if isinstance(begun, Answer):
            await send_answer(send, begun)
        else:
            performance = RequestRun(self._app, scope, body, limit=self._limits.max_stored_bytes)
            await self._performed(begun, performance, scope, send)

    async def _performed(self, begun: StartedRequest | None, performance: RequestRun, scope: Scope, send: Send) -> None:
        try:
            try:
                answer = await self.contract.go_on(begun, performance.perform, performance.settle)
            except Exception:
                if begun is not None and not _handles_errors(scope):
                    # Whoever is outside sees that there is an answer, logs the error, and sends none of its own.
                    await send_answer(send, unexpected(headers_from(scope["headers"])))
                raise
            # Asked at once: otherwise it is a replay, a problem, or came too late for a client with little time.
            own = performance.is_the_answer
            await send_answer(send, answer)
        except BaseException:
            performance.forget()
            raise
        if own:
            performance.go_on(send)
            await performance.ended()
        else:
            performance.forget()

    async def _who(self, scope: Scope) -> str:
        told = self._principal(HTTPConnection(scope))
        who = await told if inspect.isawaitable(told) else told
        if not isinstance(who, str):
            raise TypeError(f"principal= must tell who asks as text, not as {type(who).__name__}")
        return who

    def _too_large(self) -> Answer:
        most = self._limits.max_body_bytes
        return refusal("VALIDATION.body_too_large", f"at most {most:,} bytes are taken").answer()


def _handles_errors(scope: Scope) -> bool:
    """Whether the application answers unhandled exceptions itself: it is asked outside of this middleware."""
    app = scope.get("app")
    handlers = getattr(app, "exception_handlers", {})
    return bool(getattr(app, "debug", False)) or 500 in handlers or Exception in handlers


def _authorization(connection: HTTPConnection) -> str:
    return principal_from(connection.headers.get("authorization", ""))


def _patterns(what: str, given: Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise ValidationError(f"{what}= takes a list of patterns, not one string", hint=f'{what}=["/refunds*"]')
    return tuple(given)
