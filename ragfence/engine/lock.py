"""Locks. `fence.lock(name)` is for callers: a lease with a fence number, like that of any claim.

`held_lock` is for ragfence's own upkeep. An epoch ends every lease; the work under this lock starts epochs itself, and
must not lose the lock by that. It keeps several processes from doing the same work, most of the time, and fences
nothing: a process that is frozen past the expiry continues alongside the next holder, and a fence store that is emptied
loses the lock.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Final

from ragfence.core.layout import FINGERPRINT_BYTES
from ragfence.core.operations import Operation, checked_text
from ragfence.core.policy import KindRules
from ragfence.core.receipts import Receipt
from ragfence.engine.aio import run_blocking, take_steps_async
from ragfence.engine.leases import Lease
from ragfence.engine.refusals import code_of
from ragfence.engine.requests import LOCK_ACTION, LOCK_KIND, Request
from ragfence.engine.runner import Runner, WonClaim
from ragfence.errors import LeaseLost, NotReady, RagfenceError, ValidationError
from ragfence.stores.fences import EpochStore

MIN_TTL_S: Final = 0.1
MAX_TTL_S: Final = 24 * 3600.0
MARGIN: Final = 0.1
"""of `timeout_s`: a lock has expired that long before its holder is killed"""
KEPT_MS: Final = 24 * 3600 * 1000
"""How long the record of a lock stays whose holder died, unless somebody else takes the lock."""
NO_PAYLOAD: Final = bytes(FINGERPRINT_BYTES)


def lock_operation(name: str) -> Operation:
    """What stands for a lock in decision rows and on the command line."""
    name = checked_text("the name of a lock", name)
    _refuse_unless(bool(name), "a lock needs a name")
    return Operation(kind=LOCK_KIND, source_id=name, action=LOCK_ACTION)


def lock_rules(usual: KindRules, ttl_s: float, timeout_s: float | None) -> KindRules:
    """The rules of a lock with this ttl.

    Args:
        usual: Those of the kind `lock` in the policy.
        ttl_s: How long the lock outlives its last renewal.
        timeout_s: When the platform kills the holder. Nothing is renewed past it.
    """
    in_range = _is_number(ttl_s) and MIN_TTL_S <= ttl_s <= MAX_TTL_S
    _refuse_unless(in_range, f"ttl_s must be a number from {MIN_TTL_S:g} to {MAX_TTL_S:g}, not {ttl_s!r}")
    lease_ms = round(ttl_s * 1000)
    runtime_ms = max(usual.max_runtime_ms, lease_ms)
    if timeout_s is not None:
        in_range = _is_number(timeout_s) and 0 < timeout_s < math.inf
        _refuse_unless(in_range, f"timeout_s must be a number above 0, not {timeout_s!r}")
        until_s = timeout_s * (1 - MARGIN)
        if ttl_s > until_s:
            raise ValidationError(
                f"ttl_s={ttl_s:g} is not below timeout_s={timeout_s:g} by a margin of {MARGIN:.0%}: the lock would"
                " outlive its holder",
                hint=f"use ttl_s={until_s:g} or less",
            )
        runtime_ms = round((until_s - ttl_s) * 1000)
    return replace(usual, lease_ms=lease_ms, pending_ttl_ms=lease_ms + KEPT_MS, max_runtime_ms=runtime_ms)


def wait_ms_of(wait_s: float) -> int:
    in_range = _is_number(wait_s) and 0 <= wait_s < math.inf
    _refuse_unless(in_range, f"wait_s must be a number, 0 or more, not {wait_s!r}")
    return round(wait_s * 1000)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse_unless(valid: bool, message: str) -> None:
    if not valid:
        raise ValidationError(message)


class Lock:
    """A lock of `fence.lock`, for `with` and `async with`. It may be used again, but not while it is held.

    Leaving the block releases it. If it was lost meanwhile, that raises `LeaseLost`, unless the block raised already.
    """

    def __init__(self, runner: Runner, request: Request, *, wait_ms: int) -> None:
        self._runner = runner
        self._request = request
        self._wait_ms = wait_ms
        self._won: WonClaim | None = None
        self._is_entered = False

    @property
    def name(self) -> str:
        return self._request.operation.source_id

    @property
    def key(self) -> str:
        """For `ragfence explain` and `ragfence release`."""
        return self._request.key_text

    def __repr__(self) -> str:
        return f"<Lock {self.name!r}, {'held' if self._won else 'not held'}>"

    def __enter__(self) -> Lease:
        with self._entering():
            return self._entered(self._runner.take_steps(self._steps()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._leave(error) and error is None:
            raise self._lost()

    async def __aenter__(self) -> Lease:
        with self._entering():
            return self._entered(await take_steps_async(self._runner, self._steps()))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # GeneratorExit: the loop has ended, and nothing can be awaited.
        held = self._leave(error) if isinstance(error, GeneratorExit) else await run_blocking(self._leave, error)
        if not held and error is None:
            raise self._lost()

    @contextlib.contextmanager
    def _entering(self) -> Iterator[None]:
        if self._is_entered:
            raise ValidationError(
                f"this lock on {self.name!r} is in use: it would wait for itself",
                hint="make a lock of its own for each thread or task",
            )
        self._is_entered = True
        try:
            yield
        except BaseException:
            self._is_entered = False
            raise

    def _steps(self) -> Iterator[WonClaim | Receipt | float]:
        return self._runner.lock_steps(self._request, self._wait_ms)

    def _entered(self, won: WonClaim | Receipt) -> Lease:
        assert isinstance(won, WonClaim)  # a lock has no receipt
        self._won = won
        return won.lease

    def _leave(self, error: BaseException | None) -> bool:
        """Releases the lock. False: it was somebody else's by then."""
        won, self._won, self._is_entered = self._won, None, False
        assert won is not None
        return self._runner.release(won, "RELEASED" if error is None else code_of(error))

    def _lost(self) -> LeaseLost:
        return LeaseLost(f"the lock {self.name!r} was lost before its block ended", key=self.key)


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
