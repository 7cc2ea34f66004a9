"""What indexes and vectors do when documents are committed, compacted, purged or verified.

Compaction   the log is rewritten; the vectors of snippets that stay are copied, and the old objects are deleted.
Purge        the document's rows are removed from every physical index, and no build in progress can bring them back;
             see `row_purge`. Its vectors go when the log is rewritten without it.
Sinks        a sink that names an embedder gets its vectors from `SinkVectors`: from the same objects that builds use,
             made by whichever needs them first. The vectors of a segment that is about to be committed are stored
             before the commit, in one object if they fit a page. Those of committed segments are read, or made under
             the same claim that builds take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ragfence.documents.findings import Finding, Trouble
from ragfence.documents.log import Address, Layout
from ragfence.documents.rewrite import Switch
from ragfence.documents.sinks.sink import PAGE
from ragfence.documents.sinks.upserts import NewSegment, VectorRequest
from ragfence.engine.engine import Engine
from ragfence.errors import BuildMissing, BuildUnverified
from ragfence.indexes.backends.backend import Backend
from ragfence.indexes.build_log import BuildLog
from ragfence.indexes.catalog import Catalog
from ragfence.indexes.content_digest import ContentDigest
from ragfence.indexes.embedders.embedder import Embedder
from ragfence.indexes.index_rows import LogRows
from ragfence.indexes.row_purge import RowPurge
from ragfence.indexes.spec import shape_in
from ragfence.indexes.vectors import Earlier, VectorCopier, VectorStore
from ragfence.stores.objects import ObjectStore

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Vectors


class IndexDocumentHooks:
    """What indexes do when documents are compacted or purged."""

    def __init__(
        self,
        engine: Engine,
        objects: ObjectStore,
        builds: BuildLog,
        layout: Layout,
        backend_of: Callable[[str], Backend],
        vectors_of: Callable[[str | Embedder], SinkVectors],
    ) -> None:
        self._engine = engine
        self._builds = builds
        self._copier = VectorCopier(objects, layout)
        self._catalog = Catalog(engine.tenant, objects)
        self._backend_of = backend_of
        self._vectors_of = vectors_of

    def vectors(self, embedder: str | Embedder) -> SinkVectors:
        return self._vectors_of(embedder)

    def copy(self, switch: Switch) -> None:
        self._copier.copy(switch)

    def findings(self) -> Iterator[Finding]:
        """Yields findings about indexes that aliases point at and whose rows are not what was sealed."""
        aliases = self._catalog.head().state.aliases
        for index_hash in sorted({held.target.index_hash for held in aliases.values()}):
            names = ", ".join(name for name, held in aliases.items() if held.target.index_hash == index_hash)
            entry = self._builds.newest(index_hash)
            seal = entry.seal if entry else None
            if seal is None:
                yield Finding(Trouble.INDEX_MISSING, f"{names} points at a build that is not sealed", place=index_hash)
                continue
            try:
                contents = ContentDigest(shape_in(seal.inputs))
                for table in self._backend_of(seal.backend).read(seal.physical):
                    contents.add(table)
            except BuildMissing:
                yield Finding(Trouble.INDEX_MISSING, f"the rows behind {names} are gone", place=seal.physical)
                continue
            except BuildUnverified as wrong:
                yield Finding(Trouble.INDEX_DIFFERS, f"behind {names}: {wrong.message}", place=seal.physical)
                continue
            if contents.digest() != seal.content_digest:
                what = f"behind {names} are {contents.rows:,} rows, which are not the {seal.rows:,} that were sealed"
                yield Finding(Trouble.INDEX_DIFFERS, what, place=seal.physical)

    def forget(self, doc_id: str) -> None:
        RowPurge(self._engine, self._builds, self._catalog, self._backend_of, doc_id).run()


PAGE_BYTES = 32 << 20


class SinkVectors:
    """The vectors for one sink. Used by several threads at once."""

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
        held = self._store.find(address, texts)
        missing = [each for each in texts if each not in held]
        if not missing:
            return held
        return held | self._store.load_or_embed(address, missing, lambda some: [texts[each] for each in some], earlier)

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
