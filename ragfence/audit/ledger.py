"""The ledger: decision rows in the object store, as Parquet objects that are created once and never changed.

    <tenant>/ledger/date=2026-01-31/<how>-<shards>-<from>-<to>-<digest>.parquet

`date` is that of the rows' `ts` in UTC. The name lets a reader skip an object: `how` it was made (`drained` or
`packed`), its first and last shard, its first and last millisecond of the day, and a digest of its rows, so that equal
rows make the same object, whichever process writes them.

No object holds a row twice. Two objects may hold the same row: a drainer was killed before it deleted the rows from the
fence store, or a compaction before it deleted what it had replaced. Readers of several objects count each row_id once.
Rows of an object are sorted by shard, source_id and time, so that a lookup reads one group of rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ragfence.audit import columns
from ragfence.core.operations import encoded
from ragfence.stores.local import LocalObjects
from ragfence.stores.objects import ObjectEntry, ObjectStore

if TYPE_CHECKING:
    import pyarrow

DRAINED, PACKED = "drained", "packed"
DAY_MS = 86_400_000
SORTED_BY = [("shard", "ascending"), ("source_id", "ascending"), ("ts", "ascending"), ("row_id", "ascending")]

_NAME = re.compile(
    r"date=(?P<day>\d{4}-\d\d-\d\d)/(?P<how>drained|packed)-(?P<first>[0-9a-f]{2})-(?P<last>[0-9a-f]{2})"
    r"-(?P<start>\d{8})-(?P<end>\d{8})-[0-9a-f]{32}\.parquet"
)
_LAST_DAY_MS = 253_402_214_400_000
"""9999-12-31: a clock that is far off must not keep rows from being stored"""
_ALL = 2**62


class Part(NamedTuple):
    """An object of the ledger, as described by its name."""

    name: str
    day: str
    how: str
    first_shard: int
    last_shard: int
    first_ms: int
    last_ms: int
    size: int

    def overlaps(self, other: Part) -> bool:
        """Whether both may hold the same row."""
        return self.first_shard <= other.last_shard and other.first_shard <= self.last_shard


class RowQuery(NamedTuple):
    """Selects rows by time (`until_ms` is excluded), shards, and the values of columns."""

    since_ms: int = 0
    until_ms: int = _ALL
    shards: range = range(256)
    values: tuple[tuple[str, str], ...] = ()
    """(column, text)"""

    def may_match(self, part: Part) -> bool:
        in_time = part.first_ms < self.until_ms and part.last_ms >= self.since_ms
        return in_time and part.first_shard < self.shards.stop and part.last_shard >= self.shards.start

    def narrow(self, part: Part) -> RowQuery:
        """The query without the conditions that all rows of the part meet, according to its name."""
        return self._replace(
            since_ms=0 if part.first_ms >= self.since_ms else self.since_ms,
            until_ms=_ALL if part.last_ms < self.until_ms else self.until_ms,
            shards=range(256) if part.first_shard in self.shards and part.last_shard in self.shards else self.shards,
        )

    def limit_to_day(self, day: str) -> RowQuery:
        midnight = _midnight_ms(day)
        # The last day also has the rows of a clock that is far off.
        end = midnight + DAY_MS if midnight < _LAST_DAY_MS else _ALL
        return self._replace(since_ms=max(self.since_ms, midnight), until_ms=min(self.until_ms, end))

    def column_names(self) -> list[str]:
        """The columns that `select` needs."""
        timed = ["ts"] if self.since_ms > 0 or self.until_ms < _ALL else []
        sharded = ["shard"] if self.shards != range(256) else []
        return [*timed, *sharded, *(name for name, _ in self.values)]

    def select(self, table: pyarrow.Table) -> pyarrow.Table:
        """Returns the selected rows of a table, which must have the columns of `column_names`."""
        import pyarrow as pa
        import pyarrow.compute as pc

        masks = [pc.equal(table.column(name), value) for name, value in self.values]
        if self.since_ms > 0:
            masks.append(pc.greater_equal(table.column("ts").cast(pa.int64()), self.since_ms))
        if self.until_ms < _ALL:
            masks.append(pc.less(table.column("ts").cast(pa.int64()), self.until_ms))
        if self.shards != range(256):
            masks.append(pc.greater_equal(table.column("shard"), self.shards.start))
            masks.append(pc.less(table.column("shard"), self.shards.stop))
        for mask in masks[1:]:
            masks[0] = pc.and_(masks[0], mask)
        return table.filter(masks[0]) if masks else table


class Ledger:
    def __init__(self, tenant: str, objects: ObjectStore) -> None:
        self.tenant = tenant
        self.prefix = f"{encoded(tenant)}/ledger/"
        self._objects = objects

    def parts(self, query: RowQuery = RowQuery()) -> list[Part]:  # noqa: B008  # it is a value
        """Lists the parts that may hold such rows. Earlier and later days are not listed."""
        # "date=2026-01-31" itself sorts before all names in that day.
        after = f"{self.prefix}date={day_of(query.since_ms)}" if query.since_ms > 0 else ""
        last = day_of(query.until_ms)
        found = []
        for entry in self._objects.list(self.prefix, start_after=after):
            part = self._part(entry)
            if part is None:
                continue
            if part.day > last:
                break
            if query.may_match(part):
                found.append(part)
        return found

    def oldest(self, limit: int) -> list[Part]:
        entries = self._objects.list(self.prefix, limit=limit)
        return [part for entry in entries if (part := self._part(entry)) is not None]

    def read(
        self, part: Part, query: RowQuery, names: Sequence[str], *, dictionaries: Sequence[str] = ()
    ) -> pyarrow.Table | None:
        """Reads the selected rows of a part. None: the object is gone, and a new listing has what replaced it.

        Columns in `dictionaries` are read as Arrow dictionaries, which are counted in a tenth of the time.
        """
        source = self._open_source(part.name)
        if source is None:
            return None
        query = query.narrow(part)
        file = columns.open_file(part.name, source, dictionaries=dictionaries)
        needed = list(dict.fromkeys((*names, *query.column_names())))
        groups = [at for at in range(file.metadata.num_row_groups) if _may_hold(file.metadata.row_group(at), query)]
        if query.values:  # on most days a source has no row, and these columns are a tenth of all bytes
            match = {
                at: columns.read_columns(file, query.column_names(), [at], dictionaries=dictionaries) for at in groups
            }
            groups = [at for at, table in match.items() if query.select(table).num_rows]
        everything = len(groups) == file.metadata.num_row_groups
        table = columns.read_columns(file, needed, None if everything else groups, dictionaries=dictionaries)
        return query.select(table).select(list(names))

    def _open_source(self, name: str) -> Any:
        """A memory map of a local file, of which only the needed pages are read; else all bytes of the object."""
        if isinstance(self._objects, LocalObjects):
            import pyarrow as pa

            try:
                return pa.memory_map(str(self._objects._objects / name))
            except FileNotFoundError:
                return None
        return self._objects.get(name)

    def write(self, day: str, table: pyarrow.Table, how: str, *, salt: bytes = b"") -> Part:
        """Stores rows of one day, which must be distinct. It is fine if the object exists already.

        `salt` gives changed rows another name than that of the object they replace.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        table = table.sort_by(SORTED_BY)
        times = pc.min_max(table.column("ts").cast(pa.int64())).as_py()
        shards = pc.min_max(table.column("shard")).as_py()
        midnight = _midnight_ms(day)
        start, end = (min(max(times[which] - midnight, 0), DAY_MS - 1) for which in ("min", "max"))
        data = columns.encode(table)
        file = f"{how}-{shards['min']:02x}-{shards['max']:02x}-{start:08d}-{end:08d}-{_digest(table, salt)}.parquet"
        name = f"{self.prefix}date={day}/{file}"
        self._objects.put_new(name, data)
        return Part(name, day, how, shards["min"], shards["max"], times["min"], times["max"], len(data))

    def delete(self, names: Sequence[str]) -> None:
        self._objects.delete(names)

    def _part(self, entry: ObjectEntry) -> Part | None:
        """None: not an object of the ledger."""
        match = _NAME.fullmatch(entry.name, len(self.prefix))
        if match is None:
            return None
        midnight = _midnight_ms(match["day"])
        return Part(
            entry.name,
            match["day"],
            match["how"],
            int(match["first"], 16),
            int(match["last"], 16),
            midnight + int(match["start"]),
            midnight + int(match["end"]),
            entry.size,
        )


def day_of(ts_ms: int) -> str:
    return datetime.fromtimestamp(min(ts_ms, _LAST_DAY_MS) / 1000, UTC).date().isoformat()


def split_by_day(table: pyarrow.Table) -> Iterator[tuple[str, pyarrow.Table]]:
    """Yields each day and its rows. Most tables have one day."""
    import pyarrow as pa
    import pyarrow.compute as pc

    times = table.column("ts").cast(pa.int64())
    days = pc.divide(pc.min_element_wise(times, _LAST_DAY_MS), DAY_MS)
    for day in sorted(pc.unique(days).to_pylist()):
        yield day_of(day * DAY_MS), table.filter(pc.equal(days, day))


def deduplicate(table: pyarrow.Table) -> pyarrow.Table:
    """Returns each row_id once. Of a row that a retry wrote again, the first is kept."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pc.count_distinct(table.column("row_id")).as_py() == table.num_rows:
        return table
    order = pc.sort_indices(table, [("ts", "ascending")])
    numbered = pa.table({"row_id": table.column("row_id").take(order), "at": order})
    first = numbered.group_by("row_id", use_threads=False).aggregate([("at", "first")])
    return table.take(first.column("at_first"))


def are_disjoint(parts: Sequence[Part]) -> bool:
    """Whether no two parts may hold the same row."""
    ordered = sorted(parts, key=lambda part: part.first_shard)
    return not any(one.overlaps(other) for one, other in pairwise(ordered))


def days_back(day: str, count: int) -> str:
    return (datetime.fromisoformat(day) - timedelta(days=count)).date().isoformat()


def group_by_day(parts: Iterable[Part]) -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(part.day, []).append(part)
    return found


def _may_hold(group: Any, query: RowQuery) -> bool:
    """Whether a group may hold selected rows, according to its Parquet statistics."""
    if not query.values:
        return True
    values = dict(query.values)
    for at in range(group.num_columns):
        column = group.column(at)
        value = values.get(column.path_in_schema)
        match = column.statistics if value is not None else None
        if match is not None and match.has_min_max and not match.min <= value <= match.max:
            return False
    return True


def _digest(table: pyarrow.Table, salt: bytes) -> str:
    """The digest of row_id and ts: a row that was written again at another time differs."""
    import pyarrow as pa

    made = sha256(salt)
    times = table.column("ts").cast(pa.int64()).to_pylist()
    for row_id, ts in zip(table.column("row_id").to_pylist(), times, strict=True):
        made.update(f"{row_id}{ts:x}\n".encode())
    return made.hexdigest()[:32]


def _midnight_ms(day: str) -> int:
    return int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp() * 1000)
