"""Part 7 on the terminal, and as a section of docs/benchmarks.md. Takes nothing but what its file holds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.docs import goals_lines
from tests.bench.goals import Goal, Measured
from tests.bench.report import goals_table, summary
from tests.bench.scale import note_on
from tests.bench.tenants_goals import figure, figures, verdicts
from tests.bench.tenants_hostile import FORMS
from tests.bench.tenants_rounds import ALONE, ATTACKED, BESIDE, HOWS, KINDS, STORES, named

TITLE = "\n## One tenant next to a hostile one\n"
UNMEASURED = (
    TITLE
    + """
Not measured yet. `python -m tests.bench --part 7` takes half an hour on an idle machine, and
`--part 7 --quick` a quarter of that; then `--write-docs` puts the figures here.
"""
)
SECTION = (
    TITLE
    + """
Measured as above, in {rounds} rounds of three times {seconds:g} s, the audit on, a **{objects}** as object store; the
server, the tenant that is measured, and the hostile one are a process each, on loopback. The machine's load average was
{load_before} before the rounds and {load_after} at the end.{scale_note}

### Goals: {summary}

{goals}

### Latencies of the other tenant

Milliseconds, medians of the rounds, and the p99 of all rounds together; cores taken by the server (and Valkey), and by
the attacker or the unrelated process. To be read as ratios.

{latencies}

### Other figures

{notes}

### What is compared

- **another tenant** sends {per_s} new documents a second, with a key each, and reads {per_s} known ones. What
  is due is sent when it is due, and its time counts from then, whatever is still awaited. Every answer is checked, and
  so is afterwards that each document is there: what was refused, came late by a minute or is not there is **lost**.
- **beside an unrelated process**: processes that burn what the attack took of the cores: the attacker's own share, and
  what the server and Valkey took more than for the other tenant alone. Alone, attacked and beside take turns in every
  round, each in another order.
- **slow bodies**: {slow_bodies} requests of one API key at once, whose bodies come byte by byte, one every
  {byte_every_s:g} s; when the server ends one, the next is begun.
- **builds**: {builds} requests of one tenant at once, each for an index of its own over {built:,} documents, with
  `ivf_pq`; whoever is refused asks again after {refused_s:g} s, whoever is answered at once.
- **refused bodies**: {bodies} connections send bodies of 4 MB that end in 422, one after the other: as many unknown
  fields as fit, one long name, a long text (plain, and with escapes) or long metadata beside an unknown field.
"""
)

_COLUMNS = ("write p50", "write p99", "all rounds", "read p50", "read p99", "all rounds", "cores", "beside")


def show(console: Console, measured: Measured) -> None:
    found = verdicts(measured)
    console.print(goals_table(found, _said))
    table = Table(title="the other tenant, ms; cores", title_justify="left")
    table.add_column("what")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for what, cells in _latencies(measured):
        table.add_row(what, *cells)
    console.print(table)
    for line in notes(measured):
        console.print(line, markup=False, highlight=False)
    console.print(f"bench, tenants: {summary(found)}", markup=False, highlight=False)


def section(measured: Measured) -> str:
    machine, scale, found = measured["machine"], measured["scale"], verdicts(measured)
    lines = [f"| what | {' | '.join(_COLUMNS)} |", "|---" * (1 + len(_COLUMNS)) + "|"]
    lines += [f"| {what} | {' | '.join(cells)} |" for what, cells in _latencies(measured)]
    return SECTION.format(
        **scale,
        objects=measured["objects"],
        load_before=machine["load_before"][0],
        load_after=machine["load_after"][0],
        scale_note=note_on(scale["full"]),
        summary=summary(found),
        goals=goals_lines(found, _said),
        latencies="\n".join(lines),
        notes="\n".join(f"- {line}" for line in notes(measured)),
    )


def notes(measured: Measured) -> list[str]:
    """What is reported and not judged, in sentences."""
    found, lines = figures(measured), []
    for store in STORES:
        for form in FORMS:
            told = {how: measured["cells"].get(named(store, form, how)) for how in HOWS}
            if None in told.values():
                continue
            beside = ", ".join(
                f"{kind} {spread.middle:.2f}x ({spread.lowest:.2f} to {spread.highest:.2f})"
                for kind in KINDS
                if (spread := found[figure(store, form, kind, ALONE)])
            )
            lines.append(
                f"{store}, {form}: p99 beside the same alone: {beside}. The attacker was answered "
                f"{_counted(told[ATTACKED]['answers'])}; the other tenant had {sum(_of(told, 'requests')):,} requests, "
                f"{_counted(_joined(told)) if _joined(told) else 'none'} not answered as they should be, "
                f"{sum(_of(told, 'missing')):,} of {sum(_of(told, 'stored')):,} documents missing afterwards."
            )
    return lines


def _of(told: Mapping[str, Any], name: str) -> list[int]:
    return [each[name] for each in told.values()]


def _joined(told: Mapping[str, Any]) -> dict[str, int]:
    joined: dict[str, int] = {}
    for each in told.values():
        for status, count in each["failed"].items():
            joined[status] = joined.get(status, 0) + count
    return joined


def _counted(answers: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} x {status}" for status, count in sorted(answers.items())) or "nothing"


def _latencies(measured: Measured) -> Iterator[tuple[str, list[str]]]:
    for store in STORES:
        of_server = 1 + ("Valkey" in store)
        for form in FORMS:
            for how in HOWS:
                cell = measured["cells"].get(named(store, form, how))
                if cell is None:
                    continue
                cells = []
                for kind in KINDS:
                    cells += [f"{statistics.median(cell[kind][name]):,.1f}" for name in ("p50_ms", "p99_ms")]
                    cells.append(f"{cell[f'{kind}, all rounds']['p99_ms']:,.1f}")
                server = [sum(shares[:of_server]) for shares in cell["cores"]]
                others = [sum(shares[of_server:]) for shares in cell["cores"]]
                cells += [f"{statistics.median(server):.2f}", f"{statistics.median(others):.2f}" if any(others) else ""]
                yield named(store, form, "beside" if how == BESIDE else how), cells


def _said(goal: Goal) -> tuple[str, str]:
    return goal.what, goal.beside
