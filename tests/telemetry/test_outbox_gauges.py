"""Gauges of outboxes: read in the background, bounded in number and in time."""

from __future__ import annotations

import threading
from pathlib import Path

from prometheus_client import CollectorRegistry

from ragfence.errors import TransportUnavailable
from ragfence.outbox import Outbox, Relay
from ragfence.outbox.outbox import OutboxStatus
from ragfence.telemetry import Metrics
from ragfence.telemetry.outbox_gauges import MAX_OUTBOXES, OutboxGauges


class Fixed:
    def __init__(self) -> None:
        self.reads = 0
        self.broken = False
        self.pause = threading.Event()
        self.pause.set()

    def status(self) -> OutboxStatus:
        self.reads += 1
        self.pause.wait(30)
        if self.broken:
            raise TransportUnavailable("away")
        return OutboxStatus(3, 1, 7.5)


def values(gauges: OutboxGauges) -> dict[tuple[str, str], float]:
    return {(each.name, each.labels["outbox"]): each.value for family in gauges.collect() for each in family.samples}


def settled(gauges: OutboxGauges) -> None:
    assert gauges._reader is not None
    gauges._reader.join(30)


def test_an_outbox_is_exposed_and_its_relay_counted(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    outbox = Outbox(f"sqlite:///{tmp_path / 'app.db'}")
    with outbox.engine.begin() as tx:
        outbox.add(tx, topic="t", key="a", payload=1)
        outbox.add(tx, topic="t", key="b", payload=1)

    def send(row: object) -> None:
        if getattr(row, "key", "") == "b":
            raise OSError("away")

    Relay(outbox, to=send, on_round=metrics.watch_outbox(outbox, "shop")).run_once()
    shop = {"outbox": "shop"}
    assert registry.get_sample_value("ragfence_outbox_pending", shop) == 1
    assert registry.get_sample_value("ragfence_outbox_dead", shop) == 0
    assert registry.get_sample_value("ragfence_outbox_relayed_total", shop | {"outcome": "sent"}) == 1
    assert registry.get_sample_value("ragfence_outbox_relayed_total", shop | {"outcome": "failed"}) == 1


def test_a_scrape_reads_no_outbox_again_within_the_interval_and_waits_for_none() -> None:
    now = 0.0
    outbox = Fixed()
    gauges = OutboxGauges(clock=lambda: now)
    gauges.watch("shop", outbox)
    assert values(gauges)["ragfence_outbox_lag_seconds", "shop"] == 7.5
    assert values(gauges)["ragfence_outbox_pending", "shop"] == 3
    assert outbox.reads == 1
    now = 20.0
    outbox.pause.clear()
    assert values(gauges)["ragfence_outbox_dead", "shop"] == 1  # the last known number
    outbox.pause.set()
    settled(gauges)
    assert outbox.reads == 2


def test_an_outbox_that_cannot_be_read_hides_no_other() -> None:
    broken, good = Fixed(), Fixed()
    broken.broken = True
    gauges = OutboxGauges()
    gauges.watch("broken", broken)
    gauges.watch("good", good)
    assert {name for _, name in values(gauges)} == {"good"}


def test_labels_are_bounded() -> None:
    gauges = OutboxGauges()
    assert [gauges.watch(f"o{at}", Fixed()) for at in range(MAX_OUTBOXES + 1)][-1] == "other"
