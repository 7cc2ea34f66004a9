"""A process that drains, and kills itself at a point of it, or before a call to one of its stores.

python -m tests.audit.drainer STORE FOLDER AHEAD_MS POINT NTH

STORE is `sqlite` (under FOLDER) or the URL of a server; objects are under FOLDER. The clock of SQLite is ahead of the
machine's by AHEAD_MS. POINT is one of DRAIN_POINTS or the name of a method. Prints what was done, if it lives.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ragfence.audit.audit import Audit
from ragfence.core.policy import Policy
from ragfence.engine import crash_points
from ragfence.stores.fences import FenceStore
from ragfence.stores.local import LocalObjects

RULES = {"drain_batch_rows": 25, "min_files": 2}


def fences_at(store: str, folder: Path, ahead_ms: int) -> FenceStore:
    if store == "sqlite":
        from ragfence.stores.sqlite import SqliteFences

        return SqliteFences(folder / "fences.db", clock=lambda: time.time_ns() // 1_000_000 + ahead_ms)
    from ragfence.stores.redis.store import RedisFences

    return RedisFences(store, folder.name)


def audit_of(fences: Any, objects: Any) -> Audit:
    return Audit(fences, objects, Policy(audit=RULES))


class Struck:
    def __init__(self, inner: Any, reached: Any) -> None:
        self._inner, self._reached = inner, reached

    def __getattr__(self, name: str) -> Any:
        self._reached(name)
        return getattr(self._inner, name)


def main(store: str, folder: str, ahead_ms: str, point: str, nth: str) -> None:
    reached: Counter[str] = Counter()

    def visit(name: str) -> None:
        reached[name] += 1
        if name == point and reached[name] == int(nth):
            os.kill(os.getpid(), signal.SIGKILL)

    crash_points.visitor = visit
    fences = fences_at(store, Path(folder), int(ahead_ms))
    done = audit_of(Struck(fences, visit), Struck(LocalObjects(Path(folder) / "objects"), visit)).drain()
    print(json.dumps({"done": asdict(done), "reached": reached}))


if __name__ == "__main__":
    main(*sys.argv[1:])
