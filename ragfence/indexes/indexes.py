"""`fence.indexes`: an index is built once per INDEX_HASH, and what was embedded is never embedded again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ragfence._progress import Gauge, gauge
from ragfence.documents.documents import Documents
from ragfence.documents.log import Layout
from ragfence.engine.engine import Engine
from ragfence.errors import BuildRetired, NotSealed, ObjectsRequired, SnapshotGone
from ragfence.indexes.backends.backend import Backend
from ragfence.indexes.backends.registry import lance_beside, open_backend
from ragfence.indexes.build import Build, IndexBuilder, Tools, operation_of
from ragfence.indexes.build_log import SEALED, Attempt, BuildEntry, BuildLog, BuildSeal
from ragfence.indexes.catalog import Catalog, CatalogEntry
from ragfence.indexes.document_hooks import IndexDocumentHooks
from ragfence.indexes.embedders.embedder import Embedder, EmbedderId
from ragfence.indexes.embedders.registry import embedder_of, reopened
from ragfence.indexes.gates import Candidate, GateResult, Gates, Golden, golden_gate
from ragfence.indexes.gc import BuildCollector, GcReport
from ragfence.indexes.index_rows import LogRows
from ragfence.indexes.sink_vectors import SinkVectors
from ragfence.indexes.snapshots import Snapshots
from ragfence.indexes.spec import Explained, IndexSpec, embedder_in, explained, index_hash_of
from ragfence.indexes.vectors import VectorStore
from ragfence.stores.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class BuildState:
    """A build as its log has it now."""

    index_hash: str
    entry: BuildEntry
    aliases: tuple[str, ...]


class Indexes:
    """Index builds behind the fence. Safe to be killed anywhere; any number of processes may build the same."""

    def __init__(self, engine: Engine, documents: Documents) -> None:
        if engine.objects is None:
            raise ObjectsRequired("indexes need an object store, and this fence was opened without one")
        self._engine = engine
        self._objects: ObjectStore = engine.objects
        self._documents = documents
        self._backends: dict[str, Backend] = {}
        self._embedders: dict[str, Embedder] = {}
        self.builds_log = BuildLog(engine.tenant, engine.objects)

    def build(
        self,
        spec: IndexSpec | None = None,
        *,
        corpus: str | None = None,
        wait_s: float | None = None,
        progress: bool | Callable[[int, int | None], None] = False,
    ) -> Build:
        """Builds an index of all live documents, or answers with the build that is sealed already.

        While somebody else builds the same, this waits, as long as the policy says or `wait_s`; then `InFlight`.
        `corpus`: the digest of an earlier corpus that somebody has begun to build, instead of the one of now.
        `progress`: a bar, or a callable that gets how many rows are written, and of how many.

        >>> fence.indexes.build().index_hash  # doctest: +SKIP
        """
        spec = spec or IndexSpec()
        with gauge(progress, "building") as told:
            return self._building(spec, told).run(wait_s, corpus)

    def explain(self, spec: IndexSpec | None = None, *, against: str | None = None) -> Explained:
        """What the INDEX_HASH of now is made of, and what of it differs from another build's. Builds nothing."""
        spec = spec or IndexSpec()
        inputs = self._building(spec, lambda done, total: None).inputs_of_now()
        index_hash = index_hash_of(inputs)
        entry = self.builds_log.newest(against) if against else None
        if against and entry is None:
            raise NotSealed(f"there is no build {against}", index_hash=against)
        return explained(index_hash, inputs, self.builds_log.newest(index_hash), entry, self._corpora)

    def compare(self, index_hash: str, against: str) -> Explained:
        """What of the inputs of one build differs from another's; also of builds that are retired."""
        entry, other = self._last_sealed(index_hash), self._last_sealed(against)
        assert entry.seal is not None
        return explained(index_hash, entry.seal.inputs, self.builds_log.newest(index_hash), other, self._corpora)

    def corpus_digest(self) -> str:
        """As `fence.documents.corpus_digest()`, and kept in the object store: a new process need not read the heads."""
        return self._corpora.digest()

    def get(self, index_hash: str) -> BuildEntry | None:
        """The newest entry of a build's log."""
        return self.builds_log.newest(index_hash)

    def builds(self) -> Iterator[BuildState]:
        """Every build there is, with the aliases that use it."""
        aliases = self._catalog.head().state.aliases
        for index_hash in self.builds_log.hashes():
            if (entry := self.builds_log.newest(index_hash)) is not None:
                using = tuple(name for name, held in aliases.items() if held.target.index_hash == index_hash)
                yield BuildState(index_hash, entry, using)

    def gc(self, *, dry_run: bool = True, min_age_s: float = 3600.0) -> GcReport:
        """Retires and drops builds that no alias can reach, and attempts that nobody can seal any more.

        `min_age_s` spares what was sealed lately: a swap to it may be on its way.
        """
        return self._collecting.gc(dry_run, min_age_s=min_age_s)

    def use(self, embedder: Embedder) -> Embedder:
        """Makes an embedder of your own known, so that searches can open it again."""
        self._embedders[EmbedderId.of(embedder).digest] = embedder
        return embedder

    def backend(self, name: str) -> Backend:
        """The backend of a spec or a seal, opened once."""
        if name not in self._backends:
            uri, options = lance_beside(self._objects) if name == "lance" else ("", self._storage_options())
            self._backends[name] = open_backend(name, default_lance=uri, storage_options=options)
        return self._backends[name]

    def embedder_for(self, seal: BuildSeal) -> Embedder:
        """The embedder that made the vectors of a build."""
        known = embedder_in(seal.inputs)
        if known.digest not in self._embedders:
            self._embedders[known.digest] = reopened(known, self._embedders)
        return self._embedders[known.digest]

    def snippet_ids(self, seal: BuildSeal) -> set[str]:
        """Of the corpus that a build is of: what its physical index has to hold."""
        snapshot = self._corpora.get(seal.corpus_digest)
        if snapshot is None:
            raise SnapshotGone(f"the snapshot {seal.corpus_digest} of build {seal.index_hash} is not stored any more")
        return {each.hex() for each in snapshot.ids()}

    def judge_golden(self, index_hash: str, golden: Golden, *, min_recall: float | None = None) -> GateResult:
        """What the golden queries find in a sealed build; the same gate that a swap has."""
        entry = self.builds_log.newest(index_hash)
        if entry is None or entry.seal is None:
            raise NotSealed(f"build {index_hash} is not sealed", index_hash=index_hash)
        limits = Gates(golden=golden, min_recall=min_recall).limits(self._engine.policy.indexes)
        return golden_gate(limits, Candidate(entry, self.backend(entry.seal.backend), self.embedder_for))

    def coverage(self, seal: BuildSeal) -> float:
        """The share of the documents that are live now which a build has, in their present revision."""
        same = self._corpora.digest() == seal.corpus_digest
        # After the digest: a document that was purged may be back by now, and then the corpus is the one that was
        # sealed although its rows are gone.
        newest = self.builds_log.newest(seal.index_hash)
        whole = newest is not None and newest.kind == SEALED and newest.seal == seal
        if same and whole:
            return 1.0
        then, now = self._corpora.get(seal.corpus_digest), self._corpora.now()
        if then is None or not now.documents:
            return 0.0 if now.documents else 1.0
        return now.share_in(then, None if whole else self._ids_left(seal))

    def maintenance(self) -> IndexDocumentHooks:
        """What happens to vectors and indexes when documents are compacted or purged."""
        layout = Layout(self._engine.tenant)
        return IndexDocumentHooks(
            self._engine, self._objects, self.builds_log, layout, self.backend, self._sink_vectors
        )

    def close(self) -> None:
        for opened in (*self._backends.values(), *self._embedders.values()):
            if callable(close := getattr(opened, "close", None)):
                close()
        self._backends.clear()
        self._embedders.clear()

    def _ids_left(self, seal: BuildSeal) -> Any:
        """Of a build whose rows may be fewer than were sealed: an Arrow array of text."""
        import pyarrow as pa

        tables = self.backend(seal.backend).read(seal.physical, ["snippet_id"])
        chunks = [chunk for table in tables for chunk in table.column("snippet_id").chunks]
        return pa.chunked_array(chunks, pa.string()).combine_chunks()

    def _building(self, spec: IndexSpec, told: Gauge) -> IndexBuilder:
        embedder = self._opened(spec.embedder)
        return IndexBuilder(self._tools, spec, embedder, self.backend(spec.backend), told)

    def _opened(self, given: str | Embedder) -> Embedder:
        """Models are loaded once."""
        if isinstance(given, str):
            known = self._by_name.get(given)
            if known is None:
                known = self._by_name[given] = self.use(embedder_of(given))
            return known
        return self.use(embedder_of(given))

    def _sink_vectors(self, embedder: str | Embedder) -> SinkVectors:
        opened = self._opened(embedder)
        store = VectorStore(self._engine, self._objects, opened)
        return SinkVectors(store, self._tools.log, EmbedderId.of(opened).dimension)

    def _storage_options(self) -> dict[str, str]:
        """For LanceDB elsewhere on the S3 that the objects are on."""
        return lance_beside(self._objects)[1] if self._objects.url.startswith("s3://") else {}

    @cached_property
    def _by_name(self) -> dict[str, Embedder]:
        return {}

    @cached_property
    def _corpora(self) -> Snapshots:
        return Snapshots(self._engine.tenant, self._objects, self._documents.internals.corpus)

    @cached_property
    def _tools(self) -> Tools:
        reads = self._documents.internals.reads
        return Tools(
            engine=self._engine,
            objects=self._objects,
            corpora=self._corpora,
            builds=self.builds_log,
            log=LogRows(self._objects, Layout(self._engine.tenant), reads.segments),
            known=self._live_hashes,
            head=self._catalog.head,
            restored=self._restored,
        )

    @cached_property
    def _catalog(self) -> Catalog:
        return Catalog(self._engine.tenant, self._objects)

    @cached_property
    def _collecting(self) -> BuildCollector:
        return BuildCollector(self._engine, self.builds_log, self.backend, is_over=self._is_over)

    def _last_sealed(self, index_hash: str) -> BuildEntry:
        for entry in self.builds_log.history(index_hash):
            if entry.usable:
                return entry
        raise NotSealed(f"there is no build {index_hash}", index_hash=index_hash)

    def _is_over(self, attempt: Attempt) -> bool:
        """Whether the lease of an attempt has ended, as far as the fence store knows."""
        engine = self._engine
        request = engine.request(operation_of(attempt.index_hash, attempt.number), None)
        (held,) = engine.fences.read([request.lookup])
        if held.record is None:
            return False  # forgotten: its age has to tell
        alive = held.record.held_at(engine.fences.now_ms())
        return not (alive and attempt.token.startswith(held.record.token.hex()))

    def _live_hashes(self) -> list[str]:
        return [held.target.index_hash for held in self._catalog.head().state.aliases.values()]

    def _restored(self, head: CatalogEntry, entry: BuildEntry) -> BuildEntry | None:
        """Somebody wants a build that gc is about to retire. None: gc was faster."""
        assert entry.seal is not None
        index_hash = entry.seal.index_hash
        if not head.state.retires(entry, index_hash):
            return entry
        try:
            return self._collecting.restore(index_hash)
        except BuildRetired:
            return None
