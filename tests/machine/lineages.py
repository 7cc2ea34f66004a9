"""Fence stores that lose things: flushed, restarted, failed over to a replica that lags behind.

A `Lineage` is one server process and what it holds. A failover makes another one primary, with an older copy; whoever
is still connected to the old one goes on talking to it, as in a split network.
"""

from __future__ import annotations

import shutil
import sqlite3
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import redis

from ragfence.engine.hydration import LOCK, LOCK_MS
from ragfence.stores.redis.store import RedisFences
from ragfence.stores.sqlite import SqliteFences
from ragfence.testing.clock import VirtualClock
from ragfence.testing.memory import MemoryFences


@dataclass
class Lineage:
    store: Any


class Lineages(Protocol):
    clock: VirtualClock
    primary: Lineage
    split: bool
    """there was more than one primary, and somebody may still talk to an earlier one"""

    def snapshot(self) -> Any: ...
    def flush(self) -> None: ...
    def restart(self) -> None: ...
    def fail_over(self, snapshot: Any) -> None: ...
    def close(self) -> None: ...


class MemoryLineages:
    split = False

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.primary = Lineage(MemoryFences(clock=self.clock))

    def snapshot(self) -> Any:
        return self.primary.store.snapshot()

    def flush(self) -> None:
        self.primary.store.flush()

    def restart(self) -> None:
        self.primary.store.restart()

    def fail_over(self, snapshot: Any) -> None:
        self.split = True
        successor = MemoryFences(clock=self.clock)
        successor.fail_over(snapshot)
        self.primary = Lineage(successor)

    def close(self) -> None:
        pass


class SqliteLineages:
    """A failover is a file that was restored from a backup: another inode, older content."""

    split = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.clock = VirtualClock()
        self._opened: list[SqliteFences] = []
        self.primary = self._open()

    def _open(self, content: Path | None = None) -> Lineage:
        path = self._folder / f"{uuid.uuid4().hex}.db"
        if content is not None:
            shutil.copy(content, path)
        store = SqliteFences(path, clock=self.clock)
        self._opened.append(store)
        return Lineage(store)

    def snapshot(self) -> Path:
        path = self._folder / f"{uuid.uuid4().hex}.copy"
        with sqlite3.connect(self.primary.store.path) as db:
            db.execute("VACUUM INTO ?", (str(path),))
        db.close()
        return path

    def flush(self) -> None:
        with sqlite3.connect(self.primary.store.path) as db:
            for table in ("markers", "counters", "moves", "records", "sources", "locks"):
                db.execute(f"DELETE FROM {table}")
        db.close()

    def restart(self) -> None:
        self.fail_over(self.snapshot())

    def fail_over(self, snapshot: Path) -> None:
        self.split = True
        self.primary = self._open(snapshot)

    def close(self) -> None:
        for store in self._opened:
            store.close()


class RedisLineages:
    """Each lineage is a database of one server, so that an old primary lives on beside its successor."""

    CLOCK = "test-clock"
    split = False

    def __init__(self, url: str) -> None:
        self._base = url.rsplit("/", 1)[0]
        self._number = -1
        self._opened: list[tuple[RedisFences, redis.Redis]] = []
        self._admin = redis.Redis.from_url(url)
        self._admin.flushall()
        self._locks_since_ms = 0
        self.clock = VirtualClock(on_change=self._set_clocks)
        self.primary = self._open()

    def _set_clocks(self, now_ms: int) -> None:
        # Locks run out by Redis' own PX, which knows nothing of the virtual clock.
        expired = now_ms - self._locks_since_ms >= LOCK_MS
        for store, client in self._opened:
            client.set(self.CLOCK, now_ms)
            if expired:
                client.delete(store._names.lock(LOCK))
        if expired:
            self._locks_since_ms = now_ms

    def _open(self) -> Lineage:
        self._number += 1
        url = f"{self._base}/{self._number}"
        client = redis.Redis.from_url(url)
        client.set(self.CLOCK, self.clock())
        store = RedisFences(url, test_clock=self.CLOCK)
        self._opened.append((store, client))
        return Lineage(store)

    @property
    def _client(self) -> redis.Redis:
        return self._opened[-1][1]

    def snapshot(self) -> dict[bytes, bytes]:
        return {key: self._client.dump(key) for key in self._client.keys("*")}

    def flush(self) -> None:
        self._client.flushdb()
        self._set_clocks(self.clock())

    def restart(self) -> None:
        self.fail_over(self.snapshot())

    def fail_over(self, snapshot: dict[bytes, bytes]) -> None:
        if self._number >= 14:  # a server has 16 databases; an example that fails over more often flushes instead
            self.flush()
            return
        self.split = True
        self.primary = self._open()
        for key, data in snapshot.items():
            self._client.restore(key, 0, data, replace=True)
            if key.endswith(b"m"):  # markers carry the run_id of the process that is gone
                state, epoch, _ = self._client.get(key).split(b":", 2)  # type: ignore[arg-type]
                self._client.set(key, b":".join((state, epoch, b"f" * 40)))  # type: ignore[arg-type]
        self._set_clocks(self.clock())

    def close(self) -> None:
        for store, client in self._opened:
            store.close()
            client.close()
        self._admin.close()


Factory = Callable[[], Lineages]
