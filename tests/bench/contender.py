"""One of the processes that contend for the same operations.

argv     the server's URL, the tenant, the folder of the journal, how many operations, the seed of its order
stdout   "ready", and after a line on stdin has said go and all is done, what it saw, as JSON
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import ragfence

EFFECT_S = 0.001


def main() -> None:
    url, tenant, folder, keys, seed = sys.argv[1:]
    order = list(range(int(keys)))
    random.Random(seed).shuffle(order)  # the same seed for all is lockstep
    executed: list[int] = []
    with ragfence.open(url, tenant=tenant, journal=Path(folder) / "journal") as fence:

        @fence.once(kind="contest", key=lambda request: request["id"])
        def effect(request: dict[str, Any]) -> int:
            executed.append(request["number"])
            time.sleep(EFFECT_S)
            return int(request["number"])

        effect({"id": f"warm-up of {seed}", "number": -1})
        executed.clear()
        print("ready", flush=True)
        sys.stdin.readline()
        started = time.perf_counter()
        receipts = [effect({"id": f"{number:06d}", "number": number}) for number in order]
        seconds = time.perf_counter() - started
    right = sum(receipt.result == number for receipt, number in zip(receipts, order, strict=True))
    waited = sum(receipt.flags.waited_ms > 0 for receipt in receipts)
    print(json.dumps({"executed": executed, "right": right, "waited": waited, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
