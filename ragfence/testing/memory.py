"""MemoryFences: the fence protocol over a dict, for tests. It can be flushed, restarted and failed over.

Object stores for tests: one in memory, and one that fails on command.

objects = FaultyObjects(MemoryObjects())
objects.on("put_new", match="acme/sealed/*").fail_after(times=1)    # stored, but the reply is lost
late = objects.on("put_new", match="*/epochs/*").hold()             # the caller gives up ...
late.land()                                                         # ... and now the write arrives
objects.calls["put_new"]
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from ragfence.core.decision_rows import Row
from ragfence.core.hashing import SHARDS
from ragfence.core.layout import is_parked_below
from ragfence.core.records import Head, KeyRecord, SourceRecord, decode_record, unpark
from ragfence.core.tallies import HOUR_MS, Tallies
from ragfence.errors import CommitUncertain
from ragfence.stores import transactional
from ragfence.stores.fences import Pending, RowEntry, Scanned, Stats, stats_of
from ragfence.stores.objects import ObjectEntry, ObjectStore, Put, check_listing, check_name
from ragfence.stores.transactional import TransactionalFences
from ragfence.testing.clock import VirtualClock
from ragfence.testing.faults import Error, Fault, FaultyCalls, Orders


@dataclass
class _Content:
    """Everything a server process holds; a failover swaps it for an older copy."""

    records: dict[bytes, tuple[bytes, int | None, bool]] = field(default_factory=dict)
    sources: dict[tuple[int, bytes], tuple[bytes, int | None]] = field(default_factory=dict)
    markers: dict[int, tuple[bool, int, str]] = field(default_factory=dict)
    counters: Counter[int] = field(default_factory=Counter)
    moves: Counter[int] = field(default_factory=Counter)
    documents: Counter[int] = field(default_factory=Counter)
    tallies: Counter[tuple[int, bytes]] = field(default_factory=Counter)
    rows: dict[str, Row] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    """row_id -> the how-manieth row it was"""
    written: int = 0
    locks: dict[str, tuple[str, int]] = field(default_factory=dict)

    def add_row(self, row: Row) -> None:
        if row.row_id not in self.rows:
            self.written += 1
            self.rows[row.row_id], self.places[row.row_id] = row, self.written


class MemoryFences(TransactionalFences):
    """A fence store in memory that can be flushed, restarted, snapshotted and failed over."""

    def __init__(self, tenant: str = "default", *, solo: bool = False, clock: Callable[[], int] | None = None) -> None:
        self.tenant = tenant
        self.solo = solo
        self._clock = clock or VirtualClock()
        self._lock = threading.RLock()
        self.content = _Content()
        self.run_id = uuid.uuid4().hex

    @property
    def url(self) -> str:
        return "memory://"

    def flush(self) -> None:
        """Everything is gone; the process is the same. The rows are kept, for the auditor."""
        with self._lock:
            kept = self.content
            self.content = _Content(rows=kept.rows, places=kept.places, written=kept.written)

    def snapshot(self) -> _Content:
        with self._lock:
            return copy.deepcopy(self.content)

    def fail_over(self, replica: _Content) -> None:
        """Another process takes over with what it had; the newest writes may be missing."""
        with self._lock:
            kept = {name: getattr(self.content, name) for name in ("rows", "places", "written")}
            self.content = _Content(**{**vars(copy.deepcopy(replica)), **kept})
            self.run_id = uuid.uuid4().hex

    def restart(self) -> None:
        with self._lock:
            self.run_id = uuid.uuid4().hex

    def heads(self, shard: int) -> Iterator[tuple[bytes, Head]]:
        heads = ((source, record.head) for source, record in self._sources_in(shard))
        return ((source, head) for source, head in heads if head is not None and head.record is not None)

    def leases(self, shard: int | None = None) -> Iterator[Scanned]:
        for each in range(SHARDS) if shard is None else (shard,):
            for source, record in self._sources_in(each):
                if record.lease:
                    yield Scanned(bytes((each,)) + record.lease.digest, record.lease.record, None, source)

    def _sources_in(self, shard: int) -> Iterator[tuple[bytes, SourceRecord]]:
        with self._lock:
            epoch = transactional.ready_epoch(self._shelf(), shard)
            here = sorted(source for at, source in self.content.sources if at == shard)
            found = [(source, self._shelf().get_source(shard, source)) for source in here]
        for source, data in found:
            record = SourceRecord.decode(data) if data is not None else None
            if record and (self.solo or record.stamp == epoch):
                yield source, record

    def scan(self, shard: int | None = None) -> Iterator[Scanned]:
        with self._lock:
            tx = self._shelf()
            keys = sorted(self.content.records)
            found = [(key, tx.get_record(key), *self.content.records[key][1:]) for key in keys]
        for key, data, expires_ms, parked in found:
            if data is not None and (shard is None or key[0] == shard):
                record = unpark(data, None) if parked else decode_record(data)
                if record:
                    yield Scanned(key, record, expires_ms)

    def forget(self, keys: Sequence[bytes], *, below: int = 0, pending: bool = False) -> None:
        with self._lock:
            for key in keys:
                data, expires_ms, parked = self.content.records.get(key, (b"", None, True))
                if data and is_parked_below(data, below):
                    del self.content.records[key]
                elif not parked and (record := decode_record(data)).ended:
                    del self.content.records[key]
                    transactional.tally_forgotten(self._shelf(), record, expires_ms)
                elif not parked and pending and not record.held_at(self._clock()):
                    del self.content.records[key]

    def scrub(self) -> None:
        """Memory that is freed is gone."""

    def stats(self) -> Stats:
        with self._lock:
            # A dict has no index of what is pending; this store is for tests.
            found = tuple(each for each in (*self.scan(), *self.leases()) if not each.record.ended)
            pending, documents = Pending(len(found), found), transactional.count_documents(self._shelf())
            return stats_of(documents, pending, self.tallies(), self._clock(), len(self.content.rows), None)

    def tallies(self, since_ms: int = 0) -> Tallies:
        first = since_ms // HOUR_MS
        with self._lock:
            counts = {where: count for where, count in self.content.tallies.items() if where[0] >= first}
            return Tallies.of(counts, range(SHARDS))

    def purge_expired(self, limit: int = 1000) -> int:
        with self._lock:
            now_ms = self._clock()
            gone = [key for key, (_, at, _) in self.content.records.items() if at is not None and at <= now_ms]
            left = [spot for spot, (_, at) in self.content.sources.items() if at is not None and at <= now_ms]
            for key in gone[:limit]:
                del self.content.records[key]
            for spot in left[: limit - len(gone[:limit])]:
                del self.content.sources[spot]
            return min(len(gone) + len(left), limit)

    def rows(self, since_ms: int = 0, shard: int | None = None) -> Iterator[Row]:
        with self._lock:
            found = list(self.content.rows.values())
        yield from (row for row in found if row.ts_ms >= since_ms and shard in (None, row.key[0]))

    def row_entries(self, after: str = "", limit: int = 1000) -> list[RowEntry]:
        with self._lock:
            there = [(place, row_id) for row_id, place in self.content.places.items() if place > int(after or 0)]
            return [RowEntry(str(place), self.content.rows[row_id].encode()) for place, row_id in there[:limit]]

    def drop_rows(self, entries: Sequence[RowEntry]) -> int:
        with self._lock:
            gone = [entry for entry in entries if self.content.places.get(entry.first_row_id) == int(entry.place)]
            for entry in gone:
                del self.content.rows[entry.first_row_id], self.content.places[entry.first_row_id]
            return len(gone)

    def now_ms(self) -> int:
        return self._clock()

    def lock(self, name: str, token: str, ttl_ms: int) -> bool:
        with self._lock:
            holder, until_ms = self.content.locks.get(name, (token, 0))
            if holder != token and self._clock() < until_ms:
                return False
            self.content.locks[name] = (token, self._clock() + ttl_ms)
            return True

    def unlock(self, name: str, token: str) -> None:
        with self._lock:
            if self.content.locks.get(name, ("", 0))[0] == token:
                del self.content.locks[name]

    def close(self) -> None:
        pass

    @contextlib.contextmanager
    def _transaction(self, *, write: bool = True) -> Iterator[_MemoryShelf]:
        """All of a batch or nothing of it, as in a database."""
        with self._lock:
            before = {name: copy.copy(value) for name, value in vars(self.content).items()} if write else {}
            try:
                yield self._shelf()
            except BaseException:
                vars(self.content).update(before)
                raise

    def _shelf(self) -> _MemoryShelf:
        return _MemoryShelf(self.content, self._clock(), self.run_id, self.solo)


class _MemoryShelf:
    def __init__(self, content: _Content, now_ms: int, run_id: str, solo: bool) -> None:
        self._content = content
        self.now_ms = now_ms
        self.run_id = run_id
        self.solo = solo

    def get_record(self, key: bytes) -> bytes | None:
        data, expires_ms, _ = self._content.records.get(key, (None, None, False))
        return None if expires_ms is not None and expires_ms <= self.now_ms else data

    def put_record(self, key: bytes, data: bytes, ttl_ms: int, record: KeyRecord, *, parked: bool) -> None:
        self._content.records[key] = (data, self.now_ms + ttl_ms if ttl_ms else None, parked)

    def drop_record(self, key: bytes) -> None:
        self._content.records.pop(key, None)

    def get_source(self, shard: int, source: bytes) -> bytes | None:
        data, expires_ms = self._content.sources.get((shard, source), (None, None))
        return None if expires_ms is not None and expires_ms <= self.now_ms else data

    def put_source(self, shard: int, source: bytes, data: bytes, ttl_ms: int) -> None:
        self._content.sources[shard, source] = (data, self.now_ms + ttl_ms if ttl_ms else None)

    def get_marker(self, shard: int) -> tuple[bool, int, str] | None:
        return self._content.markers.get(shard)

    def put_marker(self, shard: int, marker: tuple[bool, int, str] | None) -> None:
        if marker is None:
            self._content.markers.pop(shard, None)
        else:
            self._content.markers[shard] = marker

    def next_counter(self, shard: int) -> int:
        self._content.counters[shard] += 1
        return self._content.counters[shard]

    def count_move(self, shard: int) -> None:
        self._content.moves[shard] += 1

    def moves(self, shard: int) -> int:
        return self._content.moves[shard]

    def count_documents(self, shard: int, change: int) -> None:
        self._content.documents[shard] += change

    def reset_documents(self, shard: int) -> None:
        self._content.documents[shard] = 0

    def documents(self, shard: int) -> int:
        return self._content.documents[shard]

    def tally(self, hour: int, label: bytes, count: int = 1) -> None:
        self._content.tallies[hour, label] += count

    def counts(self) -> bool:
        return bool(self._content.tallies)

    def add_row(self, row: Row) -> None:
        self._content.add_row(row)


__all__ = ["Fault", "FaultyObjects", "HeldPut", "MemoryObjects", "Method", "ObjectOrders", "Orders"]

Method = Literal["get", "put_new", "list", "delete"]


class MemoryObjects:
    """An `ObjectStore` in a dictionary; gone with the process. `clock_ms` dates the objects."""

    def __init__(self, clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, int]] = {}
        self._clock_ms = clock_ms

    @property
    def url(self) -> str:
        return f"memory://{id(self):x}"

    def get(self, name: str) -> bytes | None:
        check_name(name)
        with self._lock:
            found = self._objects.get(name)
        return None if found is None else found[0]

    def put_new(self, name: str, data: bytes) -> Put:
        check_name(name)
        with self._lock:
            if name in self._objects:
                return Put(won=False, existing=self._objects[name][0])
            self._objects[name] = (bytes(data), self._clock_ms())
            return Put(won=True)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectEntry]:
        check_listing(prefix, limit)
        with self._lock:
            found = [
                ObjectEntry(name, len(data), modified_ms)
                for name, (data, modified_ms) in self._objects.items()
                if name.startswith(prefix) and name > start_after
            ]
        return islice(sorted(found, key=lambda entry: entry.name), limit)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            check_name(name)
        with self._lock:
            for name in names:
                self._objects.pop(name, None)

    def close(self) -> None:
        """Nothing is kept open."""


class HeldPut:
    """A `put_new` on its way: its caller was told CommitUncertain, the store has not seen it yet."""

    def __init__(self) -> None:
        self._sent: tuple[ObjectStore, str, bytes] | None = None

    @property
    def caught(self) -> bool:
        """Whether a put has come by and is being held."""
        return self._sent is not None

    @property
    def name(self) -> str:
        if self._sent is None:
            raise LookupError("no put_new was held back yet")
        return self._sent[1]

    def land(self) -> Put:
        """Lets the write reach the store now, and says what came of it. Landing twice is a replayed packet."""
        if self._sent is None:
            raise LookupError("no put_new was held back yet")
        inner, name, data = self._sent
        return inner.put_new(name, data)

    def _catch(self, inner: ObjectStore, name: str, data: bytes) -> None:
        self._sent = (inner, name, data)


@dataclass(slots=True, eq=False)
class ObjectFault(Fault):
    held: HeldPut | None = None


class ObjectOrders(Orders):
    """What `FaultyObjects.on` returns."""

    def hold(self, error: Error | None = None) -> HeldPut:
        """The next put fails at once, but its write is still on its way until `land()` is called."""
        if self._method != "put_new":
            raise ValueError(f"only a put_new can be held back, not {self._method}")
        held = HeldPut()
        self._give(ObjectFault(self._method, self._match, "hold", 1, error, held=held))
        return held


class FaultyObjects(FaultyCalls[Method]):
    """Wraps an `ObjectStore`: passes everything on, counts it in `calls`, and fails where it was told to.

    A pattern is matched as in the shell (`*` also crosses `/`) against the name, the prefix of a `list`, or any
    name of a `delete`. Of several orders that fit a call all delays count, then the first failure given. What is
    held back can still land after `heal()`.
    """

    def __init__(self, inner: ObjectStore, *, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(sleep)
        self.inner = inner

    def on(self, method: Method, match: str = "*") -> ObjectOrders:
        return ObjectOrders(self._give, method, match)

    @property
    def url(self) -> str:
        return self.inner.url

    def get(self, name: str) -> bytes | None:
        return self._call("get", [name], lambda: self.inner.get(name))

    def put_new(self, name: str, data: bytes) -> Put:
        def caught(fault: Fault) -> None:
            if isinstance(fault, ObjectFault) and fault.held is not None:
                fault.held._catch(self.inner, name, data)

        return self._call("put_new", [name], lambda: self.inner.put_new(name, data), caught)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectEntry]:
        return self._call("list", [prefix], lambda: self.inner.list(prefix, start_after=start_after, limit=limit))

    def delete(self, names: Sequence[str]) -> None:
        self._call("delete", names, lambda: self.inner.delete(names))

    def close(self) -> None:
        self.inner.close()

    def _default_error(self, fault: Fault, names: Sequence[str]) -> Exception:
        if fault.method == "put_new" and fault.kind != "before":
            return CommitUncertain(f"put_new {names[0]}: injected, {fault.kind}")
        return super()._default_error(fault, names)
