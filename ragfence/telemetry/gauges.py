"""Gauges: what the stores hold, asked when Prometheus scrapes, but not more often than they can bear.

The stores keep counts, so asking is cheap; but a store may be slow or away. So a scrape is answered with what is known,
and a thread of its own asks again when that is older than 15 s and than twenty times what asking took: at most a
twentieth of the time goes into it. `ragfence_stats_age_seconds` tells how old the numbers are. Only the first scrapes
wait for them, briefly.

What a fence store holds right now, in numbers.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ragfence._extras import needs_extra
from ragfence.audit.statistics import count_expired
from ragfence.core.decision_rows import decode_rows
from ragfence.core.layout import State
from ragfence.stores.fences import FenceStore
from ragfence.telemetry.instrumented_store import InstrumentedStore

with needs_extra("audit", "Observing with metrics"):
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector

_QUARANTINED = State.QUARANTINED.name.lower()
_ENTRIES = 200


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """Of one tenant in one store, but for `bytes` and `memory_ratio`, which are of the store as a whole."""

    records: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(kind, state) -> how many"""
    documents: int = 0
    quarantined: int = 0
    oldest_pending_s: float = 0.0
    undrained_rows: int = 0
    lag_s: float = 0.0
    bytes: int | None = None
    expired: int | None = None
    """records that had their time and wait for `purge_expired`; None: nobody can be asked"""
    memory_ratio: float | None = None
    """of a Redis: the fullest of its servers"""


def figures_of(store: FenceStore) -> StoreFigures:
    stats, now_ms = store.stats(), store.now_ms()
    infos = store.infos() if hasattr(store, "infos") else None
    oldest = stats.pending.oldest
    return StoreFigures(
        records=stats.records,
        documents=stats.documents,
        quarantined=sum(count for (_, state), count in stats.records.items() if state == _QUARANTINED),
        oldest_pending_s=max(now_ms - oldest.record.first_seen_ms, 0) / 1000 if oldest else 0.0,
        undrained_rows=stats.rows,
        lag_s=_lag_ms(store, now_ms) / 1000 if stats.rows else 0.0,
        bytes=stats.bytes,
        expired=count_expired(store, now_ms),
        memory_ratio=max(map(_memory_ratio, infos)) if infos else None,
    )


def _lag_ms(store: FenceStore, now_ms: int) -> int:
    """How old the oldest row is that nobody drained.

    Exact for up to 200 entries. Of more, Redis shows those of the first shards, and there the oldest is hardly younger.
    """
    oldest_ms = min((next(decode_rows(entry.data)).ts_ms for entry in store.row_entries("", _ENTRIES)), default=now_ms)
    return max(now_ms - oldest_ms, 0)


def _memory_ratio(info: Mapping[str, Any]) -> float:
    """Of `maxmemory`; without one, of the memory of the machine."""
    most = int(info.get("maxmemory") or 0) or int(info.get("total_system_memory") or 0)
    return int(info.get("used_memory", 0)) / most if most else 0.0


EVERY_S = 15.0
SHARE = 20
PATIENCE_S = 2.0
"""how long a scrape waits for numbers that there are none of yet"""
CLOSING_S = 5.0


@dataclass(eq=False)
class _Watched:
    """A tenant in a store, by whichever of the fences that are open on it."""

    url: str
    tenant: str
    fences: weakref.WeakSet[InstrumentedStore] = field(default_factory=weakref.WeakSet)
    figures: StoreFigures | None = None
    asked_at: float = 0.0
    due_at: float = 0.0
    busy: threading.Lock = field(default_factory=threading.Lock)


class Gauges(Collector):
    def __init__(
        self,
        tenant: Callable[[str], str],
        kind: Callable[[str], str],
        store: Callable[[str], str],
        failed: Callable[[str, Exception], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = EVERY_S,
    ) -> None:
        """The first three bound what may stand in a label; `failed` is told of a store that could not be asked."""
        self._labels, self._failed = (tenant, kind, store), failed
        self._clock, self._every_s = clock, every_s
        self._watched: dict[tuple[str, str], _Watched] = {}
        self._answers: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        self._asking: threading.Thread | None = None

    def watch(self, fences: InstrumentedStore) -> None:
        where = (fences.url, fences.tenant)
        with self._lock:
            self._watched.setdefault(where, _Watched(*where)).fences.add(fences)

    def leave(self, fences: InstrumentedStore) -> None:
        """Nobody reads from it any more when this returns, unless reading takes very long."""
        where = (fences.url, fences.tenant)
        with self._lock:
            watched = self._watched.get(where)
            if watched is None:
                return
            watched.fences.discard(fences)
            if not watched.fences:
                del self._watched[where]
        if watched.busy.acquire(timeout=CLOSING_S):
            watched.busy.release()

    def answered(self, tenant: str, *, hits: int = 0, misses: int = 0) -> None:
        with self._lock:
            counted = self._answers.setdefault(tenant, [0, 0])
            counted[0] += hits
            counted[1] += misses

    def ask_again(self) -> None:
        """The next scrape asks the stores, and waits for them, however new the numbers are."""
        with self._lock:
            for one in self._watched.values():
                one.figures, one.due_at = None, 0.0

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """So that nobody asks the stores to learn the names."""
        return iter(_Families(*self._labels).made())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self._refresh()
        with self._lock:
            watched = list(self._watched.values())
            answers = {tenant: tuple(counted) for tenant, counted in self._answers.items()}
        families = _Families(*self._labels)
        for one in watched:
            if one.figures is not None:
                families.add(one.url, one.tenant, one.figures, max(self._clock() - one.asked_at, 0.0))
        for tenant, (hits, misses) in answers.items():
            families.hit_ratio.put(hits / (hits + misses), tenant)
        return iter(families.made())

    def _refresh(self) -> None:
        now = self._clock()
        with self._lock:
            # Those whose fences nobody closed, and nobody has any more.
            self._watched = {where: one for where, one in self._watched.items() if one.fences}
            due = [one for one in self._watched.values() if one.due_at <= now]
            # A thread of the parent process is not alive in a child.
            if due and (self._asking is None or not self._asking.is_alive()):
                self._asking = threading.Thread(target=self._ask, args=(due,), name="ragfence-gauges", daemon=True)
                self._asking.start()
            asking, unknown = self._asking, any(one.figures is None for one in due)
        if asking is not None and unknown:
            asking.join(PATIENCE_S)

    def _ask(self, due: list[_Watched]) -> None:
        for one in due:
            with one.busy:
                fences = next(iter(one.fences), None)
                if fences is None:  # closed meanwhile
                    continue
                started = self._clock()
                try:
                    one.figures, one.asked_at = figures_of(fences.inner), started
                except Exception as error:  # noqa: BLE001  # the next store may be well
                    self._failed(one.url, error)
                one.due_at = started + max(self._every_s, SHARE * (self._clock() - started))


class _Family:
    """A gauge in the making. Several values under the same labels (all tenants that are `other`) become one."""

    def __init__(
        self, name: str, text: str, labels: tuple[str, ...], join: Callable[[float, float], float] = max
    ) -> None:
        self.name, self.text, self.labels, self._join = f"ragfence_{name}", text, labels, join
        self._values: dict[tuple[str, ...], float] = {}

    def put(self, value: float, *labels: str) -> None:
        before = self._values.get(labels)
        self._values[labels] = value if before is None else self._join(before, value)

    def made(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(self.name, self.text, labels=self.labels)
        for labels, value in sorted(self._values.items()):
            family.add_metric(labels, value)
        return family


def _sum(one: float, other: float) -> float:
    return one + other


class _Families:
    def __init__(self, tenant: Callable[[str], str], kind: Callable[[str], str], store: Callable[[str], str]) -> None:
        self._tenant, self._kind, self._store = tenant, kind, store
        by_tenant, by_store = ("tenant",), ("store",)
        self.hit_ratio = _Family("hit_ratio", "Hits among hits and misses, since the start", by_tenant)
        self.keys = _Family("active_keys", "Records of keys", ("kind", "state", "tenant"), _sum)
        self.documents = _Family("documents", "Live documents", by_tenant, _sum)
        self.quarantined = _Family("quarantined_keys", "Keys that wait for `release`", by_tenant, _sum)
        self.oldest = _Family("oldest_pending_seconds", "Age of the oldest key without an outcome", by_tenant)
        self.rows = _Family("undrained_rows", "Decision rows that are not in the ledger yet", by_tenant, _sum)
        self.lag = _Family("stream_lag_seconds", "Age of the oldest of them", by_tenant)
        self.expired = _Family("expiry_backlog", "Expired records that wait to be purged", by_tenant, _sum)
        self.age = _Family("stats_age_seconds", "How old these numbers are", by_tenant)
        self.bytes = _Family("storage_bytes", "Size of the fence store", by_store)
        self.memory = _Family("redis_memory_used_ratio", "Of maxmemory, or else of the machine", by_store)

    def add(self, url: str, tenant: str, figures: StoreFigures, age_s: float) -> None:
        tenant, store = self._tenant(tenant), self._store(url)
        for (kind, state), count in figures.records.items():
            self.keys.put(count, self._kind(kind), state, tenant)
        self.documents.put(figures.documents, tenant)
        self.quarantined.put(figures.quarantined, tenant)
        self.oldest.put(figures.oldest_pending_s, tenant)
        self.rows.put(figures.undrained_rows, tenant)
        self.lag.put(figures.lag_s, tenant)
        self.age.put(age_s, tenant)
        if figures.expired is not None:
            self.expired.put(figures.expired, tenant)
        if figures.bytes is not None:
            self.bytes.put(figures.bytes, store)
        if figures.memory_ratio is not None:
            self.memory.put(figures.memory_ratio, store)

    def made(self) -> list[GaugeMetricFamily]:
        return [family.made() for family in vars(self).values() if isinstance(family, _Family)]
