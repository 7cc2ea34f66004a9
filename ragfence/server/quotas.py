"""Quotas: how much a tenant may request, counted by `limits` on the Redis of the fences, or in memory with SQLite.

A request costs 1, and a batch 1 for each of its documents: the work is counted, so packing it into fewer requests makes
no difference. Windows slide: two counters per quota, the older of which fades out. That takes as little room for
`1000000/day` as for `5/second` (a list of times would not), admits no double load where two fixed windows meet, and
uses the clock of Redis. Refused requests are not counted.

Quotas protect the server and guarantee nothing: counters may be lost with their Redis, and in memory each process has
its own. If Redis does not answer, requests are refused (503): then no fence can be used either.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from ragfence._extras import needs_extra
from ragfence.core.operations import encoded
from ragfence.core.urls import show_url
from ragfence.engine.aio import run_blocking
from ragfence.errors import PolicyError, RagfenceError, ValidationError
from ragfence.wire.messages import Answer, Headers
from ragfence.wire.problems import problem_of, refusal

if TYPE_CHECKING:
    from limits import RateLimitItem

    from ragfence.core.policy import Policy

NAMESPACE: Final = "ragfence"
TIMEOUT_S: Final = 3.0
QUOTA_HINT: Final = "a quota is a number and a time, such as 600/minute, 20000/day or 100 per 10 seconds"

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
    """The two counters of a quota: the window before this one and how long it fades; this one and how long it grows."""

    before: int
    fading_s: float
    now: int
    growing_s: float


class Full(NamedTuple):
    quota: Quota
    window: Window


class Spent(NamedTuple):
    refused: Answer | None
    """None: the request may proceed."""
    headers: Headers
    """Added to the answer."""


def parsed_quotas(policy: Policy) -> Rules:
    """Returns the quotas of a policy. Raises `PolicyError` with all of its mistakes."""
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
            hint=QUOTA_HINT,
            problems=tuple(wrong),
        )
    return Rules(everybody, tenants)


class Counters(Protocol):
    is_local: bool
    """In this process: `take` does not block."""

    def take(self, quotas: tuple[Quota, ...], tenant: str, cost: int) -> Full | None:
        """Adds `cost` to each quota, or returns the first one that is full."""
        ...

    def close(self) -> None: ...


class Quotas:
    """The quotas of all tenants. Without quotas in the policy nothing is counted.

    Args:
        policy: The policy of the server.
        store: The store of the fences, as `ragfence.open` takes it.

    >>> refused, headers = await quotas.spend("acme", cost=len(documents))  # doctest: +SKIP
    """

    def __init__(self, policy: Policy, store: object = None) -> None:
        self._rules = parsed_quotas(policy)
        self._counters = _counters(store) if self._rules else None

    async def spend(self, tenant: str, cost: int = 1, *, paid: int = 0) -> Spent:
        """Adds `cost` to each quota of the tenant; the shortest window first, which is full first.

        `paid` is what this request has cost before; a retry costs it again.
        """
        quotas = self._rules.of(tenant)
        if self._counters is None or not quotas or cost <= 0:
            return Spent(None, ())
        headers, whole = _policy_header(quotas), paid + cost
        if (small := next((quota for quota in quotas if whole > quota.amount), None)) is not None:
            return Spent(_never(small, whole).with_headers(dict(headers)), headers)
        try:
            take = self._counters.take
            if self._counters.is_local:
                full = take(quotas, encoded(tenant), cost)
            else:
                full = await run_blocking(take, quotas, encoded(tenant), cost)
        except RagfenceError as unavailable:
            _log.warning("quotas could not be checked: %s", unavailable.message)
            return Spent(problem_of(unavailable).answer(), ())
        return Spent(full and _too_much(full, whole).with_headers(dict(headers)), headers)

    async def close(self) -> None:
        if self._counters is not None:
            await run_blocking(self._counters.close)


class TenantQuotas:
    """The same quotas for every tenant of a queue; `admit` is what its consumers call.

    Args:
        quotas: Such as "600/minute".
        store: The store of the fences: on Redis, all consumers share the counters.

    >>> consumer = DocumentConsumer(fence, queue, admit=TenantQuotas(["600/minute"]).admit)  # doctest: +SKIP
    """

    def __init__(self, quotas: Sequence[str], store: object = None) -> None:
        wrong: list[str] = []
        self._quotas = _parsed("quota", tuple(quotas), wrong)
        if wrong:
            raise ValidationError("; ".join(wrong), hint=QUOTA_HINT)
        self._counters = _counters(store)

    def admit(self, tenant: str, count: int) -> float:
        """Returns 0.0 if so many messages of a tenant may be handled now; otherwise the seconds to wait."""
        if count > min((quota.amount for quota in self._quotas), default=count):
            return 1.0  # the caller tries with fewer
        full = self._counters.take(self._quotas, encoded(tenant), count)
        if full is None:
            return 0.0
        quota, window = full
        return max(0.05, wait_s(window, limit=quota.amount, cost=count, window_s=quota.window_s))

    def close(self) -> None:
        self._counters.close()


def wait_s(window: Window, *, limit: int, cost: int, window_s: int) -> float:
    """Returns how long until there is room for `cost`, if no other request takes it: the arithmetic of `limits`."""
    room = limit - cost - window.now
    if room >= 0:  # the fading window is in the way; its share is rounded down
        return max(0.0, window.fading_s - (room + 1) * window_s / window.before) if window.before else 0.0
    # This window alone is too full: once it ends, it fades.
    return window.growing_s + max(0.0, window_s * (1 - (limit - cost + 1) / window.now))


def _too_much(full: Full, cost: int) -> Answer:
    quota, window = full
    seconds = wait_s(window, limit=quota.amount, cost=cost, window_s=quota.window_s)
    # Rounded up, with a margin: a client that returns in time must not find the last fraction still counted.
    retry_after = max(1, math.ceil(seconds + 0.05))
    faded = window.before * window.fading_s / quota.window_s
    left = max(0, quota.amount - math.floor(faded) - window.now)
    detail = f"{quota.amount:,} in {quota.window_s:,} s are allowed; {left:,} are left, and this request costs {cost:,}"
    problem = refusal("RATE_LIMIT.exceeded", detail, retry_after=retry_after)
    return problem.answer({"ratelimit": f'"{quota.name}";r={left};t={retry_after}'})


def _never(quota: Quota, cost: int) -> Answer:
    # Not 429: the same request would be refused each time, however long the client waits.
    return refusal(
        "VALIDATION.body_too_large",
        f"this request costs {cost:,}, and the quota allows {quota.amount:,} in {quota.window_s:,} s",
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
            wrong.append(f"{place}: {text!r} is not a valid quota")
            continue
        for item in items:
            own = type(item)(item.amount, item.multiples, namespace=NAMESPACE)
            if not own.amount:
                wrong.append(f"{place}: {text!r} allows nothing; revoke the API keys instead")
            found[own.get_expiry(), own.amount] = Quota(own, own.amount, own.get_expiry())
    return tuple(found[key] for key in sorted(found))


def _counters(store: object) -> Counters:
    from ragfence._open import _is_server

    if isinstance(store, str | PathLike) and _is_server(store):
        return _OnRedis(fspath(store))
    return _InMemory()


class _InMemory:
    """Counts in this process."""

    is_local = True

    def __init__(self) -> None:
        from limits.storage import MemoryStorage
        from limits.strategies import SlidingWindowCounterRateLimiter

        self._storage = MemoryStorage()
        self._limiter = SlidingWindowCounterRateLimiter(self._storage)

    def take(self, quotas: tuple[Quota, ...], tenant: str, cost: int) -> Full | None:
        for quota in quotas:
            if not self._limiter.hit(quota.item, tenant, cost=cost):
                key = quota.item.key_for(tenant)
                return Full(quota, _window(quota, self._storage.get_sliding_window(key, quota.window_s)))
        return None

    def close(self) -> None:
        pass


class _OnRedis:
    """Counts on the server that the URL names, in each of the forms that the fences understand.

    In threads: redis-py for asyncio is the slower of the two. `limits` itself reads URLs in another way (it requires
    every port, and knows no TLS for clusters and Sentinels), so it gets connections, or the nodes of a cluster.
    """

    is_local = False

    def __init__(self, url: str) -> None:
        from limits.storage import RedisClusterStorage, RedisStorage
        from limits.strategies import SlidingWindowCounterRateLimiter
        from redis.cluster import ClusterNode

        from ragfence.stores.redis.replies import understood
        from ragfence.stores.redis.server_urls import is_cluster, open_link, parse_address

        self._shown = show_url(url)
        if is_cluster(url):
            hosts, _, options = parse_address(url, timeout_s=TIMEOUT_S)
            nodes: Any = [ClusterNode(host, port) for host, port in hosts]  # type: ignore[no-untyped-call]
            with understood(self._shown):
                self._storage: RedisStorage = RedisClusterStorage(
                    "redis+cluster://", NAMESPACE, startup_nodes=nodes, require_full_coverage=False, **options
                )
            self._close: Callable[[], object] = self._storage.storage.close
        else:
            link = open_link(url, timeout_s=TIMEOUT_S, hash_tags=())
            self._storage = RedisStorage("redis://", link.client.connection_pool, NAMESPACE)
            self._close = link.close
        self._limiter = SlidingWindowCounterRateLimiter(self._storage)

    def close(self) -> None:
        self._close()

    def take(self, quotas: tuple[Quota, ...], tenant: str, cost: int) -> Full | None:
        from ragfence.stores.redis.replies import understood

        with understood(self._shown):
            for quota in quotas:
                if not self._limiter.hit(quota.item, tenant, cost=cost):
                    key = quota.item.key_for(tenant)
                    return Full(quota, _window(quota, self._storage.get_sliding_window(key, quota.window_s)))
        return None


def _window(quota: Quota, counters: tuple[int, float, int, float]) -> Window:
    before, fading_s, now, lives_s = counters
    # A counter lives for two windows: in the first it grows, in the second it fades.
    return Window(before, fading_s, now, max(0.0, lives_s - quota.window_s))
