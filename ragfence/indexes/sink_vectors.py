"""The vectors of snippets on their way into a sink: the same objects that builds use, made by whoever asks first.

Those of a segment that is about to be committed are put beside it before the commit, as one object where they fit a
page. Those of committed segments are found there, or embedded under the claim that builds take, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ragfence.documents.log import Address
from ragfence.documents.sinks.sink import PAGE
from ragfence.documents.sinks.upserts import NewSegment, VectorRequest
from ragfence.indexes.index_rows import LogRows
from ragfence.indexes.vectors import Earlier, VectorStore

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Vectors

PAGE_BYTES = 32 << 20


class SinkVectors:
    """Of one sink. Used by many threads at once."""

    def __init__(self, store: VectorStore, log: LogRows, dimension: int) -> None:
        self._store = store
        self._log = log
        self._dimension = dimension

    @property
    def page(self) -> int:
        return max(1, min(PAGE, PAGE_BYTES // (4 * self._dimension)))

    def vectors(self, request: VectorRequest) -> Vectors:
        import numpy as np

        found = np.empty((len(request.snippets), self._dimension), dtype=np.float32)
        by_segment: dict[Address, dict[bytes, int]] = {}
        for at, (snippet, address) in enumerate(request.snippets):
            by_segment.setdefault(address, {})[bytes.fromhex(snippet.snippet_id)] = at
        for address, places in by_segment.items():
            made = self._of_segment(address, places, request)
            for each, at in places.items():
                found[at] = made[each]
        return found

    def _of_segment(
        self, address: Address, places: Mapping[bytes, int], request: VectorRequest
    ) -> Mapping[bytes, Vectors]:
        texts = {each: request.snippets[at].snippet.text for each, at in places.items()}
        doc_ids = {each: request.snippets[at].snippet.doc_id for each, at in places.items()}
        earlier = partial(self._earlier, address, doc_ids, request)
        if request.new is not None and address == request.new.address:
            return self._of_new_segment(request.new, texts, earlier, request.number)
        held = self._store.held(address, texts)
        missing = [each for each in texts if each not in held]
        if not missing:
            return held
        return held | self._store.known_or_made(address, missing, lambda some: [texts[each] for each in some], earlier)

    def _of_new_segment(
        self, new: NewSegment, texts: Mapping[bytes, str], earlier: Earlier, number: int
    ) -> Mapping[bytes, Vectors]:
        ordered = {each: texts[each] for each in new.snippet_ids if each in texts}
        whole = len(ordered) == len(new.snippet_ids)
        return self._store.embed_new(new.address, ordered, earlier, number=number, whole=whole)

    def _earlier(
        self, known: Address, doc_ids: Mapping[bytes, str], request: VectorRequest, wanted: set[bytes]
    ) -> Iterator[Address]:
        for address, snippet_ids in request.unfinished:
            if address != known and not snippet_ids.isdisjoint(wanted):
                yield address
        of_document: dict[str, set[bytes]] = {}
        for each in wanted:
            of_document.setdefault(doc_ids[each], set()).add(each)
        starts = {doc_id: (request.histories[doc_id], snippet_ids) for doc_id, snippet_ids in of_document.items()}
        yield from self._log.history(starts, known)
