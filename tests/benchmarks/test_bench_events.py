"""Part 9 of the benchmark measures what it says it does. Never how fast anything is: that is `make bench`'s to say."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests import servers
from tests.bench import events_queue, events_report, events_run, events_webhooks, report, run
from tests.bench.events_goals import GOALS, RATE, verdicts
from tests.bench.events_scale import FULL, QUICK, EventsScale
from tests.bench.goals import Outcome

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__)]

TINY = EventsScale(rounds=1, messages=20, documents=20, deliveries=20, connections=2)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny run, as it comes back from its file."""
    path = tmp_path_factory.mktemp("bench") / "out" / "bench-events.json"
    run.write(path, events_run.measure(TINY))
    return json.loads(path.read_text())


def test_every_subject_and_every_goal_is_measured(measured):
    wanted = {*events_queue.PLAIN, events_queue.BARE_DOCUMENTS, events_queue.DOCUMENTS, *events_webhooks.ROUTES}
    assert set(measured["rates"]) == wanted
    assert all(len(rates) == TINY.rounds and min(rates) > 0 for rates in measured["rates"].values())
    assert [goal["figure"] for goal in measured["goals"]] == [goal.figure for goal in GOALS]
    assert all(goal["outcome"] != Outcome.NOT_MEASURED for goal in measured["goals"])


def test_the_terminal_and_the_page_show_every_goal_and_nothing_of_this_machine(measured):
    terminal = io.StringIO()
    events_report.show(Console(width=240, file=terminal), measured)
    shown, page = terminal.getvalue(), events_report.section(measured)
    for verdict in verdicts(measured):
        for text in (shown, page):
            assert report.wanted(verdict.goal) in text
            assert verdict.outcome.value in text
    assert "no full run" in page
    assert str(Path.cwd()) not in page
    assert servers.HOST not in page
    for section in (page, events_report.UNMEASURED):
        assert section.startswith("\n## Events\n")


def test_ratios_are_taken_round_by_round(measured):
    rates = {name: [100.0, 200.0, 400.0] for name in measured["rates"]}
    rates[events_queue.CONSUMER] = [80.0, 160.0, 100.0]
    rates[events_queue.DOCUMENTS] = [4_000.0, 6_000.0, 7_000.0]
    outcomes = {verdict.goal.figure: verdict.outcome for verdict in verdicts(measured | {"rates": rates})}
    assert outcomes[f"{events_queue.CONSUMER} / {events_queue.BARE}"] == Outcome.MET
    assert outcomes[RATE] == Outcome.MET


def test_a_smaller_scale_is_not_a_full_run():
    assert FULL.is_full
    assert not QUICK.is_full
