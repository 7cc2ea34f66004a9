"""A notifier in a process of its own: writes each event to a file, and dies at a point.

python -m tests.notify.notify_worker STORE FILE POINT TIMES
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import ragfence
from ragfence.notify import Announcement, Notifier
from ragfence.testing import at_point


def main(store: str, file: str, point: str, times: str) -> None:
    left = int(times)

    def die() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(announcement: Announcement) -> None:
        with open(file, "a", encoding="utf-8") as out:
            out.write(f"{announcement.event_id} {announcement.type} {announcement.data.get('doc_id')}\n")

    with contextlib.ExitStack() as stack:
        fence = stack.enter_context(ragfence.open(store))
        stack.enter_context(at_point(point, die, times=10_000))
        Notifier(fence, to=write, history=True).run_once()


if __name__ == "__main__":
    main(*sys.argv[1:])
