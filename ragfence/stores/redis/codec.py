"""How claims, seals and leases travel to the Lua scripts, and how their answers come back. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ragfence.core.decision_rows import VERSION as ROW_VERSION
from ragfence.core.decision_rows import RowKind, six_bytes
from ragfence.core.decisions import (
    KEYED,
    Ask,
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
from ragfence.core.operations import KEY_BYTES, encoded
from ragfence.core.records import (
    FINGERPRINT_BYTES,
    HAS_EFFECT_ID,
    HAS_ERROR,
    HAS_OWNER,
    HEADER_BYTES,
    METADATA_HASH_BYTES,
    TOKEN_BYTES,
    VERSION,
    KeyRecord,
    SourceRecord,
    State,
    checked_epoch,
    fence_fields,
    short,
)
from ragfence.errors import REHYDRATE, FormatCorrupt, FormatTooNew

_CLAIM = struct.Struct(f">BB{TOKEN_BYTES}sBI32s{FINGERPRINT_BYTES}sq{METADATA_HASH_BYTES}s")
_TERMS = struct.Struct(">HIHHIHI")
_LENGTH = struct.Struct(">I").pack
_ANSWER = struct.Struct(">IH").pack
_SEAL = struct.Struct(f">BB{TOKEN_BYTES}s32sQIq{METADATA_HASH_BYTES}s12sBI{TOKEN_BYTES}s")
_TTLS = struct.Struct(">HIHI")
_LEASE = struct.Struct(f">B{TOKEN_BYTES}s32s7sHIHIHI")
_SEQUENCE = struct.Struct(">q")
_REPLAY = struct.Struct(f">B{TOKEN_BYTES}sB6sBBI6x{KEY_BYTES}s")
_NO_ERROR = struct.Struct(">xI")
_ENDED = frozenset((int(State.SEALED), int(State.FAILED)))
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
        if what.mode is KEYED:
            return [self.record(what.key)]
        return [self.record(what.key), self.source(what.key[0], what.source)]


def pack_claim(claim: Claim) -> bytes:
    """mode:1 flags:1 token:12 position:1 waited:4 digest:32 fingerprint:16 sequence:8 metadata_hash:16 lease:6
    max_attempts:2 pending_ttl:6 source_ttl:6, then kind and owner (length:1), payload and context (length:4)."""
    sequence, payload, context = claim.sequence, claim.payload, claim.context
    flags = (sequence is not None) | (2 if claim.retract else 0) | (4 if claim.row_on_conflict else 0)
    head = _CLAIM.pack(
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
    return b"%b%b%b%b%b%b%b" % (head, terms, who, _LENGTH(len(payload)), payload, _LENGTH(len(context)), context)


@lru_cache(maxsize=256)
def _terms(lease_ms: int, max_attempts: int, pending_ttl_ms: int, source_ttl_ms: int) -> bytes:
    """What the policy says: the same for most claims."""
    return _TERMS.pack(*six_bytes(lease_ms), max_attempts, *six_bytes(pending_ttl_ms), *six_bytes(source_ttl_ms))


@lru_cache(maxsize=256)
def _who(kind: str, owner: str) -> bytes:
    return short(kind) + short(owner)


def row_of_replay(claim: Claim, data: bytes, ts: bytes) -> bytes | None:
    """The row of a claim without a sequence, if these bytes are an ended record of its payload, which answers it.

    It is cut and joined, as claim_cut.lua does it.
    """
    state, effect_id, context = data[1], b"\0", claim.context
    if data[0] != VERSION:
        KeyRecord.decode(data)  # refuses it, before anything of its batch is granted
    if state % 16 not in _ENDED or data[2:18] != claim.fingerprint:
        return None
    if state & HAS_EFFECT_ID:
        at = HEADER_BYTES + 1 + data[HEADER_BYTES]
        if state & HAS_OWNER:
            at += 1 + data[at]
        if state & HAS_ERROR:
            at += 1 + data[at]
        effect_id = data[at : at + 1 + data[at]]
    head = _REPLAY.pack(ROW_VERSION, claim.token, claim.position, ts, _DUPLICATE, 0, claim.waited_ms, claim.key)
    return b"%b%b%b%b%b" % (head, data[2:HEADER_BYTES], effect_id, _NO_ERROR.pack(len(context)), context)


def row_of_ask(ask: Ask, record: bytes, ts: bytes) -> bytes:
    """The row of a document that was answered with this record, which has no effect_id of its own."""
    key, _, _, _, _, token, context = ask
    head = _REPLAY.pack(ROW_VERSION, token, 0, ts, _DUPLICATE, 0, 0, key)
    return b"%b%b\0%b%b" % (head, record[2:HEADER_BYTES], _NO_ERROR.pack(len(context)), context)


def pack_seal(seal: Seal) -> bytes:
    """mode:1 flags:1 token:12 digest:32 epoch:7 counter:5 sequence:8 metadata_hash:16 ttl:6 source_ttl:6 row_flags:1
    waited:4 winner:12, then error and effect_id (length:1), result and context (length:4)."""
    sequence, result, context = seal.sequence, seal.result, seal.context
    flags = (sequence is not None) | (2 if seal.failed else 0) | (4 if seal.live else 0) | (8 if seal.duplicate else 0)
    head = _SEAL.pack(
        seal.mode,
        flags,
        seal.token,
        seal.key[1:],
        *fence_fields(seal.fence),
        sequence or 0,
        seal.metadata_hash,
        _ttls(seal.ttl_ms, seal.source_ttl_ms),
        seal.flags,
        seal.waited_ms,
        seal.winner,
    )
    error, effect_id = short(seal.error), short(seal.effect_id)
    return b"%b%b%b%b%b%b%b" % (head, error, effect_id, _LENGTH(len(result)), result, _LENGTH(len(context)), context)


@lru_cache(maxsize=256)
def _ttls(ttl_ms: int, source_ttl_ms: int) -> bytes:
    return _TTLS.pack(*six_bytes(ttl_ms), *six_bytes(source_ttl_ms))


def pack_lease(lease: LeaseRef) -> bytes:
    """mode:1 token:12 digest:32 epoch:7 lease:6 pending_ttl:6 source_ttl:6, then context (length:4)."""
    head = _LEASE.pack(
        lease.mode,
        lease.token,
        lease.digest,
        checked_epoch(lease.epoch).to_bytes(7, "big"),
        *six_bytes(lease.lease_ms),
        *six_bytes(lease.pending_ttl_ms),
        *six_bytes(lease.source_ttl_ms),
    )
    return head + _LENGTH(len(lease.context)) + lease.context


def pack_answers(answers: Mapping[bytes, int]) -> bytes:
    """Per label: count:4, length:2 + label."""
    return b"".join(_ANSWER(count, len(label)) + label for label, count in answers.items())


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
            return _tuple(Granted, (KeyRecord.decode(reply[2:]), reply[1] == 1, None, None))
        case b"P":
            granted, at = _long_at(reply, 2)
            prior, at = _long_at(reply, at)
            head = SourceRecord.decode(reply[at:]).head if at < len(reply) else None
            return Granted(KeyRecord.decode(granted), reply[1] == 1, _record_or_none(prior), head)
        case b"C":
            return ConflictVerdict(_record_or_none(reply[1:]))
        case b"I":
            record, quarantined = KeyRecord.decode(reply[2:]), reply[1] == 1
            return InFlightVerdict(0 if quarantined else record.when_ms, record, quarantined)
        case b"S":
            return StaleVerdict(_SEQUENCE.unpack(reply[1:])[0])
        case b"N":
            return NotReadyVerdict()
        case code:
            raise _refused(code, reply[1:])


def outcome_of(reply: bytes) -> SealOutcome:
    """See seal.lua."""
    match reply[:1]:
        case b"S":
            return _tuple(Sealed, (KeyRecord.decode(reply[1:]),))
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
    if data and data[0] > 1:
        return FormatTooNew(f"a record in the fence store has format {data[0]}; this ragfence knows 1")
    return FormatCorrupt(f"the fence store answered {code!r}", hint=REHYDRATE)


def _long_at(data: bytes, at: int) -> tuple[bytes, int]:
    start = at + 4
    end = start + int.from_bytes(data[at:start], "big")
    return data[start:end], end


def _record_or_none(data: bytes) -> KeyRecord | None:
    return KeyRecord.decode(data) if data else None
