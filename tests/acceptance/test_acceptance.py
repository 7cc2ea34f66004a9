"""The judge of the acceptance run: it must find what is double, lost or late."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.acceptance.__main__ import FULL, SHORT
from tests.acceptance.flood import Flooded, FloodScale, Stream, percentile, promises
from tests.acceptance.promise import Verdict

GOOD = Flooded(
    scale=SHORT,
    unique=2_400,
    effects=2_400,
    distinct=2_400,
    runs=2_401,
    dead=0,
    left=0,
    faults=Counter(kill=SHORT.kills, flush=1, failover=1),
    results=Counter(new=2_400, duplicate=1_600),
    refusals=3,
    high_water=500,
    seconds=10.0,
    drained_s=1.0,
    waits_ms=[100] * 100,
    quiet_ms=[100] * 100,
)


def verdicts(found: Flooded) -> dict[str, Verdict]:
    return {promise.what: promise.verdict for promise in promises(found)}


def test_a_run_without_a_fault_keeps_every_promise() -> None:
    assert set(verdicts(GOOD).values()) == {Verdict.KEPT, Verdict.SHOWN}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"effects": 2_401}, "double effects"),
        ({"faults": Counter(kill=SHORT.kills, flush=1)}, "double effects"),
        ({"distinct": 2_399, "effects": 2_399}, "lost events"),
        ({"dead": 1}, "lost events"),
        ({"left": 1}, "lost events"),
        ({"runs": 2_400 + SHORT.kills + 17}, "runs of a handler for an event that had one"),
    ],
)
def test_what_is_double_lost_or_run_again_is_found(change: dict[str, Any], what: str) -> None:
    assert [name for name, verdict in verdicts(replace(GOOD, **change)).items() if verdict is Verdict.BROKEN] == [what]


def test_what_is_late_is_a_goal_that_was_missed() -> None:
    found = verdicts(replace(GOOD, waits_ms=[*[100] * 98, 6_000, 6_000]))
    assert found["p99 under backpressure"] is Verdict.MISSED
    assert Verdict.BROKEN not in found.values()


def test_the_stream_has_the_share_of_duplicates_that_was_asked_for() -> None:
    stream = Stream(replace(FULL, events=20_000), random.Random(1))
    sent = Counter(envelope.event_id for envelope in stream.next(20_000))
    assert len(sent) == stream.unique
    assert 0.39 < 1 - stream.unique / 20_000 < 0.41


def test_events_of_one_id_have_one_body() -> None:
    stream = Stream(FloodScale(events=2_000, kills=1, warm_up=10), random.Random(2))
    bodies: dict[str, Any] = {}
    for envelope in stream.next(2_000):
        assert bodies.setdefault(envelope.event_id, envelope.body) == envelope.body


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([3, 1, 2], 0.99) == 3
    assert percentile(list(range(100)), 0.5) == 50
