"""The fence store protocol: hot, atomic, small, batch-first. A single operation is a batch of one.

Every method that compares a token does so atomically with what it writes, and writes its decision row in the same
step. Expiry is decided by the store's own clock. `ragfence.testing.FenceStoreContract` is the executable form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ragfence.core.decision_rows import Row
from ragfence.core.decisions import Ask, Claim, HeldRecords, LeaseRef, Mode, Seal, SealOutcome, Verdict
from ragfence.core.layout import ROW_ID, State
from ragfence.core.records import Head, KeyRecord
from ragfence.core.tallies import Tallies

SOURCE_BYTES = 20
"""How much of a source's digest names it in the fence store."""
PENDING_SEEN = 2_000
"""How many attempts `stats` reads at most, about."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What to read: a key, and its source where the mode has one."""

    key: bytes
    mode: Mode = Mode.KEYED
    source: bytes = b""


@dataclass(frozen=True, slots=True)
class Marker:
    """Whether a shard may answer. `usable`: it is ready, and the server is the one that made it ready."""

    epoch: int
    ready: bool
    usable: bool


class LoadedSource(NamedTuple):
    """A source as the log has it, on its way into the fence store."""

    shard: int
    source: bytes
    head: bytes
    """as `Head.encode` has it: no object is made for any of its fields"""


class LoadedReceipt(NamedTuple):
    """The receipt of a superseded revision, on its way into the fence store."""

    key: bytes
    record: KeyRecord


Loaded = LoadedSource | LoadedReceipt


class RowEntry(NamedTuple):
    """Decision rows as the store keeps them: those of one call, or of one shard of it, one behind the other."""

    place: str
    """where it is; places ascend in the order of `row_entries`, and none is ever given twice"""
    data: bytes
    """for `core.rows.decode_rows`"""

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
    """where it stands, if that is the record of a source"""


@dataclass(frozen=True, slots=True)
class Pending:
    """Attempts without an outcome: held, released, or quarantined."""

    count: int = 0
    """exact"""
    seen: tuple[Scanned, ...] = ()
    """as many of them as are read; all of them unless there are thousands"""

    def by_state(self) -> Counter[tuple[str, str]]:
        """(kind, state) -> how many; where not all were read, as many as their share of those that were."""
        found = Counter((each.record.kind, each.record.state.name.lower()) for each in self.seen)
        if not self.seen or self.count <= len(self.seen):
            return found
        return Counter({what: round(count * self.count / len(self.seen)) for what, count in found.items()})

    @property
    def oldest(self) -> Scanned | None:
        """Of those that wait for their outcome: quarantined ones wait for somebody to release them."""
        waiting = (each for each in self.seen if each.record.state is not State.QUARANTINED)
        return min(waiting, key=lambda each: each.record.first_seen_ms, default=None)


@dataclass(frozen=True, slots=True)
class Stats:
    """What a store holds, from counts that it keeps as it answers: no record is looked for."""

    documents: int = 0
    """live ones, exact, of the shards that may answer"""
    records: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(kind, state) -> how many keys, without documents. Of those that ended it is an estimate: see `Tallies`"""
    pending: Pending = field(default_factory=Pending)
    average_ttl_s: float | None = None
    """how long those that ended and expire are still held, on average: an estimate, too"""
    rows: int = 0
    """decision rows, or entries of them, that are not drained yet"""
    bytes: int | None = None


def stats_of(documents: int, pending: Pending, tallies: Tallies, now_ms: int, rows: int, size: int | None) -> Stats:
    ended, average_ttl_s = tallies.live_keys(now_ms)
    return Stats(documents, ended + pending.by_state(), pending, average_ttl_s, rows, size)


class Writing(Protocol):
    """Something that the store was sent and has not confirmed yet."""

    def settle(self) -> None: ...

    def drop(self) -> None:
        """Nobody waits for it any more. After `settle` it does nothing."""
        ...


class Replays:
    """The records that documents are answered with. Their rows may still be on their way: nobody is told before
    `settle`, and whoever does not settle drops."""

    __slots__ = ("_rows", "records")

    def __init__(self, records: list[bytes | None], rows: Writing | None = None) -> None:
        self.records = records
        """None: ask by a claim, which decides"""
        self._rows = rows

    def settle(self) -> None:
        if self._rows is not None:
            self._rows.settle()

    def drop(self) -> None:
        if self._rows is not None:
            self._rows.drop()

    def settled(self) -> list[bytes | None]:
        self.settle()
        return self.records


class FenceStore(Protocol):
    @property
    def url(self) -> str:
        """For people; never contains credentials."""
        ...

    @property
    def tenant(self) -> str: ...

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]: ...

    def replays(self, asks: Sequence[Ask]) -> Replays:
        """The records of documents whose live heads are just what is asked; their rows are written, nothing is claimed.

        Of a source that stands twice, nothing is answered after a None.
        """
        ...

    def renew(self, leases: Sequence[LeaseRef]) -> list[bool]:
        """False: the lease is lost."""
        ...

    def seal(self, seals: Sequence[Seal]) -> list[SealOutcome]: ...

    def release(
        self,
        leases: Sequence[LeaseRef],
        error: str = "",
        *,
        expire: bool = False,
        refund: bool = False,
        withdraw: bool = False,
    ) -> list[bool]:
        """Ends leases without an outcome. `refund`: the attempts do not count; `withdraw`: nor is anything left of
        first ones; see `core.decisions.settle_release`."""
        ...

    def pardon(self, leases: Sequence[LeaseRef]) -> list[bool]: ...

    def read(self, lookups: Sequence[Lookup]) -> list[HeldRecords]: ...

    def heads(self, shard: int) -> Iterator[tuple[bytes, Head]]:
        """The heads of documents. The head of an operation with a sequence is not one of them.

        May show a head twice, and one that moves meanwhile as it was or as it is.
        """
        ...

    def all_heads(self) -> Iterator[tuple[int, bytes, Head]]:
        """(shard, source, head) of every shard: for Redis one pass instead of 64."""
        ...

    def marks(self, shard: int | None = None) -> Iterator[tuple[int, bytes]]:
        """(shard, source + digest of its key + metadata hash) of every live document, or of those of one shard.

        What a corpus digest is made of, for less than the heads cost. As them, one may come twice.
        """
        ...

    def scan(self, shard: int | None = None) -> Iterator[Scanned]:
        """The records of keys. May show one twice."""
        ...

    def leases(self, shard: int | None = None) -> Iterator[Scanned]:
        """Attempts that stand in the record of their source: those of documents, and of operations with a sequence."""
        ...

    def forget(self, keys: Sequence[bytes], *, below: int = 0, pending: bool = False) -> None:
        """Drops ended records. Whoever calls it has written the row that ends their lives.

        `pending`: also records of attempts that failed, were given back, or whose lease has run out, with what is kept
        of their payloads. A record whose lease is live is never dropped.

        Receipts of superseded documents go only if they are of an epoch below `below`: they answer nobody any more.
        """
        ...

    def scrub(self) -> None:
        """What was deleted before is in no file of the store any more, as far as the store decides that."""
        ...

    def stats(self) -> Stats:
        """At a cost that does not grow with what is held, but with what is pending."""
        ...

    def tallies(self, since_ms: int = 0) -> Tallies:
        """What was answered, by hours, from the hour of a moment on; as far back as counts are kept."""
        ...

    def purge_expired(self, limit: int = 1000) -> int: ...

    def record(self, rows: Sequence[Row]) -> None: ...

    def rows(self, since_ms: int = 0, shard: int | None = None) -> Iterator[Row]: ...

    def row_entries(self, after: str = "", limit: int = 1000) -> list[RowEntry]:
        """Up to `limit` entries behind a place, which may be gone by now; nothing when there are no more."""
        ...

    def drop_rows(self, entries: Sequence[RowEntry]) -> int:
        """Removes just these, as far as they still are what was read, and says how many.

        Whoever calls it has stored their rows elsewhere. What is written meanwhile stays, wherever it is written.
        """
        ...

    def now_ms(self) -> int: ...

    def markers(self) -> list[Marker | None]:
        """One per shard."""
        ...

    def versions(self) -> list[tuple[int, int] | None]:
        """Per shard (epoch, head moves so far): equal versions, equal heads. None where the shard may not answer."""
        ...

    def begin_epoch(self, epoch: int) -> bool:
        """Every shard is `hydrating epoch` from now on. False: a higher epoch is already there."""
        ...

    def load(self, epoch: int, items: Sequence[Loaded]) -> bool:
        """Does nothing, and says False, unless the shards are `hydrating epoch` on the server that began it."""
        ...

    def finish_epoch(self, epoch: int) -> bool: ...

    def forget_markers(self, below: int) -> None:
        """Shards of an older epoch stop answering, so that the next claim hydrates."""
        ...

    def lock(self, name: str, token: str, ttl_ms: int) -> bool:
        """For liveness only: at most one process does the work at a time, most of the time."""
        ...

    def unlock(self, name: str, token: str) -> None: ...

    def close(self) -> None:
        """Calls that are under way end, or raise `StoreClosed`, as every later one does. Nothing is left open."""
        ...


def all_of(fences: FenceStore, shard: int | None = None) -> Iterator[Scanned]:
    """What is held of keys, wherever it stands: their records, and the attempts in the records of sources."""
    yield from fences.scan(shard)
    yield from fences.leases(shard)
