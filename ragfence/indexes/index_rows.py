"""Makes the rows of an index from a snapshot: descriptions and positions from the log, with texts and vectors.

Everything is done in Arrow, so a row costs about as much here as in the backend that stores it. Rows are made while
they are written, segment by segment, a few segments ahead. Most documents are described in the segment that their
snippets belong to; the rest (re-described, revived, edited, compacted, or alone in their segment) are described
together at the end.

A head may not be where the snapshot says any more, because the log was compacted or purged. Then the whole log is
searched. What is not there either is permanently gone, and the corpus cannot be built: `SnapshotGone`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ragfence.documents.identity import SNIPPET_BYTES
from ragfence.documents.log import INGEST, Address, Layout, address_in
from ragfence.documents.parquet import read_rows, read_snippets
from ragfence.errors import SnapshotGone
from ragfence.indexes.backends.backend import row_schema
from ragfence.indexes.snapshots import head_keys, id_values, to_text_ids
from ragfence.indexes.vectors import Texts, VectorStore
from ragfence.stores.objects import ObjectStore

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Vectors

READ_AT_ONCE = 64
"""segments whose rows are joined at a time"""
READERS = 4
WORTH_A_JOIN = 50
"""documents of a segment that is joined alone; smaller ones are joined together"""


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Descriptions:
    """The documents of a snapshot and all their snippets, as Arrow arrays."""

    doc_id: Any
    metadata: Any
    source_url: Any
    ids: Any
    """of the snippets, 16 bytes each; the arrays below have the same order"""
    parent: Any
    """the document's position in the arrays above"""
    ordinal: Any
    start: Any
    end: Any
    section: Any
    origins: list[str]
    """addresses of the segments that made the revisions"""
    row: Any
    """of each document: the address of the segment with its head row"""
    before: Any
    """of each document: the address of the row before its head row; empty if there is none"""

    def places(self) -> dict[bytes, int]:
        return {each: at for at, each in enumerate(id_values(self.ids))}

    def rows(self, at: Sequence[int] | Any, text: Any, tokens: Any, vectors: Vectors) -> Any:
        """Returns these snippets as a table for a backend."""
        import pyarrow as pa

        picked = pa.array(at, pa.int64())
        document = self.parent.take(picked)
        dimension = int(vectors.shape[1])
        schema = row_schema(dimension)
        columns = [
            to_text_ids(self.ids.take(picked)),
            self.doc_id.take(document),
            self.section.take(picked),
            self.ordinal.take(picked),
            self.start.take(picked),
            self.end.take(picked),
            tokens.cast(pa.int32()),
            text,
            self.source_url.take(document),
            self.metadata.take(document),
            pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), dimension),
        ]
        return pa.Table.from_arrays(columns, schema=schema)


class LogRows:
    """Reads what an index needs from the log."""

    def __init__(self, objects: ObjectStore, layout: Layout, truth: Callable[[], list[str]]) -> None:
        self._objects = objects
        self._layout = layout
        self._truth = truth

    def describe(self, documents: Any) -> Descriptions:
        """Describes documents of a snapshot, given as a table like `Snapshot.table`.

        Raises:
            SnapshotGone: Some of them are not in the log any more.
        """
        addresses = _distinct(documents, "row", "origin")
        found = self._found(documents, [self._layout.rows_at(address_in(each)) for each in addresses])
        if found is None:
            found = self._found(documents, self._truth())
        if found is None:
            raise SnapshotGone(
                "documents of this corpus are not in the log any more: it was compacted, or some were purged"
            )
        return found

    def described_in(self, address: str, documents: Any) -> Descriptions | None:
        """Describes documents that should all be in this segment; None if they are not."""
        name = self._layout.rows_at(address_in(address))
        table = self._rows(name)
        if table is None:
            return None
        return _described_by(documents, table) or self._found(documents, [name])

    def texts(self, name: str) -> Texts | None:
        """Reads an object of snippets; None if it is gone."""
        data = self._objects.get(name)
        return None if data is None else Texts(address_in(name), read_snippets(name, data))

    def snippets_of(self, address: str) -> str:
        return self._layout.snippets_at(address_in(address))

    def nearby(self, described: Descriptions) -> list[str]:
        """The snippet objects of the segments that made the revisions; most texts are there."""
        return [self._layout.snippets_at(address_in(each)) for each in described.origins]

    def elsewhere(self, described: Descriptions) -> list[str]:
        """All other snippet objects: snippets kept from an earlier revision, and those that a compaction moved."""
        near = set(self.nearby(described))
        names = (self._layout.snippets_at(address_in(segment)) for segment in reversed(self._truth()))
        return [name for name in names if name not in near]

    def wanted(self, name: str, place: dict[bytes, int]) -> tuple[Texts, list[int], list[int]] | None:
        """Reads an object of snippets. Returns it with its wanted rows and their positions in the descriptions.

        `place`: the wanted ids and their positions in the descriptions. Several threads remove ids as they are found.
        """
        texts = self.texts(name) if place else None
        if texts is None:
            return None
        places = [(at, place.pop(each, None)) for at, each in enumerate(id_values(texts.ids))]
        found = [(at, there) for at, there in places if there is not None]
        return (texts, [at for at, _ in found], [there for _, there in found]) if found else None

    def earlier(
        self, described: Descriptions, snippets: Sequence[int] | Any, wanted: set[bytes], known: Address
    ) -> Iterator[Address]:
        """Yields segments of other revisions of the same documents that had some of the wanted snippets.

        Args:
            described: The documents.
            snippets: Positions of snippets in the descriptions, which include the wanted ones.
            wanted: Ids.
            known: A segment that was searched already.
        """
        import pyarrow as pa

        picked = pa.array(snippets, pa.int64())
        ids, parent = id_values(described.ids.take(picked)), described.parent.take(picked).to_pylist()
        of_document: dict[int, set[bytes]] = {}
        for each, document in zip(ids, parent, strict=True):
            if each in wanted:
                of_document.setdefault(document, set()).add(each)
        starts = {
            described.doc_id[document].as_py(): (
                {described.row[document].as_py(), described.before[document].as_py()},
                held,
            )
            for document, held in of_document.items()
        }
        yield from self.history(starts, known)

    def history(self, starts: Mapping[str, tuple[set[str], set[bytes]]], known: Address) -> Iterator[Address]:
        """Like `earlier`. `starts`: by doc_id, the addresses of its newest rows and its wanted snippets."""
        todo: dict[str, set[str]] = {}
        seen: set[tuple[str, str]] = set()
        yielded = {known.text}
        lost: set[str] = set()

        def go_to(address: str, doc_id: str) -> None:
            if address and (address, doc_id) not in seen:
                seen.add((address, doc_id))
                todo.setdefault(address, set()).add(doc_id)

        for doc_id, (addresses, _) in starts.items():
            for address in addresses - {known.text}:
                go_to(address, doc_id)
        while todo:
            address = max(todo)
            doc_ids = todo.pop(address)
            at, table = self._rows_at(address_in(address))
            if table is None:
                lost |= doc_ids
            for row in _rows_of_documents(table, doc_ids):
                wanted = starts[row["doc_id"]][1]
                if at.text not in yielded and not wanted.isdisjoint(row["snippet_ids"]):
                    yielded.add(at.text)
                    yield at
                go_to(row["before"], row["doc_id"])
                go_to(row["origin"], row["doc_id"])
        # A retraction that was compacted is not where the fence store says: then the whole log is searched.
        for name in self._truth() if lost else ():
            at = address_in(name)
            rows = _rows_of_documents(self._rows(name), lost) if at.text not in yielded else []
            if any(not starts[row["doc_id"]][1].isdisjoint(row["snippet_ids"]) for row in rows):
                yielded.add(at.text)
                yield at

    def _rows_at(self, address: Address) -> tuple[Address, Any]:
        """Reads a segment, also if a purge has rewritten it under the same batch and a later epoch."""
        table = self._rows(self._layout.rows_at(address))
        if table is None:
            for name in self._truth():
                if address_in(name).batch == address.batch:
                    return address_in(name), self._rows(name)
        return address, table

    def _read(self, segments: Sequence[str]) -> list[Any]:
        if len(segments) == 1:
            tables = [self._rows(segments[0])]
        else:
            with ThreadPoolExecutor(READERS, thread_name_prefix="ragfence-read") as pool:
                tables = list(pool.map(self._rows, segments))
        return [table for table in tables if table is not None]

    def _rows(self, name: str) -> Any:
        data = self._objects.get(name)
        return None if data is None else read_rows(name, data)

    def _found(self, documents: Any, segments: Sequence[str]) -> Descriptions | None:
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        keys = documents.column("key").combine_chunks().cast(pa.binary())
        heads = head_keys(documents)
        described: list[Any] = []
        placed: list[Any] = []
        head_at = np.full(len(keys), -1, dtype=np.int64)
        made_at = np.full(len(keys), -1, dtype=np.int64)
        rows_seen = 0
        names = iter(segments)
        while portion := list(islice(names, READ_AT_ONCE)):
            tables = self._read(portion)
            if not tables:
                continue
            table = pa.concat_tables(tables).combine_chunks()
            of_head = pc.index_in(head_keys(table), value_set=heads)
            live = pc.and_(table.column("live").combine_chunks(), pc.is_valid(of_head))
            of_key = pc.index_in(table.column("key").combine_chunks().cast(pa.binary()), value_set=keys)
            made = pc.and_(pc.equal(table.column("action"), INGEST).combine_chunks(), pc.is_valid(of_key))
            kept = pc.or_(live, made)
            rows = np.flatnonzero(_numpy(kept))
            table = table.take(pa.array(rows))
            described.append(table.select(["doc_id", "metadata", "source_url", "before"]))
            placed.append(table.select(["snippet_ids", "starts", "ends", "sections"]))
            for found, valid, into in ((of_head, live, head_at), (of_key, made, made_at)):
                wanted = _numpy(valid)[rows]
                targets = _numpy(pc.fill_null(found, 0))[rows][wanted]
                into[targets] = np.flatnonzero(wanted) + rows_seen
            rows_seen += len(rows)
        if (head_at < 0).any() or (made_at < 0).any():
            return None
        if not described:
            described, placed = [_nothing()], [_nothing()]
        who = pa.concat_tables(described).combine_chunks().take(pa.array(head_at))
        where = pa.concat_tables(placed).combine_chunks().take(pa.array(made_at))
        return _descriptions(documents, who, where)


def _rows_of_documents(table: Any, doc_ids: set[str]) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if table is None:
        return []
    chosen = pc.is_in(table.column("doc_id"), value_set=pa.array(sorted(doc_ids), pa.string()))
    rows: list[dict[str, Any]] = table.select(["doc_id", "before", "origin", "snippet_ids"]).filter(chosen).to_pylist()
    return rows


def _described_by(documents: Any, table: Any) -> Descriptions | None:
    """Describes documents whose head and positions are in one row of this segment, which is so unless they were
    described again. None if it is not so for all of them."""
    import pyarrow.compute as pc

    at = pc.index_in(head_keys(documents), value_set=head_keys(table))
    if at.null_count:
        return None
    rows = table.take(at)
    plain = pc.and_(rows.column("live"), pc.equal(rows.column("action"), INGEST))
    return _descriptions(documents, rows, rows) if pc.all(plain, min_count=0).as_py() else None


def _descriptions(documents: Any, who: Any, where: Any) -> Descriptions:
    """Joins documents, the rows of their heads, and the rows with their positions, all in the same order."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = where.column("snippet_ids").combine_chunks()
    parent = pc.list_parent_indices(lists)
    offsets = _numpy(lists.offsets)
    ordinal = np.arange(len(parent)) - (offsets[:-1] - offsets[0])[_numpy(parent)] if len(parent) else np.zeros(0)
    return Descriptions(
        doc_id=who.column("doc_id").combine_chunks(),
        metadata=who.column("metadata").combine_chunks(),
        source_url=who.column("source_url").combine_chunks(),
        ids=pc.list_flatten(lists),
        parent=parent,
        ordinal=pa.array(ordinal.astype(np.int32)),
        start=pc.list_flatten(where.column("starts").combine_chunks()),
        end=pc.list_flatten(where.column("ends").combine_chunks()),
        section=pc.list_flatten(where.column("sections").combine_chunks()),
        origins=_distinct(documents, "origin"),
        row=documents.column("row").combine_chunks(),
        before=who.column("before").combine_chunks(),
    )


class _MissingRows(NamedTuple):
    """Documents that were not described or not completely found, and their snippets that are still missing."""

    documents: Any
    snippets: Iterable[bytes]


def build_rows(log: LogRows, documents: Any, vectors: VectorStore, workers: int) -> Generator[Any, None, None]:
    """Yields the rows of documents as tables, segment by segment, so that a backend writes while others are read.

    `documents` is a table like `Snapshot.table`.
    """
    import numpy as np
    import pyarrow as pa

    by_segment, others = _by_segment(documents)
    left = [_MissingRows(others, _flat_ids(others))]

    def rows_in(segment: tuple[str, Any]) -> Any:
        address, members = segment
        described = log.described_in(address, members)
        texts = log.texts(log.snippets_of(address)) if described else None
        if described is None or texts is None:  # the log was compacted, or all snippets are of an earlier revision
            left.append(_MissingRows(members, _flat_ids(members)))
            return None
        rows, snippets, missing = _matched(texts, described)
        if len(missing):  # an edit kept snippets of the earlier revision
            of_these = np.unique(_numpy(described.parent)[missing])
            left.append(_MissingRows(members.take(of_these), id_values(described.ids.take(pa.array(missing)))))
        return _table_of(log, texts, rows, described, snippets, vectors) if len(rows) else None

    with ThreadPoolExecutor(workers, thread_name_prefix="ragfence-embed") as pool:
        yield from _ahead(pool, rows_in, by_segment, workers + 1)
    rest = pa.concat_tables([each.documents for each in left]).combine_chunks()
    described = log.describe(rest)
    wanted = {each for part in left for each in part.snippets}
    place = {each: at for each, at in described.places().items() if each in wanted}
    yield from assemble_rows(log, described, place, vectors, workers)


def _by_segment(documents: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Segments with the documents that are described where they were made, and a table of all other documents."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    here = _numpy(pc.equal(documents.column("row"), documents.column("origin")))
    encoded = documents.column("row").combine_chunks().dictionary_encode()
    codes = np.where(here, _numpy(encoded.indices), len(encoded.dictionary))
    order = np.argsort(codes, kind="stable")
    ends = np.searchsorted(codes[order], np.arange(len(encoded.dictionary) + 1), side="right")
    segments, others, start = [], [order[ends[-2] if len(ends) > 1 else 0 :]], 0
    for code, end in enumerate(ends[:-1]):
        if end - start >= WORTH_A_JOIN:
            segments.append((encoded.dictionary[code].as_py(), documents.take(pa.array(order[start:end]))))
        else:
            others.append(order[start:end])
        start = end
    return sorted(segments, key=lambda each: each[0]), documents.take(pa.array(np.concatenate(others)))


def _flat_ids(documents: Any) -> list[bytes]:
    import pyarrow.compute as pc

    return id_values(pc.list_flatten(documents.column("snippet_ids").combine_chunks()))


def assemble_rows(
    log: LogRows, described: Descriptions, place: dict[bytes, int], vectors: VectorStore, workers: int
) -> Generator[Any, None, None]:
    """Yields the rows of snippets as tables. Up to `workers` objects are read and embedded at once, ahead of time."""

    def rows_in(name: str) -> Any:
        return _joined(log, name, described, place, vectors)

    with ThreadPoolExecutor(workers, thread_name_prefix="ragfence-embed") as pool:
        for names in (log.nearby, log.elsewhere):
            if place:
                yield from _ahead(pool, rows_in, names(described), workers + 1)
    if place:
        raise SnapshotGone(f"the texts of {len(place)} snippets of this corpus are not in the log any more")


def _joined(log: LogRows, name: str, described: Descriptions, place: dict[bytes, int], vectors: VectorStore) -> Any:
    """The rows of the wanted snippets in an object, or None; see `LogRows.wanted`."""
    found = log.wanted(name, place)
    if found is None:
        return None
    texts, rows, snippets = found
    return _table_of(log, texts, rows, described, snippets, vectors)


def _table_of(
    log: LogRows, texts: Texts, rows: Any, described: Descriptions, snippets: Any, vectors: VectorStore
) -> Any:
    """Rows of a snippet object as a table for a backend. `snippets`: their positions in the descriptions."""
    values = vectors.vectors_of(texts, rows, lambda wanted: log.earlier(described, snippets, wanted, texts.address))
    table = texts.table if len(rows) == texts.table.num_rows else texts.table.take(rows)
    text, tokens = table.column("text").combine_chunks(), table.column("tokens").combine_chunks()
    return described.rows(snippets, text, tokens, values)


def _matched(texts: Texts, described: Descriptions) -> tuple[Any, Any, Any]:
    """The rows of the object that are described, their positions in the descriptions, and the missing positions."""
    import numpy as np
    import pyarrow.compute as pc

    place = _numpy(pc.fill_null(pc.index_in(texts.ids, value_set=described.ids), -1))
    # Each snippet once, even if the object had it twice.
    snippets, rows = np.unique(place, return_index=True)
    known = snippets >= 0
    missing = np.setdiff1d(np.arange(len(described.ids)), snippets[known], assume_unique=True)
    return np.sort(rows[known]), place[np.sort(rows[known])], missing


def _ahead(pool: ThreadPoolExecutor, make: Callable[[_T], Any], things: Iterable[_T], most: int) -> Iterator[Any]:
    """Yields what `make` returns for each thing, in order, making a few of them ahead. None is skipped."""
    left, ahead = iter(things), deque[Future[Any]]()
    try:
        while True:
            ahead.extend(pool.submit(make, each) for each in islice(left, most - len(ahead)))
            if not ahead:
                return
            if (made := ahead.popleft().result()) is not None:
                yield made
    finally:
        for future in ahead:
            future.cancel()


def _nothing() -> Any:
    """The table of a corpus without documents."""
    import pyarrow as pa

    return pa.table(
        {
            "doc_id": pa.array([], pa.string()),
            "metadata": pa.array([], pa.string()),
            "source_url": pa.array([], pa.string()),
            "before": pa.array([], pa.string()),
            "snippet_ids": pa.array([], pa.list_(pa.binary(SNIPPET_BYTES))),
            "starts": pa.array([], pa.list_(pa.int64())),
            "ends": pa.array([], pa.list_(pa.int64())),
            "sections": pa.array([], pa.list_(pa.string())),
        }
    )


def _distinct(table: Any, *columns: str) -> list[str]:
    return sorted({each for column in columns for each in table.column(column).unique().to_pylist()})


def _numpy(array: Any) -> Any:
    return array.to_numpy(zero_copy_only=False)
