"""Which sources are sent again abnormally often: a client in a loop, a queue that is never acknowledged.

Compared with the tenant's own habit. Within a sliding window of five minutes a source is abnormal when it was answered
as a duplicate at least 20 times, and at least ten times as often as the sources of this tenant usually are: the median
of those that had any duplicate, smoothed over the windows before. A tenant who sends everything again every night has
one duplicate per source, however many sources; one who polls has more, and a higher bar. It is told once per source and
window. A source is what has a sequence or is a document; of other operations it is the key.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

WINDOW_S = 300.0
LEAST = 20
TIMES = 10.0
MAX_SOURCES = 10_000
SMOOTHING = 0.3
FEWEST = 10
"""sources with duplicates: fewer say nothing about what is usual"""


class Abnormal(NamedTuple):
    source: bytes
    duplicates: int
    usual: float
    window_s: float


class DuplicateRates:
    """Of one tenant. Two half windows of counts, at most `max_sources` in each, are all it remembers."""

    def __init__(
        self,
        *,
        window_s: float = WINDOW_S,
        least: int = LEAST,
        times: float = TIMES,
        max_sources: int = MAX_SOURCES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._window_s, self._least, self._times, self._max = window_s, least, times, max_sources
        self._clock = clock
        self._lock = threading.Lock()
        self._now: dict[bytes, int] = {}
        self._before: dict[bytes, int] = {}
        self._told: set[bytes] = set()
        self._told_before: set[bytes] = set()
        self._usual = 1.0
        self._full = False
        self._half_ends_at = clock() + window_s / 2

    def saw(self, duplicates: Iterable[bytes]) -> list[Abnormal]:
        """Sources that were answered as duplicates; those among them that are abnormal now."""
        with self._lock:
            self._turn()
            found = []
            bar = max(self._least, self._times * self._usual)
            for source in duplicates:
                count = self._count(source)
                if count >= bar and source not in self._told and source not in self._told_before:
                    self._told.add(source)
                    found.append(Abnormal(source, count, self._usual, self._window_s))
            return found

    def _count(self, source: bytes) -> int:
        here = self._now.get(source, 0) + 1
        if here == 1 and len(self._now) >= self._max and not self._room():
            return 0
        self._now[source] = here
        return here + self._before.get(source, 0)

    def _room(self) -> bool:
        """Forgets those that were seen once: whoever is in a loop was not. If that is no help, newcomers wait."""
        if not self._full:
            self._now = {source: count for source, count in self._now.items() if count > 1}
            self._full = len(self._now) > 0.9 * self._max
        return not self._full

    def _turn(self) -> None:
        now, half_s = self._clock(), self._window_s / 2
        if now < self._half_ends_at:
            return
        # The median, and of several: a source in a loop must not become its own habit.
        if len(self._now) >= FEWEST:
            usual = 2 * statistics.median(self._now.values())  # of a half, so twice for a window
            self._usual = max(1.0, (1 - SMOOTHING) * self._usual + SMOOTHING * usual)
        missed = now >= self._half_ends_at + half_s
        self._before, self._now = ({} if missed else self._now), {}
        self._told_before, self._told = (set() if missed else self._told), set()
        self._full = False
        self._half_ends_at = now + half_s
