"""What was aimed at for the audit, and what a measured run says to it. Pure."""

from __future__ import annotations

from tests.bench.audit_cost import CLAIMS, DOCUMENTS, OFF, ON, named
from tests.bench.audit_queries import BY_DAY, BY_SOURCE
from tests.bench.goals import Goal, Measured, Verdict, judged, single
from tests.bench.rounds import Spread, ratios

SECONDS, MEGABYTES = "seconds", "peak_megabytes"

GOALS = (
    *(
        goal
        for letter, query in (("a", BY_SOURCE), ("b", BY_DAY))
        for goal in (
            Goal(letter=letter, what=query, figure=f"{query}, {SECONDS}", below=2, unit="s"),
            Goal(letter=letter, what=f"{query}: peak memory", figure=f"{query}, {MEGABYTES}", below=1024, unit="MB"),
        )
    ),
    *(
        Goal(letter="c", what=what, beside="the same without audit", figure=what, at_least=0.85)
        for what in (DOCUMENTS, CLAIMS)
    ),
)


def verdicts(measured: Measured) -> list[Verdict]:
    return judged(GOALS, figures(measured))


def figures(measured: Measured) -> dict[str, Spread]:
    rates, queries = measured["rates"], measured["queries"]
    found = {what: Spread.of(ratios(rates[named(what, ON)], rates[named(what, OFF)])) for what in (DOCUMENTS, CLAIMS)}
    for query in (BY_SOURCE, BY_DAY):
        for unit in (SECONDS, MEGABYTES):
            found[f"{query}, {unit}"] = single(queries["asked"][query][unit])
    return found
