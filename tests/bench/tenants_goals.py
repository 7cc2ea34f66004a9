"""What was aimed at for one tenant beside another, and what a measured run says to it. Pure."""

from __future__ import annotations

from tests.bench.goals import Goal, Measured, Verdict, judged, single
from tests.bench.rounds import Spread, ratios
from tests.bench.tenants_hostile import FORMS
from tests.bench.tenants_rounds import ALONE, ATTACKED, BESIDE, HOWS, KINDS, STORES, named

AT_MOST = 3
LOST = "answers and documents lost"


def figure(store: str, form: str, kind: str, beside: str = BESIDE) -> str:
    return f"{store}, {form}: {kind} p99 / {beside}"


def lost_figure(store: str, form: str) -> str:
    return f"{store}, {form}: {LOST}"


GOALS: tuple[Goal, ...] = tuple(
    goal
    for letter, form in zip("abc", FORMS, strict=True)
    for store in STORES
    for goal in (
        *(
            Goal(
                letter=letter,
                what=f"{form}: another tenant's {kind}, p99, {store}",
                beside=BESIDE,
                figure=figure(store, form, kind),
                at_most=AT_MOST,
            )
            for kind in KINDS
        ),
        Goal(letter=letter, what=f"{form}: {LOST}, {store}", figure=lost_figure(store, form), at_most=0, unit=""),
    )
)


def verdicts(measured: Measured) -> list[Verdict]:
    return judged(GOALS, figures(measured))


def figures(measured: Measured) -> dict[str, Spread]:
    """p99 beside p99, within a round; and what was lost in all rounds together, whatever went on beside."""
    cells = measured["cells"]
    found = {}
    for store in STORES:
        for form in FORMS:
            told = {how: cells.get(named(store, form, how)) for how in HOWS}
            if None in told.values():
                continue
            for kind in KINDS:
                p99 = {how: each[kind]["p99_ms"] for how, each in told.items()}
                for beside in (BESIDE, ALONE):
                    found[figure(store, form, kind, beside)] = Spread.of(ratios(p99[ATTACKED], p99[beside]))
            lost = sum(each["missing"] + sum(each["failed"].values()) for each in told.values())
            found[lost_figure(store, form)] = single(lost)
    return found
