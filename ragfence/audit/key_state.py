"""How a key stands now: its record, wherever the store keeps it, and what was committed under it."""

from __future__ import annotations

from dataclasses import dataclass

from ragfence.core.operations import Operation
from ragfence.core.records import KeyRecord
from ragfence.engine.commits import Commit
from ragfence.engine.engine import Engine
from ragfence.stores.fences import Lookup


@dataclass(frozen=True, slots=True)
class KeyState:
    record: KeyRecord | None
    """of the key itself, of the lease on its source, or of the head of its document"""
    own: bool
    """the record is the key's own, which expires; that of a document stays"""
    commit: Commit | None
    ready: bool
    """False: the shard does not answer before it is hydrated, so nothing can be said of its records"""


def standing(engine: Engine, key: bytes, operation: Operation | None) -> KeyState:
    """Without the operation only what stands under the key itself is found."""
    lookup = engine.request(operation, None).lookup if operation else Lookup(key)
    (held,) = engine.fences.read([lookup])
    record = held.record
    if held.source and (lease := held.source.lease) and lease.digest == key[1:] and not (record and record.ended):
        record = lease.record
    if held.source and (head := held.source.head) and head.digest == key[1:] and head.record:
        record = head.record
    commit = engine.backing.commits.find(operation) if engine.backing and operation else None
    marker = engine.fences.markers()[key[0]]
    ready = engine.backing is None or (marker is not None and marker.usable)
    return KeyState(record, record is held.record, commit, ready)
