"""Reconciles a sink for documents whose work is uncertain: after a crash, a lost race or an error.

Writes to a sink cannot be fenced. What makes them right nevertheless: after writing, a writer reads the head *and* the
lease of the document. If there is no lease and the head is the one it wrote for, every later writer claims after this
moment, and writes to the sink after it. Otherwise the writer reads again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ragfence.core.decisions import Claim, Granted, Mode
from ragfence.core.layout import ids_in
from ragfence.core.operations import FenceNumber
from ragfence.core.records import Head, SourceRecord
from ragfence.documents.chunking.chunker import Recipe
from ragfence.documents.claims import Caller, ClaimBuilder
from ragfence.documents.head_moves import retract_effect
from ragfence.documents.identity import KIND, Identity, snippet_texts
from ragfence.documents.log import METADATA, NO_POSITIONS, result_of, stored_in
from ragfence.documents.sinks.intents import TouchedSnippets
from ragfence.documents.sinks.sink import Sink, VectorSink, delete_all
from ragfence.documents.sinks.upserts import PlacedRow, Revisions, Upserts
from ragfence.engine.batch_commit import BatchCommitter, FinishedEffect, Move, batch_tokens
from ragfence.engine.hydration import TenantStores
from ragfence.errors import FencedOut, NotReady, SnapshotGone
from ragfence.stores.fences import Lookup

ATTEMPTS = 10
MANY_ATTEMPTS = 10_000
"""for a takeover, which must not quarantine a document"""


class SeenSource(NamedTuple):
    """A source in the fence store, at one moment."""

    head: Head | None
    busy: bool
    """a lease is held"""
    unsettled: bool
    """a lease expired whose owner may have committed and can still seal"""

    @property
    def fence(self) -> FenceNumber | None:
        """The fence of the newest move."""
        return self.head.record.fence if self.head and self.head.record else None


class Sources:
    """Reads sources. Unlike a plain read, it never takes a store that lost its data for one without documents."""

    def __init__(self, stores: TenantStores, identity: Identity) -> None:
        self._fences = stores.fences
        self._hydrator = stores.hydrator
        self._identity = identity

    def seen(self, doc_ids: Sequence[str]) -> dict[str, SeenSource]:
        lookups = [lookup_of(*self._identity.place(doc_id.encode())) for doc_id in doc_ids]
        for _ in range(ATTEMPTS):
            self._hydrator.ensure_ready()
            before, now_ms = self._fences.markers(), self._fences.now_ms()
            held = self._fences.read(lookups)
            if all(marker and marker.usable for marker in before) and self._fences.markers() == before:
                return {doc_id: _seen(each.source, now_ms) for doc_id, each in zip(doc_ids, held, strict=True)}
        raise NotReady("the fence store loses its data faster than it can be read")


def lookup_of(shard: int, source: bytes) -> Lookup:
    return Lookup(bytes((shard,)) + bytes(32), Mode.DOCUMENT, source)


def _seen(source: SourceRecord | None, now_ms: int) -> SeenSource:
    lease = source.lease if source else None
    busy = lease is not None and lease.record.held_at(now_ms)
    return SeenSource(source.head if source else None, busy, lease is not None and lease.may_hide_a_commit and not busy)


class Reconciler:
    def __init__(
        self,
        sink: Sink | VectorSink,
        sources: Sources,
        revisions: Revisions,
        upserts: Upserts,
        takeover: Takeover,
    ) -> None:
        self.sink = sink
        self.upserts = upserts
        self._sources = sources
        self.revisions = revisions
        self._takeover = takeover

    def reconcile(self, touched: TouchedSnippets, right_for: Mapping[str, FenceNumber] | None = None) -> set[str]:
        """Makes the sink hold exactly the live ones of the touched snippets. Returns the documents that must wait.

        `right_for`: the move of each document for which the sink is known to be right; there is work only if it is no
        longer the newest.
        """
        right: dict[str, FenceNumber | None] = dict(right_for or {})
        left, busy, taken = dict(touched), set[str](), set[str]()
        for _ in range(ATTEMPTS):
            if not left:
                break
            seen = self._sources.seen(list(left))
            busy |= {doc_id for doc_id, source in seen.items() if source.busy or (source.unsettled and doc_id in taken)}
            unsettled = {
                doc_id: source.head for doc_id, source in seen.items() if source.unsettled and doc_id not in busy
            }
            quiet = {doc_id: source for doc_id, source in seen.items() if not (source.busy or source.unsettled)}
            done = {doc_id for doc_id, source in quiet.items() if doc_id in right and right[doc_id] == source.fence}
            left = {doc_id: ids for doc_id, ids in left.items() if doc_id not in done and doc_id not in busy}
            if unsettled:
                self._takeover.restate(unsettled)
                taken |= unsettled.keys()
            for doc_id in self._put_right({doc_id: quiet[doc_id] for doc_id in quiet if doc_id in left}, left):
                right[doc_id] = quiet[doc_id].fence
        return busy | left.keys()

    def _put_right(self, sources: Mapping[str, SeenSource], touched: TouchedSnippets) -> list[str]:
        """Returns the documents it could reconcile: all but those whose log is being rewritten, or is broken."""
        live = {
            doc_id: source.head.record
            for doc_id, source in sources.items()
            if source.head and source.head.live and source.head.record
        }
        wanted = {
            doc_id: touched[doc_id].intersection(snippet_texts(ids_in(record.result)))
            for doc_id, record in live.items()
        }
        needed = {doc_id: live[doc_id] for doc_id, ids in wanted.items() if ids}
        rows = self.revisions.heads(needed)
        snippets = self.revisions.snippets(rows, {doc_id: wanted[doc_id] for doc_id in rows})
        able = [doc_id for doc_id in sources if doc_id in snippets or doc_id not in needed]
        try:
            self.upserts.give(snippets, rows)
        except SnapshotGone:
            return []
        delete_all(self.sink, [each for doc_id in able for each in sorted(touched[doc_id] - wanted.get(doc_id, set()))])
        return able


class Takeover:
    """Ends expired leases by writing the head once more as a new row, so that a zombie can no longer seal."""

    def __init__(
        self,
        writer: BatchCommitter,
        claim_builder: ClaimBuilder,
        revisions: Revisions,
        caller: Callable[[], Caller],
    ) -> None:
        """`writer` has no sink: these moves do not change it."""
        self._writer = writer
        self._claim_builder = claim_builder
        self._revisions = revisions
        self._caller = caller

    def restate(self, heads: Mapping[str, Head | None]) -> None:
        """Restates these heads. If another process is faster, nothing happens here."""
        live = {doc_id: head.record for doc_id, head in heads.items() if head and head.live and head.record}
        rows = self._revisions.heads(live)
        caller, tokens = self._caller(), batch_tokens()
        moves = []
        for doc_id, head in heads.items():
            if doc_id not in live:  # there is no live head: a retraction states that
                prepared = self._claim_builder.retract(doc_id, None, next(tokens), caller)
                claim = prepared.claim._replace(max_attempts=MANY_ATTEMPTS)
                moves.append(Move(claim, _only_over(head, retract_effect), prepared))
            elif doc_id in rows and head:
                claim = self._claim_of(head, rows[doc_id], next(tokens), caller)
                moves.append(Move(claim, _only_over(head, _restated), rows[doc_id].row.detail))
        self._writer.move(moves, wait_s=0)

    def _claim_of(self, head: Head, placed: PlacedRow, token: bytes, caller: Caller) -> Claim:
        detail = placed.row.detail
        recipe = Recipe.written(detail.recipe).digest.hex()
        return Claim(
            key=placed.row.key,
            fingerprint=placed.row.fingerprint,
            token=token,
            mode=Mode.DOCUMENT,
            source=placed.row.source,
            metadata_hash=head.metadata_hash,
            lease_ms=self._claim_builder.kind_rules.lease_ms,
            max_attempts=MANY_ATTEMPTS,
            kind=KIND,
            owner=caller.owner,
            context=caller.context(detail.doc_id, detail.content_hash, recipe, None, 0),
        )


def _restated(detail: Any, grant: Granted) -> FinishedEffect:
    assert grant.prior is not None  # the head's own record
    stored = stored_in(grant.prior)
    return FinishedEffect(
        result_of(stored.ids, stored.origin, owner=stored.owner),
        detail._replace(
            action=METADATA,
            ids=stored.ids,
            positions=NO_POSITIONS,
            dead=b"",
            origin=stored.origin.text,
            before=stored.row.text,
            owner=stored.owner.hex(),
        ),
    )


def _only_over(
    head: Head | None, effect: Callable[[Any, Granted], FinishedEffect]
) -> Callable[[Any, Granted], FinishedEffect]:
    """Returns the effect with a check that the head is unchanged: otherwise it would undo a later move."""
    seen = head.record.fence if head and head.record else None

    def checked(subject: Any, grant: Granted) -> FinishedEffect:
        now = grant.head.record.fence if grant.head and grant.head.record else None
        if now != seen:
            raise FencedOut("the document moved on while it was taken over")
        return effect(subject, grant)

    return checked
