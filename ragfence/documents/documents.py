"""`fence.documents`: a document is ingested once per doc_id and content; every caller gets the first snippet_ids."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args, overload

from ragfence._progress import Meter, meter
from ragfence.core.decisions import Replay
from ragfence.core.document import CheckedDocument, Document, StoredSnippet
from ragfence.core.receipts import OnError, Receipt, collect
from ragfence.documents.chunking.chunker import Chunker
from ragfence.documents.claims import (
    Caller,
    ClaimBuilder,
    Expected,
    GivenDocument,
    PreparedDocument,
    Recipes,
    check_version,
)
from ragfence.documents.compact import Compaction, CompactReport
from ragfence.documents.corpus_digest import Corpus
from ragfence.documents.findings import Finding, Verification
from ragfence.documents.head_moves import HeadMover, SnippetHook, error_of, receipt_of
from ragfence.documents.identity import Identity
from ragfence.documents.ingest import BatchIngest
from ragfence.documents.log import Layout
from ragfence.documents.origins import Origins
from ragfence.documents.parquet import ParquetCodec
from ragfence.documents.purge import Purge, PurgeReport
from ragfence.documents.reads import DocumentReads, StoredDocument
from ragfence.documents.repair import DocumentRepair
from ragfence.documents.rewrite import LogRewrite, RevisionQuery, Switch
from ragfence.documents.sinks.delivery import SinkDelivery, SinkWriter
from ragfence.documents.sinks.intents import Intents
from ragfence.documents.sinks.reconciliation import Reconciler, Sources, Takeover
from ragfence.documents.sinks.sink import Foreign, Settled, Sink, VectorSink, validate_sink
from ragfence.documents.sinks.upserts import Revisions, SnippetVectors, Upserts
from ragfence.documents.sources import PrefixedSource, source_of
from ragfence.documents.sync.ingest_table import TableWriter, forget_in_tables
from ragfence.documents.sync.prune_plan import Prune, check_prune
from ragfence.documents.sync.report import SyncReport
from ragfence.documents.sync.state import SyncStates, forget
from ragfence.documents.sync.sync import Sync, SyncParts
from ragfence.documents.verify import DocumentVerifier
from ragfence.engine.batch_commit import BatchCommitter, MovedHead, batch_tokens
from ragfence.engine.engine import Engine
from ragfence.engine.hydration import TenantStores
from ragfence.engine.refusals import Refusal
from ragfence.errors import ObjectsRequired, ValidationError

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Embedder

BATCH = 1000


class DocumentInternals(NamedTuple):
    """The parts of documents that indexes read."""

    corpus: Corpus
    reads: DocumentReads


class IndexMaintenance(Protocol):
    """The data that indexes keep about snippets, outside the log: vectors, and the rows of physical indexes."""

    def copy(self, switch: Switch) -> None:
        """Copies the vectors of segments that are about to be replaced to the segments that replace them."""
        ...

    def forget(self, doc_id: str) -> None:
        """Removes a purged document, which is no longer in the log. May be called again for the same one."""
        ...

    def findings(self) -> Iterator[Finding]:
        """Reports what differs from what was sealed."""
        ...

    def vectors(self, embedder: str | Embedder) -> SnippetVectors:
        """Returns the vectors for a sink that names this embedder."""
        ...


class DocumentHooks(NamedTuple):
    """The rest of a fence that keeps data about documents, as far as documents call it."""

    indexes: Callable[[], IndexMaintenance]
    """called when it is first needed, since it may open a vector store"""
    bury: Callable[[str], None]
    """replaces the decision rows and the stored requests of a purged document by tombstones"""
    find_revisions: RevisionQuery
    """reads from decision rows which revisions were sealed or ended"""


class Documents:
    """Documents behind the fence. A process may be killed anywhere; any number of them may send the same documents.

    Leases give one *effect* per document, not one execution: a process that is frozen past its lease may chunk a
    document that its successor chunks as well, but both get the same snippet_ids and only one head move counts.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        chunker: Chunker | None = None,
        sink: Sink | VectorSink | None = None,
        allow_empty_text: bool | None = None,
        hooks: DocumentHooks | None = None,
    ) -> None:
        """`allow_empty_text` is that of the policy unless given."""
        if engine.backing is None or engine.objects is None:
            raise ObjectsRequired(
                "documents need an object store, and this fence was opened without one",
            )
        self._engine = engine
        self._chunker = chunker
        self._sink = sink if sink is None else validate_sink(sink)
        self._allow_empty_text = allow_empty_text
        self._hooks = hooks
        self._stores = TenantStores(
            engine.tenant, engine.fences, engine.objects, engine.backing.epochs, engine.backing.hydrator
        )
        self._objects = engine.objects
        self._watch = engine.backing.watch
        self._layout = Layout(engine.tenant)
        self._rules = engine.policy.for_kind("document")

    def using(
        self,
        *,
        chunker: Chunker | None = None,
        sink: Sink | VectorSink | None = None,
        allow_empty_text: bool | None = None,
    ) -> Documents:
        """Returns the same documents with another chunker, a sink, or another rule for empty texts.

        Keep the returned object: its first call completes the work that crashed processes still owe the sink.

        Args:
            chunker: Cuts the texts. Another chunker makes other snippets of the same content.
            sink: A live vector store, for example, which receives new snippets and loses dead ones; see docs/sinks.md.
                A sink with an `embedder` also receives the vectors that builds with that embedder use.
            allow_empty_text: Whether documents are accepted whose text is empty or only white space.
        """
        return Documents(
            self._engine,
            chunker=chunker or self._chunker,
            sink=self._sink if sink is None else sink,
            allow_empty_text=self._allow_empty_text if allow_empty_text is None else allow_empty_text,
            hooks=self._hooks,
        )

    @property
    def internals(self) -> DocumentInternals:
        return DocumentInternals(self._corpus, self._reads)

    def check(self, document: Document) -> CheckedDocument:
        """Returns a document as it is stored, for `ingest` and `ingest_each`. Raises `DocumentInvalid`."""
        return self._claim_builder.check(document)

    def ingest(
        self,
        document: Document | CheckedDocument,
        *,
        expect: Expected | None = None,
        dry_run: bool = False,
        event_id: str = "",
    ) -> Receipt:
        """Ingests one document, or returns the receipt of the first time.

        Args:
            document: The document.
            expect: The version that the document must have: the `.fence` of its last receipt, "" if it must not exist,
                "*" if it must exist at any version.
            dry_run: Returns the receipt that the document would get, and changes nothing.
            event_id: Stored in the decision rows.

        Raises:
            DocumentMoved: The document is not at the expected version.
            DocumentInvalid, Conflict, Stale, InFlight, Quarantined: The document was not ingested; `ingest_many`
                returns these as entries.

        >>> fence.documents.ingest(ragfence.Document("a", "some text")).snippet_ids  # doctest: +SKIP
        """
        caller = self._caller()
        try:
            prepared = self._claim_builder.ingest(document, next(batch_tokens()), caller, event_id)
        except ValidationError as invalid:
            if not dry_run:
                self._engine.note_refusals([Refusal.of(invalid, caller.route)])
            raise
        return self._one(prepared, expect, dry_run)

    def retract(
        self,
        doc_id: str,
        *,
        sequence: int | None = None,
        expect: Expected | None = None,
        dry_run: bool = False,
        event_id: str = "",
    ) -> Receipt:
        """Retracts a document. Ingesting the same content again restores it with its snippet_ids."""
        prepared = self._claim_builder.retract(doc_id, sequence, next(batch_tokens()), self._caller(), event_id)
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
        on_error: OnError = ...,
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
        on_error: OnError = ...,
    ) -> Iterator[Receipt]: ...
    def ingest_many(
        self,
        documents: Iterable[Document],
        *,
        progress: bool | Callable[[int], None] = False,
        batch: int = BATCH,
        dry_run: bool = False,
        stream: bool = False,
        on_error: OnError = "return",
    ) -> Sequence[Receipt] | Iterator[Receipt]:
        """Ingests many documents and returns one receipt for each, in their order.

        A document that is invalid, stale, in conflict or in flight, or whose chunker fails, becomes an entry with
        `.failure`; the other documents of its batch are ingested.

        Args:
            documents: The documents.
            progress: Shows a progress bar if True; a callable is called with the number of documents done.
            batch: How many documents are committed together, from 1 to 10,000.
            dry_run: Returns the receipts that the documents would get, and changes nothing.
            stream: Returns an iterator that ingests while it is read, in bounded memory. (A dry run remembers every
                document that it has seen, in case it comes again.)
            on_error: "raise" raises the first failure, as `ingest` would. Documents before it stay ingested; their
                receipts are in `error.details["receipts"]`, unless `stream`. Later batches stay unread.
        """
        if isinstance(documents, Document):  # a tuple, which could be iterated over
            raise ValidationError("ingest_many takes many documents", hint="use ingest(document), or pass [document]")
        if not 1 <= batch <= 10_000:
            raise ValidationError(f"batch must be from 1 to 10,000, not {batch}")
        if on_error not in ("return", "raise"):
            raise ValidationError(f'on_error must be "return" or "raise", not {on_error!r}')
        total = len(documents) if isinstance(documents, Sequence) else None
        receipts = self._stream(documents, batch, dry_run, on_error, lambda: meter(progress, total, "ingesting"))
        return receipts if stream else collect(receipts)

    def ingest_each(
        self, given: Sequence[GivenDocument], *, wait_s: float | None = None, route: str = ""
    ) -> list[Receipt | Exception]:
        """Ingests documents of several callers in one segment: returns the receipt of each, or its error.

        A `Retraction` among them is retracted. The same document twice is moved twice, in the order given. `wait_s`
        bounds the wait for documents that another process is ingesting. `route` is stored in the decision rows,
        instead of that of the fence.
        """
        return self._batches.each(given, wait_s=wait_s, route=route)

    def sync(
        self,
        source: object,
        prune: Prune = False,
        *,
        max_prune_share: float | None = None,
        progress: bool | Callable[[int], None] = False,
        dry_run: bool = False,
        table: bool = False,
        origin: str | None = None,
        prefix: str = "",
        take_over: bool = False,
    ) -> SyncReport:
        """Ingests what changed in a source: a folder, a file, s3://bucket/prefix, documents, or a `Source`.

        Documents that have not changed since the last sync stay unread. A document belongs to the source that brought
        it: different content from another source is a conflict, and a prune never retracts documents that other
        sources own or have.

        Args:
            source: Where the documents come from.
            prune: "scoped" retracts what this source brought and no longer has, "full" every live document that it
                does not have.
            max_prune_share: The share of live documents that a prune may retract; by default that of the policy.
            progress: Shows a progress bar if True; a callable is called with the number of documents listed.
            dry_run: Reports what would happen, and changes nothing.
            table: Whether the report has a `.table`: doc_id, content_hash, decision and snippet_ids of every document,
                unread ones included. The table is in the object store and is read page by page.
            origin: The owner of the documents; by default the name of the source.
            prefix: Put in front of every doc_id, so that two sources never share one.
            take_over: Whether the source may replace the content of documents that another source owns.

        Raises:
            PruneTooLarge: The prune would retract more than the allowed share; nothing was changed.

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
            found = PrefixedSource(found, prefix) if prefix else found
            named: str = origin if origin is not None else getattr(found, "origin", found.name)
            owner = self._origins.origin(named, take_over=take_over)
            update = opened.enter_context(meter(progress, None, "syncing"))
            parts = SyncParts(
                self._stores.fences,
                self._claim_builder,
                self._mover,
                self._reads,
                partial(Caller, engine.owner, engine.run_id, engine.correlation_id),
                engine.note_refusals,
                owner,
                self._origins,
                TableWriter(engine.tenant, found.name, self._objects) if table and not dry_run else None,
            )
            self._stores.hydrator.ensure_ready()
            if self._delivery is not None and not dry_run:
                self._delivery.begin()
            noted = owner.name, getattr(found, "former_name", "")
            states = SyncStates(engine.tenant, found.name, self._objects, rules.content_fields, *noted)
            share = rules.max_prune_share if max_prune_share is None else max_prune_share
            return Sync(parts, found, states, prune=prune, max_share=share, dry_run=dry_run).run(update)

    def get(self, doc_id: str) -> StoredDocument | None:
        """Returns the live revision of a document, without its text; None if there is none."""
        return self._reads.get(doc_id)

    def snippets(self, doc_id: str) -> list[StoredSnippet]:
        """Returns the snippets of the live revision, in their order, with text and positions."""
        return self._reads.snippets(doc_id)

    def heads(self) -> Iterator[StoredDocument]:
        """Iterates over every live document, in no particular order. Reads the whole log."""
        return map(self._reads.describe, self._reads.live())

    def corpus_digest(self, shard: int | None = None) -> str:
        """Returns a digest of all live documents, or of one shard: it changes when one comes, goes or changes."""
        self._watch.start()
        return self._corpus.digest() if shard is None else self._corpus.digest_of(shard)

    def content_hashes(self) -> dict[str, int]:
        """Returns how many live documents are known by each content hash. Reads the whole log.

        >>> fence.documents.content_hashes()  # doctest: +SKIP
        {'xxh3': 17, 'sha256': 1203}
        """
        counted = Counter(row.detail.content_hash.partition(":")[0] for row in self._reads.live())
        return dict(sorted(counted.items()))

    def finish_content_hash(self) -> dict[str, int]:
        """Ends the change to the `content_hash` of the policy, if every live document is known by it.

        From now on no process writes documents with the other one. Returns what `content_hashes` does: as long as it
        names the other one, every process still needs it as `content_hash_also`, and the change is not ended.
        """
        fixed, stores = self._engine.content_hash, self._stores
        fixed.check()
        closed = fixed.close(stores.epochs, stores.hydrator)
        counted = self.content_hashes()
        if counted.keys() <= {fixed.algorithm}:
            fixed.finish(closed)
        return counted

    def compact(self, *, progress: bool | Callable[[int], None] = False) -> CompactReport:
        """Rewrites the log into a few large segments, without revisions superseded `keep_superseded_days` ago.

        Content that is dropped is new if it comes back. Writers wait while the log is written. Does nothing if there is
        nothing to gain.
        """
        days = self._engine.policy.documents.keep_superseded_days
        with meter(progress, None, "compacting") as update:
            return Compaction(self._log_rewrite, self._stores.fences, days, update).run()

    def purge(self, doc_id: str) -> PurgeReport:
        """Removes the text and the metadata of a document permanently from everything that ragfence stores.

        A tombstone stays. If the document is ingested again, it is new. A purge that was interrupted is completed by
        the next purge of the document.
        """
        return Purge(
            self._log_rewrite,
            self._reads,
            self._writer,
            self._claim_builder,
            self._caller(),
            others=[
                partial(forget, self._engine.tenant, self._objects),
                partial(forget_in_tables, self._engine.tenant, self._objects),
                *([self._hooks.indexes().forget, self._hooks.bury] if self._hooks else []),
            ],
        ).run(doc_id)

    def verify(
        self,
        repair: bool = False,
        *,
        accept_loss: bool = False,
        progress: bool | Callable[[int], None] = False,
    ) -> Verification:
        """Compares the fence store, the log, the snippets, live indexes, and the sink if it has `ids()`.

        Args:
            repair: Repairs what can be repaired; `.findings` then holds what remains. A document whose snippets are
                lost is released: its next ingest is new and makes the same snippets with the same ids.
            accept_loss: Also removes segments whose rows cannot be read. Ingest the sources again afterwards.
            progress: Shows a progress bar if True; a callable is called with the number of segments read.
        """
        if accept_loss and not repair:
            raise ValidationError("accept_loss needs repair=True", hint="verify(repair=True, accept_loss=True)")
        sink = self._sink
        with meter(progress, None, "verifying") as update:
            verifier = DocumentVerifier(
                self._stores,
                self._log_rewrite,
                self._engine.content_hash.check,
                update,
                sink_ids=getattr(sink, "ids", None),
            )
            settle = (lambda full: self.settle(full=full)) if sink is not None else None
            repairer = DocumentRepair(
                verifier,
                self._stores,
                self._log_rewrite,
                lambda: self._identity,
                settle,
                self._hooks.find_revisions if self._hooks else None,
            )
            found = repairer.run(accept_loss=accept_loss) if repair else verifier.look()
            of_indexes = tuple(self._hooks.indexes().findings()) if self._hooks else ()
            return replace(found, findings=(*found.findings, *of_indexes))

    def settle(self, *, full: bool = False, foreign: Foreign = "keep") -> Settled:
        """Completes the work that crashes and errors left for the sink; later calls do this automatically.

        Args:
            full: Compares the sink with every live document and adds what it lacks. This also fills a new sink.
                Orphans are found only in a sink that has `ids()`.
            foreign: "keep" leaves rows alone that the log never named; "delete" deletes them, for a collection that
                only this fence writes to.
        """
        if foreign not in get_args(Foreign):
            raise ValidationError(f"Invalid value for foreign: {foreign!r}", hint='use "keep" or "delete"')
        if self._delivery is None:
            raise ValidationError("there is no sink to settle", hint="fence.documents.using(sink=...).settle()")
        return self._delivery.settle(self._reads.live, self._reads.log, full=full, foreign=foreign)

    def _stream(
        self,
        documents: Iterable[Document],
        batch: int,
        dry_run: bool,
        on_error: OnError,
        watched: Callable[[], contextlib.AbstractContextManager[Meter]],
    ) -> Iterator[Receipt]:
        if self._delivery is not None and not dry_run:
            self._delivery.begin()
        with watched() as update:
            yield from self._batches.stream(documents, batch, update, dry_run=dry_run, on_error=on_error)

    def _one(self, prepared: PreparedDocument, expected: Expected | None, dry_run: bool) -> Receipt:
        if expected is not None or prepared.under_other_hash is not None:
            head = self._reads.head(prepared.doc.doc_id)
            prepared = prepared.suited_to(head)
            check_version(prepared.doc.doc_id, head, expected, prepared.claim)
        if dry_run:
            return self._batches.preview(prepared)
        ((_, moved, answer, _),) = self._mover.answers([{0: prepared._replace(expected=expected)}])
        if isinstance(answer, Replay | MovedHead):
            return receipt_of(moved, answer)
        raise error_of(moved, answer, self._rules.wait_ms / 1000)

    def _caller(self, route: str = "") -> Caller:
        # A partitioned Redis must not answer forever. A forked child starts a watch of its own.
        self._watch.start()
        engine = self._engine
        return Caller(engine.owner, engine.run_id, engine.correlation_id, route or engine.route)

    @cached_property
    def _identity(self) -> Identity:
        fixed = self._engine.content_hash
        fixed.check()
        return Identity(self._engine.tenant, fixed.algorithm, fixed.key(), first=fixed.first)

    @cached_property
    def _second_identity(self) -> Identity | None:
        fixed = self._engine.content_hash
        return None if fixed.also is None else Identity(self._engine.tenant, fixed.also)

    @cached_property
    def _recipes(self) -> Recipes:
        return Recipes(self._chunker, self._engine.policy.documents, self._engine.content_hash.key())

    @cached_property
    def _claim_builder(self) -> ClaimBuilder:
        rules, redactor = self._engine.policy.documents, self._engine.policy.metadata_redactor
        if self._allow_empty_text is not None:
            rules = rules.model_copy(update={"allow_empty_text": self._allow_empty_text})
        return ClaimBuilder(self._identity, rules, self._rules, self._recipes, redactor, self._second_identity)

    @cached_property
    def _reads(self) -> DocumentReads:
        return DocumentReads(self._stores, self._identity)

    @cached_property
    def _log_rewrite(self) -> LogRewrite:
        log_rewrite = LogRewrite(self._stores)
        if self._hooks:
            log_rewrite.before_switch.append(self._hooks.indexes().copy)
        return log_rewrite

    @cached_property
    def _corpus(self) -> Corpus:
        return Corpus(self._stores)

    @cached_property
    def _writer(self) -> BatchCommitter:
        delivery = self._delivery
        stores, fixed = self._stores, self._engine.content_hash
        settle = partial(fixed.settle_in, epochs=stores.epochs, hydrator=stores.hydrator)
        hooks = SnippetHook(self._layout, self._objects, settle, delivery)
        runtime_ms = self._rules.max_runtime_ms
        if delivery is None:
            return BatchCommitter(self._stores, ParquetCodec(), hooks=hooks, max_runtime_ms=runtime_ms)
        return SinkWriter(delivery, self._stores, ParquetCodec(), hooks=hooks, max_runtime_ms=runtime_ms)

    @cached_property
    def _delivery(self) -> SinkDelivery | None:
        if self._sink is None:
            return None
        sink, rules = self._sink, self._rules
        revisions = Revisions(self._objects, self._layout, self._reads.segments)
        writer = BatchCommitter(self._stores, ParquetCodec(), max_runtime_ms=rules.max_runtime_ms)
        takeover = Takeover(writer, self._claim_builder, revisions, self._caller)
        sources = Sources(self._stores, self._identity)
        upserts = Upserts(sink, self._vectors_for(sink))
        reconciler = Reconciler(sink, sources, revisions, upserts, takeover)
        intents = Intents(self._engine.tenant, sink.name, self._objects)
        return SinkDelivery(self._stores.fences, intents, reconciler, rules)

    def _vectors_for(self, sink: Sink | VectorSink) -> Callable[[], SnippetVectors] | None:
        hooks, embedder = self._hooks, getattr(sink, "embedder", None)
        if embedder is None:
            return None
        if hooks is None:
            raise ValidationError(
                "a sink with an embedder needs the indexes of a fence", hint="fence.documents.using(sink=...)"
            )
        return lambda: hooks.indexes().vectors(embedder)

    @cached_property
    def _mover(self) -> HeadMover:
        stores, fixed = self._stores, self._engine.content_hash
        begin = partial(fixed.begin, stores.epochs, stores.hydrator)
        return HeadMover(self._writer, stores.fences, wait_ms=self._rules.wait_ms, begin_hash=begin)

    @cached_property
    def _origins(self) -> Origins:
        return Origins(self._engine.tenant, self._objects)

    @cached_property
    def _batches(self) -> BatchIngest:
        ready = self._stores.hydrator.ensure_ready
        note = self._engine.note_refusals
        return BatchIngest(self._stores.fences, self._claim_builder, self._mover, self._caller, ready, note)
