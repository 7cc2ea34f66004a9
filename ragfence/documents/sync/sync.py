"""`fence.documents.sync`: ingests the documents of a source, and reads only those that changed since the last sync.

A document stays unread only if the source reports the same state (size and mtime, or an ETag) *and* the fence store
holds exactly this content, chunked by exactly this recipe, as live. A changed chunker, a retraction or an edit by
another writer therefore leads to a read. Documents that are read are ingested as by `ingest_many`.

A prune retracts what the source no longer has. It is planned before anything is written: the source is listed once to
find what would be retracted, and again to ingest; only documents missing in both listings are retracted.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from operator import itemgetter
from typing import NamedTuple, TypeVar
from unicodedata import normalize

from ragfence._progress import Meter
from ragfence.core.decision_rows import NO_FENCE
from ragfence.core.decisions import Claim, HeadQuery, Mode, Replay, apply_claim
from ragfence.core.document import Document
from ragfence.core.layout import ids_in
from ragfence.core.receipts import DUPLICATE, Decision, Receipt
from ragfence.core.records import Head
from ragfence.documents.claims import Caller, ClaimBuilder, DocumentQuery, PreparedDocument, split_waves
from ragfence.documents.dry_run import DryRun
from ragfence.documents.head_moves import HeadMover, receipt_of
from ragfence.documents.identity import SNIPPET_BYTES, Content
from ragfence.documents.origins import Origin, Origins
from ragfence.documents.readers.content import SkippedFiles
from ragfence.documents.reads import DocumentReads
from ragfence.documents.sources import Item, Source
from ragfence.documents.sync.ingest_table import TableRow, TableWriter
from ragfence.documents.sync.prune_plan import Prune, PrunePlan
from ragfence.documents.sync.report import (
    HINT,
    MAX_NAMED,
    SAMPLE,
    RandomIds,
    SyncFailure,
    SyncReport,
    SyncTally,
    describe_random_ids,
    failure_of,
    ids_of_record,
    is_random_id,
)
from ragfence.documents.sync.state import ListedIds, NoteChanges, SyncNote, SyncStates
from ragfence.engine import gc_pause
from ragfence.engine.batch_commit import MovedHead, batch_tokens
from ragfence.engine.refusals import Refusal
from ragfence.errors import DocumentInvalid, DocumentMoved, Hint, PruneTooLarge, RagfenceError
from ragfence.stores.fences import FenceStore, Lookup

PAGE = 1000
"""items that are processed together, and the most documents in one segment: as in `ingest_many`"""
MOST_CHARACTERS = 32 * 2**20
"""of documents that are read and wait for their batch"""

UNCHANGED, SYNC, PRUNE = "unchanged", "sync", "prune"
"""routes in the decision rows: unread; read; retracted because the source no longer has it"""

_log = logging.getLogger("ragfence.documents")
Each = TypeVar("Each")
_REFUSED = Decision.REFUSED.value
_state_of = itemgetter(Item._fields.index("state"))


class SyncParts(NamedTuple):
    """The parts of documents that a sync needs."""

    fences: FenceStore
    claim_builder: ClaimBuilder
    mover: HeadMover
    reads: DocumentReads
    caller_on: Callable[[str, str], Caller]
    """(route, origin) -> what the decision rows of a call say"""
    note_refusals: Callable[[Sequence[Refusal]], None]
    origin: Origin
    origins: Origins
    table: TableWriter | None = None
    """receives a row for every document that the source lists"""

    def caller(self, route: str) -> Caller:
        return self.caller_on(route, self.origin.name)


class _LoadedDocument(NamedTuple):
    """A document that was read and waits for its batch."""

    doc_id: str
    state: str
    document: Document
    note: SyncNote | None
    """its note from the last sync; not looked up if the source has no states"""
    place: int
    """its position in the page of items"""


class Sync:
    """One run over one source."""

    def __init__(
        self, parts: SyncParts, source: Source, states: SyncStates, *, prune: Prune, max_share: float, dry_run: bool
    ) -> None:
        self._parts = parts
        self._source = source
        self._states = states
        self._prune = prune
        self._max_share = max_share
        self._dry_run = dry_run
        self._preview = DryRun(parts.fences)
        self._notes = states.newest()
        self._listed = ListedIds(self._notes)
        self._changes = NoteChanges()
        self._tally = SyncTally()
        self._unidentified = 0
        self._refused_ids: set[str] = set()
        """documents whose first item was not ingested"""
        self._random_ids = RandomIds()
        self._rows: dict[int, TableRow] = {}
        """of the present page, by place"""

    def run(self, update: Meter) -> SyncReport:
        """Runs the sync. A `RagfenceError` that stops it has the report of the work done so far in its details."""
        started = time.monotonic()
        try:
            try:
                self._run(update)
            except BaseException:
                with contextlib.suppress(RagfenceError):
                    self._remember()
                raise
            self._remember()
            if self._parts.table is not None:
                self._tally.table = self._parts.table.finish()
        except RagfenceError as stopped:
            stopped.details["report"] = self._report(started)
            raise
        return self._report(started)

    def _report(self, started: float) -> SyncReport:
        skipped = getattr(self._source, "skipped", None)
        if isinstance(skipped, SkippedFiles):
            self._tally.skipped = skipped
        return self._tally.report(self._source.name, self._dry_run, time.monotonic() - started)

    def _run(self, update: Meter) -> None:
        candidates = self._prune_candidates() if self._prune else {}
        for page in _listed(self._source.items(), PAGE):
            with gc_pause.gc_paused():
                self._page(page)
                if self._parts.table is not None:
                    self._parts.table.add([self._rows[place] for place in sorted(self._rows)])
                    self._rows.clear()
            update(self._tally.listed)
        self._look_for_random_ids()
        if self._unidentified and self._prune:
            count = self._unidentified
            self._tally.not_pruned = (
                f"{count} {'item' if count == 1 else 'items'} of the source could not be identified, "
                "so it is unknown which documents are gone"
            )
        else:
            self._retract({doc_id: version for doc_id, version in candidates.items() if doc_id not in self._listed})

    def _remember(self) -> None:
        if (self._changes or self._notes.outdated) and not self._dry_run:
            self._states.add(self._notes, self._changes)

    def _page(self, items: Sequence[Item]) -> None:
        ids = [normalize("NFC", item.doc_id) for item in items]
        add = self._listed.add
        again = [not add(doc_id) for doc_id in ids]
        self._tally.listed += len(items)
        notes: Iterable[SyncNote | None] = repeat(None, len(ids))
        unread: Collection[str] = ()
        if any(map(_state_of, items)):  # where there are no states, as of documents in memory, all have to be read
            notes, state = self._notes.of(ids), self._parts.claim_builder.identity.state
            # An item that repeats a doc_id is read in any case: it has to follow what came before it.
            same = [
                note if note and item.state and note.state == state(item.state) and not repeated else None
                for item, note, repeated in zip(items, notes, again, strict=True)
            ]
            unread = self._unread([(place, note) for place, note in enumerate(same) if note])
        waiting: list[_LoadedDocument] = []
        characters = 0
        repeats: list[_LoadedDocument] = []
        for place, (item, doc_id, note, repeated) in enumerate(zip(items, ids, notes, again, strict=True)):
            if doc_id in unread and not repeated:
                continue
            document = self._loaded(item, doc_id, place)
            if document is None:
                if not repeated:
                    self._refused_ids.add(doc_id)
                continue
            read = _LoadedDocument(doc_id, item.state, document, note, place)
            if repeated:
                repeats.append(read)
                continue
            waiting.append(read)
            # Any item of a user's source: what is wrong with it is reported where it is checked.
            text = getattr(document, "text", None)
            characters += len(text) if isinstance(text, str) else 0
            if characters > MOST_CHARACTERS:
                self._ingest(waiting)
                waiting, characters = [], 0
        self._ingest(waiting)
        self._check_repeats(repeats)

    def _check_repeats(self, repeats: Sequence[_LoadedDocument]) -> None:
        """Refuses a doc_id that the source lists again, unless it has the content of the first item."""
        tokens, caller = batch_tokens(), self._parts.caller(SYNC)
        heads = self._heads([read.doc_id for read in repeats]) if repeats else []
        for read, head in zip(repeats, heads, strict=True):
            self._tally.repeat(read.doc_id)
            try:
                builder = self._parts.claim_builder
                asked = builder.query(read.document, next(tokens), caller)
                ask, doc, content, _ = builder.query_suited_to(asked, head)
                refused = read.doc_id in self._refused_ids
                if refused or not head or not head.live or head.record is None or head.digest != ask.key[1:]:
                    why = "and the first one was not ingested" if refused else "with different content"
                    raise DocumentInvalid(
                        f"{self._source.name} lists {read.doc_id} more than once, {why}",
                        hint="give each document an id of its own, such as its path with the page or row; successive "
                        "revisions of one document go through ingest_many",
                        doc_id=read.doc_id,
                    )
                found = ids_in(head.record.result)
                self._tally.live(len(found) // SNIPPET_BYTES, len(doc.text))
                self._row(read.place, read.doc_id, content.hash, DUPLICATE, found)
            except DocumentInvalid as invalid:
                self._invalid(read.doc_id, invalid, read.place)

    def _unread(self, noted: Sequence[tuple[int, SyncNote]]) -> set[str]:
        """Answers the documents that are live just as they were noted, without reading them, and returns their ids."""
        tokens, caller = batch_tokens(), self._parts.caller(UNCHANGED)
        queries = [self._ask_about(note, next(tokens), caller) for _, note in noted]
        unread = set()
        for (place, note), ids in zip(noted, self._live(queries), strict=True):
            if ids is not None:
                unread.add(note.doc_id)
                self._tally.unread += 1
                self._tally.live(len(ids) // SNIPPET_BYTES, note.characters)
                self._row(place, note.doc_id, note.content_hash, DUPLICATE, ids)
        return unread

    def _live(self, queries: Sequence[HeadQuery]) -> list[bytes | None]:
        """Returns the snippet_ids of each document that is live as in its query, otherwise None."""
        if not queries:
            return []
        fences = self._parts.fences
        if not self._dry_run:
            return [None if record is None else ids_of_record(record) for record in fences.replays(queries).settled()]
        # The same query, without decision rows.
        held = fences.read([Lookup(ask.key, Mode.DOCUMENT, ask.source) for ask in queries])
        now_ms = fences.now_ms()
        answers: list[bytes | None] = []
        for ask, found in zip(queries, held, strict=True):
            claim = Claim(
                key=ask.key,
                fingerprint=ask.fingerprint,
                token=ask.token,
                mode=Mode.DOCUMENT,
                source=ask.source,
                sequence=ask.sequence,
                metadata_hash=ask.metadata_hash,
            )
            verdict, _ = apply_claim(found, claim, now_ms, stamp=0, next_fence=lambda: NO_FENCE)
            record = verdict.record if isinstance(verdict, Replay) else None
            answers.append(ids_in(record.result) if record else None)
        return answers

    def _ask_about(self, note: SyncNote, token: bytes, caller: Caller) -> HeadQuery:
        builder = self._parts.claim_builder
        identity, cut = builder.identity_of(note.content_hash), builder.recipes.of(note.content_type)
        doc_id = note.doc_id.encode()
        shard, source = identity.place(doc_id)
        return HeadQuery(
            key=identity.key(shard, doc_id, note.content_hash, cut.key_tail),
            source=source,
            fingerprint=identity.fingerprint(Content(note.content_hash, note.size)),
            metadata_hash=note.metadata_hash,
            sequence=note.sequence,
            token=token,
            context=caller.context(note.doc_id, note.content_hash, cut.name, note.sequence, note.characters),
        )

    def _row(self, place: int, doc_id: str, content_hash: str, decision: str, ids: bytes = b"") -> None:
        if self._parts.table is not None:
            self._rows[place] = TableRow(doc_id, content_hash, decision, ids)

    def _loaded(self, item: Item, doc_id: str, place: int) -> Document | None:
        """Reads a document; None if that failed and is reported. Any other error stops the sync."""
        try:
            return item.load()
        except DocumentInvalid as invalid:
            self._invalid(doc_id, invalid, place)
        except OSError as error:
            self._invalid(doc_id, self._unreadable(doc_id, error), place)
        return None

    def _unreadable(self, doc_id: str, error: OSError) -> DocumentInvalid:
        return DocumentInvalid(
            f"{doc_id} ({self._source.name}) cannot be read: {error.strerror or error}",
            hint="make it readable, or exclude it",
            doc_id=doc_id,
        )

    def _invalid(self, doc_id: str, invalid: DocumentInvalid, place: int) -> None:
        if not invalid.doc_id:
            self._unidentified += 1
        self._tally.decisions[_REFUSED] += 1
        self._row(place, doc_id, "", Decision.REFUSED)
        self._tally.refused(SyncFailure(doc_id, invalid.code, invalid.message, invalid.hint))
        if not self._dry_run:
            self._parts.note_refusals([Refusal(doc_id, invalid.code, invalid.message, SYNC)])

    def _ingest(self, waiting: Sequence[_LoadedDocument]) -> None:
        tokens, caller = batch_tokens(), self._parts.caller(SYNC)
        queries: dict[int, DocumentQuery] = {}
        query_of = self._parts.claim_builder.query
        for at, (doc_id, _, document, _, place) in enumerate(waiting):
            try:
                query = query_of(document, next(tokens), caller)
                if query[1].doc_id != doc_id:
                    raise DocumentInvalid(
                        f"{self._source.name} lists {doc_id} and gives the document {query[1].doc_id}",
                        hint="the doc_id of an item must be that of its document",
                    )
                queries[at] = query
            except DocumentInvalid as invalid:
                self._refused_ids.add(doc_id)
                self._invalid(doc_id, invalid, place)
        # What this source brought before is most likely live; anything else can be claimed at once.
        queries = self._parts.claim_builder.suited_to(queries, self._parts.fences)
        brought = [at for at in queries if self._notes.place(waiting[at].doc_id) is not None] if self._notes else []
        if not self._dry_run:
            for at, ids in zip(brought, self._live([queries[at][0] for at in brought]), strict=True):
                if ids is not None:
                    query = queries.pop(at)
                    self._tally.live(len(ids) // SNIPPET_BYTES, len(query[1].text))
                    self._row(waiting[at].place, waiting[at].doc_id, query[2].hash, DUPLICATE, ids)
                    self._note(waiting[at], query)
        if not queries:
            return
        tokens = batch_tokens()
        claim = self._parts.claim_builder.claim
        origin = self._parts.origin
        if not self._dry_run:
            self._parts.origins.settle(origin)
        prepared = {at: claim(query, next(tokens), caller, origin) for at, query in queries.items()}
        known = [waiting[at].doc_id for at in brought if at in queries]
        before = dict(zip(known, self._heads(known), strict=True))
        for at, answer in self._answers(prepared):
            read, query = waiting[at], queries[at]
            if isinstance(answer, MovedHead):
                self._tally.moved(answer, len(query[1].text), before.get(read.doc_id))
                decision, ids = DUPLICATE if answer.again else Decision.NEW, ids_in(answer.record.result)
            elif answer.failure is None:
                self._tally.answered(answer, len(query[1].text), before.get(read.doc_id))
                decision, ids = answer.decision, bytes.fromhex("".join(answer.snippet_ids))
            else:
                self._refused(read.doc_id, answer)
                self._row(read.place, read.doc_id, query[2].hash, answer.decision)
                continue
            if decision == Decision.NEW:
                self._random_ids.add(read.doc_id, query[0].fingerprint)
            self._row(read.place, read.doc_id, query[2].hash, decision, ids)
            self._note(read, query)

    def _look_for_random_ids(self) -> None:
        """Notices texts of the last sync that come again under random ids. Costs nothing if no id looks random."""
        if not self._random_ids.count:
            return
        gone = list(islice(filter(is_random_id, self._listed.missing()), SAMPLE))
        if gone and self._random_ids.replace(self._heads(gone)):
            self._tally.random_ids = self._random_ids.count
            _log.warning("%s: %s; %s", self._source.name, describe_random_ids(self._tally.random_ids), HINT)

    def _refused(self, doc_id: str, receipt: Receipt) -> None:
        self._refused_ids.add(doc_id)
        self._tally.decisions[receipt.decision.value] += 1
        if receipt.decision is not Decision.STALE:
            self._tally.refused(failure_of(doc_id, receipt))

    def _note(self, read: _LoadedDocument, query: DocumentQuery) -> None:
        if not read.state:
            if not self._notes.without_state(read.doc_id):
                self._changes.add_name(read.doc_id)
            return
        ask, doc, content, _ = query
        note = SyncNote(
            doc_id=doc.doc_id,
            state=self._parts.claim_builder.identity.state(read.state),
            content_hash=content.hash,
            size=content.size,
            characters=len(doc.text),
            metadata_hash=ask.metadata_hash,
            content_type=doc.content_type,
            sequence=doc.sequence,
        )
        if note != read.note:
            self._changes.add(note)

    def _answers(self, prepared: dict[int, PreparedDocument]) -> Iterator[tuple[int, Receipt | MovedHead]]:
        """Yields answers one by one, without a receipt if a head was moved: a sync needs none for new documents."""
        if self._dry_run:
            yield from zip(prepared, self._preview.receipts(list(prepared.values())), strict=True)
            return
        for at, each, answer, waited_s in self._parts.mover.answers(list(split_waves(prepared))):
            yield at, answer if isinstance(answer, MovedHead) else receipt_of(each, answer, waited_s)

    def _heads(self, doc_ids: Sequence[str]) -> list[Head | None]:
        places = [self._parts.claim_builder.identity.place(doc_id.encode()) for doc_id in doc_ids]
        lookups = [Lookup(bytes((shard,)) + bytes(32), Mode.DOCUMENT, source) for shard, source in places]
        stored = [held.source.head if held.source else None for held in self._parts.fences.read(lookups)]
        return list(map(self._preview.head, places, stored)) if self._dry_run else stored

    def _each_head(self, doc_ids: Iterable[str]) -> Iterator[tuple[str, Head | None]]:
        for page in _paged(doc_ids, PAGE):
            yield from zip(page, self._heads(page), strict=True)

    def _prune_candidates(self) -> dict[str, str]:
        """Returns the live documents that the source no longer has, each with its version, before anything is written.

        Raises:
            PruneTooLarge: They are more than the allowed share of the live documents.
        """
        listed = ListedIds(self._notes)
        random_ids = 0
        for item in self._source.items():  # an incomplete listing raises
            random_ids += is_random_id(item.doc_id)
            listed.add(normalize("NFC", item.doc_id))
        parts = self._parts
        plan = PrunePlan(parts.fences, parts.reads, parts.origin, self._each_head, self._states.others_naming)
        candidates, live, self._tally.kept, gone = plan.candidates(self._prune, listed)
        if not candidates or len(candidates) / max(live, len(candidates)) <= self._max_share:
            self._changes.gone |= gone
            return candidates
        hint = Hint(
            "if the source is complete, allow it: max_prune_share=1.0 allows any share",
            cli="if the source is complete, allow it: --max-prune-share 1 allows any share",
        )
        if random_ids and all(map(is_random_id, islice(candidates, SAMPLE))):
            hint = HINT.after("the ids look random, so every run has different ones: ")
        refusal = PruneTooLarge(
            f"{self._source.name}: the prune would retract {len(candidates):,} of {live:,} live documents, and at most "
            f"{100 * self._max_share:g} % are allowed at once",
            hint=hint,
            doc_ids=tuple(islice(candidates, MAX_NAMED)),
            wanted=len(candidates),
            live=live,
        )
        if not self._dry_run:
            raise refusal
        self._tally.not_pruned = refusal.message
        return {}

    def _retract(self, candidates: Mapping[str, str]) -> None:
        """Retracts the candidates that are still at the given version; one that moved since is left alone."""
        for page in _paged(candidates, PAGE):
            tokens, caller = batch_tokens(), self._parts.caller(PRUNE)
            retract = self._parts.claim_builder.retract
            prepared = {
                at: retract(doc_id, None, next(tokens), caller)._replace(expected=candidates[doc_id])
                for at, doc_id in enumerate(page)
            }
            for at, answer in self._answers(prepared):
                receipt = receipt_of(prepared[at], answer) if isinstance(answer, MovedHead) else answer
                if receipt.failure is not None and receipt.failure["code"] == DocumentMoved.code:
                    continue
                if receipt.failure is not None:
                    self._tally.refused(failure_of(page[at], receipt))
                    continue
                self._changes.gone.add(page[at])
                if receipt.is_new:  # otherwise another process was faster
                    self._tally.retracted(page[at])


def _listed(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Pages of items. If the source raises, the items listed before are yielded first."""
    rest, page = iter(items), list[Item]()
    try:
        for item in rest:
            page.append(item)
            if len(page) == size:
                yield page
                page = []
    except Exception:
        if page:
            yield page
        raise
    if page:
        yield page


def _paged(items: Iterable[Each], size: int) -> Iterator[list[Each]]:
    rest = iter(items)
    while page := list(islice(rest, size)):
        yield page
