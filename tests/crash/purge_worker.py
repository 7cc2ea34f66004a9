"""A process that purges, and kills or freezes itself at a call of one of its stores.

python -m tests.crash.purge_worker FOLDER AHEAD_MS [kill|freeze METHOD NTH]

The stores are SQLite and a folder; the fence store's clock is ahead of the machine's by AHEAD_MS. Prints how many
objects were removed, and how often each method was called.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ragfence
from ragfence.stores.local import LocalObjects
from ragfence.stores.sqlite import SqliteFences

SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


class Struck:
    """Passes every call on and counts it; before the `nth` call of the method the signal strikes."""

    def __init__(self, inner: Any, calls: Counter[str], method: str, nth: int, strike: Callable[[], None]) -> None:
        self._inner, self._calls = inner, calls
        self._method, self._nth, self._strike = method, nth, strike

    def __getattr__(self, name: str) -> Any:
        self._calls[name] += 1
        if name == self._method and self._calls[name] == self._nth:
            self._strike()
        return getattr(self._inner, name)


def opened(folder: Path, ahead_ms: int, wrap: Callable[[Any], Any] = lambda store: store) -> ragfence.Fence:
    fences = SqliteFences(folder / "fences.db", clock=lambda: time.time_ns() // 1_000_000 + ahead_ms)
    objects = LocalObjects(folder / "objects")
    return ragfence.open(wrap(fences), objects=wrap(objects), policy=ragfence.Policy(), journal=folder / "journal")


def main(folder: str, ahead_ms: str, action: str = "", method: str = "", nth: str = "0") -> None:
    calls: Counter[str] = Counter()

    def strike() -> None:
        os.kill(os.getpid(), SIGNALS[action])

    with opened(Path(folder), int(ahead_ms), lambda store: Struck(store, calls, method, int(nth), strike)) as fence:
        purged = fence.purge_expired()
    print(json.dumps({"objects": purged.objects, "calls": calls}))


if __name__ == "__main__":
    main(*sys.argv[1:])
