"""What consumers and webhooks are meant to reach, and what a measured run says to it. Pure."""

from __future__ import annotations

from tests.bench import events_queue as queue
from tests.bench import events_webhooks as webhooks
from tests.bench.goals import Goal, Measured, Verdict, judged
from tests.bench.rounds import Spread, ratios

AT_LEAST = 0.7
DOCUMENTS_A_SECOND = 5_000
RATIOS = (
    ("a", queue.CONSUMER, queue.BARE),
    ("a", queue.ON_OBJECTS, queue.BARE),
    ("a", queue.AGAIN, queue.BARE),
    ("b", queue.DOCUMENTS, queue.BARE_DOCUMENTS),
    ("c", webhooks.INLINE, webhooks.BARE_ROUTE),
    ("c", webhooks.AGAIN, webhooks.BARE_ROUTE),
)
RATE = "documents a second"

GOALS: tuple[Goal, ...] = (
    *(
        Goal(letter=letter, what=ours, beside=theirs, figure=f"{ours} / {theirs}", at_least=AT_LEAST)
        for letter, ours, theirs in RATIOS
    ),
    Goal(letter="b", what="documents through Redis Streams", figure=RATE, at_least=DOCUMENTS_A_SECOND, unit="a second"),
)


def verdicts(measured: Measured) -> list[Verdict]:
    return judged(GOALS, figures(measured))


def figures(measured: Measured) -> dict[str, Spread]:
    rates = measured["rates"]
    found = {
        f"{ours} / {theirs}": Spread.of(ratios(rates[ours], rates[theirs]))
        for _, ours, theirs in RATIOS
        if ours in rates and theirs in rates
    }
    if queue.DOCUMENTS in rates:
        found[RATE] = Spread.of(rates[queue.DOCUMENTS])
    return found
