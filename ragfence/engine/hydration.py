"""Hydration: the fence store is filled from the object store, and a new epoch starts.

Needed whenever the fence store is empty, restored, restarted or failed over: its newest writes may be gone. Any
number of processes may hydrate at once. The lock only keeps them from doing the same work; what keeps the data right
is that every write names its epoch and does nothing once a higher one has begun.

An epoch may also begin with rewritten segments (compaction, purge, repair): then a callable makes the list that
counts from now on, out of the one that counted until now. What it writes is named with the new epoch, so it is void
until the list is put, and for ever if it never is.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from ragfence.core.layout import checked_epoch
from ragfence.engine import crash_points
from ragfence.engine.epochs import Epochs
from ragfence.errors import NotReady, RagfenceError, SegmentUnreadable, StoreUnavailable
from ragfence.stores.fences import FenceStore, Loaded, LoadedSource

LOCK = "hydration"
LOCK_MS = 15_000
BATCH = 4000
"""how many sources and receipts are loaded at once: some dozens for each of the shards"""
BATCH_BYTES = 4 << 20
"""and no more than about that much: documents may have thousands of snippets"""
AFTER_REWRITTEN = "after_rewritten"
"""a point of those epochs only that rewrite segments: the new ones are written, the list is not"""

Progress = Callable[[int], None]
Keep = Callable[[], None]
"""Called every few seconds of long work: keeps the lock, and stops the work once somebody else has it."""
Rewrite = Callable[[int, list[str], Keep], list[str]]
"""(epoch, the segments that count, keep) -> those that shall count; new ones are named with the epoch."""


class _Overtaken(Exception):
    """Somebody else has the lock by now, and begins a newer epoch."""


class Loader(Protocol):
    """Reads the log: which heads and receipts do these segments amount to?"""

    def load(self, segments: Iterable[str]) -> Iterator[Loaded]: ...

    def check(self, segments: Iterable[str]) -> None:
        """Reads them and keeps nothing. Raises as `load` would."""
        ...


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
        self._damaged = ""
        """a segment that could not be read: no epoch is begun for nothing while that is so"""

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

    def try_hydrate(
        self, progress: Progress | None = None, *, only_if_needed: bool = False, rewrite: Rewrite | None = None
    ) -> bool:
        """One attempt, into a new epoch. False: somebody else is at it, or was faster."""
        token = os.urandom(8).hex()
        if not self._fences.lock(LOCK, token, LOCK_MS):
            return False
        try:
            current = self._current()
            # Whoever held the lock until now may have done it: a herd of callers starts one epoch, not many.
            if only_if_needed and current:
                return True
            if rewrite is None:
                self._check_log(whole=current)
            return self._hydrate(token, progress, rewrite)
        finally:
            with contextlib.suppress(RagfenceError):  # it runs out by itself
                self._fences.unlock(LOCK, token)

    def _check_log(self, *, whole: bool) -> None:
        """Before the fence store stops answering. All of the log, if it answers now: a segment that cannot be read
        must not take away what works."""
        segments = self._epochs.truth() if whole else [self._damaged] if self._damaged else []
        try:
            self._loader.check(segments)
        except SegmentUnreadable as damaged:
            self._damaged = damaged.segment
            raise
        except StoreUnavailable:
            # Rewritten meanwhile by somebody else, who begins an epoch, or gone for good.
            if whole and self._epochs.truth() == segments:
                raise
        self._damaged = ""

    def _hydrate(self, token: str, progress: Progress | None, rewrite: Rewrite | None) -> bool:
        known = [marker.epoch for marker in self._fences.markers() if marker]
        epoch = checked_epoch(max([self._epochs.known().newest_begun, *known]) + 1)
        if not self._epochs.begin(epoch, token):
            return False
        crash_points.reach(crash_points.AFTER_BEGUN)
        if not self._fences.begin_epoch(epoch):
            return False
        crash_points.reach(crash_points.AFTER_MARKED)

        def keep() -> None:
            if not self._fences.lock(LOCK, token, LOCK_MS):
                raise _Overtaken

        try:
            segments = self._list(epoch, rewrite, keep)
            crash_points.reach(crash_points.AFTER_LISTED)
            if not self._load(epoch, segments, progress, keep):
                return False
        except _Overtaken:
            return False
        except SegmentUnreadable as damaged:
            # Those of the log; a rewriting reads other objects, too.
            self._damaged = damaged.segment if rewrite is None else ""
            raise
        except StoreUnavailable:
            # A newer epoch may have rewritten what this one was reading, and deleted it.
            if self._epochs.newer_than(epoch):
                return False
            raise
        crash_points.reach(crash_points.AFTER_LOADED)
        return self._fences.finish_epoch(epoch)

    def _list(self, epoch: int, rewrite: Rewrite | None, keep: Keep) -> list[str]:
        base = self._epochs.base(epoch)
        segments = base.segments
        if rewrite is not None:
            segments = rewrite(epoch, list(segments), keep)
            crash_points.reach(AFTER_REWRITTEN)
        return self._epochs.complete(epoch, segments, base)

    def _load(self, epoch: int, segments: list[str], progress: Progress | None, keep: Keep) -> bool:
        # A long log is read for longer than the lock lasts before the first of it is loaded.
        done = 0
        for batch in _batches(self._loader.load(_watched(segments, keep))):
            keep()
            if not self._fences.load(epoch, batch):
                return False
            done += len(batch)
            if progress:
                progress(done)
        return True

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


def _batches(loaded: Iterable[Loaded]) -> Iterator[list[Loaded]]:
    batch: list[Loaded] = []
    size = 0
    for item in loaded:
        batch.append(item)
        size += len(item.head if isinstance(item, LoadedSource) else item.record.result)
        if len(batch) == BATCH or size > BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _watched(segments: Iterable[str], keep: Keep) -> Iterator[str]:
    for name in segments:
        keep()
        yield name


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
