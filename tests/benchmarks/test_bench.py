"""The benchmark measures what it says it does. Never how fast anything is: that is `make bench`'s to say."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from rich.console import Console

from tests import servers
from tests.bench import docs, report, run, trips
from tests.bench.contention import percentile
from tests.bench.goals import GOALS, Goal, Outcome, verdicts
from tests.bench.peers.process import python_of
from tests.bench.rounds import Spread, Subject, clocked, in_turn, interleave, ratios
from tests.bench.scale import FULL, QUICK, Scale

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__)]

TINY = Scale(
    rounds=1,
    replays=5,
    news=5,
    batches=1,
    batch=20,
    few=10,
    many=50,
    records=50,
    processes=2,
    keys=10,
    contests=1,
    object_stores=("local folder",),
    object_news=2,
)
SUBJECTS = {
    "raw GET",
    "replay",
    "new",
    "pipelined SET NX",
    "bulk replay",
    "bulk replay, claims built too",
    "bulk new",
    "replay among 10",
    "replay among 50",
}
WITH_OBJECTS = {"raw GET", "replay, Redis alone", "new, Redis alone", "replay, local folder", "new, local folder"}
CONTEST = {"claims", "waited", "waiting_share", "conflicts", "answer_p50_ms", "answer_p95_ms", "answer_longest_ms"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny run without the peer, as it comes back from its file."""
    path = tmp_path_factory.mktemp("bench") / "out" / "bench.json"
    run.write(path, run.measure(TINY, peer=None))
    return json.loads(path.read_text())


def test_a_run_has_every_subject_in_every_round(measured):
    assert set(measured["rates"]["redis"]) == SUBJECTS
    assert set(measured["rates"]["objects"]) == WITH_OBJECTS
    for group in measured["rates"].values():
        assert all(len(rates) == TINY.rounds and min(rates) > 0 for rates in group.values())


def test_a_run_says_what_it_was_measured_on_and_how_much_was_measured(measured):
    assert {"cores", "python", "redis-py", "hiredis", "server", "load_before", "load_after"} <= set(measured["machine"])
    assert measured["scale"]["many"] == TINY.many
    assert measured["scale"]["full"] is False
    assert measured["peer"] is None


def test_a_run_judges_every_goal_and_those_beside_the_peer_are_not_measured_without_it(measured):
    outcomes = {goal["figure"]: goal["outcome"] for goal in measured["goals"]}
    assert [goal["figure"] for goal in measured["goals"]] == [goal.figure for goal in GOALS]
    for figure, outcome in outcomes.items():
        # Among so few keys nobody may have had to wait, and then nobody was answered.
        if figure != "answered":
            assert (outcome == Outcome.NOT_MEASURED) == ("Powertools" in figure), figure


def test_a_run_counts_trips_records_and_contests(measured):
    assert set(measured["trips"]) == {"new", "replay", "bulk new", "bulk replay"}
    assert all(trips >= 1 for trips in measured["trips"].values())
    assert measured["memory"]["ragfence"]["record_bytes"] > len("r" * 36)
    for order in ("shuffled", "lockstep"):
        contest = measured["contention"][order]
        assert set(contest) >= CONTEST
        assert contest["claims"] == TINY.processes * TINY.keys
        assert contest["conflicts"] == 0


def test_the_terminal_and_the_page_show_every_goal_and_nothing_of_this_machine(measured):
    terminal = io.StringIO()
    report.show(Console(width=200, file=terminal), measured)
    shown, page = terminal.getvalue(), docs.page(measured)
    for verdict in verdicts(measured):
        assert report.wanted(verdict.goal) in page
        assert verdict.outcome.value in shown
    assert "local folder" in page
    assert "no full run" in page
    assert str(Path.cwd()) not in page
    assert servers.HOST not in page


def test_goals_are_judged_by_the_middle():
    least = Goal(letter="a", what="", figure="", at_least=2)
    most = Goal(letter="a", what="", figure="", at_most=2)
    below = Goal(letter="a", what="", figure="", below=2)
    two, less = Spread.of([1.0, 2.0, 9.0]), Spread.of([1.0, 1.9, 9.0])
    assert [goal.judge(two) for goal in (least, most, below)] == [Outcome.MET, Outcome.MET, Outcome.MISSED]
    assert [goal.judge(less) for goal in (least, most, below)] == [Outcome.MISSED, Outcome.MET, Outcome.MET]
    assert least.judge(None) is Outcome.NOT_MEASURED


def test_a_ratio_is_taken_round_by_round():
    assert ratios([10.0, 30.0], [5.0, 10.0]) == [2.0, 3.0]
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Spread(3.0, 1.0, 2.0, 4.0, 5.0)
    assert percentile(list(range(1, 101)), 0.95) == 95
    assert percentile([], 0.95) is None


def test_every_round_has_every_subject_once_and_neighbours_change():
    subjects = [Subject(str(number), 1, lambda _: 1.0) for number in range(5)]
    rounds = [[subject.name for subject in in_turn(subjects, number)] for number in range(4)]
    assert all(sorted(names) == list("01234") for names in rounds)
    assert len({names[(names.index("0") + 1) % 5] for names in rounds}) > 1


def test_only_the_work_is_on_the_clock_and_the_warm_up_does_not_count(monkeypatch):
    now = 0.0

    def pass_time(seconds: float) -> float:
        nonlocal now
        now += seconds
        return seconds

    monkeypatch.setattr("time.perf_counter", lambda: now)
    seconds = clocked(
        lambda ready: pass_time(ready),
        prepare=lambda number: pass_time(100.0) and 2.0 + number,
        check=lambda _: pass_time(100.0) and None,  # type: ignore[arg-type]
    )
    assert interleave([Subject("one", 6, seconds)], 2) == {"one": [3.0, 2.0]}


def test_a_trip_is_a_turn_on_the_wire_however_many_commands_it_holds(valkey_server):
    with (
        trips.relay(valkey_server.host, valkey_server.port) as turns,
        redis.Redis.from_url(turns.url) as client,
    ):
        client.ping()

        def pipelined() -> None:
            with client.pipeline(transaction=False) as pipe:
                for _ in range(10):
                    pipe.ping()
                pipe.execute()

        def one_by_one() -> None:
            for _ in range(10):
                client.ping()

        assert turns.per_call(pipelined, 1) == 1
        assert turns.per_call(one_by_one, 10) == 1
        assert turns.per_call(lambda: client.eval("return redis.call('PING')", 0), 1) == 1


def test_a_missing_environment_means_no_peer(tmp_path):
    assert python_of(tmp_path) is None
    assert FULL.is_full
    assert not QUICK.is_full
    assert not replace(FULL, rounds=1).is_full
