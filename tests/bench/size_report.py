"""Part 8 on the terminal, and as a section of docs/benchmarks.md. Takes nothing but what its file holds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from tests.bench.docs import goals_lines
from tests.bench.goals import Goal, Measured
from tests.bench.report import goals_table, summary
from tests.bench.scale import note_on
from tests.bench.size_asked import CPU, EMPTY, LARGE, QUESTIONS, SECONDS, STORES, named
from tests.bench.size_goals import verdicts

TITLE = "\n## What grows with the store\n"
UNMEASURED = (
    TITLE
    + """
Not measured yet. `python -m tests.bench --part 8` makes two stores of 1,000,000 documents (`--documents` says how many)
and an index of 500,000 rows, `--part 8 --quick` smaller ones; then `--write-docs` puts the figures here.
"""
)
SECTION = (
    TITLE
    + """
Measured as above, in {rounds} rounds: stores with {documents:,} documents and empty ones, on SQLite and on Valkey, each
with a **{objects}** as object store, the audit on and nothing drained. The machine's load average was {load_before}
before the rounds and {load_after} at the end.{scale_note}

### Goals: {summary}

{goals}

### Milliseconds

Medians of the rounds.

{asked}

### Search in {rows:,} rows

{search}

### What is compared

- **ragfence status**: the command with `--json`, a process from its start to its end.
- **fence.stats()**: in a process that has the store open, the mean of {calls} calls.
- **/v1/stats, /metrics**: the first request of its kind in a new server, and the mean of {calls} later ones. The first
  scrape waits for the figures; later ones are answered with what is known, and ask anew after 15 s at the earliest.
- **of a core**: what the process that was asked took, and Valkey; in steps of 10 ms.
- **search**: LanceDB in a folder, 64 numbers a row in clusters of fifty, the 10 nearest, one query after the other;
  exact, and with the index that a build above `indexes.ann_above` gets. The recall is that which a build seals.
"""
)
_COLUMNS = ("empty", "large", "empty, of a core", "large, of a core")


def show(console: Console, measured: Measured) -> None:
    found, scale = verdicts(measured), measured["scale"]
    console.print(goals_table(found, _said))
    table = Table(title=f"ms, an empty store and {scale['documents']:,} documents", title_justify="left")
    table.add_column("asked")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for what, cells in _asked(measured):
        table.add_row(what, *cells)
    console.print(table)
    console.print(_search(measured), markup=False, highlight=False)
    console.print(f"bench, size: {summary(found)}", markup=False, highlight=False)


def section(measured: Measured) -> str:
    machine, scale, found = measured["machine"], measured["scale"], verdicts(measured)
    lines = [f"| asked | {' | '.join(_COLUMNS)} |", "|---" * (1 + len(_COLUMNS)) + "|"]
    lines += [f"| {what} | {' | '.join(cells)} |" for what, cells in _asked(measured)]
    return SECTION.format(
        **scale,
        objects=measured["objects"],
        load_before=machine["load_before"][0],
        load_after=machine["load_after"][0],
        scale_note=note_on(scale["full"]),
        summary=summary(found),
        goals=goals_lines(found, _said),
        asked="\n".join(lines),
        search=_search(measured),
    )


def _asked(measured: Measured) -> Iterator[tuple[str, list[str]]]:
    for store in STORES:
        for question in QUESTIONS:
            told = [measured["asked"][named(question, store, size)] for size in (EMPTY, LARGE)]
            yield (
                f"{question}, {store}",
                [f"{1000 * statistics.median(each[how]):,.1f}" for how in (SECONDS, CPU) for each in told],
            )


def _search(measured: Measured) -> str:
    search = measured["search"]
    return (
        f"LanceDB {search['lancedb']}, {search['rows']:,} rows: exact {search['exact_p50_ms']:.2f} ms at the median "
        f"and {search['exact_ms']:.2f} ms of a core a query; {search['index']} {search['ann_p50_ms']:.2f} ms and "
        f"{search['ann_ms']:.2f} ms, {search['times']:.1f} times less of a core, with a recall of "
        f"{search['recall']:.3f}; its index took {search['index_cpu_s']:,.1f} s of a core more to make."
    )


def _said(goal: Goal) -> tuple[str, str]:
    return goal.what, goal.beside
