"""Quotas: how much a tenant may ask for, counted by `limits` on the Redis of the fences, or in memory beside SQLite.

A request costs 1, and a batch 1 for each of its documents: what is counted is what has to be done, so packing it into
fewer requests buys nothing. Windows slide: two counters per quota, the older of which fades out. That takes as little
room for `1000000/day` as for `5/second` (a list of moments would not), lets no double load through where two fixed
windows meet, goes by the clock of Redis, and what is refused is not counted.

Quotas protect, they guarantee nothing: counters may be lost with their Redis, and in memory each process counts for
itself. If they cannot be asked nobody passes (503), because then no fence can be asked either.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import lru_cache
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from ragfence._extras import needs_extra
from ragfence.core.operations import encoded
from ragfence.core.urls import show_url
from ragfence.engine.aio import run_blocking
from ragfence.errors import PolicyError, RagfenceError
from ragfence.wire.messages import Answer, Headers
from ragfence.wire.problems import problem_of, refusal

if TYPE_CHECKING:
    from limits import RateLimitItem

    from ragfence.core.policy import Policy

NAMESPACE: Final = "ragfence"
TIMEOUT_S: Final = 3.0

_log = logging.getLogger("ragfence.server")


class Quota(NamedTuple):
    item: RateLimitItem
    amount: int
    window_s: int

    @property
    def name(self) -> str:
        return f"{self.amount}-per-{self.item.multiples}-{self.item.GRANULARITY.name}"


class Rules(NamedTuple):
    everybody: tuple[Quota, ...]
    tenants: Mapping[str, tuple[Quota, ...]]

    def of(self, tenant: str) -> tuple[Quota, ...]:
        return self.tenants.get(tenant, self.everybody)

    def __bool__(self) -> bool:
        return bool(self.everybody) or any(self.tenants.values())


class Window(NamedTuple):
    """What is counted: the window before this one, how long it still fades, this one, and how long it still grows."""

    before: int
    fading_s: float
    now: int
    growing_s: float


class Full(NamedTuple):
    quota: Quota
    window: Window


class Spent(NamedTuple):
    refused: Answer | None
    """None: go on"""
    told: Headers
    """goes with the answer"""


def parsed_quotas(policy: Policy) -> Rules:
    """The quotas of a policy, or `PolicyError` with all that is wrong with them."""
    http = policy.http
    if not http.quotas and not any(http.tenant_quotas.values()):
        return Rules((), {})
    wrong: list[str] = []
    everybody = _parsed("http.quotas", http.quotas, wrong)
    tenants = {name: _parsed(f"http.tenant_quotas.{name}", given, wrong) for name, given in http.tenant_quotas.items()}
    if wrong:
        lines = "".join(f"\n  {problem}" for problem in wrong)
        raise PolicyError(
            f"the policy is refused:{lines}",
            hint="a quota is a number and a time, such as 600/minute, 20000/day or 100 per 10 seconds",
            problems=tuple(wrong),
        )
    return Rules(everybody, tenants)


class Counters(Protocol):
    async def take(self, quotas: tuple[Quota, ...], tenant: str, cost: int) -> Full | None:
        """Counts `cost` in each quota, or says which one is full."""
        ...

    def close(self) -> None: ...


class Quotas:
    """`store`: where the fences are, as `ragfence.open` takes it. Without quotas in the policy nothing is ever asked.

    >>> refused, told = await quotas.spend("acme", cost=len(documents))  # doctest: +SKIP
    """

    def __init__(self, policy: Policy, store: object = None) -> None:
        self._rules = parsed_quotas(policy)
        self._counters = _counters(store) if self._rules else None

    async def spend(self, tenant: str, cost: int = 1, *, paid: int = 0) -> Spent:
        """Takes `cost` out of each of the tenant's quotas; the shortest first, which is full first.

        `paid`: what this request was made to pay before. Who comes again pays it again.
        """
        quotas = self._rules.of(tenant)
        if self._counters is None or not quotas or cost <= 0:
            return Spent(None, ())
        told, whole = _policy_header(quotas), paid + cost
        if (small := next((quota for quota in quotas if whole > quota.amount), None)) is not None:
            return Spent(_never(small, whole).with_headers(dict(told)), told)
        try:
            full = await self._counters.take(quotas, encoded(tenant), cost)
        except RagfenceError as unavailable:
            _log.warning("no quota could be asked: %s", unavailable.message)
            return Spent(problem_of(unavailable).answer(), ())
        return Spent(full and _too_much(full, whole).with_headers(dict(told)), told)

    async def close(self) -> None:
        if self._counters is not None:
            await run_blocking(self._counters.close)


def wait_s(window: Window, *, limit: int, cost: int, window_s: int) -> float:
    """How long until there is room for `cost`, if nobody else takes it; exactly as the counters are weighed."""
    room = limit - cost - window.now
    if room >= 0:  # what fades out is in the way; its share is rounded down
        return max(0.0, window.fading_s - (room + 1) * window_s / window.before) if window.before else 0.0
    # This window alone is too full: once it is over, it fades in its turn.
    return window.growing_s + max(0.0, window_s * (1 - (limit - cost + 1) / window.now))


def _too_much(full: Full, cost: int) -> Answer:
    quota, window = full
    seconds = wait_s(window, limit=quota.amount, cost=cost, window_s=quota.window_s)
    # Rounded up, and never so tight that who comes back in time finds the share of a moment still counted.
    retry_after = max(1, math.ceil(seconds + 0.05))
    faded = window.before * window.fading_s / quota.window_s
    left = max(0, quota.amount - math.floor(faded) - window.now)
    detail = f"{quota.amount:,} in {quota.window_s:,} s are allowed; {left:,} are left, and this costs {cost:,}"
    problem = refusal("RATE_LIMIT.exceeded", detail, retry_after=retry_after)
    return problem.answer({"ratelimit": f'"{quota.name}";r={left};t={retry_after}'})


def _never(quota: Quota, cost: int) -> Answer:
    # Not 429: who waits and sends it again would be told so for ever.
    return refusal(
        "VALIDATION.body_too_large",
        f"this costs {cost:,}, and the quota lets through no more than {quota.amount:,} in {quota.window_s:,} s",
        hint="send fewer documents at once",
    ).answer()


@lru_cache(maxsize=256)
def _policy_header(quotas: tuple[Quota, ...]) -> Headers:
    """As in draft-ietf-httpapi-ratelimit-headers."""
    return (("ratelimit-policy", ", ".join(f'"{quota.name}";q={quota.amount};w={quota.window_s}' for quota in quotas)),)


def _parsed(place: str, given: tuple[str, ...], wrong: list[str]) -> tuple[Quota, ...]:
    with needs_extra("api", "A quota"):
        from limits import parse_many
    found: dict[tuple[int, int], Quota] = {}
    for text in given:
        try:
            items = parse_many(text)
        except ValueError:
            wrong.append(f"{place}: {text!r} is no quota")
            continue
        for item in items:
            own = type(item)(item.amount, item.multiples, namespace=NAMESPACE)
            if not own.amount:
                wrong.append(f"{place}: {text!r} lets nothing through; revoke the API keys instead")
            found[own.get_expiry(), own.amount] = Quota(own, own.amount, own.get_expiry())
    return tuple(found[key] for key in sorted(found))


def _counters(store: object) -> Counters:
    from ragfence._open import _is_server

    if isinstance(store, str | PathLike) and _is_server(store):
        return _OnRedis(fspath(store))
    return _InMemory()


class _InMemory:
    """Of this process alone."""

    def __init__(self) -> None:
        from limits.aio.storage import MemoryStorage
        from limits.aio.strategies import SlidingWindowCounterRateLimiter

        self._storage = MemoryStorage()
        self._limiter = SlidingWindowCounterRateLimiter(self._storage)

    async def take(self, quotas: tuple[Quota, ...], tenant: str, cost: int) -> Full | None:
        for quota in quotas:
            if not await self._limiter.hit(quota.item, tenant, cost=cost):
                key = quota.item.key_for(tenant)
                return Full(quota, _window(quota, await self._storage.get_sliding_window(key, quota.window_s)))
        return None

    def close(self) -> None:
        pass


class _OnRedis:
    """On the server that the URL names, in each of its forms, through the client that the fences use, too.

    In threads: redis-py for asyncio is the slower of the two, and limits reads URLs in a way of its own (it wants every
    port, and knows no TLS for clusters and Sentinels).
    """

    def __init__(self, url: str) -> None:
        from limits.strategies import SlidingWindowCounterRateLimiter

        from ragfence.stores.redis.server_urls import open_link

        self._shown = show_url(url)
        self._link = open_link(url, timeout_s=TIMEOUT_S, hash_tags=())
        self._storage = _storage_on(self._link.client)
        self._limiter = SlidingWindowCounterRateLimiter(self._storage)

    async def take(self, quotas: tuple[Quota, ...], tenant: str, cost: int) -> Full | None:
        return await run_blocking(self._take, quotas, tenant, cost)

    def close(self) -> None:
        self._link.close()

    def _take(self, quotas: tuple[Quota, ...], tenant: str, cost: int) -> Full | None:
        from ragfence.stores.redis.replies import understood

        with understood(self._shown):
            for quota in quotas:
                if not self._limiter.hit(quota.item, tenant, cost=cost):
                    key = quota.item.key_for(tenant)
                    return Full(quota, _window(quota, self._storage.get_sliding_window(key, quota.window_s)))
        return None


def _window(quota: Quota, told: tuple[int, float, int, float]) -> Window:
    before, fading_s, now, lives_s = told
    # A counter is kept for two windows: in the first it grows, in the second it fades.
    return Window(before, fading_s, now, max(0.0, lives_s - quota.window_s))


def _storage_on(client: Any) -> Any:
    from limits.storage import RedisStorage
    from limits.storage.base import Storage
    from redis import RedisError

    class OnClient(RedisStorage):
        """With a client that is there already, whatever it is connected to."""

        STORAGE_SCHEME = []  # noqa: RUF012  # none: it is not to be found by a URL

        def __init__(self) -> None:
            Storage.__init__(self)
            self.key_prefix = NAMESPACE
            self.storage = client
            self.initialize_storage("")

        @property
        def base_exceptions(self) -> type[Exception]:
            return RedisError

    return OnClient()
