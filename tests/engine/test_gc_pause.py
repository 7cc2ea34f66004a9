"""The garbage collector is held off for a batch, never for longer, and never against somebody's will."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from ragfence.engine.gc_pause import gc_paused


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.enable()
    yield
    gc.enable() if was_on else gc.disable()


def test_it_is_on_again_after_a_batch_that_raised() -> None:
    def batch() -> None:
        with gc_paused():
            assert not gc.isenabled()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        batch()
    assert gc.isenabled()


def test_what_is_off_stays_off() -> None:
    gc.disable()
    with gc_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_a_batch_that_began_later_cannot_hold_it_off_for_longer() -> None:
    began, ended = threading.Event(), threading.Event()

    def later() -> None:
        with gc_paused():
            began.set()
            ended.wait(10)

    thread = threading.Thread(target=later)
    with gc_paused():
        thread.start()
        assert began.wait(10)
    assert gc.isenabled()
    ended.set()
    thread.join()
    assert gc.isenabled()


def test_the_child_of_a_fork_collects() -> None:
    with gc_paused():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not gc.isenabled()
