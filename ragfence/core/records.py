"""What a fence store holds, and its one binary form, shared by SQLite, Redis and the Lua scripts.

    key record     one operation: who may perform it, or how it ended
    source record  one source: its head (the newest sealed revision) and at most one lease

    key record      version:1 state:1 fingerprint:16 token:16 epoch:8 counter:6 attempt:2 first_seen_ms:6 when_ms:6
                    then kind, owner, error, effect_id (each length:1 + bytes), payload (length:4 + bytes), result
    source record   version:1 flags:1 stamp:8
                    [head   digest:32 sequence:8 metadata_hash:16 record (length:4 + bytes)]
                    [lease  digest:32 record (length:4 + bytes)]
    parked record   stamp:8, then a key record: a document's superseded revision

All numbers are big-endian. `when_ms` is the lease's expiry while pending and the time of the seal afterwards.
`stamp` is the epoch in which the record was written: after a hydration, what the log did not bring back is void.
`lua/records.lua` is the other reader and writer of this form; a property test holds the two together.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from ragfence.core.operations import Fence
from ragfence.errors import FormatCorrupt, FormatTooNew

VERSION = 1
FINGERPRINT_BYTES = 16
TOKEN_BYTES = 16
METADATA_HASH_BYTES = 16
NO_METADATA = bytes(METADATA_HASH_BYTES)

_HEADER = struct.Struct(">BB16s16sQQHIHI")
_SOURCE = struct.Struct(">BBQ")
_HEAD = struct.Struct(">32sq16sI")
_LEASE = struct.Struct(">32sI")
_STAMP = struct.Struct(">Q")

_HAS_HEAD, _HAS_LEASE, _HEAD_LIVE, _HEAD_SEQUENCE, _UNSETTLED = 1, 2, 4, 8, 16


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


ENDED = frozenset({State.SEALED, State.FAILED})
_STATES = {int(state): state for state in State}


class KeyRecord(NamedTuple):
    """A tuple, and so are claims and seals: one is made for every call, and a frozen dataclass costs three times."""

    state: State
    fingerprint: bytes
    token: bytes
    fence: Fence
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
        kind, owner, error, effect_id = map(short, (self.kind, self.owner, self.error, self.effect_id))
        header = _HEADER.pack(
            VERSION,
            self.state,
            self.fingerprint,
            self.token,
            self.fence.epoch,
            self.fence.counter << 16 | self.attempt,
            self.first_seen_ms >> 32,
            self.first_seen_ms & 0xFFFFFFFF,
            self.when_ms >> 32,
            self.when_ms & 0xFFFFFFFF,
        )
        payload = len(self.payload).to_bytes(4, "big") + self.payload
        return b"".join((header, kind, owner, error, effect_id, payload, self.result))

    @classmethod
    def decode(cls, data: bytes) -> KeyRecord:
        try:
            if data[0] != VERSION:
                _refuse_newer(data[0], "record")
            _, state, fingerprint, token, epoch, counted, fh, fl, wh, wl = _HEADER.unpack_from(data)
            owner = _HEADER.size + 1 + data[_HEADER.size]
            error = owner + 1 + data[owner]
            effect_id = error + 1 + data[error]
            payload = effect_id + 1 + data[effect_id]
            result = payload + 4 + int.from_bytes(data[payload : payload + 4], "big")
            if result > len(data):
                raise IndexError
            return cls(
                _STATES[state],
                fingerprint,
                token,
                Fence(epoch, counted >> 16),
                counted & 0xFFFF,
                fh << 32 | fl,
                wh << 32 | wl,
                data[_HEADER.size + 1 : owner].decode(),
                data[owner + 1 : error].decode() if data[owner] else "",
                data[error + 1 : effect_id].decode() if data[error] else "",
                data[effect_id + 1 : payload].decode() if data[effect_id] else "",
                data[payload + 4 : result],
                data[result:],
            )
        except (struct.error, IndexError, KeyError, ValueError) as broken:
            raise FormatCorrupt(f"{len(data)} bytes in the fence store are no key record: {broken}") from broken


@dataclass(frozen=True, slots=True)
class Head:
    """The one live revision of a source, or the move that took the last one away."""

    digest: bytes
    live: bool
    sequence: int | None
    metadata_hash: bytes = NO_METADATA
    record: KeyRecord | None = None
    """the sealed record of the head; None for operations, which keep it under their key"""


@dataclass(frozen=True, slots=True)
class SourceLease:
    digest: bytes
    record: KeyRecord
    unsettled: bool = False
    """quarantined after an attempt that may have committed"""

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
            head = self.head
            flags |= _HAS_HEAD | (_HEAD_LIVE if head.live else 0)
            flags |= _HEAD_SEQUENCE if head.sequence is not None else 0
            body = head.record.encode() if head.record else b""
            pieces += [_HEAD.pack(head.digest, head.sequence or 0, head.metadata_hash, len(body)), body]
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
                digest, sequence, metadata_hash, size = _HEAD.unpack_from(data, at)
                at += _HEAD.size
                record = KeyRecord.decode(data[at : at + size]) if size else None
                at += size
                known = sequence if flags & _HEAD_SEQUENCE else None
                head = Head(digest, bool(flags & _HEAD_LIVE), known, metadata_hash, record)
            if flags & _HAS_LEASE:
                digest, size = _LEASE.unpack_from(data, at)
                at += _LEASE.size
                lease = SourceLease(digest, KeyRecord.decode(data[at : at + size]), bool(flags & _UNSETTLED))
            return cls(stamp, head, lease)
        except (struct.error, IndexError, ValueError) as broken:
            raise FormatCorrupt(f"{len(data)} bytes in the fence store are no source record: {broken}") from broken


def park(stamp: int, record: KeyRecord) -> bytes:
    return _STAMP.pack(stamp) + record.encode()


def unpark(data: bytes, stamp: int | None) -> KeyRecord | None:
    """The parked record, or None when it was written before the epoch `stamp` (None: any epoch will do)."""
    if len(data) <= _STAMP.size:
        raise FormatCorrupt(f"{len(data)} bytes in the fence store are no parked record")
    if stamp is not None and _STAMP.unpack_from(data)[0] != stamp:
        return None
    return KeyRecord.decode(data[_STAMP.size :])


def without_lease(source: SourceRecord) -> SourceRecord:
    return replace(source, lease=None)


@lru_cache(maxsize=4096)
def short(text: str) -> bytes:
    """length:1 + bytes; what does not fit is cut off between two characters."""
    data = text.encode()
    if len(data) > 255:
        data = data[:255].decode(errors="ignore").encode()
    return bytes((len(data),)) + data


def _refuse_newer(version: int, what: str) -> None:
    if version > VERSION:
        raise FormatTooNew(f"a {what} in the fence store has format {version}; this ragfence knows {VERSION}")
    if version == 0:
        raise FormatCorrupt(f"a {what} in the fence store has format 0")
