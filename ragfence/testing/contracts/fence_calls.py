"""Short forms of the calls to a fence store, for the contract and for tests of stores."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Protocol

import pytest

from ragfence.core.decision_rows import Row
from ragfence.core.decisions import (
    Claim,
    Granted,
    HeadQuery,
    HeldRecords,
    LeaseRef,
    Mode,
    Seal,
    Sealed,
    Verdict,
)
from ragfence.core.layout import (
    FINGERPRINT_BYTES,
    TOKEN_BYTES,
)
from ragfence.core.records import KeyRecord
from ragfence.stores.fences import (
    SOURCE_BYTES,
    ClaimStore,
    EpochStore,
    FenceStore,
    Lookup,
    RowStore,
)
from ragfence.testing.clock import VirtualClock

SHARD = 7
LEASE_MS = 30_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS

OPERATIONS = (Mode.KEYED, Mode.SEQUENCED, Mode.DOCUMENT)
"""the modes that seal; a lock has its own part of the contract"""
ALL_MODES = pytest.mark.parametrize("mode", OPERATIONS, ids=lambda mode: mode.name.lower())
WITH_A_SOURCE = pytest.mark.parametrize("mode", [Mode.SEQUENCED, Mode.DOCUMENT], ids=lambda mode: mode.name.lower())


class FencesUnderTest(Protocol):
    """A store for one test, and the world around it."""

    @property
    def store(self) -> FenceStore:
        """Of the tenant `default`, with an object store behind it (not solo), every shard ready at epoch 1."""
        ...

    @property
    def clock(self) -> VirtualClock:
        """The clock of the store; what has a TTL expires by it, too."""
        ...

    def reopen(self, tenant: str = "default", *, solo: bool = False) -> FenceStore:
        """Another handle on the same data, as another process has it. `solo`: no object store stands behind it."""
        ...

    def restart(self) -> None:
        """The data is served by another run than before, as after a restart, a failover or a restore."""
        ...

    def flush(self) -> None:
        """Everything is gone, of every tenant."""
        ...

    def plant_record(self, key: bytes, data: bytes) -> None:
        """Puts bytes where the record of a key stands, as some other version of ragfence may have done."""
        ...

    def plant_source(self, shard: int, source: bytes, data: bytes) -> None: ...


def claim(
    mode: Mode,
    revision: str = "A",
    *,
    by: str = "one",
    source: str = "source",
    shard: int = SHARD,
    content: str = "",
    **fields: Any,
) -> Claim:
    """`by` names the attempt and makes its token; `content` is what the fingerprint is made of, if not the revision."""
    if mode is Mode.SEQUENCED:
        fields.setdefault("sequence", 1)
    return Claim(
        **{
            "key": bytes((shard,)) + sha256(f"{source}/{revision}".encode()).digest(),
            "fingerprint": _digest(content or revision)[:FINGERPRINT_BYTES],
            "token": _digest(by)[:TOKEN_BYTES],
            "mode": mode,
            "source": source_of(source) if mode in (Mode.SEQUENCED, Mode.DOCUMENT) else b"",
            "lease_ms": LEASE_MS,
            "kind": "ticket",
            "context": b'{"kind":"ticket"}',
            **fields,
        }
    )


def ask(claim: Claim) -> HeadQuery:
    """What `replays` is asked for a claim of a document."""
    return HeadQuery(
        claim.key,
        claim.source,
        claim.fingerprint,
        claim.metadata_hash,
        claim.sequence,
        b"ask-" + claim.token[4:],
        claim.context,
    )


def source_of(source: str) -> bytes:
    return sha256(source.encode()).digest()[:SOURCE_BYTES]


def seal(claim: Claim, answer: Verdict, **fields: Any) -> Seal:
    """The seal of a claim that was granted."""
    assert isinstance(answer, Granted), answer
    return Seal(
        **{
            "key": claim.key,
            "token": claim.token,
            "fence": answer.record.fence,
            "mode": claim.mode,
            "source": claim.source,
            "sequence": claim.sequence,
            "metadata_hash": claim.metadata_hash,
            "live": not claim.retract,
            "result": b"j1",
            "context": claim.context,
            **fields,
        }
    )


def lease(claim: Claim, answer: Granted | None = None, **fields: Any) -> LeaseRef:
    """The lease of a claim; of one that was never granted, or whoever holds it, without an answer."""
    return LeaseRef(
        **{
            "key": claim.key,
            "token": claim.token,
            "mode": claim.mode,
            "source": claim.source,
            "lease_ms": claim.lease_ms,
            "pending_ttl_ms": claim.pending_ttl_ms,
            "source_ttl_ms": claim.source_ttl_ms,
            "epoch": answer.record.fence.epoch if answer else 0,
            "context": claim.context,
            **fields,
        }
    )


def verdict(store: ClaimStore, claim: Claim) -> Verdict:
    (answer,) = store.claim([claim])
    return answer


def granted(store: ClaimStore, claim: Claim) -> Granted:
    answer = verdict(store, claim)
    assert isinstance(answer, Granted), answer
    return answer


def sealed(store: ClaimStore, claim: Claim, **fields: Any) -> KeyRecord:
    """Claims, seals, and returns the receipt."""
    (outcome,) = store.seal([seal(claim, granted(store, claim), **fields)])
    assert isinstance(outcome, Sealed), outcome
    return outcome.record


def read(store: ClaimStore, claim: Claim) -> HeldRecords:
    (held,) = store.read([Lookup(claim.key, claim.mode, claim.source)])
    return held


def rows_of(store: RowStore) -> list[Row]:
    """Each row once: a row that was written twice has one id."""
    unique: dict[str, Row] = {}
    for row in store.rows():
        unique.setdefault(row.row_id, row)
    return list(unique.values())


def start_epoch(store: EpochStore, epoch: int) -> None:
    """What a hydration from an empty log does."""
    assert store.begin_epoch(epoch)
    assert store.finish_epoch(epoch)


def _digest(text: str) -> bytes:
    return sha256(text.encode()).digest()


def row_id(row: Row) -> str:
    return row.row_id
