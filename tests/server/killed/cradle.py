"""Forks servers off one process that has imported everything; as `tests.chaos.nursery`, which see.

A server takes two seconds to import what it needs, and some tenths of one after a fork. It runs `ragfence serve` as the
console script does, with a visitor at the points of the protocol: `POINT N` in the file that its job names kills it
the N-th time it comes by that point from now on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from tests.chaos.nursery import Nursery, preload

LOCK_MS = 1000
"""who rebuilds the fence store and is killed is not waited for longer"""
IMPORTED = (
    "anyio._backends._asyncio",
    "ragfence.server.app",
    "ragfence.server.serve",
    "ragfence.cli.app",
    "ragfence.documents.documents",
    "semantic_text_splitter",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
)


class Cradle(Nursery):
    def _play(self, job: Path) -> int:
        return _served(json.loads(job.read_text()))


class Trap:
    """The visitor at the points. The file is looked at every time: it is set and taken away while the server runs."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._set = ""
        self._left = 0

    def __call__(self, point: str) -> None:
        try:
            told = self._file.read_text()
        except FileNotFoundError:
            return
        wanted, _, times = told.partition(" ")
        with self._lock:
            if told != self._set:
                self._set, self._left = told, int(times.split()[0])
            if point == wanted:
                self._left -= 1
                if self._left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)


def _served(job: dict[str, object]) -> int:
    from ragfence.cli import main
    from ragfence.engine import crash_points, hydration

    hydration.LOCK_MS = LOCK_MS
    crash_points.visitor = Trap(Path(str(job["trap"])))
    sys.argv = ["ragfence", *map(str, job["argv"])]  # type: ignore[call-overload]
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


if __name__ == "__main__":
    preload(*IMPORTED)
    Cradle().run()
