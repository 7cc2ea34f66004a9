"""A measured run of part 3, on the terminal and as a section of `docs/benchmarks.md`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from rich.console import Console

from tests.bench.docs import goals_lines
from tests.bench.goals import Measured
from tests.bench.indexes_changed import CHANGED, WHOLE
from tests.bench.indexes_goals import figures, said_of, verdicts
from tests.bench.indexes_known import FRESH, REQUESTS, TRIPS, WARM
from tests.bench.indexes_rates import BUILD, DIMENSION, LANCE, QDRANT, STRAIGHT, WITH_VERIFYING, WRITING, named
from tests.bench.report import goals_table, rates_table, summary
from tests.bench.scale import note_on

SECTION = """
## Indexes

Measured as above, in {rounds} rounds, on Redis with a **{objects}** as object store, the audit on; {versions}.
The machine's load average was {load_before} before the rounds and {load_after} at the end.{scale_note}

### Goals: {summary}

{goals}

### Rows per second

Medians of the rounds, to be read as ratios: {rows:,} rows into LanceDB, {qdrant_rows:,} into Qdrant's local mode.

{rates}

### Other figures

{notes}

### What is compared

- **already built**: `build()` of an index that is sealed. A new process is a fence that was just opened, and opening it
  counts; a warm one asks a second time. Round trips to Redis are turns on the wire, requests are botocore's own events,
  against {s3}. The documents have one snippet each, the vectors 8 dimensions.
- **rows built**: all that `build()` does, from the corpus digest to the seal, without reading back and verifying. The
  documents have 1,000 characters and one snippet, the vectors {dimension} dimensions, all embedded before. Every build
  is a whole one, into an empty folder. Texts, positions and vectors are read from the object store meanwhile.
- **written straight**: the same rows, in memory as Arrow tables before the clock starts: LanceDB's `create_table` with
  all of them as one stream; for Qdrant `upsert` by 512 points, all points made before.
- **1 % changed**: an empty store gets {documents:,} documents of 1,000 characters, which are embedded by {embedder} and
  built; {changed:,} of them, spread over all, are ingested again with a line more, and built again. All of `build()` is
  on the clock both times, with embedding and verification; the model is loaded before.
"""

_COLUMNS = (BUILD, WITH_VERIFYING, STRAIGHT)


def show(console: Console, measured: Measured) -> None:
    found, scale = verdicts(measured), measured["scale"]
    console.print(f"indexes: Redis and a {measured['objects']}, audit on", markup=False, highlight=False)
    console.print(goals_table(found, lambda goal: said_of(goal, scale)))
    console.print(rates_table("rows per second", measured["rates"]))
    for line in notes(measured):
        console.print(line, markup=False, highlight=False)
    console.print(f"bench, indexes: {summary(found)}", markup=False, highlight=False)


def section(measured: Measured) -> str:
    machine, scale = measured["machine"], measured["scale"]
    found = verdicts(measured)
    return SECTION.format(
        rounds=scale["rounds"],
        objects=measured["objects"],
        versions=", ".join(f"{name} {version}" for name, version in measured["versions"].items()),
        load_before=machine["load_before"][0],
        load_after=machine["load_after"][0],
        scale_note=note_on(scale["full"]),
        summary=summary(found),
        goals=goals_lines(found, lambda goal: said_of(goal, scale)),
        rows=scale["rows"],
        qdrant_rows=scale["qdrant_rows"],
        rates=_rates_lines(measured["rates"]),
        notes="\n".join(f"- {line}" for line in notes(measured)),
        s3=measured["known"]["object_store"],
        dimension=DIMENSION,
        documents=scale["documents"],
        changed=scale["changed"],
        embedder=measured["changed"]["embedder"],
    )


def notes(measured: Measured) -> list[str]:
    """What is reported and not judged, in sentences."""
    found, changed = figures(measured), measured["changed"]
    lines = []
    for database in (LANCE, QDRANT):
        with_verifying, writing = found[f"{WITH_VERIFYING} / {database}"], found[f"{WRITING} / {database}"]
        lines.append(
            f"{database}, with verification: {with_verifying.middle:.2f}x ({with_verifying.lowest:.2f} to "
            f"{with_verifying.highest:.2f}) of writing straight; from the attempt's start to its last row only: "
            f"{writing.middle:.2f}x ({writing.lowest:.2f} to {writing.highest:.2f})."
        )
    whole, after = (
        statistics.median(each["seconds"] - each["verifying"] for each in changed[which]) for which in (WHOLE, CHANGED)
    )
    lines.append(
        f"1 % changed: {_range([each['embedded'] for each in changed[CHANGED]])} of "
        f"{_range([each['embedded'] for each in changed[WHOLE]])} texts embedded; without verification "
        f"{100 * after / whole:.0f} % of a whole build's time."
    )
    for known, counted in measured["known"]["among"].items():
        lines.append(
            f"Already built, {int(known):,} documents: "
            + "; ".join(
                f"{process} {counted[process][TRIPS]} round trips and {_counts(counted[process][REQUESTS])}"
                for process in (FRESH, WARM)
            )
            + "."
        )
    return lines


def _counts(asked: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(asked.items())) or "no request"


def _range(values: list[int]) -> str:
    lowest, highest = min(values), max(values)
    return f"{lowest:,}" if lowest == highest else f"{lowest:,} to {highest:,}"


def _rates_lines(rates: Mapping[str, list[float]]) -> str:
    lines = [f"| | {' | '.join(_COLUMNS)} |", "|---" * (len(_COLUMNS) + 1) + "|"]
    for database in (LANCE, QDRANT):
        cells = (f"{statistics.median(rates[named(what, database)]):,.0f}" for what in _COLUMNS)
        lines.append(f"| {database} | {' | '.join(cells)} |")
    return "\n".join(lines)
