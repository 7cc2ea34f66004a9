"""A process that has nothing to do with the server, and takes a share of one core until it is told to stop.

stdin   {"share": 0.8, "most_s": 60}
stdout  {"underway": true}
stdin   {"stop": true}
stdout  {"cpu_s": 8.0}
"""

from __future__ import annotations

import json
import select
import sys
import time

STEP_S = 0.002


def burn(share: float, most_s: float) -> float:
    """Seconds of a core. What it did not get in time it takes later, as work that waits does."""
    started, cpu = time.perf_counter(), time.process_time()
    used = 0.0
    while not select.select([sys.stdin], [], [], 0)[0] and (gone := time.perf_counter() - started) < most_s:
        if used < share * gone:
            until = time.perf_counter() + STEP_S
            while time.perf_counter() < until:
                pass
        else:
            time.sleep(STEP_S)
        used = time.process_time() - cpu
    return used


def main() -> None:
    print(json.dumps({"step_s": STEP_S}), flush=True)
    while line := sys.stdin.readline():
        asked = json.loads(line)
        print(json.dumps({"underway": True}), flush=True)
        used = burn(asked["share"], asked["most_s"])
        sys.stdin.readline()
        print(json.dumps({"cpu_s": used}), flush=True)


if __name__ == "__main__":
    main()
