"""Refused claims: their errors, with what the caller should know, and their decision rows."""

from __future__ import annotations

import json
from typing import NamedTuple

from ragfence.core.decision_rows import row_for_answer, with_context
from ragfence.core.decisions import DOCUMENT, LOCK, Claim, InFlightVerdict
from ragfence.core.diffs import payload_diff
from ragfence.core.layout import CONFLICT_POSITION, RowKind
from ragfence.core.policy import Policy
from ragfence.core.receipts import Decision, Flags
from ragfence.core.records import KeyRecord
from ragfence.engine.leases import current
from ragfence.engine.requests import Request
from ragfence.engine.results import Results
from ragfence.errors import (
    CommitUncertain,
    NestedClaim,
    Quarantined,
    RagfenceError,
    StoreAuth,
    StoreUnavailable,
    StoreUnsafe,
    TransientError,
    ValidationError,
)
from ragfence.errors import Conflict as ConflictError
from ragfence.errors import InFlight as InFlightError
from ragfence.errors import NotReady as NotReadyError
from ragfence.errors import Stale as StaleError
from ragfence.stores.fences import FenceStore


class Refusal(NamedTuple):
    """A document that cannot be ingested. It has no key, so there is no decision row of it."""

    doc_id: str
    code: str
    message: str
    route: str

    @classmethod
    def of(cls, error: RagfenceError, route: str) -> Refusal:
        return cls(str(error.details.get("doc_id") or ""), error.code, error.message, route)


class Refusals:
    def __init__(self, fences: FenceStore, results: Results, policy: Policy) -> None:
        self._fences = fences
        self._results = results
        self._max_diff_bytes = policy.on_conflict.max_diff_bytes

    def conflict(self, request: Request, claim: Claim, record: KeyRecord | None) -> ConflictError:
        """Returns the error, with the diff of the redacted payloads; writes the row unless the store has written it."""
        diff = None
        if request.diff_wanted and record is not None and record.payload and request.kept_payload:
            before, after = json.loads(record.payload), json.loads(request.kept_payload)
            diff = payload_diff(before, after, max_bytes=self._max_diff_bytes)
        if not claim.row_on_conflict or claim.position == CONFLICT_POSITION:
            row = row_for_answer(claim, RowKind.CONFLICT, record, self._fences.now_ms())
            # Both payloads were redacted before they were compared.
            patch = json.dumps(list(diff.patch), ensure_ascii=False, separators=(",", ":")) if diff else ""
            self._fences.record([with_context(row, diff_size=diff.size if diff else 0, diff=patch)])
        what = "is known with another payload" if record else "has its sequence taken by another revision"
        return ConflictError(
            f"{request.operation.kind} {request.operation.source_id!r} {what}",
            key=request.key_text,
            diff=list(diff.patch) if diff else None,
            receipt=self._results.receipt(request.key, record, Decision.CONFLICT, Flags())
            if record is not None and record.ended
            else None,
        )

    def stale(self, request: Request, newest: int) -> StaleError:
        sequence = request.operation.sequence
        return StaleError(
            f"{request.operation.kind} {request.operation.source_id!r} is at sequence {newest}, {sequence} is older",
            key=request.key_text,
            sequence=sequence,
            newest=newest,
        )

    def quarantined(self, request: Request, verdict: InFlightVerdict) -> Quarantined:
        return Quarantined(
            f"{request.key_text} failed {verdict.record.attempt} times, last with "
            f"{verdict.record.error or 'a lost lease'}",
            key=request.key_text,
            attempt=verdict.record.attempt,
            error_code=verdict.record.error,
        )

    def in_flight(self, request: Request, verdict: InFlightVerdict, waited_ms: int) -> InFlightError:
        left_ms = max(verdict.until_ms - self._fences.now_ms(), 0)
        if request.mode is LOCK:
            holder = verdict.record.owner or "another caller"
            return InFlightError(
                f"the lock {request.operation.source_id!r} is held by {holder} for another {left_ms / 1000:.1f} s,"
                " unless it renews it",
                key=request.key_text,
                retry_after_ms=left_ms,
                waited_ms=waited_ms,
                holder=holder,
                hint="wait longer with wait_s, or try again later",
            )
        return InFlightError(
            f"{request.operation.kind} {request.operation.source_id!r} is being executed by "
            f"{verdict.record.owner or 'another caller'} (attempt {verdict.record.attempt})",
            key=request.key_text,
            retry_after_ms=left_ms,
            waited_ms=waited_ms,
        )


def refuse_nested(request: Request) -> None:
    """Refuses a claim inside the effect of its own key or ordered source: it would wait for itself forever."""
    for lease in current.get():
        if lease.ended:
            continue  # a task or thread that outlived the effect it was started in
        same_source = request.source and lease.ref.source == request.source
        if lease.ref.key == request.key or same_source:
            raise NestedClaim(
                f"{request.operation.kind} {request.operation.source_id!r} is claimed inside its own effect",
                key=request.key_text,
            )


def refuse_reserved(request: Request) -> None:
    """Refuses what only a guard or `fence.lock` may claim."""
    if request.mode is LOCK:
        raise ValidationError(
            f"kind 'lock' with action {request.operation.action!r} belongs to fence.lock",
            hint="use `with fence.lock(name):`, or another kind",
        )
    if request.mode is DOCUMENT:
        raise ValidationError(
            f"kind 'document' with action {request.operation.action!r} belongs to fence.documents",
            hint="call fence.documents.ingest(...) or retract(...), or use another kind",
        )


STORE_CODES: dict[type[RagfenceError], str] = {
    StoreUnavailable: "STORE.unavailable",
    CommitUncertain: "STORE.commit_uncertain",
    NotReadyError: "STORE.not_ready",
    StoreAuth: "STORE.auth",
    StoreUnsafe: "STORE.unsafe",
}
"""The codes of attempts that failed because of a store, in records and rows, so that all can be found at once."""


def code_of(error: BaseException) -> str:
    """Returns the error code that a record stores: ragfence's stable code, or the name of the class. Never the message.

    The `code` of other libraries' errors is not used: it may have any type, such as an HTTP status.
    """
    for kind, code in STORE_CODES.items():
        if isinstance(error, kind):
            return code
    return (error.code if isinstance(error, RagfenceError) else type(error).__name__)[:100]


def is_outage(error: BaseException | None) -> bool:
    """Whether an attempt failed because of its environment, and may succeed unchanged later."""
    return isinstance(error, (TransientError, *STORE_CODES))
