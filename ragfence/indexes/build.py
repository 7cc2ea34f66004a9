"""One build per INDEX_HASH: claimed, written under a name of its own, read back, sealed.

    snapshot -> claim -> attempt noted -> rows written -> read back and verified -> put_new builds/<hash>/<n>

The number at which it is sealed is the one that was free when it was claimed. Whoever is overtaken, by a successor or
by somebody who retires the attempt, loses it there, and drops what it wrote, which nobody else ever writes to.
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
from ragfence.indexes.build_log import SEALED, Attempt, BuildEntry, BuildLog, BuildSeal, retired
from ragfence.indexes.catalog import CatalogEntry
from ragfence.indexes.content_digest import matrix
from ragfence.indexes.embedders.embedder import Embedder, EmbedderId, without_direction
from ragfence.indexes.incremental import BaseBroken, BaseBuild, Copied, nearest
from ragfence.indexes.index_rows import LogRows, whole
from ragfence.indexes.snapshots import Snapshot, Snapshots
from ragfence.indexes.spec import AUTO, EXACT, IndexSpec, index_hash_of, inputs_of
from ragfence.indexes.vectors import VECTOR_POINTS, Carried, VectorStore
from ragfence.indexes.verification import Sample, VectorSums, sample_size, verified
from ragfence.stores.objects import ObjectStore

KIND = "index"
ATTEMPTS = 5
"""in a row that embed nothing new: a build that is overtaken so often is given up"""
MOST_ATTEMPTS = 1_000
MOVED = 2
AFTER_ATTEMPT = "after_attempt"
MID_WRITE = "mid_write"
BEFORE_VERIFY = "before_verify"
BEFORE_SEALING = "before_sealing"
AFTER_SEALING = "after_sealing"
BUILD_POINTS = (AFTER_ATTEMPT, *VECTOR_POINTS, MID_WRITE, BEFORE_VERIFY, BEFORE_SEALING, AFTER_SEALING)
"""In the order in which a build comes by them; those of vectors, and the middle of the writing, many times."""


@dataclass(frozen=True, slots=True)
class Build:
    """A sealed build. Everybody who asks for the same inputs gets the same one; `decision` is of this call alone."""

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
class Tools:
    """What builds are made with."""

    engine: Engine
    objects: ObjectStore
    corpora: Snapshots
    builds: BuildLog
    log: LogRows
    known: Callable[[], list[str]]
    """hashes that a build may start from, the likeliest first"""
    head: Callable[[], CatalogEntry]
    """of the catalog; read before the log of a build, or what is being retired may be forgotten in between"""
    restored: Callable[[CatalogEntry, BuildEntry], BuildEntry | None]
    """called for a build that is sealed: takes it back if gc was about to retire it; None if gc was faster"""


class _Again(Exception):
    """The log of the build is not what it was: look again."""


LET_GO_S = 30.0


def _closed(rows: Generator[Any, None, None]) -> None:
    """Ends what is still embedding, so that its claims are given back while the stores are open.

    After an interrupt a thread of the backend may be in the midst of it: then it has so long to come out.
    """
    give_up_at = time.monotonic() + LET_GO_S
    while True:
        try:
            rows.close()
        except ValueError:  # being executed
            if time.monotonic() >= give_up_at:
                return
            time.sleep(0.02)
        else:
            return


class _Pulled:
    """Rows on their way into a backend. What breaks while they are made may come back as some error of the backend's
    own, after a detour through another language; so it is remembered."""

    def __init__(self, tables: Iterator[Any]) -> None:
        self._tables = tables
        self.broken: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._tables)
        except StopIteration:
            raise
        except BaseException as broken:
            self.broken = broken
            raise


class IndexBuilder:
    """`build()` of one spec."""

    def __init__(self, tools: Tools, spec: IndexSpec, embedder: Embedder, backend: Backend, told: Gauge) -> None:
        self._tools = tools
        self._spec = spec
        self._embedder = embedder
        self._backend = backend
        self._told = told
        self._embedder_id = EmbedderId.of(embedder)
        self._carried = Carried()
        self._chosen = spec
        self._shape = spec.shape(self._embedder_id.dimension)
        if spec.index != AUTO:
            backend.check(self._shape)

    def inputs(self, corpus_digest: str) -> dict[str, Any]:
        """Of the INDEX_HASH. Also chooses the index, where the spec leaves that to the policy."""
        if self._spec.index == AUTO:
            rows = self._tools.corpora.rows(corpus_digest)
            if rows is None:
                raise _Again
            limit = self._tools.engine.policy.indexes.ann_above
            self._chosen = self._spec.resolved(rows, self._backend, self._embedder_id, limit)
            self._shape = self._chosen.shape(self._embedder_id.dimension)
            self._backend.check(self._shape)
        return inputs_of(self._tools.engine.tenant, corpus_digest, self._embedder_id, self._chosen)

    def inputs_of_now(self) -> dict[str, Any]:
        for _ in range(ATTEMPTS):
            with contextlib.suppress(_Again):  # a document moved between the digest and the count of its rows
                return self.inputs(self._tools.corpora.digest())
        raise NotReady("documents move faster than they can be counted", hint="try again")

    def run(self, wait_s: float | None, corpus: str | None = None) -> Build:
        """Of the corpus of now, or of one that is stored."""
        moved = stalled = 0
        embedded_before = 0
        for _ in range(MOST_ATTEMPTS):
            if self._carried.embedded > embedded_before:
                # What was embedded is kept, and the next attempt goes on from there: that is progress.
                embedded_before, moved, stalled = self._carried.embedded, 0, 0
            if stalled == ATTEMPTS:
                break
            stalled += 1
            digest = corpus or self._tools.corpora.digest(to_build=True)
            try:
                return self._build(digest, wait_s)
            except LeaseLost:
                continue  # a successor is at it, or done: its build is the answer
            except _Again:
                if corpus is not None and self._tools.corpora.get(corpus) is None:
                    raise SnapshotGone(f"the corpus {corpus} is neither stored nor the one of now") from None
            except SnapshotGone:
                if corpus is not None or self._tools.corpora.digest() == digest:
                    # The same corpus: a compaction has moved what was being read, and it is found where it is now.
                    moved += 1
                    if moved > MOVED:
                        raise
        raise NotReady(
            f"the index could not be built: documents or the build's log changed {stalled} times in a row while it "
            f"was written; {self._carried.embedded:,} snippets were embedded and are kept",
            hint="build again when fewer documents are purged or compacted; what was embedded is not embedded again",
        )

    def _build(self, digest: str, wait_s: float | None) -> Build:
        tools, inputs = self._tools, self.inputs(digest)
        index_hash = index_hash_of(inputs)
        head = tools.head()
        newest = tools.builds.newest(index_hash)
        known = newest if newest and newest.kind == SEALED else None
        if known and ((known := tools.restored(head, known)) is None or known.kind != SEALED or self._lost(known)):
            raise _Again
        snapshot = None if known else self._snapshot(digest)
        number = known.number if known else (newest.number if newest else 0) + 1
        request = tools.engine.request(operation_of(index_hash, number), None)
        with tools.engine.claim(request, wait_s=wait_s, verdict=False, repeatable=True) as op:
            if op.is_new:
                known = self._performed(op, index_hash, number, inputs, snapshot)
                assert known.seal is not None
                with contextlib.suppress(FencedOut):  # a successor sealed the same, and its receipt is everybody's
                    op.seal(effect_id=known.seal.physical, result=_told_of(known))
        entry = known or tools.builds.at(index_hash, number)
        if entry is None or entry.seal is None:
            raise _Again
        return Build(index_hash, entry.number, entry.seal, entry.at_ms, op.receipt)

    def _lost(self, known: BuildEntry) -> bool:
        """Somebody dropped the rows behind our back: then it is retired, and may be built again."""
        assert known.seal is not None
        if self._backend.exists(known.seal.physical):
            return False
        with contextlib.suppress(BuildMissing):  # a listing may be late; who opens it knows
            self._backend.count(known.seal.physical)
            return False
        engine = self._tools.engine
        end = retired(
            known, at_ms=engine.fences.now_ms(), owner=engine.owner, reason="its rows were not in the backend"
        )
        self._tools.builds.append(known.seal.index_hash, end)
        return True

    def _snapshot(self, digest: str) -> Snapshot:
        """Stored before the claim, so that every attempt has it."""
        snapshot = self._tools.corpora.get(digest) or self._tools.corpora.now(of=digest)
        if snapshot.digest != digest:
            raise _Again
        return snapshot

    def _performed(
        self, op: ClaimBlock, index_hash: str, number: int, inputs: dict[str, Any], snapshot: Snapshot | None
    ) -> BuildEntry:
        newest = self._tools.builds.newest(index_hash)
        if newest and newest.number >= number:
            # Sealed by an attempt that died before it could say so, or ended by somebody.
            if newest.number == number and newest.kind == SEALED:
                return newest
            raise _Again
        if snapshot is None:
            raise _Again  # it was sealed a moment ago
        base = nearest(self._tools.builds, self._tools.corpora, inputs, snapshot, self._tools.known())
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
        # A second try under the same lease has a name of its own too: what was written first may still be there.
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
            entry = self._written(lease, attempt, inputs, snapshot, base)
            crash_points.reach(BEFORE_SEALING)
            lease.check()
            unsure = True
            won = tools.builds.append(index_hash, entry)
            unsure = False
        except BaseException as broken:
            # Whatever it was: nobody will seal this one any more, unless it is sealed already.
            if not unsure:
                self._dropped(attempt)
            if isinstance(broken, RagfenceError) and self._ended(attempt):
                raise _Again from broken  # whoever took its number has dropped what it wrote, perhaps under its hands
            raise
        if won:
            crash_points.reach(AFTER_SEALING)
            tools.builds.forget_attempt(attempt)
            return entry
        self._dropped(attempt)
        winner = tools.builds.at(index_hash, number)
        if winner is None or winner.kind != SEALED:
            raise _Again
        return winner

    def _written(
        self, lease: Lease, attempt: Attempt, inputs: dict[str, Any], snapshot: Snapshot, base: BaseBuild | None
    ) -> BuildEntry:
        tools, rules = self._tools, self._tools.engine.policy.indexes
        began, embeds = time.monotonic(), [0]

        def made(snippets: int) -> None:
            embeds[0] += snippets

        vectors = VectorStore(
            tools.engine,
            tools.objects,
            self._embedder,
            told=made,
            check=lease.check,
            carried=self._carried,
            api_key=acting_key.get(),
        )
        exact = self._shape.index == EXACT
        most = rules.max_self_recall_sample if exact else rules.recall_sample
        size = sample_size(snapshot.rows, most, exact=exact)
        sample = Sample(size, snapshot.rows, VectorSums(self._shape.dimension, self._shape.metric))
        if base:
            described = tools.log.describe(base.changed)
            with Copied(tools.log, base, self._backend, described, vectors, rules.embed_workers) as copied:
                self._handed_over(lease, attempt, copied.rows(), sample)
                copied.prove()
        else:
            rows = whole(tools.log, snapshot.table, vectors, rules.embed_workers)
            self._handed_over(lease, attempt, rows, sample)
        self._backend.finish(attempt.physical, self._shape)
        lease.check()
        written = time.monotonic()
        crash_points.reach(BEFORE_VERIFY)
        checked = verified(self._backend, attempt.physical, self._shape, snapshot, sample, rules)
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

    def _handed_over(self, lease: Lease, attempt: Attempt, tables: Generator[Any, None, None], sample: Sample) -> None:
        """The rows to the backend, while they are made."""
        watched = sample.watch(self._watched(lease, tables, sample.total))
        pulled = _Pulled(watched)
        try:
            self._backend.write(attempt.physical, self._shape, pulled)
        except Exception:
            if pulled.broken is not None:
                raise pulled.broken from None
            raise
        finally:
            _closed(watched)
            _closed(tables)

    def _watched(self, lease: Lease, tables: Iterator[Any], total: int) -> Iterator[Any]:
        done = 0
        self._told(0, total)
        for table in tables:
            lease.check()
            self._check_directions(table)
            yield table
            done += table.num_rows
            crash_points.reach(MID_WRITE)
            self._told(done, total)

    def _check_directions(self, table: Any) -> None:
        """Here, not when they are embedded: the vectors are kept for every metric, and some have use for length 0."""
        if self._shape.metric != "cosine" or not table.num_rows:
            return
        if wrong := without_direction(matrix(table, self._shape.dimension)):
            at, what = wrong
            where = {name: table.column(name)[at].as_py() for name in ("doc_id", "ordinal")}
            raise EmbedderInvalid(
                f"{self._embedder_id} made {what} for text number {where['ordinal']} of document {where['doc_id']!r}: "
                "it has no direction, and by cosine it would never be found",
                hint="use an embedder (or another revision of it) that has a vector for it, or the metric dot or l2",
            )

    def _ended(self, attempt: Attempt) -> bool:
        """Whether somebody has taken the number at which the attempt would have been sealed."""
        with contextlib.suppress(RagfenceError):
            newest = self._tools.builds.newest(attempt.index_hash)
            return newest is not None and newest.number >= attempt.number
        return False

    def _dropped(self, attempt: Attempt) -> None:
        """Our own attempt alone; if that fails, gc finds it."""
        with contextlib.suppress(RagfenceError):
            self._backend.drop(attempt.physical)
            self._tools.builds.forget_attempt(attempt)


def operation_of(index_hash: str, number: int) -> Operation:
    """What is claimed: the build, in the life that ends with this number of its log."""
    return Operation(kind=KIND, source_id=index_hash, revision=str(number), index_hash=index_hash, action="build")


def _told_of(entry: BuildEntry) -> dict[str, Any]:
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
