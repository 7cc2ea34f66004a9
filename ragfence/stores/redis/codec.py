"""How claims, seals and leases travel to the Lua scripts, and how their answers come back. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ragfence.core.decisions import (
    KEYED,
    LOCK,
    Claim,
    ConflictVerdict,
    Fenced,
    Granted,
    HeadQuery,
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
    ANSWERED,
    DIGEST_BYTES,
    FINGERPRINT_BYTES,
    METADATA_HASH_BYTES,
    RECORD_VERSION,
    ROW_VERSION,
    TOKEN_BYTES,
    Fields,
    RowKind,
    fence_fields,
    is_ended,
    long_at,
    long_size,
    pack_epoch,
    pack_ms,
    replay_row_start,
    short,
    short_effect_id,
    six_bytes,
)
from ragfence.core.operations import encoded
from ragfence.core.records import KeyRecord, SourceRecord, decode_record
from ragfence.errors import REHYDRATE, FormatCorrupt, FormatTooNew

CLAIM_START = Fields(
    mode="B",
    flags="B",
    token=f"c{TOKEN_BYTES}",
    position="B",
    waited="I4",
    digest=f"c{DIGEST_BYTES}",
    fingerprint=f"c{FINGERPRINT_BYTES}",
    sequence="q",
    metadata_hash=f"c{METADATA_HASH_BYTES}",
)
CLAIM_TERMS = Fields(lease="I6", max_attempts="I2", pending_ttl="I6", source_ttl="I6")
CLAIM = CLAIM_START + CLAIM_TERMS
"""then kind and owner (length:1 + bytes), payload and context (length:4 + bytes)"""
CLAIM_SEQUENCE, CLAIM_RETRACT, CLAIM_ROW_ON_CONFLICT = 1, 2, 4
SEAL = Fields(
    mode="B",
    flags="B",
    token=f"c{TOKEN_BYTES}",
    digest=f"c{DIGEST_BYTES}",
    epoch="I7",
    counter="I5",
    sequence="q",
    metadata_hash=f"c{METADATA_HASH_BYTES}",
    ttl="I6",
    source_ttl="I6",
    row_flags="B",
    waited="I4",
    winner=f"c{TOKEN_BYTES}",
)
"""then error and effect_id (length:1 + bytes), result and context (length:4 + bytes)"""
SEAL_SEQUENCE, SEAL_FAILED, SEAL_LIVE, SEAL_DUPLICATE = 1, 2, 4, 8
LEASE_CALL = Fields(
    mode="B",
    token=f"c{TOKEN_BYTES}",
    digest=f"c{DIGEST_BYTES}",
    epoch="I7",
    lease="I6",
    pending_ttl="I6",
    source_ttl="I6",
)
"""then context (length:4 + bytes)"""

ANSWER = Fields(count="I4", size="I2")
"""then the label, of that size"""

_claim_start, _claim_terms = CLAIM_START.struct(), CLAIM_TERMS.struct()
_seal = SEAL.struct(raw=("ttl", "source_ttl"))
_lease = LEASE_CALL.struct(raw=("epoch",))
_answer = ANSWER.struct().pack
_sequence = struct.Struct(">q")
_replay_row_start = replay_row_start.pack
_no_error_then_size = struct.Struct(">xI").pack
_DUPLICATE = int(RowKind.DUPLICATE)
_tuple = tuple.__new__


class Names:
    """Redis keys of one tenant. The hash tag keeps everything of a shard in one cluster slot."""

    def __init__(self, tenant: str) -> None:
        self.tenant = encoded(tenant)
        self.prefixes = [b"rf{%s:%02x}" % (self.tenant.encode(), shard) for shard in range(64)]
        self.markers = [prefix + b"m" for prefix in self.prefixes]
        self.counters = [prefix + b"n" for prefix in self.prefixes]
        self.rows = [prefix + b"r" for prefix in self.prefixes]
        self.moves = [prefix + b"v" for prefix in self.prefixes]
        self.counts = [prefix + b"c" for prefix in self.prefixes]
        self.pending = [prefix + b"p" for prefix in self.prefixes]
        """keys without an outcome, by when they expire"""
        self.leased = [prefix + b"q" for prefix in self.prefixes]
        """the same of sources"""
        self.records = [prefix + b"k" for prefix in self.prefixes]
        """how the names of records begin; their digest follows"""

    def record(self, key: bytes) -> bytes:
        return self.records[key[0]] + key[1:]

    def source(self, shard: int, source: bytes) -> bytes:
        return self.prefixes[shard] + b"s" + source

    def tallies(self, shard: int, day: int) -> bytes:
        return b"%bh%d" % (self.prefixes[shard], day)

    def lock(self, name: str) -> bytes:
        return b"rf{%s}l" % self.tenant.encode() + name.encode()

    def pattern(self, what: bytes, shard: int | None = None) -> bytes:
        # Exactly two digits: after a `*` any `}k` inside a binary name would do as well.
        prefix = b"rf{%s:??}" % self.tenant.encode() if shard is None else self.prefixes[shard]
        return prefix + what + b"*"

    def shard_of(self, name: bytes) -> int:
        at = name.index(b"}")
        return int(name[at - 2 : at], 16)

    def keys_of(self, what: Claim | Seal | LeaseRef) -> list[bytes]:
        if what.mode is KEYED or what.mode is LOCK:
            return [self.record(what.key)]
        return [self.record(what.key), self.source(what.key[0], what.source)]


def pack_claim(claim: Claim) -> bytes:
    """See `CLAIM`."""
    sequence, payload, context = claim.sequence, claim.payload, claim.context
    flags = CLAIM_SEQUENCE if sequence is not None else 0
    if claim.retract:
        flags |= CLAIM_RETRACT
    if claim.row_on_conflict:
        flags |= CLAIM_ROW_ON_CONFLICT
    head = _claim_start.pack(
        claim.mode,
        flags,
        claim.token,
        claim.position,
        claim.waited_ms,
        claim.key[1:],
        claim.fingerprint,
        sequence or 0,
        claim.metadata_hash,
    )
    terms = _terms(claim.lease_ms, claim.max_attempts, claim.pending_ttl_ms, claim.source_ttl_ms)
    who = _who(claim.kind, claim.owner)
    return b"%b%b%b%b%b%b%b" % (head, terms, who, long_size(len(payload)), payload, long_size(len(context)), context)


@lru_cache(maxsize=256)
def _terms(lease_ms: int, max_attempts: int, pending_ttl_ms: int, source_ttl_ms: int) -> bytes:
    """What the policy says: the same for most claims."""
    return _claim_terms.pack(*six_bytes(lease_ms), max_attempts, *six_bytes(pending_ttl_ms), *six_bytes(source_ttl_ms))


@lru_cache(maxsize=256)
def _who(kind: str, owner: str) -> bytes:
    return short(kind) + short(owner)


def row_of_replay(claim: Claim, data: bytes, ts: bytes) -> bytes | None:
    """The row of a claim without a sequence, if these bytes are an ended record of its payload, which answers it.

    It is cut and joined, as claim_cut.lua does it.
    """
    if data[0] != RECORD_VERSION:
        decode_record(data)  # refuses it, before anything of its batch is granted
    if not is_ended(data, claim.fingerprint):
        return None
    context = claim.context
    start = _replay_row_start(ROW_VERSION, claim.token, claim.position, ts, _DUPLICATE, 0, claim.waited_ms, claim.key)
    return b"%b%b%b%b%b" % (start, data[ANSWERED], short_effect_id(data), _no_error_then_size(len(context)), context)


def row_of_query(query: HeadQuery, record: bytes, ts: bytes) -> bytes:
    """The row of a document that was answered with this record, which has no effect_id of its own."""
    key, _, _, _, _, token, context = query
    start = _replay_row_start(ROW_VERSION, token, 0, ts, _DUPLICATE, 0, 0, key)
    return b"%b%b\0%b%b" % (start, record[ANSWERED], _no_error_then_size(len(context)), context)


def pack_seal(seal: Seal) -> bytes:
    """See `SEAL`."""
    sequence, result, context = seal.sequence, seal.result, seal.context
    flags = SEAL_SEQUENCE if sequence is not None else 0
    if seal.failed:
        flags |= SEAL_FAILED
    if seal.live:
        flags |= SEAL_LIVE
    if seal.duplicate:
        flags |= SEAL_DUPLICATE
    head = _seal.pack(
        seal.mode,
        flags,
        seal.token,
        seal.key[1:],
        *fence_fields(seal.fence),
        sequence or 0,
        seal.metadata_hash,
        *_ttls(seal.ttl_ms, seal.source_ttl_ms),
        seal.flags,
        seal.waited_ms,
        seal.winner,
    )
    error, effect_id = short(seal.error), short(seal.effect_id)
    return b"%b%b%b%b%b%b%b" % (
        head,
        error,
        effect_id,
        long_size(len(result)),
        result,
        long_size(len(context)),
        context,
    )


@lru_cache(maxsize=256)
def _ttls(ttl_ms: int, source_ttl_ms: int) -> tuple[bytes, bytes]:
    return pack_ms(ttl_ms), pack_ms(source_ttl_ms)


def pack_lease(lease: LeaseRef) -> bytes:
    """See `LEASE_CALL`."""
    head = _lease.pack(
        lease.mode,
        lease.token,
        lease.digest,
        pack_epoch(lease.epoch),
        *six_bytes(lease.lease_ms),
        *six_bytes(lease.pending_ttl_ms),
        *six_bytes(lease.source_ttl_ms),
    )
    return head + long_size(len(lease.context)) + lease.context


def pack_answers(answers: Mapping[bytes, int]) -> bytes:
    """See `ANSWER`."""
    return b"".join(_answer(count, len(label)) + label for label, count in answers.items())


REPLAYED = b"R"
"""How the reply to a claim starts that is answered with a seal."""


def verdict_of(reply: bytes) -> Verdict:
    """See claim.lua."""
    try:
        return _verdict_of(reply)
    except (struct.error, IndexError) as broken:
        raise FormatCorrupt(
            f"the fence store answered {len(reply)} bytes that are not a verdict", hint=REHYDRATE
        ) from broken


def _verdict_of(reply: bytes) -> Verdict:
    match reply[:1]:
        case b"R":
            return Replay(_record_or_none(reply[1:]))
        case b"G":
            return _tuple(Granted, (decode_record(reply[2:]), reply[1] == 1, None, None))
        case b"P":
            granted, at = long_at(reply, 2)
            prior, at = long_at(reply, at)
            head = SourceRecord.decode(reply[at:]).head if at < len(reply) else None
            return Granted(decode_record(granted), reply[1] == 1, _record_or_none(prior), head)
        case b"C":
            return ConflictVerdict(_record_or_none(reply[1:]))
        case b"I":
            record, quarantined = decode_record(reply[2:]), reply[1] == 1
            return InFlightVerdict(0 if quarantined else record.when_ms, record, quarantined)
        case b"S":
            return StaleVerdict(_sequence.unpack(reply[1:])[0])
        case b"N":
            return NotReadyVerdict()
        case code:
            raise _refused(code, reply[1:])


def read_replays(answers: Sequence[Verdict | bytes | None]) -> list[Verdict | None]:
    """Decodes the answers that are still records."""
    return [
        _tuple(Replay, (decode_record(each),)) if type(each) is bytes else each  # type: ignore[misc]
        for each in answers
    ]


def outcome_of(reply: bytes) -> SealOutcome:
    """See seal.lua."""
    match reply[:1]:
        case b"S":
            return _tuple(Sealed, (decode_record(reply[1:]),))
        case b"F":
            return Fenced(_record_or_none(reply[1:]))
        case b"N":
            return NotReadyVerdict()
        case code:
            raise _refused(code, reply[1:])


def lease_done(reply: Any) -> bool:
    if isinstance(reply, bytes):
        raise _refused(b"X", reply)
    return bool(reply)


def _refused(code: bytes, data: bytes) -> FormatTooNew | FormatCorrupt:
    if data and data[0] > RECORD_VERSION:
        return FormatTooNew(f"a record in the fence store has format {data[0]}; this ragfence knows {RECORD_VERSION}")
    if data:
        decode_record(data)  # it says more about what is wrong, unless a script was wrong to refuse it
    return FormatCorrupt(f"the fence store answered {code!r}", hint=REHYDRATE)


def _record_or_none(data: bytes) -> KeyRecord | None:
    return decode_record(data) if data else None
