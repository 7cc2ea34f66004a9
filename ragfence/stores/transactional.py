"""The protocol over a tx of bytes: what SQLite does inside a transaction and the in-memory store under a lock.

A `Transaction` only gets, puts and counts. All that decides is in `core/decisions.py`; all that orders the
steps (marker, then records, then row) is here, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ragfence.core.decision_rows import Row, row_for_answer, row_for_claim, row_for_release, row_for_seal
from ragfence.core.decisions import (
    Change,
    Claim,
    Fenced,
    HeadQuery,
    HeldRecords,
    LeaseRef,
    Mode,
    NotReadyVerdict,
    Seal,
    Sealed,
    SealOutcome,
    Verdict,
    apply_attempt_reset,
    apply_claim,
    apply_release,
    apply_renewal,
    apply_seal,
)
from ragfence.core.hashing import SHARDS
from ragfence.core.layout import RowKind, checked_epoch, free_head, is_live_head, short, source_with, stamp_of
from ragfence.core.operations import FenceNumber
from ragfence.core.records import Head, KeyRecord, SourceRecord, decode_record, park, unpark
from ragfence.core.tallies import (
    BEGUN,
    HOUR_MS,
    NO_KEY,
    TallyOutcome,
    hours_of,
    label_of_row,
    make_label,
    outcome_of,
)
from ragfence.stores.fences import Loaded, LoadedSource, Lookup, Marker, Replays


class Transaction(Protocol):
    """One atomic view of a store. Expired entries are absent; `ttl_ms` 0 keeps an entry for ever."""

    @property
    def now_ms(self) -> int: ...
    @property
    def run_id(self) -> str: ...
    @property
    def solo(self) -> bool:
        """There is no object store: what this store loses cannot be restored."""
        ...

    def get_record(self, key: bytes) -> bytes | None: ...
    def put_record(self, key: bytes, data: bytes, ttl_ms: int, record: KeyRecord, *, parked: bool) -> None: ...
    def drop_record(self, key: bytes) -> None: ...
    def get_source(self, shard: int, source: bytes) -> bytes | None: ...
    def put_source(self, shard: int, source: bytes, data: bytes, ttl_ms: int) -> None: ...
    def get_marker(self, shard: int) -> tuple[bool, int, str] | None:
        """(ready, epoch, run_id)"""
        ...

    def put_marker(self, shard: int, marker: tuple[bool, int, str] | None) -> None: ...
    def next_counter(self, shard: int) -> int: ...
    def count_move(self, shard: int) -> None: ...
    def moves(self, shard: int) -> int: ...
    def count_documents(self, shard: int, change: int) -> None: ...
    def reset_documents(self, shard: int) -> None: ...
    def documents(self, shard: int) -> int: ...
    def tally(self, hour: int, label: bytes, count: int = 1) -> None: ...
    def counts(self) -> bool:
        """Whether anything was ever tallied, as far back as that is kept."""
        ...

    def add_row(self, row: Row) -> None: ...


Addressed = Claim | Seal | LeaseRef | Lookup


def claim_all(tx: Transaction, claims: Sequence[Claim]) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for claim in claims:
        shard = claim.key[0]
        epoch = usable_epoch(tx, shard)
        if epoch is None:
            verdicts.append(NotReadyVerdict())
            continue

        def next_fence(shard: int = shard, epoch: int = epoch) -> FenceNumber:
            return FenceNumber(epoch, tx.next_counter(shard))

        held = read_one(tx, claim, epoch)
        verdict, change = apply_claim(held, claim, tx.now_ms, stamp=epoch, next_fence=next_fence)
        if change:
            write(tx, claim, change, epoch, claim.pending_ttl_ms, claim.source_ttl_ms)
        if row := row_for_claim(claim, verdict, tx.now_ms):
            tx.add_row(row)
            if outcome := outcome_of(row):
                _tally(tx, outcome, "0", claim.kind, row)
        verdicts.append(verdict)
    return verdicts


def replay_all(tx: Transaction, queries: Sequence[HeadQuery]) -> list[bytes | None]:
    records: list[bytes | None] = []
    unclear: set[bytes] = set()
    for ask in queries:
        shard, record = ask.key[0], None
        epoch = ready_epoch(tx, shard)
        data = tx.get_source(shard, ask.source) if epoch is not None and ask.source not in unclear else None
        if data is not None and epoch is not None:
            stamp = None if tx.solo else stamp_of(epoch)
            record = free_head(data, stamp, ask.key[1:], ask.fingerprint, ask.metadata_hash, ask.sequence)
        records.append(record)
        if record is None:
            unclear.add(ask.source)
            continue
        answered = Claim(ask.key, ask.fingerprint, ask.token, Mode.DOCUMENT, ask.source, context=ask.context)
        held = decode_record(record)
        row = row_for_answer(answered, RowKind.DUPLICATE, held, tx.now_ms)
        tx.add_row(row)
        _tally(tx, TallyOutcome.DUPLICATE, "0", held.kind, row)
    return records


def seal_all(tx: Transaction, seals: Sequence[Seal]) -> list[SealOutcome]:
    outcomes: list[SealOutcome] = []
    for seal in seals:
        epoch = usable_epoch(tx, seal.key[0])
        if epoch is None:
            outcomes.append(NotReadyVerdict())
            continue
        held = read_one(tx, seal, epoch)
        outcome, change = apply_seal(held, seal, tx.now_ms, epoch=epoch)
        if change:
            write(tx, seal, change, epoch, seal.ttl_ms, seal.source_ttl_ms)
            if seal.mode is Mode.DOCUMENT:
                tx.count_move(seal.key[0])
                if moved := _is_live(change.source) - _is_live(held.source):
                    tx.count_documents(seal.key[0], moved)
        if row := row_for_seal(seal, outcome, tx.now_ms, solo=tx.solo):
            tx.add_row(row)
            if isinstance(outcome, Sealed):
                _tally_seal(tx, seal, outcome.record, change, row)
            else:
                _tally(
                    tx,
                    TallyOutcome.FENCED_OUT,
                    "0",
                    outcome.record.kind if isinstance(outcome, Fenced) and outcome.record else "",
                    row,
                )
        outcomes.append(outcome)
    return outcomes


def _is_live(source: SourceRecord | None) -> bool:
    return source is not None and source.head is not None and source.head.live


def _tally_seal(tx: Transaction, seal: Seal, record: KeyRecord, change: Change | None, row: Row) -> None:
    """Counts a seal once, if it left a key behind: a repeated one changes nothing."""
    if change is None:
        return
    outcome = TallyOutcome.HEALED if seal.duplicate else TallyOutcome.FAILED if seal.failed else TallyOutcome.NEW
    # None: it is in the head of its document; or the receipt stood there before, and only the top sequence moved.
    lifetime = NO_KEY if change.record is None else hours_of(seal.ttl_ms)
    _tally(tx, outcome, lifetime, record.kind, row)


def _tally(tx: Transaction, outcome: TallyOutcome, lifetime: str, kind: str, row: Row) -> None:
    tx.tally(row.ts_ms // HOUR_MS, make_label(outcome, lifetime, short(kind)[1:], row.context))


def record_all(tx: Transaction, rows: Sequence[Row]) -> None:
    for row in rows:
        tx.add_row(row)
        if label := label_of_row(row):
            tx.tally(row.ts_ms // HOUR_MS, label)


def tally_forgotten(tx: Transaction, record: KeyRecord, expires_ms: int | None) -> None:
    """An ended key was dropped before its time."""
    lifetime = hours_of(expires_ms - record.when_ms) if expires_ms is not None else "0"
    tx.tally(record.when_ms // HOUR_MS, make_label(TallyOutcome.FORGOTTEN, lifetime, short(record.kind)[1:], b""))


def count_documents(tx: Transaction) -> int:
    """The live documents of the shards that may answer."""
    return sum(tx.documents(shard) for shard in range(SHARDS) if tx.solo or ready_epoch(tx, shard) is not None)


def renew_all(tx: Transaction, leases: Sequence[LeaseRef]) -> list[bool]:
    kept = []
    for lease in leases:
        epoch = usable_epoch(tx, lease.key[0])
        ok = False
        if epoch is not None:
            ok, change = apply_renewal(read_one(tx, lease, epoch), lease, tx.now_ms, epoch=epoch)
            if change:
                write(tx, lease, change, epoch, lease.pending_ttl_ms, lease.source_ttl_ms)
        kept.append(ok)
    return kept


def release_all(
    tx: Transaction, leases: Sequence[LeaseRef], error: str, expire: bool, refund: bool, withdraw: bool
) -> list[bool]:
    released = []
    for lease in leases:
        epoch = usable_epoch(tx, lease.key[0])
        record = None
        if epoch is not None:
            held = read_one(tx, lease, epoch)
            record, change = apply_release(
                held, lease, tx.now_ms, error=error, expire=expire, refund=refund, withdraw=withdraw
            )
            if change:
                write(tx, lease, change, epoch, lease.pending_ttl_ms, lease.source_ttl_ms)
            if record:
                tx.add_row(row_for_release(lease, record, error, tx.now_ms))
        released.append(record is not None)
    return released


def pardon_all(tx: Transaction, leases: Sequence[LeaseRef]) -> list[bool]:
    pardoned = []
    for lease in leases:
        epoch = usable_epoch(tx, lease.key[0])
        after = None
        if epoch is not None:
            after, change = apply_attempt_reset(read_one(tx, lease, epoch), lease, tx.now_ms)
            if change:
                write(tx, lease, change, epoch, lease.pending_ttl_ms, lease.source_ttl_ms)
        pardoned.append(after is not None)
    return pardoned


def read_all(tx: Transaction, lookups: Sequence[Lookup]) -> list[HeldRecords]:
    found = []
    for lookup in lookups:
        epoch = ready_epoch(tx, lookup.key[0])
        found.append(HeldRecords() if epoch is None and not tx.solo else read_one(tx, lookup, epoch or 0))
    return found


def ready_epoch(tx: Transaction, shard: int) -> int | None:
    """The epoch of a shard that may answer. None: NOT_READY."""
    marker = tx.get_marker(shard)
    return marker[1] if marker and marker[0] and marker[2] == tx.run_id else None


def usable_epoch(tx: Transaction, shard: int) -> int | None:
    """Like `ready_epoch`, but a solo store that is not ready starts a new epoch, since nothing else could."""
    ready = ready_epoch(tx, shard)
    if ready is not None or not tx.solo:
        return ready
    marker = tx.get_marker(shard)
    epoch = checked_epoch(max(marker[1] + 1 if marker else 0, tx.now_ms * 1000))
    tx.put_marker(shard, (True, epoch, tx.run_id))
    return epoch


def read_one(tx: Transaction, what: Addressed, epoch: int) -> HeldRecords:
    stamp = None if tx.solo else epoch
    data = tx.get_record(what.key)
    record = None
    if data is not None:
        record = unpark(data, stamp) if what.mode is Mode.DOCUMENT else decode_record(data)
    source = None
    if what.mode is Mode.SEQUENCED or what.mode is Mode.DOCUMENT:
        raw = tx.get_source(what.key[0], what.source)
        source = SourceRecord.decode(raw) if raw is not None else None
        if source and stamp is not None and source.stamp != stamp:
            source = None  # the log did not bring it back, so it is void
    return HeldRecords(record, source)


def write(tx: Transaction, what: Addressed, change: Change, epoch: int, ttl_ms: int, source_ttl_ms: int) -> None:
    shard = what.key[:1]
    if change.drop_record:
        tx.drop_record(what.key)
    if change.record:
        tx.put_record(what.key, change.record.encode(), ttl_ms, change.record, parked=False)
    if change.set_aside:
        digest, aside = change.set_aside
        if tx.get_record(shard + digest) is None:
            tx.put_record(shard + digest, aside.encode(), ttl_ms, aside, parked=False)
    if change.park:
        digest, superseded = change.park
        tx.put_record(shard + digest, park(epoch, superseded), 0, superseded, parked=True)
    if change.source:
        tx.put_source(shard[0], what.source, change.source.encode(), source_ttl_ms)


def markers_of(tx: Transaction) -> list[Marker | None]:
    markers: list[Marker | None] = []
    for shard in range(SHARDS):
        raw = tx.get_marker(shard)
        markers.append(Marker(raw[1], raw[0], raw[0] and raw[2] == tx.run_id) if raw else None)
    return markers


def versions_of(tx: Transaction) -> list[tuple[int, int] | None]:
    versions: list[tuple[int, int] | None] = []
    for shard in range(SHARDS):
        epoch = ready_epoch(tx, shard)
        versions.append(None if epoch is None else (epoch, tx.moves(shard)))
    return versions


def begin_epoch(tx: Transaction, epoch: int) -> bool:
    known = [tx.get_marker(shard) for shard in range(SHARDS)]
    if any(marker and marker[1] >= epoch for marker in known):
        return False
    for shard in range(SHARDS):
        tx.put_marker(shard, (False, epoch, tx.run_id))
        tx.reset_documents(shard)
    if not tx.counts():  # a new store, or one that has forgotten what it had counted
        tx.tally(tx.now_ms // HOUR_MS, BEGUN, tx.now_ms)
    return True


def load_all(tx: Transaction, epoch: int, items: Sequence[Loaded]) -> bool:
    for item in items:
        shard = item.shard if isinstance(item, LoadedSource) else item.key[0]
        if not hydrating(tx, shard, epoch):
            return False
        if isinstance(item, LoadedSource):
            # A batch may be loaded twice, after a lost reply.
            before = tx.get_source(shard, item.source)
            counted = before is not None and SourceRecord.decode(before).stamp == epoch
            tx.put_source(shard, item.source, source_with(epoch, item.head), 0)
            was_live = counted and before is not None and _is_live(SourceRecord.decode(before))
            if moved := is_live_head(item.head) - was_live:
                tx.count_documents(shard, moved)
        else:
            tx.put_record(item.key, park(epoch, item.record), 0, item.record, parked=True)
    return True


def finish_epoch(tx: Transaction, epoch: int) -> bool:
    if not all(hydrating(tx, shard, epoch) for shard in range(SHARDS)):
        return False
    for shard in range(SHARDS):
        tx.put_marker(shard, (True, epoch, tx.run_id))
    return True


def hydrating(tx: Transaction, shard: int, epoch: int) -> bool:
    # The run_id too: a server that restarted in between may have lost what was loaded before.
    return tx.get_marker(shard) == (False, epoch, tx.run_id)


def forget_markers(tx: Transaction, below: int) -> None:
    for shard in range(SHARDS):
        marker = tx.get_marker(shard)
        if marker and marker[0] and marker[1] < below:
            tx.put_marker(shard, None)


class TransactionalFences(ABC):
    """A fence store whose every call is one transaction over a tx."""

    tenant: str
    solo: bool

    @abstractmethod
    def _transaction(self, *, write: bool = True) -> AbstractContextManager[Transaction]:
        """All or nothing: what was put is there when the block ends, and nothing of it when the block raises."""

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        with self._transaction() as tx:
            return claim_all(tx, claims)

    def replays(self, queries: Sequence[HeadQuery]) -> Replays:
        with self._transaction() as tx:
            return Replays(replay_all(tx, queries))

    def renew(self, leases: Sequence[LeaseRef]) -> list[bool]:
        with self._transaction() as tx:
            return renew_all(tx, leases)

    def seal(self, seals: Sequence[Seal]) -> list[SealOutcome]:
        with self._transaction() as tx:
            return seal_all(tx, seals)

    def release(
        self,
        leases: Sequence[LeaseRef],
        error: str = "",
        *,
        expire: bool = False,
        refund: bool = False,
        withdraw: bool = False,
    ) -> list[bool]:
        with self._transaction() as tx:
            return release_all(tx, leases, error, expire, refund, withdraw)

    def reset_attempts(self, leases: Sequence[LeaseRef]) -> list[bool]:
        with self._transaction() as tx:
            return pardon_all(tx, leases)

    def read(self, lookups: Sequence[Lookup]) -> list[HeldRecords]:
        with self._transaction(write=False) as tx:
            return read_all(tx, lookups)

    def record(self, rows: Sequence[Row]) -> None:
        with self._transaction() as tx:
            record_all(tx, rows)

    @abstractmethod
    def heads(self, shard: int) -> Iterator[tuple[bytes, Head]]: ...

    def all_heads(self) -> Iterator[tuple[int, bytes, Head]]:
        for shard in range(SHARDS):
            for source, head in self.heads(shard):
                yield shard, source, head

    def marks(self, shard: int | None = None) -> Iterator[tuple[int, bytes]]:
        for each in range(SHARDS) if shard is None else (shard,):
            for source, head in self.heads(each):
                if head.live:
                    yield each, source + head.digest + head.metadata_hash

    def markers(self) -> list[Marker | None]:
        with self._transaction(write=False) as tx:
            return markers_of(tx)

    def versions(self) -> list[tuple[int, int] | None]:
        with self._transaction(write=False) as tx:
            return versions_of(tx)

    def begin_epoch(self, epoch: int) -> bool:
        with self._transaction() as tx:
            return begin_epoch(tx, checked_epoch(epoch))

    def load(self, epoch: int, items: Sequence[Loaded]) -> bool:
        with self._transaction() as tx:
            return load_all(tx, epoch, items)

    def finish_epoch(self, epoch: int) -> bool:
        with self._transaction() as tx:
            return finish_epoch(tx, epoch)

    def forget_markers(self, below: int) -> None:
        with self._transaction() as tx:
            forget_markers(tx, below)
