"""`python -m pipelines.tickets`: any effect, once per key. Embedded, without a server.

Four processes get the same 60 tickets at the same time. One of them is killed in the middle of an effect. Every
execution is counted in a file that ragfence does not use.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

import ragfence

TICKETS = 60
PROCESSES = 4
LEASE_S = 2.0
ANSWERS = ("seal", "replay", "conflict", "in_flight", "stale")
"""The phases of rows that answer a caller. A claim and its seal are two rows."""

console = Console(width=100, soft_wrap=True)


def open_fence(folder: Path) -> ragfence.Fence:
    policy = ragfence.Policy.from_mapping({"lease": {"ttl_s": LEASE_S}, "on_conflict": {"include_diff": True}})
    return ragfence.open(folder / "state", policy=policy, journal=folder / "journal")


def fenced_ticket_system(fence: ragfence.Fence, counted: Path) -> Any:
    @fence.once(kind="ticket", key=lambda request: (request["id"], request["version"]))
    def create_ticket(request: dict[str, Any]) -> dict[str, Any]:
        with counted.open("a") as file:  # the evidence: one line per execution
            file.write(f"{request['id']}\n")
        time.sleep(0.005)
        return {"ticket": f"T-{request['id']}-{os.getpid()}"}

    return create_ticket


def requests() -> Iterator[dict[str, Any]]:
    for number in range(TICKETS):
        yield {"id": f"{number:03d}", "version": "1", "subject": f"Printer {number} is on fire"}


def worker(folder: Path, die_at: int) -> None:
    """The work of one process. With `die_at` it is killed in the middle of that effect."""
    with open_fence(folder) as fence:
        create_ticket = fenced_ticket_system(fence, folder / "executions")
        for number, request in enumerate(requests()):
            if number == die_at:
                from ragfence.testing.crash_points import kill_at

                with kill_at("after_effect"):
                    receipt = create_ticket({**request, "id": "victim"})
            receipt = create_ticket(request)
            print(json.dumps([receipt.key, receipt.effect_id, receipt.result, receipt.decision]), flush=True)


def race(folder: Path, *, die_at: int = -1) -> list[Any]:
    command = [sys.executable, "-m", "pipelines.tickets", "--worker", str(folder)]
    processes = [
        subprocess.Popen([*command, str(die_at if number == 0 else -1)], stdout=subprocess.PIPE, text=True)
        for number in range(PROCESSES)
    ]
    answers = []
    with Progress(TextColumn("  {task.description}"), BarColumn(), "{task.completed}", console=console) as progress:
        bars = [progress.add_task(f"process {process.pid}", total=TICKETS) for process in processes]
        for process, bar in zip(processes, bars, strict=True):
            assert process.stdout is not None
            for line in process.stdout:
                answers.append(json.loads(line))
                progress.advance(bar)
            if process.wait() == -signal.SIGKILL:
                progress.update(bar, description=f"process {process.pid} [red]killed[/red]")
    return answers


def show(title: str, answers: list[Any], executed: int) -> None:
    decisions = Counter(answer[3] for answer in answers)
    receipts = {answer[0]: {json.dumps(other[1:3]) for other in answers if other[0] == answer[0]} for answer in answers}
    table = Table(title=title, title_justify="left")
    for column in ("answers", "new", "duplicate", "executions", "keys", "receipts per key"):
        table.add_column(column, justify="right")
    table.add_row(
        str(len(answers)),
        str(decisions["new"]),
        str(decisions["duplicate"]),
        str(executed),
        str(len(receipts)),
        str(max(len(several) for several in receipts.values())),
    )
    console.print(table)


def executions(folder: Path) -> int:
    return len((folder / "executions").read_text().splitlines())


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="ragfence-tickets-"))
    try:
        run(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(folder: Path) -> None:
    console.print(Panel("One effect per key: SQLite and a folder, no server", expand=False))
    console.print(f"\n1. {PROCESSES} processes, the same {TICKETS} tickets, all at once")
    show("every process got the receipt of the first one", race(folder), executions(folder))

    console.print("\n2. The same again, as a retry or a backfill would")
    before = executions(folder)
    show("nothing was executed", race(folder), executions(folder) - before)

    console.print("\n3. A process is killed after its effect and before its seal; the others continue")
    before = executions(folder)
    race(folder, die_at=TICKETS // 2)
    with open_fence(folder) as fence:
        create_ticket = fenced_ticket_system(fence, folder / "executions")
        victim = {**next(requests()), "id": "victim", "subject": f"Printer {TICKETS // 2} is on fire"}
        receipt = create_ticket(victim)
        flags = receipt.flags
        console.print(
            f"   the ticket it left behind: decision [b]{receipt.decision}[/b], attempt {flags.attempt}, "
            f"takeover {flags.takeover}: the next caller executed it when the lease had expired"
        )

        console.print("\n4. The same key with another payload is refused")
        try:
            create_ticket({**victim, "subject": "Printer is fine"})
        except ragfence.errors.Conflict as conflict:
            console.print(f"   [red]{conflict.code}[/red] {conflict.diff}")

        console.print("\n5. Every decision is a row, and the auditor checks all rows")
        table = Table("kind", "decision", "answers", "attempts", "waited")
        for line in summary(fence):
            table.add_row(*line)
        console.print(table)
        console.print(f"   {fence.audit.check()}")
    console.print(
        "\nNow try:\n"
        "  make test                        tests of every promise on SQLite, Redis and S3\n"
        "  make chaos SEED=1                real processes killed, frozen and cut off, at every step\n"
        "  less docs/guarantees.md          what is promised, what is not, and how it is tested"
    )


def summary(fence: ragfence.Fence) -> Iterator[tuple[str, ...]]:
    rows = [row for row in fence.audit.decisions(since="24h").to_pylist() if row["phase"] in ANSWERS]
    for (kind, decision), count in sorted(Counter((row["kind"], row["decision"]) for row in rows).items()):
        same = [row for row in rows if (row["kind"], row["decision"]) == (kind, decision)]
        waited = sum(row["waited_ms"] for row in same)
        yield kind, decision, str(count), str(max(row["attempt"] for row in same)), f"{waited} ms"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
