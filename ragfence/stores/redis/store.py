"""RedisFences: the fence store for many machines, on Redis 6.2 or newer, or Valkey.

A single claim is one script call that decides and writes the decision row. A batch is one MGET, which answers the
replays, then calls that claim the rest and write the rows of all. Expiry is decided by Redis' own TIME. Every script is
repeatable with the same token, so a call whose reply was lost is simply sent again.

Redis is the fast index, not the truth: shards answer only while their marker carries the run_id of the very server
process that answers. After a restart, failover or flush they are hydrated from the object store first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from ragfence.core.decision_rows import Row
from ragfence.core.decisions import (
    DOCUMENT,
    KEYED,
    LOCK,
    SEQUENCED,
    Claim,
    HeadQuery,
    HeldRecords,
    LeaseRef,
    Seal,
    SealOutcome,
    Verdict,
)
from ragfence.core.layout import MARKER_READY, checked_epoch, is_parked, mark_of_source, short, source_with, stamp_of
from ragfence.core.records import Head, SourceRecord, decode_record, head_of_source, lease_of_source, park, unpark
from ragfence.core.tallies import HOUR_MS, Tallies, label_of_row
from ragfence.errors import StoreUnavailable
from ragfence.stores.fences import Loaded, LoadedSource, Lookup, Marker, Replays, RowEntry, Scanned, Stats, stats_of
from ragfence.stores.redis.bulk import BulkReplays, ScriptBatches
from ragfence.stores.redis.calls import Needed, RedisCalls, always
from ragfence.stores.redis.codec import (
    REPLAYED,
    Names,
    lease_done,
    outcome_of,
    pack_claim,
    pack_lease,
    pack_seal,
    verdict_of,
)
from ragfence.stores.redis.connection import Link, RedisCall, ServerLink
from ragfence.stores.redis.replies import REDIS_ERRORS, in_our_words, list_of, number, understood
from ragfence.stores.redis.requirements import Confirmation, refuse_unsafe, refuse_without_aof
from ragfence.stores.redis.row_streams import NewRows, RowStreams
from ragfence.stores.redis.scans import Reader, RecordSnapshot, StoreCounts
from ragfence.stores.redis.scripts import Alone, scripts
from ragfence.stores.redis.server_urls import open_link

SOLO_ROWS_PER_SHARD = 2_000
"""Without an object store nothing drains the rows: the newest batches are kept."""

LOADED_AT_ONCE = 8
"""shards: the server stores what was sent of them while the next are packed"""

Answered = TypeVar("Answered", Verdict, SealOutcome)
_FOR_ONE = {"claim": (b"", b"", b"1"), "seal": (b"1",)}
"""What stands between the ARGV of a shard and its single item: its number, and before that a claim's other rows and
what these are counted under."""


def _tells_of_a_seal(replies: list[Any]) -> bool:
    """Whether a reply answers with a seal. Its caller relies on the seal as the owner does, so it is confirmed too.

    The row of the answer was written after the seal, so confirming the row confirms the seal.
    """
    return any(item[:1] == REPLAYED for reply in replies for item in reply)


class RedisFences:
    def __init__(
        self,
        url: str,
        tenant: str = "default",
        *,
        solo: bool = False,
        confirm: Confirmation | None = None,
        timeout_s: float = 5.0,
        test_clock: str | None = None,
    ) -> None:
        self.tenant = tenant
        self.solo = solo
        self._names = Names(tenant)
        self._most_rows = SOLO_ROWS_PER_SHARD if solo else 0
        self._solo = b"1" if solo else b"0"
        self._common = (self._solo, b"1", b"%d" % self._most_rows)
        """the ARGV in front of the single group of a batch of one"""
        self._confirm = confirm or Confirmation()
        patience_s = max(timeout_s, self._confirm.timeout_ms / 1000 + 1)
        self._link: Link = open_link(url, timeout_s=patience_s, hash_tags=self._names.prefixes)
        self.url = self._link.url
        self._scripts = scripts(test_clock, clustered=self._link.clustered)
        self._asking = RedisCalls(self._link, self._scripts, self._confirm)
        self._batches = ScriptBatches(self._asking, self._names, solo=solo, most_rows=self._most_rows)
        self._heads = self._batches.heads
        self._server = self._link if isinstance(self._link, ServerLink) and not self._asking.waits_for else None
        """what can be asked by a call that was packed ahead"""
        self._ahead = {name: self._packed_ahead(name) for name in ("claim", "seal")}
        self._reader = Reader(self._link, self._names, test_clock)
        self._rows = RowStreams(self._asking, self._names, self._most_rows, real_clock=test_clock is None)
        self._bulk = BulkReplays(self._reader, self._names, self._rows, self._held)
        self._counts = StoreCounts(self._asking, self._reader, self._names, solo=solo)
        try:
            self._refuse_unsafe_servers()
        except BaseException:
            self._link.close()
            raise

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        if len(claims) == 1:
            return [verdict_of(self._alone("claim", claims[0], pack_claim(claims[0]), _tells_of_a_seal))]
        if not claims:
            return []
        hits, rows = self._bulk.of_claims(claims)
        misses = [claim for claim, hit in zip(claims, hits, strict=True) if hit is None]
        if not misses:
            return [hit for hit in hits if hit is not None]
        confirm = always if rows.encoded else _tells_of_a_seal
        rest = iter(self._batches.run("claim", misses, pack_claim, verdict_of, b"", rows=rows, confirm=confirm))
        return [hit or next(rest) for hit in hits]

    def replays(self, queries: Sequence[HeadQuery]) -> Replays:
        return self._bulk.of_documents(queries) if queries else Replays([])

    def seal(self, seals: Sequence[Seal]) -> list[SealOutcome]:
        if len(seals) == 1:
            return [outcome_of(self._alone("seal", seals[0], pack_seal(seals[0]), always))]
        return self._batches.run("seal", seals, pack_seal, outcome_of, b"", confirm=always)

    def renew(self, leases: Sequence[LeaseRef]) -> list[bool]:
        return self._lease_call("renew", leases)

    def release(
        self,
        leases: Sequence[LeaseRef],
        error: str = "",
        *,
        expire: bool = False,
        refund: bool = False,
        withdraw: bool = False,
    ) -> list[bool]:
        return self._lease_call(
            "expire" if expire else "release",
            leases,
            short(error)[1:],
            refund=b"2" if withdraw else b"1" if refund else b"0",
        )

    def reset_attempts(self, leases: Sequence[LeaseRef]) -> list[bool]:
        return self._lease_call("reset_attempts", leases)

    def read(self, lookups: Sequence[Lookup]) -> list[HeldRecords]:
        if not lookups:
            return []
        found = self._snapshot(lookups)
        sources = iter(found.values[len(lookups) :])
        return [
            self._held(lookup, data, next(sources) if lookup.source else None, found.epochs[lookup.key[0]])
            for lookup, data in zip(lookups, found.values, strict=False)
        ]

    def heads(self, shard: int) -> Iterator[tuple[bytes, Head]]:
        return ((source, head) for _, source, head in self._heads_in(shard))

    def all_heads(self) -> Iterator[tuple[int, bytes, Head]]:
        return self._heads_in(None)

    def marks(self, shard: int | None = None) -> Iterator[tuple[int, bytes]]:
        for held_in, source, data, stamp in self._sources_in(shard):
            mark = mark_of_source(data, stamp)
            if mark is not None:
                yield held_in, source + mark

    def _heads_in(self, wanted: int | None) -> Iterator[tuple[int, bytes, Head]]:
        for shard, source, data, stamp in self._sources_in(wanted):
            head = head_of_source(data, stamp)
            if head is not None and head.record is not None:
                yield shard, source, head

    def _sources_in(self, wanted: int | None) -> Iterator[tuple[int, bytes, bytes, bytes | None]]:
        """Shard, source, its record, and the stamp that this must have; None: any will do."""
        shards = range(len(self._names.markers)) if wanted is None else [wanted]
        epochs = self._reader.snapshot([], shards).epochs
        # A shard that may not answer has the empty stamp, which no record carries.
        stamps = {shard: stamp_of(epoch) for shard, epoch in epochs.items()}
        start = len(self._names.prefixes[0]) + 1
        for shard, name, data in self._reader.scan(b"s", wanted):
            yield shard, name[start:], data, None if self.solo else stamps[shard]

    def leases(self, shard: int | None = None) -> Iterator[Scanned]:
        for held_in, source, data, stamp in self._sources_in(shard):
            if lease := lease_of_source(data, stamp):
                yield Scanned(bytes((held_in,)) + lease.digest, lease.record, None, source)

    def scan(self, shard: int | None = None) -> Iterator[Scanned]:
        for held_in, name, data, expires_ms in self._reader.scan_expiring(b"k", shard):
            key = bytes((held_in,)) + name[name.index(b"}") + 2 :]
            record = unpark(data, None) if is_parked(data) else decode_record(data)
            if record:
                yield Scanned(key, record, expires_ms)

    def forget(self, keys: Sequence[bytes], *, below: int = 0, pending: bool = False) -> None:
        by_shard: dict[int, list[bytes]] = {}
        for key in keys:
            by_shard.setdefault(key[0], []).append(self._names.record(key))
        if by_shard:
            self._epoch_call("forget_pending" if pending else "forget_ended", below, records=by_shard)

    def scrub(self) -> None:
        """Redis frees what it deletes; its files (RDB, AOF) are rewritten when the server decides."""

    def stats(self) -> Stats:
        now_ms = self.now_ms()
        rows = sum(self._rows.lengths(range(len(self._names.rows))))
        size = sum(int(info.get("used_memory", 0)) for info in self.infos())
        documents, pending = self._counts.documents(), self._counts.pending(now_ms)
        return stats_of(documents, pending, self._rows.tallies(0, now_ms), now_ms, rows, size)

    def tallies(self, since_ms: int = 0) -> Tallies:
        return self._rows.tallies(since_ms, self.now_ms())

    def infos(self) -> list[dict[str, Any]]:
        """What each server that takes writes says of itself: its INFO, and `node`, its address."""
        with understood(self.url), self._link.commands():
            return [{**client.info(), "node": name} for name, client in self._link.primaries()]

    def purge_expired(self, limit: int = 1000) -> int:
        """Redis deletes expired records itself."""
        return 0

    def record(self, rows: Sequence[Row]) -> None:
        by_hour: dict[int, NewRows] = {}
        for row in rows:
            hour = row.ts_ms // HOUR_MS
            by_hour.setdefault(hour, NewRows(hour * HOUR_MS)).add(row.key[0], row.encode(), label_of_row(row))
        self._rows.add(list(by_hour.values()))

    def rows(self, since_ms: int = 0, shard: int | None = None) -> Iterator[Row]:
        return self._rows.read(since_ms, shard)

    def row_entries(self, after: str = "", limit: int = 1000) -> list[RowEntry]:
        return self._rows.entries(after, limit)

    def drop_rows(self, entries: Sequence[RowEntry]) -> int:
        return self._rows.delete(entries)

    def now_ms(self) -> int:
        return self._reader.snapshot([], [0]).now_ms

    def markers(self) -> list[Marker | None]:
        shards = range(len(self._names.markers))
        snapshot = self._reader.snapshot([], shards)
        found: list[Marker | None] = []
        for shard in shards:
            if (raw := snapshot.markers[shard]) is None:
                found.append(None)
                continue
            state, epoch, _ = raw.split(b":", 2)
            found.append(Marker(int(epoch), state == MARKER_READY.encode(), snapshot.epochs[shard] is not None))
        return found

    def versions(self) -> list[tuple[int, int] | None]:
        found = self._reader.snapshot(list(enumerate(self._names.moves)))
        return [
            None if (epoch := found.epochs[shard]) is None else (epoch, int(moves or 0))
            for shard, moves in enumerate(found.values)
        ]

    def begin_epoch(self, epoch: int) -> bool:
        self._refuse_unsafe_servers()  # after a failover it is another server than the one that was opened
        return self._epoch_call("begin", checked_epoch(epoch))

    def load(self, epoch: int, items: Sequence[Loaded]) -> bool:
        by_shard: dict[int, list[Loaded]] = {}
        for item in items:
            by_shard.setdefault(item.shard if isinstance(item, LoadedSource) else item.key[0], []).append(item)
        shards = list(by_shard.items())
        parts = (
            [self._loading(epoch, *some) for some in shards[at : at + LOADED_AT_ONCE]]
            for at in range(0, len(shards), LOADED_AT_ONCE)
        )
        replies = list(self._asking.in_parts(self._scripts["epoch"], parts))
        return all(chain.from_iterable(replies))

    def finish_epoch(self, epoch: int) -> bool:
        return self._epoch_call("finish", epoch)

    def forget_markers(self, below: int) -> None:
        self._epoch_call("forget", below)

    def lock(self, name: str, token: str, ttl_ms: int) -> bool:
        key = self._names.lock(name)
        with understood(self.url), self._link.commands() as client:
            if client.set(key, token, nx=True, px=ttl_ms):
                return True
            return bool(client.get(key) == token.encode() and client.pexpire(key, ttl_ms))

    def unlock(self, name: str, token: str) -> None:
        key = self._names.lock(name)
        with understood(self.url), self._link.commands() as client:
            if client.get(key) == token.encode():
                client.delete(key)

    def close(self) -> None:
        self._link.close()

    def _snapshot(self, asked: Sequence[Lookup] | Sequence[Claim]) -> RecordSnapshot:
        """All records, then the sources of those who have one."""
        record = self._names.record
        wanted = [(each.key[0], record(each.key)) for each in asked]
        wanted += [(each.key[0], self._names.source(each.key[0], each.source)) for each in asked if each.source]
        return self._reader.snapshot(wanted)

    def _held(
        self, lookup: Lookup | Claim, record: bytes | None, source: bytes | None, epoch: int | None
    ) -> HeldRecords:
        if epoch is None and not self.solo:
            return HeldRecords()
        stamp = None if self.solo else epoch
        if lookup.mode is DOCUMENT:
            found = unpark(record, stamp) if record else None
        else:
            found = decode_record(record) if record else None
        there = (
            SourceRecord.decode(source) if source and (lookup.mode is SEQUENCED or lookup.mode is DOCUMENT) else None
        )
        if there and stamp is not None and there.stamp != stamp:
            there = None
        return HeldRecords(found, there)

    def _lease_call(
        self, action: str, leases: Sequence[LeaseRef], error: bytes = b"", *, refund: bytes = b"0"
    ) -> list[bool]:
        return self._batches.run("lease", leases, pack_lease, lease_done, action, error, refund)

    def _alone(self, script: str, item: Claim | Seal, packed: bytes, confirm: Needed) -> Any:
        """The reply to a batch of one, which most are: nothing to group, nothing to put in order."""
        if self._server is not None and (item.mode is KEYED or item.mode is LOCK):
            try:
                answered = self._server.ask(*self._around_run_id(script, item, packed))
            except REDIS_ERRORS as error:
                raise in_our_words(self.url, error) from error
            if type(answered) is bytes:
                return answered
            if not isinstance(answered, Exception):  # it was sent again, without a run_id
                return answered[0]
        shard, made = item.key[0], self._scripts[script]
        keys, args = self._heads[script][shard]
        given = (*self._common, b"", *args, *_FOR_ONE[script], packed)
        call = RedisCall(shard, made.call((*keys, *self._names.keys_of(item)), given), list_of(1, bytes))
        return self._asking.called(made, [call], confirm)[0][0]

    def _packed_ahead(self, script: str) -> list[Alone]:
        return [
            Alone.of(self._scripts[script], keys, prefix, self._common, (*args, *_FOR_ONE[script]))
            for (keys, args), prefix in zip(self._heads[script], self._names.records, strict=True)
        ]

    def _around_run_id(self, script: str, item: Claim | Seal | LeaseRef, packed: bytes) -> tuple[bytes, bytes]:
        """The call of a batch of one, packed, in two parts: the run_id of the server goes between them."""
        to_digest, to_run_id, to_item = self._ahead[script][item.key[0]]
        return to_digest + item.key[1:] + to_run_id, b"%b$%d\r\n%b\r\n" % (to_item, len(packed), packed)

    def _loading(self, epoch: int, shard: int, items: Sequence[Loaded]) -> RedisCall:
        names, values = [self._names.markers[shard]], []
        for item in items:
            if isinstance(item, LoadedSource):
                names.append(self._names.source(shard, item.source))
                values.append(source_with(epoch, item.head))
            else:
                names.append(self._names.record(item.key))
                values.append(park(epoch, item.record))
        return RedisCall(shard, self._scripts["epoch"].call(names, (b"load", epoch, *values)), number)

    def _epoch_call(self, action: str, epoch: int = 0, records: Mapping[int, Sequence[bytes]] | None = None) -> bool:
        """About the markers of all shards, at once unless it is a cluster; or about these records, shard by shard."""
        script, markers = self._scripts["epoch"], self._names.markers
        if records is None and not self._link.clustered:
            return all(self._asking.called(script, [RedisCall(0, script.call(markers, (action, epoch)), number)]))
        shards = dict.fromkeys(range(len(markers)), ()) if records is None else records
        calls = [
            RedisCall(shard, script.call([markers[shard], *names], (action, epoch)), number)
            for shard, names in shards.items()
        ]
        return all(self._asking.called(script, calls))

    def _refuse_unsafe_servers(self) -> None:
        for info in self.infos():
            if info.get("role") != "master" and self._link.elects:
                raise StoreUnavailable(
                    f"{self.url}: {info['node']} was named as a primary and is a replica",
                    hint="a failover is under way; try again",
                )
            refuse_unsafe(self.url, info)
            if self._confirm.aof:
                refuse_without_aof(self.url, info)
