"""Decision rows in Redis: a stream per shard, one entry per call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import sha1
from typing import Any

from ragfence.core.decision_rows import Row, decode_rows
from ragfence.core.tallies import BEGUN, HOUR_MS, KEPT_DAYS, MAX_LABELS, Tallies, without_names
from ragfence.stores.fences import RowEntry
from ragfence.stores.redis.calls import RedisCalls
from ragfence.stores.redis.codec import Names
from ragfence.stores.redis.connection import PendingExchange, RedisCall, packed_parts
from ragfence.stores.redis.replies import Command, number, text

DROPPED_AT_ONCE = 200
"""entries; a script blocks every other client"""
PAGE = 500


class NewRows:
    """Rows to be written at one time, encoded, by shard; and what their answers are counted under."""

    __slots__ = ("answers", "at_ms", "encoded")

    def __init__(self, at_ms: int) -> None:
        self.at_ms = at_ms
        self.encoded: dict[int, list[bytes]] = {}
        self.answers: dict[int, dict[bytes, int]] = {}

    def add(self, shard: int, row: bytes, label: bytes | None) -> None:
        if (written := self.encoded.get(shard)) is None:
            written = self.encoded[shard] = []
            self.answers[shard] = {}
        written.append(row)
        if label is not None:
            counted = self.answers[shard]
            counted[label] = counted.get(label, 0) + 1


class PendingRows:
    """Rows that were sent to the server. Their callers may not be answered before `settle`."""

    __slots__ = ("_asking", "_begun")

    def __init__(self, asking: RedisCalls, begun: PendingExchange) -> None:
        self._asking, self._begun = asking, begun

    def settle(self) -> None:
        try:
            self._asking.end(self._begun)
        finally:
            self._begun.discard()

    def discard(self) -> None:
        self._begun.discard()


class RowStreams:
    def __init__(self, asking: RedisCalls, names: Names, most_rows: int, *, real_clock: bool) -> None:
        self._asking = asking
        self._names = names
        self._streams = names.rows
        self._known: tuple[int, set[tuple[int, bytes]]] = (0, set())
        """labels of the hour that this process has counted under before, by shard"""
        # A replaced clock says nothing about the ids of the stream, so only the real one bounds a range.
        self._real_clock = real_clock
        bound = (b"MAXLEN", b"~", b"%d" % most_rows) if most_rows else ()
        self._adding: list[Command] = [(b"XADD", stream, *bound, b"*", b"d") for stream in names.rows]
        self._packed = [b"*%d\r\n%b" % (len(parts) + 1, packed_parts(*parts)) for parts in self._adding]
        """the same as they travel, but for the rows"""

    def begin(self, rows: NewRows) -> PendingRows:
        """Sends the rows. They are confirmed as seals are, after which they are written.

        Plain commands are used: nothing is decided here, and a script would take twice the server's time.
        """
        joined = [(shard, b"".join(encoded)) for shard, encoded in rows.encoded.items()]
        if self._asking.link.clustered:  # which may have to send a command elsewhere
            calls = [RedisCall(shard, (*self._adding[shard], data)) for shard, data in joined]
        else:
            packed = self._packed
            calls = [
                RedisCall(shard, b"%b$%d\r\n%b\r\n" % (packed[shard], len(data), data), text) for shard, data in joined
            ]
        hour = rows.at_ms // HOUR_MS
        for shard, counted in rows.answers.items():
            for label, count in counted.items():
                calls += self._count(shard, hour, label, count)
        return PendingRows(self._asking, self._asking.begin(calls))

    def add(self, rows: Sequence[NewRows]) -> None:
        for each in rows:
            self.begin(each).settle()

    def _count(self, shard: int, hour: int, label: bytes, count: int) -> Iterator[RedisCall]:
        """As `tally` of first.lua does it."""
        hours, known = self._known
        if hours != hour:
            self._known = hour, known = hour, set()
        key = self._names.tallies(shard, hour // 24)
        if (shard, label) in known:
            yield RedisCall(shard, (b"HINCRBY", key, b"%d:%b" % (hour, label), count))
            return
        if len(known) >= MAX_LABELS:
            label = without_names(label)
        known.add((shard, label))
        yield RedisCall(shard, (b"HINCRBY", key, b"%d:%b" % (hour, label), count))
        yield RedisCall(shard, (b"PEXPIRE", key, (KEPT_DAYS + 1) * 24 * HOUR_MS))

    def tallies(self, since_ms: int, now_ms: int) -> Tallies:
        first_hour, today = since_ms // HOUR_MS, now_ms // HOUR_MS // 24
        # Not a day more than is kept; and one day ahead, for clocks that were set back.
        days = range(max(first_hour // 24, today - KEPT_DAYS), today + 2)
        places = [(shard, day) for shard in range(len(self._streams)) for day in days]
        calls = [RedisCall(shard, (b"HGETALL", self._names.tallies(shard, day))) for shard, day in places]
        counts: Counter[tuple[int, bytes]] = Counter()
        begun: dict[int, int] = {}
        for (shard, _), found in zip(places, self._asking.exchange(calls), strict=True):
            # A cluster answers with a list, where RESP3 has a map.
            pairs = found.items() if isinstance(found, dict) else zip(found[::2], found[1::2], strict=True)
            for field, count in pairs:
                hour, _, label = field.partition(b":")
                if int(hour) < first_hour:
                    continue
                if label == BEGUN:
                    begun[shard] = min(int(count), begun.get(shard, int(count)))
                else:
                    counts[int(hour), label] += int(count)
        return Tallies(counts, begun)

    def lengths(self, shards: Sequence[int]) -> list[int]:
        calls = [RedisCall(shard, (b"XLEN", self._streams[shard])) for shard in shards]
        return self._asking.exchange(calls) if calls else []

    def read(self, since_ms: int, shard: int | None) -> Iterator[Row]:
        first = str(since_ms) if self._real_clock else "-"
        count = len(self._streams)
        shards = range(count) if shard is None else range(shard, min(shard + 1, count))
        for at in (at for at, length in zip(shards, self.lengths(shards), strict=True) if length):
            start: str | bytes = first
            while True:
                call = RedisCall(at, (b"XRANGE", self._streams[at], start, b"+", b"COUNT", PAGE))
                (page,) = self._asking.exchange([call])
                for entry, (_, data) in page:
                    start = b"(" + entry
                    yield from (row for row in decode_rows(data) if row.ts_ms >= since_ms)
                if len(page) < PAGE:
                    break

    def entries(self, after: str, limit: int) -> list[RowEntry]:
        """Two trips: how long the streams are, then as many of them at once as the limit lets."""
        first, _, behind = after.partition(":")
        here = int(first or "0", 16)
        shards = range(here, len(self._streams))
        calls, left = [], limit
        for shard, length in zip(shards, self.lengths(shards), strict=True):
            if not length or left <= 0:
                continue
            start = f"({behind}" if shard == here and behind else "-"
            calls.append(RedisCall(shard, (b"XRANGE", self._streams[shard], start, b"+", b"COUNT", left)))
            left -= 0 if start != "-" else length  # how much of the first stream follows the place is not known
        pages = self._asking.exchange(calls) if calls else []
        found = [
            RowEntry(f"{call.shard:02x}:{entry.decode()}", data)
            for call, page in zip(calls, pages, strict=True)
            for entry, (_, data) in page
        ]
        return found[:limit]

    def delete(self, entries: Sequence[RowEntry]) -> int:
        by_shard: dict[int, list[Any]] = {}
        for entry in entries:
            shard, _, there = entry.place.partition(":")
            digest = sha1(entry.data, usedforsecurity=False).hexdigest()
            by_shard.setdefault(int(shard, 16), []).extend((there, digest))
        script, step = self._asking.scripts["drop_rows"], 2 * DROPPED_AT_ONCE
        calls = [
            RedisCall(shard, script.call([self._streams[shard]], given[start : start + step]), number)
            for shard, given in by_shard.items()
            for start in range(0, len(given), step)
        ]
        return sum(self._asking.called(script, calls)) if calls else 0
