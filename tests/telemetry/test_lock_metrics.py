"""What is counted of locks and steps: acquired, refused, waited, answered from the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

import ragfence
from ragfence.errors import InFlight
from ragfence.telemetry import Metrics


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def fence(registry: CollectorRegistry, tmp_path: Path) -> Iterator[ragfence.Fence]:
    with ragfence.open(tmp_path / "store", observe=Metrics(registry)) as opened:
        yield opened


def test_locks_are_counted_with_their_waits(fence: ragfence.Fence, registry: CollectorRegistry) -> None:
    def value(name: str) -> float:
        return registry.get_sample_value(f"ragfence_{name}", {"kind": "lock"}) or 0.0

    for _ in range(3):
        with fence.lock("a"), pytest.raises(InFlight), fence.lock("a"):
            pass
    assert (value("locks_acquired_total"), value("lock_conflicts_total")) == (3, 3)
    assert (value("lock_wait_seconds_count"), value("lock_wait_seconds_sum")) == (3, 0)
    entered = threading.Event()

    def hold() -> None:
        with fence.lock("a"):
            entered.set()
            time.sleep(0.2)

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait(10)
    with fence.lock("a", wait_s=20):
        pass
    holder.join()
    assert value("locks_acquired_total") == value("lock_wait_seconds_count") == 5
    assert value("lock_wait_seconds_sum") > 0.1
    decisions = registry.get_sample_value(
        "ragfence_decisions_total", {"kind": "lock", "decision": "in_flight", "tenant": "default", "endpoint": ""}
    )
    assert decisions == value("lock_conflicts_total")


def test_a_step_that_is_answered_from_the_store_is_a_hit(fence: ragfence.Fence, registry: CollectorRegistry) -> None:
    step = fence.run("nightly")
    for _ in range(3):
        step("add", sum, [1, 2])
    labels = {"kind": "step", "tenant": "default"}
    assert registry.get_sample_value("ragfence_hits_total", labels) == 2
    assert registry.get_sample_value("ragfence_misses_total", labels) == 1
