"""Real processes that write to a sink are killed, or frozen past their leases, at every step between intent and delete.

The stores are SQLite and a folder, the sink is a file: all that outlives a process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from ragfence.documents.documents import Documents
from ragfence.documents.sinks.sink import AFTER_INTENT, BEFORE_DELETE, SINK_POINTS, Settled
from ragfence.engine import crash_points
from ragfence.stores.local import LocalObjects
from ragfence.testing.memory_sinks import SqliteSink
from tests.documents.sinking import Step, assert_right, opened, send
from tests.engine.worlds import eventually

ROOT = Path(__file__).resolve().parents[2]
A = "first paragraph\n\nsecond paragraph\n\nthird paragraph"
B = "another paragraph\n\nfirst paragraph\n\nthird paragraph"

BEFORE: list[Step] = [["edited", A, 1], ["back", A, 1], ["views", A, 1]]
BATCH: list[Step] = [["edited", B, 1], ["back", A, 1], ["views", A, 2], ["new", B, 1]]
RETRACTION: list[Step] = [["edited", None, 0]]
POINTS = [*SINK_POINTS, crash_points.AFTER_COMMIT, crash_points.AFTER_SEAL]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    documents = opened(tmp_path)
    send(documents, BEFORE)
    send(documents, [["back", B, 1]])
    return tmp_path


@contextmanager
def writer(folder: Path, action: str, point: str, steps: Sequence[Step]) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "tests.documents.sinking", str(folder), action, point, json.dumps(steps)]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def killed(folder: Path, point: str, steps: Sequence[Step]) -> None:
    with writer(folder, "kill", point, steps) as process:
        said, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, said
    assert len(intents(folder)) == 1


def intents(folder: Path) -> list[str]:
    return [entry.name for entry in LocalObjects(folder / "objects").list("default/sinks/")]


def assert_as_if_nothing_had_happened(folder: Path, documents: Documents, wanted: Sequence[Step]) -> None:
    sink = SqliteSink(folder / "sink.db")
    assert_right(documents, sink)
    assert intents(folder) == []
    found = {(snippet.doc_id, snippet.text, snippet.metadata["views"]) for snippet in sink.held.values()}
    assert found == {(doc_id, part, views) for doc_id, text, views in wanted for part in str(text).split("\n\n")}
    assert documents.settle(full=True) == Settled(0, 0, 0, 0)


@pytest.mark.parametrize("point", POINTS)
def test_after_a_kill_a_settle_alone_puts_the_sink_right(folder: Path, point: str) -> None:
    killed(folder, point, BATCH)
    documents = opened(folder)
    eventually(lambda: documents.settle().left == 0)  # once the lease of the dead has run out
    assert_right(documents, SqliteSink(folder / "sink.db"))
    assert intents(folder) == []
    send(documents, BATCH)
    assert_as_if_nothing_had_happened(folder, documents, BATCH)


@pytest.mark.parametrize("point", SINK_POINTS)
def test_after_a_kill_a_rerun_alone_puts_the_sink_right(folder: Path, point: str) -> None:
    killed(folder, point, BATCH)
    documents = opened(folder)
    send(documents, BATCH)
    assert_as_if_nothing_had_happened(folder, documents, BATCH)


@pytest.mark.parametrize("point", [AFTER_INTENT, BEFORE_DELETE])
def test_a_retraction_that_was_killed_is_done_by_a_rerun(folder: Path, point: str) -> None:
    killed(folder, point, RETRACTION)
    documents = opened(folder)
    send(documents, RETRACTION)
    send(documents, BATCH[1:])
    assert_as_if_nothing_had_happened(folder, documents, BATCH[1:])


@pytest.mark.parametrize("point", POINTS)
def test_a_frozen_writer_puts_right_what_it_does_when_it_wakes(folder: Path, point: str) -> None:
    """While it is frozen all its documents are brought back to what they were: just what it is about to delete."""
    with writer(folder, "freeze", point, BATCH) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert process.poll() is None, process.communicate()
        documents = opened(folder)
        send(documents, [*BEFORE, ["new", A, 1]])
        eventually(lambda: documents.settle().left == 0)
        assert_right(documents, SqliteSink(folder / "sink.db"))
        os.kill(process.pid, signal.SIGCONT)
        said, _ = process.communicate()
        assert (process.returncode, said) == (0, "done\n")
    assert_right(documents, SqliteSink(folder / "sink.db"))
    assert intents(folder) == []
    send(documents, BATCH)
    assert_as_if_nothing_had_happened(folder, documents, BATCH)
