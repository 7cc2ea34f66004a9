"""What the fence store holds, record by record, each once; without their results, which may be large.

A scan sees the records of keys. The pending operation of a source with sequences stands in the record of that source;
the decision rows tell which sources those are.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from ragfence.core.operations import Operation
from ragfence.core.records import KeyRecord, State
from ragfence.core.rows import Row
from ragfence.engine.engine import Engine
from ragfence.stores.fences import FenceStore, Lookup

_BATCH = 500
_ORDERED = b'"sequence"'


@dataclass(frozen=True, slots=True)
class Holding:
    key: bytes
    state: State
    kind: str
    attempt: int
    owner: str
    error: str
    fence: str
    effect_id: str
    first_seen_ms: int
    when_ms: int
    """the end of the lease while it is held; afterwards when it was released or sealed"""
    expires_ms: int | None
    source_id: str = ""
    """only where a decision row was asked for it"""

    @classmethod
    def of(cls, key: bytes, record: KeyRecord, expires_ms: int | None, source_id: str = "") -> Holding:
        return cls(
            key,
            record.state,
            record.kind,
            record.attempt,
            record.owner,
            record.error,
            str(record.fence),
            record.effect_id,
            record.first_seen_ms,
            record.when_ms,
            expires_ms,
            source_id,
        )

    @property
    def pending(self) -> bool:
        return self.state in (State.HELD, State.RELEASED)


def scanned(fences: FenceStore, shard: int | None = None) -> Iterator[Holding]:
    """Every record once: a server that is growing its tables may show a key twice."""
    seen: set[bytes] = set()
    for found in fences.scan(shard):
        if found.key not in seen:
            seen.add(found.key)
            yield Holding.of(found.key, found.record, found.expires_ms)


class NamedSource:
    """A source_id, as callers write it, and the rows that are about it."""

    def __init__(self, source_id: str) -> None:
        self.source_id = unicodedata.normalize("NFC", source_id)
        self._written = json.dumps(self.source_id, ensure_ascii=False).encode(errors="replace")

    def has(self, row: Row) -> bool:
        # Looked for in the bytes first: parsing every context would take most of the time.
        return self._written in row.context and json.loads(row.context).get("source_id") == self.source_id


class OrderedSources:
    """Sources with sequences, as the rows name them, and the operations that are pending there."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lookups: dict[tuple[str, str, str], Lookup] = {}

    def see(self, row: Row) -> None:
        if _ORDERED not in row.context:
            return
        values = json.loads(row.context)
        if not values.get("sequence"):
            return
        names = values.get("kind", ""), values.get("source_type", ""), values.get("source_id", "")
        if names not in self._lookups:
            kind, source_type, source_id = names
            operation = Operation(
                kind=kind, source_type=source_type, source_id=source_id, sequence=int(values["sequence"])
            )
            self._lookups[names] = self._engine.request(operation, None).lookup

    def pending(self) -> Iterator[Holding]:
        left = iter(self._lookups.items())
        while batch := list(islice(left, _BATCH)):
            found = self._engine.fences.read([lookup for _, lookup in batch])
            for (names, lookup), held in zip(batch, found, strict=True):
                if held.source and (lease := held.source.lease):
                    yield Holding.of(lookup.key[:1] + lease.digest, lease.record, None, names[2])
