"""`dry_run=True`: what would happen to documents, without a claim, a write or a decision row."""

from __future__ import annotations

from collections.abc import Sequence

from ragfence.core.decisions import Granted, NotReady, settle_claim
from ragfence.core.receipts import Receipt
from ragfence.core.rows import NO_FENCE
from ragfence.documents.moving import effect_of, receipt_of
from ragfence.documents.preparing import Prepared
from ragfence.engine.segments import Failed, Moved, flags_of
from ragfence.stores.fences import FenceStore, Lookup


def foreseen(fences: FenceStore, documents: Sequence[Prepared]) -> list[Receipt]:
    """The receipts that these documents would get now. New ones are chunked, so that their snippet_ids are told."""
    claims = [each.claim for each in documents]
    held = fences.read([Lookup(claim.key, claim.mode, claim.source) for claim in claims])
    now_ms = fences.now_ms()
    receipts = []
    for document, claim, found in zip(documents, claims, held, strict=True):
        verdict, _ = settle_claim(found, claim, now_ms, stamp=0, next_fence=lambda: NO_FENCE)
        if isinstance(verdict, Granted):
            receipts.append(_granted(document, verdict))
        else:
            assert not isinstance(verdict, NotReady)  # a store says that, never a decision
            receipts.append(receipt_of(document, verdict))
    return receipts


def _granted(document: Prepared, grant: Granted) -> Receipt:
    try:
        effected = effect_of(document)(document, grant)
    except Exception as error:  # noqa: BLE001  # as when it would be ingested
        return receipt_of(document, Failed(error))
    record = grant.record._replace(result=effected.result)
    return receipt_of(document, Moved(record, grant.prior is not None, flags_of(grant, document.claim), grant.takeover))
