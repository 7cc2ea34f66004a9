"""Gives a sink the snippets that it is owed, page by page; with their vectors, if the sink names an embedder.

    intent -> (vectors beside the snippets -> upsert) for each page -> commit

The vectors of new snippets are put beside the snippets before the commit. They count when the segment counts: what
belongs to a segment that was never committed is void, and is deleted with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from ragfence.documents.log import Address
from ragfence.documents.sinks.revisions import Placed, PlacedSnippet
from ragfence.documents.sinks.sink import PAGE, Sink, VectorSink

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Vectors

REMEMBERED = 16
"""batches that did not finish"""


class NewSegment(NamedTuple):
    """A segment that is not committed yet, and the snippets that it makes, in their order."""

    address: Address
    snippet_ids: Sequence[bytes]


class CutOff(NamedTuple):
    """A batch that was to give these to the sink and did not finish: what it embedded may stand beside its address."""

    address: Address
    snippet_ids: frozenset[bytes]


class VectorRequest(NamedTuple):
    """One page of snippets whose vectors are wanted."""

    snippets: Sequence[PlacedSnippet]
    histories: Mapping[str, set[str]]
    """doc_id -> addresses of its newest rows that are committed; they lead to its earlier revisions"""
    new: NewSegment | None
    number: int
    """of the page, from 1"""
    cut_off: Sequence[CutOff] = ()
    """batches that may have embedded some of them"""


class SnippetVectors(Protocol):
    """Vectors that are kept beside the snippets. `ragfence.indexes` has them."""

    @property
    def page(self) -> int:
        """So many of them are held in memory at once."""
        ...

    def vectors(self, request: VectorRequest) -> Vectors:
        """One row for each snippet of the page; what nobody has embedded yet is embedded now.

        `SnapshotGone`: the log is being rewritten, and a segment of theirs is not where it was.
        """
        ...


class Upserts:
    """What one sink is given."""

    def __init__(self, sink: Sink | VectorSink, open_vectors: Callable[[], SnippetVectors] | None = None) -> None:
        """`open_vectors` is called when the first snippet is on its way: it may load a model."""
        self._sink = sink
        self._open_vectors = open_vectors
        self._cut_off: tuple[CutOff, ...] = ()

    @property
    def recipient(self) -> str:
        """For messages."""
        return f"the sink {self._sink.name!r}{' or its embedder' if self._open_vectors else ''}"

    def give(
        self,
        snippets: Mapping[str, Sequence[PlacedSnippet]],
        rows: Mapping[str, Placed],
        new: NewSegment | None = None,
    ) -> None:
        """By doc_id: the snippets, and the row that describes them."""
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
            vectors = self._vectors.vectors(VectorRequest(portion, histories, new, number, self._cut_off))
            sink.upsert([each.snippet for each in portion], vectors)

    def remember(self, address: Address, snippet_ids: Collection[str]) -> None:
        """A batch did not finish. Whoever sends its documents again need not embed them again."""
        if self._open_vectors is not None and snippet_ids:
            others = [each for each in self._cut_off if each.address != address]
            self._cut_off = (*others, CutOff(address, frozenset(map(bytes.fromhex, snippet_ids))))[-REMEMBERED:]

    @cached_property
    def _vectors(self) -> SnippetVectors:
        assert self._open_vectors is not None
        return self._open_vectors()


def _history(placed: Placed, new: NewSegment | None) -> set[str]:
    detail = placed.row.detail
    committed = set() if new is not None and placed.at == new.address else {placed.at.text}
    return committed | {address for address in (detail.before, detail.origin) if address}
