"""What was aimed at with documents, and what a measured run says to it. Pure: values in, verdicts out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.bench.documents_growth import among
from tests.bench.documents_rates import AGAIN, FIRST, RAGFENCE, WITH_SINK, named
from tests.bench.goals import Goal, Measured, Verdict, judged, ratio_of_medians, single
from tests.bench.peers.process import DUPLICATES_ONLY, LANGCHAIN, UPSERTS
from tests.bench.rounds import Spread, ratios

_AGAIN = "known documents again, ids returned"
_FIRST = "new documents, chunking free"
_SINK, _FIRST_SINK = "first with a sink", "the same, with a sink"


def _beside(letter: str, run: str, what: str, who: str, at_least: float) -> Goal:
    return Goal(letter=letter, what=what, beside=who, figure=f"{run} / {who}", at_least=at_least)


GOALS: tuple[Goal, ...] = (
    _beside("a", AGAIN, _AGAIN, LANGCHAIN, 20),
    _beside("a", AGAIN, _AGAIN, UPSERTS, 5),
    _beside("a", AGAIN, _AGAIN, DUPLICATES_ONLY, 1.5),
    Goal(letter="a", what=_AGAIN, figure=AGAIN, at_least=150_000, unit="docs/s", stretch=True),
    _beside("b", FIRST, _FIRST, LANGCHAIN, 2),
    _beside("b", FIRST, _FIRST, UPSERTS, 2),
    _beside("b", FIRST, _FIRST, DUPLICATES_ONLY, 2),
    # The peers feed a vector store in the same call, and ragfence does so with a sink: judged both ways.
    _beside("b", _SINK, _FIRST_SINK, LANGCHAIN, 2),
    _beside("b", _SINK, _FIRST_SINK, UPSERTS, 2),
    _beside("b", _SINK, _FIRST_SINK, DUPLICATES_ONLY, 2),
    Goal(letter="c", what="two processes, same documents: done twice", figure="doubled", at_most=0, unit=""),
    Goal(letter="d", what="time of a changed document, many known", beside="few", figure="many / few", at_most=1.2),
    Goal(letter="e", what="hydration", figure="hydration", at_least=50_000, unit="receipts/s"),
    Goal(letter="f", what="peak memory of a generator's documents", figure="peak", below=300, unit="MB"),
    Goal(letter="g", what="a document with 3 snippets in Redis", figure="document", below=300, unit="bytes"),
    Goal(letter="h", what="S3 requests per 1,000 documents", figure="requests", below=10, unit=""),
)


def verdicts(measured: Measured) -> list[Verdict]:
    return judged(GOALS, figures(measured))


def figures(measured: Measured) -> dict[str, Spread]:
    rates, scale = measured["rates"], measured["scale"]
    found = {AGAIN: Spread.of(rates[named(AGAIN, RAGFENCE)])}
    for figure, run, ours in ((AGAIN, AGAIN, RAGFENCE), (FIRST, FIRST, RAGFENCE), (_SINK, FIRST, WITH_SINK)):
        for who in (LANGCHAIN, UPSERTS, DUPLICATES_ONLY):
            if named(run, who) in rates:
                found[f"{figure} / {who}"] = Spread.of(ratios(rates[named(run, ours)], rates[named(run, who)]))
    race = measured["race"]
    most = [max(each[name] for name in ("embeds", "rows", "chunked", "stored")) for each in race[RAGFENCE]]
    found["doubled"] = Spread.of([float(count - race["documents"]) for count in most])
    few, many = (measured["growth"]["changed"][among(scale[known])] for known in ("few", "many"))
    found["many / few"] = ratio_of_medians(few, many)  # of rates, so the other way round than of times
    hydration = measured["growth"]["hydration"]
    found["hydration"] = Spread.of([hydration["receipts"] / seconds for seconds in hydration["seconds"]])
    found["peak"] = single(measured["memory"]["peak_bytes"] / 1e6)
    found["document"] = single(measured["bytes"]["document_bytes"])
    requests = measured["requests"]
    found["requests"] = single(1_000 * sum(requests["first"].values()) / requests["documents"])
    return found


def said_of(goal: Goal, scale: Mapping[str, Any]) -> tuple[str, str]:
    """What a goal is about and what it stands beside, with this run's numbers."""
    if goal.figure == "many / few":
        return f"time of {among(scale['many'])}", f"among {scale['few']:,}"
    if goal.figure == "peak":
        return f"peak memory of {scale['streamed']:,} documents from a generator", ""
    if goal.figure == "hydration":
        return f"hydration of {scale['many']:,} documents", ""
    return goal.what, goal.beside
