"""The table of a run, and the same as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.chaos.evidence import Evidence
from tests.chaos.scenarios import Outcome


def print_table(console: Console, outcomes: Sequence[Outcome]) -> None:
    table = Table(title="one effect per key, whatever happens to whom", title_justify="left")
    table.add_column("attack")
    table.add_column("backend")
    for name in ("keys", "executions", "commits", "distinct receipts", "still pending"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    table.add_column("s", justify="right")
    before = ""
    for outcome in outcomes:
        found = outcome.evidence
        group = re.split(" after| in_| before| mid", outcome.scenario.title)[0]
        if before and group != before:
            table.add_section()
        before = group
        counts = (found.expected, found.executions, found.commits, found.receipts, found.pending)
        table.add_row(
            outcome.scenario.title,
            outcome.scenario.backend,
            *map(str, counts),
            Text(verdict(outcome), style="green" if outcome.ok else "bold red"),
            f"{outcome.seconds:.1f}",
        )
    console.print(table)


def verdict(outcome: Outcome) -> str:
    found = outcome.evidence
    if not outcome.ok:
        return f"{len(found.problems)} violations"
    notes = [f"{found.lost} lost by Redis alone"] if found.lost else []
    notes += [f"{found.stale} superseded"] if found.stale else []
    return "ok" + (f" ({', '.join(notes)})" if notes else "")


def print_problems(console: Console, outcome: Outcome, seed: int) -> None:
    console.print(Text(f"\nVIOLATION  {outcome.scenario.name}", style="bold red"))
    for problem in outcome.evidence.problems[:10]:
        console.print(Text(f"  {problem}"))
    if len(outcome.evidence.problems) > 10:
        console.print(f"  ... and {len(outcome.evidence.problems) - 10} more")
    console.print(f'  replay: .venv/bin/python -m tests.chaos --seed {seed} --only "{outcome.scenario.name}"')


def evidence_json(found: Evidence) -> dict[str, Any]:
    return {item.name: getattr(found, item.name) for item in fields(found) if item.name != "spans"}


def write_json(path: Path, outcomes: Sequence[Outcome], seed: int) -> None:
    rows = [
        {
            "attack": outcome.scenario.title,
            "backend": outcome.scenario.backend,
            "ok": outcome.ok,
            "seconds": round(outcome.seconds, 2),
            "keys": outcome.evidence.expected,
            **evidence_json(outcome.evidence),
        }
        for outcome in outcomes
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"seed": seed, "scenarios": rows}, indent=1))
