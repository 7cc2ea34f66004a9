"""Gauges of outboxes: how many events wait or are dead, and how old the oldest is.

They are read in the background, so a table with many waiting events is not counted all the time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ragfence._extras import needs_extra
from ragfence.telemetry.background_reader import INTERVAL_S, BackgroundReader

with needs_extra("audit", "Observing with metrics"):
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector

MAX_OUTBOXES = 100
_log = logging.getLogger("ragfence.telemetry")


class BacklogStatus(Protocol):
    @property
    def pending(self) -> int: ...
    @property
    def dead(self) -> int: ...
    @property
    def lag_s(self) -> float: ...


class WatchedOutbox(Protocol):
    """What the gauges need of an outbox."""

    def status(self) -> BacklogStatus: ...


@dataclass(eq=False)
class _Watched:
    outbox: WatchedOutbox
    status: BacklogStatus | None = None
    due_at: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.status is not None


class OutboxGauges(Collector):
    def __init__(self, *, clock: Callable[[], float] = time.monotonic, interval_s: float = INTERVAL_S) -> None:
        self._watched: dict[str, _Watched] = {}
        self._lock = threading.Lock()
        self._reader = BackgroundReader("ragfence-outbox", _read, clock, interval_s)

    def watch(self, name: str, outbox: WatchedOutbox) -> str:
        """Adds an outbox, or replaces that of the name. Returns its label: beyond `MAX_OUTBOXES`, `other`."""
        with self._lock:
            if name not in self._watched and len(self._watched) >= MAX_OUTBOXES:
                return "other"
            self._watched[name] = _Watched(outbox)
        return name

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return iter(_families({}))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        with self._lock:
            watched = dict(self._watched)
        self._reader.refresh(watched.values())
        return iter(_families({name: one.status for name, one in watched.items() if one.status is not None}))


def _read(watched: _Watched) -> None:
    try:
        watched.status = watched.outbox.status()
    except Exception as error:  # noqa: BLE001  # the next one may be readable
        _log.warning("an outbox cannot be read: %s", type(error).__name__)


def _families(known: dict[str, BacklogStatus]) -> list[GaugeMetricFamily]:
    pending = GaugeMetricFamily("ragfence_outbox_pending", "Events that were not sent yet", labels=("outbox",))
    dead = GaugeMetricFamily("ragfence_outbox_dead", "Events that were given up", labels=("outbox",))
    lag = GaugeMetricFamily("ragfence_outbox_lag_seconds", "Age of the oldest event not sent", labels=("outbox",))
    for name, status in sorted(known.items()):
        pending.add_metric((name,), status.pending)
        dead.add_metric((name,), status.dead)
        lag.add_metric((name,), status.lag_s)
    return [pending, dead, lag]
