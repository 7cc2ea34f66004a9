"""The protocols of a fence store: hot, atomic, small. Every call takes a batch; one operation is a batch of one.

    ClaimStore   claims, seals and leases; what is read to answer them
    EpochStore   hydration: markers, loading, and the lock that lets one process do it
    RowStore     decision rows and counts of answers
    Scanner      reads many records at once: heads, records, attempts
    FenceStore   all four, and how a store is named and closed

A method that compares a token does so atomically with what it writes, and writes its decision row in the same step.
Expiry is decided by the store's own clock. `ragfence.testing.FenceStoreContract` tests all of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ragfence.core.decision_rows import Row
from ragfence.core.decisions import Claim, HeadQuery, HeldRecords, LeaseRef, Mode, Seal, SealOutcome, Verdict
from ragfence.core.layout import ROW_ID, State
from ragfence.core.records import Head, KeyRecord
from ragfence.core.tallies import Tallies

SOURCE_BYTES = 20
"""How much of a source's digest names it in the fence store."""
PENDING_SEEN = 2_000
"""About how many attempts `stats` reads at most."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What to read: a key, and its source if the mode has one."""

    key: bytes
    mode: Mode = Mode.KEYED
    source: bytes = b""


@dataclass(frozen=True, slots=True)
class Marker:
    """Whether a shard may answer. `usable`: it is ready, and was made so by the server process that is running now."""

    epoch: int
    ready: bool
    usable: bool


class LoadedSource(NamedTuple):
    """A source from the log, to be written to the fence store."""

    shard: int
    source: bytes
    head: bytes
    """as `Head.encode` returns it: no object is made for any of its fields"""


class LoadedReceipt(NamedTuple):
    """The receipt of a superseded revision, to be written to the fence store."""

    key: bytes
    record: KeyRecord


Loaded = LoadedSource | LoadedReceipt


class RowEntry(NamedTuple):
    """Decision rows as they are stored: those of one call, or of one shard of it, one after the other."""

    place: str
    """where it is; places ascend in the order of `row_entries`, and none is used twice"""
    data: bytes
    """for `decode_rows` of `core/decision_rows.py`"""

    @property
    def first_row_id(self) -> str:
        """A row starts with its version, the token and the position."""
        return self.data[ROW_ID].hex()


@dataclass(frozen=True, slots=True)
class Scanned:
    key: bytes
    record: KeyRecord
    expires_ms: int | None
    source: bytes = b""
    """the source in whose record it is, if it is in one"""


@dataclass(frozen=True, slots=True)
class Pending:
    """Attempts without an outcome: held, released, or quarantined."""

    count: int = 0
    """exact"""
    seen: tuple[Scanned, ...] = ()
    """those that were read: all of them, unless there are thousands"""

    def by_state(self) -> Counter[tuple[str, str]]:
        """(kind, state) -> how many; if not all were read, an estimate from those that were."""
        found = Counter((each.record.kind, each.record.state.name.lower()) for each in self.seen)
        if not self.seen or self.count <= len(self.seen):
            return found
        return Counter({what: round(count * self.count / len(self.seen)) for what, count in found.items()})

    @property
    def oldest(self) -> Scanned | None:
        """The oldest that waits for an outcome. Quarantined ones wait to be released by hand, and locks for nothing."""
        others = (State.QUARANTINED, State.LOCKED)
        waiting = (each for each in self.seen if each.record.state not in others)
        return min(waiting, key=lambda each: each.record.first_seen_ms, default=None)


@dataclass(frozen=True, slots=True)
class Stats:
    """How much is stored, from counts that the store keeps as it answers: no records are scanned."""

    documents: int = 0
    """live ones, exact, of the shards that may answer"""
    records: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(kind, state) -> how many keys, without documents. For ended keys this is an estimate: see `Tallies`"""
    pending: Pending = field(default_factory=Pending)
    average_ttl_s: float | None = None
    """the average time until ended keys expire: an estimate, too"""
    rows: int = 0
    """decision rows, or entries of them, that are not drained yet"""
    bytes: int | None = None


def stats_of(documents: int, pending: Pending, tallies: Tallies, now_ms: int, rows: int, size: int | None) -> Stats:
    ended, average_ttl_s = tallies.live_keys(now_ms)
    return Stats(documents, ended + pending.by_state(), pending, average_ttl_s, rows, size)


class PendingWrite(Protocol):
    """A write that was sent to the store and is not confirmed yet."""

    def settle(self) -> None:
        """Wait until the store has confirmed it."""
        ...

    def discard(self) -> None:
        """Stop waiting for it. Does nothing after `settle`."""
        ...


class Replays:
    """The records that answer documents. Their rows may not be confirmed yet.

    Call `settle` before a caller is answered, or `discard` if no caller will be.
    """

    __slots__ = ("_rows", "records")

    def __init__(self, records: list[bytes | None], rows: PendingWrite | None = None) -> None:
        self.records = records
        """None: this document has to be claimed, which decides"""
        self._rows = rows

    def settle(self) -> None:
        if self._rows is not None:
            self._rows.settle()

    def discard(self) -> None:
        if self._rows is not None:
            self._rows.discard()

    def settled(self) -> list[bytes | None]:
        """The records, once their rows are confirmed."""
        self.settle()
        return self.records


class ClaimStore(Protocol):
    """Claims, seals and leases."""

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        """Decide each claim, in order, as `core.decisions.apply_claim` does."""
        ...

    def replays(self, queries: Sequence[HeadQuery]) -> Replays:
        """The records of documents whose live head is what the query names. Rows are written, nothing is claimed.

        If a source occurs more than once, its queries after the first unanswered one are not answered either.
        """
        ...

    def renew(self, leases: Sequence[LeaseRef]) -> list[bool]:
        """False: the lease is lost."""
        ...

    def seal(self, seals: Sequence[Seal]) -> list[SealOutcome]:
        """End leases with an outcome, as `core.decisions.apply_seal` does."""
        ...

    def release(
        self,
        leases: Sequence[LeaseRef],
        error: str = "",
        *,
        expire: bool = False,
        refund: bool = False,
        withdraw: bool = False,
    ) -> list[bool]:
        """End leases without an outcome; see `core.decisions.apply_release`.

        Args:
            leases: What to release.
            error: The code of the error, which the records keep.
            expire: Let the leases expire instead: the next claim is a takeover.
            refund: The attempts do not count.
            withdraw: Refund, and keep nothing of first attempts of documents.

        Returns:
            For each, whether it was still held.
        """
        ...

    def reset_attempts(self, leases: Sequence[LeaseRef]) -> list[bool]:
        """Give stuck or quarantined keys new attempts. False: there is no pending record."""
        ...

    def read(self, lookups: Sequence[Lookup]) -> list[HeldRecords]: ...

    def now_ms(self) -> int:
        """The store's own clock."""
        ...


class Scanner(Protocol):
    """Reads many records. Every scan may show a record twice, and one that changes meanwhile as it was or as it is."""

    def heads(self, shard: int) -> Iterator[tuple[bytes, Head]]:
        """(source, head) of the documents of a shard. Heads of operations with a sequence are left out."""
        ...

    def all_heads(self) -> Iterator[tuple[int, bytes, Head]]:
        """(shard, source, head) of every shard: on Redis one pass instead of 64."""
        ...

    def marks(self, shard: int | None = None) -> Iterator[tuple[int, bytes]]:
        """(shard, source + digest of its key + metadata hash) of every live document, or of those of one shard.

        A corpus digest is made of these, for less than the heads cost.
        """
        ...

    def scan(self, shard: int | None = None) -> Iterator[Scanned]:
        """The records of keys."""
        ...

    def leases(self, shard: int | None = None) -> Iterator[Scanned]:
        """Attempts in the records of sources: those of documents, and of operations with a sequence."""
        ...


class RowStore(Protocol):
    """Decision rows, and the counts that are kept with them."""

    def record(self, rows: Sequence[Row]) -> None: ...

    def rows(self, since_ms: int = 0, shard: int | None = None) -> Iterator[Row]: ...

    def row_entries(self, after: str = "", limit: int = 1000) -> list[RowEntry]:
        """Up to `limit` entries after a place, whose entry may be gone. Empty: there are no more."""
        ...

    def drop_rows(self, entries: Sequence[RowEntry]) -> int:
        """Delete exactly these entries, unless they changed since they were read, and return how many.

        The caller has stored their rows elsewhere. Rows that are written meanwhile stay.
        """
        ...

    def tallies(self, since_ms: int = 0) -> Tallies:
        """Answers by hour, from the hour of `since_ms`, as far back as counts are kept."""
        ...


class EpochStore(Protocol):
    """Hydration: which shards may answer, and how they are loaded."""

    def markers(self) -> list[Marker | None]:
        """One per shard."""
        ...

    def versions(self) -> list[tuple[int, int] | None]:
        """Per shard (epoch, head moves so far): equal versions, equal heads. None: the shard may not answer."""
        ...

    def begin_epoch(self, epoch: int) -> bool:
        """Put every shard into state `hydrating epoch`. False: one is in this epoch or a higher one already."""
        ...

    def load(self, epoch: int, items: Sequence[Loaded]) -> bool:
        """Write what the log holds.

        Returns False and changes nothing unless the shards are in state `hydrating epoch` on the server process that
        began the epoch.
        """
        ...

    def finish_epoch(self, epoch: int) -> bool:
        """Make every shard ready. False under the same conditions as `load`."""
        ...

    def forget_markers(self, below: int) -> None:
        """Shards of an older epoch stop answering, so that the next claim hydrates."""
        ...

    def lock(self, name: str, token: str, ttl_ms: int) -> bool:
        """For liveness only: nearly always, at most one process does the work at a time."""
        ...

    def unlock(self, name: str, token: str) -> None: ...


class FenceStore(ClaimStore, Scanner, RowStore, EpochStore, Protocol):
    """All of a fence store."""

    @property
    def url(self) -> str:
        """For people; never contains credentials."""
        ...

    @property
    def tenant(self) -> str: ...

    def forget(self, keys: Sequence[bytes], *, below: int = 0, pending: bool = False) -> None:
        """Delete ended records. The caller has written the row that ends their lives.

        Args:
            keys: Of which records.
            below: Receipts of superseded documents are deleted only if they are of an epoch below this one: those
                are not read any more.
            pending: Also delete records of attempts that failed, were released, or whose lease has expired, with what
                is kept of their payloads. A record whose lease is live is never deleted.
        """
        ...

    def purge_expired(self, limit: int = 1000) -> int:
        """Delete up to `limit` expired records, and return how many."""
        ...

    def scrub(self) -> None:
        """Remove what was deleted before from the files of the store, as far as the store controls them."""
        ...

    def stats(self) -> Stats:
        """At a cost that grows with what is pending, not with what is stored."""
        ...

    def close(self) -> None:
        """Calls that are running end, or raise `StoreClosed`, as every later one does. Nothing is left open."""
        ...


def all_of(fences: Scanner, shard: int | None = None) -> Iterator[Scanned]:
    """The records of keys, and the attempts in the records of sources."""
    yield from fences.scan(shard)
    yield from fences.leases(shard)
