"""Leases, and the one heartbeat thread that renews all leases of a process.

A lease is lost when the store says so, when it could not be renewed in time, or after a fork: a child process has
inherited none of its parent's leases. A lost lease raises `LeaseLost` at the next `check()` and at the seal.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Protocol

from ragfence.core.decisions import LeaseRef
from ragfence.core.operations import FenceNumber, key_to_text
from ragfence.errors import LeaseLost

IDLE_S = 5.0
"""How long the heartbeat thread waits for new leases before it ends."""

current: contextvars.ContextVar[tuple[Lease, ...]] = contextvars.ContextVar("ragfence_leases", default=())


def current_lease() -> Lease:
    """Returns the lease of the effect that is running: its `fence`, its `attempt`, and `check()`.

    Raises `LeaseLost` outside an effect.
    """
    lease = innermost_lease()
    if lease is None:
        raise LeaseLost("no fenced effect is running here", hint="call it inside a @fence.once function")
    return lease


def innermost_lease() -> Lease | None:
    """Returns the lease of the effect that is running, or None outside an effect."""
    held = [lease for lease in current.get() if not lease.ended]
    return held[-1] if held else None


def enter(lease: Lease) -> None:
    current.set((*current.get(), lease))


def leave(lease: Lease) -> None:
    # No reset with a token: a block may be left in another context than the one it was entered in.
    held = current.get()
    current.set(() if held == (lease,) else tuple(each for each in held if each is not lease))


class Renewer(Protocol):
    def renew(self, leases: Sequence[LeaseRef]) -> list[bool]: ...


class Lease:
    """The right to run one operation, until it expires. Pass `fence` to the systems that the effect writes to."""

    __slots__ = (
        "_granted_at",
        "_lost",
        "_pid",
        "_stop_renewing_at",
        "_store_ms",
        "_valid_until",
        "attempt",
        "ended",
        "fence",
        "ref",
        "seen_before",
        "takeover",
    )

    def __init__(
        self,
        ref: LeaseRef,
        *,
        fence: FenceNumber,
        attempt: int,
        takeover: bool,
        granted_at: float,
        store_ms: int,
        max_runtime_ms: int,
        seen_before: bool = False,
    ) -> None:
        self.ref = ref
        self.fence = fence
        self.attempt = attempt
        self.takeover = takeover
        self.seen_before = seen_before
        """the key was known before this claim; a released key counts its attempts from 1 again"""
        self._granted_at = granted_at
        self._store_ms = store_ms
        self._stop_renewing_at = granted_at + max_runtime_ms / 1000
        self._valid_until = granted_at + ref.lease_ms / 1000
        self._lost = False
        self.ended = False
        """sealed or released: what was started inside the effect and outlives it has no lease"""
        self._pid = os.getpid()

    @property
    def key(self) -> str:
        return key_to_text(self.ref.key)

    @property
    def lease_ms(self) -> int:
        return self.ref.lease_ms

    @property
    def may_have_happened(self) -> bool:
        """An earlier attempt may have run the effect, in part or in whole."""
        return self.takeover or self.attempt > 1 or self.seen_before

    def refs(self) -> Sequence[LeaseRef]:
        return (self.ref,)

    @property
    def inherited(self) -> bool:
        """The process is the child of a fork; the lease belongs to the parent."""
        return os.getpid() != self._pid

    @property
    def lost(self) -> bool:
        # Measured from before the renewal was sent, so it never ends later here than in the store.
        return self._lost or self.inherited or time.monotonic() >= self._valid_until

    def check(self) -> None:
        """Raises `LeaseLost` if another owner may be running this key by now. Call it between steps."""
        if self.lost:
            why = "it belongs to the parent process" if self.inherited else "it expired or was taken over"
            raise LeaseLost(f"the lease on {self.key} is lost: {why}", key=self.key)

    def store_now_ms(self) -> int:
        """The store's clock, as far as this process can tell."""
        return self._store_ms + int((time.monotonic() - self._granted_at) * 1000)

    def is_renewable(self, now: float) -> bool:
        return not self._lost and now < self._stop_renewing_at

    def extend(self, asked_at: float) -> None:
        self._valid_until = asked_at + self.ref.lease_ms / 1000

    def discard(self) -> None:
        self._lost = True


class BatchLease:
    """The leases of one batch, which are renewed together. Most batches end before their first renewal.

    Whether one was lost shows when the batch is sealed.
    """

    def __init__(
        self, refs: Callable[[], Sequence[LeaseRef]], *, lease_ms: int, granted_at: float, max_runtime_ms: int
    ) -> None:
        self._refs = refs
        self.lease_ms = lease_ms
        self.ended = False
        self._stop_renewing_at = granted_at + max_runtime_ms / 1000

    def refs(self) -> Sequence[LeaseRef]:
        return self._refs()

    def is_renewable(self, now: float) -> bool:
        return now < self._stop_renewing_at

    def extend(self, asked_at: float) -> None:
        pass

    def discard(self) -> None:
        pass


class Heartbeat:
    """Renews every lease of the process at a third of its length, all leases of a store in one round trip."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        """Reentrant: garbage collection may release a lease at any point. Cheaper than `_changed`."""
        self._changed = threading.Condition(self._lock)
        self._between_renewals = threading.Lock()
        self._held: dict[Lease | BatchLease, tuple[Renewer, float]] = {}
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0
        self._paused = False

    def add(self, store: Renewer, lease: Lease | BatchLease) -> None:
        due = time.monotonic() + _beat_s(lease)
        with self._lock:
            self._held[lease] = (store, due)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="ragfence-heartbeat", daemon=True)
                self._thread.start()
            elif due < self._wakes_at:  # most leases end before their first renewal: not worth a wakeup each
                self._changed.notify()

    def remove(self, lease: Lease | BatchLease) -> None:
        lease.ended = True
        with self._lock:
            self._held.pop(lease, None)

    def pause(self) -> None:
        """Stops renewals during a fork: a child that inherits a store in mid-call would find it locked forever."""
        self._between_renewals.acquire()
        self._paused = True

    def resume(self) -> None:
        if self._paused:  # not if this module was imported during the fork
            self._paused = False
            self._between_renewals.release()

    def reset(self) -> None:
        """Starts afresh in the child of a fork: the parent's thread does not exist here, and its locks may be held."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._between_renewals = threading.Lock()
        self._held = {}
        self._thread = None
        self._paused = False

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                next_beat = min((due for _, due in self._held.values()), default=None)
                self._wakes_at = now + IDLE_S if next_beat is None else next_beat
                if next_beat is None:
                    if not self._changed.wait(timeout=IDLE_S) and not self._held:
                        self._thread = None
                        return
                    continue
                if next_beat > now:
                    self._changed.wait(timeout=next_beat - now)
                    continue
                self._wakes_at = 0.0  # it checks again after the renewals
                # Everything due within the next half interval goes along: one round trip instead of many.
                due = [(lease, store) for lease, (store, at) in self._held.items() if at <= now + _beat_s(lease) / 2]
            self._renew(due)

    def _renew(self, due: list[tuple[Lease | BatchLease, Renewer]]) -> None:
        asked_at = time.monotonic()
        by_store: dict[int, tuple[Renewer, list[Lease | BatchLease]]] = {}
        for lease, store in due:
            if lease.is_renewable(asked_at):
                by_store.setdefault(id(store), (store, []))[1].append(lease)
        next_beat = {lease: asked_at + _beat_s(lease) for lease, _ in due}
        for store, leases in by_store.values():
            refs = [lease.refs() for lease in leases]
            try:
                with self._between_renewals:
                    kept = iter(store.renew(list(chain.from_iterable(refs))))
            except Exception:  # noqa: BLE001  # an error of one store must not end the leases of others
                # The store did not answer. Try again sooner than usual; until then the leases keep their expiry.
                next_beat.update({lease: time.monotonic() + _beat_s(lease) / 4 for lease in leases})
                continue
            for lease, asked in zip(leases, refs, strict=True):
                answers = list(islice(kept, len(asked)))
                if all(answers):
                    lease.extend(asked_at)
                else:
                    lease.discard()
        with self._changed:
            for lease, store in due:
                if lease in self._held:
                    if lease.is_renewable(asked_at):
                        self._held[lease] = (store, next_beat[lease])
                    else:
                        del self._held[lease]


def _beat_s(lease: Lease | BatchLease) -> float:
    return lease.lease_ms / 3000


heartbeat = Heartbeat()
os.register_at_fork(before=heartbeat.pause, after_in_parent=heartbeat.resume, after_in_child=heartbeat.reset)
