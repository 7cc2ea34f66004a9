"""Draining: decision rows move from the fence store into the ledger. At least once, in batches:

    read entries -> commit their rows, an object per day -> drop just these entries -> the next batch

Nothing leaves the fence store before its Parquet object is committed. A drainer that is killed in between leaves rows
in both places, and the next one stores them again: a row_id counts once, wherever it is read. Several drainers at once
do the same; the lock only keeps them from it. Afterwards small objects are compacted and old days expire.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass

from ragfence.audit.columns import table_of
from ragfence.audit.ledger import DRAINED, Ledger, by_day, once
from ragfence.audit.ledger_compaction import COMPACT_COMMITTED, COMPACT_READ, LedgerCompaction
from ragfence.core.decision_rows import Row, decode_rows
from ragfence.core.policy import AuditRules
from ragfence.engine.crash_points import reach
from ragfence.errors import TransientError
from ragfence.stores.fences import FenceStore, RowEntry

DRAIN_READ, DRAIN_COMMITTED, DRAIN_DROPPED = "drain_read", "drain_committed", "drain_dropped"
DRAIN_POINTS = (DRAIN_READ, DRAIN_COMMITTED, DRAIN_DROPPED, COMPACT_READ, COMPACT_COMMITTED)

LOCK = "drain"
LOCK_MS = 60_000
ENTRIES_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class Drained:
    rows: int = 0
    """different ones; those that an earlier drainer had stored and not dropped count again"""
    objects: int = 0
    compacted: int = 0
    """objects that were replaced by fewer"""
    packed: int = 0
    """by so many"""
    expired: int = 0
    """objects older than the policy keeps"""
    lag_ms: int = 0
    """how old the oldest row was"""
    busy: bool = False
    """somebody else is draining; nothing was done"""


@dataclass(frozen=True, slots=True)
class _Batch:
    entries: list[RowEntry]
    rows: list[Row]
    full: bool


class Drainer:
    def __init__(self, fences: FenceStore, ledger: Ledger, rules: AuditRules) -> None:
        self._fences = fences
        self._ledger = ledger
        self._rules = rules
        self._compaction = LedgerCompaction(ledger, rules)

    def drain(self, *, every_day: bool = False) -> Drained:
        """All there is now; what is written meanwhile is left for the next time."""
        token = secrets.token_hex(8)
        if not self._fences.lock(LOCK, token, LOCK_MS):
            return Drained(busy=True)
        try:
            return self._drain(token, every_day)
        finally:
            with contextlib.suppress(TransientError):
                self._fences.unlock(LOCK, token)

    def _drain(self, token: str, every_day: bool) -> Drained:
        now_ms = self._fences.now_ms()
        rows = objects = lag_ms = 0
        after, more = "", True
        while more:
            batch = self._gather(after)
            if not batch.entries:
                break
            reach(DRAIN_READ)
            oldest_ms = min((row.ts_ms for row in batch.rows), default=now_ms)
            lag_ms = max(lag_ms, now_ms - oldest_ms)
            stored = once(table_of(batch.rows, self._fences.tenant))
            for day, table in by_day(stored):
                self._ledger.write(day, table, DRAINED)
                objects += 1
            reach(DRAIN_COMMITTED)
            self._fences.drop_rows(batch.entries)
            reach(DRAIN_DROPPED)
            rows += stored.num_rows
            # Not for ever: whoever writes faster than we drain shall not keep the ledger from being compacted.
            after, more = batch.entries[-1].place, batch.full and oldest_ms <= now_ms
            self._fences.lock(LOCK, token, LOCK_MS)
        compacted = self._compaction.run(now_ms, every_day=every_day)
        return Drained(
            rows=rows,
            objects=objects,
            compacted=compacted.replaced,
            packed=compacted.written,
            expired=self._compaction.expire(now_ms),
            lag_ms=lag_ms,
        )

    def _gather(self, after: str) -> _Batch:
        """Not full: the end was reached. To go on as long as rows come would make an object of every few of them."""
        entries: list[RowEntry] = []
        rows: list[Row] = []
        while len(rows) < self._rules.drain_batch_rows:
            limit = min(ENTRIES_AT_ONCE, self._rules.drain_batch_rows - len(rows))
            page = self._fences.row_entries(entries[-1].place if entries else after, limit)
            if not page:
                return _Batch(entries, rows, full=False)
            entries += page
            for entry in page:
                rows.extend(decode_rows(entry.data))
        return _Batch(entries, rows, full=True)
