"""Every decision row once: those still in the fence store together with those in the ledger.

A row moves from the fence store into the ledger, and within it from small objects into large ones; it is always written
before it is deleted. So the fence store is read first, then the ledger, and the ledger is listed until a listing shows
nothing that was not read: whatever moves meanwhile is found in at least one place, and its row_id counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ragfence.audit import columns
from ragfence.audit.ledger import Ledger, Part, Wanted, by_day, day_of, is_flat, once, parts_by_day
from ragfence.core.decision_rows import Row
from ragfence.core.layout import FENCED_POSITION, RELEASE_POSITION, SEAL_POSITION
from ragfence.stores.fences import FenceStore

if TYPE_CHECKING:
    import pyarrow

Outcome = TypeVar("Outcome")
_FOR_ONCE = ("row_id", "ts")
_FOR_ORDER = ("row_id", "ts", "fence", "decision", "sealed_at")


class Rows:
    def __init__(self, fences: FenceStore | None, ledger: Ledger | None) -> None:
        """Without one of the two: only those of the other."""
        self._fences = fences
        self.ledger = ledger

    def by_day(
        self,
        wanted: Wanted,
        names: Sequence[str],
        outcome: Callable[[pyarrow.Table], Outcome],
        *,
        coded: Sequence[str] = (),
    ) -> dict[str, Outcome]:
        """What a function makes of the columns of each day, oldest first; one day is in memory at a time.

        `coded` of them are Arrow dictionaries.
        """
        fresh = dict(by_day(_coded(self._undrained(wanted), coded)))
        done: dict[str, Outcome] = {}
        seen: set[str] = set()
        first = True
        while True:
            listed = self.ledger.parts(wanted) if self.ledger is not None else []
            news = {part.day for part in listed if part.name not in seen}
            if first:
                news |= set(fresh)
            if not news:
                return dict(sorted(done.items()))
            days = parts_by_day(listed)
            for day in sorted(news):
                parts = days.get(day, [])
                seen.update(part.name for part in parts)
                done[day] = outcome(self._day(wanted, names, fresh.get(day), parts, coded))
            first = False

    def table(self, wanted: Wanted, names: Sequence[str]) -> pyarrow.Table:
        """All of them in one table, oldest first."""
        import pyarrow as pa

        needed = list(dict.fromkeys((*names, *_FOR_ORDER)))
        days = self.by_day(wanted, needed, lambda table: table)
        # Once more over all days: a row that a retry wrote again after midnight is in both.
        whole = once(pa.concat_tables(days.values())) if days else columns.schema().empty_table()
        return _in_order(whole).select(list(names))

    def rows(self, wanted: Wanted) -> Iterator[Row]:
        """Oldest first."""
        return columns.rows_in(self.table(wanted, columns.schema().names))

    def first(self, wanted: Wanted, found: Callable[[Row], Any]) -> Any:
        """What a function finds in one of the rows, the newest days first; None if it finds nothing."""
        for row in columns.rows_in(self._undrained(wanted)):
            if (value := found(row)) is not None:
                return value
        seen: set[str] = set()
        while self.ledger is not None:
            listed = [part for part in self.ledger.parts(wanted) if part.name not in seen]
            if not listed:
                break
            for part in reversed(listed):
                seen.add(part.name)
                table = self.ledger.read(part, wanted, columns.schema().names)
                for row in columns.rows_in(table) if table is not None else ():
                    if (value := found(row)) is not None:
                        return value
        return None

    def days(self, wanted: Wanted) -> list[str]:
        """On which there may be such rows, oldest first."""
        fresh = {day_of(row.ts_ms) for row in self._fences.rows(max(wanted.since_ms, 0))} if self._fences else set()
        return sorted(fresh | {part.day for part in (self.ledger.parts(wanted) if self.ledger else ())})

    def ledger_bytes(self) -> int:
        return sum(part.size for part in self.ledger.parts()) if self.ledger is not None else 0

    def _undrained(self, wanted: Wanted) -> pyarrow.Table:
        if self._fences is None:
            return columns.schema().empty_table()
        only = wanted.shards.start if len(wanted.shards) == 1 else None
        rows = (
            row
            for row in self._fences.rows(max(wanted.since_ms, 0), only)
            if row.ts_ms < wanted.until_ms and row.key[0] in wanted.shards
        )
        return once(wanted.of(columns.table_of(rows, self._fences.tenant)))

    def _day(
        self,
        wanted: Wanted,
        names: Sequence[str],
        fresh: pyarrow.Table | None,
        parts: Sequence[Part],
        coded: Sequence[str],
    ) -> pyarrow.Table:
        import pyarrow as pa

        alone = is_flat(parts) if fresh is None else not parts
        needed = list(names) if alone else list(dict.fromkeys((*names, *_FOR_ONCE)))
        tables = [fresh.select(needed)] if fresh is not None else []
        for part in parts:
            assert self.ledger is not None
            # One that is gone was replaced by one that the next listing shows.
            if (table := self.ledger.read(part, wanted, needed, coded=coded)) is not None:
                tables.append(table)
        if not tables:
            return _coded(columns.schema().empty_table(), coded).select(list(names))
        whole = pa.concat_tables(tables).unify_dictionaries()
        return (whole if alone else once(whole)).select(list(names))


def _coded(table: pyarrow.Table, names: Sequence[str]) -> pyarrow.Table:
    for name in names:
        table = table.set_column(table.schema.get_field_index(name), name, table.column(name).dictionary_encode())
    return table


def _in_order(table: pyarrow.Table) -> pyarrow.Table:
    """By time, then as the fences were given; within an attempt and a millisecond as `story` has it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    fences = pc.split_pattern(pc.fill_null(table.column("fence"), "0.0"), ".", max_splits=1)
    position, decision = pc.utf8_slice_codeunits(table.column("row_id"), 24, 26), table.column("decision")
    steps = pc.case_when(
        pc.make_struct(
            pc.equal(decision, "ended"),
            pc.is_in(position, pa.array([f"{at:02x}" for at in (FENCED_POSITION, SEAL_POSITION, RELEASE_POSITION)])),
            pc.equal(decision, "new"),
            pc.is_valid(table.column("sealed_at")),
        ),
        *(pa.scalar(step, pa.int8()) for step in (4, 2, 0, 3, 1)),
    )
    keys = pa.table(
        {
            "ts": table.column("ts"),
            "epoch": pc.cast(pc.list_element(fences, 0), pa.int64()),
            "counter": pc.cast(pc.list_element(fences, 1), pa.int64()),
            "step": steps,
            "position": position,
            "row_id": table.column("row_id"),
        }
    )
    return table.take(pc.sort_indices(keys, [(name, "ascending") for name in keys.column_names]))
