"""From a snapshot to the rows of an index: descriptions and positions out of the log, texts and vectors beside them.

All of it in Arrow: a row costs about as much here as in the backend that takes it. Rows are made while they are
written, one segment after the other, a few of them ahead. Most documents are described in the segment that has their
snippets beside it; what is left over (re-described, revived, edited, compacted, or alone in its segment) is described
together, at the end.

Where the snapshot says a head was, it may be no more: the log was compacted or purged. Then all of the log is looked
through; what is not there either is gone for good, and with it the corpus that was to be built: `SnapshotGone`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ragfence.documents.identity import SNIPPET_BYTES
from ragfence.documents.parquet import fixed_values, read_rows, read_snippets
from ragfence.documents.segments import INGEST, Layout, address_in
from ragfence.errors import SnapshotGone
from ragfence.indexes.backends.protocol import row_schema
from ragfence.indexes.corpora import as_texts, heads_of
from ragfence.indexes.vectors import Texts, VectorStore
from ragfence.stores.objects import ObjectStore

if TYPE_CHECKING:
    from ragfence.indexes.embedders.protocol import Vectors

READ_AT_ONCE = 64
"""segments of which rows are joined at a time"""
READERS = 4
WORTH_A_JOIN = 50
"""documents of one segment; those of smaller ones are joined together"""


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Descriptions:
    """The documents of a snapshot, and every snippet of theirs, as Arrow arrays."""

    doc_id: Any
    metadata: Any
    source_url: Any
    ids: list[bytes]
    """of the snippets; the arrays below are in their order"""
    parent: Any
    """which document"""
    ordinal: Any
    start: Any
    end: Any
    section: Any
    origins: list[str]
    """addresses of the segments that made the revisions"""

    def places(self) -> dict[bytes, int]:
        return {each: at for at, each in enumerate(self.ids)}

    def rows(self, at: Sequence[int], text: Any, tokens: Any, vectors: Vectors) -> Any:
        """These snippets as a table for a backend."""
        import pyarrow as pa

        picked = pa.array(at, pa.int64())
        document = self.parent.take(picked)
        dimension = int(vectors.shape[1])
        schema = row_schema(dimension)
        columns = [
            as_texts([self.ids[each] for each in at]),
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


class Log:
    """What of the log an index is made of."""

    def __init__(self, objects: ObjectStore, layout: Layout, truth: Callable[[], list[str]]) -> None:
        self._objects = objects
        self._layout = layout
        self._truth = truth

    def describe(self, documents: Any) -> Descriptions:
        """Of the documents of a snapshot, or of some of them: a table as `Snapshot.table`."""
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
        """Of documents that should all be in this segment; None if they are not."""
        return self._found(documents, [self._layout.rows_at(address_in(address))])

    def snippets_of(self, address: str) -> str:
        return self._layout.snippets_at(address_in(address))

    def nearby(self, described: Descriptions) -> list[str]:
        """The objects of snippets beside the revisions: most of the texts are there."""
        return [self._layout.snippets_at(address_in(each)) for each in described.origins]

    def elsewhere(self, described: Descriptions) -> list[str]:
        """All the others: snippets that a revision took over from one before it, and what a compaction has moved."""
        near = set(self.nearby(described))
        names = (self._layout.snippets_at(address_in(segment)) for segment in reversed(self._truth()))
        return [name for name in names if name not in near]

    def wanted(self, name: str, place: dict[bytes, int]) -> tuple[Texts, list[int], list[int]] | None:
        """An object of snippets, the rows of it that are wanted, and which snippets they are.

        `place`: the ids that are wanted, and where they stand in the descriptions; taken out as they are found, by
        several threads at once.
        """
        data = self._objects.get(name) if place else None
        if data is None:
            return None
        texts = Texts.of(address_in(name), read_snippets(name, data))
        places = [(at, place.pop(each, None)) for at, each in enumerate(texts.ids)]
        found = [(at, there) for at, there in places if there is not None]
        return (texts, [at for at, _ in found], [there for _, there in found]) if found else None

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
        heads = heads_of(documents)
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
            of_head = pc.index_in(heads_of(table), value_set=heads)
            live = pc.and_(table.column("live").combine_chunks(), pc.is_valid(of_head))
            of_key = pc.index_in(table.column("key").combine_chunks().cast(pa.binary()), value_set=keys)
            made = pc.and_(pc.equal(table.column("action"), INGEST).combine_chunks(), pc.is_valid(of_key))
            kept = pc.or_(live, made)
            rows = np.flatnonzero(_numpy(kept))
            table = table.take(pa.array(rows))
            described.append(table.select(["doc_id", "metadata", "source_url"]))
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
        lists = where.column("snippet_ids").combine_chunks()
        parent = pc.list_parent_indices(lists)
        offsets = _numpy(lists.offsets)
        ordinal = np.arange(len(parent)) - (offsets[:-1] - offsets[0])[_numpy(parent)] if len(parent) else np.zeros(0)
        flat = pa.table({"snippet_id": pc.list_flatten(lists)})
        return Descriptions(
            doc_id=who.column("doc_id").combine_chunks(),
            metadata=who.column("metadata").combine_chunks(),
            source_url=who.column("source_url").combine_chunks(),
            ids=fixed_values(flat, "snippet_id"),
            parent=parent,
            ordinal=pa.array(ordinal.astype(np.int32)),
            start=pc.list_flatten(where.column("starts").combine_chunks()),
            end=pc.list_flatten(where.column("ends").combine_chunks()),
            section=pc.list_flatten(where.column("sections").combine_chunks()),
            origins=_distinct(documents, "origin"),
        )


class _Left(NamedTuple):
    """Documents that were not described, or not wholly found, and the snippets of theirs that are still wanted."""

    documents: Any
    snippets: Iterable[bytes]


def whole(log: Log, documents: Any, vectors: VectorStore, workers: int) -> Generator[Any, None, None]:
    """The rows of these documents, as tables; `documents` as `Snapshot.table`.

    Segment by segment, so that a backend writes the first rows while the others are read.
    """
    import pyarrow as pa

    by_segment, others = _by_segment(documents)
    left = [_Left(others, _flat_ids(others))]

    def rows_in(segment: tuple[str, Any]) -> Any:
        address, members = segment
        described = log.described_in(address, members)
        if described is None:  # the log was compacted since
            left.append(_Left(members, _flat_ids(members)))
            return None
        place = described.places()
        table = _joined(log, log.snippets_of(address), described, place, vectors)
        if place:  # an edit has kept snippets of the revision before it
            of_these = sorted({described.parent[at].as_py() for at in place.values()})
            left.append(_Left(members.take(of_these), place))
        return table

    with ThreadPoolExecutor(workers, thread_name_prefix="ragfence-embed") as pool:
        yield from _ahead(pool, rows_in, by_segment, workers + 1)
    rest = pa.concat_tables([each.documents for each in left]).combine_chunks()
    described = log.describe(rest)
    wanted = {each for part in left for each in part.snippets}
    place = {each: at for each, at in described.places().items() if each in wanted}
    yield from assembled(log, described, place, vectors, workers)


def _by_segment(documents: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Addresses, each with the documents that are described there as they were made there; and all other documents."""
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
    import pyarrow as pa
    import pyarrow.compute as pc

    flat = pc.list_flatten(documents.column("snippet_ids").combine_chunks())
    return fixed_values(pa.table({"snippet_id": flat}), "snippet_id")


def assembled(
    log: Log, described: Descriptions, place: dict[bytes, int], vectors: VectorStore, workers: int
) -> Generator[Any, None, None]:
    """The rows of these snippets, as tables. Up to `workers` objects are read and embedded at once, ahead of time."""

    def rows_in(name: str) -> Any:
        return _joined(log, name, described, place, vectors)

    with ThreadPoolExecutor(workers, thread_name_prefix="ragfence-embed") as pool:
        for names in (log.nearby, log.elsewhere):
            if place:
                yield from _ahead(pool, rows_in, names(described), workers + 1)
    if place:
        raise SnapshotGone(f"the texts of {len(place)} snippets of this corpus are not in the log any more")


def _joined(log: Log, name: str, described: Descriptions, place: dict[bytes, int], vectors: VectorStore) -> Any:
    """The rows of those snippets in the object that are wanted, or None; see `Log.wanted`."""
    found = log.wanted(name, place)
    if found is None:
        return None
    texts, rows, snippets = found
    values = vectors.of(texts)
    table = texts.table if len(rows) == texts.table.num_rows else texts.table.take(rows)
    picked = values if len(rows) == len(values) else values[rows]
    text, tokens = table.column("text").combine_chunks(), table.column("tokens").combine_chunks()
    return described.rows(snippets, text, tokens, picked)


def _ahead(pool: ThreadPoolExecutor, make: Callable[[_T], Any], things: Iterable[_T], most: int) -> Iterator[Any]:
    """What is made of the things, in their order, a few of them ahead."""
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
    """The rows of a corpus without documents."""
    import pyarrow as pa

    return pa.table(
        {
            "doc_id": pa.array([], pa.string()),
            "metadata": pa.array([], pa.string()),
            "source_url": pa.array([], pa.string()),
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
