"""What an answer of a fence store means for those who count. Pure.

`decisions_total` of the metrics, log lines and the ledger agree: all count the decision rows that an answer leaves
behind. A claim that was granted is no decision yet; its seal is.
"""

from __future__ import annotations

from ragfence.core.decisions import (
    Claim,
    Conflict,
    Fenced,
    Granted,
    InFlight,
    Replay,
    Seal,
    Sealed,
    SealOutcome,
    Stale,
    Verdict,
)
from ragfence.core.receipts import Decision
from ragfence.core.rows import DECISION_TEXT, FENCED_OUT, HEALED, RELEASE_POSITION, Row, RowKind

NEW, DUPLICATE, CONFLICT = Decision.NEW.value, Decision.DUPLICATE.value, Decision.CONFLICT.value
IN_FLIGHT, STALE = Decision.IN_FLIGHT.value, Decision.STALE.value


def decision_of_claim(claim: Claim, verdict: Verdict) -> str | None:
    """None: nothing is decided yet, or whoever claimed writes the row himself."""
    match verdict:
        case Replay():
            return DUPLICATE
        case InFlight():
            return IN_FLIGHT
        case Conflict():
            return CONFLICT if claim.row_on_conflict else None
        case Stale():
            return STALE
        case _:
            return None


def decision_of_seal(seal: Seal, outcome: SealOutcome) -> str | None:
    """None: the store forgot what the seal was about, so nothing was decided."""
    match outcome:
        case Sealed():
            return DUPLICATE if seal.duplicate else NEW
        case Fenced(record) if record is not None:
            return DUPLICATE
        case _:
            return None


def decision_of_row(row: Row) -> str | None:
    """Of a row that was not made by a claim or a seal; None for those that answer nobody."""
    if row.kind is RowKind.ENDED or row.position == RELEASE_POSITION:
        return None
    return DECISION_TEXT[row.kind]


def doubled(seal: Seal, outcome: SealOutcome, *, solo: bool) -> bool:
    """The effect was performed, and so was, or will be, that of another attempt; this one does not count.

    With an object store the commit decides: a lease that was merely taken over is no sign yet, since the next owner
    finds the commit. A seal says it itself (FENCED_OUT) when its commit had come too late.
    """
    if seal.flags & FENCED_OUT:
        return True
    if not isinstance(outcome, Fenced) or outcome.record is None or outcome.record.token == seal.token:
        return False
    return solo or outcome.record.ended


def outcome_of(seal: Seal) -> str:
    """Of a seal that counts: what it says of the effect."""
    if seal.duplicate:
        return "healed" if seal.flags & HEALED else "moved"
    return "failed" if seal.failed else "created"


def seen_before_ms(granted: Granted, claim: Claim) -> int:
    """How long the key had been known when the claim was granted, by the clock of the store."""
    return max(granted.record.when_ms - claim.lease_ms - granted.record.first_seen_ms, 0)
