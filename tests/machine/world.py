"""A world in which real engine code runs on stores that fail, one step at a time.

Every worker is a greenlet that runs the product's own code. Before and after each store call it hands control back,
so whoever drives the world decides what happens in between: another worker's step, a kill, a lease running out, a
flush, a failover that forgets the newest writes, a write that lands late. Nothing here knows the protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from greenlet import getcurrent, greenlet

from ragfence.engine import batch_commit, leases, runner
from ragfence.engine.epochs import Epochs
from ragfence.engine.hydration import EpochWatch, Hydrator, TenantStores
from ragfence.engine.segment_log import PlainCodec, SegmentLoader
from ragfence.errors import StoreUnavailable
from ragfence.testing.memory import MemoryObjects
from tests.machine.lineages import Lineage, Lineages

LEASE_MS = 30_000
FOREVER_S = 1e9
TENANT = "default"


class Killed(BaseException):
    """The process is gone: nothing it would have done happens any more."""


@dataclass
class Worker:
    """One process: its own connections, its own view of which server is the primary."""

    name: int
    lineage: Lineage
    greenlet: greenlet | None = None
    dead: bool = False
    done: bool = False
    drop_reply: bool = False
    at: str = ""
    """the call it is about to make"""
    frozen_until: int = 0
    leases: list[leases.Lease] = field(default_factory=list)

    def pause(self) -> None:
        assert self.greenlet is not None
        self.greenlet.parent.switch()
        if self.dead:
            raise Killed


class Stepped:
    """A store as one worker sees it: it stops before and after every call."""

    def __init__(self, worker: Worker, target: Callable[[], Any], late: list[Callable[[], None]]) -> None:
        self._worker = worker
        self._target = target
        self._late = late

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._target(), name)
        if not callable(attribute):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            self._pause_before(name, args)
            # The target is asked for again: the worker may have reconnected while it stood still.
            answer = getattr(self._target(), name)(*args, **kwargs)
            if name == "list":
                answer = list(answer)
            self._worker.pause()
            if self._worker.drop_reply:
                self._worker.drop_reply = False
                raise StoreUnavailable(f"the reply to {name} was lost")
            return iter(answer) if name == "list" else answer

        return call

    def _pause_before(self, name: str, args: tuple[Any, ...]) -> None:
        if self._worker.dead:
            raise Killed
        self._worker.at = name
        try:
            self._worker.pause()
            self._worker.at = ""
        except Killed:
            if name == "put_new":  # the request was on its way when the process died
                target = self._target()
                self._late.append(lambda: target.put_new(*args))
            raise


class StandInHeartbeat:
    """Leases are renewed when the driver says so, by whoever holds them."""

    def __init__(self, world: World) -> None:
        self._world = world

    def add(self, store: Any, lease: Any) -> None:
        self._world.running().leases.append(lease)

    def remove(self, lease: Any) -> None:
        for worker in self._world.workers.values():
            if lease in worker.leases:
                worker.leases.remove(lease)


class World:
    def __init__(self, lineages: Lineages) -> None:
        self.lineages = lineages
        self.objects = MemoryObjects(clock_ms=lineages.clock)
        self.workers: dict[int, Worker] = {}
        self.late: list[Callable[[], None]] = []
        self.now = 0
        self._names = 0

    @contextmanager
    def running_code(self) -> Any:
        """The engine's one heartbeat thread is replaced while the world runs."""
        stand_in = StandInHeartbeat(self)
        real = leases.heartbeat
        runner.heartbeat = batch_commit.heartbeat = stand_in  # type: ignore[assignment, attr-defined]
        try:
            yield
        finally:
            runner.heartbeat = batch_commit.heartbeat = real  # type: ignore[attr-defined]

    def observe(self) -> None:
        """Watch the server that is the primary now."""

    def spawn(self, work: Callable[[Worker], None]) -> Worker:
        self._names += 1
        worker = Worker(self._names, self.lineages.primary)

        def run() -> None:
            try:
                work(worker)
            except Killed:
                pass
            finally:
                worker.done = True

        worker.greenlet = greenlet(run)
        self.workers[worker.name] = worker
        return worker

    def running(self) -> Worker:
        return next(worker for worker in self.workers.values() if worker.greenlet is getcurrent())

    def step(self, worker: Worker) -> None:
        assert worker.greenlet is not None
        if worker.done or worker.dead:
            return
        self.now += 1
        worker.greenlet.parent = getcurrent()
        with self.running_code():
            worker.greenlet.switch()

    def kill(self, worker: Worker) -> None:
        """SIGKILL: no cleanup reaches a store."""
        worker.dead = True
        if not worker.done and worker.greenlet:
            worker.greenlet.parent = getcurrent()
            with self.running_code():
                worker.greenlet.switch()
        worker.done = True
        worker.leases.clear()

    def active(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if not worker.done]

    def fences_of(self, worker: Worker) -> Any:
        return Stepped(worker, lambda: worker.lineage.store, self.late)

    def objects_of(self, worker: Worker) -> Any:
        return Stepped(worker, lambda: self.objects, self.late)

    def hydrator_of(self, worker: Worker, codec: Any = None) -> Hydrator:
        objects = self.objects_of(worker)
        loader = SegmentLoader(objects, codec or PlainCodec())
        return Hydrator(
            self.fences_of(worker),
            Epochs(TENANT, objects),
            loader,
            wait_s=FOREVER_S,
            sleep=lambda _: self._breathe(worker),
        )

    def stores_of(self, worker: Worker, codec: Any = None) -> TenantStores:
        objects = self.objects_of(worker)
        hydrator = self.hydrator_of(worker, codec)
        return TenantStores(TENANT, self.fences_of(worker), objects, Epochs(TENANT, objects), hydrator)

    def _breathe(self, worker: Worker) -> None:
        """A worker that waits looks again at which server is the primary, as a client that reconnects would."""
        worker.lineage = self.lineages.primary
        worker.pause()

    def watch(self) -> None:
        EpochWatch(self.lineages.primary.store, Epochs(TENANT, self.objects)).look()

    def renew(self, worker: Worker) -> None:
        for lease in list(worker.leases):
            if not all(worker.lineage.store.renew(lease.refs())):
                lease.discard()
                worker.leases.remove(lease)

    def settle(self, steps: int = 20_000) -> bool:
        """Everybody gets to run until done; leases of the dead run out. False: somebody is stuck."""
        for _ in range(steps):
            active = self.active()
            if not active:
                return True
            for worker in active:
                self.step(worker)
            self.lineages.clock.advance(LEASE_MS // 50)
        return False
