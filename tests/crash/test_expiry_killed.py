"""A purger, a process of its own, is killed before each call it makes to a store, or frozen before its DELETE."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ragfence.core.operations import SEQUENCE_MIN
from ragfence.engine.commits import Commit
from ragfence.errors import Stale
from ragfence.stores.local import LocalObjects
from tests.crash.purge_worker import opened
from tests.engine.ages import DAY_MS, assert_audited, perform, purge_all, ticket

ROOT = Path(__file__).resolve().parents[2]
OVER_MS = 10 * DAY_MS
LATER_MS = OVER_MS + 60_000
"""when the lease of a dead purger has run out"""

PLAIN, LOWER, HIGHEST = ticket("plain"), ticket("ordered", 3, "B"), ticket("ordered", 5, "A")

CALLS = {"claim": 2, "record": 3, "delete": 4, "release": 2}
"""method -> how often a purge of these three keys calls it: HIGHEST has a mark beside its commit"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One key without a sequence, and a source at sequence 5; all of it older than its lifetime, ten days later."""
    with opened(tmp_path, 0) as fence:
        perform(fence, PLAIN, result="first")
        perform(fence, ticket("ordered", 1, "A"), result="first")
        perform(fence, LOWER, result="first")
        perform(fence, HIGHEST)
    assert len(left(tmp_path)) == 4
    return tmp_path


def left(folder: Path) -> list[str]:
    return [entry.name for entry in LocalObjects(folder / "objects").list("default/sealed/")]


@contextmanager
def purger(folder: Path, *strike: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "tests.crash.purge_worker", str(folder), str(OVER_MS), *strike]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def killed(folder: Path, method: str, nth: int) -> None:
    with purger(folder, "kill", method, str(nth)) as process:
        said, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, said


EVERY_CALL = [(method, nth) for method, times in CALLS.items() for nth in range(1, times + 1)]


@pytest.mark.parametrize(("method", "nth"), EVERY_CALL)
def test_after_a_killed_purger_callers_find_whole_commits_or_none(folder: Path, method: str, nth: int) -> None:
    killed(folder, method, nth)
    there = left(folder)
    with opened(folder, LATER_MS) as fence:
        for operation in (PLAIN, HIGHEST):
            stands = any(name.endswith(operation.in_tenant("default").key.hex()) for name in there)
            receipt = perform(fence, operation, result="second")
            assert receipt.result == ("first" if stands else "second")
            assert (receipt.is_new, receipt.flags.attempt) == (not stands, 1)
        with pytest.raises(Stale):
            perform(fence, LOWER)
        assert not [found for found in fence.inspector.fences.scan() if not found.record.ended]
        assert_audited(fence)


@pytest.mark.parametrize(("method", "nth"), EVERY_CALL)
def test_after_a_killed_purger_the_next_one_finishes(folder: Path, method: str, nth: int) -> None:
    killed(folder, method, nth)
    remaining = sequences(folder)
    assert not remaining or max(remaining) == 5, "the highest goes last"
    with opened(folder, LATER_MS) as fence:
        purge_all(fence)
        assert left(folder) == []
        for operation in (PLAIN, LOWER, HIGHEST):
            assert perform(fence, operation, payload="another").is_new
        assert_audited(fence)


def sequences(folder: Path) -> list[int]:
    objects, found = LocalObjects(folder / "objects"), []
    for name in left(folder):
        _, mark, number = name.partition("@")
        sequence = int(number) + SEQUENCE_MIN if mark else Commit.decode(name, objects.get(name) or b"").sequence
        found += [sequence] if sequence is not None else []
    return found


def test_the_calls_before_which_it_is_killed_are_all_it_makes(folder: Path) -> None:
    """Of those that write; or the two tests above would leave some out."""
    with purger(folder) as process:
        done = json.loads(process.communicate()[0])
    assert left(folder) == []
    assert (process.returncode, done["objects"]) == (0, 4)
    assert {method: done["calls"][method] for method in CALLS} == CALLS
    assert not {"seal", "reset_attempts", "forget", "put_new"} & set(done["calls"])


@pytest.mark.parametrize("life", ["first", "second"])
def test_a_frozen_purger_puts_back_what_it_deletes_when_it_wakes(tmp_path: Path, life: str) -> None:
    """`first`: a caller has healed it meanwhile; `second`: another purger has removed it, and it lives again."""
    with opened(tmp_path, 0) as fence:
        perform(fence, PLAIN, result="first")
    with purger(tmp_path, "freeze", "delete", "1") as process, opened(tmp_path, LATER_MS) as fence:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert process.poll() is None, process.communicate()
        if life == "second":
            assert purge_all(fence).objects == 1
        receipt = perform(fence, PLAIN, result="second")
        assert receipt.result == life
        os.kill(process.pid, signal.SIGCONT)
        said, _ = process.communicate()
        assert process.returncode == 0, said
        assert json.loads(said)["objects"] == 0
        assert_audited(fence)
    for file in tmp_path.glob("fences.db*"):  # the fence store forgets everything: only the objects know
        file.unlink()
    with opened(tmp_path, LATER_MS) as again:
        assert perform(again, PLAIN, result="third") == receipt
