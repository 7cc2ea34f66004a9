"""Part 6 on the terminal, and as a section of docs/benchmarks.md. Takes nothing but what its file holds."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tests.bench.audit_cost import CLAIMS, DOCUMENTS
from tests.bench.audit_goals import MEGABYTES, SECONDS, verdicts
from tests.bench.audit_queries import TIMES
from tests.bench.docs import goals_lines
from tests.bench.goals import Goal, Measured
from tests.bench.report import goals_table, rates_table, summary
from tests.bench.scale import note_on

SECTION = """
## Audit

A ledger of {rows:,} rows over {days} days ({objects:,} Parquet objects in a **local folder**, {megabytes:,.0f} MiB),
read by `fence.audit`; every query has a process of its own, pyarrow loaded before the clock starts, and runs
{times} times, of which the fastest counts. Also the rate of calls that are answered from known records, on Redis, with
decision rows and without: there is no switch, so "without" is a double of the store in this benchmark.
{rounds} rounds, {batch} documents or keys a call. The machine's load average was {load_before} before and {load_after}
after.{quick}

### Goals: {summary}

{goals}

### Other figures

{notes}
"""


def show(console: Console, measured: Measured) -> None:
    found = verdicts(measured)
    console.print(goals_table(found, _said))
    table = Table("asked", "seconds", "peak MB", "found", title="questions to the ledger")
    for query, told in measured["queries"]["asked"].items():
        table.add_row(query, f"{told[SECONDS]:.2f}", f"{told[MEGABYTES]:,.0f}", f"{told['found']:,}")
    console.print(table)
    console.print(rates_table("known things told again, per second", measured["rates"]))
    console.print(f"bench, audit: {summary(found)}", markup=False, highlight=False)


def section(measured: Measured) -> str:
    found, scale, filled = verdicts(measured), measured["scale"], measured["queries"]["filled"]
    return SECTION.format(
        rows=scale["rows"],
        days=scale["days"],
        rounds=scale["rounds"],
        batch=scale["batch"],
        objects=filled["objects"],
        megabytes=filled["megabytes"],
        times=TIMES,
        load_before=measured["machine"]["load_before"][0],
        load_after=measured["machine"]["load_after"][0],
        quick=note_on(scale["full"]),
        summary=summary(found),
        goals=goals_lines(found, _said),
        notes="\n".join(f"- {line}" for line in _notes(measured)),
    )


def _notes(measured: Measured) -> list[str]:
    asked = measured["queries"]["asked"]
    judged = {verdict.goal.what for verdict in verdicts(measured)}
    others = {query: told for query, told in asked.items() if query not in judged}
    return [
        "Processor time of the queries: "
        + ", ".join(f"{query} {told['cpu_seconds']:.2f} s" for query, told in asked.items())
        + ".",
        *(
            f"{query}: {told[SECONDS]:.2f} s and {told[MEGABYTES]:,.0f} MB for {told['found']:,}."
            for query, told in others.items()
        ),
        f"{DOCUMENTS}: hashing, looking up and making receipts are on the clock in both; the difference is the context "
        "of each row, the row, and the trip that writes all rows of a call.",
        f"{CLAIMS}: without rows one MGET is all there is; with them a second trip writes them.",
    ]


def _said(goal: Goal) -> tuple[str, str]:
    return goal.what, goal.beside
