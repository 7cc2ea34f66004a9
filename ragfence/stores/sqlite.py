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
import logging
import os
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ragfence.core.decision_rows import Row, decode_rows
from ragfence.core.hashing import SHARDS
from ragfence.core.layout import SOURCE_STAMP, State, is_parked_below, mark_of_source, stamp_of
from ragfence.core.records import Head, KeyRecord, decode_record, head_of_source, lease_of_source, unpark
from ragfence.core.tallies import HOUR_MS, KEPT_DAYS, Tallies, label_of_row
from ragfence.errors import FormatCorrupt, FormatTooNew, StoreUnavailable
from ragfence.stores import transactional
from ragfence.stores.fences import PENDING_SEEN, Pending, RowEntry, Scanned, Stats, stats_of
from ragfence.stores.file_modes import make_folders
from ragfence.stores.sqlite_connections import SqliteConnections, identity
from ragfence.stores.transactional import TransactionalFences

SCRUB_S = 10.0
SCHEMA_VERSION = 2
DROPPED_AT_ONCE = 2_000
"""rows; claims wait for the transaction meanwhile"""
_WITH_LEASE = "instr('2367ABEF', substr(hex(substr(data, 2, 1)), 2)) > 0"
"""what `lease_of_source` looks at first, said to SQLite: few sources have one"""
_LIVE_DOCUMENT = "instr('57DF', substr(hex(substr(data, 2, 1)), 2)) > 0 AND substr(data, 67, 4) <> x'00000000'"
"""a live head that has its record with it, as only those of documents have"""
_COUNTS = f"""
CREATE TABLE documents (tenant TEXT, shard INTEGER, n INTEGER, PRIMARY KEY (tenant, shard)) WITHOUT ROWID;
CREATE TABLE tallies (
    tenant TEXT, hour INTEGER, label BLOB, n INTEGER, PRIMARY KEY (tenant, hour, label)
) WITHOUT ROWID;
CREATE TABLE row_counts (tenant TEXT PRIMARY KEY, n INTEGER) WITHOUT ROWID;
CREATE INDEX records_pending ON records (tenant, expires_ms) WHERE state <= 3;
CREATE INDEX sources_leased ON sources (tenant, shard) WHERE {_WITH_LEASE};
CREATE INDEX decision_rows_order ON decision_rows (tenant);
"""
_SCHEMA = f"""
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
{_COUNTS}"""


def _indexed_state(record: KeyRecord) -> int:
    """For the index of pending records, which has the states up to 3: a lock that is held stands in it as held."""
    return State.HELD if record.state is State.LOCKED else record.state


def _machine_clock() -> int:
    return time.time_ns() // 1_000_000


class SqliteFences(TransactionalFences):
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
        self._connections = SqliteConnections(self.path, busy_timeout_s, self._prepare)
        try:
            make_folders(self.path.parent)
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
            if head is not None and head.record is not None:
                yield source, head

    def marks(self, shard: int | None = None) -> Iterator[tuple[int, bytes]]:
        for each in range(SHARDS) if shard is None else (shard,):
            for source, data, stamp in self._sources_in(each):
                mark = mark_of_source(data, stamp)
                if mark is not None:
                    yield each, source + mark

    def _sources_in(self, shard: int, condition: str = "TRUE") -> Iterator[tuple[bytes, bytes, bytes | None]]:
        """Source, its record, and the stamp that this must have; None: any will do."""
        with self._transaction(write=False) as tx:
            epoch = transactional.ready_epoch(tx, shard)
            found = tx.db.execute(
                f"SELECT source, data FROM sources WHERE tenant = ? AND shard = ? AND {condition} "
                "AND (expires_ms IS NULL OR expires_ms > ?) ORDER BY source",
                (self.tenant, shard, tx.now_ms),
            ).fetchall()
        stamp = None if self.solo else _stamp(epoch)
        for source, data in found:
            yield source, data, stamp

    def leases(self, shard: int | None = None) -> Iterator[Scanned]:
        for each in range(SHARDS) if shard is None else (shard,):
            for source, data, stamp in self._sources_in(each, _WITH_LEASE):
                if lease := lease_of_source(data, stamp):
                    yield Scanned(bytes((each,)) + lease.digest, lease.record, None, source)

    def scan(self, shard: int | None = None) -> Iterator[Scanned]:
        after = bytes((shard,)) if shard is not None else b""
        end = bytes((shard + 1,)) if shard is not None else b"\xff"
        while True:
            with self._transaction(write=False) as tx:
                page = tx.db.execute(
                    "SELECT key, parked, expires_ms, data FROM records WHERE tenant = ? AND key > ? AND key < ? "
                    "AND (expires_ms IS NULL OR expires_ms > ?) ORDER BY key LIMIT 500",
                    (self.tenant, after, end, tx.now_ms),
                ).fetchall()
            for key, parked, expires_ms, data in page:
                record = unpark(data, None) if parked else decode_record(data)
                if record:
                    yield Scanned(key, record, expires_ms)
            if len(page) < 500:
                return
            after = page[-1][0]

    def forget(self, keys: Sequence[bytes], *, below: int = 0, pending: bool = False) -> None:
        with self._transaction() as tx:
            for key in keys:
                data, expires_ms = tx.get_expiring(key)
                if data is None:
                    continue
                if is_parked_below(data, below):
                    tx.drop_record(key)
                # Parked records start with their stamp, whose first byte is 0; they go with their document.
                elif data[0] and (record := decode_record(data)).ended:
                    tx.drop_record(key)
                    transactional.tally_forgotten(tx, record, expires_ms)
                elif data[0] and pending and not record.held_at(tx.now_ms):
                    tx.drop_record(key)

    def scrub(self) -> None:
        """Deleted bytes are overwritten in the file itself (`secure_delete`); the log next to it still has them."""
        give_up_at = time.monotonic() + SCRUB_S
        while True:
            try:
                connection = self._connections.of_this_thread()
                with connection.busy:
                    (busy, _, _) = connection.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            except sqlite3.OperationalError:
                busy = 1
            if not busy:
                return
            if time.monotonic() >= give_up_at:
                raise StoreUnavailable(
                    f"{self.path}-wal cannot be emptied, another process is reading the database",
                    hint="try again later",
                )
            time.sleep(0.05)

    def stats(self) -> Stats:
        with self._transaction(write=False) as tx:
            documents, pending = transactional.count_documents(tx), self._pending(tx)
            tallies = _tallies(tx, 0)
            rows = tx.db.execute("SELECT n FROM row_counts WHERE tenant = ?", (self.tenant,)).fetchone()
            now_ms = tx.now_ms
        files = (self.path, self.path.with_name(f"{self.path.name}-wal"))
        size = sum(file.stat().st_size for file in files if file.exists())
        return stats_of(documents, pending, tallies, now_ms, rows[0] if rows else 0, size)

    def tallies(self, since_ms: int = 0) -> Tallies:
        with self._transaction(write=False) as tx:
            return _tallies(tx, since_ms // HOUR_MS)

    def _pending(self, tx: _SqliteTransaction) -> Pending:
        """By indexes that hold only what is pending. They are named: SQLite would read the whole primary key."""
        query, live = tx.db.execute, "state <= 3 AND tenant = ? AND (expires_ms IS NULL OR expires_ms > ?)"
        count = query(
            f"SELECT count(*) FROM records INDEXED BY records_pending WHERE {live}", (self.tenant, tx.now_ms)
        ).fetchone()[0]
        found = query(
            f"SELECT key, expires_ms, data FROM records INDEXED BY records_pending WHERE {live} LIMIT ?",
            (self.tenant, tx.now_ms, PENDING_SEEN),
        ).fetchall()
        seen = [Scanned(key, decode_record(data), expires_ms) for key, expires_ms, data in found]
        for shard, data in query(
            f"SELECT shard, data FROM sources INDEXED BY sources_leased WHERE {_WITH_LEASE} AND tenant = ? "
            "AND (expires_ms IS NULL OR expires_ms > ?)",
            (self.tenant, tx.now_ms),
        ):
            stamp = None if self.solo else _stamp(transactional.ready_epoch(tx, shard))
            if stamp is None or data[SOURCE_STAMP] == stamp:
                count += 1
                if len(seen) < PENDING_SEEN and (lease := lease_of_source(data, stamp)):
                    seen.append(Scanned(bytes((shard,)) + lease.digest, lease.record, None))
        return Pending(count, tuple(seen))

    def purge_expired(self, limit: int = 1000) -> int:
        purged = 0
        with self._transaction() as tx:
            for table, key in (("records", "key"), ("sources", "source")):
                cursor = tx.db.execute(
                    f"DELETE FROM {table} WHERE (tenant, {key}) IN (SELECT tenant, {key} FROM {table} "
                    "WHERE tenant = ? AND expires_ms <= ? LIMIT ?)",
                    (self.tenant, tx.now_ms, limit - purged),
                )
                purged += cursor.rowcount
            oldest = tx.now_ms // HOUR_MS - 24 * KEPT_DAYS
            tx.db.execute("DELETE FROM tallies WHERE tenant = ? AND hour < ?", (self.tenant, oldest))
        return purged

    def rows(self, since_ms: int = 0, shard: int | None = None) -> Iterator[Row]:
        after = self._before_first_row(since_ms) if since_ms else 0
        while True:
            with self._transaction(write=False) as tx:
                page = tx.db.execute(
                    "SELECT seq, data FROM decision_rows WHERE tenant = ? AND seq > ? AND ts_ms >= ? "
                    "AND shard = coalesce(?, shard) ORDER BY seq LIMIT 2000",
                    (self.tenant, after, since_ms, shard),
                ).fetchall()
            for _, data in page:
                yield from decode_rows(data)
            if len(page) < 2000:
                return
            after = page[-1][0]

    def _before_first_row(self, since_ms: int) -> int:
        with self._transaction(write=False) as tx:
            (first,) = tx.db.execute(
                "SELECT min(seq) FROM decision_rows INDEXED BY decision_rows_time WHERE tenant = ? AND ts_ms >= ?",
                (self.tenant, since_ms),
            ).fetchone()
        return (first or 1) - 1

    def row_entries(self, after: str = "", limit: int = 1000) -> list[RowEntry]:
        with self._transaction(write=False) as tx:
            found = tx.db.execute(
                "SELECT seq, data FROM decision_rows WHERE tenant = ? AND seq > ? ORDER BY seq LIMIT ?",
                (self.tenant, int(after or 0), limit),
            ).fetchall()
        return [RowEntry(str(seq), bytes(data)) for seq, data in found]

    def drop_rows(self, entries: Sequence[RowEntry]) -> int:
        dropped = 0
        for start in range(0, len(entries), DROPPED_AT_ONCE):
            with self._transaction() as tx:
                # With the row's id: a file that was restored in place gives its numbers once more, to other rows.
                cursor = tx.db.executemany(
                    "DELETE FROM decision_rows WHERE seq = ? AND tenant = ? AND row_id = ?",
                    [
                        (int(entry.place), self.tenant, entry.first_row_id)
                        for entry in entries[start : start + DROPPED_AT_ONCE]
                    ],
                )
                tx.rows -= cursor.rowcount
                dropped += cursor.rowcount
        return dropped

    def now_ms(self) -> int:
        return self._clock()

    def lock(self, name: str, token: str, ttl_ms: int) -> bool:
        with self._transaction() as tx:
            cursor = tx.db.execute(
                "INSERT INTO locks VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET token = excluded.token, "
                "until_ms = excluded.until_ms WHERE token = excluded.token OR until_ms <= ?",
                (self.tenant, name, token, tx.now_ms + ttl_ms, tx.now_ms),
            )
            return cursor.rowcount == 1

    def unlock(self, name: str, token: str) -> None:
        with self._transaction() as tx:
            tx.db.execute("DELETE FROM locks WHERE tenant = ? AND name = ? AND token = ?", (self.tenant, name, token))

    def close(self) -> None:
        self._connections.close()

    @contextlib.contextmanager
    def _transaction(self, *, write: bool = True) -> Iterator[_SqliteTransaction]:
        try:
            connection = self._connections.of_this_thread()
            db = connection.db
            with connection.busy:
                self._connections.refuse_closed()  # while we waited, maybe, and then the connection is as well
                db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                try:
                    tx = _SqliteTransaction(db, self.tenant, self._clock(), connection.run_id, self.solo)
                    yield tx
                    if write:
                        tx.write_counts()
                    db.execute("COMMIT")
                except BaseException:
                    if db.in_transaction:  # a full disk may have ended it
                        db.execute("ROLLBACK")
                    raise
        except sqlite3.Error as broken:
            if getattr(broken, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise FormatCorrupt(
                    f"the fence file {self.path} is damaged: {broken}",
                    hint="restore it from a backup, or delete it (with its -wal and -shm files); then run "
                    "`ragfence hydrate`, which rebuilds it from the object store",
                ) from broken
            raise StoreUnavailable(
                f"the fence file {self.path} did not answer: {broken}",
                hint="check that its folder is writable, has room, and is on a local disk (not NFS)",
            ) from broken

    def _prepare(self, db: sqlite3.Connection) -> str:
        if db.execute("PRAGMA user_version").fetchone()[0] < SCHEMA_VERSION:
            db.execute("BEGIN IMMEDIATE")
            try:
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if version == 0:
                    _execute_all(db, _SCHEMA)
                    db.execute("INSERT INTO meta VALUES ('uuid', ?)", (uuid.uuid4().hex,))
                elif version == 1:
                    logging.getLogger("ragfence").info(
                        "%s: counting what it holds, once, for `ragfence status`", self.path
                    )
                    _execute_all(db, _COUNTS)
                    _count_once(db)
                if version < SCHEMA_VERSION:
                    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise FormatTooNew(f"{self.path} has schema {version}; this ragfence knows {SCHEMA_VERSION}")
        made = db.execute("SELECT value FROM meta WHERE name = 'uuid'").fetchone()[0]
        return f"{made}{identity(self.path)}"


def _stamp(epoch: int | None) -> bytes:
    """What a record of the epoch carries. Of a shard that may not answer: the empty stamp, which none carries."""
    return stamp_of(epoch)


def _tallies(tx: _SqliteTransaction, first_hour: int) -> Tallies:
    found = tx.db.execute(
        "SELECT hour, label, n FROM tallies WHERE tenant = ? AND hour >= ?", (tx.tenant, first_hour)
    ).fetchall()
    return Tallies.of({(hour, bytes(label)): count for hour, label, count in found}, range(SHARDS))


def _execute_all(db: sqlite3.Connection, statements: str) -> None:
    for statement in statements.split(";\n"):
        if statement.strip():
            db.execute(statement)


def _count_once(db: sqlite3.Connection) -> None:
    """The counts of a file that was made before there were any."""
    # The stamp of a source is the epoch in eight bytes; solo stores have any.
    db.execute(
        "INSERT INTO documents SELECT s.tenant, s.shard, count(*) FROM sources AS s "
        "LEFT JOIN markers AS m ON m.tenant = s.tenant AND m.shard = s.shard "
        f"WHERE {_LIVE_DOCUMENT} AND (s.expires_ms IS NULL) AND hex(substr(s.data, 3, 8)) = printf('%016X', m.epoch) "
        "GROUP BY 1, 2"
    )
    db.execute("INSERT INTO row_counts SELECT tenant, count(*) FROM decision_rows GROUP BY 1")
    counts: Counter[tuple[str, int, bytes]] = Counter()
    for tenant, data in db.execute("SELECT tenant, data FROM decision_rows"):
        for row in decode_rows(data):
            if label := label_of_row(row):
                counts[tenant, row.ts_ms // HOUR_MS, label] += 1
    db.executemany(
        "INSERT INTO tallies VALUES (?, ?, ?, ?)",
        [(tenant, hour, label, count) for (tenant, hour, label), count in counts.items()],
    )


class _SqliteTransaction:
    def __init__(self, db: sqlite3.Connection, tenant: str, now_ms: int, run_id: str, solo: bool) -> None:
        self.db = db
        self.tenant = tenant
        self.now_ms = now_ms
        self.run_id = run_id
        self.solo = solo
        # Written when the transaction ends: a batch counts many of the same.
        self.rows = 0
        self._documents: Counter[int] = Counter()
        self._tallies: Counter[tuple[int, bytes]] = Counter()

    def write_counts(self) -> None:
        if self._tallies:
            self.db.executemany(
                "INSERT INTO tallies VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n",
                [(self.tenant, hour, label, count) for (hour, label), count in self._tallies.items()],
            )
        if self._documents:
            self.db.executemany(
                "INSERT INTO documents VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n",
                [(self.tenant, shard, change) for shard, change in self._documents.items()],
            )
        if self.rows:
            self.db.execute(
                "INSERT INTO row_counts VALUES (?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n",
                (self.tenant, self.rows),
            )

    def count_documents(self, shard: int, change: int) -> None:
        self._documents[shard] += change

    def reset_documents(self, shard: int) -> None:
        self.db.execute("DELETE FROM documents WHERE tenant = ? AND shard = ?", (self.tenant, shard))
        self._documents.pop(shard, None)

    def documents(self, shard: int) -> int:
        row = self.db.execute("SELECT n FROM documents WHERE tenant = ? AND shard = ?", (self.tenant, shard)).fetchone()
        return int(row[0]) if row else 0

    def tally(self, hour: int, label: bytes, count: int = 1) -> None:
        self._tallies[hour, label] += count

    def counts(self) -> bool:
        found = self.db.execute("SELECT 1 FROM tallies WHERE tenant = ? LIMIT 1", (self.tenant,)).fetchone()
        return found is not None

    def get_expiring(self, key: bytes) -> tuple[bytes | None, int | None]:
        """The record, and when it expires."""
        row = self.db.execute(
            "SELECT data, expires_ms FROM records WHERE tenant = ? AND key = ?", (self.tenant, key)
        ).fetchone()
        if row is None or (row[1] is not None and row[1] <= self.now_ms):
            return None, None
        return bytes(row[0]), row[1]

    def get_record(self, key: bytes) -> bytes | None:
        return self._data("SELECT data, expires_ms FROM records WHERE tenant = ? AND key = ?", (self.tenant, key))

    def put_record(self, key: bytes, data: bytes, ttl_ms: int, record: KeyRecord, *, parked: bool) -> None:
        self.db.execute(
            "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?)",
            (self.tenant, key, self._expiry(ttl_ms), parked, record.kind, _indexed_state(record), data),
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
        cursor = self.db.execute(
            "INSERT OR IGNORE INTO decision_rows (tenant, row_id, shard, ts_ms, data) VALUES (?, ?, ?, ?, ?)",
            (self.tenant, row.row_id, row.key[0], row.ts_ms, row.encode()),
        )
        self.rows += cursor.rowcount

    def _expiry(self, ttl_ms: int) -> int | None:
        return self.now_ms + ttl_ms if ttl_ms else None

    def _data(self, query: str, values: tuple[object, ...]) -> bytes | None:
        row = self.db.execute(query, values).fetchone()
        if row is None or (row[1] is not None and row[1] <= self.now_ms):
            return None
        return bytes(row[0])
