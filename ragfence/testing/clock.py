"""A clock that tests move by hand, for every store."""

from __future__ import annotations

from collections.abc import Callable

START_MS = 1_800_000_000_000


class VirtualClock:
    """Milliseconds that pass only when told to.

    >>> clock = VirtualClock()
    >>> store = SqliteFences(path, clock=clock)  # doctest: +SKIP
    >>> clock.advance(30_000)
    """

    def __init__(self, start_ms: int = START_MS, on_change: Callable[[int], None] | None = None) -> None:
        self._now_ms = start_ms
        self._on_change = on_change
        self.advance(0)

    def __call__(self) -> int:
        return self._now_ms

    def advance(self, ms: int) -> None:
        self._now_ms += ms
        if self._on_change:
            self._on_change(self._now_ms)
