"""SQLite connections for many threads and for processes that fork: one per thread, never one of the parent's.

A fork waits until no thread is inside a transaction. SQLite keeps the locks of a process in its memory: a child made
in the middle of a transaction would believe for ever that its own process holds the write lock.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from ragfence.errors import StoreClosed
from ragfence.stores.file_modes import make_empty_file

# SQLite forbids to close a connection that was inherited by a fork: here it is never even collected.
_parents: list[sqlite3.Connection] = []
_all: weakref.WeakSet[SqliteConnections] = weakref.WeakSet()


class SqliteConnection:
    """A connection and the thread that may use it. It is closed when that thread ends."""

    def __init__(self, db: sqlite3.Connection, run_id: str) -> None:
        self.db = db
        self.run_id = run_id
        self.pid = os.getpid()
        self.busy = threading.Lock()

    def close(self) -> None:
        if self.pid != os.getpid():
            _parents.append(self.db)
            return
        with self.busy:  # another thread may be in the middle of a statement: closing under it is a crash
            self.db.close()

    def __del__(
        self, getpid: Callable[[], int] = os.getpid, parents: list[sqlite3.Connection] = _parents
    ) -> None:  # as defaults: at the end of the interpreter the module may be gone
        if self.pid == getpid():
            self.db.close()
        else:
            parents.append(self.db)


class SqliteConnections:
    def __init__(self, path: Path, busy_timeout_s: float, prepare: Callable[[sqlite3.Connection], str]) -> None:
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._prepare = prepare
        self._local = threading.local()
        self._open: weakref.WeakSet[SqliteConnection] = weakref.WeakSet()
        self._changing = threading.Lock()
        self._closed = False
        _all.add(self)

    def of_this_thread(self) -> SqliteConnection:
        self.refuse_closed()
        known: SqliteConnection | None = getattr(self._local, "connection", None)
        # No connection is kept to a file that was replaced or deleted.
        if known is not None and known.pid == os.getpid() and known.run_id.endswith(identity(self._path)):
            return known
        with self._changing:  # preparing is a transaction too
            self.refuse_closed()
            made = self._make()
            self._open.add(made)
        self._local.connection = made
        return made

    def _make(self) -> SqliteConnection:
        with contextlib.suppress(OSError):  # SQLite says what is wrong
            make_empty_file(self._path)
        # The files next to it, the log and the memory that connections share, get its mode from SQLite.
        db = sqlite3.connect(self._path, timeout=self._busy_timeout_s, isolation_level=None, check_same_thread=False)
        try:
            self._use_wal(db)
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA secure_delete = ON")  # what is purged must not be left in free pages
            return SqliteConnection(db, self._prepare(db))
        except BaseException:
            db.close()
            raise

    def _use_wal(self, db: sqlite3.Connection) -> None:
        """SQLite does not wait here, whatever its timeout: if many open a new file at once, most would fail."""
        give_up_at = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as refused:
                busy = refused.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
                if not busy or time.monotonic() >= give_up_at:
                    raise
                time.sleep(0.01)

    def refuse_closed(self) -> None:
        if self._closed:
            raise StoreClosed(f"the fence file {self._path} was closed here")

    def close(self) -> None:
        """What is inside a transaction ends; all else is `StoreClosed`."""
        self._closed = True
        self.disconnect()

    def disconnect(self) -> None:
        """Close every connection. The next call opens the file again."""
        with self._changing:
            for connection in list(self._open):
                connection.close()
            self._open.clear()
        self._local = threading.local()

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """While this lasts, no transaction is running and none can begin."""
        with contextlib.ExitStack() as held:
            held.enter_context(self._changing)
            for connection in list(self._open):
                if connection.pid == os.getpid():
                    held.enter_context(connection.busy)
            yield


def identity(path: Path) -> str:
    """The file itself, whatever its name: a copy put in its place is another file."""
    try:
        file = path.stat()
    except FileNotFoundError:
        return ".gone"
    return f".{file.st_dev:x}.{file.st_ino:x}"


_gate: list[contextlib.ExitStack] = []


def _before_fork() -> None:
    stack = contextlib.ExitStack()
    for connections in list(_all):
        stack.enter_context(connections.idle())
    _gate.append(stack)


def _after_fork() -> None:
    _gate.pop().close()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
