"""Stores for attacks inside one process: any number of writers, each of which can die, on stores that can forget."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ragfence
from ragfence.documents.chunking.chunker import Chunker
from ragfence.documents.documents import Documents
from ragfence.engine.hydration import LOCK_MS, EpochWatch
from ragfence.errors import StoreUnavailable
from ragfence.stores.local import LocalObjects
from ragfence.stores.objects import ObjectStore
from ragfence.testing.memory import MemoryObjects
from tests.documents.attack.corpus import Paragraphs
from tests.documents.attack.strikes import CutSeals, Passing, WatchedObjects, struck
from tests.machine.lineages import Lineages, MemoryLineages

LEASE_MS = 30_000


class Crash(BaseException):
    """The process dies here."""


class Mortal(Passing):
    """A store as a process sees it that can die: from then on nothing that it says arrives."""

    dead = False

    def __getattr__(self, name: str) -> Any:
        if self.dead and name != "close":
            raise StoreUnavailable("this process is dead")
        return getattr(self.inner, name)


class Writer:
    """One process that ingests. Who comes second is told so at once: nobody waits for somebody in the same thread."""

    def __init__(self, place: Place, *, chunker: Chunker | None, watching: bool, policy: dict[str, Any]) -> None:
        self._stores = Mortal(place.fences), Mortal(place.objects)
        self._fences, self._objects = CutSeals(self._stores[0]), WatchedObjects(self._stores[1])
        rules = {"wait": {"mode": "raise"}, "lease": {"max_attempts": 1000, "ttl_s": LEASE_MS / 1000}, **policy}
        self.fence = ragfence.open(
            self._fences,  # type: ignore[arg-type]
            objects=self._objects,  # type: ignore[arg-type]
            policy=ragfence.Policy.from_mapping(rules),
        )
        if not watching:
            self.watch._stops[os.getpid()] = threading.Event()  # as if it ran: no test waits for it, and there are many
        self.documents: Documents = self.fence.documents.using(chunker=chunker)

    @property
    def watch(self) -> EpochWatch:
        backing = self.fence._engine.backing
        assert backing is not None
        return backing.watch

    def at(self, point: str, act: Callable[[], None]) -> AbstractContextManager[None]:
        """Acts when this writer, or one that acts inside, first comes by the point."""
        return struck(point, act, self._fences, self._objects)

    def die(self) -> None:
        for store in self._stores:
            store.dead = True
        raise Crash


class Place:
    """A fence store that can forget, an object store, and a folder with the traces of the chunker."""

    def __init__(self, lineages: Lineages, objects: ObjectStore, trace: Path | None) -> None:
        self.lineages = lineages
        self.objects = objects
        self.trace = trace

    @property
    def fences(self) -> Any:
        return self.lineages.primary.store

    def writer(self, *, chunker: Chunker | None = None, watching: bool = False, **policy: Any) -> Writer:
        return Writer(self, chunker=chunker or Paragraphs(self.trace), watching=watching, policy=policy)

    def forget(self) -> None:
        """FLUSHALL."""
        self.lineages.flush()

    def let_leases_run_out(self) -> None:
        """And the lock of whoever died while hydrating."""
        self.lineages.clock.advance(max(LEASE_MS, LOCK_MS) + 1)

    def close(self) -> None:
        self.lineages.close()


def in_memory() -> Place:
    lineages = MemoryLineages()
    return Place(lineages, MemoryObjects(clock_ms=lineages.clock), None)


def in_folder(lineages: Lineages, folder: Path) -> Place:
    trace = folder / "chunked"
    trace.mkdir(exist_ok=True)
    return Place(lineages, LocalObjects(folder / "objects"), trace)
