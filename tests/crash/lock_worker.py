"""A process that takes a lock, says so, and obeys: `check` it, `leave` the block. Its parent may kill or stop it."""

from __future__ import annotations

import sys

import ragfence
from ragfence.errors import LeaseLost


def main(url: str, name: str, ttl_s: float) -> None:
    with ragfence.open(url) as fence:
        try:
            with fence.lock(name, ttl_s=ttl_s) as lease:
                print(f"{lease.fence.epoch} {lease.fence.counter}", flush=True)
                for line in sys.stdin:
                    if line.strip() == "leave":
                        break
                    try:
                        lease.check()
                        print("held", flush=True)
                    except LeaseLost:
                        print("lost", flush=True)
        except LeaseLost:
            print("left without the lock", flush=True)
        else:
            print("left", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
