"""Dry runs: what would happen to documents, without a claim, a write or a decision row."""

from __future__ import annotations

from collections.abc import Sequence

from ragfence.core.decision_rows import NO_FENCE
from ragfence.core.decisions import (
    Change,
    Claim,
    Granted,
    HeldRecords,
    LeaseRef,
    NotReadyVerdict,
    Seal,
    Sealed,
    apply_claim,
    apply_release,
    apply_seal,
)
from ragfence.core.receipts import Receipt
from ragfence.core.records import Head, SourceRecord, decode_record
from ragfence.documents.claims import PreparedDocument
from ragfence.documents.head_moves import as_replay, effect_of, receipt_of
from ragfence.documents.identity import SourcePlace
from ragfence.engine.batch_commit import Answer, Failed, MovedHead, flags_of
from ragfence.engine.refusals import code_of
from ragfence.stores.fences import ClaimStore, Lookup

_GONE = b""


class DryRun:
    """One call as a dry run. A document that comes again is decided by what its predecessor would have left."""

    def __init__(self, fences: ClaimStore) -> None:
        self._fences = fences
        # Only the changes, and encoded: a call may have a million documents.
        self._sources: dict[bytes, bytes] = {}
        self._parked: dict[bytes, bytes] = {}

    def receipts(self, documents: Sequence[PreparedDocument]) -> list[Receipt]:
        """Returns the receipts the documents would get now. New ones are chunked to get their snippet_ids."""
        return [receipt_of(document, answer) for document, answer in self.answers(documents)]

    def answers(self, documents: Sequence[PreparedDocument]) -> list[tuple[PreparedDocument, Answer]]:
        """Returns the answers, each with its document by the content hash that it is known by."""
        claims = [each.claim for each in documents]
        held = self._fences.read([Lookup(claim.key, claim.mode, claim.source) for claim in claims])
        now_ms = self._fences.now_ms()
        answers = []
        for document, found in zip(documents, held, strict=True):
            source = self._by_now(document.claim, found).source
            suited = document.suited_to(source.head if source else None)
            if suited.claim.key != document.claim.key:
                (found,) = self._fences.read([Lookup(suited.claim.key, suited.claim.mode, suited.claim.source)])
            answers.append((suited, self._answer(suited, found, now_ms)))
        return answers

    def head(self, place: SourcePlace, stored: Head | None) -> Head | None:
        """Returns the head of a source as it would be by now, given the stored one."""
        source = self._sources.get(bytes((place.shard,)) + place.source)
        return stored if source is None else SourceRecord.decode(source).head

    def _answer(self, document: PreparedDocument, stored: HeldRecords, now_ms: int) -> Answer:
        claim = document.claim
        held = self._by_now(claim, stored)
        verdict, change = apply_claim(held, claim, now_ms, stamp=0, next_fence=lambda: NO_FENCE)
        self._keep(claim, change)
        if not isinstance(verdict, Granted):
            assert not isinstance(verdict, NotReadyVerdict)  # only a store answers that, never a decision
            return verdict
        held = self._by_now(claim, stored)
        try:
            effect = effect_of(document)(document, verdict)
        except Exception as error:  # noqa: BLE001  # as in an ingest
            lease = LeaseRef(claim.key, claim.token, claim.mode, claim.source)
            _, change = apply_release(held, lease, now_ms, error=code_of(error), expire=False)
            self._keep(claim, change)
            return as_replay(Failed(error))
        seal = Seal(
            claim.key,
            claim.token,
            NO_FENCE,
            claim.mode,
            claim.source,
            result=effect.result,
            sequence=claim.sequence,
            metadata_hash=claim.metadata_hash,
            live=not claim.retract,
        )
        outcome, change = apply_seal(held, seal, now_ms, epoch=NO_FENCE.epoch)
        assert isinstance(outcome, Sealed)  # no other process takes part
        self._keep(claim, change)
        again, flags = verdict.prior is not None, flags_of(verdict, claim)
        return MovedHead(outcome.record, again, flags, verdict.takeover)

    def _by_now(self, claim: Claim, stored: HeldRecords) -> HeldRecords:
        source, record = self._sources.get(_place(claim)), self._parked.get(claim.key)
        return HeldRecords(
            stored.record if record is None else decode_record(record) if record != _GONE else None,
            stored.source if source is None else SourceRecord.decode(source),
        )

    def _keep(self, claim: Claim, change: Change | None) -> None:
        if change is None:
            return
        if change.source is not None:
            self._sources[_place(claim)] = change.source.encode()
        if change.drop_record:
            self._parked[claim.key] = _GONE
        if change.park is not None:
            digest, record = change.park
            self._parked[claim.key[:1] + digest] = record.encode()


def _place(claim: Claim) -> bytes:
    return claim.key[:1] + claim.source
