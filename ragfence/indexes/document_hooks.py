"""What happens to vectors and indexes when documents are compacted, purged or verified.

A purged document leaves them too.

Vectors: the log is rewritten without the document, and its vectors with it; what stays is copied, the old objects go.

A sink that names an embedder gets its vectors from here, see `sink_vectors`.

Indexes: its rows are taken out of every physical index, and no build under way brings them back; see `purging`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ragfence.documents.findings import Finding, Trouble
from ragfence.documents.log import Layout
from ragfence.documents.rewrite import Switch
from ragfence.engine.engine import Engine
from ragfence.errors import BuildMissing, BuildUnverified
from ragfence.indexes.backends.backend import Backend
from ragfence.indexes.build_log import BuildLog
from ragfence.indexes.catalog import Catalog
from ragfence.indexes.content_digest import ContentDigest
from ragfence.indexes.embedders.embedder import Embedder
from ragfence.indexes.row_purge import RowPurge
from ragfence.indexes.sink_vectors import SinkVectors
from ragfence.indexes.spec import shape_in
from ragfence.indexes.vectors import VectorCopier
from ragfence.stores.objects import ObjectStore


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
        """Of the indexes that aliases point at: is what their seals say still there?"""
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
                what = f"behind {names} are {contents.rows:,} rows that are not the {seal.rows:,} that were sealed"
                yield Finding(Trouble.INDEX_DIFFERS, what, place=seal.physical)

    def forget(self, doc_id: str) -> None:
        RowPurge(self._engine, self._builds, self._catalog, self._backend_of, doc_id).run()
