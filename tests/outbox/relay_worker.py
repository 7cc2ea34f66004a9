"""A relay in a process of its own: writes each event to a file, and dies where it is told to.

python -m tests.outbox.relay_worker DATABASE FILE [after_publish | freeze]
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from ragfence.outbox import Outbox, Relay
from ragfence.outbox.outbox import OutboxRow


def main(database: str, file: str, point: str = "") -> None:
    relay: Any = Relay(Outbox(database, create=False), to=lambda row: write(file, row), batch=5)
    publish = relay._publish

    def killed(rows: Any) -> Any:
        outcome = publish(rows)
        os.kill(os.getpid(), signal.SIGKILL if point == "after_publish" else signal.SIGSTOP)
        return outcome

    if point:
        relay._publish = killed
    print(relay.run_once(), flush=True)


def write(file: str, row: OutboxRow) -> None:
    with open(file, "a", encoding="utf-8") as out:
        out.write(f"{row.key} {row.payload['number']} {row.event_id}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
