"""The judge of the drills: it must find what a store loses, and count what callers saw."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.chaos.attacks import Outage, disturb
from tests.chaos.evidence import Evidence
from tests.chaos.running import outcomes
from tests.chaos.scenarios import Outcome
from tests.chaos.sites import VALKEY, VALKEY_FOLDER
from tests.chaos.work import Job, Load, Task
from tests.drills import report
from tests.drills.drills import Drill, Result, all_drills
from tests.drills.faults import Callers, server_down


def test_what_a_store_loses_is_found_by_whoever_judges_it() -> None:
    """A flushed Redis without objects forgets receipts: judged like one with objects, it must not pass."""
    flushed = disturb("flush", times=2, keyed=20)
    drills = [Drill("flush", f"judged: {judged}", VALKEY, flushed, judged=judged) for judged in (True, False)]
    judged, counted = _run(drills)
    assert not judged.ok
    assert judged.outcome.evidence.double > 0
    assert judged.outcome.evidence.lost > 0
    assert "different receipts" in "".join(judged.outcome.evidence.problems)
    assert counted.ok
    assert counted.outcome.evidence.lost > 0
    assert counted.outcome.evidence.redone > 0


def test_effects_without_a_store_are_journaled_and_accounted_for() -> None:
    opened = Callers(count=3, moves=False, policy={"on_store_error": "open"}, journals=True)
    for seconds in (1.5, 6.0, 20.0):  # on a busy machine nobody may come by with a new key in a short while
        drill = Drill("down", "open", VALKEY_FOLDER, server_down(seconds, times=1, callers=opened), accounted=True)
        (result,) = _run([drill])
        found = result.outcome.evidence
        if found.flags["journaled"]:
            break
    assert result.ok, found.problems
    assert result.faults == 1
    # A key that is asked for again while the store is down is answered from the journal, without a new entry.
    assert 0 < found.journal["sealed"] + found.journal["doubled"] <= found.flags["journaled"]
    assert found.journal["left"] == 0
    assert result.answered_meanwhile > 0


def _run(drills: list[Drill]) -> list[Result]:
    ended = {
        outcome.scenario.name: outcome for outcome in outcomes([drill.scenario for drill in drills], seed=1, jobs=2)
    }
    return [Result(drill, ended[drill.name]) for drill in drills]


def test_everybody_under_load_comes_by_the_same_tasks_in_an_order_of_their_own(tmp_path: Path) -> None:
    first, again, other = (
        list(itertools.islice(Load(seed, str(tmp_path / "end")).tasks(), 33 + 41 * 2)) for seed in ("1", "1", "2")
    )
    assert first == again
    assert first != other
    assert set(first) == set(other)
    for tasks in (first, other):
        for source in {task.source for task in tasks}:
            revisions = list(dict.fromkeys(task.sequence for task in tasks if task.source == source))
            assert revisions == sorted(revisions, key=lambda sequence: sequence or 0)
    assert {Task.named(task.name) for task in first} == set(first)


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job = Job(
        store="s",
        objects=None,
        tenant="t",
        tasks=(Task("a"), Task("b", 2)),
        effects="e",
        answers="a",
        lease_s=1.0,
        lock_ms=1,
        stream=Load("1", "end", shards=(1, 2)),
        policy={"on_store_error": "open"},
        journal="j",
    )
    job.save(tmp_path / "job.json")
    assert Job.load(tmp_path / "job.json") == job


def test_short_drills_are_the_long_ones_with_fewer_faults() -> None:
    def kinds(drills: list[Drill]) -> list[tuple[str, str, bool, bool]]:
        return [(drill.title, drill.backend, drill.judged, drill.accounted) for drill in drills]

    assert kinds(all_drills(short=True)) == kinds(all_drills(short=False))
    assert len({drill.name for drill in all_drills(short=False)}) == len(all_drills(short=False))


def test_the_table_replaces_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "drills.md"
    page.write_text(f"# Before\n\n{report.BEGIN}\nold\n{report.END}\n\nAfter\n")
    results = [_result(spans=[(0.0, 1.0), (2.0, 6.5)], outages=(Outage("kill", 5.0, 7.0),))]
    report.write_docs(page, results, seed=7)
    once = page.read_text()
    report.write_docs(page, results, seed=7)
    assert page.read_text() == once
    assert once.startswith(f"# Before\n\n{report.BEGIN}\n")
    assert once.endswith(f"{report.END}\n\nAfter\n")
    assert "| title | variant | 1 | 3 | 2 | 1 | 0 | 0 | 0 | 0 | 4.5 s | ok |" in once
    assert "old" not in once


def test_a_page_without_a_place_for_the_table_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "drills.md"
    page.write_text("# Something else\n")
    with pytest.raises(ValueError, match="no place"):
        report.write_docs(page, [], seed=1)
    assert page.read_text() == "# Something else\n"


def test_the_json_has_every_column_of_the_table(tmp_path: Path) -> None:
    report.write_json(tmp_path / "out" / "drills.json", [_result(spans=[(0.0, 1.5)], outages=())], seed=3, short=True)
    (row,) = json.loads((tmp_path / "out" / "drills.json").read_text())["drills"]
    assert {"operations", "answered", "double", "lost", "stuck", "redone", "faults"} <= set(row)
    assert (row["answered"], row["longest_outage_s"], row["ok"]) == (1, 1.5, True)


def _result(*, spans: list[tuple[float, float]], outages: tuple[Outage, ...]) -> Result:
    drill = Drill("title", "variant", VALKEY_FOLDER, server_down(1.0, times=1))
    return Result(drill, Outcome(drill.scenario, Evidence(tasks=3, spans=spans), 1.0, outages))
