"""The table of a sync: a row for every document that the source listed, with its snippet_ids.

    <tenant>/tables/<source>/pages/<sha256>                 Parquet: doc_id, content_hash, snippet_ids
    <tenant>/tables/<source>/pages/<sha256>~<n>             the page after a purge, without the document
    <tenant>/tables/<source>/runs/<10^20 - 1 - ms>-<random> JSON: the pages of one table, and the decisions

where <source> is the hex sha256 of the source's name.

Pages are named by their content and shared by tables, so a sync that finds nothing new writes no page, and one that
decides like the one before it writes nothing at all. A table decides nothing: it is for programs that use the
snippet_ids afterwards.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from itertools import chain, groupby, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from ragfence._extras import missing_package
from ragfence.core.operations import encoded
from ragfence.documents.identity import SNIPPET_BYTES, snippet_texts
from ragfence.documents.parquet import id_lists, list_blobs, read_table, table_written
from ragfence.errors import FormatCorrupt, FormatTooNew, TableGone, TransientError
from ragfence.stores.object_address import address_of, open_address
from ragfence.stores.objects import ObjectStore

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1
COLUMNS = ("doc_id", "content_hash", "decision", "snippet_ids")

KEEP_MS = 24 * 3600 * 1000
"""a table can be read for at least this time"""
KEEP_NEWEST = 20
"""tables kept of each source, however old"""

_KIND = "table"
_LAST = 10**20 - 1


class TableRow(NamedTuple):
    doc_id: str
    content_hash: str
    """empty if the document could not be read"""
    decision: str
    ids: bytes
    """of its snippets, concatenated"""


class _Page(NamedTuple):
    digest: str
    rows: int
    decisions: list[list[Any]]
    """[decision, count] pairs, in the order of the rows"""


@dataclass(frozen=True, slots=True)
class TablePart:
    """The place of the table of one sync."""

    objects: str
    """the address of the object store; empty if only the process that wrote it can reach it"""
    name: str
    rows: int
    snippets: int


@dataclass(frozen=True, slots=True)
class IngestTable:
    """A table with the columns doc_id, content_hash, decision and snippet_ids: a row for every document of a source.

    The value is a small reference; the rows are in the object store, and are read page by page (at most 1,000 rows
    each). It can be pickled, or written with `to_json`, and read in another process.

    >>> for page in report.table.pages():  # doctest: +SKIP
    ...     print(page.column("snippet_ids"))
    """

    parts: tuple[TablePart, ...] = ()
    _reach: ObjectStore | None = field(default=None, repr=False, compare=False)

    @classmethod
    def join(cls, tables: Iterable[IngestTable]) -> IngestTable:
        """One table of several, for example of all partitions of an asset."""
        given = list(tables)
        reach = next((table._reach for table in given if table._reach is not None), None)
        return cls(tuple(part for table in given for part in table.parts), reach)

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def snippets(self) -> int:
        return sum(part.snippets for part in self.parts)

    def __len__(self) -> int:
        return self.rows

    def pages(self) -> Iterator[pa.Table]:
        """Yields Arrow tables of at most 1,000 rows; one is in memory at a time.

        Raises:
            TableGone: A page was deleted: the table is older than a day, and the source was ingested since.
        """
        for address, parts in groupby(self.parts, key=lambda part: part.objects):
            with self._opened(address) as objects:
                for part in parts:
                    yield from _pages(objects, part.name)

    def to_arrow(self) -> pa.Table:
        """Returns the whole table as an Arrow table in memory."""
        import pyarrow as pa

        return pa.concat_tables([_schema().empty_table(), *self.pages()])

    def to_reader(self) -> pa.RecordBatchReader:
        """Returns a reader of Arrow batches, for DuckDB, Polars and others."""
        import pyarrow as pa

        batches = chain.from_iterable(page.to_batches() for page in self.pages())
        return pa.RecordBatchReader.from_batches(_schema(), batches)

    def to_pandas(self) -> Any:
        """Returns the whole table as a DataFrame. Needs pandas."""
        if find_spec("pandas") is None:
            raise missing_package("pandas", "pandas", "to_pandas()")
        return self.to_arrow().to_pandas()

    def head(self, count: int) -> list[dict[str, Any]]:
        """Returns the first rows, without reading the other pages."""
        rows: list[dict[str, Any]] = []
        for page in self.pages() if count else ():
            rows += page.slice(0, count - len(rows)).to_pylist()
            if len(rows) >= count:
                break
        return rows

    def to_json(self) -> dict[str, Any]:
        """Returns the reference as JSON, without the rows."""
        parts = [
            {"objects": part.objects, "name": part.name, "rows": part.rows, "snippets": part.snippets}
            for part in self.parts
        ]
        return {"version": VERSION, "parts": parts}

    @classmethod
    def from_json(cls, value: Any) -> IngestTable:
        try:
            if value["version"] > VERSION:
                raise FormatTooNew(
                    f"the reference to a table has format {value['version']}; this ragfence knows {VERSION}"
                )
            parts = [
                TablePart(str(each["objects"]), str(each["name"]), int(each["rows"]), int(each["snippets"]))
                for each in value["parts"]
            ]
        except (KeyError, TypeError, ValueError) as wrong:
            raise FormatCorrupt(f"{value!r} is not a reference to a table", hint="ingest the source again") from wrong
        return cls(tuple(parts))

    def __reduce__(self) -> tuple[Any, ...]:
        return IngestTable, (self.parts,)

    @contextlib.contextmanager
    def _opened(self, address: str) -> Iterator[ObjectStore]:
        if not address:
            if self._reach is None:
                raise TableGone("the table was in an object store of another process", hint="ingest the source again")
            yield self._reach
            return
        objects = open_address(address)
        try:
            yield objects
        finally:
            objects.close()


class TableWriter:
    """Writes the table of one sync, page by page."""

    def __init__(self, tenant: str, source: str, objects: ObjectStore) -> None:
        self._source = source
        self._root = _root(tenant, source)
        self._objects = objects
        self._stored: set[str] | None = None
        self._pages: list[_Page] = []
        self._snippets = 0

    def add(self, rows: Sequence[TableRow]) -> None:
        if not rows:
            return
        data = _encoded(rows)
        digest = sha256(data).hexdigest()
        if self._stored is None:
            self._stored = {entry.name for entry in self._objects.list(f"{self._root}/pages/")}
        name = f"{self._root}/pages/{digest}"
        if name not in self._stored:
            self._objects.put_new(name, data)
            self._stored.add(name)
        runs = [[decision, sum(1 for _ in each)] for decision, each in groupby(row.decision for row in rows)]
        self._pages.append(_Page(digest, len(rows), runs))
        self._snippets += sum(len(row.ids) for row in rows) // SNIPPET_BYTES

    def finish(self) -> IngestTable:
        if not self._pages:
            return IngestTable()
        pages = [list(page) for page in self._pages]
        name = self._same_as_newest(pages)
        if name is None:
            name = self._put(pages)
            with contextlib.suppress(TransientError):  # the next one does it
                self._sweep()
        rows, address = sum(page.rows for page in self._pages), address_of(self._objects)
        part = TablePart(address or "", name, rows, self._snippets)
        return IngestTable((part,), None if address else self._objects)

    def _same_as_newest(self, pages: list[list[Any]]) -> str | None:
        newest = next(iter(self._objects.list(f"{self._root}/runs/", limit=1)), None)
        if newest is None or (data := self._objects.get(newest.name)) is None:
            return None
        return newest.name if _manifest(newest.name, data)["pages"] == pages else None

    def _put(self, pages: list[list[Any]]) -> str:
        manifest = {"ragfence": _KIND, "version": VERSION, "source": self._source, "pages": pages}
        data = json.dumps(manifest, separators=(",", ":"), sort_keys=True).encode()
        while True:
            name = f"{self._root}/runs/{_LAST - _now_ms():020d}-{secrets.token_hex(8)}"
            if self._objects.put_new(name, data).won:
                return name

    def _sweep(self) -> None:
        """Deletes, about once a day, tables older than that except the newest, and then pages that no table has."""
        runs = [entry.name for entry in self._objects.list(f"{self._root}/runs/")]
        now_ms = _now_ms()
        if len(runs) <= KEEP_NEWEST or now_ms - _made_ms(runs[-1]) < 2 * KEEP_MS:
            return
        old = [name for name in runs[KEEP_NEWEST:] if now_ms - _made_ms(name) > KEEP_MS]
        self._objects.delete(old)
        used: set[str] = set()
        for name in runs[: len(runs) - len(old)]:
            if (data := self._objects.get(name)) is not None:
                used.update(page[0] for page in _manifest(name, data)["pages"])
        # A page written for a table that does not exist yet is younger.
        unused = [
            entry.name
            for entry in self._objects.list(f"{self._root}/pages/")
            if _digest(entry.name) not in used and now_ms - entry.modified_ms > KEEP_MS
        ]
        self._objects.delete(unused)


def forget_in_tables(tenant: str, objects: ObjectStore, doc_id: str) -> None:
    """Removes a document from every stored table. An interrupted removal is completed by the next."""
    pages = [entry.name for entry in objects.list(f"{encoded(tenant)}/tables/") if "/pages/" in entry.name]
    for original, group in groupby(pages, key=lambda name: name.partition("~")[0]):
        names = list(group)
        for name in names:
            if (data := objects.get(name)) is None or (rest := _without(name, data, doc_id)) is None:
                continue
            number = max((int(each.partition("~")[2] or 0) for each in names), default=0) + 1
            while not objects.put_new(f"{original}~{number:020d}", rest).won:
                number += 1
            objects.delete([name])
            names = [*names, f"{original}~{number:020d}"]


def _without(name: str, data: bytes, doc_id: str) -> bytes | None:
    """Returns the page with the document's row emptied; None if it has none. The row stays: decisions go by place."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = _decoded(name, data)
    named = pc.fill_null(pc.equal(table.column("doc_id"), doc_id), False)
    if not pc.any(named).as_py():
        return None
    blobs = [
        b"" if gone else blob for gone, blob in zip(named.to_pylist(), list_blobs(table, "snippet_ids"), strict=True)
    ]
    kept = pa.table(
        {
            "doc_id": pc.if_else(named, pa.scalar(None, pa.string()), table.column("doc_id")),
            "content_hash": pc.if_else(named, "", table.column("content_hash")),
            "snippet_ids": id_lists(blobs),
        }
    )
    return table_written(kept, _KIND, dictionary=[], statistics=[])


def _pages(objects: ObjectStore, name: str) -> Iterator[pa.Table]:
    data = objects.get(name)
    if data is None:
        raise _gone(name)
    for digest, rows, runs in _manifest(name, data)["pages"]:
        page = f"{name.rpartition('/runs/')[0]}/pages/{digest}"
        yield _page(objects, page, rows, runs)


def _page(objects: ObjectStore, name: str, rows: int, runs: Sequence[tuple[str, int]]) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    data = objects.get(name)
    if data is None:
        purged = [entry.name for entry in objects.list(f"{name}~")]
        if not purged or (data := objects.get(purged[-1])) is None:
            raise _gone(name)
    stored = _decoded(name, data)
    if stored.num_rows != rows or sum(count for _, count in runs) != rows:
        raise FormatCorrupt(f"{name} has {stored.num_rows} rows instead of {rows}", hint="ingest the source again")
    ids = [list(snippet_texts(blob)) for blob in list_blobs(stored, "snippet_ids")]
    decisions = [decision for decision, count in runs for decision in repeat(decision, count)]
    columns = {
        "doc_id": stored.column("doc_id"),
        "content_hash": stored.column("content_hash"),
        "decision": pa.array(decisions, pa.string()),
        "snippet_ids": pa.array(ids, pa.list_(pa.string())),
    }
    table = pa.table(columns, schema=_schema())
    return table.filter(pc.is_valid(table.column("doc_id"))) if stored.column("doc_id").null_count else table


def _schema() -> pa.Schema:
    import pyarrow as pa

    text = pa.string()
    kinds: Mapping[str, Any] = {"doc_id": text, "content_hash": text, "decision": text, "snippet_ids": pa.list_(text)}
    return pa.schema(list(kinds.items()))


def _encoded(rows: Sequence[TableRow]) -> bytes:
    import pyarrow as pa

    doc_ids, hashes, _, ids = zip(*rows, strict=True)
    columns = {
        "doc_id": pa.array(doc_ids, pa.string()),
        "content_hash": pa.array(hashes, pa.string()),
        "snippet_ids": id_lists(ids),
    }
    return table_written(pa.table(columns), _KIND, dictionary=[], statistics=[])


def _decoded(name: str, data: bytes) -> pa.Table:
    return read_table(name, data, _KIND, ["doc_id", "content_hash", "snippet_ids"])


def _manifest(name: str, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
        if found["ragfence"] != _KIND or not isinstance(found["pages"], list):
            raise ValueError("it is something else")
        version = int(found["version"])
    except (KeyError, TypeError, ValueError) as broken:
        raise FormatCorrupt(
            f"{name} does not list the pages of a table: {broken}", hint="ingest the source again"
        ) from broken
    if version > VERSION:
        raise FormatTooNew(f"{name} has format {version}; this ragfence knows {VERSION}")
    return dict(found)


def _gone(name: str) -> TableGone:
    return TableGone(f"{name} was deleted: tables are kept for a day after a newer one was written")


def _root(tenant: str, source: str) -> str:
    return f"{encoded(tenant)}/tables/{sha256(source.encode()).hexdigest()}"


def _made_ms(name: str) -> int:
    return _LAST - int(name.rpartition("/")[2].partition("-")[0])


def _digest(name: str) -> str:
    return name.rpartition("/")[2].partition("~")[0]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
