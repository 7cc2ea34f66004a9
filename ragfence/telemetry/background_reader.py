"""Numbers of gauges, read in the background, so that a scrape waits for no store, queue or database.

A scrape is answered with the last known numbers. A thread reads them again once they are older than 15 s and than
twenty times the duration of the last read: at most a twentieth of the time is spent reading. Only scrapes before the
first read wait for it, briefly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

INTERVAL_S = 15.0
MAX_SHARE = 20
FIRST_WAIT_S = 2.0
"""how long a scrape waits if no numbers were read yet"""


class MeasuredSource(Protocol):
    """Where numbers are read from, and when to read them next."""

    due_at: float

    @property
    def is_known(self) -> bool:
        """Whether there are numbers, however old."""
        ...


S = TypeVar("S", bound=MeasuredSource)


class BackgroundReader(Generic[S]):
    """Reads the sources that are due, one after another, in one thread at a time."""

    def __init__(
        self, name: str, read: Callable[[S], None], clock: Callable[[], float], interval_s: float = INTERVAL_S
    ) -> None:
        self._name, self._read, self._clock, self._interval_s = name, read, clock, interval_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def refresh(self, sources: Iterable[S]) -> None:
        """Begins to read what is due. Waits only if nothing is known yet of one of the sources that are due."""
        now = self._clock()
        due = [one for one in sources if one.due_at <= now]
        if not due:
            return
        with self._lock:
            # After a fork, the thread of the parent process is not alive in the child.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._read_each, args=(due,), name=self._name, daemon=True)
                self._thread.start()
        if not all(one.is_known for one in due):
            self.join(FIRST_WAIT_S)

    def join(self, timeout_s: float) -> None:
        """Waits until the sources that are being read were read."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _read_each(self, due: list[S]) -> None:
        for one in due:
            started = self._clock()
            try:
                self._read(one)
            finally:
                one.due_at = started + max(self._interval_s, MAX_SHARE * (self._clock() - started))
