"""Upserts: sends a sink its snippets, page by page, with their vectors if the sink names an embedder.

    intent -> (vectors alongside the snippets -> upsert) for each page -> commit

The vectors of new snippets are stored alongside the snippets before the commit. They count when the segment counts:
what belongs to a segment that was never committed is void, and is deleted with it.

The snippets of many revisions are read together, each object once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from ragfence.core.canonical import parse_json
from ragfence.core.records import KeyRecord
from ragfence.documents.identity import snippet_texts
from ragfence.documents.log import INGEST, Address, Layout, address_in, estimated_tokens, stored_in
from ragfence.documents.parquet import decode_snippets, whole_rows
from ragfence.documents.sinks.sink import PAGE, Sink, SinkSnippet, VectorSink
from ragfence.engine.segment_log import LogRow
from ragfence.stores.objects import ObjectStore

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Vectors


class PlacedRow(NamedTuple):
    """A row of the log, and its segment."""

    row: LogRow
    at: Address


class PlacedSnippet(NamedTuple):
    """A snippet, and the segment that holds its text."""

    snippet: SinkSnippet
    at: Address


class _SnippetText(NamedTuple):
    text: str
    tokens: int
    at: Address


class Revisions:
    def __init__(self, objects: ObjectStore, layout: Layout, truth: Callable[[], Iterable[str]]) -> None:
        """`truth` returns the names of the segments in the log; called if one is not where a record says."""
        self._objects = objects
        self._layout = layout
        self._truth = truth

    def heads(self, records: Mapping[str, KeyRecord]) -> dict[str, PlacedRow]:
        """Returns the row of each document's record, without those that cannot be found."""
        found = self._rows({doc_id: stored_in(record).row for doc_id, record in records.items()})
        return {
            doc_id: placed
            for doc_id, rows in found.items()
            for placed in rows
            if placed.row.fence == records[doc_id].fence
        }

    def snippets(
        self, rows: Mapping[str, PlacedRow], wanted: Mapping[str, Collection[str]]
    ) -> dict[str, list[PlacedSnippet]]:
        """Returns the wanted snippets of these revisions, without documents that cannot be read."""
        needed = {doc_id: rows[doc_id] for doc_id, ids in wanted.items() if ids}
        made = self._made(needed)
        texts = self._texts(made, {doc_id: set(wanted[doc_id]) for doc_id in made})
        return {
            doc_id: _describe_snippets(needed[doc_id].row, placed.row, wanted[doc_id], texts)
            for doc_id, placed in made.items()
            if texts.keys() >= set(wanted[doc_id])
        }

    def _made(self, rows: Mapping[str, PlacedRow]) -> dict[str, PlacedRow]:
        """Returns the `ingest` row of each revision, which has its positions."""
        made = {doc_id: placed for doc_id, placed in rows.items() if placed.row.detail.action == INGEST}
        others = {doc_id: placed for doc_id, placed in rows.items() if doc_id not in made}
        origins = {
            doc_id: address_in(placed.row.detail.origin) if placed.row.detail.origin else placed.at
            for doc_id, placed in others.items()
        }
        for doc_id, found in self._rows(origins).items():
            for placed in found:
                if placed.row.detail.action == INGEST and placed.row.key == others[doc_id].row.key:
                    made[doc_id] = placed
        return made

    def _texts(self, made: Mapping[str, PlacedRow], missing: dict[str, set[str]]) -> dict[str, _SnippetText]:
        """Reads texts: new snippets are stored with the revision's segment, others with the heads before it."""
        found: dict[str, _SnippetText] = {}
        for placed in made.values():
            for each, text in placed.row.detail.fresh:  # of a batch in progress
                found[each.hex()] = _SnippetText(text, estimated_tokens(text), placed.at)
        frontier = dict(made)
        while frontier:
            for doc_id in frontier:  # not by `-=`, which would go through all that was found for each document
                missing[doc_id] = {each for each in missing[doc_id] if each not in found}
            frontier = {doc_id: placed for doc_id, placed in frontier.items() if missing[doc_id]}
            for address in {placed.at for placed in frontier.values()}:
                name = self._layout.snippets_at(address)
                if (data := self._objects.get(name)) is not None:
                    for snippet in decode_snippets(name, data):
                        if snippet.snippet_id in missing.get(snippet.doc_id, ()):
                            found[snippet.snippet_id] = _SnippetText(snippet.text, snippet.tokens, address)
            frontier = self._before(
                {doc_id: p for doc_id, p in frontier.items() if not missing[doc_id] <= found.keys()}
            )
        return found

    def _before(self, made: Mapping[str, PlacedRow]) -> dict[str, PlacedRow]:
        """Returns the `ingest` rows of the heads that these moves replaced."""
        befores = {doc_id: address_in(p.row.detail.before) for doc_id, p in made.items() if p.row.detail.before}
        replaced = {}
        for doc_id, rows in self._rows(befores).items():
            earlier = [placed for placed in rows if placed.row.live and placed.row.fence < made[doc_id].row.fence]
            if earlier:
                replaced[doc_id] = max(earlier, key=lambda placed: placed.row.fence)
        return self._made(replaced)

    def _rows(self, addresses: Mapping[str, Address]) -> dict[str, list[PlacedRow]]:
        by_segment: dict[Address, set[str]] = defaultdict(set)
        for doc_id, address in addresses.items():
            by_segment[address].add(doc_id)
        found: dict[str, list[PlacedRow]] = defaultdict(list)
        for address, doc_ids in by_segment.items():
            at, data = self._segment(address)
            if data is None:
                continue
            for row in whole_rows(self._layout.rows_at(at), data):
                if row.detail.doc_id in doc_ids:
                    found[row.detail.doc_id].append(PlacedRow(row, at))
        return found

    def _segment(self, address: Address) -> tuple[Address, bytes | None]:
        data = self._objects.get(self._layout.rows_at(address))
        if data is None:
            # A purge has rewritten it: its name has the same batch, and a later epoch.
            for name in self._truth():
                now_at = address_in(name)
                if now_at.batch == address.batch:
                    return now_at, self._objects.get(name)
        return address, data


def _describe_snippets(
    row: LogRow, made: LogRow, wanted: Collection[str], texts: Mapping[str, _SnippetText]
) -> list[PlacedSnippet]:
    detail = row.detail
    metadata: Any = parse_json(detail.metadata.encode())
    described = []
    places = zip(snippet_texts(detail.ids), *made.detail.positions, strict=True)
    for ordinal, (snippet_id, start, end, section_id) in enumerate(places):
        if snippet_id in wanted:
            text, tokens, at = texts[snippet_id]
            snippet = SinkSnippet(
                snippet_id=snippet_id,
                doc_id=detail.doc_id,
                text=text,
                start=start,
                end=end,
                section_id=section_id,
                ordinal=ordinal,
                tokens=tokens,
                source_url=detail.source_url,
                metadata=metadata,
            )
            described.append(PlacedSnippet(snippet, at))
    return described


REMEMBERED = 16
"""unfinished batches that are remembered"""


class NewSegment(NamedTuple):
    """A segment that is not committed yet, and its new snippets in their order."""

    address: Address
    snippet_ids: Sequence[bytes]


class UnsinkedBatch(NamedTuple):
    """A batch that did not finish: the vectors it made for these snippets may be stored under its address."""

    address: Address
    snippet_ids: frozenset[bytes]


class VectorRequest(NamedTuple):
    """One page of snippets whose vectors are wanted."""

    snippets: Sequence[PlacedSnippet]
    histories: Mapping[str, set[str]]
    """doc_id -> addresses of its newest committed rows, which lead to its earlier revisions"""
    new: NewSegment | None
    number: int
    """of the page, from 1"""
    unfinished: Sequence[UnsinkedBatch] = ()
    """batches that may have embedded some of them"""


class SnippetVectors(Protocol):
    """Vectors stored alongside the snippets, implemented by `ragfence.indexes`."""

    @property
    def page(self) -> int:
        """How many vectors are held in memory at a time."""
        ...

    def vectors(self, request: VectorRequest) -> Vectors:
        """Returns one row for each snippet of the page; snippets without a stored vector are embedded now.

        Raises:
            SnapshotGone: The log is being rewritten, and one of their segments has moved.
        """
        ...


class Upserts:
    """Sends snippets to one sink."""

    def __init__(self, sink: Sink | VectorSink, open_vectors: Callable[[], SnippetVectors] | None = None) -> None:
        """`open_vectors` is called for the first snippet, since it may load a model."""
        self._sink = sink
        self._open_vectors = open_vectors
        self._unfinished: tuple[UnsinkedBatch, ...] = ()

    @property
    def recipient(self) -> str:
        """The name of the sink, for messages."""
        return f"the sink {self._sink.name!r}{' or its embedder' if self._open_vectors else ''}"

    def give(
        self,
        snippets: Mapping[str, Sequence[PlacedSnippet]],
        rows: Mapping[str, PlacedRow],
        new: NewSegment | None = None,
    ) -> None:
        """Upserts snippets; both mappings are by doc_id, and `rows` has the row that describes them."""
        placed = [each for of_document in snippets.values() for each in of_document]
        if self._open_vectors is None:
            plain = cast(Sink, self._sink)
            for at in range(0, len(placed), PAGE):
                plain.upsert([each.snippet for each in placed[at : at + PAGE]])
            return
        if not placed:
            return
        sink, page = cast(VectorSink, self._sink), self._vectors.page
        histories = {doc_id: _history(rows[doc_id], new) for doc_id in snippets}
        for number, at in enumerate(range(0, len(placed), page), start=1):
            portion = placed[at : at + page]
            vectors = self._vectors.vectors(VectorRequest(portion, histories, new, number, self._unfinished))
            sink.upsert([each.snippet for each in portion], vectors)

    def remember(self, address: Address, snippet_ids: Collection[str]) -> None:
        """Remembers a batch that did not finish: its documents need not be embedded again."""
        if self._open_vectors is not None and snippet_ids:
            others = [each for each in self._unfinished if each.address != address]
            self._unfinished = (*others, UnsinkedBatch(address, frozenset(map(bytes.fromhex, snippet_ids))))[
                -REMEMBERED:
            ]

    @cached_property
    def _vectors(self) -> SnippetVectors:
        assert self._open_vectors is not None
        return self._open_vectors()


def _history(placed: PlacedRow, new: NewSegment | None) -> set[str]:
    detail = placed.row.detail
    committed = set() if new is not None and placed.at == new.address else {placed.at.text}
    return committed | {address for address in (detail.before, detail.origin) if address}
