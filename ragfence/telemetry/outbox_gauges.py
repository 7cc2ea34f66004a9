"""Gauges of outboxes: how many events wait or are dead, and how old the oldest is.

A scrape is answered with the last known numbers. A background thread reads them again once they are older than 15 s and
than twenty times the duration of the last read, so a table with many waiting events is not counted all the time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ragfence._extras import needs_extra
from ragfence.telemetry.gauges import FIRST_WAIT_S, INTERVAL_S, MAX_SHARE

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


class OutboxGauges(Collector):
    def __init__(self, *, clock: Callable[[], float] = time.monotonic, interval_s: float = INTERVAL_S) -> None:
        self._clock, self._interval_s = clock, interval_s
        self._watched: dict[str, _Watched] = {}
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None

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
        now = self._clock()
        with self._lock:
            due = [one for one in self._watched.values() if one.due_at <= now]
            if due and (self._reader is None or not self._reader.is_alive()):
                self._reader = threading.Thread(target=self._read, args=(due,), name="ragfence-outbox", daemon=True)
                self._reader.start()
            reader, unknown = self._reader, any(one.status is None for one in due)
        if reader is not None and unknown:
            reader.join(FIRST_WAIT_S)
        with self._lock:
            known = {name: one.status for name, one in self._watched.items() if one.status is not None}
        return iter(_families(known))

    def _read(self, due: list[_Watched]) -> None:
        for one in due:
            started = self._clock()
            try:
                one.status = one.outbox.status()
            except Exception as error:  # noqa: BLE001  # the next one may be readable
                _log.warning("an outbox cannot be read: %s", type(error).__name__)
            one.due_at = started + max(self._interval_s, MAX_SHARE * (self._clock() - started))


def _families(known: dict[str, BacklogStatus]) -> list[GaugeMetricFamily]:
    pending = GaugeMetricFamily("ragfence_outbox_pending", "Events that were not sent yet", labels=("outbox",))
    dead = GaugeMetricFamily("ragfence_outbox_dead", "Events that were given up", labels=("outbox",))
    lag = GaugeMetricFamily("ragfence_outbox_lag_seconds", "Age of the oldest event not sent", labels=("outbox",))
    for name, status in sorted(known.items()):
        pending.add_metric((name,), status.pending)
        dead.add_metric((name,), status.dead)
        lag.add_metric((name,), status.lag_s)
    return [pending, dead, lag]
