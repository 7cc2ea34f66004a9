"""Stores for the tests of compact, purge and verify: they can be flushed, and looked at in every corner."""

from __future__ import annotations

import io
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ragfence.documents.documents import Documents
from ragfence.documents.log import Address, address_in
from ragfence.engine.epochs import Epochs
from ragfence.engine.hydration import LOCK, LOCK_MS
from ragfence.stores.local import LocalObjects
from ragfence.stores.objects import ObjectStore
from ragfence.stores.redis.codec import Names
from ragfence.stores.redis.store import RedisFences
from ragfence.testing.clock import VirtualClock
from tests.documents.chunkers import Paragraphs
from tests.engine.worlds import World
from tests.engine.worlds import world as make_world
from tests.servers import RedisServer

PLACES = ("memory", "embedded", "valkey")
IN_PROCESS = ("memory", "embedded")
DAY_MS = 24 * 3_600_000
TENANT = "default"
CLOCK_KEY = "test-clock"


class Place(World):
    """A world with an object store whose fence store can forget."""

    server: Any = None
    """a client of the Redis behind it"""

    @property
    def kept(self) -> ObjectStore:
        assert self.objects is not None
        return self.objects

    @property
    def epochs(self) -> Epochs:
        return Epochs(TENANT, self.kept)

    def assert_no_promise_was_broken(self) -> None:
        report = self.open().audit.check()
        assert report.ok, str(report)

    def documents(self, chunker: Paragraphs | None = None, **rules: Any) -> Documents:
        """As another process would have them."""
        return self.open(documents=rules).documents.using(chunker=chunker or Paragraphs())

    def flush(self) -> None:
        if self.name == "memory":
            self.store.flush()
        elif self.name == "valkey":
            self.server.flushall()
            self.clock.advance(0)
        else:
            self._sql(*(f"DELETE FROM {table}" for table in ("markers", "counters", "records", "sources", "locks")))

    def let_locks_run_out(self) -> None:
        """Of processes that died with the lock of a hydration."""
        self.clock.advance(LOCK_MS + 1)
        if self.name == "valkey":  # by its own clock
            self.server.delete(Names(TENANT).lock(LOCK))

    def pass_days(self, days: float) -> None:
        self.clock.advance(round(days * DAY_MS))

    def names(self, folder: str = "") -> list[str]:
        return [entry.name for entry in self.kept.list(f"{TENANT}/{folder}")]

    def everything(self) -> str:
        """All that is stored anywhere, as one text: objects, what Parquet holds compressed, and the fence store."""
        stored = {name: self.kept.get(name) or b"" for name in self.names()}
        # Also what a folder has beside its objects.
        stored |= {str(file): file.read_bytes() for file in sorted(self.folder.rglob("*")) if file.is_file()}
        told = []
        for name, data in stored.items():
            told += [name, data.decode(errors="replace")]
            if data[:4] == b"PAR1":
                told.append(repr(pq.read_table(io.BytesIO(data)).to_pylist()))
        told.append(self._fence_store())
        return "\n".join(told)

    def _fence_store(self) -> str:
        if self.name == "memory":
            return repr(vars(self.store.content))
        if self.name == "valkey":
            return repr([self.server.dump(key) for key in self.server.keys("*")])
        return ""  # files in the folder

    def _sql(self, *statements: str) -> None:
        db = sqlite3.connect(self.folder / "fences.db")
        with db:
            for statement in statements:
                db.execute(statement)
        db.close()


@contextmanager
def place(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, server: Callable[[], RedisServer]
) -> Iterator[Place]:
    if name != "valkey":
        with make_world(name, folder, monkeypatch) as made:
            yield Place(**vars(made))
        return
    url = server().url
    with server().client() as client:
        client.flushall()
        clock = VirtualClock(on_change=lambda now_ms: client.set(CLOCK_KEY, now_ms))
        made = Place(name, folder, clock, lambda: RedisFences(url, test_clock=CLOCK_KEY), LocalObjects(folder / "o"))
        made.server = client
        try:
            yield made
        finally:
            for fence in made.opened:
                fence.close()


def texts(documents: Documents, doc_id: str) -> list[str]:
    return [snippet.text for snippet in documents.snippets(doc_id)]


def addresses(names: list[str]) -> list[Address]:
    return [address_in(name) for name in names]


def rows_in(store: ObjectStore, name: str) -> list[dict[str, Any]]:
    data = store.get(name)
    assert data is not None
    rows: list[dict[str, Any]] = pq.read_table(io.BytesIO(data)).to_pylist()
    return rows
