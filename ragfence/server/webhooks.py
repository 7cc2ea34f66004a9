"""Webhooks in front of the API: deliveries need no API key, and are bounded before and after they are verified.

- Each webhook has a share of the server of its own, as a tenant has: a flood of forged deliveries slows down that
  webhook, and not the API of its tenant.
- A delivery that is longer than the webhook accepts is refused by its Content-Length, or as soon as it is too long.
- What is not verified is counted, logged at intervals, and claims nothing: it leaves no row. An address that sends too
  much of it is refused before its body is read, unless a delivery from it was verified within the last hour: behind a
  proxy, the provider has the same address as everybody else.
- A verified delivery counts against the quota of its tenant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from cachetools import TTLCache

from ragfence.errors import RagfenceError
from ragfence.server.apikeys import ApiCaller
from ragfence.server.asgi import App, Receive, Scope, Send, path_in, send_answer
from ragfence.server.fair_shares import SHARE
from ragfence.server.load_shedding import EXCHANGE, BoundedExchange, body_length
from ragfence.server.tenant_pool import TenantPool
from ragfence.server.throttle import FailureThrottle, address_of
from ragfence.webhooks.policy_hooks import Inboxes, PolicyHook
from ragfence.wire.messages import Answer
from ragfence.wire.problems import Problem, problem_of, refusal

PREFIX: Final = "/webhooks/"
METHODS: Final = ("GET", "HEAD", "OPTIONS", "POST")
HOOK: Final = "webhook"
"""In the state of a request: the `PolicyHook` that it is for."""
TRUSTED_S: Final = 3600.0
MAX_TRUSTED: Final = 10_000


class WebhookGate:
    """ASGI middleware, outside of `AuthMiddleware`: admits deliveries to webhooks, and passes everything else on.

    Args:
        others: The application for everything that is not addressed to a webhook.
        deliveries: The application for deliveries.
        hooks: The webhooks, by name.
        sessions: The sessions of the tenants.
        throttle: Slows down addresses that send what is not verified.
        on_refused: Called with the reason of each refusal.
    """

    def __init__(
        self,
        others: App,
        deliveries: App,
        *,
        hooks: Mapping[str, PolicyHook],
        sessions: TenantPool,
        throttle: FailureThrottle | None = None,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._others, self._deliveries = others, deliveries
        self._hooks = hooks
        self._sessions = sessions
        self._throttle = throttle or FailureThrottle()
        self._on_refused = on_refused
        self._trusted: TTLCache[tuple[str, str], bool] = TTLCache(MAX_TRUSTED, TRUSTED_S)
        self.inboxes = Inboxes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hook = self._hook_of(scope)
        if hook is None:
            await self._others(scope, receive, send)
            return
        if scope["method"] not in METHODS or scope["method"] == "OPTIONS":
            allowed = {"allow": ", ".join(METHODS)}
            is_options = scope["method"] == "OPTIONS"
            answer = Answer(204, tuple(allowed.items())) if is_options else refusal("VALIDATION.method").answer(allowed)
            await send_answer(send, answer)
            return
        state = scope.setdefault("state", {})
        exchange: BoundedExchange = state[EXCHANGE]
        if (problem := self._refusal(hook, scope)) is not None:
            exchange.refuse(problem)
            return
        try:
            with await self._sessions.of(hook.tenant) as session:
                state["caller"] = ApiCaller(hook.tenant, f"webhook:{hook.name}", frozenset(), "")
                state["session"], state[HOOK], state[SHARE] = session, hook, f"\0webhook/{hook.name}"
                await self._deliveries(scope, receive, send)
        except RagfenceError as error:  # while the session is opened: errors of the route are answered there
            await send_answer(send, problem_of(error).answer())

    def accept(self, hook: PolicyHook, client: tuple[str, int] | None) -> None:
        """Remembers that a delivery of this address was verified."""
        self._trusted[hook.name, address_of(client)] = True

    def reject(self, hook: PolicyHook, client: tuple[str, int] | None) -> None:
        """Counts and logs a delivery that was not verified."""
        self._on_refused("webhook")
        self._throttle.fail(address_of(client), f"the webhook {hook.name} was not verified")

    def _hook_of(self, scope: Scope) -> PolicyHook | None:
        if scope["type"] != "http" or not self._hooks:
            return None
        path = path_in(scope)
        return self._hooks.get(path[len(PREFIX) :]) if path.startswith(PREFIX) else None

    def _refusal(self, hook: PolicyHook, scope: Scope) -> Problem | None:
        address = address_of(scope.get("client"))
        if (wait_s := self._throttle.wait_s(address)) and (hook.name, address) not in self._trusted:
            self._on_refused("throttled")
            self._throttle.fail(address, "throttled", spend=False)
            detail = "this address sent too many deliveries that could not be verified"
            return refusal("RATE_LIMIT.credentials", detail, retry_after=wait_s)
        length = body_length(scope)
        return too_long(hook) if length is not None and length > hook.rules.max_body_bytes else None


def too_long(hook: PolicyHook) -> Problem:
    detail = f"at most {hook.rules.max_body_bytes:,} bytes are accepted by this webhook"
    return refusal("VALIDATION.body_too_large", detail)
