"""What the fence store holds, record by record, each once; without their results, which may be large."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from ragfence.core.decision_rows import Row
from ragfence.core.layout import State
from ragfence.core.records import KeyRecord
from ragfence.stores.fences import Scanner, all_of

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


def scanned(fences: Scanner, shard: int | None = None) -> Iterator[Holding]:
    """Every record once: a server that is growing its tables may show a key twice."""
    seen: set[bytes] = set()
    for found in all_of(fences, shard):
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
