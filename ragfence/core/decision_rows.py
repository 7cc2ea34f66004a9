"""Decision rows: what was decided, for which caller, and why; in one binary form that Python and Lua write.

`layout.py` says where its bytes are. `row_id` is the token of the attempt and the position of the call within it, so a
row that is written twice (a lost reply, a repeated drain) is the same row. `context` is the canonical JSON of what only
the caller knows.

This module also decides which row each answer leaves behind. Pure; the Lua scripts write the same rows.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any

from ragfence.core.decisions import (
    QUARANTINED,
    Claim,
    ConflictVerdict,
    Fenced,
    Granted,
    InFlightVerdict,
    LeaseRef,
    NotReadyVerdict,
    Replay,
    Seal,
    Sealed,
    SealOutcome,
    StaleVerdict,
    Verdict,
)
from ragfence.core.layout import (
    FENCED_OUT,
    FENCED_POSITION,
    HEALED,
    JOURNALED,
    MAX_SHORT_BYTES,
    METADATA_UPDATED,
    NO_TOKEN,
    RELEASE_POSITION,
    REVIVED,
    ROW_VERSION,
    SEAL_POSITION,
    TAKEOVER,
    RowKind,
    fence_fields,
    fence_from_fields,
    from_six_bytes,
    long_at,
    long_size,
    row_header,
    short_at,
    six_bytes,
)
from ragfence.core.operations import FenceNumber, Operation
from ragfence.core.receipts import Decision
from ragfence.core.records import KeyRecord
from ragfence.errors import FencedOut, FormatCorrupt, FormatTooNew

_quoted: Callable[[str], str] = json.encoder.encode_basestring
"""as json.dumps(..., ensure_ascii=False) does it; a row is written for every call, and that costs three times"""
NO_FENCE = FenceNumber(0, 0)


DECISION_TEXT = {
    RowKind.NEW: Decision.NEW.value,
    RowKind.DUPLICATE: Decision.DUPLICATE.value,
    RowKind.CONFLICT: Decision.CONFLICT.value,
    RowKind.IN_FLIGHT: Decision.IN_FLIGHT.value,
    RowKind.STALE: Decision.STALE.value,
    RowKind.ENDED: "ended",
}


class Phase(StrEnum):
    """Which step in the life of a key a row records. A decision alone does not tell a claim from its seal."""

    CLAIM = "claim"
    """a claim was granted; what came of it is another row"""
    SEAL = "seal"
    """the attempt ended with an outcome, and its caller was answered with it"""
    REPLAY = "replay"
    """answered with an outcome that was sealed before"""
    CONFLICT = "conflict"
    IN_FLIGHT = "in_flight"
    STALE = "stale"
    RELEASE = "release"
    """the attempt ended without an outcome"""
    LATE_SEAL = "late_seal"
    """a seal came too late, its lease was gone; the answer to its caller is another row, or an error"""
    END = "end"
    """the life of a sealed key ended"""


ANSWER_PHASES = (Phase.SEAL, Phase.REPLAY, Phase.CONFLICT, Phase.IN_FLIGHT, Phase.STALE)
"""rows that answered a caller: counting these counts no call twice (a call that waits has an in_flight row besides)"""
_ENDS_OF_ATTEMPTS = {FENCED_POSITION: Phase.LATE_SEAL, SEAL_POSITION: Phase.SEAL, RELEASE_POSITION: Phase.RELEASE}
_ELSEWHERE = {
    RowKind.NEW: Phase.CLAIM,
    RowKind.DUPLICATE: Phase.REPLAY,
    RowKind.CONFLICT: Phase.CONFLICT,
    RowKind.IN_FLIGHT: Phase.IN_FLIGHT,
    RowKind.STALE: Phase.STALE,
    RowKind.ENDED: Phase.END,
}


def phase_of(kind: RowKind, position: int) -> Phase:
    """Derived, not stored, so that rows written before phases had a name have one too."""
    if kind in (RowKind.NEW, RowKind.DUPLICATE) and position in _ENDS_OF_ATTEMPTS:
        return _ENDS_OF_ATTEMPTS[position]
    return _ELSEWHERE[kind]


FLAG_TEXT = {
    TAKEOVER: "takeover",
    HEALED: "healed",
    REVIVED: "revived",
    METADATA_UPDATED: "metadata_updated",
    FENCED_OUT: "fenced_out",
    JOURNALED: "journaled",
}

CONTEXT_FIELDS = (
    "kind",
    "source_type",
    "source_id",
    "revision",
    "index_hash",
    "action",
    "event_id",
    "correlation_id",
    "owner",
    "run_id",
    "route",
    "origin",
    "api_key",
    "diff_size",
    "saved",
)


@dataclass(frozen=True, slots=True)
class Row:
    token: bytes
    position: int
    ts_ms: int
    kind: RowKind
    key: bytes
    fingerprint: bytes
    flags: int = 0
    attempt: int = 0
    fence: FenceNumber = NO_FENCE
    first_seen_ms: int = 0
    sealed_at_ms: int = 0
    expires_ms: int = 0
    waited_ms: int = 0
    winner: bytes = NO_TOKEN
    effect_id: str = ""
    error_code: str = ""
    context: bytes = b"{}"

    @property
    def row_id(self) -> str:
        return f"{self.token.hex()}{self.position:02x}"

    @property
    def phase(self) -> Phase:
        return phase_of(self.kind, self.position)

    def encode(self) -> bytes:
        head = row_header.pack(
            ROW_VERSION,
            self.token,
            self.position,
            *six_bytes(self.ts_ms),
            self.kind,
            self.flags,
            self.waited_ms,
            *six_bytes(self.expires_ms),
            self.key,
            self.fingerprint,
            self.winner,
            *fence_fields(self.fence),
            self.attempt,
            *six_bytes(self.first_seen_ms),
            *six_bytes(self.sealed_at_ms),
        )
        effect_id, error = self.effect_id.encode()[:MAX_SHORT_BYTES], self.error_code.encode()[:MAX_SHORT_BYTES]
        return b"".join(
            (
                head,
                bytes((len(effect_id),)),
                effect_id,
                bytes((len(error),)),
                error,
                long_size(len(self.context)),
                self.context,
            )
        )

    def columns(self) -> dict[str, Any]:
        """The row as people see it: DESIGN's names, text and numbers only."""
        values: dict[str, Any] = dict.fromkeys(CONTEXT_FIELDS)
        values.update(json.loads(self.context))
        values.update(
            row_id=self.row_id,
            ts=self.ts_ms,
            decision=DECISION_TEXT[self.kind],
            phase=self.phase.value,
            flags=[text for bit, text in FLAG_TEXT.items() if self.flags & bit],
            idempotency_key=self.key.hex(),
            payload_hash=self.fingerprint.hex(),
            effect_id=self.effect_id or None,
            attempt=self.attempt,
            fence=str(self.fence) if self.fence.epoch else None,
            winner=self.winner.hex() if self.winner != NO_TOKEN else None,
            first_seen=self.first_seen_ms or None,
            sealed_at=self.sealed_at_ms or None,
            expires_at=self.expires_ms or None,
            waited_ms=self.waited_ms,
            error_code=self.error_code or None,
        )
        return values


def decode_rows(data: bytes) -> Iterator[Row]:
    """Rows stand one behind the other: a stream entry holds those of a whole batch."""
    at = 0
    try:
        while at < len(data):
            row, at = _decode_one(data, at)
            yield row
    except (struct.error, IndexError, ValueError) as broken:
        raise FormatCorrupt(f"{len(data)} bytes are not valid decision rows: {broken}") from broken


def _decode_one(data: bytes, at: int) -> tuple[Row, int]:
    if data[at] > ROW_VERSION:
        raise FormatTooNew(f"a decision row has format {data[at]}; this ragfence knows {ROW_VERSION}")
    _, token, position, th, tl, kind, flags, waited, eh, el, key, fingerprint, winner, *rest = row_header.unpack_from(
        data, at
    )
    high, low, attempt, fh, fl, sh, sl = rest
    effect_id, at = short_at(data, at + row_header.size)
    error_code, at = short_at(data, at)
    context, end = long_at(data, at)
    if end > len(data):
        raise IndexError("cut off")
    row = Row(
        token=token,
        position=position,
        ts_ms=from_six_bytes(th, tl),
        kind=RowKind(kind),
        key=key,
        fingerprint=fingerprint,
        flags=flags,
        attempt=attempt,
        fence=fence_from_fields(high, low),
        first_seen_ms=from_six_bytes(fh, fl),
        sealed_at_ms=from_six_bytes(sh, sl),
        expires_ms=from_six_bytes(eh, el),
        waited_ms=waited,
        winner=winner,
        effect_id=effect_id.decode(errors="replace"),
        error_code=error_code.decode(errors="replace"),
        context=context,
    )
    return row, end


def context_of(operation: Operation, **known: str | int | None) -> bytes:
    """The caller's part of a row. Empty fields are left out: most rows are small."""
    context = f'{_told_of(operation.kind, operation.source_type)}"source_id":{_quoted(operation.source_id)}'
    if text := operation.revision:
        context += f',"revision":{_quoted(text)}'
    if text := operation.index_hash:
        context += f',"index_hash":{_quoted(text)}'
    if text := operation.action:
        context += f',"action":{_quoted(text)}'
    for field, value in known.items():
        if value:
            context += f',"{field}":{_quoted(value) if isinstance(value, str) else value}'
    return f"{context}}}".encode()


@lru_cache(maxsize=256)
def _told_of(kind: str, source_type: str) -> str:
    """How the context of all operations of a kind begins."""
    return f'{{"kind":{_quoted(kind)},' + (f'"source_type":{_quoted(source_type)},' if source_type else "")


def with_context(row: Row, **known: str | int | None) -> Row:
    """The row with more of what only the caller knows."""
    values = json.loads(row.context) | {field: value for field, value in known.items() if value}
    return replace(row, context=json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode())


FENCED_CODE = FencedOut.code


def row_for_claim(claim: Claim, verdict: Verdict, now_ms: int) -> Row | None:
    """None: the claim was not answered, or its caller writes the row itself once the diff is known."""
    match verdict:
        case NotReadyVerdict():
            return None
        case Granted(record, takeover):
            return row_for_answer(claim, RowKind.NEW, record, now_ms, flags=TAKEOVER if takeover else 0)
        case Replay(found):
            return row_for_answer(claim, RowKind.DUPLICATE, found, now_ms)
        case ConflictVerdict(found):
            return row_for_answer(claim, RowKind.CONFLICT, found, now_ms) if claim.row_on_conflict else None
        case InFlightVerdict(_, record, quarantined):
            error = QUARANTINED if quarantined else ""
            return row_for_answer(claim, RowKind.IN_FLIGHT, record, now_ms, error=error)
        case StaleVerdict():
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
        winner=record.token if record and kind is not RowKind.CONFLICT else NO_TOKEN,
        effect_id=record.effect_id if record and sealed else "",
        error_code=error,
        context=claim.context,
    )


def performed_twice(seal: Seal, standing: KeyRecord | None, *, solo: bool) -> bool:
    """Whether a seal that came too late tells of an effect that another attempt performs, or has performed, as well.

    With an object store the commit decides: a lease that was merely taken over is no sign yet, since the next owner
    finds the commit. Nor is what stands there any, if it is the very effect that was to be sealed.
    """
    own = seal.token if seal.winner == NO_TOKEN else seal.winner
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
        case NotReadyVerdict():
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
