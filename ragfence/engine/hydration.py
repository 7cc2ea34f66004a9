"""Hydration: the fence store is filled from the object store, and a new epoch starts.

Hydration is needed whenever the fence store is empty, restored, restarted or failed over: its newest writes may be
lost. Any number of processes may hydrate at once. The lock only keeps them from doing the same work. The data stays
right because every write names its epoch, and does nothing once a higher epoch has begun.

An epoch may also begin with rewritten segments (compaction, purge, repair): a callable turns the current list of
segments into the new one. The segments it writes are named with the new epoch, so they are void until the list is
written, and permanently if it never is.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ragfence.core.layout import checked_epoch
from ragfence.engine import crash_points
from ragfence.engine.epochs import Epochs
from ragfence.errors import NotReady, RagfenceError, SegmentUnreadable, StoreUnavailable
from ragfence.stores.fences import FenceStore, Loaded, LoadedSource
from ragfence.stores.objects import ObjectStore

LOCK = "hydration"
LOCK_MS = 15_000
BATCH = 4000
"""Sources and receipts that are loaded at once: some dozens per shard."""
BATCH_BYTES = 4 << 20
"""The approximate limit of a load in bytes: documents may have thousands of snippets."""
AFTER_REWRITTEN = "after_rewritten"
"""A crash point of epochs that rewrite segments: the new segments are written, the list is not."""

Progress = Callable[[int], None]
Keep = Callable[[], None]
"""Called every few seconds of long work: keeps the lock, and stops the work once another process has it."""
Rewrite = Callable[[int, list[str], Keep], list[str]]
"""(epoch, the segments that count, keep) -> those that count from now on; new ones are named with the epoch."""


class _Overtaken(Exception):
    """Another process has the lock now, and begins a newer epoch."""


class Loader(Protocol):
    """Reads the log: the heads and receipts that a list of segments contains."""

    def load(self, segments: Iterable[str]) -> Iterator[Loaded]: ...

    def check(self, segments: Iterable[str]) -> None:
        """Reads the segments and keeps nothing. Raises what `load` would."""
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
        """a segment that could not be read: no epoch is started in vain until it can"""

    def ensure_ready(self, progress: Progress | None = None) -> None:
        """Returns when the fence store may answer again. Raises `NotReady` if that takes too long."""
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
        """Makes one attempt, into a new epoch. Returns False if another process is hydrating, or was faster."""
        token = os.urandom(8).hex()
        if not self._fences.lock(LOCK, token, LOCK_MS):
            return False
        try:
            current = self._current()
            # The previous holder of the lock may have done it: many callers start one epoch, not many.
            if only_if_needed and current:
                return True
            if rewrite is None:
                self._check_log(whole=current)
            return self._hydrate(token, progress, rewrite)
        finally:
            with contextlib.suppress(RagfenceError):  # it expires
                self._fences.unlock(LOCK, token)

    def _check_log(self, *, whole: bool) -> None:
        """Reads the log before the fence store stops answering, all of it if the store answers now: a segment that
        cannot be read must not disable a store that works."""
        segments = self._epochs.truth() if whole else [self._damaged] if self._damaged else []
        try:
            self._loader.check(segments)
        except SegmentUnreadable as damaged:
            self._damaged = damaged.segment
            raise
        except StoreUnavailable:
            # Rewritten meanwhile by another process that begins an epoch, or permanently gone.
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
            # Only segments of the log; a rewrite reads other objects too.
            self._damaged = damaged.segment if rewrite is None else ""
            raise
        except StoreUnavailable:
            # A newer epoch may have rewritten and deleted what this one was reading.
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
        # Reading a long log takes longer than the lock lasts, before anything is loaded.
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
            # A thread that held the lock during a fork does not exist in the child to release it.
            self._pid, self._lock = os.getpid(), threading.Lock()
        return self._lock

    def _current(self) -> bool:
        """Whether every shard may answer, and no newer epoch than theirs has begun."""
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


@dataclass(frozen=True, slots=True)
class TenantStores:
    """Both stores of one tenant, and what keeps them in step."""

    tenant: str
    fences: FenceStore
    objects: ObjectStore
    epochs: Epochs
    hydrator: Hydrator


class EpochWatch:
    """Looks for newer epochs regularly, and makes shards of older ones stop answering.

    This takes a partitioned Redis out of service: its markers still say ready, but the object store has a newer epoch.
    `interval_s` limits how long stale answers can last; durability does not depend on it.
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
        if self._stops.setdefault(os.getpid(), stop) is stop:  # only one of many threads starts it
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
                continue  # the stores are down; the next claim raises
