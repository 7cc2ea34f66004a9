"""The records of a fence store as values. Their one binary form (see `layout.py`) is shared by SQLite, Redis and Lua.

    key record     one operation: who may execute it, or how it ended
    source record  one source: its head (the newest sealed revision) and at most one lease
    parked record  a document's superseded revision

`lua/records.lua` is the other reader and writer of this form; a property test compares the two.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from ragfence.core import layout
from ragfence.core.layout import (
    HAS_EFFECT_ID,
    HAS_ERROR,
    HAS_OWNER,
    HAS_PAYLOAD,
    HEADED_SOURCE,
    HELD,
    LEASE,
    LOCKED,
    NO_METADATA,
    RECORD_VERSION,
    SOURCE,
    SOURCE_FLAGS,
    SOURCE_HEAD,
    SOURCE_LEASE,
    SOURCE_LIVE,
    SOURCE_SEQUENCE,
    SOURCE_STAMP,
    SOURCE_UNSETTLED,
    State,
    long_size,
    pack_header,
    record_decoder,
    refuse_newer,
    short,
)
from ragfence.core.operations import FenceNumber
from ragfence.errors import REHYDRATE, FormatCorrupt

_read_head = layout.head_fields.unpack_from
ENDED = frozenset({State.SEALED, State.FAILED})


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
        return (self.state is HELD or self.state is LOCKED) and now_ms < self.when_ms

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
            texts += long_size(len(self.payload)) + self.payload
        header = pack_header(
            flags, self.fingerprint, self.token, self.fence, self.attempt, self.first_seen_ms, self.when_ms
        )
        return header + texts + self.result


decode_record = record_decoder(KeyRecord)


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
        flags = SOURCE_HEAD | (SOURCE_LIVE if self.live else 0) | (SOURCE_SEQUENCE if self.sequence is not None else 0)
        body = self.record.encode() if self.record else b""
        fields = layout.head_fields.pack(self.digest, self.sequence or 0, self.metadata_hash, len(body))
        return b"%c%b%b" % (flags, fields, body)


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
            flags |= SOURCE_LEASE | (SOURCE_UNSETTLED if self.lease.unsettled else 0)
            body = self.lease.record.encode()
            pieces += [layout.lease_fields.pack(self.lease.digest, len(body)), body]
        return b"".join((layout.source_header.pack(RECORD_VERSION, flags, self.stamp), *pieces))

    @classmethod
    def decode(cls, data: bytes) -> SourceRecord:
        try:
            refuse_newer(data[0], "source")
            _, flags, stamp = layout.source_header.unpack_from(data)
            at, head, lease = SOURCE.size, None, None
            if flags & SOURCE_HEAD:
                head, at = _head_in(data, flags)
            if flags & SOURCE_LEASE:
                digest, size = layout.lease_fields.unpack_from(data, at)
                at += LEASE.size
                lease = SourceLease(digest, decode_record(data[at : at + size]), bool(flags & SOURCE_UNSETTLED))
            return cls(stamp, head, lease)
        except (struct.error, IndexError, ValueError) as broken:
            raise _corrupt_source(data, broken) from broken


def head_of_source(data: bytes, stamp: bytes | None) -> Head | None:
    """The head in the record of a source, whose lease is not looked at. `stamp`: that of the epoch, None: any will do.

    A scan of a corpus calls this for each of its documents.
    """
    refuse_newer(data[0], "source")
    flags = data[SOURCE_FLAGS]
    if not flags & SOURCE_HEAD or (stamp is not None and data[SOURCE_STAMP] != stamp):
        return None
    try:
        return _head_in(data, flags)[0]
    except (struct.error, IndexError, ValueError) as broken:
        raise _corrupt_source(data, broken) from broken


def lease_of_source(data: bytes, stamp: bytes | None) -> SourceLease | None:
    """The attempt in the record of a source, which few have. `stamp`: as above."""
    refuse_newer(data[0], "source")
    if not data[SOURCE_FLAGS] & SOURCE_LEASE or (stamp is not None and data[SOURCE_STAMP] != stamp):
        return None
    return SourceRecord.decode(data).lease


def _head_in(data: bytes, flags: int) -> tuple[Head, int]:
    """The head, and where it ends."""
    digest, sequence, metadata_hash, size = _read_head(data, SOURCE.size)
    end = HEADED_SOURCE.size + size
    record = decode_record(data[HEADED_SOURCE.size : end]) if size else None
    known = sequence if flags & SOURCE_SEQUENCE else None
    return Head(digest, bool(flags & SOURCE_LIVE), known, metadata_hash, record), end


def _corrupt_source(data: bytes, why: Exception) -> FormatCorrupt:
    return FormatCorrupt(f"{len(data)} bytes in the fence store are not a valid source record: {why}", hint=REHYDRATE)


def refuse_newer_source(data: bytes) -> None:
    """Refuses what only a newer ragfence can read, the record inside as well."""
    if layout.may_be_newer(data):
        SourceRecord.decode(data)


def park(epoch: int, record: KeyRecord) -> bytes:
    return layout.parked(epoch, record.encode())


def unpark(data: bytes, epoch: int | None) -> KeyRecord | None:
    """The parked record, or None if it was parked before this epoch (None: any epoch will do)."""
    found = layout.parked_in(data, epoch)
    return None if found is None else decode_record(found)
