"""A lock in the fence store, held for as long as a block runs.

It keeps several processes from doing the same work, most of the time. It does not fence: a process that is frozen past
the expiry continues alongside the next holder, and a fence store that is emptied loses the lock.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator

from ragfence.errors import NotReady, RagfenceError
from ragfence.stores.fences import EpochStore

LOCK_MS = 60_000
WAIT_S = 1.5 * LOCK_MS / 1000
"""Longer than the lock of a process that was killed lasts."""


@contextlib.contextmanager
def held_lock(fences: EpochStore, name: str, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Waits for the lock, and renews it in a thread until the block ends."""
    token = os.urandom(8).hex()
    give_up_at = time.monotonic() + wait_s
    while not fences.lock(name, token, LOCK_MS):
        if time.monotonic() >= give_up_at:
            raise NotReady(
                f"another process has held the lock {name!r} for {wait_s:.0f} s",
                hint="try again when it has finished; the lock of a process that died expires within a minute",
            )
        time.sleep(random.uniform(0.02, 0.1))
    ended = threading.Event()
    keeper = threading.Thread(target=_renew, args=(fences, name, token, ended), name="ragfence-lock", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join()
        with contextlib.suppress(RagfenceError):  # it expires
            fences.unlock(name, token)


def _renew(fences: EpochStore, name: str, token: str, ended: threading.Event) -> None:
    while not ended.wait(LOCK_MS / 3000):
        with contextlib.suppress(RagfenceError):  # the next try may reach the store again
            fences.lock(name, token, LOCK_MS)
