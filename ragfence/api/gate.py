"""Who may pass: every address but the few open ones needs an API key, with the role that its method and path call for.

Decided here, in one place and before any route is looked up: a route that somebody forgets to protect is protected, and
a stranger cannot even learn which addresses there are.
"""

from __future__ import annotations

from typing import Final

from ragfence.api.apikeys import UNKNOWN, Asker, CachedKeys, Role
from ragfence.api.messages import Answer
from ragfence.api.performing import App, Message, Receive, Scope, Send, send_answer
from ragfence.api.problems import problem_of, refusal
from ragfence.api.quotas import Quotas
from ragfence.api.routes import path_in
from ragfence.api.sessions import Sessions
from ragfence.engine.background import to_the_end
from ragfence.errors import RagfenceError

OPEN: Final = frozenset({"/healthz", "/readyz", "/openapi.json", "/docs", "/metrics"})
"""what answers without a key: nothing in it is of a tenant; /metrics has a rule of its own"""
READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
ADMIN: Final = "/v1/admin/"


def role_for(method: str, path: str) -> Role:
    if path.startswith(ADMIN):
        return Role.ADMIN
    return Role.READ if method in READS else Role.WRITE


class Gate:
    """`everybody`: who asks, where nobody needs a key (--insecure-dev)."""

    def __init__(
        self,
        app: App,
        *,
        keys: CachedKeys,
        sessions: Sessions,
        quotas: Quotas,
        everybody: Asker | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._sessions = sessions
        self._quotas = quotas
        self._everybody = everybody

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_in(scope) in OPEN:
            await self._app(scope, receive, send)
            return
        asker = await self._asker(scope)
        if isinstance(asker, Answer):
            await send_answer(send, asker)
            return
        needed = role_for(scope["method"], path_in(scope))
        if asker.role < needed:
            detail = f"this needs the role {needed}, and the API key has {asker.role}"
            await send_answer(send, refusal("AUTH.forbidden", detail).answer())
            return
        refused, told = await self._quotas.spend(asker.tenant)
        if refused is not None:
            await send_answer(send, refused)
            return
        try:
            with await self._sessions.of(asker.tenant) as session:
                state = scope.setdefault("state", {})
                state["asker"], state["session"] = asker, session
                await self._app(scope, receive, _with_headers(send, told) if told else send)
        except RagfenceError as error:  # of opening: what a route raises is answered there
            await send_answer(send, problem_of(error).answer())

    async def _asker(self, scope: Scope) -> Asker | Answer:
        if self._everybody is not None:
            return self._everybody
        token = bearer_of(scope)
        if not token:
            return _unauthorised("AUTH.missing")
        asker = self._keys.known(token)
        if asker is UNKNOWN:
            try:
                asker = await to_the_end(self._keys.check, token)
            except RagfenceError as error:
                return problem_of(error).answer()
        return asker if isinstance(asker, Asker) else _unauthorised("AUTH.invalid")


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
