"""Statistics of a fence: what it holds, and how many effects it saved.

The numbers come from counts that the fence store keeps, so nothing is scanned. A store that starts empty notes, for
each shard, since when it has counted (`Tallies.begun`). Decisions before that moment are counted from the ledger
(`Recount`); all later ones are in the store's counts, so each answer is counted once. Only the days between the moment
asked for and the loss are read, only when statistics are requested, and nothing is written.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cachetools import FIFOCache

from ragfence.audit.ledger import Ledger, RowQuery
from ragfence.audit.row_reader import RowReader
from ragfence.core.decision_rows import DECISION_TEXT, FLAG_TEXT, Phase
from ragfence.core.layout import FENCED_OUT, RowKind, State
from ragfence.core.moments import parse_moment
from ragfence.core.records import ENDED
from ragfence.core.tallies import HOUR_MS, KEPT_DAYS, MAX_ROUTE_BYTES
from ragfence.errors import RagfenceError
from ragfence.stores.checkups.disk import expired_records
from ragfence.stores.fences import FenceStore, Scanned
from ragfence.stores.objects import ObjectStore

if TYPE_CHECKING:
    import pyarrow

_ENDED = frozenset(state.name.lower() for state in ENDED)
_QUARANTINED, _LOCKED = State.QUARANTINED.name.lower(), State.LOCKED.name.lower()


@dataclass(frozen=True, slots=True)
class KeyCount:
    """The number of keys of a kind in a state."""

    kind: str
    state: str
    count: int
    estimated: bool
    """ended keys are counted by the hours in which they were sealed and expire; pending keys may have been sampled"""


@dataclass(frozen=True, slots=True)
class EndpointCount:
    """Decisions of one route and kind."""

    route: str
    kind: str
    decisions: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class FenceStats:
    """Numbers of one tenant. Decisions are counted from the start of the hour that `since` is in."""

    tenant: str
    since: str
    documents: int
    """live ones, exact"""
    processed: int
    """effects that ran and were sealed"""
    duplicates: int
    """answers without an effect"""
    decisions: Mapping[str, int]
    keys: int
    """stored keys, without documents: those without an outcome, and an estimate of the ended ones"""
    pending: int
    """keys without an outcome, except quarantined ones and locks"""
    quarantined: int
    average_ttl_s: float | None
    """how long ended keys are kept from now on, on average, by the estimate; None: none of them expires"""
    rows: int
    """undrained decision rows; on Redis, undrained entries, which may hold several rows"""
    bytes: int | None
    """size of the fence store, of all tenants"""
    expired: int | None
    """expired records that were not purged yet, up to 10,000; None: unknown"""
    records: tuple[KeyCount, ...] = ()
    endpoints: tuple[EndpointCount, ...] = ()
    oldest_pending: Scanned | None = field(default=None, repr=False)
    locks: int = 0
    """locks that are held, or whose holder died"""
    counted_since_ms: int | None = None
    """None: all decisions are counted. Else, counted from this moment on: the store forgot earlier ones, and the ledger
    cannot be read"""

    @property
    def hit_rate(self) -> float | None:
        """The share of operations that were answered without an effect; None if there were no operations."""
        key = self.processed + self.duplicates
        return self.duplicates / key if key else None


DecisionCounts = Counter[tuple[str, str, str]]
"""(decision, route, kind) -> how many answers"""
SETTLED_MS = 300_000
"""a drainer may still store rows that it read before the loss, for this long"""
MAX_REMEMBERED = 8
_NAMES = ("ts", "shard", "decision", "phase", "flags", "fence", "route", "kind")


class Recount:
    """Counts decisions of one tenant from the ledger. Results are remembered by the process."""

    def __init__(self, tenant: str, objects: ObjectStore) -> None:
        self._ledger = Ledger(tenant, objects)
        self._known: FIFOCache[tuple[int, tuple[tuple[int, int], ...]], DecisionCounts] = FIFOCache(MAX_REMEMBERED)
        self._lock = threading.Lock()

    def count_before(self, begun: Mapping[int, int], since_ms: int, now_ms: int) -> DecisionCounts:
        """Counts decisions from the hour of `since_ms` up to the moment in `begun` of each shard."""
        first = max(since_ms // HOUR_MS, now_ms // HOUR_MS - 24 * KEPT_DAYS)
        key = first, tuple(sorted(begun.items()))
        last_ms = max(begun.values(), default=0)
        with self._lock:  # of several callers, one reads
            if (known := self._known.get(key)) is not None:
                return known
            found = self._count(begun, first * HOUR_MS, last_ms) if last_ms > first * HOUR_MS else Counter()
            if now_ms - last_ms > SETTLED_MS:
                self._known[key] = found
            return found

    def _count(self, begun: Mapping[int, int], first_ms: int, last_ms: int) -> DecisionCounts:
        query, found = RowQuery(first_ms, last_ms), DecisionCounts()
        if self._ledger.parts(query):  # without a ledger, PyArrow is not needed and may not be installed
            for day in (
                RowReader(None, self._ledger).map_days(query, _NAMES, lambda table: _count_day(table, begun)).values()
            ):
                found.update(day)
        return found


def _count_day(table: pyarrow.Table, begun: Mapping[int, int]) -> DecisionCounts:
    import pyarrow as pa
    import pyarrow.compute as pc

    new = DECISION_TEXT[RowKind.NEW]
    limits = pa.array([begun.get(shard, 0) for shard in range(256)], pa.int64())
    forgotten = pc.less(table.column("ts").cast(pa.int64()), limits.take(table.column("shard").combine_chunks()))
    # Rows of API keys are written straight into the ledger. They have no fence number, and no store ever counted them.
    sealed = pc.and_(pc.equal(table.column("phase"), Phase.SEAL.value), pc.is_valid(table.column("fence")))
    answered = pc.or_(pc.not_equal(table.column("decision"), new), sealed)
    table = table.filter(pc.and_(forgotten, answered))
    flags = pc.fill_null(pc.binary_join(table.column("flags"), " "), "")
    twice = pc.and_(
        pc.match_substring(flags, FLAG_TEXT[FENCED_OUT]),
        pc.equal(table.column("decision"), DECISION_TEXT[RowKind.DUPLICATE]),
    )
    decisions = pc.if_else(twice, "fenced_out", table.column("decision"))
    grouped = pa.table({"decision": decisions, "route": table.column("route"), "kind": table.column("kind")})
    grouped = grouped.group_by(["decision", "route", "kind"]).aggregate([([], "count_all")])
    found = DecisionCounts()
    for decision, route, kind, count in zip(
        *(grouped.column(name).to_pylist() for name in grouped.column_names), strict=True
    ):
        found[decision, _route_label(route or ""), kind or ""] += count
    return found


def _route_label(route: str) -> str:
    """The route as the counts of stores have it."""
    return route.encode()[:MAX_ROUTE_BYTES].decode(errors="replace")


def collect_stats(fences: FenceStore, since: str = "24h", recount: Recount | None = None) -> FenceStats:
    now_ms = fences.now_ms()
    held = fences.stats()
    decisions: Counter[str] = Counter()
    endpoints: dict[tuple[str, str], Counter[str]] = {}
    since_ms = parse_moment(since, now_ms, 0)
    tallies = fences.tallies(since_ms)
    counted, counted_since_ms = tallies.decisions(), None
    if tallies.begun and recount is not None:
        try:
            counted += recount.count_before(tallies.begun, since_ms, now_ms)
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
    locks = sum(each.count for each in records if each.state == _LOCKED)
    return FenceStats(
        tenant=fences.tenant,
        since=since,
        documents=held.documents,
        processed=decisions["new"],
        duplicates=decisions["duplicate"],
        decisions=dict(+decisions),
        keys=sum(each.count for each in records),
        pending=held.pending.count - quarantined - locks,
        quarantined=quarantined,
        average_ttl_s=held.average_ttl_s,
        rows=held.rows,
        bytes=held.bytes,
        expired=count_expired(fences, now_ms),
        records=records,
        endpoints=tuple(EndpointCount(*where, dict(counted)) for where, counted in sorted(endpoints.items())),
        oldest_pending=held.pending.oldest,
        locks=locks,
        counted_since_ms=counted_since_ms,
    )


def count_expired(fences: FenceStore, now_ms: int) -> int | None:
    """Counts expired records that were not purged yet. Redis has none, because it deletes them itself."""
    inner: Any = getattr(fences, "inner", fences)  # the store inside an instrumented one
    if hasattr(inner, "infos"):
        return 0
    if not hasattr(inner, "path"):
        return None
    try:
        return expired_records(inner.path, fences.tenant, now_ms)
    except sqlite3.Error:
        return None
