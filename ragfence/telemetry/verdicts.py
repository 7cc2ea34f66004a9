"""What an answer of a fence store means for those who count. Pure.

`decisions_total` of the metrics, log lines and the ledger agree: all count the decision rows that an answer leaves
behind. A claim that was granted is no decision yet; its seal is.
"""

from __future__ import annotations

from ragfence.core.decision_rows import DECISION_TEXT, FENCED_OUT, HEALED, RELEASE_POSITION, Row, RowKind
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
from ragfence.core.ledger import performed_twice
from ragfence.core.receipts import Decision

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


def decision_of_seal(seal: Seal, outcome: SealOutcome, *, solo: bool) -> str | None:
    """None: nothing was decided by it, or whoever sent it writes the row."""
    match outcome:
        case Sealed():
            return DUPLICATE if seal.duplicate else NEW
        case Fenced(record) if performed_twice(seal, record, solo=solo):
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

    A seal says it itself (FENCED_OUT) when its commit had come too late.
    """
    if seal.flags & FENCED_OUT:
        return True
    return isinstance(outcome, Fenced) and performed_twice(seal, outcome.record, solo=solo)


def outcome_of(seal: Seal) -> str:
    """Of a seal that counts: what it says of the effect."""
    if seal.duplicate:
        return "healed" if seal.flags & HEALED else "moved"
    return "failed" if seal.failed else "created"


def seen_before_ms(granted: Granted, claim: Claim) -> int:
    """How long the key had been known when the claim was granted, by the clock of the store."""
    return max(granted.record.when_ms - claim.lease_ms - granted.record.first_seen_ms, 0)
