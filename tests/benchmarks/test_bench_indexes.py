"""Part 3 of the benchmark measures what it says it does. Never how fast anything is: that is `make bench`'s to say."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ragfence.indexes.embedders.embedder import EmbedderId
from tests import servers
from tests.bench import indexes_report, indexes_run, report, run
from tests.bench.goals import Outcome
from tests.bench.indexes_changed import CHANGED, WHOLE
from tests.bench.indexes_goals import GOALS, figures, verdicts
from tests.bench.indexes_known import FRESH, REQUESTS, TRIPS, WARM
from tests.bench.indexes_ours import Counted, Drawn
from tests.bench.indexes_rates import BUILD, LANCE, QDRANT, STRAIGHT, WITH_VERIFYING, WRITING, named
from tests.bench.indexes_scale import FULL, QUICK, IndexesScale

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__)]

TINY = IndexesScale(rounds=1, few=10, many=40, calls=1, rows=30, qdrant_rows=10, documents=100)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny run, as it comes back from its file."""
    path = tmp_path_factory.mktemp("bench") / "out" / "bench-indexes.json"
    run.write(path, indexes_run.measure(TINY))
    return json.loads(path.read_text())


def test_a_run_builds_and_writes_straight_in_every_round(measured):
    rates, parts = measured["rates"], (BUILD, STRAIGHT, WITH_VERIFYING, WRITING)
    assert set(rates) == {named(what, database) for what in parts for database in (LANCE, QDRANT)}
    assert all(len(each) == TINY.rounds and min(each) > 0 for each in rates.values())


def test_what_is_left_out_of_a_build_is_its_verification(measured):
    rates = measured["rates"]
    for database in (LANCE, QDRANT):
        each = zip(*(rates[named(what, database)] for what in (WITH_VERIFYING, BUILD, WRITING)), strict=True)
        assert all(whole < without <= writing * 1.2 for whole, without, writing in each)


def test_a_hundredth_of_the_documents_is_embedded_again_and_all_are_built(measured):
    for whole, changed in zip(measured["changed"][WHOLE], measured["changed"][CHANGED], strict=True):
        assert whole["embedded"] == whole["rows"] == changed["rows"] == TINY.documents + 1  # and one that warms up
        assert changed["embedded"] == TINY.changed


def test_a_build_that_is_there_is_asked_for_on_the_wire_and_in_the_object_store(measured):
    for known in (TINY.few, TINY.many):
        counted = measured["known"]["among"][str(known)]
        assert counted["rows"] == known + 1
        assert counted[FRESH][TRIPS] > counted[WARM][TRIPS] >= 1
        assert set(counted[WARM][REQUESTS]) <= {"GetObject", "ListObjectsV2"}


def test_every_goal_is_judged(measured):
    assert [goal["figure"] for goal in measured["goals"]] == [goal.figure for goal in GOALS]
    assert all(goal["outcome"] != Outcome.NOT_MEASURED for goal in measured["goals"])


def test_counts_that_differ_either_way_are_not_the_same(measured):
    few, many = str(TINY.few), str(TINY.many)
    for more, fewer in ((few, many), (many, few)):
        among = json.loads(json.dumps(measured["known"]["among"]))
        among[more][WARM] = {TRIPS: 3, REQUESTS: {"GetObject": 2}}
        among[fewer][WARM] = {TRIPS: 2, REQUESTS: {"GetObject": 1, "ListObjectsV2": 1}}
        other = measured | {"known": measured["known"] | {"among": among}}
        outcomes = {verdict.goal.figure: verdict.outcome for verdict in verdicts(other)}
        assert outcomes[f"{WARM}, {TRIPS}"] is Outcome.MISSED
        assert outcomes[f"{WARM}, {REQUESTS}"] is Outcome.MET


def test_time_after_a_change_is_a_share_of_the_same_round(measured):
    whole, changed = ([{**each, "seconds": seconds} for each in measured["changed"][WHOLE]] for seconds in (4.0, 1.0))
    found = figures(measured | {"changed": {**measured["changed"], WHOLE: whole, CHANGED: changed}})
    assert found["time of a build"].middle == 25.0


def test_the_terminal_and_the_page_show_every_goal_and_nothing_of_this_machine(measured):
    terminal = io.StringIO()
    indexes_report.show(Console(width=240, file=terminal), measured)
    shown, section = terminal.getvalue(), indexes_report.section(measured)
    for verdict in verdicts(measured):
        for text in (shown, section):
            assert report.wanted(verdict.goal) in text
            assert verdict.outcome.value in text
    for text in (shown, section):
        assert "local folder" in text
        assert str(Path.cwd()) not in text
        assert servers.HOST not in text
    assert "no full run" in section
    assert section.startswith("\n## Indexes\n")  # where the page's #indexes leads


def test_an_embedder_that_is_counted_is_the_same_embedder():
    drawn = Drawn(8)
    counted = Counted(drawn)
    assert EmbedderId.of(counted) == EmbedderId.of(drawn)
    assert (counted.embed(["a", "b"]) == drawn.embed(["a", "b"])).all()
    assert (counted.embed(["a"])[0] != counted.embed(["b"])[0]).any()
    assert counted.texts == 4


def test_a_smaller_scale_is_not_a_full_run():
    assert FULL.is_full
    assert not QUICK.is_full
    assert not replace(FULL, many=1_000).is_full
    assert FULL.changed == 100
