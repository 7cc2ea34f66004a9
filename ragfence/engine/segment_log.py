"""The log of head moves: its rows, how they become the bytes of a segment, and what a list of segments amounts to."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from ragfence.core.decisions import NOBODY
from ragfence.core.operations import Fence
from ragfence.core.records import Head, KeyRecord, State
from ragfence.errors import FormatCorrupt, FormatTooNew, StoreUnavailable
from ragfence.stores.fences import Loaded, LoadedReceipt, LoadedSource
from ragfence.stores.objects import ObjectStore

VERSION = 1


class LogRow(NamedTuple):
    """One head move, as the log keeps it."""

    key: bytes
    source: bytes
    fence: Fence
    fingerprint: bytes
    live: bool
    sequence: int | None
    """the effective one: a move without a sequence keeps the head's"""
    metadata_hash: bytes
    effect_id: str
    result: bytes
    token: bytes = NOBODY
    detail: Any = None
    """what the guard adds, for its own codec"""
    kind: str = ""
    at_ms: int = 0
    """when it was claimed"""

    def record(self) -> KeyRecord:
        # What comes back from the log is a function of the row alone: attempts and the time of the seal are not in it.
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


class Codec(Protocol):
    """How rows become the bytes of a segment. Documents bring Parquet."""

    def encode(self, rows: Sequence[LogRow]) -> bytes: ...
    def decode(self, name: str, data: bytes) -> Iterator[LogRow]: ...


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
                    fence=Fence(*values["fence"]),
                    fingerprint=bytes.fromhex(values["fingerprint"]),
                    live=values["live"],
                    sequence=values["sequence"],
                    metadata_hash=bytes.fromhex(values["metadata_hash"]),
                    effect_id=values["effect_id"],
                    result=b64decode(values["result"]),
                    token=bytes.fromhex(values["token"]),
                )
        except (ValueError, KeyError, TypeError) as broken:
            raise FormatCorrupt(f"{name} is no segment: {broken!r}") from broken


class SegmentLoader:
    """What the listed segments amount to: per source the row with the highest fence, and every other receipt."""

    def __init__(self, objects: ObjectStore, codec: Codec) -> None:
        self._objects = objects
        self._codec = codec

    def load(self, segments: Iterable[str]) -> Iterator[Loaded]:
        heads: dict[bytes, LogRow] = {}
        receipts: dict[bytes, LogRow] = {}
        for row in self.rows(segments):
            at = row.key[:1] + row.source  # the same source under another shard is another source
            known = heads.get(at)
            if known is None or known.fence < row.fence:
                heads[at] = row
            if row.live:
                receipts[row.key] = row
        for row in heads.values():
            key = row.key
            receipts.pop(key, None)
            head = Head(key[1:], row.live, row.sequence, row.metadata_hash, row.record())
            yield LoadedSource(key[0], row.source, head)
        for key, row in receipts.items():
            yield LoadedReceipt(key, row.record())

    def rows(self, segments: Iterable[str]) -> Iterator[LogRow]:
        for name in segments:
            data = self._objects.get(name)
            if data is None:
                raise StoreUnavailable(f"the segment {name} is listed but cannot be read")
            yield from self._codec.decode(name, data)
