"""Who may pass: every address but the few open ones needs an API key, with a scope that `scopes.ROUTES` names for it.

Decided here, in one place and before any route is looked up: a route that somebody forgets to list cannot be reached,
and a stranger cannot even learn which addresses there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ragfence.engine.aio import run_blocking
from ragfence.engine.requests import acting_key
from ragfence.errors import RagfenceError
from ragfence.server.apikeys import UNKNOWN, ApiCaller, CachedKeys, Denial, parsed
from ragfence.server.asgi import App, Message, Receive, Scope, Send, path_in, send_answer
from ragfence.server.quotas import Quotas
from ragfence.server.scopes import missing_scope, scopes_for
from ragfence.server.tenant_pool import TenantPool
from ragfence.server.throttle import FailureThrottle, address_of
from ragfence.wire.messages import Answer
from ragfence.wire.problems import problem_of, refusal

OPEN: Final = frozenset({"/healthz", "/readyz", "/openapi.json", "/docs", "/metrics"})
"""what answers without a key: nothing in it is of a tenant; /metrics has a rule of its own"""


class AuthMiddleware:
    """`everybody`: who asks, where nobody needs a key (--insecure-dev). `refused` is called with the reason of each
    refusal, to be counted; `used` with whom each request is served for."""

    def __init__(
        self,
        app: App,
        *,
        keys: CachedKeys,
        sessions: TenantPool,
        quotas: Quotas,
        everybody: ApiCaller | None = None,
        throttle: FailureThrottle | None = None,
        refused: Callable[[str], None] = lambda reason: None,
        used: Callable[[ApiCaller], None] = lambda caller: None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._sessions = sessions
        self._quotas = quotas
        self._everybody = everybody
        self._throttle = throttle or FailureThrottle()
        self._refused = refused
        self._used = used

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
            # Whatever the router may have there: nobody said which scope it needs.
            await send_answer(send, refusal("VALIDATION.not_found").answer())
            return
        if (forbidden := missing_scope(caller.scopes, needed)) is not None:
            self._refused("forbidden")
            self._throttle.fail(address_of(scope.get("client")), "missing scope", caller.key_id, spend=False)
            await send_answer(send, forbidden.answer())
            return
        refused, told = await self._quotas.spend(caller.tenant)
        if refused is not None:
            await send_answer(send, refused)
            return
        self._used(caller)
        acting = acting_key.set(caller.key_id)
        try:
            with await self._sessions.of(caller.tenant) as session:
                state = scope.setdefault("state", {})
                state["caller"], state["session"] = caller, session
                await self._app(scope, receive, _with_headers(send, told) if told else send)
        except RagfenceError as error:  # of opening: what a route raises is answered there
            await send_answer(send, problem_of(error).answer())
        finally:
            acting_key.reset(acting)

    async def _caller(self, scope: Scope) -> ApiCaller | Answer:
        if self._everybody is not None:
            return self._everybody
        token = bearer_of(scope)
        if not token:
            self._refused("missing")
            return _unauthorised("AUTH.missing")
        found = self._keys.known(token)
        address = address_of(scope.get("client"))
        if found is UNKNOWN:
            if (wait_s := self._throttle.wait_s(address)) and not self._keys.let_in_before(token):
                return self._slowed(address, wait_s)
            try:
                found = await run_blocking(self._keys.check, token)
            except RagfenceError as error:
                return problem_of(error).answer()
        if isinstance(found, ApiCaller):
            return found
        if found is Denial.INVALID and (wait_s := self._throttle.wait_s(address)):
            return self._slowed(address, wait_s)
        self._refused(found.value)
        # Who has the secret of a key that has ended guesses nothing.
        named = parsed(token)
        self._throttle.fail(address, found.value, named.key_id if named else "", spend=found is Denial.INVALID)
        return _unauthorised(f"AUTH.{found.value}")

    def _slowed(self, address: str, wait_s: int) -> Answer:
        self._refused("throttled")
        self._throttle.fail(address, "throttled", spend=False)
        detail = "too many wrong credentials came from this address"
        return refusal("RATE_LIMIT.credentials", detail, retry_after=wait_s).answer()


def bearer_of(scope: Scope) -> str:
    """The token of the one Authorization header; empty if there is none, or several, or of another scheme."""
    given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    if len(given) != 1:
        return ""
    scheme, _, token = given[0].decode("latin-1").strip(" \t").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _unauthorised(code: str, detail: str = "") -> Answer:
    return refusal(code, detail).answer({"www-authenticate": 'Bearer realm="ragfence"'})


def _with_headers(send: Send, told: tuple[tuple[str, str], ...]) -> Send:
    more = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in told]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *more]
        await send(message)

    return sending
