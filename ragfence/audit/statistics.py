"""What a fence holds and how often it spared an effect, from counts that its store keeps: nothing is scanned."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ragfence.audit.audit import _moment_ms
from ragfence.audit.recount import Recount
from ragfence.core.layout import State
from ragfence.core.records import ENDED
from ragfence.errors import RagfenceError
from ragfence.stores.checkups.disk import expired_records
from ragfence.stores.fences import FenceStore, Scanned

_ENDED = frozenset(state.name.lower() for state in ENDED)
_QUARANTINED = State.QUARANTINED.name.lower()


@dataclass(frozen=True, slots=True)
class KeyCount:
    """How many keys of a kind are in a state."""

    kind: str
    state: str
    count: int
    estimated: bool
    """ended keys are counted by the hours in which they were sealed and expire; those without an outcome one by one"""


@dataclass(frozen=True, slots=True)
class EndpointCount:
    """What was decided for one route and kind."""

    route: str
    kind: str
    decisions: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class FenceStats:
    """Numbers of one tenant. Decisions count from the full hour in which `since` lies."""

    tenant: str
    since: str
    documents: int
    """live ones, exact"""
    processed: int
    """effects that were performed and sealed"""
    duplicates: int
    """answers without an effect"""
    decisions: Mapping[str, int]
    keys: int
    """held without documents: those without an outcome, and an estimate of those that ended"""
    pending: int
    """of these, the ones without an outcome, except for quarantined ones"""
    quarantined: int
    average_ttl_s: float | None
    """how long ended keys are still held, on average, by the estimate; None: none of them expires"""
    rows: int
    """decision rows, on Redis entries of rows, that wait to be drained"""
    bytes: int | None
    """size of the fence store, of all tenants"""
    expired: int | None
    """expired records that wait to be purged, up to 10,000; None: the store cannot say"""
    records: tuple[KeyCount, ...] = ()
    endpoints: tuple[EndpointCount, ...] = ()
    oldest_pending: Scanned | None = field(default=None, repr=False)
    counted_since_ms: int | None = None
    """None: all decisions are counted. Else since when: the store forgot the others, and the ledger cannot be read"""

    @property
    def hit_rate(self) -> float | None:
        """The share of operations that were answered without an effect; None: there were none."""
        asked = self.processed + self.duplicates
        return self.duplicates / asked if asked else None


def collect_stats(fences: FenceStore, since: str = "24h", recounting: Recount | None = None) -> FenceStats:
    now_ms = fences.now_ms()
    held = fences.stats()
    decisions: Counter[str] = Counter()
    endpoints: dict[tuple[str, str], Counter[str]] = {}
    since_ms = _moment_ms(since, now_ms, 0)
    tallies = fences.tallies(since_ms)
    counted, counted_since_ms = tallies.decisions(), None
    if tallies.begun and recounting is not None:
        try:
            counted += recounting.before(tallies.begun, since_ms, now_ms)
        except (RagfenceError, ImportError):
            counted_since_ms = max(tallies.begun.values())
    for (decision, route, kind), count in counted.items():
        decisions[decision] += count
        endpoints.setdefault((route, kind), Counter())[decision] += count
    sampled = held.pending.count > len(held.pending.seen)
    records = tuple(
        KeyCount(kind, state, count, estimated=state in _ENDED or sampled)
        for (kind, state), count in sorted(held.records.items())
    )
    quarantined = sum(each.count for each in records if each.state == _QUARANTINED)
    return FenceStats(
        tenant=fences.tenant,
        since=since,
        documents=held.documents,
        processed=decisions["new"],
        duplicates=decisions["duplicate"],
        decisions=dict(+decisions),
        keys=sum(each.count for each in records),
        pending=held.pending.count - quarantined,
        quarantined=quarantined,
        average_ttl_s=held.average_ttl_s,
        rows=held.rows,
        bytes=held.bytes,
        expired=count_expired(fences, now_ms),
        records=records,
        endpoints=tuple(EndpointCount(*where, dict(counted)) for where, counted in sorted(endpoints.items())),
        oldest_pending=held.pending.oldest,
        counted_since_ms=counted_since_ms,
    )


def count_expired(fences: FenceStore, now_ms: int) -> int | None:
    """Expired records that wait to be purged. A Redis has none: it drops them itself."""
    inner: Any = getattr(fences, "inner", fences)  # of one that is observed
    if hasattr(inner, "infos"):
        return 0
    if not hasattr(inner, "path"):
        return None
    try:
        return expired_records(inner.path, fences.tenant, now_ms)
    except sqlite3.Error:
        return None
