"""Stores for the engine's tests. Any number of fences can be open on them, each like a process of its own."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

import ragfence
from ragfence import Fence, Operation, Policy, Receipt
from ragfence.engine.claim_block import ClaimBlock
from ragfence.engine.leases import heartbeat
from ragfence.stores.fences import FenceStore, Lookup
from ragfence.stores.local import LocalObjects
from ragfence.stores.objects import ObjectStore
from ragfence.stores.sqlite import SqliteFences
from ragfence.testing.clock import VirtualClock
from ragfence.testing.memory import MemoryFences, MemoryObjects

R = TypeVar("R")
Request = dict[str, Any]

REQUEST: Request = {"id": "t-1", "version": "1", "text": "it rains in"}

BACKENDS = ("embedded", "memory", "solo")
WITH_OBJECTS = ("embedded", "memory")
LEASE_MS = 30_000


@dataclass
class World:
    name: str
    folder: Path
    clock: VirtualClock
    make_fences: Callable[[], FenceStore]
    objects: ObjectStore | None
    opened: list[Fence] = field(default_factory=list)

    def open(
        self,
        *,
        fences: Callable[[FenceStore], Any] = lambda store: store,
        objects: ObjectStore | None = None,
        owner: str | None = None,
        **policy: Any,
    ) -> Fence:
        """Another fence on the same stores; `fences` wraps the fence store, `objects` stands in for the other one."""
        policy.setdefault("lease", {})
        policy["lease"] = {"seal_retry_s": 0, **policy["lease"]}
        fence = ragfence.open(
            fences(self.make_fences()),
            objects=objects or self.objects,
            policy=Policy(**policy),
            owner=owner,
            journal=self.folder / "journal",
        )
        self.opened.append(fence)
        return fence

    def let_leases_run_out(self) -> None:
        self.clock.advance(LEASE_MS + 1)

    @property
    def store(self) -> Any:
        """The store of the tests, to look at what the fences wrote."""
        return self.make_fences()


class PassingClock(VirtualClock):
    """For what sleeps: time passes by itself, and can be advanced besides."""

    def __call__(self) -> int:
        return super().__call__() + time.monotonic_ns() // 1_000_000


@contextmanager
def world(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, clock: VirtualClock | None = None
) -> Iterator[World]:
    for variable in ("STORE", "OBJECTS", "TENANT", "POLICY"):
        monkeypatch.delenv(f"RAGFENCE_{variable}", raising=False)
    clock = clock or VirtualClock()
    if name == "embedded":
        objects: ObjectStore | None = LocalObjects(folder / "objects")
        made = World(name, folder, clock, lambda: SqliteFences(folder / "fences.db", clock=clock), objects)
    else:
        solo = name == "solo"
        memory = MemoryFences(solo=solo, clock=clock)
        made = World(name, folder, clock, lambda: memory, None if solo else MemoryObjects())
    try:
        yield made
    finally:
        for fence in made.opened:
            fence.close()


def abandon(fence: Fence, operation: Operation, payload: object = None) -> ClaimBlock:
    """An owner that is never heard of again: its lease is neither renewed nor given back."""
    claimed = fence.claim(operation, payload=payload)
    contextvars.copy_context().run(claimed.__enter__)
    heartbeat.remove(claimed.lease)
    return claimed


def elsewhere(call: Callable[[], R]) -> R:
    """As another process would call it: outside of every effect that is being performed here."""
    return contextvars.Context().run(call)


class Wrapped:
    """Passes every call on to the store; what a test sets on it, it does instead."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Crash(BaseException):
    """The process dies here."""


class Process:
    """A process that can die: from then on nothing it says reaches a store, not even that it gives its key back."""

    def __init__(self, world: World, **policy: Any) -> None:
        self.dead = threading.Event()
        objects: Any = world.objects and _Mortal(world.objects, self.dead)
        self.fence = world.open(fences=lambda store: _Mortal(store, self.dead), objects=objects, **policy)

    def die(self) -> None:
        self.dead.set()
        raise Crash


class _Mortal(Wrapped):
    def __init__(self, inner: Any, dead: threading.Event) -> None:
        super().__init__(inner)
        self._dead = dead

    def __getattr__(self, name: str) -> Any:
        if self._dead.is_set() and name != "close":
            raise ragfence.errors.StoreUnavailable("this process is dead")
        return getattr(self.inner, name)


def eventually(holds: Callable[[], Any], within_s: float = 20.0) -> None:
    """No test asserts how long something takes, only that it happens."""
    give_up_at = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < give_up_at, "it never happened"
        time.sleep(0.005)


class Tickets:
    """An effect that can be counted, and what it shall do next."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.then: list[BaseException | object] = []

    def create(self, req: Any) -> object:
        self.made.append(req)
        if self.then:
            outcome = self.then.pop(0)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome
        return {"number": len(self.made)}

    def on(self, fence: Fence, **options: Any) -> Callable[[Request], Receipt]:
        options = {"kind": "ticket", "key": lambda req: (req["id"], req["version"]), **options}
        return fence.once(**options)(self.create)

    def on_async(self, fence: Fence, **options: Any) -> Callable[[Request], Any]:
        async def create(req: Request) -> object:
            return self.create(req)

        options = {"kind": "ticket", "key": lambda req: (req["id"], req["version"]), **options}
        return fence.once(**options)(create)


def record_of(fence: Fence, key: str) -> Any:
    (held,) = fence.inspector.fences.read([Lookup(bytes.fromhex(key))])
    return held.record


def key_of(req: Request = REQUEST) -> str:
    """The key under which `Tickets` performs the request."""
    operation = Operation(kind="ticket", source_id=req["id"], revision=req["version"], tenant="default")
    return operation.key.hex()


def rows_of(fence: Fence, **wanted: Any) -> list[dict[str, Any]]:
    return fence.audit.decisions(**wanted).to_pylist()
