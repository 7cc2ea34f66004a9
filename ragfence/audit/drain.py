"""Draining: decision rows move from the fence store into the ledger, at least once and in batches.

    read entries -> commit their rows, one object per day -> drop exactly these entries -> the next batch

Nothing leaves the fence store before its Parquet object is committed. A drainer that is killed in between leaves rows
in both places, and the next one stores them again; readers count each row_id once. Several drainers at once do the
same work twice and no harm; the lock only saves them the effort.

After a drain the ledger is compacted, and days older than the policy keeps are deleted. A day that has not ended: once
there are `min_files` small objects, they become one. A day that has ended: its rows are rewritten without duplicates,
into objects that divide the 64 shards among them, so that a lookup by source_id or key reads one object and a count by
day need not look for duplicates.

New objects are committed before the ones they replace are deleted, and a compaction deletes only what it has just read
and committed elsewhere. So it may be killed anywhere, and two may work on the same day: at worst, rows are stored twice
for a while.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ragfence.audit import columns
from ragfence.audit.columns import to_table
from ragfence.audit.ledger import (
    DAY_MS,
    DRAINED,
    PACKED,
    Ledger,
    Part,
    RowQuery,
    are_disjoint,
    day_of,
    deduplicate,
    group_by_day,
    split_by_day,
)
from ragfence.core.decision_rows import Row, decode_rows
from ragfence.core.hashing import SHARDS
from ragfence.core.policy import AuditRules
from ragfence.engine.crash_points import reach
from ragfence.errors import TransientError
from ragfence.stores.fences import FenceStore, RowEntry

if TYPE_CHECKING:
    import pyarrow

COMPACT_READ, COMPACT_COMMITTED = "compact_read", "compact_committed"

PACKED_BYTES = 4 << 20
"""the largest object of a day that has ended, unless each of the 64 shards has its own"""
LATE_MS = 3_600_000
"""a day counts as ended this long after midnight: rows of its last minutes may still be written"""
LOOKED_BACK_DAYS = 7
EXPIRED_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class LedgerCompactReport:
    written: int = 0
    replaced: int = 0

    def __add__(self, other: LedgerCompactReport) -> LedgerCompactReport:
        return LedgerCompactReport(self.written + other.written, self.replaced + other.replaced)


class LedgerCompaction:
    def __init__(self, ledger: Ledger, rules: AuditRules) -> None:
        self._ledger = ledger
        self._rules = rules

    def run(self, now_ms: int, *, every_day: bool = False) -> LedgerCompactReport:
        """Compacts the last `LOOKED_BACK_DAYS` days, or with `every_day` all days."""
        since_ms = 0 if every_day else max(now_ms - LOOKED_BACK_DAYS * DAY_MS, 0)
        done = LedgerCompactReport()
        for day, parts in group_by_day(self._ledger.parts(RowQuery(since_ms))).items():
            done += self._day(day, parts, over=day < day_of(max(now_ms - LATE_MS, 0)))
        return done

    def expire(self, now_ms: int) -> int:
        """Deletes days that ended longer ago than the policy keeps. Returns the number of deleted objects."""
        first_kept = day_of(max(int(now_ms - self._rules.keep_days * DAY_MS), 0))
        gone = 0
        while old := [part.name for part in self._ledger.oldest(EXPIRED_AT_ONCE) if part.day < first_kept]:
            self._ledger.delete(old)
            gone += len(old)
            if len(old) < EXPIRED_AT_ONCE:
                break
        return gone

    def _day(self, day: str, parts: Sequence[Part], *, over: bool) -> LedgerCompactReport:
        if over:
            return LedgerCompactReport() if _is_compact(parts) else self._rewrite(day, parts, _shares(parts))
        small = sorted(
            (part for part in parts if part.size < self._rules.compact_below_bytes), key=lambda part: part.size
        )
        if len(small) < self._rules.min_files:
            return LedgerCompactReport()
        taken: list[Part] = []
        room = 2 * self._rules.compact_below_bytes
        for part in small:
            room -= part.size
            if room >= 0 or len(taken) < 2:
                taken.append(part)
        return self._rewrite(day, taken, [range(SHARDS)])

    def _rewrite(self, day: str, parts: Sequence[Part], shares: Sequence[range]) -> LedgerCompactReport:
        with tempfile.TemporaryDirectory(prefix="ragfence-ledger-") as folder:
            spilled = _SpillFiles(Path(folder), shares)
            for part in parts:
                table = self._ledger.read(part, RowQuery(), columns.schema().names)
                if table is None:
                    return LedgerCompactReport()  # another process is compacting this day
                spilled.add(table)
            reach(COMPACT_READ)
            written = {self._ledger.write(day, deduplicate(table), PACKED).name for table in spilled.tables()}
        reach(COMPACT_COMMITTED)
        # A written object may be one that was read: objects with equal rows have equal names.
        replaced = [part.name for part in parts if part.name not in written]
        self._ledger.delete(replaced)
        return LedgerCompactReport(len(written), len(replaced))


class _SpillFiles:
    """Rows by range of shards, in temporary files, because a day may be larger than memory."""

    def __init__(self, folder: Path, shares: Sequence[range]) -> None:
        self._folder = folder
        self._shares = shares
        self._held: list[pyarrow.Table] = []

    def add(self, table: pyarrow.Table) -> None:
        import pyarrow as pa

        if len(self._shares) == 1:
            self._held.append(table)
            return
        for at, share in enumerate(self._shares):
            members = RowQuery(shards=share).select(table)
            if members.num_rows:
                number = len(list(self._folder.iterdir()))
                with pa.ipc.new_file(self._folder / f"{at}-{number}.arrow", members.schema) as file:
                    file.write_table(members)

    def tables(self) -> Iterator[pyarrow.Table]:
        import pyarrow as pa

        if self._held:
            yield pa.concat_tables(self._held)
        for at in range(len(self._shares)):
            files = sorted(self._folder.glob(f"{at}-*.arrow"))
            if files:
                yield pa.concat_tables(pa.ipc.open_file(pa.memory_map(str(file))).read_all() for file in files)


def _is_compact(parts: Sequence[Part]) -> bool:
    return are_disjoint(parts) and (len(parts) == 1 or all(part.how == PACKED for part in parts))


def _shares(parts: Iterable[Part]) -> list[range]:
    """Divides the shards into equal ranges, as many as it takes for objects of about `PACKED_BYTES`."""
    count, size = 1, sum(part.size for part in parts)
    while count < SHARDS and size > count * PACKED_BYTES:
        count *= 2
    step = SHARDS // count
    return [range(start, start + step) for start in range(0, SHARDS, step)]


DRAIN_READ, DRAIN_COMMITTED, DRAIN_DROPPED = "drain_read", "drain_committed", "drain_dropped"
DRAIN_POINTS = (DRAIN_READ, DRAIN_COMMITTED, DRAIN_DROPPED, COMPACT_READ, COMPACT_COMMITTED)

LOCK = "drain"
LOCK_MS = 60_000
ENTRIES_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class DrainReport:
    rows: int = 0
    """distinct rows; those that an earlier drainer had stored but not dropped count again"""
    objects: int = 0
    compacted: int = 0
    """objects that were replaced by `packed` larger ones"""
    packed: int = 0
    expired: int = 0
    """objects deleted because they were older than the policy keeps"""
    lag_ms: int = 0
    """age of the oldest row"""
    busy: bool = False
    """another process is draining; nothing was done"""


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

    def drain(self, *, every_day: bool = False) -> DrainReport:
        """Drains the rows that exist now. Rows written meanwhile are left for the next drain."""
        token = secrets.token_hex(8)
        if not self._fences.lock(LOCK, token, LOCK_MS):
            return DrainReport(busy=True)
        try:
            return self._drain(token, every_day)
        finally:
            with contextlib.suppress(TransientError):
                self._fences.unlock(LOCK, token)

    def _drain(self, token: str, every_day: bool) -> DrainReport:
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
            stored = deduplicate(to_table(batch.rows, self._fences.tenant))
            for day, table in split_by_day(stored):
                self._ledger.write(day, table, DRAINED)
                objects += 1
            reach(DRAIN_COMMITTED)
            self._fences.drop_rows(batch.entries)
            reach(DRAIN_DROPPED)
            rows += stored.num_rows
            # Stop at rows newer than the start: a fast writer must not keep the ledger from being compacted.
            after, more = batch.entries[-1].place, batch.full and oldest_ms <= now_ms
            self._fences.lock(LOCK, token, LOCK_MS)
        compacted = self._compaction.run(now_ms, every_day=every_day)
        return DrainReport(
            rows=rows,
            objects=objects,
            compacted=compacted.replaced,
            packed=compacted.written,
            expired=self._compaction.expire(now_ms),
            lag_ms=lag_ms,
        )

    def _gather(self, after: str) -> _Batch:
        """Reads entries up to a full batch. A batch that is not full is the last: to go on for as long as rows arrive
        would make an object of every few rows."""
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
