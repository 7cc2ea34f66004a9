"""Worlds in which time passes: commits grow old, and purgers and callers meet at any step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ragfence import Fence, Operation, Receipt
from ragfence.core.decisions import Mode
from ragfence.engine.expiry import Purged
from ragfence.engine.requests import slot_of
from ragfence.stores.fences import Lookup
from ragfence.testing.clock import VirtualClock
from tests.engine.worlds import World, Wrapped, elsewhere
from tests.engine.worlds import world as make_world

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
TTL_MS = 48 * HOUR_MS  # of kind "ticket", which is of class api
SOURCE_TTL_MS = 7 * DAY_MS  # how long a fence store remembers the head of its source


@contextmanager
def aging_world(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Its clock starts now: a folder dates its objects by the machine's clock."""
    clock = VirtualClock(time.time_ns() // 1_000_000)
    with make_world(name, folder, monkeypatch, clock=clock) as made:
        yield made


def grow_old(world: World, ms: int = TTL_MS) -> None:
    """Until what happened so far is over. A minute more: leases count on the machine's clock, too."""
    world.clock.advance(ms + 60_000)


def ticket(source_id: str = "a", sequence: int | None = None, revision: str = "") -> Operation:
    return Operation(kind="ticket", source_id=source_id, sequence=sequence, revision=revision)


def perform(fence: Fence, operation: Operation, payload: object = None, result: object = None) -> Receipt:
    """As a caller of its own, who waits for nobody."""

    def call() -> Receipt:
        with fence.claim(operation, payload=payload, wait_s=0) as op:
            if op.is_new:
                op.seal(result=result)
        return op.receipt

    return elsewhere(call)


def names(world: World, under: str = "default/sealed/") -> list[str]:
    assert world.objects is not None
    return [entry.name for entry in world.objects.list(under)]


def purge_all(fence: Fence, limit: int = 1000) -> Purged:
    """One walk through everything; what its calls did, together."""
    done = fence.purge_expired(limit)
    while done.after:
        more = fence.purge_expired(limit, after=done.after)
        done = Purged(done.records + more.records, done.objects + more.objects, done.scanned + more.scanned, more.after)
    return done


def pending(world: World, *operations: Operation) -> list[Any]:
    """What the fence store holds that has not ended, a millisecond from now; the leases of sources by operation."""
    world.clock.advance(1)
    held = [found.record for found in world.store.scan() if not found.record.ended]
    asked = [operation.in_tenant("default") for operation in operations]
    lookups = [Lookup(each.key, Mode.SEQUENCED, slot_of(each.kind, each.source)) for each in asked]
    return held + [there.source.lease for there in world.store.read(lookups) if there.source and there.source.lease]


def assert_audited(fence: Fence) -> None:
    report = fence.audit.check()
    assert report.ok, str(report)


@dataclass
class Meeting:
    """Runs `act` once, at the `nth` call of a method, before or after the store has acted.

    Of calls of `get`, only those for commits count: opening a fence reads its tenant's settings, too.
    """

    method: str
    act: Callable[[], Any]
    after: bool = False
    nth: int = 1
    calls: int = field(default=0, init=False)
    met: Any = field(default=None, init=False)

    def on(self, inner: Any) -> Any:
        meeting = self

        class Met(Wrapped):
            def __getattr__(self, name: str) -> Any:
                call = getattr(self.inner, name)
                return meeting._around(call) if name == meeting.method else call

        return Met(inner)

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: Any, **kwargs: Any) -> Any:
            if self.method == "get" and "/sealed/" not in args[0]:
                return call(*args, **kwargs)
            self.calls += 1
            now = self.calls == self.nth
            if now and not self.after:
                self.met = elsewhere(self.act)
            answer = call(*args, **kwargs)
            if now and self.after:
                self.met = elsewhere(self.act)
            return answer

        return around

    @property
    def happened(self) -> bool:
        return self.calls >= self.nth
