"""Part 8 of the benchmark measures what it says it does. Never how fast anything is: that is `make bench`'s to say."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests import servers
from tests.bench import report, run, size_report, size_run
from tests.bench.goals import Outcome
from tests.bench.size_asked import CPU, EMPTY, LARGE, QUESTIONS, SECONDS, SQLITE, STATUS, STORES, named
from tests.bench.size_goals import GOALS, above_ms, figure, verdicts
from tests.bench.size_scale import FULL, QUICK, SizeScale

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__)]

TINY = SizeScale(rounds=1, documents=30, rows=600, calls=2)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny run, as it comes back from its file."""
    path = tmp_path_factory.mktemp("bench") / "out" / "bench-size.json"
    run.write(path, size_run.measure(TINY))
    return json.loads(path.read_text())


def test_every_question_is_asked_of_an_empty_and_of_a_large_store(measured):
    wanted = {named(question, store, size) for question in QUESTIONS for store in STORES for size in (EMPTY, LARGE)}
    assert set(measured["asked"]) == wanted
    for told in measured["asked"].values():
        assert len(told[SECONDS]) == len(told[CPU]) == TINY.rounds
        assert min(told[SECONDS]) > 0
    assert [goal["figure"] for goal in measured["goals"]] == [goal.figure for goal in GOALS]
    assert all(goal["outcome"] != Outcome.NOT_MEASURED for goal in measured["goals"])


def test_searches_are_measured_exactly_and_approximately(measured):
    search = measured["search"]
    assert search["rows"] == TINY.rows
    assert search["index"] != "flat"
    assert 0 < search["recall"] <= 1
    assert min(search[name] for name in ("exact_ms", "ann_ms", "exact_p50_ms", "ann_p50_ms")) > 0


def test_the_terminal_and_the_page_show_every_goal_and_nothing_of_this_machine(measured):
    terminal = io.StringIO()
    size_report.show(Console(width=240, file=terminal), measured)
    shown, page = terminal.getvalue(), size_report.section(measured)
    for verdict in verdicts(measured):
        for text in (shown, page):
            assert report.wanted(verdict.goal) in text
            assert verdict.outcome.value in text
    assert "no full run" in page
    assert str(Path.cwd()) not in page
    assert servers.HOST not in page
    # Where the page's own links lead, measured or not.
    for section in (page, size_report.UNMEASURED):
        assert section.startswith("\n## What grows with the store\n")


def test_what_is_judged_is_how_much_more_than_an_empty_store_it_takes(measured):
    assert above_ms([1.5, 0.25], [1.0, 0.5]) == [500.0, -250.0]
    asked = dict(measured["asked"])
    asked[named(STATUS, SQLITE, EMPTY)] = {SECONDS: [1.0, 1.0, 1.0], CPU: [0.5, 0.5, 0.5]}
    asked[named(STATUS, SQLITE, LARGE)] = {SECONDS: [1.1, 1.1, 9.0], CPU: [0.5, 0.8, 0.8]}
    outcomes = {verdict.goal.figure: verdict.outcome for verdict in verdicts(measured | {"asked": asked})}
    assert outcomes[figure(STATUS, SQLITE, SECONDS)] == Outcome.MET
    assert outcomes[figure(STATUS, SQLITE, CPU)] == Outcome.MISSED


def test_a_smaller_scale_is_not_a_full_run():
    assert FULL.is_full
    assert not QUICK.is_full
    assert not replace(FULL, documents=100_000).is_full
