"""Gauges: what the fence stores hold, read when Prometheus scrapes, but only as often as a store can bear.

The stores keep counts, so reading them is cheap; but a store may be slow or unreachable, so it is read in the
background. `ragfence_stats_age_seconds` is the age of the numbers.
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
from ragfence.telemetry.background_reader import INTERVAL_S, BackgroundReader
from ragfence.telemetry.instrumented_store import InstrumentedStore

with needs_extra("audit", "Observing with metrics"):
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector

_QUARANTINED = State.QUARANTINED.name.lower()
_ENTRIES = 200


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """Numbers of one tenant in one store; `bytes` and `memory_ratio` are those of the whole store."""

    records: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(kind, state) -> count"""
    documents: int = 0
    quarantined: int = 0
    oldest_pending_s: float = 0.0
    undrained_rows: int = 0
    lag_s: float = 0.0
    bytes: int | None = None
    expired: int | None = None
    """expired records that `purge_expired` has not deleted yet; None: unknown"""
    memory_ratio: float | None = None
    """on Redis: of the fullest server"""
    clock_skew_s: float = 0.0
    """the store's clock minus this machine's, as far as the round trip tells"""


def read_figures(store: FenceStore) -> StoreFigures:
    stats = store.stats()
    asked_s = time.time()
    now_ms = store.now_ms()
    skew_s = now_ms / 1000 - (asked_s + time.time()) / 2
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
        clock_skew_s=skew_s,
    )


def _lag_ms(store: FenceStore, now_ms: int) -> int:
    """The age of the oldest row that was not drained.

    Exact for up to 200 entries. Of more, Redis returns those of the first shards, whose oldest is hardly younger.
    """
    oldest_ms = min((next(decode_rows(entry.data)).ts_ms for entry in store.row_entries("", _ENTRIES)), default=now_ms)
    return max(now_ms - oldest_ms, 0)


def _memory_ratio(info: Mapping[str, Any]) -> float:
    """The share of `maxmemory` in use, or of the machine's memory if `maxmemory` is not set."""
    most = int(info.get("maxmemory") or 0) or int(info.get("total_system_memory") or 0)
    return int(info.get("used_memory", 0)) / most if most else 0.0


CLOSING_S = 5.0


@dataclass(eq=False)
class _GaugeSource:
    """A tenant in a store, read through any of the fences that are open on it."""

    url: str
    tenant: str
    fences: weakref.WeakSet[InstrumentedStore] = field(default_factory=weakref.WeakSet)
    figures: StoreFigures | None = None
    read_at: float = 0.0
    due_at: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_known(self) -> bool:
        return self.figures is not None


class Gauges(Collector):
    def __init__(
        self,
        tenant: Callable[[str], str],
        kind: Callable[[str], str],
        store: Callable[[str], str],
        on_failure: Callable[[str, Exception], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """`tenant`, `kind` and `store` bound the values of labels; `on_failure` is called if a store cannot be read."""
        self._labels, self._on_failure = (tenant, kind, store), on_failure
        self._clock = clock
        self._sources: dict[tuple[str, str], _GaugeSource] = {}
        self._answers: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        self._reader = BackgroundReader("ragfence-gauges", self._read_store, clock, interval_s)

    def add_store(self, fences: InstrumentedStore) -> None:
        where = (fences.url, fences.tenant)
        with self._lock:
            self._sources.setdefault(where, _GaugeSource(*where)).fences.add(fences)

    def remove_store(self, fences: InstrumentedStore) -> None:
        """Waits until no thread reads from the store any more, but not for longer than `CLOSING_S`."""
        where = (fences.url, fences.tenant)
        with self._lock:
            source = self._sources.get(where)
            if source is None:
                return
            source.fences.discard(fences)
            if not source.fences:
                del self._sources[where]
        if source.lock.acquire(timeout=CLOSING_S):
            source.lock.release()

    def count_answers(self, tenant: str, *, hits: int = 0, misses: int = 0) -> None:
        with self._lock:
            counted = self._answers.setdefault(tenant, [0, 0])
            counted[0] += hits
            counted[1] += misses

    def invalidate(self) -> None:
        """Makes the next scrape read the stores and wait for them, however new the numbers are."""
        with self._lock:
            for one in self._sources.values():
                one.figures, one.due_at = None, 0.0

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """The names without values: prometheus-client needs no read of the stores to learn them."""
        return iter(_Families(*self._labels).build())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self._refresh()
        with self._lock:
            sources = list(self._sources.values())
            answers = {tenant: tuple(counted) for tenant, counted in self._answers.items()}
        families = _Families(*self._labels)
        for one in sources:
            if one.figures is not None:
                families.add(one.url, one.tenant, one.figures, max(self._clock() - one.read_at, 0.0))
        for tenant, (hits, misses) in answers.items():
            families.hit_ratio.set(hits / (hits + misses), tenant)
        return iter(families.build())

    def _refresh(self) -> None:
        with self._lock:
            # Fences that were garbage-collected without being closed.
            self._sources = {where: one for where, one in self._sources.items() if one.fences}
            sources = list(self._sources.values())
        self._reader.refresh(sources)

    def _read_store(self, source: _GaugeSource) -> None:
        with source.lock:
            fences = next(iter(source.fences), None)
            if fences is None:  # closed meanwhile
                return
            started = self._clock()
            try:
                source.figures, source.read_at = read_figures(fences.inner), started
            except Exception as error:  # noqa: BLE001  # the next store may be readable
                self._on_failure(source.url, error)


class _Family:
    """Collects the values of a gauge. Values with the same labels (tenants counted as `other`) are joined."""

    def __init__(
        self, name: str, text: str, labels: tuple[str, ...], join: Callable[[float, float], float] = max
    ) -> None:
        self.name, self.text, self.labels, self._join = f"ragfence_{name}", text, labels, join
        self._values: dict[tuple[str, ...], float] = {}

    def set(self, value: float, *labels: str) -> None:
        before = self._values.get(labels)
        self._values[labels] = value if before is None else self._join(before, value)

    def build(self) -> GaugeMetricFamily:
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
        self.hit_ratio = _Family(
            "hit_ratio", "Share of hits among hits and misses since the process started", by_tenant
        )
        self.keys = _Family("active_keys", "Records of keys", ("kind", "state", "tenant"), _sum)
        self.documents = _Family("documents", "Live documents", by_tenant, _sum)
        self.quarantined = _Family("quarantined_keys", "Keys in quarantine, waiting for `release`", by_tenant, _sum)
        self.oldest = _Family("oldest_pending_seconds", "Age of the oldest key without an outcome", by_tenant)
        self.rows = _Family(
            "undrained_rows", "Decision rows that were not drained into the ledger yet", by_tenant, _sum
        )
        self.lag = _Family("stream_lag_seconds", "Age of the oldest undrained decision row", by_tenant)
        self.expired = _Family("expiry_backlog", "Expired records that were not purged yet", by_tenant, _sum)
        self.age = _Family("stats_age_seconds", "Age of the numbers of these gauges", by_tenant)
        self.bytes = _Family("storage_bytes", "Size of the fence store", by_store)
        self.memory = _Family(
            "redis_memory_used_ratio", "Share of maxmemory in use, or of the machine's memory", by_store
        )
        self.skew = _Family("clock_skew_seconds", "Clock of the store minus the clock of this process", by_store)

    def add(self, url: str, tenant: str, figures: StoreFigures, age_s: float) -> None:
        tenant, store = self._tenant(tenant), self._store(url)
        for (kind, state), count in figures.records.items():
            self.keys.set(count, self._kind(kind), state, tenant)
        self.documents.set(figures.documents, tenant)
        self.quarantined.set(figures.quarantined, tenant)
        self.oldest.set(figures.oldest_pending_s, tenant)
        self.rows.set(figures.undrained_rows, tenant)
        self.lag.set(figures.lag_s, tenant)
        self.age.set(age_s, tenant)
        if figures.expired is not None:
            self.expired.set(figures.expired, tenant)
        if figures.bytes is not None:
            self.bytes.set(figures.bytes, store)
        if figures.memory_ratio is not None:
            self.memory.set(figures.memory_ratio, store)
        self.skew.set(figures.clock_skew_s, store)

    def build(self) -> list[GaugeMetricFamily]:
        return [family.build() for family in vars(self).values() if isinstance(family, _Family)]
