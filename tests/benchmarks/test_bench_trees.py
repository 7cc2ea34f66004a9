"""The comparison of two trees: what its figures mean, and that its worker can run every workload of this tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import servers
from tests.bench.trees import ROOT, Turn, Worker, merged, ratios, summary
from tests.bench.trees_report import section

TURN: Turn = {
    "old": {"items": 10, "cpu_s": 1.0, "server_cpu_s": 1.0},
    "new": {"items": 20, "cpu_s": 3.0, "server_cpu_s": 1.0},
}


def test_a_ratio_is_the_cpu_time_of_one_item_new_over_old() -> None:
    assert ratios([TURN]) == [pytest.approx(1.5)]
    assert ratios([TURN], with_server=True) == [pytest.approx(1.0)]
    assert summary([TURN, TURN])["ratio"] == pytest.approx(1.5)


def test_a_short_run_replaces_its_own_workloads_of_the_same_trees() -> None:
    first = merged(None, "a", "b", {"x": [TURN], "y": [TURN]}, {"z": "new: boom"})
    again = merged(first, "a", "b", {"z": [TURN], "x": [TURN, TURN]}, {"y": "old: boom"})
    assert {name: len(turns) for name, turns in again["turns"].items()} == {"x": 2, "z": 1}
    assert again["figures"].keys() == again["turns"].keys()
    assert again["failed"] == {"y": "old: boom"}
    assert merged(first, "a", "c", {"z": [TURN]}, {})["turns"].keys() == {"z"}


def test_the_section_judges_each_workload_by_both_ratios() -> None:
    """Of TURN the process uses half as much again, and with the server the same."""
    within: Turn = TURN | {"new": {"items": 20, "cpu_s": 2.0, "server_cpu_s": 1.0}}
    lines = section(merged(None, "abc", "def", {"slow": [TURN], "equal": [within]}, {})).splitlines()
    (slow,) = [line for line in lines if line.startswith("| slow")]
    (equal,) = [line for line in lines if line.startswith("| equal")]
    assert "| 1.50 |" in slow
    assert "MISSED" in slow
    assert "MET" in equal


def test_a_batch_reports_its_items_and_its_cpu_time(valkey_server: servers.RedisServer, tmp_path: Path) -> None:
    worker = Worker(ROOT, tmp_path / "new", valkey_server.url, seed=1)
    try:
        reply = worker.run("once replay, Valkey")
        assert reply["items"] == 1000
        assert reply["cpu_s"] > 0
    finally:
        worker.close()


@pytest.mark.slow
def test_every_workload_runs_in_this_tree(valkey_server: servers.RedisServer, tmp_path: Path) -> None:
    worker = Worker(ROOT, tmp_path / "new", valkey_server.url, seed=1)
    try:
        assert [name for name in worker.workloads if "error" in worker.run(name)] == []
    finally:
        worker.close()
