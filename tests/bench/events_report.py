"""Part 9 on the terminal, and as a section of docs/benchmarks.md. Takes nothing but what its file holds."""

from __future__ import annotations

from rich.console import Console

from tests.bench.docs import goals_lines
from tests.bench.events_goals import verdicts
from tests.bench.goals import Goal, Measured
from tests.bench.report import goals_table, rates_table, summary
from tests.bench.rounds import Spread
from tests.bench.scale import note_on

TITLE = "\n## Events\n"
UNMEASURED = (
    TITLE
    + """
Not measured yet. `python -m tests.bench --part 9` compares consumers with a bare loop, and webhooks with a route that
only verifies; `--part 9 --quick` takes some minutes. Then `--write-docs` puts the figures here.
"""
)
SECTION = (
    TITLE
    + """
Measured as above, in {rounds} rounds: {messages:,} messages, {documents:,} documents and {deliveries:,} deliveries a
round. The queue, what is written to, and the fence store are a Valkey each; the object store is a local folder. The
machine's load average was {load_before} before the rounds and {load_after} at the end.{scale_note}

### Goals: {summary}

{goals}

### A second

{rates}

### What is compared

- **bare loop**: receives {batch} messages through the same transport, writes each with one HSET, acknowledges them
  together. It remembers nothing, so what is delivered twice is written twice.
- **Consumer**: the same with a handler that does the same HSET, each message under a claim; without an object store,
  and with one; and messages whose keys are known.
- **bare loop, documents**: receives {document_batch}, writes them in one pipeline, acknowledges them.
  **DocumentConsumer** ingests them: content hashes, chunks, two Parquet objects and a seal for each batch.
- **bare route**: a FastAPI route that verifies a Standard Webhook with the library of that specification, and answers.
  **webhooks, inline**: the same delivery through `Webhooks.router()`, claimed and sealed before the answer; and
  delivered again.
"""
)


def show(console: Console, measured: Measured) -> None:
    found = verdicts(measured)
    console.print(goals_table(found, _said))
    console.print(rates_table("a second", measured["rates"]))
    console.print(f"bench, events: {summary(found)}", markup=False, highlight=False)


def section(measured: Measured) -> str:
    machine, scale, found = measured["machine"], measured["scale"], verdicts(measured)
    lines = ["| what | median | lowest to highest |", "|---|---|---|"]
    for name, rates in measured["rates"].items():
        spread = Spread.of(rates)
        lines.append(f"| {name} | {spread.middle:,.0f} | {spread.lowest:,.0f} to {spread.highest:,.0f} |")
    return SECTION.format(
        **scale,
        load_before=machine["load_before"][0],
        load_after=machine["load_after"][0],
        scale_note=note_on(scale["full"]),
        summary=summary(found),
        goals=goals_lines(found, _said),
        rates="\n".join(lines),
    )


def _said(goal: Goal) -> tuple[str, str]:
    return goal.what, goal.beside
