"""The table of a run: on the terminal, and in docs/acceptance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.acceptance.promise import Promise, Verdict
from tests.chaos.crew import ROOT

PAGE = ROOT / "docs" / "acceptance.md"
BEGIN = "<!-- results: written by `python -m tests.acceptance --write-docs` -->"
END = "<!-- end of results -->"
COLUMNS = ("what", "workload", "wanted", "measured", "verdict")
STYLES = {Verdict.KEPT: "green", Verdict.BROKEN: "bold red", Verdict.MISSED: "yellow", Verdict.SHOWN: "dim"}


def say(console: Console, promise: Promise) -> None:
    words = f"{promise.what}: {promise.measured}  [{promise.verdict}]"
    console.print(words, style=STYLES[promise.verdict], markup=False, highlight=False)


def print_table(console: Console, found: Sequence[Promise]) -> None:
    table = Table(title="what events promise", title_justify="left")
    for name in COLUMNS:
        table.add_column(name)
    for promise in found:
        verdict = Text(promise.verdict, style=STYLES[promise.verdict])
        table.add_row(promise.what, promise.workload, promise.wanted, promise.measured, verdict)
    console.print(table)


def write_docs(measured: Mapping[str, Any]) -> int:
    """Replaces what stands between the two marks, and nothing else."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has no place for the results, between {BEGIN} and {END}")
    PAGE.write_text("\n".join((before + begin, "", *_lines(measured), "", end + after)))
    return 0


def _lines(measured: Mapping[str, Any]) -> list[str]:
    kind = "A full run" if measured["full"] else "**Not a full run**"
    head = (
        f"{kind}: {measured['scale']['events']:,} events, seed {measured['seed']}, "
        f"{measured['seconds'] / 60:.0f} minutes on {measured['cores']} cores, "
        f"load average {measured['load_before']} before."
    )
    rows = [
        [each["what"], each["workload"], each["wanted"], each["measured"], _emphasis(each["verdict"])]
        for each in measured["promises"]
    ]
    return [head, "", *("| " + " | ".join(row) + " |" for row in (list(COLUMNS), ["---"] * len(COLUMNS), *rows))]


def _emphasis(verdict: str) -> str:
    return f"**{verdict}**" if verdict in (Verdict.BROKEN, Verdict.MISSED) else verdict
