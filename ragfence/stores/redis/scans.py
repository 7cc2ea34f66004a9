"""Reading from Redis without deciding: consistent snapshots of records and markers, and scans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ragfence.errors import REHYDRATE, FormatCorrupt
from ragfence.stores.redis.codec import Names
from ragfence.stores.redis.connection import Call, Link, run_id_in
from ragfence.stores.redis.replies import Command
from ragfence.stores.redis_errors import understood

SCAN_PAGE = 1000
SCAN_COUNT = 5000
"""keys, whosesoever, that one SCAN passes over: about a millisecond of the server's time"""
_INFO: Command = (b"INFO", b"server")
_TIME: Command = (b"TIME",)


@dataclass(frozen=True, slots=True)
class Snapshot:
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

    def snapshot(self, wanted: Sequence[tuple[int, bytes]], shards: Sequence[int] = ()) -> Snapshot:
        """The values of (shard, name), and of the markers, each with the run_id of the very server that answered."""
        batches, places = self._parted(wanted, shards)
        calls = []
        for batch, members in zip(batches, places, strict=True):
            names = [*self._clock(batch[0]), *(self._names.markers[shard] for shard in batch)]
            calls.append(Call(batch[0], (b"MGET", *names, *[wanted[at][1] for at in members])))
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
        return Snapshot(now_ms, markers, epochs, values)

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
        """Shard, name and value. A name may come twice, as SCAN has it."""
        for _, placed, values in self._pages(what, shard):
            for (shard_of, name), data in zip(placed, values, strict=True):
                if data is not None:
                    yield shard_of, name, data

    def scan_expiring(self, what: bytes, shard: int | None = None) -> Iterator[tuple[int, bytes, bytes, int | None]]:
        """Besides, when each expires: that costs a command for every name, since none tells of many."""
        for now_ms, placed, values in self._pages(what, shard):
            ttls = self._answered([Call(shard_of, (b"PTTL", name)) for shard_of, name in placed]).replies
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

    def _answered(self, calls: Sequence[Call], after: Sequence[Command] = ()) -> Any:
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
        return int(epoch) if state == b"R" and run == run_id else None
    except ValueError as broken:
        raise FormatCorrupt(f"{marker!r} is not a valid marker of a shard", hint=REHYDRATE) from broken
