"""`fence.indexes`: an index is built once per INDEX_HASH, and a snippet is embedded once per embedder."""

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
from ragfence.indexes.backends.registry import default_lance_location, open_backend
from ragfence.indexes.build import Build, BuildTools, IndexBuilder, operation_of
from ragfence.indexes.build_log import SEALED, Attempt, BuildEntry, BuildLog, BuildSeal
from ragfence.indexes.catalog import Catalog, CatalogEntry
from ragfence.indexes.document_hooks import IndexDocumentHooks, SinkVectors
from ragfence.indexes.embedders.embedder import Embedder, EmbedderId
from ragfence.indexes.embedders.registry import reopen_embedder, to_embedder
from ragfence.indexes.gates import Candidate, GateResult, Gates, Golden, golden_gate
from ragfence.indexes.gc import BuildCollector, GcReport
from ragfence.indexes.index_rows import LogRows
from ragfence.indexes.snapshots import Snapshots
from ragfence.indexes.spec import Explanation, IndexSpec, compute_index_hash, embedder_in, explain_build
from ragfence.indexes.vectors import VectorStore
from ragfence.stores.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class BuildState:
    """The current state of a build."""

    index_hash: str
    entry: BuildEntry
    aliases: tuple[str, ...]


class Indexes:
    """Builds indexes once. A build may be killed anywhere, and several processes may build the same index."""

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
        """Builds an index of all live documents, or returns the build that is already sealed.

        Args:
            spec: What to build; `IndexSpec()` by default.
            corpus: The digest of an earlier corpus whose build was begun, instead of the current one.
            wait_s: How long to wait while another process builds the same index; by default as the policy says.
            progress: True for a progress bar, or a callable that receives the rows written and their total.

        Raises:
            InFlight: Another process is still building this index after `wait_s`.
            BuildUnverified: What was read back from the backend is not what was written.
            SnapshotGone: The corpus is not in the log any more.

        >>> fence.indexes.build().index_hash  # doctest: +SKIP
        """
        spec = spec or IndexSpec()
        with gauge(progress, "building") as report:
            return self._builder(spec, report).run(wait_s, corpus)

    def explain(self, spec: IndexSpec | None = None, *, against: str | None = None) -> Explanation:
        """Returns the inputs of the current INDEX_HASH and what differs from another build. Builds nothing.

        Args:
            spec: What would be built; `IndexSpec()` by default.
            against: The INDEX_HASH of the build to compare with.

        Raises:
            NotSealed: There is no build `against`.
        """
        spec = spec or IndexSpec()
        inputs = self._builder(spec, lambda done, total: None).current_inputs()
        index_hash = compute_index_hash(inputs)
        entry = self.builds_log.newest(against) if against else None
        if against and entry is None:
            raise NotSealed(f"there is no build {against}", index_hash=against)
        return explain_build(index_hash, inputs, self.builds_log.newest(index_hash), entry, self._corpora)

    def compare(self, index_hash: str, against: str) -> Explanation:
        """Compares the inputs of two builds, which may be retired."""
        entry, other = self._last_sealed(index_hash), self._last_sealed(against)
        assert entry.seal is not None
        return explain_build(index_hash, entry.seal.inputs, self.builds_log.newest(index_hash), other, self._corpora)

    def corpus_digest(self) -> str:
        """Like `fence.documents.corpus_digest()`, but cached in the object store for processes that start later."""
        return self._corpora.digest()

    def get(self, index_hash: str) -> BuildEntry | None:
        """Returns the newest entry of a build's log, or None if there is no such build."""
        return self.builds_log.newest(index_hash)

    def builds(self) -> Iterator[BuildState]:
        """Yields every build with the aliases that point at it."""
        aliases = self._catalog.head().state.aliases
        for index_hash in self.builds_log.hashes():
            if (entry := self.builds_log.newest(index_hash)) is not None:
                using = tuple(name for name, held in aliases.items() if held.target.index_hash == index_hash)
                yield BuildState(index_hash, entry, using)

    def gc(self, *, dry_run: bool = True, min_age_s: float = 3600.0) -> GcReport:
        """Retires and drops builds that no alias can reach, and attempts that can no longer be sealed.

        Args:
            dry_run: Only report what would be done.
            min_age_s: Keep builds that were sealed more recently; a swap to them may be about to happen.
        """
        return self._collector.gc(dry_run, min_age_s=min_age_s)

    def use(self, embedder: Embedder) -> Embedder:
        """Registers an embedder, so that searches of its builds can use it. Returns it."""
        self._embedders[EmbedderId.of(embedder).digest] = embedder
        return embedder

    def backend(self, name: str) -> Backend:
        """Returns the backend of a spec or a seal, which is opened once."""
        if name not in self._backends:
            uri, options = default_lance_location(self._objects) if name == "lance" else ("", self._storage_options())
            self._backends[name] = open_backend(name, default_lance=uri, storage_options=options)
        return self._backends[name]

    def embedder_for(self, seal: BuildSeal) -> Embedder:
        """Returns the embedder that made the vectors of a build."""
        known = embedder_in(seal.inputs)
        if known.digest not in self._embedders:
            self._embedders[known.digest] = reopen_embedder(known, self._embedders)
        return self._embedders[known.digest]

    def snippet_ids(self, seal: BuildSeal) -> set[str]:
        """Returns the snippet_ids of a build's corpus, which its physical index must hold."""
        snapshot = self._corpora.get(seal.corpus_digest)
        if snapshot is None:
            raise SnapshotGone(f"the snapshot {seal.corpus_digest} of build {seal.index_hash} is not stored any more")
        return {each.hex() for each in snapshot.ids()}

    def judge_golden(self, index_hash: str, golden: Golden, *, min_recall: float | None = None) -> GateResult:
        """Runs the golden queries on a sealed build, as the gate of a swap does."""
        entry = self.builds_log.newest(index_hash)
        if entry is None or entry.seal is None:
            raise NotSealed(f"build {index_hash} is not sealed", index_hash=index_hash)
        limits = Gates(golden=golden, min_recall=min_recall).limits(self._engine.policy.indexes)
        return golden_gate(limits, Candidate(entry, self.backend(entry.seal.backend), self.embedder_for))

    def coverage(self, seal: BuildSeal) -> float:
        """Returns the share of live documents whose current revision is in a build."""
        same = self._corpora.digest() == seal.corpus_digest
        # Read after the digest: a purged document may have been ingested again, and then the corpus is the one that was
        # sealed, although the document's rows are gone.
        newest = self.builds_log.newest(seal.index_hash)
        whole = newest is not None and newest.kind == SEALED and newest.seal == seal
        if same and whole:
            return 1.0
        then, now = self._corpora.get(seal.corpus_digest), self._corpora.now()
        if then is None or not now.documents:
            return 0.0 if now.documents else 1.0
        return now.share_in(then, None if whole else self._remaining_ids(seal))

    def maintenance(self) -> IndexDocumentHooks:
        """Returns what indexes do when documents are committed, compacted, purged or verified."""
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

    def _remaining_ids(self, seal: BuildSeal) -> Any:
        """The snippet_ids that are left of a build, as an Arrow array of text; a purge may have removed rows."""
        import pyarrow as pa

        tables = self.backend(seal.backend).read(seal.physical, ["snippet_id"])
        chunks = [chunk for table in tables for chunk in table.column("snippet_id").chunks]
        return pa.chunked_array(chunks, pa.string()).combine_chunks()

    def _builder(self, spec: IndexSpec, progress: Gauge) -> IndexBuilder:
        embedder = self._open_embedder(spec.embedder)
        return IndexBuilder(self._tools, spec, embedder, self.backend(spec.backend), progress)

    def _open_embedder(self, given: str | Embedder) -> Embedder:
        """Opens an embedder by name once, so that its model is loaded once."""
        if isinstance(given, str):
            known = self._embedders_by_name.get(given)
            if known is None:
                known = self._embedders_by_name[given] = self.use(to_embedder(given))
            return known
        return self.use(to_embedder(given))

    def _sink_vectors(self, embedder: str | Embedder) -> SinkVectors:
        opened = self._open_embedder(embedder)
        store = VectorStore(self._engine, self._objects, opened)
        return SinkVectors(store, self._tools.log, EmbedderId.of(opened).dimension)

    def _storage_options(self) -> dict[str, str]:
        """The options for LanceDB at another place on the same S3."""
        return default_lance_location(self._objects)[1] if self._objects.url.startswith("s3://") else {}

    @cached_property
    def _embedders_by_name(self) -> dict[str, Embedder]:
        return {}

    @cached_property
    def _corpora(self) -> Snapshots:
        return Snapshots(self._engine.tenant, self._objects, self._documents.internals.corpus)

    @cached_property
    def _tools(self) -> BuildTools:
        reads = self._documents.internals.reads
        return BuildTools(
            engine=self._engine,
            objects=self._objects,
            corpora=self._corpora,
            builds=self.builds_log,
            log=LogRows(self._objects, Layout(self._engine.tenant), reads.segments),
            live_hashes=self._live_hashes,
            head=self._catalog.head,
            restore=self._restore,
        )

    @cached_property
    def _catalog(self) -> Catalog:
        return Catalog(self._engine.tenant, self._objects)

    @cached_property
    def _collector(self) -> BuildCollector:
        return BuildCollector(self._engine, self.builds_log, self.backend, has_expired=self._has_expired)

    def _last_sealed(self, index_hash: str) -> BuildEntry:
        for entry in self.builds_log.history(index_hash):
            if entry.usable:
                return entry
        raise NotSealed(f"there is no build {index_hash}", index_hash=index_hash)

    def _has_expired(self, attempt: Attempt) -> bool:
        """Whether the lease of an attempt has ended, according to the fence store."""
        engine = self._engine
        request = engine.request(operation_of(attempt.index_hash, attempt.number), None)
        (held,) = engine.fences.read([request.lookup])
        if held.record is None:
            return False  # the store forgot it, so its age decides
        alive = held.record.held_at(engine.fences.now_ms())
        return not (alive and attempt.token.startswith(held.record.token.hex()))

    def _live_hashes(self) -> list[str]:
        return [held.target.index_hash for held in self._catalog.head().state.aliases.values()]

    def _restore(self, head: CatalogEntry, entry: BuildEntry) -> BuildEntry | None:
        """Keeps a build that gc is about to retire, because it is wanted. None: gc was faster."""
        assert entry.seal is not None
        index_hash = entry.seal.index_hash
        if not head.state.retires(entry, index_hash):
            return entry
        try:
            return self._collector.restore(index_hash)
        except BuildRetired:
            return None
