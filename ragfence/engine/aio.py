"""The engine for coroutines: its blocking calls in threads, safe to be cancelled at any moment, and claims in batches.

Claims that arrive together share one call to the fence store, in one thread. No claim waits for others: one that finds
no call in progress leaves at once, with whatever else the event loop has ready; claims that arrive during a call leave
with the next one. So a single caller pays nothing for it, and many callers share the cost of a call: a thread, a round
trip, a transaction with its flush to disk.

Every claim gets the verdict, and leaves the decision row, that it would have got alone. The same key may occur twice in
a call: the store answers a batch in its order, and grants a key once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, ParamSpec, TypeVar

from ragfence.core.decisions import Claim, Granted, NotReadyVerdict, Verdict
from ragfence.core.layout import TOKEN_BYTES
from ragfence.core.receipts import Receipt
from ragfence.engine.requests import Request
from ragfence.engine.runner import PendingClaim, Runner, WonClaim, refuse
from ragfence.errors import TransientError
from ragfence.stores.fences import ClaimStore

P = ParamSpec("P")
R = TypeVar("R")

CANCELLED: Final = "CANCELLED"
MAX_CLAIMS: Final = 256
"""Claims in one call: with more, the first would wait for the last."""
MAX_CALLS: Final = 1
"""Calls at a time: a second one would compete with the first for the interpreter, and for SQLite's one writer."""


async def run_blocking(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function in a thread, to its end. A caller that is cancelled meanwhile is cancelled after that."""
    run = functools.partial(contextvars.copy_context().run, call, *args, **kwargs)
    # Not `to_thread`: that is a task, which a closing loop cancels before it has started.
    return await shield_until_done(asyncio.get_running_loop().run_in_executor(None, run))


async def shield_until_done(work: asyncio.Future[R]) -> R:
    """Returns the result of `work`. A caller that is cancelled meanwhile is cancelled once `work` is done."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # retrieved, or asyncio logs that it never was
        raise


async def acquire_async(
    runner: Runner, request: Request, wait_ms: int | None, first: PendingClaim | None = None
) -> WonClaim | Receipt:
    """Like `Runner.acquire`, but waiting takes no thread: the owner needs one to seal what others wait for."""
    return await take_steps_async(runner, runner.acquire_steps(request, wait_ms=wait_ms, first=first))


async def take_steps_async(runner: Runner, steps: Iterator[WonClaim | Receipt | float]) -> WonClaim | Receipt:
    """Like `Runner.take_steps`. What is won for a caller that is cancelled is released."""
    while True:
        step = _Step(runner, steps)
        try:
            answer = await run_blocking(step.take)
        except asyncio.CancelledError:
            if won := step.abandon():
                await run_blocking(runner.release, won, CANCELLED)
            raise
        if not isinstance(answer, float):
            return answer
        await asyncio.sleep(answer)


class _Step:
    """One step of a claim. A claim won for a caller that is cancelled is released by the later of the two threads."""

    def __init__(self, runner: Runner, steps: Iterator[WonClaim | Receipt | float]) -> None:
        self._runner = runner
        self._steps = steps
        self._lock = threading.Lock()
        self._abandoned = False
        self._won: WonClaim | None = None

    def take(self) -> WonClaim | Receipt | float:
        answer = next(self._steps)
        with self._lock:
            self._won = answer if isinstance(answer, WonClaim) else None
            too_late = self._won if self._abandoned else None
        if too_late:
            self._runner.release(too_late, CANCELLED)
        return answer

    def abandon(self) -> WonClaim | None:
        """Returns the claim that the step has won; None if it is still running, and will release the claim itself."""
        with self._lock:
            self._abandoned = True
            return self._won


class ClaimBatcher:
    """Claims for any number of coroutines in any number of event loops; those of one loop share calls."""

    def __init__(self, fences: ClaimStore, *, max_claims: int = MAX_CLAIMS, max_calls: int = MAX_CALLS) -> None:
        self._fences = fences
        self._max_claims = max_claims
        self._max_calls = max_calls
        self._queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, ClaimQueue] = weakref.WeakKeyDictionary()

    def submit(self, request: Request) -> QueuedClaim:
        """Queues a claim. The caller either waits for it or discards it."""
        refuse(request)
        loop = asyncio.get_running_loop()
        queue = self._queues.get(loop)
        if queue is None:
            queue = self._queues[loop] = ClaimQueue(self._fences, self._max_claims, self._max_calls)
        claim = QueuedClaim(request, queue, loop.create_future())
        queue.add(claim)
        return claim


class QueuedClaim:
    """One claim, from the queue to its verdict."""

    __slots__ = (
        "claim",
        "ended",
        "error",
        "is_abandoned",
        "is_answered",
        "is_sent",
        "queue",
        "request",
        "sent_at",
        "verdict",
        "wakeup",
    )

    def __init__(self, request: Request, queue: ClaimQueue, wakeup: asyncio.Future[None]) -> None:
        self.request = request
        self.queue = queue
        self.claim: Claim = request.claim(os.urandom(TOKEN_BYTES), 0, 0)
        self.wakeup = wakeup
        self.ended: asyncio.Future[None] | None = None
        """For a caller that was cancelled, and only needs to know that nothing is claimed for it."""
        self.is_sent = self.is_answered = self.is_abandoned = False
        self.sent_at = 0.0
        self.verdict: Verdict | None = None
        self.error: TransientError | None = None

    async def wait(self, timeout_s: float | None = None) -> PendingClaim | None:
        """Returns the verdict, or None if there is none within that time; it may be waited for again.

        Raises what the store raised. If the caller is cancelled meanwhile, what was won is released.
        """
        timer = None
        if timeout_s is not None and not self.wakeup.done():
            timer = self.wakeup.get_loop().call_later(timeout_s, self._time_out)
        try:
            await self.wakeup
        except asyncio.CancelledError:
            await self.queue.cancel(self)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if not self.is_answered:
            return None
        if self.error is not None:
            raise copy.copy(self.error) from self.error  # a copy each: it gets a traceback as it is raised
        # NotReady: a caller that claims alone makes the shard ready first.
        return PendingClaim(
            self.claim, None if isinstance(self.verdict, NotReadyVerdict) else self.verdict, self.sent_at
        )

    def _time_out(self) -> None:
        expired = self.wakeup
        if not expired.done():
            self.wakeup = expired.get_loop().create_future()
            expired.set_result(None)

    def discard(self) -> None:
        """Releases what the claim wins. Does not wait for it; a closing loop waits for its threads."""
        if self.queue.abandon(self) and isinstance(self.verdict, Granted):
            asyncio.get_running_loop().run_in_executor(None, self.queue.release, [self])


class ClaimQueue:
    """The claims of one event loop. Only `_claim` and `release` run in threads."""

    def __init__(self, fences: ClaimStore, max_claims: int, max_calls: int) -> None:
        self._fences = fences
        self._max_claims = max_claims
        self._free_calls = max_calls
        self._pending: deque[QueuedClaim] = deque()
        self._is_scheduled = False
        self._lock = threading.Lock()
        """Between a cancelled caller and the thread with its verdict: exactly one of them releases the claim."""

    def add(self, claim: QueuedClaim) -> None:
        self._pending.append(claim)
        if self._free_calls and not self._is_scheduled:
            # Not at once: claims that the loop has ready in this turn share the call.
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send)

    def abandon(self, claim: QueuedClaim) -> bool:
        """Returns whether the verdict has arrived. If not, the thread that brings it releases what was won."""
        with self._lock:
            claim.is_abandoned = True
            return claim.is_answered

    async def cancel(self, claim: QueuedClaim) -> None:
        """Abandons a claim, and returns once nothing is claimed for it."""
        if self.abandon(claim):
            await run_blocking(self.release, [claim])
        elif claim.is_sent:
            claim.ended = asyncio.get_running_loop().create_future()
            await claim.ended

    def release(self, claims: Sequence[QueuedClaim]) -> None:
        """Releases what was granted. If the store cannot be reached, the leases expire."""
        refs = [
            claim.request.lease_ref(claim.verdict.record.token, epoch=claim.verdict.record.fence.epoch)
            for claim in claims
            if isinstance(claim.verdict, Granted)
        ]
        if refs:
            with contextlib.suppress(TransientError):
                self._fences.release(refs, CANCELLED, refund=True)

    def _send(self) -> None:
        self._is_scheduled = False
        while self._free_calls and self._pending:
            batch: list[QueuedClaim] = []
            while self._pending and len(batch) < self._max_claims:
                claim = self._pending.popleft()
                if not claim.is_abandoned:
                    claim.is_sent = True
                    batch.append(claim)
            if batch:
                self._free_calls -= 1
                call = asyncio.get_running_loop().run_in_executor(None, self._claim, batch)
                call.add_done_callback(functools.partial(self._wake, batch))

    def _claim(self, batch: Sequence[QueuedClaim]) -> None:
        verdicts: Sequence[Verdict | None] = [None] * len(batch)
        error, sent_at = None, time.monotonic()
        try:
            verdicts = self._fences.claim([claim.claim for claim in batch])
        except TransientError as unavailable:
            error = unavailable
        finally:
            # Any other error, such as one record that cannot be read, is found again by the claim that it belongs to:
            # each claims again, alone, and its token gets what it was granted now.
            with self._lock:
                for claim, verdict in zip(batch, verdicts, strict=True):
                    claim.sent_at, claim.verdict, claim.error, claim.is_answered = sent_at, verdict, error, True
                abandoned = [claim for claim in batch if claim.is_abandoned]
        self.release(abandoned)

    def _wake(self, batch: Sequence[QueuedClaim], call: asyncio.Future[None]) -> None:
        if not call.cancelled():
            call.exception()  # retrieved, or asyncio logs that it never was
        self._free_calls += 1
        for claim in batch:
            if not claim.wakeup.done():
                claim.wakeup.set_result(None)
            if claim.ended is not None and not claim.ended.done():
                claim.ended.set_result(None)
        if self._pending and not self._is_scheduled:
            self._send()
