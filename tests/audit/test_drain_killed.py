"""A drainer, a process of its own, is killed at every step: no row is lost, and none is told twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ragfence.audit.drain import DRAIN_POINTS, LOCK_MS
from ragfence.audit.ledger import Ledger, RowQuery
from ragfence.core.decision_rows import Row
from ragfence.stores.local import LocalObjects
from ragfence.testing.contracts.fence_calls import start_epoch
from tests.audit.drainer import audit_of, fences_at
from tests.audit.made import DAY_MS, row
from tests.servers import RedisServer

ROOT = Path(__file__).resolve().parents[2]

REACHED = {
    "drain_read": 3,
    "drain_committed": 3,
    "drain_dropped": 3,
    "compact_read": 2,
    "compact_committed": 2,
    "put_new": 8,
    "drop_rows": 3,
    "delete": 2,
}
"""how often a drain of `made` comes by: 60 rows over two days that are over, in batches of 25"""
EVERY_STEP = [
    pytest.param(point, nth, marks=() if nth == 1 else pytest.mark.slow)
    for point, times in REACHED.items()
    for nth in {1, times}
]


def made(now_ms: int) -> list[Row]:
    days = [now_ms // DAY_MS * DAY_MS - back * DAY_MS for back in (3, 2)]
    return [row(n, ts_ms=days[n % 2] + n) for n in range(60)]


def killed(store: str, folder: Path, point: str, nth: int) -> str:
    argv = [sys.executable, "-m", "tests.audit.drainer", store, str(folder), "0", point, str(nth)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == (-signal.SIGKILL if nth else 0), done.stderr
    return done.stdout


def check_nothing_is_lost_or_doubled(store: str, folder: Path, rows: list[Row]) -> None:
    objects = LocalObjects(folder / "objects")
    fences = fences_at(store, folder, LOCK_MS)  # the lock of the dead drainer has run out
    audit = audit_of(fences, objects)
    everything = sorted(rows, key=lambda each: each.ts_ms)
    assert list(audit.rows()) == everything, "as the dead drainer left it"
    if store != "sqlite":
        audit._fences.unlock("drain", _holder(fences))
    assert not audit.drain().busy
    assert list(fences.rows()) == []
    assert list(audit.rows()) == everything
    ledger = Ledger(fences.tenant, objects)
    stored = [
        row_id
        for part in ledger.parts()
        for row_id in ledger.read(part, RowQuery(), ["row_id"]).column("row_id").to_pylist()
    ]
    assert sorted(stored) == sorted(each.row_id for each in rows), "and compacted: each row stands once"
    fences.close()


def _holder(fences: object) -> str:
    found = fences._link.client.get(fences._names.lock("drain"))  # type: ignore[attr-defined]
    return found.decode() if found else ""


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    fences = fences_at("sqlite", tmp_path, 0)
    start_epoch(fences, 1)
    written = made(time.time_ns() // 1_000_000)
    for each in written:
        fences.record([each])
    fences.close()
    return written


@pytest.mark.parametrize(("point", "nth"), EVERY_STEP)
def test_a_drainer_of_sqlite_that_is_killed_loses_and_doubles_nothing(
    tmp_path: Path, rows: list[Row], point: str, nth: int
) -> None:
    killed("sqlite", tmp_path, point, nth)
    check_nothing_is_lost_or_doubled("sqlite", tmp_path, rows)


def test_the_steps_at_which_it_is_killed_are_all_there_are(tmp_path: Path, rows: list[Row]) -> None:
    told = json.loads(killed("sqlite", tmp_path, "", 0))
    assert {point: told["reached"][point] for point in REACHED} == REACHED
    assert set(DRAIN_POINTS) <= set(REACHED)
    check_nothing_is_lost_or_doubled("sqlite", tmp_path, rows)


@pytest.mark.parametrize(("point", "nth"), [("drop_rows", 1), ("drain_dropped", 1), ("delete", 1)])
def test_a_drainer_of_redis_that_is_killed_loses_and_doubles_nothing(
    tmp_path: Path, valkey_server: RedisServer, point: str, nth: int
) -> None:
    folder = tmp_path / f"killed-{point}"
    folder.mkdir()
    fences = fences_at(valkey_server.url, folder, 0)
    start_epoch(fences, 1)
    rows = made(time.time_ns() // 1_000_000)
    for each in rows:
        fences.record([each])
    fences.close()
    killed(valkey_server.url, folder, point, nth)
    check_nothing_is_lost_or_doubled(valkey_server.url, folder, rows)
