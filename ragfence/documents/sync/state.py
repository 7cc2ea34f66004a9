"""The state of a source at its last sync, so that unchanged files stay unread.

    <tenant>/sources/<hex sha256 of the source's name>/<10^20 - 1 - n>

A log of create-only Parquet objects. Each holds the whole state after one sync, and the newest is listed first: one
LIST of one entry and one GET. A note alone decides nothing: it counts only if the fence store agrees, so notes that are
lost or old only cost time for reading.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from hashlib import sha256
from itertools import groupby
from typing import Any, NamedTuple

from ragfence.core.layout import NO_METADATA
from ragfence.core.operations import encoded
from ragfence.errors import FormatCorrupt, FormatTooNew, TransientError
from ragfence.stores.objects import ObjectStore

VERSION = 1
KEPT = 2
"""objects kept of each source: one may be read while its successor is written"""

_WHAT = b"source"
_REQUIRED = frozenset({b"ragfence.name", b"ragfence.content_fields"})
_ORIGIN = b"ragfence.origin"
_LAST = 10**20 - 1
_CHUNK = 1000
"""notes converted to Arrow at a time: as Python objects they burden the garbage collector"""


class SyncNote(NamedTuple):
    """A document as it was in the source, and as it was ingested."""

    doc_id: str
    state: str = ""
    """empty if the source has no states; then only the doc_id is noted"""
    content_hash: str = ""
    size: int = 0
    characters: int = 0
    metadata_hash: bytes = NO_METADATA
    content_type: str = ""
    sequence: int | None = None


class SyncNotes:
    """The documents that a source has brought and that were not pruned. In Arrow: there may be a million."""

    def __init__(self, number: int, table: Any = None, *, outdated: bool = False) -> None:
        """`outdated`: the notes were written under a former name of the source, or without its origin."""
        self.number = number
        self.outdated = outdated
        self.table = table
        ids: list[str] = table.column("doc_id").to_pylist() if table is not None else []
        self._places = {doc_id: at for at, doc_id in enumerate(ids)}
        self.place: Callable[[str], int | None] = self._places.get
        """the place of a document; a bound method, since it is called several times for each"""
        self._stated = _has_state(table) if table is not None else b""

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def without_state(self, doc_id: str) -> bool:
        """Whether the document is noted with its id only."""
        place = self._places.get(doc_id)
        return place is not None and not self._stated[place]

    def of(self, doc_ids: Sequence[str]) -> list[SyncNote | None]:
        """Returns one note, or None, per doc_id."""
        places = [self._places.get(doc_id) for doc_id in doc_ids]
        known = [place for place in places if place is not None]
        if not known:
            return [None] * len(places)
        found = self.table.take(known)
        notes = map(SyncNote._make, zip(*(found.column(field).to_pylist() for field in SyncNote._fields), strict=True))
        return [None if place is None else next(notes) for place in places]


class ListedIds:
    """The documents that a listing has named so far."""

    def __init__(self, notes: SyncNotes) -> None:
        self._notes = notes
        self._noted = bytearray(len(notes))
        self._others: set[str] = set()

    def add(self, doc_id: str) -> bool:
        """Adds a document; returns False if it was named before."""
        place = self._notes.place(doc_id)
        if place is None:
            if doc_id in self._others:
                return False
            self._others.add(doc_id)
        else:
            if self._noted[place]:
                return False
            self._noted[place] = True
        return True

    def __contains__(self, doc_id: str) -> bool:
        place = self._notes.place(doc_id)
        return doc_id in self._others if place is None else bool(self._noted[place])

    def missing(self) -> list[str]:
        """Returns documents that are noted and were not listed."""
        return [doc_id for doc_id, named in zip(self._notes, self._noted, strict=True) if not named]


class NoteChanges:
    """The changes found by a sync. Of several notes of a document the last one counts."""

    def __init__(self) -> None:
        self.gone: set[str] = set()
        self._fresh: list[SyncNote] = []
        self._names: list[str] = []
        """like `_fresh`, for documents without a state; one of the two is always empty, which keeps the order"""
        self._tables: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._fresh or self._names or self._tables or self.gone)

    def add(self, note: SyncNote) -> None:
        if self._names:
            self._pack()
        self._fresh.append(note)
        if len(self._fresh) >= _CHUNK:
            self._pack()

    def add_name(self, doc_id: str) -> None:
        """Adds a document without a state: only its id is noted."""
        if self._fresh:
            self._pack()
        self._names.append(doc_id)
        if len(self._names) >= _CHUNK:
            self._pack()

    def _pack(self) -> None:
        self._tables.append(_table(self._fresh) if self._fresh else _table_of_names(self._names))
        self._fresh, self._names = [], []

    def apply_to(self, table: Any) -> Any:
        """Returns the table with the changes."""
        import pyarrow as pa
        import pyarrow.compute as pc

        self._pack()
        known = [] if table is None else [table]
        kept = pa.concat_tables([*known, *self._tables])
        if (
            pc.count_distinct(kept.column("doc_id")).as_py() < kept.num_rows
        ):  # otherwise all are new, as in a first sync
            numbered = pa.table({"doc_id": kept.column("doc_id"), "at": pa.array(range(kept.num_rows), pa.int64())})
            last = numbered.group_by("doc_id").aggregate([("at", "max")]).column("at_max")
            kept = kept.take(last.take(pc.sort_indices(last)))
        if self.gone:
            kept = kept.filter(pc.invert(pc.is_in(kept.column("doc_id"), pa.array(sorted(self.gone), pa.string()))))
        return kept


class SyncStates:
    """The log of one source's notes."""

    def __init__(
        self,
        tenant: str,
        source: str,
        objects: ObjectStore,
        content_fields: Collection[str],
        origin: str = "",
        former: str = "",
    ) -> None:
        """Opens the notes of one source.

        `origin` is that of the documents, if it differs from the source's name: parts of one source may have notes of
        their own. `former` is an earlier name of the source. Its notes count until there are notes of the present name,
        so that a renamed source is not read again as a whole.
        """
        self._source = source
        self._former = SyncStates(tenant, former, objects, content_fields) if former else None
        self._origin = origin or source
        self._root = f"{encoded(tenant)}/sources/{sha256(source.encode()).hexdigest()}"
        self._objects = objects
        self._content_fields = sorted(content_fields)

    def newest(self) -> SyncNotes:
        while (name := self._newest_name()) is not None:
            if (notes := self._read(name)) is not None:
                return notes
            # A newer one was written since the listing, and this one deleted.
        before = self._former.newest() if self._former else SyncNotes(0)
        return SyncNotes(0, before.table, outdated=True) if len(before) else SyncNotes(0)

    def add(self, base: SyncNotes, changes: NoteChanges) -> None:
        """Writes the changes since `base`, on top of what other processes have written in the meantime."""
        while True:
            if (name := self._newest_name()) is not None and _number(name) != base.number:
                base = self._read(name) or base
                continue
            number = base.number + 1
            if self._objects.put_new(self._name(number), self._encoded(changes.apply_to(base.table))).won:
                break
        with contextlib.suppress(TransientError):  # the next sync deletes them
            older = [entry.name for entry in self._objects.list(f"{self._root}/", start_after=self._name(number))]
            self._objects.delete(older[KEPT - 1 :])

    def _newest_name(self) -> str | None:
        entry = next(iter(self._objects.list(f"{self._root}/", limit=1)), None)
        return entry.name if entry else None

    def _name(self, number: int) -> str:
        return f"{self._root}/{_LAST - number:020d}"

    def _encoded(self, table: Any) -> bytes:
        import pyarrow as pa
        import pyarrow.parquet as pq

        stored = {
            "ragfence": _WHAT,
            "ragfence.version": str(VERSION),
            "ragfence.name": self._source,
            "ragfence.origin": self._origin,
            "ragfence.content_fields": json.dumps(self._content_fields),
        }
        sink = pa.BufferOutputStream()
        pq.write_table(table.replace_schema_metadata(stored), sink, compression="zstd", use_dictionary=["content_type"])
        return bytes(sink.getvalue())

    def _read(self, name: str) -> SyncNotes | None:
        data = self._objects.get(name)
        if data is None:
            return None
        stored, table = _opened(name, data)
        if stored[b"ragfence.name"] != self._source.encode():
            raise _unreadable(name, "it belongs to another source")
        if json.loads(stored[b"ragfence.content_fields"]) != self._content_fields:
            # These hashes cover other metadata fields: every document must be read.
            import pyarrow as pa

            unknown = pa.array([""] * table.num_rows, pa.string())
            table = table.set_column(SyncNote._fields.index("state"), "state", unknown)
        return SyncNotes(_number(name), table, outdated=_ORIGIN not in stored)

    def others_naming(self, doc_ids: Collection[str]) -> set[str]:
        """Returns which of these documents are noted by a source of another origin, as of its last sync.

        Notes without an origin, written before origins existed, are ignored: they may be this source's own, under its
        former name.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        wanted, named, ours = pa.array(list(doc_ids), pa.string()), set[str](), self._origin.encode()
        every = [entry.name for entry in self._objects.list(f"{self._root.rpartition('/')[0]}/")]
        for _, names in groupby(every, key=lambda name: name.rpartition("/")[0]):
            for name in names:  # the newest comes first
                if (data := self._objects.get(name)) is None:
                    continue
                stored, table = _opened(name, data)
                if stored.get(_ORIGIN, ours) != ours:
                    column = table.column("doc_id")
                    named |= set(column.filter(pc.is_in(column, wanted)).to_pylist())
                break
        return named


def forget(tenant: str, objects: ObjectStore, doc_id: str) -> None:
    """Removes a document from the notes of every source. An interrupted removal is completed by the next."""
    every = [entry.name for entry in objects.list(f"{encoded(tenant)}/sources/")]
    for _, names in groupby(every, key=lambda name: name.rpartition("/")[0]):
        holding = []
        for at, name in enumerate(names):
            if (data := objects.get(name)) is None:
                continue
            stored, table = _opened(name, data)
            notes = SyncNotes(_number(name), table)
            if notes.place(doc_id) is None:
                continue
            holding.append(name)
            if at == 0:
                changes = NoteChanges()
                changes.gone.add(doc_id)
                fields = json.loads(stored[b"ragfence.content_fields"])
                name = stored[b"ragfence.name"].decode()
                origin = stored.get(_ORIGIN, b"").decode()
                SyncStates(tenant, name, objects, fields, origin).add(notes, changes)
        objects.delete(holding)


def _opened(name: str, data: bytes) -> tuple[dict[bytes, bytes], Any]:
    """Returns the metadata of the object, and its table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        stored = file.schema_arrow.metadata or {}
        version = int(stored.get(b"ragfence.version", b"0"))
        if stored.get(b"ragfence") != _WHAT or version < 1 or not stored.keys() >= _REQUIRED:
            raise _unreadable(name, "it is something else")
        if version > VERSION:
            raise FormatTooNew(f"{name} has format {version}; this ragfence knows {VERSION}")
        return stored, file.read(columns=list(SyncNote._fields)).combine_chunks()
    except (pa.ArrowException, KeyError, ValueError, OSError) as broken:
        raise _unreadable(name, str(broken)) from broken


def _unreadable(name: str, why: str) -> FormatCorrupt:
    return FormatCorrupt(
        f"{name} does not hold the state of a source: {why}",
        hint="delete this object; the next sync then reads every document of the source again",
    )


def _number(name: str) -> int:
    try:
        return _LAST - int(name.rpartition("/")[2])
    except ValueError as broken:
        raise FormatCorrupt(f"{name!r} does not end in the number of a sync", hint="delete this object") from broken


def _has_state(table: Any) -> bytes:
    """One byte per note: whether it has a state."""
    import pyarrow.compute as pc

    return bytes(pc.not_equal(table.column("state"), "").to_pylist())


def _table(notes: Sequence[SyncNote]) -> Any:
    import pyarrow as pa

    columns = zip(*notes, strict=True)
    return pa.table({name: pa.array(next(columns), kind) for name, kind in _kinds().items()})


def _table_of_names(doc_ids: Sequence[str]) -> Any:
    """Notes with an id only."""
    import pyarrow as pa

    rest = zip(SyncNote("")[1:], list(_kinds().items())[1:], strict=True)
    columns = {name: pa.repeat(pa.scalar(value, kind), len(doc_ids)) for value, (name, kind) in rest}
    return pa.table({"doc_id": pa.array(doc_ids, pa.string()), **columns})


def _kinds() -> dict[str, Any]:
    import pyarrow as pa

    kinds = (pa.string(), pa.string(), pa.string(), pa.int64(), pa.int64(), pa.binary(16), pa.string(), pa.int64())
    return dict(zip(SyncNote._fields, kinds, strict=True))
