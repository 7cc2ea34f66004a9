"""Reads every decision row once, from the fence store and the ledger.

A row moves from the fence store into the ledger, and there from small objects into larger ones. It is always written
before it is deleted. So the fence store is read first, then the ledger, which is listed again until a listing shows
nothing new: a row that moves meanwhile is found in at least one place, and its row_id counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ragfence.audit import columns
from ragfence.audit.ledger import Ledger, Part, RowQuery, are_disjoint, day_of, deduplicate, group_by_day, split_by_day
from ragfence.core.decision_rows import Row
from ragfence.core.layout import FENCED_POSITION, RELEASE_POSITION, SEAL_POSITION
from ragfence.stores.fences import FenceStore

if TYPE_CHECKING:
    import pyarrow

DayResult = TypeVar("DayResult")
_DEDUPLICATION_COLUMNS = ("row_id", "ts")
_ORDER_COLUMNS = ("row_id", "ts", "fence", "decision", "sealed_at")


class RowReader:
    def __init__(self, fences: FenceStore | None, ledger: Ledger | None) -> None:
        """Without one of the two, only rows of the other are read."""
        self._fences = fences
        self.ledger = ledger

    def map_days(
        self,
        query: RowQuery,
        names: Sequence[str],
        act: Callable[[pyarrow.Table], DayResult],
        *,
        dictionaries: Sequence[str] = (),
    ) -> dict[str, DayResult]:
        """Calls a function with the columns of each day and returns its results by day, oldest first.

        One day is in memory at a time. Columns in `dictionaries` are Arrow dictionaries.
        """
        fresh = dict(split_by_day(_encode_dictionaries(self._undrained_rows(query), dictionaries)))
        done: dict[str, DayResult] = {}
        seen: set[str] = set()
        first = True
        while True:
            listed = self.ledger.parts(query) if self.ledger is not None else []
            news = {part.day for part in listed if part.name not in seen}
            if first:
                news |= set(fresh)
            if not news:
                return dict(sorted(done.items()))
            days = group_by_day(listed)
            for day in sorted(news):
                parts = days.get(day, [])
                seen.update(part.name for part in parts)
                done[day] = act(self._day(query, names, fresh.get(day), parts, dictionaries))
            first = False

    def table(self, query: RowQuery, names: Sequence[str]) -> pyarrow.Table:
        """Returns the selected rows in one table, oldest first."""
        import pyarrow as pa

        needed = list(dict.fromkeys((*names, *_ORDER_COLUMNS)))
        days = self.map_days(query, needed, lambda table: table)
        # Deduplicated over all days: a row that a retry wrote again after midnight is in two of them.
        whole = deduplicate(pa.concat_tables(days.values())) if days else columns.schema().empty_table()
        return _sort(whole).select(list(names))

    def rows(self, query: RowQuery) -> Iterator[Row]:
        """Yields the selected rows, oldest first."""
        return columns.to_rows(self.table(query, columns.schema().names))

    def first(self, query: RowQuery, find: Callable[[Row], Any]) -> Any:
        """Returns the first result of `find` that is not None, newest days first; None if there is none."""
        for row in columns.to_rows(self._undrained_rows(query)):
            if (value := find(row)) is not None:
                return value
        seen: set[str] = set()
        while self.ledger is not None:
            listed = [part for part in self.ledger.parts(query) if part.name not in seen]
            if not listed:
                break
            for part in reversed(listed):
                seen.add(part.name)
                table = self.ledger.read(part, query, columns.schema().names)
                for row in columns.to_rows(table) if table is not None else ():
                    if (value := find(row)) is not None:
                        return value
        return None

    def days(self, query: RowQuery) -> list[str]:
        """The days that may have such rows, oldest first."""
        fresh = {day_of(row.ts_ms) for row in self._fences.rows(max(query.since_ms, 0))} if self._fences else set()
        return sorted(fresh | {part.day for part in (self.ledger.parts(query) if self.ledger else ())})

    def ledger_bytes(self) -> int:
        return sum(part.size for part in self.ledger.parts()) if self.ledger is not None else 0

    def _undrained_rows(self, query: RowQuery) -> pyarrow.Table:
        if self._fences is None:
            return columns.schema().empty_table()
        only = query.shards.start if len(query.shards) == 1 else None
        rows = (
            row
            for row in self._fences.rows(max(query.since_ms, 0), only)
            if row.ts_ms < query.until_ms and row.key[0] in query.shards
        )
        return deduplicate(query.select(columns.to_table(rows, self._fences.tenant)))

    def _day(
        self,
        query: RowQuery,
        names: Sequence[str],
        fresh: pyarrow.Table | None,
        parts: Sequence[Part],
        dictionaries: Sequence[str],
    ) -> pyarrow.Table:
        import pyarrow as pa

        alone = are_disjoint(parts) if fresh is None else not parts
        needed = list(names) if alone else list(dict.fromkeys((*names, *_DEDUPLICATION_COLUMNS)))
        tables = [fresh.select(needed)] if fresh is not None else []
        for part in parts:
            assert self.ledger is not None
            # A part that is gone was replaced by one that the next listing shows.
            if (table := self.ledger.read(part, query, needed, dictionaries=dictionaries)) is not None:
                tables.append(table)
        if not tables:
            return _encode_dictionaries(columns.schema().empty_table(), dictionaries).select(list(names))
        whole = pa.concat_tables(tables).unify_dictionaries()
        return (whole if alone else deduplicate(whole)).select(list(names))


def _encode_dictionaries(table: pyarrow.Table, names: Sequence[str]) -> pyarrow.Table:
    for name in names:
        table = table.set_column(table.schema.get_field_index(name), name, table.column(name).dictionary_encode())
    return table


def _sort(table: pyarrow.Table) -> pyarrow.Table:
    """Sorts by time, then by fence number, then within an attempt and millisecond as `timeline` does."""
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
