"""The fence stores under test, each with its clock, and with ways to restart it, flush it and tamper with it."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("ragfence.testing.contracts")


from ragfence.core.operations import encoded  # noqa: E402
from ragfence.stores.redis.codec import Names  # noqa: E402
from ragfence.stores.redis.store import RedisFences  # noqa: E402
from ragfence.stores.sqlite import SqliteFences  # noqa: E402
from ragfence.testing.clock import VirtualClock  # noqa: E402
from ragfence.testing.contracts.fence_calls import start_epoch  # noqa: E402
from ragfence.testing.memory import MemoryFences  # noqa: E402
from tests.servers import RedisCluster, RedisServer  # noqa: E402

CLOCK_KEY = "test-clock"


@pytest.fixture(scope="session", params=["valkey", "redis-6.2"])
def any_redis(request):
    return request.getfixturevalue("valkey_server" if request.param == "valkey" else "redis62_server")


class MemoryUnderTest:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self._handles: list[MemoryFences] = []
        self.store = self.reopen()
        start_epoch(self.store, 1)

    def reopen(self, tenant: str = "default", *, solo: bool = False) -> MemoryFences:
        handle = MemoryFences(tenant, solo=solo, clock=self.clock)
        for first in self._handles:
            handle.run_id = first.run_id
            if first.tenant == tenant:
                handle.content, handle._lock = first.content, first._lock
        self._handles.append(handle)
        return handle

    def restart(self) -> None:
        self.store.restart()
        for handle in self._handles:
            handle.run_id = self.store.run_id

    def flush(self) -> None:
        fresh = {handle.tenant: MemoryFences().content for handle in self._handles}
        for handle in self._handles:
            handle.content = fresh[handle.tenant]

    def plant_record(self, key: bytes, data: bytes) -> None:
        self.store.content.records[key] = (data, None, False)

    def plant_source(self, shard: int, source: bytes, data: bytes) -> None:
        self.store.content.sources[shard, source] = (data, None)

    def close(self) -> None:
        pass


class SqliteUnderTest:
    def __init__(self, folder: Path) -> None:
        self.clock = VirtualClock()
        self._file = folder / "fences.db"
        self._handles: list[SqliteFences] = []
        self.store = self.reopen()
        start_epoch(self.store, 1)

    def reopen(self, tenant: str = "default", *, solo: bool = False) -> SqliteFences:
        handle = SqliteFences(self._file, tenant, solo=solo, clock=self.clock)
        self._handles.append(handle)
        return handle

    def restart(self) -> None:
        """The file is replaced by a copy, as a restore does it."""
        self._close_all()
        shutil.copy(self._file, self._file.with_suffix(".copy"))
        self._file.with_suffix(".copy").replace(self._file)
        self.store = self.reopen()

    def flush(self) -> None:
        self._close_all()
        self._file.unlink()
        self.store = self.reopen()

    def plant_record(self, key: bytes, data: bytes) -> None:
        self._insert("records VALUES (?, ?, NULL, 0, '', 4, ?)", key, data)

    def plant_source(self, shard: int, source: bytes, data: bytes) -> None:
        self._insert("sources VALUES (?, ?, ?, NULL, ?)", shard, source, data)

    def close(self) -> None:
        for handle in self._handles:
            handle.close()

    def _close_all(self) -> None:
        """Of the file, as if nobody had it open; the handles open it again."""
        for handle in self._handles:
            handle._connections.disconnect()

    def _insert(self, where: str, *values: Any) -> None:
        db = sqlite3.connect(self._file)
        with db:
            db.execute(f"INSERT OR REPLACE INTO {where}", ("default", *values))
        db.close()


class RedisUnderTest:
    def __init__(self, server: RedisServer | RedisCluster) -> None:
        self._url = server.url
        self._server: Any = server.client()
        self._server.flushall()
        self._now_ms = 0
        self._handles: list[RedisFences] = []
        self.clock = VirtualClock(on_change=self._pass)
        self.store = self.reopen()
        start_epoch(self.store, 1)

    def reopen(self, tenant: str = "default", *, solo: bool = False) -> RedisFences:
        handle = RedisFences(self._url, tenant, solo=solo, test_clock=CLOCK_KEY)
        self._handles.append(handle)
        self._set_clock(handle)
        return handle

    def restart(self) -> None:
        """The markers name another run. (With a real restart: tests/stores/test_redis_store.py.)"""
        for tenant in {encoded(handle.tenant) for handle in self._handles}:
            for name in self._server.scan_iter(f"rf{{{tenant}:??}}m"):
                state, epoch, _ = self._server.get(name).split(b":")
                self._server.set(name, b":".join((state, epoch, b"%040x" % int(self._server.incr("runs")))))

    def flush(self) -> None:
        self._server.flushall()
        self.clock.advance(0)

    def plant_record(self, key: bytes, data: bytes) -> None:
        self._server.set(Names("default").record(key), data)

    def plant_source(self, shard: int, source: bytes, data: bytes) -> None:
        self._server.set(Names("default").source(shard, source), data)

    def close(self) -> None:
        for handle in self._handles:
            handle.close()
        self._server.close()

    def _pass(self, now_ms: int) -> None:
        """Sets the clock, and lets what has a TTL grow old by as much."""
        passed_ms, self._now_ms = now_ms - self._now_ms, now_ms
        for handle in self._handles:
            self._set_clock(handle)
        self._server.set(CLOCK_KEY, now_ms)
        for name in self._server.scan_iter(count=1000):
            left_ms = self._server.pttl(name)
            if left_ms > 0:
                self._server.pexpire(name, left_ms - passed_ms)  # deletes it when nothing is left

    def _set_clock(self, handle: RedisFences) -> None:
        """One key is enough for a server; see `ClusterUnderTest`."""


class ClusterUnderTest(RedisUnderTest):
    def _set_clock(self, handle: RedisFences) -> None:
        """A script may not look into another slot: every shard has a clock of its own."""
        with self._server.pipeline() as pipe:
            for prefix in Names(handle.tenant).prefixes:
                pipe.set(prefix + b"t", self._now_ms)
            pipe.execute()


@pytest.fixture
def memory_fences() -> MemoryUnderTest:
    return MemoryUnderTest()


@pytest.fixture
def sqlite_fences(tmp_path: Path) -> Iterator[SqliteUnderTest]:
    under_test = SqliteUnderTest(tmp_path)
    yield under_test
    under_test.close()


@pytest.fixture
def redis_fences(any_redis: RedisServer) -> Iterator[RedisUnderTest]:
    under_test = RedisUnderTest(any_redis)
    yield under_test
    under_test.close()


@pytest.fixture
def cluster_fences(valkey_cluster_server: RedisCluster) -> Iterator[ClusterUnderTest]:
    under_test = ClusterUnderTest(valkey_cluster_server)
    yield under_test
    under_test.close()
