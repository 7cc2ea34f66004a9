"""Hydration: the fence store is filled from the object store, and a new epoch starts.

Needed whenever the fence store is empty, restored, restarted or failed over: its newest writes may be gone. Any
number of processes may hydrate at once. The lock only keeps them from doing the same work; what keeps the data right
is that every write names its epoch and does nothing once a higher one has begun.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Protocol

from ragfence.core.records import checked_epoch
from ragfence.engine import points
from ragfence.engine.epochs import Epochs
from ragfence.errors import NotReady, RagfenceError
from ragfence.stores.fences import FenceStore, Loaded

LOCK = "hydration"
LOCK_MS = 15_000
BATCH = 500

Progress = Callable[[int], None]


class Loader(Protocol):
    """Reads the log: which heads and receipts do these segments amount to?"""

    def load(self, segments: Iterable[str]) -> Iterator[Loaded]: ...


class Hydrator:
    def __init__(
        self,
        fences: FenceStore,
        epochs: Epochs,
        loader: Loader,
        *,
        wait_s: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._fences = fences
        self._epochs = epochs
        self._loader = loader
        self._wait_s = wait_s
        self._sleep = sleep
        self._pid = 0
        self._lock = threading.Lock()

    def ensure_ready(self, progress: Progress | None = None) -> None:
        """Returns when the fence store may answer again; raises `NotReady` when that takes too long."""
        give_up_at = time.monotonic() + self._wait_s
        while not self._current():
            one_per_process = self._one_per_process()
            if one_per_process.acquire(timeout=0.05):
                try:
                    if self._current() or self.try_hydrate(progress, only_if_needed=True):
                        return
                finally:
                    one_per_process.release()
            if time.monotonic() >= give_up_at:
                raise NotReady(
                    f"{self._fences.url} was not rebuilt within {self._wait_s:.0f} s",
                    hint="another process may be rebuilding it; try again",
                )
            self._sleep(0.02)

    def try_hydrate(self, progress: Progress | None = None, *, only_if_needed: bool = False) -> bool:
        """One attempt, into a new epoch. False: somebody else is at it, or was faster."""
        token = os.urandom(8).hex()
        if not self._fences.lock(LOCK, token, LOCK_MS):
            return False
        try:
            # Whoever held the lock until now may have done it: a herd of callers starts one epoch, not many.
            return (only_if_needed and self._current()) or self._hydrate(token, progress)
        finally:
            with contextlib.suppress(RagfenceError):  # it runs out by itself
                self._fences.unlock(LOCK, token)

    def _hydrate(self, token: str, progress: Progress | None) -> bool:
        known = [marker.epoch for marker in self._fences.markers() if marker]
        epoch = checked_epoch(max([self._epochs.known().newest_begun, *known]) + 1)
        if not self._epochs.begin(epoch, token):
            return False
        points.reach(points.AFTER_BEGUN)
        if not self._fences.begin_epoch(epoch):
            return False
        points.reach(points.AFTER_MARKED)
        segments = self._epochs.complete(epoch, self._epochs.truth_below(epoch))
        points.reach(points.AFTER_LISTED)
        loaded = self._loader.load(segments)
        done = 0
        while batch := list(islice(loaded, BATCH)):
            # Long loads keep the lock; losing it costs double work, nothing else.
            self._fences.lock(LOCK, token, LOCK_MS)
            if not self._fences.load(epoch, batch):
                return False
            done += len(batch)
            if progress:
                progress(done)
        points.reach(points.AFTER_LOADED)
        return self._fences.finish_epoch(epoch)

    def _one_per_process(self) -> threading.Lock:
        if self._pid != os.getpid():
            # A thread that held it when the process was forked does not exist in the child, to give it back.
            self._pid, self._lock = os.getpid(), threading.Lock()
        return self._lock

    def _current(self) -> bool:
        """Every shard may answer, and nobody has begun a newer epoch than theirs."""
        markers = self._fences.markers()
        if not all(marker and marker.usable for marker in markers):
            return False
        return not self._epochs.newer_than(min(marker.epoch for marker in markers if marker))


class EpochWatch:
    """Now and then looks for newer epochs and makes shards of older ones stop answering.

    This is what ends the life of a Redis that was split off: it still believes its markers, the object store knows
    better. `interval_s` bounds how long stale answers can last; what is durable never depends on it.
    """

    def __init__(self, fences: FenceStore, epochs: Epochs, *, interval_s: float = 30.0) -> None:
        self._fences = fences
        self._epochs = epochs
        self._interval_s = interval_s
        self._stops: dict[int, threading.Event] = {}
        """by process: the child of a fork has no thread of its own yet"""

    def start(self) -> None:
        if os.getpid() in self._stops:
            return
        stop = threading.Event()
        if self._stops.setdefault(os.getpid(), stop) is stop:  # of many threads one starts it
            threading.Thread(target=self._run, args=[stop], name="ragfence-epochs", daemon=True).start()

    def look(self) -> None:
        newest = self._epochs.known().newest_begun
        if newest:
            self._fences.forget_markers(newest)

    def stop(self) -> None:
        if stop := self._stops.get(os.getpid()):
            stop.set()

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(self._interval_s):
            try:
                self.look()
            except RagfenceError:
                continue  # the stores are away; whoever claims will be told
