"""A job that counts itself, and stores that fail under it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ragfence import Decision, Fence, Operation, Receipt
from ragfence.errors import StoreUnavailable
from ragfence.stores.fences import Lookup
from tests.engine.worlds import BACKENDS, World, Wrapped

JOB = Operation(kind="job", source_id="j1", tenant="default")
COMMITS = "default/sealed/*"
OPEN = {"on_store_error": "open"}


class Job:
    """An effect that counts itself; `during` runs inside of it, once."""

    def __init__(self) -> None:
        self.done = 0
        self.during: list[Callable[[], Any]] = []

    def effect(self) -> str:
        self.done += 1
        number = self.done
        if self.during:
            self.during.pop(0)()
        return f"effect {number}"

    def on(self, fence: Fence, sequence: int | None = None, **options: Any) -> Callable[[], Receipt]:
        def key() -> Any:
            return "j1" if sequence is None else ("j1", "r", sequence)

        return fence.once(kind="job", key=key, **options)(self.effect)


def record_of(world: World) -> Any:
    (held,) = world.store.read([Lookup(JOB.key)])
    return held.record


def assert_settled(world: World, receipt: Receipt, job: Job, done: int) -> None:
    """Everybody gets this receipt, the effect ran so often, nothing is held, and every promise was kept."""
    fence = world.open()
    again = job.on(fence, wait_s=0)()
    assert again == receipt
    assert again.decision is Decision.DUPLICATE
    assert job.done == done
    assert record_of(world) is None or record_of(world).ended
    report = fence.audit.check()
    assert report.ok, str(report)


class Unreliable(Wrapped):
    """Fails the first `failures` calls of a method, before or after the store acted."""

    def __init__(self, inner: Any, method: str, failures: int, *, after: bool) -> None:
        super().__init__(inner)
        self.left = failures
        self._method, self._after = method, after

    def __getattr__(self, name: str) -> Any:
        if name != self._method or not self.left:
            return super().__getattr__(name)

        def fail(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self._after:
                getattr(self.inner, name)(*args, **kwargs)
            raise StoreUnavailable(f"{name} failed")

        return fail


def unreliable(world: World, method: str, failures: int, *, after: bool, **policy: Any) -> Fence:
    return world.open(fences=lambda store: Unreliable(store, method, failures, after=after), **policy)


def reached(*points: str) -> pytest.MarkDecorator:
    """Each of these points on each backend that gets there: without objects there is no commit."""
    pairs = [(name, point) for name in BACKENDS for point in points if (name, point) != ("solo", "after_commit")]
    return pytest.mark.parametrize(("world", "point"), pairs, indirect=["world"])
