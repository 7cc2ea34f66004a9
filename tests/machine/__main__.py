"""Replays seeds: `python -m tests.machine documents 17`, or explores: `python -m tests.machine operations 0 20000`."""

from __future__ import annotations

import sys
from collections import Counter

from tests.machine.drive import drive_documents, drive_guard, drive_locks, drive_operations
from tests.machine.lineages import MemoryLineages

drives = {"documents": drive_documents, "operations": drive_operations, "guard": drive_guard, "locks": drive_locks}
drive = drives[sys.argv[1]]
first = int(sys.argv[2])
seeds = range(first, int(sys.argv[3])) if len(sys.argv) > 3 else [first]
found: Counter[str] = Counter()
for seed in seeds:
    try:
        drive(MemoryLineages, seed)
    except Exception as broken:
        if len(seeds) == 1:
            raise
        what = f"{type(broken).__name__}: {str(broken).split(': ', 1)[-1][:60]}"
        if what not in found:
            print(seed, what, str(broken)[:300])
        found[what] += 1
print(f"{sum(found.values())} of {len(seeds)} seeds failed", dict(found))
