"""A lock of the fence store: one holder at a time, renewed while it works, given back when it ends."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest

from ragfence.engine import lock as store_lock
from ragfence.engine.lock import held_lock
from ragfence.errors import NotReady
from ragfence.stores.sqlite import SqliteFences
from ragfence.testing import MemoryFences


def test_one_holder_at_a_time() -> None:
    fences, inside, most = MemoryFences(), [0], [0]

    def work() -> None:
        for _ in range(5):
            with held_lock(fences, "remove/rf-a"):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.002)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_whoever_waits_too_long_is_told_so() -> None:
    fences = MemoryFences()
    refused = pytest.raises(NotReady, match="another process has held the lock 'a'")
    with held_lock(fences, "a"), refused, held_lock(fences, "a", wait_s=0.05):
        raise AssertionError("two holders")


def test_it_is_renewed_while_the_block_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store_lock, "LOCK_MS", 600)
    with contextlib.closing(SqliteFences(tmp_path / "fences.db")) as fences:
        with held_lock(fences, "a"):
            time.sleep(1.5)
            assert not fences.lock("a", "other", 1_000)
        assert fences.lock("a", "other", 1_000)


def test_it_is_given_back_when_the_block_raises() -> None:
    fences = MemoryFences()
    with pytest.raises(KeyError), held_lock(fences, "a"):
        raise KeyError
    assert fences.lock("a", "other", 1_000)
