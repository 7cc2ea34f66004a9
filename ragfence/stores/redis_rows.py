"""Decision rows in Redis: a stream per shard, one entry per call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha1
from typing import Any

from ragfence.core.rows import Row, decode_rows
from ragfence.stores.fences import RowEntry
from ragfence.stores.redis_asking import Asking
from ragfence.stores.redis_link import Begun, Call, Command, packed_parts
from ragfence.stores.redis_wire import Names

DROPPED_AT_ONCE = 200
"""entries; a script holds up everybody else"""
PAGE = 500


class RowsOnTheirWay:
    """Rows that the server was sent. Nobody may be told what they tell before they are settled."""

    __slots__ = ("_asking", "_begun")

    def __init__(self, asking: Asking, begun: Begun) -> None:
        self._asking, self._begun = asking, begun

    def settle(self) -> None:
        try:
            self._asking.end(self._begun)
        finally:
            self._begun.drop()

    def drop(self) -> None:
        self._begun.drop()


class RowStreams:
    def __init__(self, asking: Asking, names: Names, most_rows: int, *, real_clock: bool) -> None:
        self._asking = asking
        self._streams = names.rows
        # A replaced clock says nothing about the ids of the stream, so only the real one bounds a range.
        self._real_clock = real_clock
        bound = (b"MAXLEN", b"~", b"%d" % most_rows) if most_rows else ()
        self._adding: list[Command] = [(b"XADD", stream, *bound, b"*", b"d") for stream in names.rows]
        self._packed = [b"*%d\r\n%b" % (len(parts) + 1, packed_parts(*parts)) for parts in self._adding]
        """the same as they travel, but for the rows"""

    def begin(self, rows: Mapping[int, Sequence[bytes]]) -> RowsOnTheirWay:
        """Confirmed where seals are: the rows are written after the seals they tell of.

        Plain commands: nothing is decided here, and a script would take twice the server's time.
        """
        joined = [(shard, b"".join(encoded)) for shard, encoded in rows.items()]
        if self._asking.link.clustered:  # which may have to send a command elsewhere
            calls = [Call(shard, (*self._adding[shard], data)) for shard, data in joined]
        else:
            packed = self._packed
            calls = [Call(shard, b"%b$%d\r\n%b\r\n" % (packed[shard], len(data), data)) for shard, data in joined]
        return RowsOnTheirWay(self._asking, self._asking.begin(calls))

    def add(self, rows: Mapping[int, Sequence[bytes]]) -> None:
        if rows:
            self.begin(rows).settle()

    def lengths(self, shards: Sequence[int]) -> list[int]:
        calls = [Call(shard, (b"XLEN", self._streams[shard])) for shard in shards]
        return self._asking.exchange(calls) if calls else []

    def read(self, since_ms: int, shard: int | None) -> Iterator[Row]:
        first = str(since_ms) if self._real_clock else "-"
        count = len(self._streams)
        shards = range(count) if shard is None else range(shard, min(shard + 1, count))
        for at in (at for at, length in zip(shards, self.lengths(shards), strict=True) if length):
            start: str | bytes = first
            while True:
                call = Call(at, (b"XRANGE", self._streams[at], start, b"+", b"COUNT", PAGE))
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
            calls.append(Call(shard, (b"XRANGE", self._streams[shard], start, b"+", b"COUNT", left)))
            left -= 0 if start != "-" else length  # how much of the first stream lies behind the place is not known
        pages = self._asking.exchange(calls) if calls else []
        found = [
            RowEntry(f"{call.shard:02x}:{entry.decode()}", data)
            for call, page in zip(calls, pages, strict=True)
            for entry, (_, data) in page
        ]
        return found[:limit]

    def drop(self, entries: Sequence[RowEntry]) -> int:
        by_shard: dict[int, list[Any]] = {}
        for entry in entries:
            shard, _, there = entry.place.partition(":")
            digest = sha1(entry.data, usedforsecurity=False).hexdigest()
            by_shard.setdefault(int(shard, 16), []).extend((there, digest))
        script, step = self._asking.scripts["drop_rows"], 2 * DROPPED_AT_ONCE
        calls = [
            Call(shard, script.call([self._streams[shard]], given[start : start + step]))
            for shard, given in by_shard.items()
            for start in range(0, len(given), step)
        ]
        return sum(self._asking.called(script, calls)) if calls else 0
