"""Few large objects out of many small ones, each row in one of them; and what is older than the policy keeps goes.

A day that goes on: once there are `min_files` small objects, they are made into one. A day that is over: its rows are
written once more, each once, into objects that share the 64 shards among them, so that a lookup by source_id or key
reads one of them and a count by day need not look for doubles.

New objects are committed before those that they replace are deleted, and nobody deletes what he has not just read and
committed elsewhere. So a compaction may be killed anywhere, and two may work on the same day: the worst that happens is
that rows stand twice for a while.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ragfence.audit import columns
from ragfence.audit.ledger import DAY_MS, PACKED, Ledger, Part, Wanted, day_of, is_flat, once, parts_by_day
from ragfence.core.hashing import SHARDS
from ragfence.core.policy import AuditRules
from ragfence.engine.crash_points import reach

if TYPE_CHECKING:
    import pyarrow

COMPACT_READ, COMPACT_COMMITTED = "compact_read", "compact_committed"

PACKED_BYTES = 4 << 20
"""what an object of a day that is over has at the most, unless all 64 shards have one each"""
LATE_MS = 3_600_000
"""after its end a day counts as going on for so long: what was decided just before midnight may still come"""
LOOKED_BACK_DAYS = 7
EXPIRED_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class LedgerCompacted:
    written: int = 0
    replaced: int = 0

    def __add__(self, other: LedgerCompacted) -> LedgerCompacted:
        return LedgerCompacted(self.written + other.written, self.replaced + other.replaced)


class LedgerCompaction:
    def __init__(self, ledger: Ledger, rules: AuditRules) -> None:
        self._ledger = ledger
        self._rules = rules

    def run(self, now_ms: int, *, every_day: bool = False) -> LedgerCompacted:
        """Over the last days; a day that was left alone for longer is looked at only if every day is."""
        since_ms = 0 if every_day else max(now_ms - LOOKED_BACK_DAYS * DAY_MS, 0)
        done = LedgerCompacted()
        for day, parts in parts_by_day(self._ledger.parts(Wanted(since_ms))).items():
            done += self._day(day, parts, over=day < day_of(max(now_ms - LATE_MS, 0)))
        return done

    def expire(self, now_ms: int) -> int:
        """How many objects went: whole days, counted from their end."""
        first_kept = day_of(max(int(now_ms - self._rules.keep_days * DAY_MS), 0))
        gone = 0
        while old := [part.name for part in self._ledger.oldest(EXPIRED_AT_ONCE) if part.day < first_kept]:
            self._ledger.delete(old)
            gone += len(old)
            if len(old) < EXPIRED_AT_ONCE:
                break
        return gone

    def _day(self, day: str, parts: Sequence[Part], *, over: bool) -> LedgerCompacted:
        if over:
            return LedgerCompacted() if _is_settled(parts) else self._rewrite(day, parts, _shares(parts))
        small = sorted(
            (part for part in parts if part.size < self._rules.compact_below_bytes), key=lambda part: part.size
        )
        if len(small) < self._rules.min_files:
            return LedgerCompacted()
        taken: list[Part] = []
        room = 2 * self._rules.compact_below_bytes
        for part in small:
            room -= part.size
            if room >= 0 or len(taken) < 2:
                taken.append(part)
        return self._rewrite(day, taken, [range(SHARDS)])

    def _rewrite(self, day: str, parts: Sequence[Part], shares: Sequence[range]) -> LedgerCompacted:
        with tempfile.TemporaryDirectory(prefix="ragfence-ledger-") as folder:
            spilled = _Spilled(Path(folder), shares)
            for part in parts:
                table = self._ledger.read(part, Wanted(), columns.schema().names)
                if table is None:
                    return LedgerCompacted()  # somebody else is at this day
                spilled.add(table)
            reach(COMPACT_READ)
            written = {self._ledger.write(day, once(table), PACKED).name for table in spilled.tables()}
        reach(COMPACT_COMMITTED)
        # What was written may be what was read: of two objects with equal rows, one is the other's outcome.
        replaced = [part.name for part in parts if part.name not in written]
        self._ledger.delete(replaced)
        return LedgerCompacted(len(written), len(replaced))


class _Spilled:
    """Rows by share of the shards, in files: a day may be larger than memory."""

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
            members = Wanted(shards=share).of(table)
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


def _is_settled(parts: Sequence[Part]) -> bool:
    return is_flat(parts) and (len(parts) == 1 or all(part.how == PACKED for part in parts))


def _shares(parts: Iterable[Part]) -> list[range]:
    """Equal shares of the shards, as many as it takes for objects of a handy size."""
    count, size = 1, sum(part.size for part in parts)
    while count < SHARDS and size > count * PACKED_BYTES:
        count *= 2
    step = SHARDS // count
    return [range(start, start + step) for start in range(0, SHARDS, step)]
