"""`fence.documents`: a document is ingested once per doc_id and content, and everybody gets the first snippet_ids."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Literal, NamedTuple, Protocol, overload

from ragfence.core.decisions import Replay
from ragfence.core.receipts import Receipt
from ragfence.documents.batches import Batches
from ragfence.documents.chunking import Chunker
from ragfence.documents.compact import Compacted, Compaction
from ragfence.documents.corpus import Corpus
from ragfence.documents.delivering import Delivery, SinkWriter
from ragfence.documents.document import Document
from ragfence.documents.expecting import check as check_expected
from ragfence.documents.expecting import expecting
from ragfence.documents.findings import Finding, Verification
from ragfence.documents.identity import Identity
from ragfence.documents.intents import Intents
from ragfence.documents.moving import Mover, SnippetsFirst, effect_of, error_of, receipt_of
from ragfence.documents.parquet import ParquetCodec
from ragfence.documents.preparing import Caller, Given, Prepared, Preparing, Recipes
from ragfence.documents.progress import Meter, meter
from ragfence.documents.purge import Purge, PurgeReport
from ragfence.documents.reading import Reading, StoredDocument, StoredSnippet
from ragfence.documents.reconciling import Reconciler, Sources, Takeover
from ragfence.documents.repairing import Repair
from ragfence.documents.revisions import Revisions
from ragfence.documents.rewriting import Rewriting, Switch
from ragfence.documents.segments import Layout
from ragfence.documents.settings import ContentHash
from ragfence.documents.sinks import Settled, Sink, checked_sink
from ragfence.documents.sources import source_of
from ragfence.documents.states import States, forget
from ragfence.documents.sync import Parts, Prune, Sync, check_prune
from ragfence.documents.sync_report import SyncReport
from ragfence.documents.verify import Verifying
from ragfence.engine.engine import Engine
from ragfence.engine.epochs import Epochs
from ragfence.engine.hydration import Hydrator
from ragfence.engine.segments import Move, Moved, SegmentWriter, batch_tokens
from ragfence.errors import ObjectsRequired, ValidationError
from ragfence.stores.fences import FenceStore
from ragfence.stores.objects import ObjectStore

BATCH = 1000


class Inside(NamedTuple):
    """What the guard of indexes reads of documents."""

    corpus: Corpus
    reading: Reading


class Beside(Protocol):
    """Whoever keeps something about snippets beside the log: vectors, and indexes made of them."""

    def copy(self, switch: Switch) -> None:
        """Segments are about to be replaced by others: what belongs to their snippets goes there too."""
        ...

    def forget(self, doc_id: str) -> None:
        """A document was purged, and nobody can read it out of the log any more. May be called again."""
        ...

    def findings(self) -> Iterator[Finding]:
        """What is not as it was sealed."""
        ...


class Documents:
    """Documents behind the fence. Safe to be killed anywhere; any number of processes may send the same ones.

    Leases give one *effect* per document, not one execution: a process frozen past its lease may chunk again what its
    successor chunks, but both get the same snippet_ids and one head move counts.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        chunker: Chunker | None = None,
        sink: Sink | None = None,
        beside: Callable[[], Beside] | None = None,
    ) -> None:
        if engine.backing is None or engine.objects is None:
            raise ObjectsRequired(
                "documents need an object store, and this fence was opened without",
                hint='ragfence.open("redis://...", objects="s3://bucket/prefix")',
            )
        self._engine = engine
        self._chunker = chunker
        self._sink = sink if sink is None else checked_sink(sink)
        self._beside = beside
        self._objects = engine.objects
        self._backing = engine.backing
        self._layout = Layout(engine.tenant)
        self._rules = engine.policy.for_kind("document")

    def using(self, *, chunker: Chunker | None = None, sink: Sink | None = None) -> Documents:
        """The same documents with another chunker, or with a sink.

        Another chunker makes other snippets of the same content. A sink, such as a live vector store, gets what is new
        and loses what is dead; see docs/sinks.md. Keep what this returns: its first call settles what others left.
        """
        sink = self._sink if sink is None else sink
        return Documents(self._engine, chunker=chunker or self._chunker, sink=sink, beside=self._beside)

    @property
    def inside(self) -> Inside:
        return Inside(self._corpus, self._reading)

    def ingest(
        self, document: Document, *, expect: str | None = None, dry_run: bool = False, event_id: str = ""
    ) -> Receipt:
        """Ingests one document, or answers with the snippet_ids of the first time.

        `expect` is the version it must be at (the `.fence` of its last receipt; "": it must not be there); if somebody
        has moved it since, `DocumentMoved`. Raises `DocumentInvalid`, `Conflict`, `Stale`, `InFlight` or `Quarantined`;
        `ingest_many` has them as entries.

        >>> fence.documents.ingest(ragfence.Document("a", "some text")).snippet_ids  # doctest: +SKIP
        """
        prepared = self._preparing.ingest(document, next(batch_tokens()), self._caller(), event_id)
        return self._one(prepared, expect, dry_run)

    def retract(
        self,
        doc_id: str,
        *,
        sequence: int | None = None,
        expect: str | None = None,
        dry_run: bool = False,
        event_id: str = "",
    ) -> Receipt:
        """Takes a document away. The same content after it brings it back with its snippet_ids."""
        prepared = self._preparing.retract(doc_id, sequence, next(batch_tokens()), self._caller(), event_id)
        return self._one(prepared, expect, dry_run)

    @overload
    def ingest_many(
        self,
        documents: Iterable[Document],
        *,
        progress: bool | Callable[[int], None] = ...,
        batch: int = ...,
        dry_run: bool = ...,
        stream: Literal[False] = ...,
    ) -> Sequence[Receipt]: ...
    @overload
    def ingest_many(
        self,
        documents: Iterable[Document],
        *,
        progress: bool | Callable[[int], None] = ...,
        batch: int = ...,
        dry_run: bool = ...,
        stream: Literal[True],
    ) -> Iterator[Receipt]: ...
    def ingest_many(
        self,
        documents: Iterable[Document],
        *,
        progress: bool | Callable[[int], None] = False,
        batch: int = BATCH,
        dry_run: bool = False,
        stream: bool = False,
    ) -> Sequence[Receipt] | Iterator[Receipt]:
        """Ingests many documents: one receipt each, in their order.

        A document that is invalid, stale, conflicting, or whose chunker fails is an entry with `.failure`; the others
        of its batch are ingested. `stream=True` returns an iterator that ingests while it is read, in bounded memory; a
        dry run keeps what it has foreseen, for documents that come again.
        """
        if isinstance(documents, Document):  # a tuple, which could be iterated over
            raise ValidationError("ingest_many takes many documents", hint="use ingest(document), or pass [document]")
        if not 1 <= batch <= 10_000:
            raise ValidationError(f"batch must be from 1 to 10,000, not {batch}")
        total = len(documents) if isinstance(documents, Sequence) else None
        receipts = self._streamed(documents, batch, dry_run, lambda: meter(progress, total, "ingesting"))
        return receipts if stream else list(receipts)

    def ingest_each(self, given: Sequence[Given], *, wait_s: float | None = None) -> list[Receipt | Exception]:
        """As `ingest` for each, in one segment: its receipt, or the error it would have raised.

        The same document twice is ingested twice, in the order given. `wait_s`: for those that others ingest right now.
        """
        return self._batches.each(given, wait_s=wait_s)

    def sync(
        self,
        source: object,
        prune: Prune = False,
        *,
        max_prune_share: float | None = None,
        progress: bool | Callable[[int], None] = False,
        dry_run: bool = False,
    ) -> SyncReport:
        """Ingests what changed in a source: a folder, a file, s3://bucket/prefix, documents, or a `Source`.

        What has not changed since the last time is not even read. `prune="scoped"` retracts what this source brought
        and no longer has, `"full"` every live document that it does not have. `PruneTooLarge`: that would be more than
        the share that the policy allows (`documents.max_prune_share`), and nothing was done; pass the share to allow.

        >>> fence.documents.sync("handbook/", prune="scoped").unread  # doctest: +SKIP
        """
        check_prune(prune, max_prune_share)
        rules, engine = self._engine.policy.documents, self._engine
        # A prune lists twice, and an iterator can be read once.
        given = list(source) if prune and isinstance(source, Iterator) else source
        with contextlib.ExitStack() as opened:
            found = source_of(given)
            if found is not given and callable(close := getattr(found, "close", None)):
                opened.callback(close)
            told = opened.enter_context(meter(progress, None, "syncing"))
            parts = Parts(
                engine.fences,
                self._identity,
                Recipes(self._chunker, rules),
                self._preparing,
                self._mover,
                self._reading,
                engine.owner,
                engine.run_id,
                engine.correlation_id,
            )
            self._backing.hydrator.ensure_ready()
            if self._delivery is not None and not dry_run:
                self._delivery.begin()
            states = States(engine.tenant, found.name, self._objects, rules.content_fields)
            share = rules.max_prune_share if max_prune_share is None else max_prune_share
            return Sync(parts, found, states, prune=prune, max_share=share, dry_run=dry_run).run(told)

    def get(self, doc_id: str) -> StoredDocument | None:
        """The live revision of a document, described; None if there is none."""
        return self._reading.get(doc_id)

    def snippets(self, doc_id: str) -> list[StoredSnippet]:
        """The snippets of the live revision, in their order, with text and positions."""
        return self._reading.snippets(doc_id)

    def heads(self) -> Iterator[StoredDocument]:
        """Every live document, in no order. Reads the whole log."""
        return map(self._reading.described, self._reading.live())

    def corpus_digest(self, shard: int | None = None) -> str:
        """One value for all live documents, or those of one shard: it changes when one comes, goes, or changes."""
        self._backing.watch.start()
        return self._corpus.digest() if shard is None else self._corpus.digest_of(shard)

    def compact(self, *, progress: bool | Callable[[int], None] = False) -> Compacted:
        """Rewrites the log into few large segments, without what was superseded `keep_superseded_days` ago.

        Contents that it drops are new again when they come back. Writers wait while it writes. Does nothing where
        there is nothing to gain.
        """
        days = self._engine.policy.documents.keep_superseded_days
        with meter(progress, None, "compacting") as told:
            return Compaction(self._rewriting, self._engine.fences, days, told).run()

    def purge(self, doc_id: str) -> PurgeReport:
        """Removes the text and the metadata of a document from everything that ragfence keeps, for good.

        A tombstone stays. Ingested again, the document is new. One that was cut off is completed by the next.
        """
        return Purge(
            self._engine.fences,
            self._rewriting,
            self._reading,
            self._writer,
            self._identity,
            self._preparing,
            self._caller(),
            wait_ms=self._rules.wait_ms,
            others=[
                partial(forget, self._engine.tenant, self._objects),
                *([self._beside().forget] if self._beside else []),
            ],
        ).run(doc_id)

    def verify(self, repair: bool = False, *, progress: bool | Callable[[int], None] = False) -> Verification:
        """Compares fence store, log, snippets, live indexes, and the sink if it has `ids()`; see `.findings`.

        With `repair`, what can be mended is mended, and `.findings` is what is left. A document whose snippets are lost
        is released: its next ingest is new, and makes them again with the same ids.
        """
        backing, sink = self._backing, self._sink
        with meter(progress, None, "verifying") as told:
            verifying = Verifying(
                self._engine.fences,
                self._objects,
                backing.epochs,
                backing.hydrator,
                self._rewriting,
                self._content_hash.check,
                told,
                sink_ids=getattr(sink, "ids", None),
            )
            settle = (lambda full: self.settle(full=full)) if sink is not None else None
            repairing = Repair(
                verifying, self._engine.fences, self._rewriting, backing.hydrator, lambda: self._identity, settle
            )
            found = repairing.run() if repair else verifying.look()
            beside = tuple(self._beside().findings()) if self._beside else ()
            return replace(found, findings=(*found.findings, *beside))

    def settle(self, *, full: bool = False) -> Settled:
        """Does what the sink is still owed after crashes and errors; happens by itself with later calls.

        `full=True` compares the sink with every live document, and gives it what it lacks: also the way to fill a new
        one. Orphans can be found only in a sink that has `ids()`.
        """
        if self._delivery is None:
            raise ValidationError("there is no sink to settle", hint="fence.documents.using(sink=...).settle()")
        return self._delivery.settle(self._reading.live, full=full)

    def _streamed(
        self,
        documents: Iterable[Document],
        batch: int,
        dry_run: bool,
        watched: Callable[[], contextlib.AbstractContextManager[Meter]],
    ) -> Iterator[Receipt]:
        if self._delivery is not None and not dry_run:
            self._delivery.begin()
        with watched() as told:
            yield from self._batches.streamed(documents, batch, told, dry_run=dry_run)

    def _one(self, prepared: Prepared, expected: str | None, dry_run: bool) -> Receipt:
        if expected is not None:
            check_expected(prepared.doc.doc_id, self._reading.head(prepared.doc.doc_id), expected, prepared.claim)
        if dry_run:
            return self._batches.foreseen(prepared)
        move = Move(prepared.claim, expecting(effect_of(prepared), expected), prepared)
        (answer,) = self._writer.move([move], wait_s=self._rules.wait_ms / 1000)
        if isinstance(answer, Replay | Moved):
            return receipt_of(prepared, answer)
        raise error_of(prepared, answer, self._rules.wait_ms / 1000)

    def _caller(self) -> Caller:
        # Whoever is answered by a Redis that was split off must not be so for ever; a forked child watches for itself.
        self._backing.watch.start()
        engine = self._engine
        return Caller(engine.owner, engine.run_id, engine.correlation_id, engine.route)

    @cached_property
    def _identity(self) -> Identity:
        self._content_hash.check()
        return Identity(self._engine.tenant, self._engine.policy.content_hash)

    @cached_property
    def _content_hash(self) -> ContentHash:
        return ContentHash(self._engine.tenant, self._objects, self._engine.policy.content_hash)

    @cached_property
    def _preparing(self) -> Preparing:
        rules = self._engine.policy.documents
        recipes = Recipes(self._chunker, rules)
        return Preparing(self._identity, rules, self._rules, recipes, self._engine.policy.redactor)

    @cached_property
    def _reading(self) -> Reading:
        fences, backing = self._engine.fences, self._backing
        return Reading(fences, self._objects, backing.epochs, backing.hydrator, self._identity, self._layout)

    @cached_property
    def _rewriting(self) -> Rewriting:
        rewriting = Rewriting(self._objects, self._backing.epochs, self._backing.hydrator, self._layout)
        if self._beside:
            rewriting.before_switch.append(self._beside().copy)
        return rewriting

    @cached_property
    def _corpus(self) -> Corpus:
        return Corpus(self._engine.fences, self._backing.hydrator)

    @cached_property
    def _writer(self) -> SegmentWriter:
        delivery = self._delivery
        neighbours = SnippetsFirst(self._layout, self._objects, self._content_hash.settle, delivery)
        runtime_ms = self._rules.max_runtime_ms
        if delivery is None:
            return SegmentWriter(*self._stores, neighbours=neighbours, max_runtime_ms=runtime_ms)
        return SinkWriter(delivery, *self._stores, neighbours=neighbours, max_runtime_ms=runtime_ms)

    @property
    def _stores(self) -> tuple[FenceStore, ObjectStore, Epochs, Hydrator, ParquetCodec]:
        backing = self._backing
        return self._engine.fences, self._objects, backing.epochs, backing.hydrator, ParquetCodec()

    @cached_property
    def _delivery(self) -> Delivery | None:
        if self._sink is None:
            return None
        sink, fences, rules = self._sink, self._engine.fences, self._rules
        revisions = Revisions(self._objects, self._layout, self._reading.segments)
        writer = SegmentWriter(*self._stores, max_runtime_ms=rules.max_runtime_ms)
        takeover = Takeover(writer, self._preparing, revisions, self._caller, lease_ms=rules.lease_ms)
        sources = Sources(fences, self._backing.hydrator, self._identity)
        return Delivery(
            sink,
            fences,
            Intents(self._engine.tenant, sink.name, self._objects),
            revisions,
            Reconciler(sink, sources, revisions, takeover),
            wait_ms=rules.wait_ms,
            lease_ms=rules.lease_ms,
        )

    @cached_property
    def _mover(self) -> Mover:
        return Mover(self._writer, wait_ms=self._rules.wait_ms)

    @cached_property
    def _batches(self) -> Batches:
        ready = self._backing.hydrator.ensure_ready
        return Batches(self._engine.fences, self._preparing, self._mover, self._caller, ready)
