"""What was decided before a fence store forgot its counts: counted again, out of the ledger.

A store that starts empty notes since when it counts (`Tallies.begun`), by shard. Rows of the ledger that are older were
counted by nobody that is left, and all others by the store, so the sum counts each answer once. Nothing is written, and
only the days from the moment asked for to that of the loss are read: it is done when somebody asks, by no hydration.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cachetools import FIFOCache

from ragfence.audit.ledger import Ledger, Wanted
from ragfence.audit.row_reader import Rows
from ragfence.core.decision_rows import DECISION_TEXT, FLAG_TEXT, Phase
from ragfence.core.layout import FENCED_OUT, RowKind
from ragfence.core.tallies import HOUR_MS, KEPT_DAYS, MAX_ROUTE_BYTES
from ragfence.stores.objects import ObjectStore

if TYPE_CHECKING:
    import pyarrow

Decisions = Counter[tuple[str, str, str]]
"""(decision, route, kind) -> how many answers"""
SETTLED_MS = 300_000
"""so long after a loss a drainer may still be storing what it had read before"""
REMEMBERED = 8
_NAMES = ("ts", "shard", "decision", "phase", "flags", "fence", "route", "kind")


class Recount:
    """Of one tenant. What was counted once is remembered by the process."""

    def __init__(self, tenant: str, objects: ObjectStore) -> None:
        self._ledger = Ledger(tenant, objects)
        self._known: FIFOCache[tuple[int, tuple[tuple[int, int], ...]], Decisions] = FIFOCache(REMEMBERED)
        self._lock = threading.Lock()

    def before(self, begun: Mapping[int, int], since_ms: int, now_ms: int) -> Decisions:
        """What was decided from the hour of `since_ms` on and before the moments of each shard."""
        first = max(since_ms // HOUR_MS, now_ms // HOUR_MS - 24 * KEPT_DAYS)
        asked = first, tuple(sorted(begun.items()))
        last_ms = max(begun.values(), default=0)
        with self._lock:  # one of many callers reads
            if (known := self._known.get(asked)) is not None:
                return known
            found = self._count(begun, first * HOUR_MS, last_ms) if last_ms > first * HOUR_MS else Counter()
            if now_ms - last_ms > SETTLED_MS:
                self._known[asked] = found
            return found

    def _count(self, begun: Mapping[int, int], first_ms: int, last_ms: int) -> Decisions:
        wanted, found = Wanted(first_ms, last_ms), Decisions()
        if self._ledger.parts(wanted):  # else there may be no Arrow, and nobody needs it
            for day in Rows(None, self._ledger).by_day(wanted, _NAMES, lambda table: _counted(table, begun)).values():
                found.update(day)
        return found


def _counted(table: pyarrow.Table, begun: Mapping[int, int]) -> Decisions:
    import pyarrow as pa
    import pyarrow.compute as pc

    new = DECISION_TEXT[RowKind.NEW]
    limits = pa.array([begun.get(shard, 0) for shard in range(256)], pa.int64())
    forgotten = pc.less(table.column("ts").cast(pa.int64()), limits.take(table.column("shard").combine_chunks()))
    # What no store ever granted has no fence, and was counted by none: rows that are written beside it, of API keys.
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
    found = Decisions()
    for decision, route, kind, count in zip(
        *(grouped.column(name).to_pylist() for name in grouped.column_names), strict=True
    ):
        found[decision, _as_counted(route or ""), kind or ""] += count
    return found


def _as_counted(route: str) -> str:
    """As the labels of stores have it."""
    return route.encode()[:MAX_ROUTE_BYTES].decode(errors="replace")
