"""What was aimed at with the HTTP API, and what a measured run says to it. Pure: values in, verdicts out."""

from __future__ import annotations

from tests.bench.api_rates import (
    ANY,
    MIDDLEWARE_SQLITE,
    MIDDLEWARE_VALKEY,
    NEW,
    NOTHING,
    PEER_MEMORY,
    PEER_REDIS,
    REPLAY,
    SERVE_SQLITE,
    SERVE_VALKEY,
    named,
)
from tests.bench.goals import Goal, Measured, Verdict, judged
from tests.bench.rounds import Spread, ratios

CONNECTIONS = (1, 8, 64)

Side = tuple[str, str]
"""run and subject"""

FLOOR: Side = (ANY, NOTHING)
COMPARED: tuple[tuple[Side, Side], ...] = (
    *(((REPLAY, subject), FLOOR) for subject in (SERVE_SQLITE, SERVE_VALKEY, MIDDLEWARE_SQLITE, MIDDLEWARE_VALKEY)),
    *(((REPLAY, subject), (REPLAY, PEER_REDIS)) for subject in (SERVE_VALKEY, MIDDLEWARE_VALKEY)),
    *(((REPLAY, subject), (REPLAY, PEER_MEMORY)) for subject in (SERVE_SQLITE, MIDDLEWARE_SQLITE)),
    *(((NEW, subject), (NEW, PEER_REDIS)) for subject in (SERVE_VALKEY, MIDDLEWARE_VALKEY)),
    *(((NEW, subject), (NEW, PEER_MEMORY)) for subject in (SERVE_SQLITE, MIDDLEWARE_SQLITE)),
    *(((REPLAY, peer), FLOOR) for peer in (PEER_REDIS, PEER_MEMORY)),
)


def figure(ours: Side, theirs: Side, connections: int) -> str:
    return f"{named(ours[1], ours[0], connections)} / {named(theirs[1], theirs[0], connections)}"


def _goals(letter: str, ours: Side, theirs: Side, beside: str, at_least: float) -> tuple[Goal, ...]:
    return tuple(
        Goal(
            letter=letter,
            what=f"{ours[0]}, {ours[1]}, {_told(connections)}",
            beside=beside,
            figure=figure(ours, theirs, connections),
            at_least=at_least,
        )
        for connections in CONNECTIONS
    )


def _told(connections: int) -> str:
    return f"{connections} connection{'s' * (connections > 1)}"


GOALS: tuple[Goal, ...] = (
    *_goals("a", (REPLAY, SERVE_SQLITE), FLOOR, NOTHING, 0.5),
    *_goals("a", (REPLAY, SERVE_VALKEY), FLOOR, NOTHING, 0.5),
    *_goals("b", (REPLAY, SERVE_VALKEY), (REPLAY, PEER_REDIS), PEER_REDIS, 1),
    *_goals("b", (REPLAY, MIDDLEWARE_VALKEY), (REPLAY, PEER_REDIS), PEER_REDIS, 1),
    *_goals("c", (NEW, MIDDLEWARE_VALKEY), (NEW, PEER_REDIS), PEER_REDIS, 1),
)


def verdicts(measured: Measured) -> list[Verdict]:
    return judged(GOALS, figures(measured))


def figures(measured: Measured) -> dict[str, Spread]:
    """Rates beside rates, within a round."""
    rates = measured["rates"]
    return _compared(rates, measured["scale"]["connections"])


def costs(measured: Measured) -> dict[str, Spread]:
    """The same figures of the time of a core that the server took for a request: a busy machine changes it less."""
    cpu = {name: [1 / max(us, 1e-9) for us in each["cpu_us"]] for name, each in measured["cells"].items()}
    return _compared(cpu, measured["scale"]["connections"])


def _compared(values: dict[str, list[float]], levels: list[int]) -> dict[str, Spread]:
    found = {}
    for ours, theirs in COMPARED:
        for connections in levels:
            mine, other = (values.get(named(side[1], side[0], connections)) for side in (ours, theirs))
            if mine and other:
                found[figure(ours, theirs, connections)] = Spread.of(ratios(mine, other))
    return found
