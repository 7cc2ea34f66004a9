"""Part 5 of the benchmark measures what it says it does. Never how fast anything is: that is `make bench`'s to say."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests import servers
from tests.bench import api_report, api_run, report, run
from tests.bench.api_goals import GOALS, figure, figures, verdicts
from tests.bench.api_load import BODY_BYTES, percentiles, template
from tests.bench.api_rates import (
    ANY,
    CEILING,
    MIDDLEWARE_SQLITE,
    MIDDLEWARE_VALKEY,
    NEW,
    NOTHING,
    REPLAY,
    SERVE_SQLITE,
    SERVE_VALKEY,
    named,
)
from tests.bench.api_scale import FULL, QUICK, ApiScale
from tests.bench.api_scenarios import CRASHED_LATE, EXPIRED, SCENARIOS
from tests.bench.goals import Outcome

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__)]

TINY = ApiScale(rounds=1, seconds=0.05, twins=3)
OURS = (SERVE_SQLITE, SERVE_VALKEY, MIDDLEWARE_SQLITE, MIDDLEWARE_VALKEY)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny run without the peer, as it comes back from its file."""
    path = tmp_path_factory.mktemp("bench") / "out" / "bench-api.json"
    run.write(path, api_run.measure(TINY, None))
    return json.loads(path.read_text())


def test_a_run_asks_every_server_with_few_connections_and_many(measured):
    sides = [(ANY, CEILING), (ANY, NOTHING), *((what, subject) for what in (REPLAY, NEW) for subject in OURS)]
    wanted = {named(subject, what, connections) for what, subject in sides for connections in TINY.connections}
    assert set(measured["rates"]) == set(measured["cells"]) == wanted
    assert all(len(each) == TINY.rounds and min(each) > 0 for each in measured["rates"].values())
    for cell in measured["cells"].values():
        assert cell["p50_ms"] <= cell["p95_ms"] <= cell["p99_ms"]


def test_ours_has_one_effect_in_every_scenario_but_those_that_say_why(measured):
    twice = {(EXPIRED, MIDDLEWARE_SQLITE), (EXPIRED, MIDDLEWARE_VALKEY)}
    twice |= {(CRASHED_LATE, MIDDLEWARE_SQLITE), (CRASHED_LATE, MIDDLEWARE_VALKEY)}
    assert set(measured["scenarios"]) == set(SCENARIOS) == set(api_report.REASONS)
    for scenario, told in measured["scenarios"].items():
        assert set(told) == {MIDDLEWARE_SQLITE, MIDDLEWARE_VALKEY}
        for subject, found in told.items():
            assert found["effects"] == (2 if (scenario, subject) in twice else 1), (scenario, subject, found)


def test_every_goal_without_the_peer_is_judged(measured):
    assert [goal["figure"] for goal in measured["goals"]] == [goal.figure for goal in GOALS]
    for goal in measured["goals"]:
        assert (goal["outcome"] == Outcome.NOT_MEASURED) == ("asgi-idempotency-header" in goal["beside"])


def test_a_rate_is_a_share_of_that_of_the_same_round(measured):
    ours, floor = named(SERVE_VALKEY, REPLAY, 8), named(NOTHING, ANY, 8)
    rates = {ours: [10.0, 30.0, 20.0], floor: [40.0, 40.0, 40.0]}
    found = figures(measured | {"rates": rates})[figure((REPLAY, SERVE_VALKEY), (ANY, NOTHING), 8)]
    assert (found.lowest, found.middle, found.highest) == (0.25, 0.5, 0.75)


def test_the_terminal_and_the_page_show_every_goal_and_nothing_of_this_machine(measured):
    terminal = io.StringIO()
    api_report.show(Console(width=240, file=terminal), measured)
    shown, section = terminal.getvalue(), api_report.section(measured)
    for verdict in verdicts(measured):
        for text in (shown, section):
            assert report.wanted(verdict.goal) in text
            assert verdict.outcome.value in text
    for text in (shown, section):
        assert str(Path.cwd()) not in text
        assert servers.HOST not in text
    assert "no full run" in section
    assert section.startswith("\n## HTTP API\n")  # where the page's #http-api leads


def test_every_request_has_the_same_length_and_a_document_of_its_own():
    made = template("name", 80, "")
    one, other = made % (1, 1), made % (123_456_789_012, 123_456_789_012)
    assert len(one) == len(other)
    head, _, body = other.partition(b"\r\n\r\n")
    assert b"idempotency-key: name-123456789012" in head
    assert len(body) == BODY_BYTES
    assert json.loads(body)["doc_id"] == "name-123456789012"


def test_percentiles_are_times_that_were_taken():
    assert percentiles([0.001 * number for number in range(101)]) == pytest.approx(
        {"p50_ms": 50, "p95_ms": 95, "p99_ms": 99}
    )


def test_a_smaller_scale_is_not_a_full_run():
    assert FULL.is_full
    assert not QUICK.is_full
    assert not replace(FULL, seconds=0.5).is_full
