"""Metrics of queues: what became of messages, how long they took, and how many wait.

The gauges are read in the background, since to count a queue may take as long as it is.
"""

from __future__ import annotations

import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ragfence._extras import needs_extra
from ragfence.errors import RagfenceError
from ragfence.queues.loop import MessagesSettled
from ragfence.queues.transport import Depth, Transport
from ragfence.telemetry.background_reader import BackgroundReader

with needs_extra("audit", "Observing with metrics"):
    from prometheus_client import CollectorRegistry, Counter, Histogram
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector

_SEAL_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 6 * 3600.0, 86400.0)


@dataclass(eq=False)
class _WatchedQueue:
    """A queue, read through the newest of the transports of its consumers."""

    transports: list[Transport] = field(default_factory=list)
    depth: Depth | None = None
    due_at: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.depth is not None


class QueueMetrics(Collector):
    def __init__(
        self,
        registry: CollectorRegistry,
        queue: Callable[[str], str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`queue` bounds the values of the label."""
        self._queue = queue
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
        self._watched: dict[str, _WatchedQueue] = {}
        self._lock = threading.Lock()
        self._reader = BackgroundReader("ragfence-depths", self._read, clock)
        registry.register(self)

    def add(self, transport: Transport) -> None:
        with self._lock:
            watched = self._watched.setdefault(transport.name, _WatchedQueue())
            watched.transports.append(transport)
            watched.due_at = 0.0

    def remove(self, transport: Transport) -> None:
        with self._lock:
            watched = self._watched.get(transport.name)
            if watched is None:
                return
            watched.transports = [each for each in watched.transports if each is not transport]
            if not watched.transports:
                del self._watched[transport.name]

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
            watched = list(self._watched.values())
        self._reader.refresh(watched)
        with self._lock:  # without those whose last consumer has ended meanwhile
            depths = {name: one.depth for name, one in self._watched.items() if one.depth is not None}
        return iter(self._families(depths))

    def _read(self, watched: _WatchedQueue) -> None:
        with self._lock:
            if not watched.transports:  # removed meanwhile
                return
            transport = watched.transports[-1]
        try:
            watched.depth = transport.depth()
        except RagfenceError:  # the consumer reports it; an old number would be worse than none
            watched.depth = None

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
