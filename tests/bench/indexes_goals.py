"""What was aimed at with indexes, and what a measured run says to it. Pure: values in, verdicts out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.bench.goals import Goal, Measured, Verdict, judged
from tests.bench.indexes_changed import CHANGED, WHOLE
from tests.bench.indexes_known import FRESH, REQUESTS, TRIPS, WARM
from tests.bench.indexes_rates import BUILD, LANCE, QDRANT, STRAIGHT, WITH_VERIFYING, WRITING, named
from tests.bench.rounds import Spread, ratios

_ASKED = {TRIPS: "round trips to Redis", REQUESTS: "requests to S3"}
_EMBEDDED, _TIME = "embedded", "time of a build"


def _same(process: str, asked: str) -> Goal:
    return Goal(
        letter="a",
        what=f"already built, {process}: {_ASKED[asked]}",
        beside="few",
        figure=f"{process}, {asked}",
        at_most=0,
        unit="apart",
    )


def _written(database: str) -> Goal:
    return Goal(
        letter="b",
        what="rows built, neither embedding nor verifying",
        beside=f"written straight into {database}",
        figure=f"{BUILD} / {database}",
        at_least=0.9,
    )


GOALS: tuple[Goal, ...] = (
    *(_same(process, asked) for process in (FRESH, WARM) for asked in (TRIPS, REQUESTS)),
    _written(LANCE),
    _written(QDRANT),
    Goal(letter="c", what="1 % changed: texts embedded", beside="all of them", figure=_EMBEDDED, at_most=1, unit="%"),
    Goal(letter="c", what="1 % changed: time of the build", beside="a whole build", figure=_TIME, at_most=20, unit="%"),
)


def verdicts(measured: Measured) -> list[Verdict]:
    return judged(GOALS, figures(measured))


def figures(measured: Measured) -> dict[str, Spread]:
    rates, changed, scale = measured["rates"], measured["changed"], measured["scale"]
    few, many = (measured["known"]["among"][str(scale[known])] for known in ("few", "many"))
    found = {}
    for process in (FRESH, WARM):
        for asked in (TRIPS, REQUESTS):
            apart = abs(_count(many[process][asked]) - _count(few[process][asked]))
            found[f"{process}, {asked}"] = Spread.of([float(apart)])
    for database in (LANCE, QDRANT):
        for what in (BUILD, WITH_VERIFYING, WRITING):
            straight = rates[named(STRAIGHT, database)]
            found[f"{what} / {database}"] = Spread.of(ratios(rates[named(what, database)], straight))
    for figure, value in ((_EMBEDDED, "embedded"), (_TIME, "seconds")):
        after, before = ([each[value] for each in changed[which]] for which in (CHANGED, WHOLE))
        found[figure] = Spread.of([100 * share for share in ratios(after, before)])
    return found


def _count(asked: int | Mapping[str, int]) -> int:
    return asked if isinstance(asked, int) else sum(asked.values())


def said_of(goal: Goal, scale: Mapping[str, Any]) -> tuple[str, str]:
    """What a goal is about and what it stands beside, with this run's numbers."""
    if goal.letter == "a":
        return f"{goal.what}, {scale['many']:,} documents", f"{scale['few']:,} documents"
    return goal.what, goal.beside
