"""Authentication: every path except a few open ones requires an API key with a scope that `scopes.ROUTES` names.

This is decided in one place, before any route is looked up: a route that is not listed cannot be reached, and a caller
without a key cannot find out which paths exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ragfence.engine.aio import run_blocking
from ragfence.engine.requests import acting_key
from ragfence.errors import RagfenceError
from ragfence.server.apikeys import UNKNOWN, ApiCaller, CachedKeys, Denial, parse_token
from ragfence.server.asgi import App, Message, Receive, Scope, Send, path_in, send_answer
from ragfence.server.quotas import Quotas
from ragfence.server.scopes import missing_scope, scopes_for
from ragfence.server.tenant_pool import TenantPool
from ragfence.server.throttle import FailureThrottle, address_of
from ragfence.wire.messages import Answer
from ragfence.wire.problems import problem_of, refusal

OPEN: Final = frozenset({"/healthz", "/readyz", "/openapi.json", "/docs", "/metrics"})
"""Paths that need no key: they show nothing of a tenant. /metrics has a rule of its own."""


class AuthMiddleware:
    """Authenticates requests, and checks scopes and quotas.

    Args:
        app: The application.
        keys: The API keys.
        sessions: The sessions of the tenants.
        quotas: The quotas of the tenants.
        everybody: The caller of all requests, where no key is required (--insecure-dev).
        throttle: Slows down addresses that send wrong credentials.
        on_refused: Called with the reason of each refusal.
        on_served: Called with the caller of each request that is served.
    """

    def __init__(
        self,
        app: App,
        *,
        keys: CachedKeys,
        sessions: TenantPool,
        quotas: Quotas,
        everybody: ApiCaller | None = None,
        throttle: FailureThrottle | None = None,
        on_refused: Callable[[str], None] = lambda reason: None,
        on_served: Callable[[ApiCaller], None] = lambda caller: None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._sessions = sessions
        self._quotas = quotas
        self._everybody = everybody
        self._throttle = throttle or FailureThrottle()
        self._on_refused = on_refused
        self._on_served = on_served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_in(scope) in OPEN:
            await self._app(scope, receive, send)
            return
        caller = await self._caller(scope)
        if isinstance(caller, Answer):
            await send_answer(send, caller)
            return
        needed = scopes_for(scope["method"], path_in(scope))
        if needed is None:
            # Even if the router knows the path: `scopes.ROUTES` names no scope for it.
            await send_answer(send, refusal("VALIDATION.not_found").answer())
            return
        if (forbidden := missing_scope(caller.scopes, needed)) is not None:
            self._on_refused("forbidden")
            self._throttle.fail(address_of(scope.get("client")), "missing scope", caller.key_id, spend=False)
            await send_answer(send, forbidden.answer())
            return
        refused, headers = await self._quotas.spend(caller.tenant)
        if refused is not None:
            await send_answer(send, refused)
            return
        self._on_served(caller)
        acting = acting_key.set(caller.key_id)
        try:
            with await self._sessions.of(caller.tenant) as session:
                state = scope.setdefault("state", {})
                state["caller"], state["session"] = caller, session
                await self._app(scope, receive, _with_headers(send, headers) if headers else send)
        except RagfenceError as error:  # while the session is opened: errors of a route are answered there
            await send_answer(send, problem_of(error).answer())
        finally:
            acting_key.reset(acting)

    async def _caller(self, scope: Scope) -> ApiCaller | Answer:
        if self._everybody is not None:
            return self._everybody
        token = bearer_of(scope)
        if not token:
            self._on_refused("missing")
            return _unauthorised("AUTH.missing")
        found = self._keys.known(token)
        address = address_of(scope.get("client"))
        if found is UNKNOWN:
            if (wait_s := self._throttle.wait_s(address)) and not self._keys.was_accepted(token):
                return self._throttled(address, wait_s)
            try:
                found = await run_blocking(self._keys.check, token)
            except RagfenceError as error:
                return problem_of(error).answer()
        if isinstance(found, ApiCaller):
            return found
        if found is Denial.INVALID and (wait_s := self._throttle.wait_s(address)):
            return self._throttled(address, wait_s)
        self._on_refused(found.value)
        # A caller with the secret of an expired or revoked key is not guessing.
        parts = parse_token(token)
        self._throttle.fail(address, found.value, parts.key_id if parts else "", spend=found is Denial.INVALID)
        return _unauthorised(f"AUTH.{found.value}")

    def _throttled(self, address: str, wait_s: int) -> Answer:
        self._on_refused("throttled")
        self._throttle.fail(address, "throttled", spend=False)
        detail = "this address sent too many wrong credentials"
        return refusal("RATE_LIMIT.credentials", detail, retry_after=wait_s).answer()


def bearer_of(scope: Scope) -> str:
    """Returns the token of the Authorization header; empty if there is none, several, or another scheme."""
    given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    if len(given) != 1:
        return ""
    scheme, _, token = given[0].decode("latin-1").strip(" \t").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _unauthorised(code: str, detail: str = "") -> Answer:
    return refusal(code, detail).answer({"www-authenticate": 'Bearer realm="ragfence"'})


def _with_headers(send: Send, headers: tuple[tuple[str, str], ...]) -> Send:
    more = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *more]
        await send(message)

    return send_with_headers
