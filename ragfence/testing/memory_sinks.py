"""Sinks for tests: one in memory that fails on command, and one in a file that outlives its processes.

sink = ListSink()
sink.on("upsert", match="doc-7").fail_after()       # taken, but the reply is lost
fence.documents.using(sink=sink).ingest_many(documents)
sink.held[snippet_id].text
sink.calls["delete"]
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from ragfence.documents.sinks.sink import SinkSnippet
from ragfence.testing.faults import FaultyCalls

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Embedder, Vectors

__all__ = ["ListSink", "SinkMethod", "SqliteSink"]

SinkMethod = Literal["upsert", "delete", "ids"]


class ListSink(FaultyCalls[SinkMethod]):
    """A sink in memory. `.on(...)` gives orders as to a faulty store; a pattern is matched against doc_ids, or the
    snippet_ids of a `delete`. With an `embedder` it gets vectors, too."""

    def __init__(
        self,
        name: str = "list",
        *,
        keeps_positions: bool = False,
        embedder: str | Embedder | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(sleep)
        self.name = name
        self.keeps_positions = keeps_positions
        self.embedder = embedder
        self.held: dict[str, SinkSnippet] = {}
        self.vectors: dict[str, Any] = {}
        """by snippet_id, with an embedder"""
        self.upserted: list[str] = []
        """every snippet_id that was ever given, in order"""
        self.deleted: list[str] = []
        self._held_lock = threading.Lock()

    def upsert(self, snippets: Sequence[SinkSnippet], vectors: Vectors | None = None) -> None:
        def act() -> None:
            with self._held_lock:
                ids = [snippet.snippet_id for snippet in snippets]
                self.upserted += ids
                self.held |= {snippet.snippet_id: snippet for snippet in snippets}
                if vectors is not None:
                    self.vectors |= dict(zip(ids, vectors, strict=True))

        self._call("upsert", [snippet.doc_id for snippet in snippets], act)

    def delete(self, snippet_ids: Sequence[str]) -> None:
        def act() -> None:
            with self._held_lock:
                self.deleted += snippet_ids
                for snippet_id in snippet_ids:
                    self.held.pop(snippet_id, None)
                    self.vectors.pop(snippet_id, None)

        self._call("delete", snippet_ids, act)

    def ids(self, doc_ids: Sequence[str] | None = None) -> Iterable[str]:
        def act() -> list[str]:
            with self._held_lock:
                return [each.snippet_id for each in self.held.values() if doc_ids is None or each.doc_id in doc_ids]

        return self._call("ids", doc_ids or [""], act)


class SqliteSink:
    """A sink in a SQLite file, for any number of processes."""

    def __init__(self, path: str | PathLike[str], name: str = "sqlite") -> None:
        self.name = name
        self._path = path
        with self._transaction() as database:
            database.execute("CREATE TABLE IF NOT EXISTS held (snippet_id PRIMARY KEY, doc_id, snippet) WITHOUT ROWID")

    @property
    def held(self) -> dict[str, SinkSnippet]:
        with self._transaction() as database:
            found = database.execute("SELECT snippet FROM held").fetchall()
        snippets = [SinkSnippet(**json.loads(text)) for (text,) in found]
        return {snippet.snippet_id: snippet for snippet in snippets}

    def upsert(self, snippets: Sequence[SinkSnippet]) -> None:
        rows = [(snippet.snippet_id, snippet.doc_id, json.dumps(asdict(snippet))) for snippet in snippets]
        with self._transaction() as database:
            database.executemany("INSERT OR REPLACE INTO held VALUES (?, ?, ?)", rows)

    def delete(self, snippet_ids: Sequence[str]) -> None:
        with self._transaction() as database:
            database.executemany("DELETE FROM held WHERE snippet_id = ?", [(each,) for each in snippet_ids])

    def ids(self, doc_ids: Sequence[str] | None = None) -> Iterable[str]:
        with self._transaction() as database:
            found = database.execute("SELECT snippet_id, doc_id FROM held").fetchall()
        return [snippet_id for snippet_id, doc_id in found if doc_ids is None or doc_id in doc_ids]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        # A connection a call: one that was inherited by a fork must not be used.
        with closing(sqlite3.connect(self._path, timeout=30.0)) as database, database:
            yield database
