"""Many documents in one call: asked about together, answered at once where they are known, moved where they are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from ragfence.core.decisions import Replay
from ragfence.core.receipts import Receipt
from ragfence.documents.document import Document
from ragfence.documents.foresight import Foresight
from ragfence.documents.moving import Mover, error_of, receipt_of, refused, replayed
from ragfence.documents.preparing import Asked, Caller, Given, Prepared, Preparing, in_waves
from ragfence.documents.progress import Meter
from ragfence.engine import collecting
from ragfence.engine.segments import Moved, batch_tokens
from ragfence.errors import DocumentInvalid, ValidationError
from ragfence.stores.fences import FenceStore


class Batches:
    def __init__(
        self,
        fences: FenceStore,
        preparing: Preparing,
        mover: Mover,
        caller: Callable[[], Caller],
        ready: Callable[[], None],
    ) -> None:
        self._fences = fences
        self._preparing = preparing
        self._mover = mover
        self._caller = caller
        self._ready = ready

    def streamed(self, documents: Iterable[Document], size: int, told: Meter, *, dry_run: bool) -> Iterator[Receipt]:
        source = iter(documents)
        done = 0
        foresight = Foresight(self._fences) if dry_run else None
        while page := list(islice(source, size)):
            with collecting.held_off():
                receipts = self._batch(page, done, foresight)
            done += len(page)
            told(done)
            yield from receipts

    def each(self, given: Sequence[Given], *, wait_s: float | None = None) -> list[Receipt | Exception]:
        """The receipt of each, or its error."""
        caller, tokens = self._caller(), batch_tokens()
        outcomes: dict[int, Receipt | Exception] = {}
        asks: dict[int, Asked] = {}
        for at, (document, _, event_id) in enumerate(given):
            try:
                asks[at] = self._preparing.ask(document, next(tokens), caller, event_id=event_id)
            except ValidationError as invalid:  # of the document, or of its event_id
                outcomes[at] = invalid
        known: dict[int, Receipt] = {}
        prepared = self._claimed(self._unanswered(asks, known), caller)
        outcomes |= known
        for at, each, answer, waited_s in self._mover.answers(list(in_waves(prepared)), wait_s=wait_s):
            if isinstance(answer, Replay | Moved):
                outcomes[at] = receipt_of(each, answer)
            else:
                outcomes[at] = error_of(each, answer, given[at].waited_s + waited_s)
        return [outcomes[at] for at in range(len(given))]

    def foreseen(self, prepared: Prepared) -> Receipt:
        self._ready()
        (receipt,) = Foresight(self._fences).receipts([prepared])
        return receipt

    def _batch(self, documents: Sequence[Document], first: int, foresight: Foresight | None) -> list[Receipt]:
        caller, tokens = self._caller(), batch_tokens()
        receipts: dict[int, Receipt] = {}
        asks: dict[int, Asked] = {}
        ask = self._preparing.ask
        for at, document in enumerate(documents):
            try:
                asks[at] = ask(document, next(tokens), caller, first + at)
            except DocumentInvalid as invalid:
                receipts[at] = refused(invalid)
        if foresight is not None:
            self._ready()
            prepared = self._claimed(asks, caller)
            receipts |= zip(prepared, foresight.receipts(list(prepared.values())), strict=True)
        elif left := self._unanswered(asks, receipts):
            receipts |= self._mover.move(list(in_waves(self._claimed(left, caller))))
        return [receipts[at] for at in range(len(documents))]

    def _claimed(self, asks: Mapping[int, Asked], caller: Caller) -> dict[int, Prepared]:
        """By tokens of their own: those of the questions name rows that may be written already."""
        tokens, claimed = batch_tokens(), self._preparing.claimed
        return {at: claimed(asked, next(tokens), caller) for at, asked in asks.items()}

    def _unanswered(self, asks: dict[int, Asked], receipts: dict[int, Receipt]) -> dict[int, Asked]:
        """Answers the documents that are live just as they were sent, which most are; returns the others."""
        left: dict[int, Asked] = {}
        known = self._fences.replays([asked[0] for asked in asks.values()])
        try:  # the receipts are made while the store writes the rows
            for (at, asked), record in zip(asks.items(), known.records, strict=True):
                if record is None:
                    left[at] = asked
                else:
                    receipts[at] = replayed(asked[0][0], record)
            known.settle()
        finally:
            known.drop()
        return left
