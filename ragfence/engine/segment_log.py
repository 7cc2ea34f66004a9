"""The log of head moves: its rows, their encoding in segments, and the state that a list of segments adds up to."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from ragfence.core.layout import NO_TOKEN, State, digest_in, is_live_head, record_in
from ragfence.core.operations import FenceNumber
from ragfence.core.records import Head, KeyRecord, decode_record
from ragfence.errors import FormatTooNew, SegmentUnreadable, StoreUnavailable
from ragfence.stores.fences import Loaded, LoadedReceipt, LoadedSource
from ragfence.stores.objects import ObjectStore

VERSION = 1


class LogRow(NamedTuple):
    """One head move, as stored in the log."""

    key: bytes
    source: bytes
    fence: FenceNumber
    fingerprint: bytes
    live: bool
    sequence: int | None
    """the effective one: a move without a sequence keeps the head's"""
    metadata_hash: bytes
    effect_id: str
    result: bytes
    token: bytes = NO_TOKEN
    detail: Any = None
    """what the guard adds, for its own codec"""
    kind: str = ""
    at_ms: int = 0
    """when it was claimed"""

    def record(self) -> KeyRecord:
        # The record is a function of the row alone: attempts and the time of the seal are not in the log.
        return KeyRecord(
            State.SEALED,
            self.fingerprint,
            self.token,
            self.fence,
            1,
            self.at_ms,
            self.at_ms,
            self.kind,
            effect_id=self.effect_id,
            result=self.result,
        )

    def packed(self) -> Packed:
        head = Head(self.key[1:], self.live, self.sequence, self.metadata_hash, self.record())
        return self.key[:1] + self.source, self.fence, head.encode()


Packed = tuple[bytes, tuple[int, int], bytes]
"""What the fence store needs of a row: shard and source, what orders the moves of a source, and the encoded head."""


class Codec(Protocol):
    """Encodes rows as the bytes of a segment. Documents use Parquet."""

    def encode(self, rows: Sequence[LogRow]) -> bytes: ...
    def decode(self, name: str, data: bytes) -> Iterator[LogRow]: ...
    def packed(self, name: str, data: bytes) -> Iterator[Packed]:
        """Decodes the rows, each `packed`."""
        ...


class PlainCodec:
    """Segments as JSON lines."""

    def encode(self, rows: Sequence[LogRow]) -> bytes:
        lines = [json.dumps({"version": VERSION})]
        lines += [
            json.dumps(
                {
                    "key": row.key.hex(),
                    "source": row.source.hex(),
                    "fence": list(row.fence),
                    "fingerprint": row.fingerprint.hex(),
                    "live": row.live,
                    "sequence": row.sequence,
                    "metadata_hash": row.metadata_hash.hex(),
                    "effect_id": row.effect_id,
                    "result": b64encode(row.result).decode(),
                    "token": row.token.hex(),
                },
                separators=(",", ":"),
            )
            for row in rows
        ]
        return "\n".join(lines).encode()

    def decode(self, name: str, data: bytes) -> Iterator[LogRow]:
        try:
            head, *lines = data.decode().split("\n")
            version = json.loads(head)["version"]
            if version > VERSION:
                raise FormatTooNew(f"{name} has format {version}; this ragfence knows {VERSION}")
            for line in lines:
                values = json.loads(line)
                yield LogRow(
                    key=bytes.fromhex(values["key"]),
                    source=bytes.fromhex(values["source"]),
                    fence=FenceNumber(*values["fence"]),
                    fingerprint=bytes.fromhex(values["fingerprint"]),
                    live=values["live"],
                    sequence=values["sequence"],
                    metadata_hash=bytes.fromhex(values["metadata_hash"]),
                    effect_id=values["effect_id"],
                    result=b64decode(values["result"]),
                    token=bytes.fromhex(values["token"]),
                )
        except (ValueError, KeyError, TypeError) as broken:
            raise SegmentUnreadable(f"the segment {name} cannot be read: {broken!r}", segment=name) from broken

    def packed(self, name: str, data: bytes) -> Iterator[Packed]:
        return (row.packed() for row in self.decode(name, data))


class SegmentLoader:
    """Loads segments: per source the row with the highest fence, and every other receipt."""

    def __init__(self, objects: ObjectStore, codec: Codec) -> None:
        self._objects = objects
        self._codec = codec

    def load(self, segments: Iterable[str]) -> Iterator[Loaded]:
        # Bytes and plain tuples of them: a log may have millions of rows, and all are held until the last is read.
        heads: dict[bytes, tuple[tuple[int, int], bytes]] = {}
        receipts: dict[bytes, tuple[tuple[int, int], bytes]] = {}
        for name, data in self._read(segments):
            for at, fence, head in self._codec.packed(name, data):
                known = heads.get(at)
                if known is None:
                    heads[at] = (fence, head)
                    continue
                older = min(known, (fence, head))
                heads[at] = max(known, (fence, head))
                if is_live_head(older[1]):
                    key = at[:1] + digest_in(older[1])
                    receipts[key] = max(older, receipts.get(key, older))
        for at, (_, head) in heads.items():
            if receipts:
                receipts.pop(at[:1] + digest_in(head), None)
            yield LoadedSource(at[0], at[1:], head)
        for key, (_, head) in receipts.items():
            yield LoadedReceipt(key, decode_record(record_in(head)))

    def check(self, segments: Iterable[str]) -> None:
        for name, data in self._read(segments):
            for _ in self._codec.packed(name, data):
                pass

    def rows(self, segments: Iterable[str]) -> Iterator[LogRow]:
        for name, data in self._read(segments):
            yield from self._codec.decode(name, data)

    def _read(self, segments: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        for name in segments:
            data = self._objects.get(name)
            if data is None:
                raise StoreUnavailable(f"the segment {name} is listed but cannot be read")
            yield name, data
