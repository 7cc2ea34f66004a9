"""`fence.documents.sync`: the documents of a source, each read only if it changed since the last time.

A document is skipped, unread, only if the source says that it is as it was (size and mtime, or an ETag) *and* the
fence store says that just this content, cut by just this recipe, is live. A changed chunker, a retraction or somebody
else's edit therefore leads to a read. What is read goes the way of `ingest_many`.

A prune retracts what the source no longer has. It is decided before anything is written: the source is listed once to
see what would go, and once more to ingest; only what neither listing names is retracted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice, repeat
from operator import itemgetter
from typing import Literal, NamedTuple, TypeVar
from unicodedata import normalize

from ragfence.core.decisions import Ask, Claim, Mode, Replay, settle_claim
from ragfence.core.receipts import Decision, Receipt
from ragfence.core.records import Head
from ragfence.core.rows import NO_FENCE
from ragfence.documents.document import Document
from ragfence.documents.foresight import Foresight
from ragfence.documents.identity import SNIPPET_BYTES, Content, Identity
from ragfence.documents.moving import Mover, receipt_of
from ragfence.documents.preparing import Asked, Caller, Prepared, Preparing, Recipes, in_waves
from ragfence.documents.progress import Meter
from ragfence.documents.reading import Reading
from ragfence.documents.segments import ids_in
from ragfence.documents.sources import Item, Source
from ragfence.documents.states import Changes, Note, Roll, States
from ragfence.documents.sync_report import TOLD, SyncFailure, SyncReport, Tally, failure_of, snippets_in
from ragfence.engine import collecting
from ragfence.engine.segments import Moved, batch_tokens
from ragfence.errors import DocumentInvalid, PruneTooLarge, RagfenceError, ValidationError
from ragfence.stores.fences import FenceStore, Lookup

Prune = Literal[False, "scoped", "full"]

PAGE = 1000
"""as many items are looked at together, and at most as many documents go into one segment: as in `ingest_many`"""
MOST_CHARACTERS = 32 * 2**20
"""of documents that are read and wait to be ingested together"""

UNCHANGED, SYNC, PRUNE = "unchanged", "sync", "prune"
"""the route in the decision rows: not even read, read, retracted because the source has it no longer"""

Each = TypeVar("Each")
_state_of = itemgetter(Item._fields.index("state"))


class Parts(NamedTuple):
    """What of the guard a sync works with."""

    fences: FenceStore
    identity: Identity
    recipes: Recipes
    preparing: Preparing
    mover: Mover
    reading: Reading
    owner: str
    run_id: str
    correlation_id: str

    def caller(self, route: str) -> Caller:
        return Caller(self.owner, self.run_id, self.correlation_id, route)


class _Read(NamedTuple):
    """A document that was read and waits for its batch."""

    doc_id: str
    state: str
    document: Document
    note: Note | None
    """what was known of it; not looked up where the source has no states"""


class Sync:
    """One run over one source."""

    def __init__(
        self, parts: Parts, source: Source, states: States, *, prune: Prune, max_share: float, dry_run: bool
    ) -> None:
        self._parts = parts
        self._source = source
        self._states = states
        self._prune = prune
        self._max_share = max_share
        self._dry_run = dry_run
        self._foresight = Foresight(parts.fences)
        self._notes = states.newest()
        self._roll = Roll(self._notes)
        self._changes = Changes()
        self._tally = Tally()
        self._unidentified = 0

    def run(self, told: Meter) -> SyncReport:
        """A `RagfenceError` that stops it has the report of what was done until then among its details."""
        started = time.monotonic()
        try:
            try:
                self._run(told)
            except BaseException:
                with contextlib.suppress(RagfenceError):
                    self._remember()
                raise
            self._remember()
        except RagfenceError as stopped:
            stopped.details["report"] = self._tally.report(self._source.name, self._dry_run, time.monotonic() - started)
            raise
        return self._tally.report(self._source.name, self._dry_run, time.monotonic() - started)

    def _run(self, told: Meter) -> None:
        doomed = self._doomed() if self._prune else []
        for page in _listed(self._source.items(), PAGE):
            with collecting.held_off():
                self._page(page)
            told(self._tally.listed)
        if self._unidentified and self._prune:
            self._tally.not_pruned = (
                f"{self._unidentified} of what the source holds could not be told apart, so nobody knows what is gone"
            )
        else:
            self._retract([doc_id for doc_id in doomed if doc_id not in self._roll])

    def _remember(self) -> None:
        if self._changes and not self._dry_run:
            self._states.add(self._notes, self._changes)

    def _page(self, items: Sequence[Item]) -> None:
        ids = [normalize("NFC", item.doc_id) for item in items]
        add = self._roll.add
        again = [not add(doc_id) for doc_id in ids]
        self._tally.listed += len(items)
        notes: Iterable[Note | None] = repeat(None, len(ids))
        unread: Collection[str] = ()
        if any(map(_state_of, items)):  # where there are no states, as of documents in memory, all have to be read
            notes = self._notes.of(ids)
            # An item that repeats a doc_id is read in any case: it has to follow what came before it.
            same = [
                note if note and item.state and note.state == item.state and not repeated else None
                for item, note, repeated in zip(items, notes, again, strict=True)
            ]
            unread = self._unread([note for note in same if note])
        waiting: list[_Read] = []
        characters = 0
        for item, doc_id, note, repeated in zip(items, ids, notes, again, strict=True):
            if repeated:
                self._tally.repeat(doc_id)
            elif doc_id in unread:
                continue
            document = self._loaded(item, doc_id)
            if document is None:
                continue
            waiting.append(_Read(doc_id, item.state, document, note))
            # Whatever somebody's source gave: what is wrong with it is said where it is checked.
            text = getattr(document, "text", None)
            characters += len(text) if isinstance(text, str) else 0
            if characters > MOST_CHARACTERS:
                self._ingest(waiting)
                waiting, characters = [], 0
        self._ingest(waiting)

    def _unread(self, notes: Sequence[Note]) -> set[str]:
        """Which of these documents are live just as they were noted. They are answered, without having been read."""
        tokens, caller = batch_tokens(), self._parts.caller(UNCHANGED)
        asks = [self._ask(note, next(tokens), caller) for note in notes]
        unread = set()
        for note, snippets in zip(notes, self._live(asks), strict=True):
            if snippets is not None:
                unread.add(note.doc_id)
                self._tally.unread += 1
                self._tally.live(snippets, note.characters)
        return unread

    def _live(self, asks: Sequence[Ask]) -> list[int | None]:
        """How many snippets each has, of those that are live as they are asked about."""
        if not asks:
            return []
        fences = self._parts.fences
        if not self._dry_run:
            return [None if record is None else snippets_in(record) for record in fences.replays(asks).settled()]
        # The same question, without the decision rows.
        held = fences.read([Lookup(ask.key, Mode.DOCUMENT, ask.source) for ask in asks])
        now_ms = fences.now_ms()
        answers: list[int | None] = []
        for ask, found in zip(asks, held, strict=True):
            claim = Claim(
                key=ask.key,
                fingerprint=ask.fingerprint,
                token=ask.token,
                mode=Mode.DOCUMENT,
                source=ask.source,
                sequence=ask.sequence,
                metadata_hash=ask.metadata_hash,
            )
            verdict, _ = settle_claim(found, claim, now_ms, stamp=0, next_fence=lambda: NO_FENCE)
            record = verdict.record if isinstance(verdict, Replay) else None
            answers.append(len(ids_in(record.result)) // SNIPPET_BYTES if record else None)
        return answers

    def _ask(self, note: Note, token: bytes, caller: Caller) -> Ask:
        identity, cut = self._parts.identity, self._parts.recipes.of(note.content_type)
        doc_id = note.doc_id.encode()
        shard, source = identity.place(doc_id)
        return Ask(
            key=identity.key(shard, doc_id, note.content_hash, cut.key_tail),
            source=source,
            fingerprint=identity.fingerprint(Content(note.content_hash, note.size)),
            metadata_hash=note.metadata_hash,
            sequence=note.sequence,
            token=token,
            context=caller.context(note.doc_id, note.content_hash, cut.name, note.sequence, note.characters),
        )

    def _loaded(self, item: Item, doc_id: str) -> Document | None:
        """None: it is one of the failures. An error of another kind than these stops the sync."""
        try:
            return item.load()
        except DocumentInvalid as invalid:
            self._invalid(doc_id, invalid)
        except OSError as error:
            self._invalid(doc_id, self._unreadable(doc_id, error))
        return None

    def _unreadable(self, doc_id: str, error: OSError) -> DocumentInvalid:
        return DocumentInvalid(
            f"{doc_id} ({self._source.name}) cannot be read: {error.strerror or error}",
            hint="make it readable, or leave it out",
            doc_id=doc_id,
        )

    def _invalid(self, doc_id: str, invalid: DocumentInvalid) -> None:
        if not invalid.doc_id:
            self._unidentified += 1
        self._tally.refused(SyncFailure(doc_id, invalid.code, invalid.message, invalid.hint))

    def _ingest(self, waiting: Sequence[_Read]) -> None:
        tokens, caller = batch_tokens(), self._parts.caller(SYNC)
        asks: dict[int, Asked] = {}
        ask = self._parts.preparing.ask
        for at, (doc_id, _, document, _) in enumerate(waiting):
            try:
                asked = ask(document, next(tokens), caller)
                if asked[1].doc_id != doc_id:
                    raise DocumentInvalid(
                        f"{self._source.name} lists {doc_id} and gives the document {asked[1].doc_id}",
                        hint="the doc_id of an item must be that of its document",
                    )
                asks[at] = asked
            except DocumentInvalid as invalid:
                self._invalid(doc_id, invalid)
        # What this source has brought before is most likely live as it is; what it has not can as well be claimed.
        brought = [at for at in asks if self._notes.place(waiting[at].doc_id) is not None] if self._notes else []
        if not self._dry_run:
            for at, snippets in zip(brought, self._live([asks[at][0] for at in brought]), strict=True):
                if snippets is not None:
                    asked = asks.pop(at)
                    self._tally.live(snippets, len(asked[1].text))
                    self._note(waiting[at], asked)
        if not asks:
            return
        tokens = batch_tokens()
        claimed = self._parts.preparing.claimed
        prepared = {at: claimed(asked, next(tokens), caller) for at, asked in asks.items()}
        known = [waiting[at].doc_id for at in brought if at in asks]
        before = dict(zip(known, self._heads(known), strict=True))
        for at, answer in self._answers(prepared):
            read, asked = waiting[at], asks[at]
            if isinstance(answer, Moved):
                self._tally.moved(answer, len(asked[1].text), before.get(read.doc_id))
            elif answer.failure is None:
                self._tally.answered(answer, len(asked[1].text), before.get(read.doc_id))
            else:
                self._refused(read.doc_id, answer)
                continue
            self._note(read, asked)

    def _refused(self, doc_id: str, receipt: Receipt) -> None:
        if receipt.decision is not Decision.NEW:
            self._tally.decisions[receipt.decision.value] += 1
        if receipt.decision is not Decision.STALE:
            self._tally.refused(failure_of(doc_id, receipt))

    def _note(self, read: _Read, asked: Asked) -> None:
        if not read.state:
            if not self._notes.without_state(read.doc_id):
                self._changes.add_name(read.doc_id)
            return
        ask, doc, content, _ = asked
        note = Note(
            doc_id=doc.doc_id,
            state=read.state,
            content_hash=content.hash,
            size=content.size,
            characters=len(doc.text),
            metadata_hash=ask.metadata_hash,
            content_type=doc.content_type,
            sequence=doc.sequence,
        )
        if note != read.note:
            self._changes.add(note)

    def _answers(self, prepared: dict[int, Prepared]) -> Iterator[tuple[int, Receipt | Moved]]:
        """One by one, and without a receipt where a head was moved: nobody asks for those of all that is new."""
        if self._dry_run:
            yield from zip(prepared, self._foresight.receipts(list(prepared.values())), strict=True)
            return
        for at, each, answer, waited_s in self._parts.mover.answers(list(in_waves(prepared))):
            yield at, answer if isinstance(answer, Moved) else receipt_of(each, answer, waited_s)

    def _heads(self, doc_ids: Sequence[str]) -> list[Head | None]:
        places = [self._parts.identity.place(doc_id.encode()) for doc_id in doc_ids]
        lookups = [Lookup(bytes((shard,)) + bytes(32), Mode.DOCUMENT, source) for shard, source in places]
        stored = [held.source.head if held.source else None for held in self._parts.fences.read(lookups)]
        return list(map(self._foresight.head, places, stored)) if self._dry_run else stored

    def _doomed(self) -> list[str]:
        """The live documents that the source no longer has, if so many may go. Nothing was written so far."""
        roll = Roll(self._notes)
        for item in self._source.items():  # an incomplete listing raises
            roll.add(normalize("NFC", item.doc_id))
        live, doomed = self._outside(roll) if self._prune == "full" else self._left(roll)
        if not doomed or len(doomed) / max(live, len(doomed)) <= self._max_share:
            return doomed
        refusal = PruneTooLarge(
            f"{self._source.name}: the prune would retract {len(doomed):,} of {live:,} live documents, and at most "
            f"{100 * self._max_share:g} % may go at once",
            hint="if the source is complete, allow it: max_prune_share=1.0 (--max-prune-share 1) lets all go",
            doc_ids=tuple(doomed[:TOLD]),
            wanted=len(doomed),
            live=live,
        )
        if not self._dry_run:
            self._changes.gone.clear()  # nothing at all is written
            raise refusal
        self._tally.not_pruned = refusal.message
        return []

    def _outside(self, roll: Roll) -> tuple[int, list[str]]:
        """How many documents are live, and which of them are not on the roll, whoever brought them."""
        live, outside = 0, []
        for row in self._parts.reading.live():
            live += 1
            if row.detail.doc_id not in roll:
                outside.append(row.detail.doc_id)
        return live, sorted(outside)

    def _left(self, roll: Roll) -> tuple[int, list[str]]:
        """How many documents are live, and which of them this source has brought and no longer has."""
        left = []
        for page in _paged(roll.missing(), PAGE):
            for doc_id, head in zip(page, self._heads(page), strict=True):
                if head and head.live:
                    left.append(doc_id)
                elif head:  # somebody has retracted it
                    self._changes.gone.add(doc_id)
        if not left:
            return 0, []
        # A set: a scan may show a head twice.
        live = {(shard, source) for shard, source, head in self._parts.fences.all_heads() if head.live}
        return len(live), sorted(left)

    def _retract(self, doc_ids: Sequence[str]) -> None:
        for page in _paged(doc_ids, PAGE):
            tokens, caller = batch_tokens(), self._parts.caller(PRUNE)
            retract = self._parts.preparing.retract
            prepared = {at: retract(doc_id, None, next(tokens), caller) for at, doc_id in enumerate(page)}
            for at, answer in self._answers(prepared):
                receipt = receipt_of(prepared[at], answer) if isinstance(answer, Moved) else answer
                if receipt.failure is not None:
                    self._tally.refused(failure_of(page[at], receipt))
                    continue
                self._changes.gone.add(page[at])
                if receipt.is_new:  # else somebody was faster
                    self._tally.retracted(page[at])


def check_prune(prune: object, share: object) -> None:
    if prune is not False and prune not in ("scoped", "full"):
        raise ValidationError(
            f'prune is False, "scoped" or "full", not {prune!r}',
            hint='"scoped" retracts what this source brought and no longer has, "full" all that it does not have',
        )
    if share is None:
        return
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValidationError(f"max_prune_share is a share from 0 to 1, not {share!r}", hint="1.0 lets all go")


def _listed(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Page by page. A source that breaks off has its say after what it had listed until then."""
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
