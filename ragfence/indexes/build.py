"""One build per INDEX_HASH: claimed, written under its own name, read back, sealed.

    snapshot -> claim -> attempt logged -> rows written -> read back and verified -> put_new builds/<hash>/<n>

A build is sealed at the number that was free when it was claimed. A builder that is overtaken, by a successor or by gc
retiring its attempt, loses this number and drops what it wrote. No other process writes to the same physical index.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from ragfence._progress import Gauge
from ragfence.core.operations import Operation
from ragfence.core.receipts import Decision, Receipt
from ragfence.engine import crash_points
from ragfence.engine.claim_block import ClaimBlock
from ragfence.engine.engine import Engine
from ragfence.engine.leases import Lease
from ragfence.engine.requests import acting_key
from ragfence.errors import BuildMissing, EmbedderInvalid, FencedOut, LeaseLost, NotReady, RagfenceError, SnapshotGone
from ragfence.indexes.backends.backend import PREFIX, Backend
from ragfence.indexes.build_log import SEALED, Attempt, BuildEntry, BuildLog, BuildSeal, next_retired
from ragfence.indexes.catalog import CatalogEntry
from ragfence.indexes.content_digest import matrix
from ragfence.indexes.embedders.embedder import Embedder, EmbedderId, find_undirected
from ragfence.indexes.incremental import BaseBroken, BaseBuild, BaseCopy, find_base
from ragfence.indexes.index_rows import LogRows, build_rows
from ragfence.indexes.snapshots import Snapshot, Snapshots
from ragfence.indexes.spec import AUTO, EXACT, IndexSpec, build_inputs, compute_index_hash
from ragfence.indexes.vectors import VECTOR_POINTS, RecentVectors, VectorStore
from ragfence.indexes.verification import Sample, VectorSums, sample_size, verify_build
from ragfence.stores.objects import ObjectStore

KIND = "index"
ATTEMPTS = 5
"""attempts in a row that embed nothing new, after which a build is given up"""
MAX_ATTEMPTS = 1_000
MAX_MOVES = 2
AFTER_ATTEMPT = "after_attempt"
MID_WRITE = "mid_write"
BEFORE_VERIFY = "before_verify"
BEFORE_SEALING = "before_sealing"
AFTER_SEALING = "after_sealing"
BUILD_POINTS = (AFTER_ATTEMPT, *VECTOR_POINTS, MID_WRITE, BEFORE_VERIFY, BEFORE_SEALING, AFTER_SEALING)
"""in the order in which a build reaches them; those of vectors and `MID_WRITE` many times"""


@dataclass(frozen=True, slots=True)
class Build:
    """A sealed build. Every call with the same inputs gets the same one; `decision` belongs to this call alone."""

    index_hash: str
    number: int
    """of the entry in the build's log"""
    seal: BuildSeal
    sealed_at_ms: int
    receipt: Receipt

    @property
    def decision(self) -> Decision:
        return self.receipt.decision

    @property
    def rows(self) -> int:
        return self.seal.rows

    @property
    def documents(self) -> int:
        return self.seal.documents

    @property
    def physical(self) -> str:
        return self.seal.physical

    @property
    def content_digest(self) -> str:
        return self.seal.content_digest


@dataclass(frozen=True, slots=True)
class BuildTools:
    """What a build needs of its fence."""

    engine: Engine
    objects: ObjectStore
    corpora: Snapshots
    builds: BuildLog
    log: LogRows
    live_hashes: Callable[[], list[str]]
    """hashes of builds to start from, the likeliest first"""
    head: Callable[[], CatalogEntry]
    """of the catalog; read before the log of a build, because a retirement may disappear from it in between"""
    restore: Callable[[CatalogEntry, BuildEntry], BuildEntry | None]
    """keeps a sealed build if gc is about to retire it; returns None if gc was faster"""


class _Retry(Exception):
    """The log of the build has changed: start again."""


CLOSE_WAIT_S = 30.0


def _close(rows: Generator[Any, None, None]) -> None:
    """Ends work that is still embedding, so that its claims are released while the stores are open.

    After an interrupt, a thread of the backend may still be executing it; it gets `CLOSE_WAIT_S` to finish.
    """
    give_up_at = time.monotonic() + CLOSE_WAIT_S
    while True:
        try:
            rows.close()
        except ValueError:  # being executed
            if time.monotonic() >= give_up_at:
                return
            time.sleep(0.02)
        else:
            return


class _RowSource:
    """Rows on their way into a backend. Remembers what they raise: the backend may raise another error instead, because
    it passed through another language."""

    def __init__(self, tables: Iterator[Any]) -> None:
        self._tables = tables
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._tables)
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise


class IndexBuilder:
    """`build()` of one spec."""

    def __init__(
        self, tools: BuildTools, spec: IndexSpec, embedder: Embedder, backend: Backend, progress: Gauge
    ) -> None:
        self._tools = tools
        self._spec = spec
        self._embedder = embedder
        self._backend = backend
        self._progress = progress
        self._embedder_id = EmbedderId.of(embedder)
        self._recent = RecentVectors()
        self._resolved = spec
        self._shape = spec.shape(self._embedder_id.dimension)
        if spec.index != AUTO:
            backend.check(self._shape)

    def inputs(self, corpus_digest: str) -> dict[str, Any]:
        """Returns the inputs of the INDEX_HASH. Also chooses the index, if the spec leaves it to the policy."""
        if self._spec.index == AUTO:
            rows = self._tools.corpora.rows(corpus_digest)
            if rows is None:
                raise _Retry
            limit = self._tools.engine.policy.indexes.ann_above
            self._resolved = self._spec.resolved(rows, self._backend, self._embedder_id, limit)
            self._shape = self._resolved.shape(self._embedder_id.dimension)
            self._backend.check(self._shape)
        return build_inputs(self._tools.engine.tenant, corpus_digest, self._embedder_id, self._resolved)

    def current_inputs(self) -> dict[str, Any]:
        for _ in range(ATTEMPTS):
            with contextlib.suppress(_Retry):  # a document moved between the digest and the count of its rows
                return self.inputs(self._tools.corpora.digest())
        raise NotReady("documents change faster than they can be counted", hint="try again")

    def run(self, wait_s: float | None, corpus: str | None = None) -> Build:
        """Builds the current corpus, or one that is stored."""
        moved = stalled = 0
        embedded_before = 0
        for _ in range(MAX_ATTEMPTS):
            if self._recent.embedded > embedded_before:
                # What was embedded is stored, and the next attempt continues from there: that is progress.
                embedded_before, moved, stalled = self._recent.embedded, 0, 0
            if stalled == ATTEMPTS:
                break
            stalled += 1
            digest = corpus or self._tools.corpora.digest(to_build=True)
            try:
                return self._build(digest, wait_s)
            except LeaseLost:
                continue  # a successor is building, or done: its build is the answer
            except _Retry:
                if corpus is not None and self._tools.corpora.get(corpus) is None:
                    raise SnapshotGone(f"the corpus {corpus} is neither stored nor the current one") from None
            except SnapshotGone:
                if corpus is not None or self._tools.corpora.digest() == digest:
                    # The same corpus: a compaction has moved what was being read. The next attempt finds it.
                    moved += 1
                    if moved > MAX_MOVES:
                        raise
        raise NotReady(
            f"the index could not be built: documents or the build's log changed {stalled} times in a row while it "
            f"was written; the vectors of {self._recent.embedded:,} snippets are stored",
            hint="build again when fewer documents are purged or compacted; stored vectors are not made again",
        )

    def _build(self, digest: str, wait_s: float | None) -> Build:
        tools, inputs = self._tools, self.inputs(digest)
        index_hash = compute_index_hash(inputs)
        head = tools.head()
        newest = tools.builds.newest(index_hash)
        known = newest if newest and newest.kind == SEALED else None
        if known and ((known := tools.restore(head, known)) is None or known.kind != SEALED or self._is_lost(known)):
            raise _Retry
        snapshot = None if known else self._snapshot(digest)
        number = known.number if known else (newest.number if newest else 0) + 1
        request = tools.engine.request(operation_of(index_hash, number), None)
        with tools.engine.claim(request, wait_s=wait_s, verdict=False, repeatable=True) as op:
            if op.is_new:
                known = self._execute(op, index_hash, number, inputs, snapshot)
                assert known.seal is not None
                with contextlib.suppress(
                    FencedOut
                ):  # a successor sealed the same build, and its receipt is the one for all
                    op.seal(effect_id=known.seal.physical, result=_result_of(known))
        entry = known or tools.builds.at(index_hash, number)
        if entry is None or entry.seal is None:
            raise _Retry
        return Build(index_hash, entry.number, entry.seal, entry.at_ms, op.receipt)

    def _is_lost(self, known: BuildEntry) -> bool:
        """Whether the rows were dropped by something other than ragfence: then the build is retired and built again."""
        assert known.seal is not None
        if self._backend.exists(known.seal.physical):
            return False
        with contextlib.suppress(BuildMissing):  # a listing may be outdated; opening the index is not
            self._backend.count(known.seal.physical)
            return False
        engine = self._tools.engine
        end = next_retired(
            known, at_ms=engine.fences.now_ms(), owner=engine.owner, reason="its rows were not in the backend"
        )
        self._tools.builds.append(known.seal.index_hash, end)
        return True

    def _snapshot(self, digest: str) -> Snapshot:
        """The snapshot of the corpus, stored before the claim so that every attempt can read it."""
        snapshot = self._tools.corpora.get(digest) or self._tools.corpora.now(of=digest)
        if snapshot.digest != digest:
            raise _Retry
        return snapshot

    def _execute(
        self, op: ClaimBlock, index_hash: str, number: int, inputs: dict[str, Any], snapshot: Snapshot | None
    ) -> BuildEntry:
        newest = self._tools.builds.newest(index_hash)
        if newest and newest.number >= number:
            # Sealed by an attempt that died before it could report it, or ended by another process.
            if newest.number == number and newest.kind == SEALED:
                return newest
            raise _Retry
        if snapshot is None:
            raise _Retry  # it was sealed a moment ago
        base = find_base(self._tools.builds, self._tools.corpora, inputs, snapshot, self._tools.live_hashes())
        try:
            return self._attempt(op.lease, index_hash, number, inputs, snapshot, base)
        except BaseBroken:
            return self._attempt(op.lease, index_hash, number, inputs, snapshot, None)

    def _attempt(
        self,
        lease: Lease,
        index_hash: str,
        number: int,
        inputs: dict[str, Any],
        snapshot: Snapshot,
        base: BaseBuild | None,
    ) -> BuildEntry:
        tools, engine = self._tools, self._tools.engine
        # A second try under the same lease has its own name, too: what was written first may still be there.
        token = lease.ref.token.hex() + ("" if base else "-0")
        attempt = Attempt(
            index_hash=index_hash,
            token=token,
            physical=f"{PREFIX}{index_hash[:24]}-{token}",
            backend=self._spec.backend,
            number=number,
            at_ms=lease.store_now_ms(),
            owner=engine.owner,
        )
        tools.builds.begin(attempt)
        crash_points.reach(AFTER_ATTEMPT)
        unsure = False
        try:
            entry = self._write(lease, attempt, inputs, snapshot, base)
            crash_points.reach(BEFORE_SEALING)
            lease.check()
            unsure = True
            won = tools.builds.append(index_hash, entry)
            unsure = False
        except BaseException as error:
            # Whatever it was: this attempt will not be sealed any more, unless it is sealed already.
            if not unsure:
                self._drop_attempt(attempt)
            if isinstance(error, RagfenceError) and self._has_ended(attempt):
                raise _Retry from error  # the process that took its number dropped what it wrote, perhaps meanwhile
            raise
        if won:
            crash_points.reach(AFTER_SEALING)
            tools.builds.forget_attempt(attempt)
            return entry
        self._drop_attempt(attempt)
        winner = tools.builds.at(index_hash, number)
        if winner is None or winner.kind != SEALED:
            raise _Retry
        return winner

    def _write(
        self, lease: Lease, attempt: Attempt, inputs: dict[str, Any], snapshot: Snapshot, base: BaseBuild | None
    ) -> BuildEntry:
        tools, rules = self._tools, self._tools.engine.policy.indexes
        began, embeds = time.monotonic(), [0]

        def count(snippets: int) -> None:
            embeds[0] += snippets

        vectors = VectorStore(
            tools.engine,
            tools.objects,
            self._embedder,
            on_embedded=count,
            check=lease.check,
            recent=self._recent,
            api_key=acting_key.get(),
        )
        exact = self._shape.index == EXACT
        most = rules.max_self_recall_sample if exact else rules.recall_sample
        size = sample_size(snapshot.rows, most, exact=exact)
        sample = Sample(size, snapshot.rows, VectorSums(self._shape.dimension, self._shape.metric))
        if base:
            described = tools.log.describe(base.changed)
            with BaseCopy(tools.log, base, self._backend, described, vectors, rules.embed_workers) as copied:
                self._write_rows(lease, attempt, copied.rows(), sample)
                copied.prove()
        else:
            rows = build_rows(tools.log, snapshot.table, vectors, rules.embed_workers)
            self._write_rows(lease, attempt, rows, sample)
        self._backend.finish(attempt.physical, self._shape)
        lease.check()
        written = time.monotonic()
        crash_points.reach(BEFORE_VERIFY)
        checked = verify_build(self._backend, attempt.physical, self._shape, snapshot, sample, rules)
        seal = BuildSeal(
            index_hash=attempt.index_hash,
            physical=attempt.physical,
            backend=self._spec.backend,
            rows=checked.rows,
            documents=snapshot.documents,
            dimension=self._shape.dimension,
            metric=self._shape.metric,
            content_digest=checked.content_digest,
            corpus_digest=snapshot.digest,
            inputs=inputs,
            checks=checked.checks,
            made={
                "embedded": embeds[0],
                "base": base.seal.index_hash if base else None,
                "documents_read": base.changed.num_rows if base else snapshot.documents,
                "write_ms": round(1000 * (written - began)),
                "verify_ms": round(1000 * (time.monotonic() - written)),
            },
        )
        return BuildEntry(
            attempt.number, "sealed", tools.engine.fences.now_ms(), tools.engine.owner, attempt.token, seal
        )

    def _write_rows(self, lease: Lease, attempt: Attempt, tables: Generator[Any, None, None], sample: Sample) -> None:
        """Writes the rows to the backend while they are made."""
        watched = sample.watch(self._report_progress(lease, tables, sample.total))
        source = _RowSource(watched)
        try:
            self._backend.write(attempt.physical, self._shape, source)
        except Exception:
            if source.error is not None:
                raise source.error from None
            raise
        finally:
            _close(watched)
            _close(tables)

    def _report_progress(self, lease: Lease, tables: Iterator[Any], total: int) -> Iterator[Any]:
        done = 0
        self._progress(0, total)
        for table in tables:
            lease.check()
            self._check_directions(table)
            yield table
            done += table.num_rows
            crash_points.reach(MID_WRITE)
            self._progress(done, total)

    def _check_directions(self, table: Any) -> None:
        """Refuses vectors without a direction. Not when they are embedded: vectors are stored for every metric, and
        some metrics can use a vector of length 0."""
        if self._shape.metric != "cosine" or not table.num_rows:
            return
        if wrong := find_undirected(matrix(table, self._shape.dimension)):
            at, what = wrong
            where = {name: table.column(name)[at].as_py() for name in ("doc_id", "ordinal")}
            raise EmbedderInvalid(
                f"{self._embedder_id} made {what} for text number {where['ordinal']} of document {where['doc_id']!r}: "
                "it has no direction, so by cosine it would never be found",
                hint="use an embedder, or a revision of it, that makes another vector, or the metric dot or l2",
            )

    def _has_ended(self, attempt: Attempt) -> bool:
        """Whether the number at which the attempt would have been sealed is taken."""
        with contextlib.suppress(RagfenceError):
            newest = self._tools.builds.newest(attempt.index_hash)
            return newest is not None and newest.number >= attempt.number
        return False

    def _drop_attempt(self, attempt: Attempt) -> None:
        """Drops our own attempt. If that fails, gc finds it."""
        with contextlib.suppress(RagfenceError):
            self._backend.drop(attempt.physical)
            self._tools.builds.forget_attempt(attempt)


def operation_of(index_hash: str, number: int) -> Operation:
    """The operation that is claimed: the build that would be sealed at this number of its log."""
    return Operation(kind=KIND, source_id=index_hash, revision=str(number), index_hash=index_hash, action="build")


def _result_of(entry: BuildEntry) -> dict[str, Any]:
    seal = entry.seal
    assert seal is not None
    return {
        "index_hash": seal.index_hash,
        "number": entry.number,
        "physical": seal.physical,
        "backend": seal.backend,
        "rows": seal.rows,
        "documents": seal.documents,
        "content_digest": seal.content_digest,
        "corpus_digest": seal.corpus_digest,
    }
