"""What the audit costs where it is most of the work: known documents again, and bulk claims of sealed keys.

The audit cannot be turned off, so what it is compared with is a double of the store that exists only here: it answers
bulk replays without rows, without what is written into rows, and without the trip that writes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import ragfence
from ragfence.core.decisions import Claim
from ragfence.core.layout import is_ended
from ragfence.documents.claims import Caller
from ragfence.stores.redis import bulk as redis_replays
from ragfence.stores.redis.store import RedisFences
from tests import servers
from tests.bench.audit_scale import AuditScale
from tests.bench.bulk import Bulk
from tests.bench.documents_ours import Ours, WholeText, document
from tests.bench.peers.corpus import corpus
from tests.bench.rounds import Subject, clocked

DOCUMENTS, CLAIMS = "known documents again", "bulk claims of sealed keys"
ON, OFF = "with audit", "without"
_TENANT, _KNOWN = "audited", "known"


def named(what: str, how: str) -> str:
    return f"{what}, {how}"


class Unaudited(RedisFences):
    """Bulk replays leave no rows; everything else is as ever. Only inside `no_rows_made`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._bulk._rows = _NoRows()  # type: ignore[assignment]


class _NoRows:
    def begin(self, rows: object) -> _NoRows:
        return self

    def settle(self) -> None: ...

    def drop(self) -> None: ...


@contextlib.contextmanager
def no_rows_made() -> Iterator[None]:
    """Neither rows nor their contexts are put together."""
    with (
        patch.object(redis_replays, "row_of_query", lambda query, record, ts: b""),
        patch.object(redis_replays, "row_of_replay", _no_row),
        patch.object(Caller, "context", lambda *_, **__: b""),
    ):
        yield


def _no_row(claim: Claim, data: bytes, _ts: bytes) -> bytes | None:
    """As `codec.row_of_replay`, without the row."""
    return b"" if is_ended(data, claim.fingerprint) else None


@contextlib.contextmanager
def subjects(server: servers.RedisServer, scale: AuditScale) -> Iterator[list[Subject]]:
    with contextlib.ExitStack() as stack:
        known = {how: _documents(stack, server, scale, how) for how in (ON, OFF)}
        known[ON].ingest(_KNOWN, scale.documents, new=scale.documents)
        bulk = stack.enter_context(contextlib.closing(Bulk(server.url, "bulk")))
        without = stack.enter_context(contextlib.closing(Bulk(server.url, "bulk")))
        without._store.close()
        without._store = Unaudited(server.url, "bulk", solo=True)
        sealed = bulk.keys(scale.batch)
        bulk.perform(bulk.claims(sealed))
        yield [
            *(_again(known[how], scale, how) for how in (ON, OFF)),
            *(_replayed(one, sealed, scale, how) for one, how in ((bulk, ON), (without, OFF))),
        ]


def _documents(stack: contextlib.ExitStack, server: servers.RedisServer, scale: AuditScale, how: str) -> Ours:
    store = RedisFences if how == ON else Unaudited
    opened = ragfence.open(
        store(server.url, _TENANT), objects=server.folder / "objects", tenant=_TENANT, journal=server.folder / how
    )
    fence = stack.enter_context(opened)
    ours = Ours.__new__(Ours)  # its warm-up would find its document known
    ours.fence, ours.chunker, ours.sink = fence, WholeText(), None
    ours.documents, ours._options = fence.documents.using(chunker=ours.chunker), {"batch": scale.batch}
    return ours


def _again(known: Ours, scale: AuditScale, how: str) -> Subject:
    def seconds(_number: int) -> float:
        texts = [document(each) for each in corpus(_KNOWN, scale.documents)]
        with no_rows_made() if how == OFF else contextlib.nullcontext():
            return known.seconds(texts, new=0)

    return Subject(named(DOCUMENTS, how), scale.documents, seconds)


def _replayed(bulk: Bulk, sealed: Sequence[bytes], scale: AuditScale, how: str) -> Subject:
    def work(batches: list[list[Claim]]) -> None:
        for claims in batches:
            bulk.replay(claims)

    measured = clocked(work, prepare=lambda _: [bulk.claims(sealed) for _ in range(scale.batches)])

    def seconds(number: int) -> float:
        with no_rows_made() if how == OFF else contextlib.nullcontext():
            return measured(number)

    return Subject(named(CLAIMS, how), scale.batches * scale.batch, seconds)
