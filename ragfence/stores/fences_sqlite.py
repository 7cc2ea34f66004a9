"""SqliteFences: the embedded fence store. One file, many processes, no server.

WAL with synchronous=FULL: what was answered survives a power cut. Every call is one short BEGIN IMMEDIATE
transaction, so decisions, records and rows are written together or not at all. The clock is the machine's: the
processes that share the file share it too.

The file knows itself by a uuid made with it and by its device and inode: a copy that is put in its place counts as
another run, so its shards are hydrated before they answer. A file restored *in place* cannot be told apart; run
`fence.hydrate()` after doing that.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ragfence.core.hashing import SHARDS
from ragfence.core.records import Head, KeyRecord, State, head_of_source, lease_of_source, mark_of_source, unpark
from ragfence.core.rows import Row, decode_rows
from ragfence.errors import FormatTooNew, StoreUnavailable
from ragfence.stores import settling
from ragfence.stores.fences import RowEntry, Scanned, Stats
from ragfence.stores.settling import ShelvedFences
from ragfence.stores.sqlite_connections import Connections, identity

SCHEMA_VERSION = 1
DROPPED_AT_ONCE = 2_000
"""rows; whoever claims meanwhile waits for the transaction"""
_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE markers (
    tenant TEXT, shard INTEGER, ready INTEGER, epoch INTEGER, run_id TEXT, PRIMARY KEY (tenant, shard)
) WITHOUT ROWID;
CREATE TABLE counters (tenant TEXT, shard INTEGER, n INTEGER, PRIMARY KEY (tenant, shard)) WITHOUT ROWID;
CREATE TABLE moves (tenant TEXT, shard INTEGER, n INTEGER, PRIMARY KEY (tenant, shard)) WITHOUT ROWID;
CREATE TABLE records (
    tenant TEXT, key BLOB, expires_ms INTEGER, parked INTEGER, kind TEXT, state INTEGER, data BLOB,
    PRIMARY KEY (tenant, key)
) WITHOUT ROWID;
CREATE INDEX records_expiry ON records (tenant, expires_ms) WHERE expires_ms IS NOT NULL;
CREATE TABLE sources (
    tenant TEXT, shard INTEGER, source BLOB, expires_ms INTEGER, data BLOB, PRIMARY KEY (tenant, shard, source)
) WITHOUT ROWID;
CREATE INDEX sources_expiry ON sources (tenant, expires_ms) WHERE expires_ms IS NOT NULL;
CREATE TABLE decision_rows (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT, row_id TEXT, shard INTEGER, ts_ms INTEGER, data BLOB,
    UNIQUE (tenant, row_id)
);
CREATE INDEX decision_rows_time ON decision_rows (tenant, ts_ms);
CREATE TABLE locks (
    tenant TEXT, name TEXT, token TEXT, until_ms INTEGER, PRIMARY KEY (tenant, name)
) WITHOUT ROWID;
"""


_WITH_LEASE = "instr('2367ABEF', substr(hex(substr(data, 2, 1)), 2)) > 0"
"""what `lease_of_source` looks at first, said to SQLite: few sources have one"""


def _machine_clock() -> int:
    return time.time_ns() // 1_000_000


class SqliteFences(ShelvedFences):
    def __init__(
        self,
        path: str | os.PathLike[str],
        tenant: str = "default",
        *,
        solo: bool = False,
        clock: Callable[[], int] = _machine_clock,
        busy_timeout_s: float = 30.0,
    ) -> None:
        self.path = Path(path)
        self.tenant = tenant
        self.solo = solo
        self._clock = clock
        self._connections = Connections(self.path, busy_timeout_s, self._prepare)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as refused:
            raise StoreUnavailable(f"cannot create the folder of {self.path}: {refused}") from refused
        with self._transaction():
            pass

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}"

    def heads(self, shard: int) -> Iterator[tuple[bytes, Head]]:
        for source, data, stamp in self._sources_in(shard):
            head = head_of_source(data, stamp)
            if head is not None:
                yield source, head

    def marks(self, shard: int | None = None) -> Iterator[tuple[int, bytes]]:
        for each in range(SHARDS) if shard is None else (shard,):
            for source, data, stamp in self._sources_in(each):
                mark = mark_of_source(data, stamp)
                if mark is not None:
                    yield each, source + mark

    def _sources_in(self, shard: int, condition: str = "TRUE") -> Iterator[tuple[bytes, bytes, bytes | None]]:
        """Source, its record, and the stamp that this must have; None: any will do."""
        with self._transaction(write=False) as shelf:
            epoch = settling.ready_epoch(shelf, shard)
            found = shelf.db.execute(
                f"SELECT source, data FROM sources WHERE tenant = ? AND shard = ? AND {condition} "
                "AND (expires_ms IS NULL OR expires_ms > ?) ORDER BY source",
                (self.tenant, shard, shelf.now_ms),
            ).fetchall()
        stamp = None if self.solo else b"" if epoch is None else epoch.to_bytes(8, "big")  # "": no record carries it
        for source, data in found:
            yield source, data, stamp

    def leases(self, shard: int | None = None) -> Iterator[Scanned]:
        for each in range(SHARDS) if shard is None else (shard,):
            for _, data, stamp in self._sources_in(each, _WITH_LEASE):
                if lease := lease_of_source(data, stamp):
                    yield Scanned(bytes((each,)) + lease.digest, lease.record, None)

    def scan(self, shard: int | None = None) -> Iterator[Scanned]:
        after = bytes((shard,)) if shard is not None else b""
        end = bytes((shard + 1,)) if shard is not None else b"\xff"
        while True:
            with self._transaction(write=False) as shelf:
                page = shelf.db.execute(
                    "SELECT key, parked, expires_ms, data FROM records WHERE tenant = ? AND key > ? AND key < ? "
                    "AND (expires_ms IS NULL OR expires_ms > ?) ORDER BY key LIMIT 500",
                    (self.tenant, after, end, shelf.now_ms),
                ).fetchall()
            for key, parked, expires_ms, data in page:
                record = unpark(data, None) if parked else KeyRecord.decode(data)
                if record:
                    yield Scanned(key, record, expires_ms)
            if len(page) < 500:
                return
            after = page[-1][0]

    def forget(self, keys: Sequence[bytes]) -> None:
        with self._transaction() as shelf:
            for key in keys:
                data = shelf.get_record(key)
                # Parked records start with their stamp, whose first byte is 0; they go with their document.
                if data is not None and data[0] and KeyRecord.decode(data).ended:
                    shelf.drop_record(key)

    def stats(self) -> Stats:
        with self._transaction(write=False) as shelf:
            counted = shelf.db.execute(
                "SELECT kind, state, count(*) FROM records WHERE tenant = ? "
                "AND (expires_ms IS NULL OR expires_ms > ?) GROUP BY 1, 2",
                (self.tenant, shelf.now_ms),
            ).fetchall()
            one = shelf.db.execute
            sources = one(
                "SELECT count(*) FROM sources WHERE tenant = ? AND (expires_ms IS NULL OR expires_ms > ?)",
                (self.tenant, shelf.now_ms),
            ).fetchone()[0]
            rows = one("SELECT count(*) FROM decision_rows WHERE tenant = ?", (self.tenant,)).fetchone()[0]
        records = Counter({(kind, State(state).name.lower()): n for kind, state, n in counted})
        records.update((found.record.kind, found.record.state.name.lower()) for found in self.leases())
        return Stats(records, sources, rows, self.path.stat().st_size)

    def purge_expired(self, limit: int = 1000) -> int:
        purged = 0
        with self._transaction() as shelf:
            for table, key in (("records", "key"), ("sources", "source")):
                cursor = shelf.db.execute(
                    f"DELETE FROM {table} WHERE (tenant, {key}) IN (SELECT tenant, {key} FROM {table} "
                    "WHERE tenant = ? AND expires_ms <= ? LIMIT ?)",
                    (self.tenant, shelf.now_ms, limit - purged),
                )
                purged += cursor.rowcount
        return purged

    def record(self, rows: Sequence[Row]) -> None:
        with self._transaction() as shelf:
            for row in rows:
                shelf.add_row(row)

    def rows(self, since_ms: int = 0, shard: int | None = None) -> Iterator[Row]:
        after = 0
        while True:
            with self._transaction(write=False) as shelf:
                page = shelf.db.execute(
                    "SELECT seq, data FROM decision_rows WHERE tenant = ? AND seq > ? AND ts_ms >= ? "
                    "AND shard = coalesce(?, shard) ORDER BY seq LIMIT 2000",
                    (self.tenant, after, since_ms, shard),
                ).fetchall()
            for _, data in page:
                yield from decode_rows(data)
            if len(page) < 2000:
                return
            after = page[-1][0]

    def row_entries(self, after: str = "", limit: int = 1000) -> list[RowEntry]:
        with self._transaction(write=False) as shelf:
            found = shelf.db.execute(
                "SELECT seq, data FROM decision_rows WHERE tenant = ? AND seq > ? ORDER BY seq LIMIT ?",
                (self.tenant, int(after or 0), limit),
            ).fetchall()
        return [RowEntry(str(seq), bytes(data)) for seq, data in found]

    def drop_rows(self, entries: Sequence[RowEntry]) -> int:
        dropped = 0
        for start in range(0, len(entries), DROPPED_AT_ONCE):
            with self._transaction() as shelf:
                # With the row's id: a file that was restored in place gives its numbers once more, to other rows.
                cursor = shelf.db.executemany(
                    "DELETE FROM decision_rows WHERE seq = ? AND tenant = ? AND row_id = ?",
                    [
                        (int(entry.place), self.tenant, entry.first_row_id)
                        for entry in entries[start : start + DROPPED_AT_ONCE]
                    ],
                )
                dropped += cursor.rowcount
        return dropped

    def now_ms(self) -> int:
        return self._clock()

    def lock(self, name: str, token: str, ttl_ms: int) -> bool:
        with self._transaction() as shelf:
            cursor = shelf.db.execute(
                "INSERT INTO locks VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET token = excluded.token, "
                "until_ms = excluded.until_ms WHERE token = excluded.token OR until_ms <= ?",
                (self.tenant, name, token, shelf.now_ms + ttl_ms, shelf.now_ms),
            )
            return cursor.rowcount == 1

    def unlock(self, name: str, token: str) -> None:
        with self._transaction() as shelf:
            shelf.db.execute(
                "DELETE FROM locks WHERE tenant = ? AND name = ? AND token = ?", (self.tenant, name, token)
            )

    def close(self) -> None:
        self._connections.close()

    @contextlib.contextmanager
    def _transaction(self, *, write: bool = True) -> Iterator[_SqliteShelf]:
        try:
            connection = self._connections.of_this_thread()
            db = connection.db
            with connection.busy:
                db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                try:
                    yield _SqliteShelf(db, self.tenant, self._clock(), connection.run_id, self.solo)
                    db.execute("COMMIT")
                except BaseException:
                    if db.in_transaction:  # a full disk may have ended it
                        db.execute("ROLLBACK")
                    raise
        except sqlite3.Error as broken:
            raise StoreUnavailable(
                f"the fence file {self.path} did not answer: {broken}",
                hint="check that its folder is writable, has room, and is on a local disk (not NFS)",
            ) from broken

    def _prepare(self, db: sqlite3.Connection) -> str:
        if db.execute("PRAGMA user_version").fetchone()[0] == 0:
            db.execute("BEGIN IMMEDIATE")
            if db.execute("PRAGMA user_version").fetchone()[0] == 0:
                for statement in _SCHEMA.split(";\n"):
                    if statement.strip():
                        db.execute(statement)
                db.execute("INSERT INTO meta VALUES ('uuid', ?)", (uuid.uuid4().hex,))
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            db.execute("COMMIT")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise FormatTooNew(f"{self.path} has schema {version}; this ragfence knows {SCHEMA_VERSION}")
        made = db.execute("SELECT value FROM meta WHERE name = 'uuid'").fetchone()[0]
        return f"{made}{identity(self.path)}"


class _SqliteShelf:
    def __init__(self, db: sqlite3.Connection, tenant: str, now_ms: int, run_id: str, solo: bool) -> None:
        self.db = db
        self.tenant = tenant
        self.now_ms = now_ms
        self.run_id = run_id
        self.solo = solo

    def get_record(self, key: bytes) -> bytes | None:
        return self._data("SELECT data, expires_ms FROM records WHERE tenant = ? AND key = ?", (self.tenant, key))

    def put_record(self, key: bytes, data: bytes, ttl_ms: int, record: KeyRecord, *, parked: bool) -> None:
        self.db.execute(
            "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?)",
            (self.tenant, key, self._expiry(ttl_ms), parked, record.kind, record.state, data),
        )

    def drop_record(self, key: bytes) -> None:
        self.db.execute("DELETE FROM records WHERE tenant = ? AND key = ?", (self.tenant, key))

    def get_source(self, shard: int, source: bytes) -> bytes | None:
        return self._data(
            "SELECT data, expires_ms FROM sources WHERE tenant = ? AND shard = ? AND source = ?",
            (self.tenant, shard, source),
        )

    def put_source(self, shard: int, source: bytes, data: bytes, ttl_ms: int) -> None:
        self.db.execute(
            "INSERT OR REPLACE INTO sources VALUES (?, ?, ?, ?, ?)",
            (self.tenant, shard, source, self._expiry(ttl_ms), data),
        )

    def get_marker(self, shard: int) -> tuple[bool, int, str] | None:
        row = self.db.execute(
            "SELECT ready, epoch, run_id FROM markers WHERE tenant = ? AND shard = ?", (self.tenant, shard)
        ).fetchone()
        return (bool(row[0]), row[1], row[2]) if row else None

    def put_marker(self, shard: int, marker: tuple[bool, int, str] | None) -> None:
        if marker is None:
            self.db.execute("DELETE FROM markers WHERE tenant = ? AND shard = ?", (self.tenant, shard))
        else:
            self.db.execute("INSERT OR REPLACE INTO markers VALUES (?, ?, ?, ?, ?)", (self.tenant, shard, *marker))

    def next_counter(self, shard: int) -> int:
        row = self.db.execute(
            "INSERT INTO counters VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET n = n + 1 RETURNING n",
            (self.tenant, shard),
        ).fetchone()
        return int(row[0])

    def count_move(self, shard: int) -> None:
        self.db.execute("INSERT INTO moves VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET n = n + 1", (self.tenant, shard))

    def moves(self, shard: int) -> int:
        row = self.db.execute("SELECT n FROM moves WHERE tenant = ? AND shard = ?", (self.tenant, shard)).fetchone()
        return int(row[0]) if row else 0

    def add_row(self, row: Row) -> None:
        self.db.execute(
            "INSERT OR IGNORE INTO decision_rows (tenant, row_id, shard, ts_ms, data) VALUES (?, ?, ?, ?, ?)",
            (self.tenant, row.row_id, row.key[0], row.ts_ms, row.encode()),
        )

    def _expiry(self, ttl_ms: int) -> int | None:
        return self.now_ms + ttl_ms if ttl_ms else None

    def _data(self, query: str, values: tuple[object, ...]) -> bytes | None:
        row = self.db.execute(query, values).fetchone()
        if row is None or (row[1] is not None and row[1] <= self.now_ms):
            return None
        return bytes(row[0])
