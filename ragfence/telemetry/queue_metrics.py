"""Metrics of queues: what became of messages, how long they took, and how many wait.

The gauges are read from the queues when Prometheus scrapes, in a background thread and at most every 15 seconds, since
to count a queue may take as long as it is. Only the first scrape waits for them, briefly.
"""

from __future__ import annotations

import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator

from ragfence._extras import needs_extra
from ragfence.errors import RagfenceError
from ragfence.queues.loop import MessagesSettled
from ragfence.queues.transport import Depth, Transport

with needs_extra("audit", "Observing with metrics"):
    from prometheus_client import CollectorRegistry, Counter, Histogram
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector

INTERVAL_S = 15.0
FIRST_WAIT_S = 2.0
_SEAL_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 6 * 3600.0, 86400.0)


class QueueMetrics(Collector):
    def __init__(
        self,
        registry: CollectorRegistry,
        queue: Callable[[str], str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`queue` bounds the values of the label."""
        self._queue, self._clock = queue, clock
        self._messages = Counter(
            "ragfence_queue_messages",
            "Deliveries of messages, by what became of them",
            ("queue", "result"),
            registry=registry,
        )
        self._seal = Histogram(
            "ragfence_queue_seal_seconds",
            "Time from the first claim of a message's key to its seal",
            ("queue",),
            buckets=_SEAL_S,
            registry=registry,
        )
        self._latency = Histogram(
            "ragfence_queue_latency_seconds",
            "Time from the sending of a message to its seal",
            ("queue",),
            buckets=_SEAL_S,
            registry=registry,
        )
        self._transports: dict[str, list[Transport]] = {}
        self._depths: dict[str, Depth] = {}
        self._due_at = 0.0
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        registry.register(self)

    def add(self, transport: Transport) -> None:
        with self._lock:
            self._transports.setdefault(transport.name, []).append(transport)
            self._due_at = 0.0

    def remove(self, transport: Transport) -> None:
        with self._lock:
            left = [each for each in self._transports.get(transport.name, ()) if each is not transport]
            if left:
                self._transports[transport.name] = left
            else:
                self._transports.pop(transport.name, None)
                self._depths.pop(transport.name, None)

    def count(self, event: MessagesSettled) -> None:
        queue = self._queue(event.queue)
        for result, number in Tally(each.result for each in event.settled).items():
            self._messages.labels(queue, result).inc(number)
        seal, latency = self._seal.labels(queue), self._latency.labels(queue)
        for message, result, receipt, _ in event.settled:
            if result != "new" or receipt is None or receipt.sealed_at_ms is None:
                continue
            if receipt.first_seen_ms is not None:
                seal.observe(max(receipt.sealed_at_ms - receipt.first_seen_ms, 0) / 1000)
            if message.sent_ms is not None:
                latency.observe(max(receipt.sealed_at_ms - message.sent_ms, 0) / 1000)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return iter(self._families({}))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        with self._lock:
            if self._clock() >= self._due_at and (self._reader is None or not self._reader.is_alive()):
                self._due_at = self._clock() + INTERVAL_S
                due = {name: transports[-1] for name, transports in self._transports.items()}
                self._reader = threading.Thread(target=self._read, args=(due,), name="ragfence-depths", daemon=True)
                self._reader.start()
            reader, unknown = self._reader, set(self._transports) - set(self._depths)
        if reader is not None and unknown:
            reader.join(FIRST_WAIT_S)
        with self._lock:
            depths = dict(self._depths)
        return iter(self._families(depths))

    def _read(self, transports: dict[str, Transport]) -> None:
        for name, transport in transports.items():
            try:
                depth = transport.depth()
            except RagfenceError:  # the consumer reports it; an old number would be worse than none
                with self._lock:
                    self._depths.pop(name, None)
            else:
                with self._lock:
                    if name in self._transports:
                        self._depths[name] = depth

    def _families(self, depths: dict[str, Depth]) -> list[GaugeMetricFamily]:
        depth = GaugeMetricFamily("ragfence_queue_depth", "Messages in the queue", labels=("queue", "state"))
        age = GaugeMetricFamily(
            "ragfence_queue_age_of_oldest_seconds", "Age of the oldest message of the queue", labels=("queue",)
        )
        for name, found in depths.items():
            queue = self._queue(name)
            for state in ("visible", "in_flight", "dead"):
                depth.add_metric((queue, state), getattr(found, state))
            age.add_metric((queue,), found.oldest_age_s or 0.0)
        return [depth, age]
