"""Batches of documents: one query for all of them, replays for those that are known, head moves for the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from ragfence._progress import Meter
from ragfence.core.decisions import Replay
from ragfence.core.document import Document
from ragfence.core.receipts import STALE, OnError, Receipt, refused_receipt
from ragfence.documents.claims import (
    Caller,
    ClaimBuilder,
    DocumentQuery,
    GivenDocument,
    PreparedDocument,
    Retraction,
    split_waves,
)
from ragfence.documents.dry_run import DryRun
from ragfence.documents.head_moves import HeadMover, error_of, receipt_of, replay_receipt
from ragfence.engine import gc_pause
from ragfence.engine.batch_commit import MovedHead, batch_tokens
from ragfence.engine.refusals import Refusal
from ragfence.errors import DocumentInvalid, RagfenceError, ValidationError
from ragfence.stores.fences import FenceStore

_log = logging.getLogger("ragfence.documents")


class BatchIngest:
    def __init__(
        self,
        fences: FenceStore,
        claim_builder: ClaimBuilder,
        mover: HeadMover,
        caller: Callable[[str], Caller],
        ready: Callable[[], None],
        note_refusals: Callable[[Sequence[Refusal]], None],
    ) -> None:
        self._fences = fences
        self._claim_builder = claim_builder
        self._mover = mover
        self._caller = caller
        self._ready = ready
        self._note_refusals = note_refusals

    def stream(
        self, documents: Iterable[Document], size: int, update: Meter, *, dry_run: bool, on_error: OnError
    ) -> Iterator[Receipt]:
        source = iter(documents)
        done = 0
        preview = DryRun(self._fences) if dry_run else None
        while page := list(islice(source, size)):
            errors: dict[int, Exception] | None = {} if on_error == "raise" else None
            with gc_pause.gc_paused():
                receipts = self._batch(page, done, preview, errors)
            if errors:
                first = min(errors)
                yield from receipts[:first]
                raise _at(errors[first], done + first)
            done += len(page)
            update(done)
            yield from receipts

    def each(
        self, given: Sequence[GivenDocument], *, wait_s: float | None = None, route: str = ""
    ) -> list[Receipt | Exception]:
        """Returns the receipt of each document, or its error."""
        caller, tokens = self._caller(route), batch_tokens()
        outcomes: dict[int, Receipt | Exception] = {}
        queries: dict[int, DocumentQuery] = {}
        retractions: dict[int, PreparedDocument] = {}
        retracted: set[bytes] = set()
        behind: dict[int, DocumentQuery] = {}
        """documents that follow a retraction of their own: they are not known any more when it is their turn"""
        for at, (document, _, event_id, api_key, correlation_id) in enumerate(given):
            try:
                if isinstance(document, Retraction):
                    retraction = self._claim_builder.retract(*document, next(tokens), caller, event_id, correlation_id)
                    retractions[at] = retraction
                    retracted.add(retraction.claim.source)
                    continue
                query = self._claim_builder.query(
                    document,
                    next(tokens),
                    caller,
                    event_id=event_id,
                    api_key=api_key,
                    correlation_id=correlation_id,
                )
                (behind if query[0].source in retracted else queries)[at] = query
            except ValidationError as invalid:  # of the document, or of its event_id
                outcomes[at] = invalid
                self._note_refusals([Refusal.of(invalid, caller.route)])
        known: dict[int, Receipt] = {}
        prepared = (
            self._claims(self._unanswered(self._suited(queries), known) | self._suited(behind), caller) | retractions
        )
        outcomes |= known
        waves = list(split_waves(dict(sorted(prepared.items()))))
        for at, each, answer, waited_s in self._mover.answers(waves, wait_s=wait_s):
            if isinstance(answer, Replay | MovedHead):
                outcomes[at] = receipt_of(each, answer)
            else:
                outcomes[at] = error_of(each, answer, given[at].waited_s + waited_s)
        return [outcomes[at] for at in range(len(given))]

    def preview(self, prepared: PreparedDocument) -> Receipt:
        self._ready()
        (receipt,) = DryRun(self._fences).receipts([prepared])
        return receipt

    def _batch(
        self,
        documents: Sequence[Document],
        first: int,
        preview: DryRun | None,
        errors: dict[int, Exception] | None,
    ) -> list[Receipt]:
        """Fills `errors`, if given, with failures by position, and then stops at the first invalid document."""
        caller, tokens = self._caller(""), batch_tokens()
        receipts: dict[int, Receipt] = {}
        queries: dict[int, DocumentQuery] = {}
        invalid_ones: list[DocumentInvalid] = []
        query_of = self._claim_builder.query
        for at, document in enumerate(documents):
            try:
                queries[at] = query_of(document, next(tokens), caller, first + at)
            except DocumentInvalid as invalid:
                receipts[at] = refused_receipt(invalid)
                invalid_ones.append(invalid)
                if errors is not None:
                    errors[at] = invalid
                    break
        if invalid_ones and preview is None:
            self._note_refusals([Refusal.of(invalid, caller.route) for invalid in invalid_ones])
        if preview is not None:
            self._ready()
            prepared = self._claims(queries, caller)
            for at, (each, answer) in zip(prepared, preview.answers(list(prepared.values())), strict=True):
                receipts[at] = receipt_of(each, answer)
                if errors is not None and receipts[at].failed:
                    errors[at] = error_of(each, answer)
        elif left := self._unanswered(self._suited(queries), receipts):
            waves = list(split_waves(self._claims(left, caller)))
            for at, each, answer, waited_s in self._mover.answers(waves):
                receipts[at] = receipt_of(each, answer, waited_s)
                if errors is not None and receipts[at].failed:
                    errors[at] = error_of(each, answer, waited_s)
        answered = [receipts[at] for at in sorted(receipts)]
        if errors is None and preview is None:
            _warn(answered)
        return answered

    def _claims(self, queries: Mapping[int, DocumentQuery], caller: Caller) -> dict[int, PreparedDocument]:
        """Claims with tokens of their own: those of the queries name rows that may already be written."""
        tokens, claim = batch_tokens(), self._claim_builder.claim
        return {at: claim(query, next(tokens), caller) for at, query in queries.items()}

    def _suited(self, queries: dict[int, DocumentQuery]) -> dict[int, DocumentQuery]:
        return self._claim_builder.suited_to(queries, self._fences)

    def _unanswered(self, queries: dict[int, DocumentQuery], receipts: dict[int, Receipt]) -> dict[int, DocumentQuery]:
        """Adds the receipts of documents that are live just as they were sent, usually most; returns the others."""
        left: dict[int, DocumentQuery] = {}
        known = self._fences.replays([query[0] for query in queries.values()])
        try:  # the receipts are made while the store writes the rows
            for (at, query), record in zip(queries.items(), known.records, strict=True):
                if record is None:
                    left[at] = query
                else:
                    receipts[at] = replay_receipt(query[0][0], record)
            known.settle()
        finally:
            known.discard()
        return left


def _at(error: Exception, position: int) -> Exception:
    if isinstance(error, RagfenceError):
        error.details["position"] = position
    return error


def _warn(receipts: Sequence[Receipt]) -> None:
    """Logs one line for a batch, for callers that ignore receipts. Stale documents are left out: they are expected."""
    failed = [receipt for receipt in receipts if receipt.failure is not None and receipt.decision is not STALE]
    if failed and (first := failed[0].failure):
        message = "%d of %d documents were not ingested; the first: %s [%s]"
        _log.warning(message, len(failed), len(receipts), first["message"], first["code"])
