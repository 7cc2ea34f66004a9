"""`fence.inspector`: what the stores hold of a tenant, key by key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragfence.core.hashing import ContentKey
from ragfence.core.operations import Operation
from ragfence.core.policy import Policy
from ragfence.core.receipts import DUPLICATE, Flags, Receipt
from ragfence.core.records import KeyRecord
from ragfence.engine.commits import Commit
from ragfence.engine.journal import Journal
from ragfence.stores.fences import FenceStore, Lookup, Marker, Scanned, all_of
from ragfence.stores.objects import ObjectStore

if TYPE_CHECKING:
    from ragfence.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class KeyState:
    """The state of a key: its record, wherever the fence store keeps it, and its commit."""

    record: KeyRecord | None
    """of the key itself, of the lease on its source, or of the head of its document"""
    own: bool
    """the record is stored under the key itself, and expires; that of a document does not"""
    commit: Commit | None
    """None for documents, which are committed in segments"""
    ready: bool
    """False: the shard has to be hydrated first, so its records say nothing"""


class Inspector:
    """Reads the records of one tenant. It claims nothing, changes nothing and writes no decision rows.

    `fences` and `objects` are the stores themselves, for reading; change what they hold through the fence.

    >>> fence.inspector.key_state(operation.key, operation).record  # doctest: +SKIP
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def tenant(self) -> str:
        return self._engine.tenant

    @property
    def policy(self) -> Policy:
        return self._engine.policy

    @property
    def fences(self) -> FenceStore:
        return self._engine.fences

    @property
    def objects(self) -> ObjectStore | None:
        return self._engine.objects

    @property
    def journal(self) -> Journal:
        """The effects that ran on this machine while the fence store was down, and are not sealed yet."""
        return self._engine.journal

    def now_ms(self) -> int:
        """The clock of the fence store, which decides when leases and records expire."""
        return self.fences.now_ms()

    def markers(self) -> Sequence[Marker | None]:
        """The marker of each shard: whether it is ready, and in which epoch. None: the store has no marker."""
        return self.fences.markers()

    def content_key(self) -> ContentKey | None:
        """The key of the tenant's digests. None unless the policy says `content_hash: hmac`."""
        return self._engine.content_hash.key()

    def records(self, shard: int | None = None) -> Iterator[Scanned]:
        """All records of operations other than documents, or those of one shard, in no order."""
        return all_of(self.fences, shard)

    def record(self, operation: Operation) -> KeyRecord | None:
        """The record stored under the operation's own key."""
        (held,) = self.fences.read([self._lookup(operation)])
        return held.record

    def receipt(self, operation: Operation, record: KeyRecord) -> Receipt:
        """The receipt that an ended record of the operation stands for."""
        key = operation.in_tenant(self.tenant).key
        return self._engine.runner.results.receipt(key, record, DUPLICATE, Flags())

    def key_state(self, key: bytes, operation: Operation | None = None) -> KeyState:
        """The state of a key. Without the operation, only the record stored under the key itself is found."""
        engine = self._engine
        (held,) = engine.fences.read([self._lookup(operation) if operation else Lookup(key)])
        record = held.record
        if held.source and (lease := held.source.lease) and lease.digest == key[1:] and not (record and record.ended):
            record = lease.record
        if held.source and (head := held.source.head) and head.digest == key[1:] and head.record:
            record = head.record
        commit = engine.backing.commits.find(operation) if engine.backing and operation else None
        marker = self.markers()[key[0]]
        ready = engine.backing is None or (marker is not None and marker.usable)
        return KeyState(record, record is held.record, commit, ready)

    def result_size(self, stored: bytes) -> int | None:
        """The bytes of a stored result. None: it is an object of its own, and the object is missing."""
        return self._engine.runner.results.size(stored)

    def _lookup(self, operation: Operation) -> Lookup:
        return self._engine.request(operation, None).lookup
