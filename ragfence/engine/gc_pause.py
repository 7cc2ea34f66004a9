"""Python's cyclic garbage collector, held off while a batch is worked on.

A batch makes some dozens of objects for each of a thousand documents, none of them in a cycle. Again and again they
make the collector walk through everything that the process holds, which costs a batch a tenth to a quarter of its time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_held = False


@contextlib.contextmanager
def held_off() -> Iterator[None]:
    """Nothing, if the collector is off already: somebody else's setting is left alone.

    Of batches that overlap only the first holds it off, until it ends: so it runs at least once a batch, however many
    threads there are.
    """
    global _held
    with _lock:
        mine = not _held and gc.isenabled()
        if mine:
            _held = True
            gc.disable()
    try:
        yield
    finally:
        if mine:
            with _lock:
                _held = False
                gc.enable()


def _after_fork() -> None:
    """The thread that held it off does not exist in the child."""
    global _lock, _held
    _lock = threading.Lock()
    if _held:
        _held = False
        gc.enable()


os.register_at_fork(after_in_child=_after_fork)
