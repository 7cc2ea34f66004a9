"""What was aimed at, and what a measured run says to it. Pure: values in, verdicts out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tests.bench.rounds import Spread, ratios

Measured = Mapping[str, Any]
"""what a part's `measure` returns, and its file in `out/` holds"""


class Outcome(StrEnum):
    MET = "MET"
    MISSED = "MISSED"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    letter: str
    what: str
    beside: str = ""
    """what it is a ratio to; empty for a plain figure"""
    figure: str
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None
    unit: str = "x"
    stretch: bool = False

    def judge(self, spread: Spread | None) -> Outcome:
        if spread is None:
            return Outcome.NOT_MEASURED
        met = (
            (self.at_least is None or spread.middle >= self.at_least)
            and (self.at_most is None or spread.middle <= self.at_most)
            and (self.below is None or spread.middle < self.below)
        )
        return Outcome.MET if met else Outcome.MISSED


@dataclass(frozen=True, slots=True)
class Verdict:
    goal: Goal
    spread: Spread | None
    """None: not measured"""
    outcome: Outcome


POWERTOOLS = "Powertools"
REPLAY, NEW = "replay, one by one", "new, one by one"
BULK_REPLAY, BULK_NEW = "bulk replay, 500 a call", "bulk new, 500 a call"
CONTEST = "8 processes, 1,000 keys"

GOALS: tuple[Goal, ...] = (
    Goal(letter="a", what=REPLAY, beside="raw GET", figure="replay / raw GET", at_least=0.6),
    Goal(letter="a", what=REPLAY, beside=POWERTOOLS, figure="replay / Powertools replay", at_least=2),
    Goal(letter="a", what=REPLAY, beside=POWERTOOLS, figure="replay / Powertools replay", at_least=4, stretch=True),
    Goal(letter="b", what=NEW, beside=POWERTOOLS, figure="new / Powertools new", at_least=1.2),
    Goal(letter="b", what=NEW, beside=POWERTOOLS, figure="new / Powertools new", at_least=2, stretch=True),
    Goal(letter="b", what="round trips of a new operation", figure="trips", at_most=2, unit="trips"),
    Goal(
        letter="c",
        what=BULK_REPLAY,
        beside="pipelined SET NX",
        figure="bulk replay / pipelined SET NX",
        at_least=1.5,
    ),
    Goal(letter="c", what=BULK_REPLAY, beside=POWERTOOLS, figure="bulk replay / Powertools replay", at_least=40),
    Goal(letter="d", what=BULK_NEW, beside=POWERTOOLS, figure="bulk new / Powertools new", at_least=8),
    Goal(letter="e", what="a sealed record in Redis", figure="record", at_most=200, unit="bytes"),
    Goal(
        letter="f",
        what="replay in the large store",
        beside="replay in the small one",
        figure="large / small",
        at_least=0.9,
    ),
    Goal(letter="g", what=f"{CONTEST}: conflicts", figure="conflicts", at_most=0, unit="conflicts"),
    Goal(letter="g", what=f"{CONTEST}: claims that wait", figure="waiting", at_most=3, unit="%"),
    Goal(letter="g", what=f"{CONTEST}: seal to waiter's answer, p95", figure="answered", below=100, unit="ms"),
)


def verdicts(measured: Measured) -> list[Verdict]:
    return judged(GOALS, figures(measured))


def judged(goals: Sequence[Goal], found: Mapping[str, Spread]) -> list[Verdict]:
    spreads = [found.get(goal.figure) for goal in goals]
    return [Verdict(goal, spread, goal.judge(spread)) for goal, spread in zip(goals, spreads, strict=True)]


def figures(measured: Measured) -> dict[str, Spread]:
    """Every figure that a goal names, as far as it was measured."""
    rates = measured["rates"]["redis"]
    found = {}
    for ours in ("replay", "new", "bulk replay", "bulk replay, claims built too", "bulk new"):
        for theirs in ("raw GET", "pipelined SET NX", "Powertools replay", "Powertools new"):
            if theirs in rates:
                found[f"{ours} / {theirs}"] = Spread.of(ratios(rates[ours], rates[theirs]))
    small, large = (rates[name] for name in growth_names(measured["scale"]))
    found["large / small"] = ratio_of_medians(large, small)
    found["trips"] = single(measured["trips"]["new"])
    found["record"] = single(measured["memory"]["ragfence"]["record_bytes"])
    contest = measured["contention"]["shuffled"]
    found["conflicts"] = single(contest["conflicts"])
    found["waiting"] = single(100 * contest["waiting_share"])
    if contest["answer_p95_ms"] is not None:  # nobody waited, nobody was answered late
        found["answered"] = single(contest["answer_p95_ms"])
    return found


def growth_names(scale: Mapping[str, Any], what: str = "replay") -> tuple[str, str]:
    return f"{what} among {scale['few']:,}", f"{what} among {scale['many']:,}"


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """The spread is still that of the rounds."""
    return Spread.of(ratios(ours, theirs), middle=statistics.median(ours) / statistics.median(theirs))


def single(value: float) -> Spread:
    return Spread.of([float(value)])
