"""Reading from Redis without deciding: consistent snapshots of records and markers, and scans.

What a Redis holds, from counts that the scripts keep as they answer.

    c   a hash per shard: `e` the epoch and `m` the count of head moves up to which it is right, `d` live documents
    p   a sorted set per shard: the digests of keys without an outcome, by the time at which they expire
    q   the same of sources

The counts of a shard are right if `e` is its epoch and `m` its count of moves. If not, an older ragfence wrote it, or
still does: then the shard is counted, once, and that is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ragfence.core.layout import MARKER_READY, mark_of_source, stamp_of
from ragfence.core.records import decode_record, lease_of_source
from ragfence.errors import REHYDRATE, FormatCorrupt
from ragfence.stores.fences import PENDING_SEEN, Pending, Scanned
from ragfence.stores.redis.calls import RedisCalls
from ragfence.stores.redis.codec import Names
from ragfence.stores.redis.connection import Link, RedisCall, run_id_in
from ragfence.stores.redis.replies import Command, understood

SCAN_PAGE = 1000
SCAN_COUNT = 5000
"""keys, whosesoever, that one SCAN passes over: about a millisecond of the server's time"""
_INFO: Command = (b"INFO", b"server")
_TIME: Command = (b"TIME",)


@dataclass(frozen=True, slots=True)
class RecordSnapshot:
    now_ms: int
    markers: dict[int, bytes | None]
    epochs: dict[int, int | None]
    """per shard: its epoch, or None where it may not answer"""
    values: list[bytes | None]


class Reader:
    def __init__(self, link: Link, names: Names, test_clock: str | None) -> None:
        self._link = link
        self._names = names
        self._test_clock = test_clock

    def snapshot(self, wanted: Sequence[tuple[int, bytes]], shards: Sequence[int] = ()) -> RecordSnapshot:
        """The values of (shard, name), and of the markers, each with the run_id of the very server that answered."""
        batches, places = self._parted(wanted, shards)
        calls = []
        for batch, members in zip(batches, places, strict=True):
            names = [*self._clock(batch[0]), *(self._names.markers[shard] for shard in batch)]
            calls.append(RedisCall(batch[0], (b"MGET", *names, *[wanted[at][1] for at in members])))
        done = self._answered(calls, after=(_INFO,) if self._test_clock else (_INFO, _TIME))
        now_ms = 0
        markers: dict[int, bytes | None] = {}
        epochs: dict[int, int | None] = {}
        values: list[bytes | None] = [None] * len(wanted)
        for batch, members, reply, (info, *time) in zip(batches, places, done.replies, done.after, strict=True):
            if self._test_clock:
                clock, *reply = reply
                now_ms = max(now_ms, int(clock))
            else:
                now_ms = max(now_ms, _milliseconds(time[0]))
            run_id = run_id_in(info)
            for shard, marker in zip(batch, reply[: len(batch)], strict=True):
                markers[shard] = marker
                epochs[shard] = _usable(marker, run_id)
            if len(batches) == 1:
                values = reply[len(batch) :]
            else:
                for at, value in zip(members, reply[len(batch) :], strict=True):
                    values[at] = value
        return RecordSnapshot(now_ms, markers, epochs, values)

    def _parted(
        self, wanted: Sequence[tuple[int, bytes]], shards: Sequence[int]
    ) -> tuple[list[list[int]], list[Sequence[int]]]:
        """Which shards are asked together, and which of the wanted belong to them: all, unless it is a cluster."""
        if not self._link.clustered:
            return [list({*shards, *(shard for shard, _ in wanted)})], [range(len(wanted))]
        by_shard: dict[int, list[int]] = {shard: [] for shard in shards}
        for at, (shard, _) in enumerate(wanted):
            by_shard.setdefault(shard, []).append(at)
        return [[shard] for shard in by_shard], list(by_shard.values())

    def scan(self, what: bytes, shard: int | None = None) -> Iterator[tuple[int, bytes, bytes]]:
        """Shard, name and value. A name may come twice, as with SCAN."""
        for _, placed, values in self._pages(what, shard):
            for (shard_of, name), data in zip(placed, values, strict=True):
                if data is not None:
                    yield shard_of, name, data

    def scan_expiring(self, what: bytes, shard: int | None = None) -> Iterator[tuple[int, bytes, bytes, int | None]]:
        """Also when each expires. That costs a command per name: Redis has none for many names."""
        for now_ms, placed, values in self._pages(what, shard):
            ttls = self._answered([RedisCall(shard_of, (b"PTTL", name)) for shard_of, name in placed]).replies
            for (shard_of, name), data, ttl_ms in zip(placed, values, ttls, strict=True):
                if data is not None:
                    yield shard_of, name, data, now_ms + ttl_ms if ttl_ms > 0 else None

    def _pages(
        self, what: bytes, shard: int | None
    ) -> Iterator[tuple[int, list[tuple[int, bytes]], list[bytes | None]]]:
        """The time, names with their shards, and their values."""
        with understood(self._link.url), self._link.commands():
            for _, client in self._link.primaries():
                names = client.scan_iter(self._names.pattern(what, shard), count=SCAN_COUNT)
                while page := [(self._names.shard_of(name), name) for name in islice(names, SCAN_PAGE)]:
                    found = self.snapshot(page)
                    yield found.now_ms, page, found.values

    def _answered(self, calls: Sequence[RedisCall], after: Sequence[Command] = ()) -> Any:
        with understood(self._link.url):
            done = self._link.exchange(calls, after)
            for reply in (*done.replies, *(done.after[0] if done.after else ())):
                if isinstance(reply, Exception):
                    raise reply
        return done

    def _clock(self, shard: int) -> tuple[bytes, ...]:
        if self._test_clock is None:
            return ()
        return (self._names.prefixes[shard] + b"t" if self._link.clustered else self._test_clock.encode(),)


def _milliseconds(time: Sequence[bytes]) -> int:
    return int(time[0]) * 1000 + int(time[1]) // 1000


def _usable(marker: bytes | None, run_id: bytes) -> int | None:
    if marker is None:
        return None
    try:
        state, epoch, run = marker.split(b":", 2)
        return int(epoch) if state == MARKER_READY.encode() and run == run_id else None
    except ValueError as broken:
        raise FormatCorrupt(f"{marker!r} is not a valid marker of a shard", hint=REHYDRATE) from broken


RECOUNTED_AT_ONCE = 200
RECOUNTS = 3
"""how often a shard is counted whose documents move meanwhile"""
_log = logging.getLogger("ragfence")


class StoreCounts:
    def __init__(self, asking: RedisCalls, reader: Reader, names: Names, *, solo: bool) -> None:
        self._asking, self._reader, self._names, self._solo = asking, reader, names, solo
        self._shards = range(len(names.prefixes))

    def documents(self) -> int:
        """The live documents of the shards that may answer."""
        scanned: dict[int, int] = {}
        for attempt in range(RECOUNTS + 1):
            counted, wrong = self._read()
            if not wrong:
                break
            if attempt < RECOUNTS:
                scanned = self._recount(wrong)
        return sum(counted) + sum(scanned.get(shard, 0) for shard in wrong)

    def pending(self, now_ms: int) -> Pending:
        """Counted all, read as many as `PENDING_SEEN`."""
        epochs = self._reader.snapshot([], self._shards).epochs
        sets = [(shard, self._names.pending[shard]) for shard in self._shards]
        # Leases of a shard that may not answer are void.
        sets += [
            (shard, self._names.leased[shard]) for shard in self._shards if self._solo or epochs[shard] is not None
        ]
        counts = self._asking.exchange(
            [RedisCall(shard, (b"ZCOUNT", name, now_ms + 1, b"+inf")) for shard, name in sets]
        )
        filled = [(shard, name) for (shard, name), count in zip(sets, counts, strict=True) if count]
        if not filled:
            return Pending()
        each = max(PENDING_SEEN // len(filled), 1)
        pages = self._asking.exchange(
            [
                RedisCall(shard, (b"ZRANGEBYSCORE", name, now_ms + 1, b"+inf", b"LIMIT", 0, each))
                for shard, name in filled
            ]
        )
        names = [
            (shard, (self._names.records[shard] if name[-1:] == b"p" else self._names.prefixes[shard] + b"s") + member)
            for (shard, name), members in zip(filled, pages, strict=True)
            for member in members
        ]
        return Pending(sum(counts), tuple(self._seen(names)))

    def _seen(self, names: Sequence[tuple[int, bytes]]) -> Iterable[Scanned]:
        found = self._reader.snapshot(names)
        for (shard, name), data in zip(names, found.values, strict=True):
            if data is None:  # ended meanwhile
                continue
            start = len(self._names.prefixes[shard])
            if name[start : start + 1] == b"k":
                record = decode_record(data)
                if not record.ended:
                    yield Scanned(bytes((shard,)) + name[start + 1 :], record, None)
            elif lease := lease_of_source(data, self._stamp(found.epochs[shard])):
                yield Scanned(bytes((shard,)) + lease.digest, lease.record, None)

    def _read(self) -> tuple[list[int], dict[int, tuple[int, int]]]:
        """The documents of each shard; and the epoch and moves of the shards whose counts are not right."""
        found = self._reader.snapshot(list(enumerate(self._names.moves)))
        calls = [RedisCall(shard, (b"HMGET", self._names.counts[shard], b"e", b"m", b"d")) for shard in self._shards]
        counted, wrong = [], {}
        for shard, moves, (epoch, until, documents) in zip(
            self._shards, found.values, self._asking.exchange(calls), strict=True
        ):
            current = found.epochs[shard]
            if current is None and not self._solo:  # it is hydrated, and so counted, before it answers
                continue
            # Moves that were counted between the two reads.
            right = int(until or 0) >= int(moves or 0) and (self._solo or int(epoch or 0) == current)
            if right:
                counted.append(int(documents or 0))
            else:
                wrong[shard] = (current or 0, int(moves or 0))
        return counted, wrong

    def _recount(self, wrong: dict[int, tuple[int, int]]) -> dict[int, int]:
        _log.info("%s: counting what %d shards hold, once", self._asking.link.url, len(wrong))
        documents = dict.fromkeys(wrong, 0)
        names: dict[int, list[bytes]] = {shard: [] for shard in wrong}
        seen: set[bytes] = set()
        for shard, name, data in self._reader.scan(b"s"):
            if shard in wrong and name not in seen:
                seen.add(name)
                documents[shard] += mark_of_source(data, self._stamp(wrong[shard][0])) is not None
                if lease_of_source(data, self._stamp(wrong[shard][0])):
                    names[shard].append(name)
        for shard, name, data in self._reader.scan(b"k"):
            if shard in wrong and data[0] and not decode_record(data).ended:
                names[shard].append(name)
        script = self._asking.scripts["epoch"]
        for shard, (epoch, moves) in wrong.items():
            first = [self._names.markers[shard], self._names.moves[shard]]
            given = (b"recount", epoch, moves)
            calls = [
                RedisCall(shard, script.call([*first, *names[shard][at : at + RECOUNTED_AT_ONCE]], (*given, b"")))
                for at in range(0, len(names[shard]), RECOUNTED_AT_ONCE)
            ]
            calls.append(RedisCall(shard, script.call(first, (*given, documents[shard]))))
            self._asking.called(script, calls)
        return documents

    def _stamp(self, epoch: int | None) -> bytes | None:
        if self._solo:
            return None
        return stamp_of(epoch)
