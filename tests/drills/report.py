"""The table of a run: on the terminal, as JSON, and in docs/drills.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.chaos.report import evidence_json
from tests.drills.drills import Result

COLUMNS = ("drill", "variant", "faults", "operations", "answered", "meanwhile", "double", "lost", "stuck", "redone")
LONGEST = "longest outage seen by a caller"
BEGIN, END = "<!-- results: written by `python -m tests.drills --write-docs` -->", "<!-- end of results -->"


def verdict(result: Result) -> str:
    found = result.outcome.evidence
    if not result.ok:
        return f"{len(found.problems)} violations"
    if journaled := sum(found.journal.values()):
        settled = ", ".join(f"{found.journal[name]} {name}" for name in ("sealed", "doubled", "left"))
        return f"ok: {journaled} journaled, {settled}"
    return "ok" if result.drill.judged else "counted"


def print_table(console: Console, results: Sequence[Result]) -> None:
    table = Table(title="what callers saw while servers were lost", title_justify="left")
    for name in (*COLUMNS, f"{LONGEST}, s", "verdict"):
        table.add_column(name, justify="left" if name in ("drill", "variant", "verdict") else "right")
    before = ""
    for result in results:
        if before and result.drill.title != before:
            table.add_section()
        before = result.drill.title
        style = "bold red" if not result.ok else "green" if result.drill.judged else "yellow"
        table.add_row(*_cells(result), Text(verdict(result), style=style))
    console.print(table)


def print_problems(console: Console, result: Result, *, seed: int, short: bool) -> None:
    console.print(Text(f"\nVIOLATION  {result.drill.name}", style="bold red"))
    problems = result.outcome.evidence.problems
    for problem in problems[:10]:
        console.print(Text(f"  {problem}"))
    if len(problems) > 10:
        console.print(f"  ... and {len(problems) - 10} more")
    form = " --short" if short else ""
    console.print(f'  replay: .venv/bin/python -m tests.drills{form} --seed {seed} --only "{result.drill.name}"')


def write_json(path: Path, results: Sequence[Result], *, seed: int, short: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [_json(result) for result in results]
    path.write_text(json.dumps({"seed": seed, "short": short, "drills": rows}, indent=1))


def write_docs(page: Path, results: Sequence[Result], *, seed: int) -> None:
    """Replaces what stands between the two marks, and nothing else."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place for the results, between {BEGIN} and {END}")
    seconds = sum(result.outcome.seconds for result in results)
    lines = [
        f"Seed {seed}, {len(results)} drills, {seconds / 60:.0f} minutes of load and faults.",
        "",
        *_markdown(results),
    ]
    page.write_text("\n".join((before + begin, "", *lines, "", end + after)))


def _markdown(results: Sequence[Result]) -> list[str]:
    head = (*COLUMNS, LONGEST, "verdict")
    rule = ["---" if name in ("drill", "variant", "verdict") else "--:" for name in head]
    rows = [[*_cells(result)[:-1], f"{result.longest_wait_s:.1f} s", verdict(result)] for result in results]
    return ["| " + " | ".join(row) + " |" for row in (head, rule, *rows)]


def _cells(result: Result) -> list[str]:
    found = result.outcome.evidence
    counts = (
        result.faults,
        found.tasks,
        result.answered,
        result.answered_meanwhile,
        found.double,
        found.lost,
        found.pending,
        found.redone,
    )
    return [
        result.drill.title,
        result.drill.variant,
        *(f"{count:,}" for count in counts),
        f"{result.longest_wait_s:.1f}",
    ]


def _json(result: Result) -> dict[str, Any]:
    found = result.outcome.evidence
    return {
        "drill": result.drill.title,
        "variant": result.drill.variant,
        "backend": result.drill.backend,
        "judged": result.drill.judged,
        "ok": result.ok,
        "seconds": round(result.outcome.seconds, 2),
        "faults": result.faults,
        "operations": found.tasks,
        "answered": result.answered,
        "answered_meanwhile": result.answered_meanwhile,
        "stuck": found.pending,
        "longest_outage_s": round(result.longest_wait_s, 3),
        "outages": [asdict(outage) for outage in result.outcome.outages],
        **evidence_json(found),
    }
