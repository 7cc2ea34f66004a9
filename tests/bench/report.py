"""A measured run as tables on the terminal. Takes nothing but what `out/bench.json` holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.bench.goals import Goal, Measured, Outcome, Verdict, growth_names, ratio_of_medians, verdicts
from tests.bench.rounds import Spread

_STYLE = {Outcome.MET: "green", Outcome.MISSED: "bold red", Outcome.NOT_MEASURED: "yellow"}


Named = Callable[[Goal], tuple[str, str]]
"""what a goal is about and what it stands beside, with a run's numbers"""


def show(console: Console, measured: Measured) -> None:
    found = verdicts(measured)
    console.print(goals_table(found, lambda goal: what_of(goal, measured)))
    console.print(rates_table("operations per second, Redis alone", measured["rates"]["redis"]))
    console.print(rates_table("operations per second, by object store behind Redis", measured["rates"]["objects"]))
    for line in notes(measured):
        console.print(line, markup=False, highlight=False)
    console.print(f"bench: {summary(found)}", markup=False, highlight=False)


def summary(found: Sequence[Verdict]) -> str:
    counts = {outcome: sum(verdict.outcome is outcome for verdict in found) for outcome in Outcome}
    return ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count)


def notes(measured: Measured) -> list[str]:
    """What is reported and not judged, in sentences."""
    memory, trips = measured["memory"], measured["trips"]
    lines = [
        f"Memory per sealed record with a result of {memory['result_characters']} characters, MEMORY USAGE of its key "
        f"(judged) and used_memory over {memory['records']:,} records with their decision rows trimmed away: "
        + "; ".join(
            f"{name} {found['record_bytes']:.0f} and {found['server_bytes_per_record']:.0f} bytes"
            for name, found in memory.items()
            if isinstance(found, dict)
        )
        + ".",
        "Round trips per call, counted on the wire: "
        + ", ".join(f"{name} {value:g}" for name, value in trips.items())
        + ".",
    ]
    small, large = (measured["rates"]["redis"].get(name) for name in growth_names(measured["scale"], "raw GET"))
    if small and large:
        floor = ratio_of_medians(large, small)
        lines.append(
            f"The same walk by raw GET of as many plain values: in the large store {floor.middle:.2f}x of its rate in "
            f"the small one ({floor.lowest:.2f} to {floor.highest:.2f})."
        )
    contention = measured["contention"]
    for order in ("shuffled", "lockstep"):
        found = contention[order]
        judged = "judged" if order == "shuffled" else "not judged: all ask for the same key at the same moment"
        lines.append(
            f"{contention['processes']} processes, {contention['keys']:,} keys, {contention['contests']} "
            f"{'contest' if contention['contests'] == 1 else 'contests'}, {order} ({judged}): "
            f"{found['claims']:,} claims, {found['waited']:,} ({found['waiting_share']:.1%}) waited, "
            f"{found['conflicts']} conflicts; from the winner's seal to a waiter's answer "
            f"{milliseconds(found['answer_p50_ms'])} at the median, {milliseconds(found['answer_p95_ms'])} at p95, "
            f"{milliseconds(found['answer_longest_ms'])} at most."
        )
    return lines


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def wanted(goal: Goal) -> str:
    sign, bound = next(
        (sign, bound)
        for sign, bound in ((">=", goal.at_least), ("<=", goal.at_most), ("<", goal.below))
        if bound is not None
    )
    text = f"{sign} {bound:,g}{_unit(goal)}"
    return f"{text} (stretch)" if goal.stretch else text


def seen(goal: Goal, value: float) -> str:
    return f"{_figure(goal, value)}{_unit(goal)}"


def spread_of(goal: Goal, spread: Spread) -> tuple[str, str]:
    """The middle half, and all of it; nothing where there was just one figure."""
    if spread.lowest == spread.highest:
        return "", ""
    lowest, lower, upper, highest = (
        _figure(goal, value) for value in (spread.lowest, spread.lower, spread.upper, spread.highest)
    )
    return f"{lower} to {upper}", f"{lowest} to {highest}"


def what_of(goal: Goal, measured: Measured) -> tuple[str, str]:
    if goal.figure == "large / small":
        small, large = growth_names(measured["scale"])
        return large, small
    return goal.what, goal.beside


def _figure(goal: Goal, value: float) -> str:
    if goal.unit in ("x", "%"):
        return f"{value:.2f}"
    return f"{value:,.0f}" if value == round(value) or value >= 1_000 else f"{value:.1f}"


def _unit(goal: Goal) -> str:
    return {"x": "x", "%": " %", "conflicts": "", "trips": "", "": ""}.get(goal.unit, f" {goal.unit}")


def goals_table(found: Sequence[Verdict], named: Named) -> Table:
    table = Table(title="goals", title_justify="left")
    for name in ("", "what", "beside", "goal"):
        table.add_column(name)
    for name in ("measured", "middle half", "lowest to highest"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    before = ""
    for verdict in found:
        goal = verdict.goal
        if before and goal.letter != before:
            table.add_section()
        before = goal.letter
        figure = seen(goal, verdict.spread.middle) if verdict.spread else "-"
        half, all_of_it = spread_of(goal, verdict.spread) if verdict.spread else ("", "")
        outcome = Text(verdict.outcome.value, style=_STYLE[verdict.outcome])
        table.add_row(goal.letter, *named(goal), wanted(goal), figure, half, all_of_it, outcome)
    return table


def rates_table(title: str, rates: Mapping[str, Sequence[float]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    for name in ("median", "lowest", "highest"):
        table.add_column(name, justify="right")
    for name, each in rates.items():
        table.add_row(name, *(f"{value:,.0f}" for value in (statistics.median(each), min(each), max(each))))
    return table
