"""Which decision row each answer leaves behind. Pure; the Lua scripts write the same rows."""

from __future__ import annotations

from ragfence.core.decision_rows import (
    FENCED_OUT,
    FENCED_POSITION,
    NO_FENCE,
    RELEASE_POSITION,
    SEAL_POSITION,
    TAKEOVER,
    Row,
    RowKind,
)
from ragfence.core.decisions import (
    NOBODY,
    QUARANTINED,
    Claim,
    Conflict,
    Fenced,
    Granted,
    InFlight,
    LeaseRef,
    NotReady,
    Replay,
    Seal,
    Sealed,
    SealOutcome,
    Stale,
    Verdict,
)
from ragfence.core.records import KeyRecord
from ragfence.errors import FencedOut

FENCED_CODE = FencedOut.code


def row_for_claim(claim: Claim, verdict: Verdict, now_ms: int) -> Row | None:
    """None: the claim was not answered, or its caller writes the row itself once the diff is known."""
    match verdict:
        case NotReady():
            return None
        case Granted(record, takeover):
            return row_for_answer(claim, RowKind.NEW, record, now_ms, flags=TAKEOVER if takeover else 0)
        case Replay(found):
            return row_for_answer(claim, RowKind.DUPLICATE, found, now_ms)
        case Conflict(found):
            return row_for_answer(claim, RowKind.CONFLICT, found, now_ms) if claim.row_on_conflict else None
        case InFlight(_, record, quarantined):
            error = QUARANTINED if quarantined else ""
            return row_for_answer(claim, RowKind.IN_FLIGHT, record, now_ms, error=error)
        case Stale():
            return row_for_answer(claim, RowKind.STALE, None, now_ms)


def row_for_answer(
    claim: Claim, kind: RowKind, record: KeyRecord | None, now_ms: int, *, flags: int = 0, error: str = ""
) -> Row:
    sealed = record is not None and record.ended
    return Row(
        token=claim.token,
        position=claim.position,
        ts_ms=now_ms,
        kind=kind,
        key=claim.key,
        fingerprint=claim.fingerprint,
        flags=flags,
        attempt=record.attempt if record else 0,
        fence=record.fence if record else NO_FENCE,
        first_seen_ms=record.first_seen_ms if record else 0,
        # A claim that is granted has sealed nothing yet, whatever the key's earlier life was.
        sealed_at_ms=record.when_ms if record and sealed and kind is not RowKind.NEW else 0,
        waited_ms=claim.waited_ms,
        winner=record.token if record and kind is not RowKind.CONFLICT else NOBODY,
        effect_id=record.effect_id if record and sealed else "",
        error_code=error,
        context=claim.context,
    )


def performed_twice(seal: Seal, standing: KeyRecord | None, *, solo: bool) -> bool:
    """Whether a seal that came too late tells of an effect that another attempt performs, or has performed, as well.

    With an object store the commit decides: a lease that was merely taken over is no sign yet, since the next owner
    finds the commit. Nor is what stands there any, if it is the very effect that was to be sealed.
    """
    own = seal.token if seal.winner == NOBODY else seal.winner
    return standing is not None and standing.token != own and (solo or standing.ended)


def row_for_seal(seal: Seal, outcome: SealOutcome, now_ms: int, *, solo: bool) -> Row | None:
    """None: what came of it is another row, by whoever sent the seal."""
    match outcome:
        case Sealed(record):
            flags, error = seal.flags, record.error if seal.failed else ""
            expires_ms = now_ms + seal.ttl_ms if seal.ttl_ms else 0
        case Fenced(standing):
            if standing is None or not performed_twice(seal, standing, solo=solo):
                return None
            record, flags, error, expires_ms = standing, seal.flags | FENCED_OUT, FENCED_CODE, 0
        case NotReady():
            return None
    fenced = isinstance(outcome, Fenced)
    return Row(
        token=seal.token,
        position=FENCED_POSITION if fenced else SEAL_POSITION,
        ts_ms=now_ms,
        kind=RowKind.DUPLICATE if seal.duplicate or fenced else RowKind.NEW,
        key=seal.key,
        fingerprint=record.fingerprint,
        flags=flags,
        attempt=record.attempt,
        fence=seal.fence if not fenced else record.fence,
        first_seen_ms=record.first_seen_ms,
        sealed_at_ms=record.when_ms if record.ended else 0,
        expires_ms=expires_ms,
        waited_ms=seal.waited_ms,
        winner=record.token,
        effect_id=record.effect_id,
        error_code=error,
        context=seal.context,
    )


def row_for_release(lease: LeaseRef, record: KeyRecord, error: str, now_ms: int) -> Row:
    return Row(
        token=lease.token,
        position=RELEASE_POSITION,
        ts_ms=now_ms,
        kind=RowKind.NEW,
        key=lease.key,
        fingerprint=record.fingerprint,
        attempt=record.attempt,
        fence=record.fence,
        first_seen_ms=record.first_seen_ms,
        winner=lease.token,
        error_code=error or "RELEASED",
        context=lease.context,
    )
