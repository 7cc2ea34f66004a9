"""What a fence store holds, and its one binary form, shared by SQLite, Redis and the Lua scripts.

    key record     one operation: who may perform it, or how it ended
    source record  one source: its head (the newest sealed revision) and at most one lease

    key record      version:1 state:1 fingerprint:16 token:12 epoch:7 counter:5 attempt:2 first_seen_ms:6 when_ms:6
                    kind (length:1 + bytes)
                    [owner] [error] [effect_id] (each length:1 + bytes) [payload (length:4 + bytes)]
                    result, to the end
    source record   version:1 flags:1 stamp:8
                    [head   digest:32 sequence:8 metadata_hash:16 record (length:4 + bytes)]
                    [lease  digest:32 record (length:4 + bytes)]
    parked record   stamp:8, then a key record: a document's superseded revision

The state proper is the state byte % 16. Its upper bits announce those in brackets, which are written only when they
are not empty: 16 owner, 32 error, 64 effect_id, 128 payload. Most sealed records have none of them: a Redis that holds
millions of records pays for every byte.

All numbers are big-endian. `when_ms` is the lease's expiry while pending and the time of the seal afterwards.
`stamp` is the epoch in which the record was written: after a hydration, what the log did not bring back is void.
`lua/records.lua` is the other reader and writer of this form; a property test holds the two together.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from ragfence.core.operations import FenceNumber
from ragfence.errors import REHYDRATE, FormatCorrupt, FormatTooNew, StoreUnsafe

VERSION = 1
FINGERPRINT_BYTES = 16
TOKEN_BYTES = 12
METADATA_HASH_BYTES = 16
NO_METADATA = bytes(METADATA_HASH_BYTES)
MAX_EPOCH = 2**53 - 1
"""The highest that Lua can count; seven bytes hold it. Solo epochs are microseconds: it lasts until the year 2255."""
MAX_COUNTER = 2**40 - 1

_HEADER = struct.Struct(f">BB{FINGERPRINT_BYTES}s{TOKEN_BYTES}sQIHHIHI")
_HEADER_AND_KIND = struct.Struct(f">BB{FINGERPRINT_BYTES}s{TOKEN_BYTES}s7s5sH6s6sB")
"""the header and how long the kind behind it is"""
HEADER_BYTES = _HEADER.size
_number = int.from_bytes
HAS_OWNER, HAS_ERROR, HAS_EFFECT_ID, HAS_PAYLOAD = 16, 32, 64, 128
_STATE = 15
_SOURCE = struct.Struct(">BBQ")
_HEAD = struct.Struct(">32sq16sI")
_LEASE = struct.Struct(">32sI")
_STAMP = struct.Struct(">Q")
_RECORD_AT = _SOURCE.size + _HEAD.size
_NO_RECORD, _THIS_VERSION = bytes(4), bytes((VERSION,))
_SEALED_HEAD = struct.Struct(f">B{_HEAD.format[1:]}{_HEADER.format[1:]}")

_HAS_HEAD, _HAS_LEASE, _HEAD_LIVE, _HEAD_SEQUENCE, _UNSETTLED = 1, 2, 4, 8, 16
_LIVE_HEAD = _HAS_HEAD | _HEAD_LIVE
_SIGNED = struct.Struct(">q")
_FREE_HEADS = frozenset(bytes((VERSION, _LIVE_HEAD | more)) for more in (0, _HEAD_SEQUENCE))
"""How the record of a source starts that has a live head and no lease."""


class State(IntEnum):
    HELD = 1
    """somebody has, or had, a lease; it counts until `when_ms`, and the record outlives it"""
    RELEASED = 2
    """nobody performs it; attempts and the last error are remembered"""
    QUARANTINED = 3
    """too many attempts; waits for somebody to release it"""
    SEALED = 4
    FAILED = 5
    """sealed as a failure, which is replayed"""


HELD, FAILED = State.HELD, State.FAILED
"""as plain names, like those of `decisions.Mode`"""
ENDED = frozenset({State.SEALED, State.FAILED})
_STATES = {int(state): state for state in State}
_tuple = tuple.__new__
_JUST_SEALED = bytes((VERSION, State.SEALED))


class KeyRecord(NamedTuple):
    """A tuple, and so are claims and seals: one is made for every call, and a frozen dataclass costs three times."""

    state: State
    fingerprint: bytes
    token: bytes
    fence: FenceNumber
    attempt: int
    first_seen_ms: int
    when_ms: int
    kind: str = ""
    owner: str = ""
    error: str = ""
    effect_id: str = ""
    payload: bytes = b""
    """the redacted payload in canonical JSON, kept only where the policy shows diffs"""
    result: bytes = b""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def held_at(self, now_ms: int) -> bool:
        return self.state is State.HELD and now_ms < self.when_ms

    def encode(self) -> bytes:
        flags: int = self.state
        texts = short(self.kind)
        if self.owner:
            flags |= HAS_OWNER
            texts += short(self.owner)
        if self.error:
            flags |= HAS_ERROR
            texts += short(self.error)
        if self.effect_id:
            flags |= HAS_EFFECT_ID
            texts += short(self.effect_id)
        if self.payload:
            flags |= HAS_PAYLOAD
            texts += len(self.payload).to_bytes(4, "big") + self.payload
        header = _HEADER.pack(
            VERSION,
            flags,
            self.fingerprint,
            self.token,
            *fence_fields(self.fence),
            self.attempt,
            self.first_seen_ms >> 32,
            self.first_seen_ms & 0xFFFFFFFF,
            self.when_ms >> 32,
            self.when_ms & 0xFFFFFFFF,
        )
        return header + texts + self.result

    @classmethod
    def decode(cls, data: bytes) -> KeyRecord:
        try:
            if data[0] != VERSION:
                _refuse_newer(data[0], "record")
            (_, state, fingerprint, token, epoch, counter, attempt, first_seen, when, size) = (
                _HEADER_AND_KIND.unpack_from(data)
            )
            at = HEADER_BYTES + 1 + size
            kind = _kind(data[HEADER_BYTES + 1 : at])
            owner, error, effect_id, payload = "", "", "", b""
            if state > _STATE:
                if state & HAS_OWNER:
                    owner, at = _short_at(data, at)
                if state & HAS_ERROR:
                    error, at = _short_at(data, at)
                if state & HAS_EFFECT_ID:
                    effect_id, at = _short_at(data, at)
                if state & HAS_PAYLOAD:
                    start = at + 4
                    at = start + int.from_bytes(data[at:start], "big")
                    payload = data[start:at]
            if at > len(data):
                raise IndexError("cut off")
            # As tuples, past the constructors: a batch of replays decodes one for each document.
            return _tuple(
                cls,
                (
                    _STATES[state & _STATE],
                    fingerprint,
                    token,
                    _tuple(FenceNumber, (_number(epoch), _number(counter))),
                    attempt,
                    _number(first_seen),
                    _number(when),
                    kind,
                    owner,
                    error,
                    effect_id,
                    payload,
                    data[at:],
                ),
            )
        except (struct.error, IndexError, KeyError, ValueError) as broken:
            raise FormatCorrupt(
                f"{len(data)} bytes in the fence store are no key record: {broken}", hint=REHYDRATE
            ) from broken


class Head(NamedTuple):
    """The one live revision of a source, or the move that took the last one away."""

    digest: bytes
    live: bool
    sequence: int | None
    metadata_hash: bytes = NO_METADATA
    record: KeyRecord | None = None
    """the sealed record of the head; None for operations, which keep it under their key"""

    def encode(self) -> bytes:
        """flags:1, then the head's part of a source record"""
        flags = _HAS_HEAD | (_HEAD_LIVE if self.live else 0) | (_HEAD_SEQUENCE if self.sequence is not None else 0)
        body = self.record.encode() if self.record else b""
        return b"%c%b%b" % (flags, _HEAD.pack(self.digest, self.sequence or 0, self.metadata_hash, len(body)), body)


@dataclass(frozen=True, slots=True)
class SourceLease:
    digest: bytes
    record: KeyRecord
    unsettled: bool = False
    """an earlier attempt may have committed a row that nobody has sealed"""

    @property
    def may_hide_a_commit(self) -> bool:
        return self.record.state is State.HELD or self.unsettled


@dataclass(frozen=True, slots=True)
class SourceRecord:
    stamp: int
    head: Head | None = None
    lease: SourceLease | None = None

    def encode(self) -> bytes:
        flags, pieces = 0, []
        if self.head is not None:
            head = self.head.encode()
            flags |= head[0]
            pieces.append(head[1:])
        if self.lease is not None:
            flags |= _HAS_LEASE | (_UNSETTLED if self.lease.unsettled else 0)
            body = self.lease.record.encode()
            pieces += [_LEASE.pack(self.lease.digest, len(body)), body]
        return b"".join((_SOURCE.pack(VERSION, flags, self.stamp), *pieces))

    @classmethod
    def decode(cls, data: bytes) -> SourceRecord:
        try:
            _refuse_newer(data[0], "source")
            _, flags, stamp = _SOURCE.unpack_from(data)
            at, head, lease = _SOURCE.size, None, None
            if flags & _HAS_HEAD:
                head, at = _head_in(data, flags)
            if flags & _HAS_LEASE:
                digest, size = _LEASE.unpack_from(data, at)
                at += _LEASE.size
                lease = SourceLease(digest, KeyRecord.decode(data[at : at + size]), bool(flags & _UNSETTLED))
            return cls(stamp, head, lease)
        except (struct.error, IndexError, ValueError) as broken:
            raise FormatCorrupt(
                f"{len(data)} bytes in the fence store are no source record: {broken}", hint=REHYDRATE
            ) from broken


def head_of_source(data: bytes, stamp: bytes | None) -> Head | None:
    """The head in the record of a source; its lease, if there is one, is not looked at. `stamp`: as for `free_head`.

    Whoever scans a corpus comes this way for each of its documents.
    """
    _refuse_newer(data[0], "source")
    if not data[1] & _HAS_HEAD or (stamp is not None and data[2:10] != stamp):
        return None
    try:
        return _head_in(data, data[1])[0]
    except (struct.error, IndexError, ValueError) as broken:
        raise FormatCorrupt(
            f"{len(data)} bytes in the fence store are no source record: {broken}", hint=REHYDRATE
        ) from broken


def lease_of_source(data: bytes, stamp: bytes | None) -> SourceLease | None:
    """The attempt in the record of a source, which few have. `stamp`: as for `free_head`."""
    _refuse_newer(data[0], "source")
    if not data[1] & _HAS_LEASE or (stamp is not None and data[2:10] != stamp):
        return None
    return SourceRecord.decode(data).lease


def mark_of_source(data: bytes, stamp: bytes | None) -> bytes | None:
    """The digest of a live document's key and its metadata hash, which tell it from any other head; None: not live.

    The head of an operation with a sequence is not a document's: it holds no record. Nothing is decoded, because a
    corpus digest takes one for every document. `stamp`: as for `free_head`.
    """
    if data[0] != VERSION:
        _refuse_newer(data[0], "source")
    if data[1] & _LIVE_HEAD != _LIVE_HEAD or (stamp is not None and data[2:10] != stamp):
        return None
    if len(data) < _RECORD_AT:
        raise FormatCorrupt(f"{len(data)} bytes in the fence store are no source record: cut off", hint=REHYDRATE)
    if data[66:_RECORD_AT] == _NO_RECORD:
        return None
    version = data[_RECORD_AT : _RECORD_AT + 1]
    if version != _THIS_VERSION:
        _refuse_newer(_number(version), "record")
    return data[10:42] + data[50:66]


def _head_in(data: bytes, flags: int) -> tuple[Head, int]:
    """The head, and where it ends."""
    digest, sequence, metadata_hash, size = _HEAD.unpack_from(data, _SOURCE.size)
    start = _SOURCE.size + _HEAD.size
    record = KeyRecord.decode(data[start : start + size]) if size else None
    known = sequence if flags & _HEAD_SEQUENCE else None
    return _tuple(Head, (digest, bool(flags & _HEAD_LIVE), known, metadata_hash, record)), start + size


def free_head(
    data: bytes, stamp: bytes | None, digest: bytes, fingerprint: bytes, metadata_hash: bytes, sequence: int | None
) -> bytes | None:
    """The record of a source's live head, cut out of the source's, if it is this one and nobody has a lease on it.

    None says nothing: ask by a claim. `stamp` is what a record of the epoch carries; None: any will do. This is the
    way of every document that is sent again, so nothing is decoded here.
    """
    if (
        data[:2] not in _FREE_HEADS
        or data[10:42] != digest
        or data[50:66] != metadata_hash
        or data[72:88] != fingerprint
        or (stamp is not None and data[2:10] != stamp)
        or data[70:72] != _JUST_SEALED
    ):
        _refuse_newer(data[0], "source")
        return None
    if sequence is not None and (not data[1] & _HEAD_SEQUENCE or data[42:50] != _SIGNED.pack(sequence)):
        return None
    return data[70:]


def sealed_head(
    digest: bytes,
    live: bool,
    sequence: int | None,
    metadata_hash: bytes,
    fingerprint: bytes,
    token: bytes,
    fence: tuple[int, int],
    at_ms: int,
    tail: bytes,
) -> bytes:
    """`Head.encode` of what the log says, at once: it is made for every document when a store is hydrated.

    `fence` as `fence_fields` has it. `tail`: the kind (see `short`), then the result.
    """
    seen, seen_low = at_ms >> 32, at_ms & 0xFFFFFFFF
    return (
        _SEALED_HEAD.pack(
            _HAS_HEAD | (_HEAD_LIVE if live else 0) | (_HEAD_SEQUENCE if sequence is not None else 0),
            digest,
            sequence or 0,
            metadata_hash,
            HEADER_BYTES + len(tail),
            VERSION,
            State.SEALED,
            fingerprint,
            token,
            *fence,
            1,
            seen,
            seen_low,
            seen,
            seen_low,
        )
        + tail
    )


def live_in(head: bytes) -> bool:
    """Of an encoded head, as are these two."""
    return bool(head[0] & _HEAD_LIVE)


def digest_in(head: bytes) -> bytes:
    return head[1:33]


def record_in(head: bytes) -> KeyRecord:
    return KeyRecord.decode(head[1 + _HEAD.size :])


def source_with(stamp: int, head: bytes) -> bytes:
    """The record of a source that has this encoded head and no lease."""
    return b"%c%b%b%b" % (VERSION, head[:1], _STAMP.pack(stamp), head[1:])


def refuse_newer_source(data: bytes) -> None:
    """Refuses what only a newer ragfence can read, the record inside as well."""
    if data[0] != VERSION or (data[1] & _HAS_HEAD and data[70:71] not in (b"", bytes((VERSION,)))):
        SourceRecord.decode(data)


def is_parked_below(data: bytes, epoch: int) -> bool:
    """Whether a stored record is parked, and was so before this epoch. Its stamp comes first, whose first byte is 0."""
    stamp: int = _STAMP.unpack_from(data)[0]
    return not data[0] and stamp < epoch


def park(stamp: int, record: KeyRecord) -> bytes:
    return _STAMP.pack(stamp) + record.encode()


def unpark(data: bytes, stamp: int | None) -> KeyRecord | None:
    """The parked record, or None when it was written before the epoch `stamp` (None: any epoch will do)."""
    if len(data) <= _STAMP.size:
        raise FormatCorrupt(f"{len(data)} bytes in the fence store are no parked record", hint=REHYDRATE)
    if stamp is not None and _STAMP.unpack_from(data)[0] != stamp:
        return None
    return KeyRecord.decode(data[_STAMP.size :])


@lru_cache(maxsize=4096)
def _kind(data: bytes) -> str:
    return data.decode()


@lru_cache(maxsize=4096)
def short(text: str) -> bytes:
    """length:1 + bytes; what does not fit is cut off between two characters."""
    if not text:  # as most are that are no kind and no owner
        return b"\0"
    data = text.encode()
    if len(data) > 255:
        data = data[:255].decode(errors="ignore").encode()
    return bytes((len(data),)) + data


def fence_fields(fence: FenceNumber) -> tuple[int, int]:
    """epoch:7 counter:5 for two fields of a struct, `QI`: Python has no such formats, Lua has."""
    epoch, counter = fence
    if epoch >> 53 | counter >> 40:  # a number cut off would let a stale owner in
        checked_epoch(epoch)
        raise StoreUnsafe(
            f"the counter of fence {fence} is out of range: the highest is {MAX_COUNTER}",
            hint="a shard has made that many claims, or its counter was changed by hand; use a new fence store",
        )
    return epoch << 8 | counter >> 32, counter & 0xFFFFFFFF


def checked_epoch(epoch: int) -> int:
    """The epoch, if records can hold it."""
    if 0 <= epoch <= MAX_EPOCH:
        return epoch
    raise StoreUnsafe(
        f"epoch {epoch} is out of range: the highest is {MAX_EPOCH}",
        hint="check the clock of the fence store, its markers, and the names under <tenant>/epochs/ in its objects",
    )


def _short_at(data: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + data[at]
    return data[at + 1 : end].decode(), end


def _refuse_newer(version: int, what: str) -> None:
    if version > VERSION:
        raise FormatTooNew(f"a {what} in the fence store has format {version}; this ragfence knows {VERSION}")
    if version == 0:
        raise FormatCorrupt(f"a {what} in the fence store has format 0", hint=REHYDRATE)
