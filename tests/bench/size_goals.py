"""What may grow with the store, and what a measured run says to it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench.goals import Goal, Measured, Verdict, judged
from tests.bench.rounds import Spread
from tests.bench.size_asked import CPU, EMPTY, LARGE, QUESTIONS, SECONDS, STORES, named

AT_MOST_MS = 200
MEASURES = {SECONDS: "", CPU: ", of a core"}


def figure(question: str, store: str, measure: str) -> str:
    return f"{question}, {store}: {measure} above"


GOALS: tuple[Goal, ...] = tuple(
    Goal(
        letter=letter,
        what=f"{question}, {store}{how}",
        beside="above an empty store",
        figure=figure(question, store, measure),
        at_most=AT_MOST_MS,
        unit="ms",
    )
    for letter, store in zip("ab", STORES, strict=True)
    for question in QUESTIONS
    for measure, how in MEASURES.items()
)


def verdicts(measured: Measured) -> list[Verdict]:
    return judged(GOALS, figures(measured))


def figures(measured: Measured) -> dict[str, Spread]:
    """Milliseconds more than an empty store takes, within a round."""
    asked, found = measured["asked"], {}
    for store in STORES:
        for question in QUESTIONS:
            large, empty = (asked.get(named(question, store, size)) for size in (LARGE, EMPTY))
            if large and empty:
                for measure in MEASURES:
                    found[figure(question, store, measure)] = Spread.of(above_ms(large[measure], empty[measure]))
    return found


def above_ms(large: Sequence[float], empty: Sequence[float]) -> list[float]:
    """Round by round: what disturbed both in the same round cancels out."""
    return [1000 * (one - other) for one, other in zip(large, empty, strict=True)]
