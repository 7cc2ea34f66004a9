"""Claims that arrive together are asked together: one call to the fence store, in one thread, for all of them.

Where the store can be asked by the event loop itself (`SoonFences`) there is no thread in between.

Nobody waits for company. A claim that finds no call under way leaves at once, with whatever else the event loop has
ready; what arrives during a call leaves with the next one. So a single caller pays nothing for it, and many share what
a call costs: a thread, a round trip, a transaction with its flush to the disk.

Every claim gets the verdict, and leaves the decision row, that it would have got alone. The same key may stand twice in
a call: the store answers a batch in its order, and grants a key once.

The engine's blocking calls, for coroutines: in threads, and safe to be cancelled at any moment.
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
from typing import ParamSpec, TypeVar

from ragfence.core.decisions import Claim, Granted, NotReadyVerdict, Verdict
from ragfence.core.receipts import Receipt
from ragfence.core.records import TOKEN_BYTES
from ragfence.engine.requests import Request
from ragfence.engine.runner import PendingClaim, Runner, WonClaim, refuse
from ragfence.errors import TransientError
from ragfence.stores.fences import FenceStore, SoonFences

P = ParamSpec("P")
R = TypeVar("R")

CANCELLED = "CANCELLED"


async def to_the_end(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """In a thread. A caller who is cancelled meanwhile is cancelled once the call has ended."""
    run = functools.partial(contextvars.copy_context().run, call, *args, **kwargs)
    # Not `to_thread`: that is a task, which a closing loop cancels before it has begun.
    return await despite_cancelling(asyncio.get_running_loop().run_in_executor(None, run))


async def despite_cancelling(work: asyncio.Future[R]) -> R:
    """Its result. A caller who is cancelled meanwhile is cancelled once it has ended."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # looked at, or asyncio complains that nobody did
        raise


async def acquire_async(
    runner: Runner, request: Request, wait_ms: int | None, first: PendingClaim | None = None
) -> WonClaim | Receipt:
    """As `Runner.acquire`, but who waits needs no thread: the owner needs one to seal what they wait for."""
    steps = runner.acquiring(request, wait_ms=wait_ms, first=first)
    while True:
        step = _Step(runner, steps)
        try:
            answer = await to_the_end(step.take)
        except asyncio.CancelledError:
            if won := step.abandon():
                await to_the_end(runner.give_back, won, CANCELLED)
            raise
        if not isinstance(answer, float):
            return answer
        await asyncio.sleep(answer)


class _Step:
    """One step of a claim. What it wins for a caller who is gone is given back, by whichever of the two is later."""

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
            self._runner.give_back(too_late, CANCELLED)
        return answer

    def abandon(self) -> WonClaim | None:
        """What the step has won; None when it is still under way and will see for itself."""
        with self._lock:
            self._abandoned = True
            return self._won


MOST = 256
"""claims in one call: of more, the first would wait for the last"""
CALLS = 1
"""at the same time: a second one would take turns with the first, for the interpreter and for SQLite's one writer"""


class ClaimBatcher:
    """For any number of coroutines in any number of event loops; those of one loop are asked together."""

    def __init__(self, fences: FenceStore, *, most: int = MOST, calls: int = CALLS) -> None:
        self._fences = fences
        self._most = most
        self._calls = calls
        self._queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, ClaimQueue] = weakref.WeakKeyDictionary()

    def ask(self, request: Request) -> QueuedClaim:
        """Sends the claim on its way. Whoever asks either waits for it or drops it."""
        refuse(request)
        loop = asyncio.get_running_loop()
        queue = self._queues.get(loop)
        if queue is None:
            queue = self._queues[loop] = ClaimQueue(self._fences, self._most, self._calls)
        asking = QueuedClaim(request, queue, loop.create_future())
        queue.add(asking, loop)
        return asking


class QueuedClaim:
    """One claim on its way."""

    __slots__ = (
        "abandoned",
        "answered",
        "asked_at",
        "back",
        "claim",
        "ended",
        "error",
        "left",
        "queue",
        "request",
        "verdict",
    )

    def __init__(self, request: Request, queue: ClaimQueue, answered: asyncio.Future[None]) -> None:
        self.request = request
        self.queue = queue
        self.claim: Claim = request.claim(os.urandom(TOKEN_BYTES), 0, 0)
        self.answered = answered
        self.ended: asyncio.Future[None] | None = None
        """for a caller who is gone and only wants to know that nothing is held for him"""
        self.left = self.back = self.abandoned = False
        self.asked_at = 0.0
        self.verdict: Verdict | None = None
        self.error: TransientError | None = None

    async def wait(self, timeout_s: float | None = None) -> PendingClaim | None:
        """None: not within that time; it may be waited for again. Raises what the store raised.

        Whoever is cancelled meanwhile has claimed nothing: what was won for him is given back.
        """
        timer = None
        if timeout_s is not None and not self.answered.done():
            timer = self.answered.get_loop().call_later(timeout_s, self._wake)
        try:
            await self.answered
        except asyncio.CancelledError:
            await self.queue.give_up(self)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if not self.back:
            return None
        if self.error is not None:
            raise copy.copy(self.error) from self.error  # each his own: it gathers a traceback as it rises
        # NotReady: whoever asks alone makes it ready first.
        return PendingClaim(
            self.claim, None if isinstance(self.verdict, NotReadyVerdict) else self.verdict, self.asked_at
        )

    def _wake(self) -> None:
        waiting = self.answered
        if not waiting.done():
            self.answered = waiting.get_loop().create_future()
            waiting.set_result(None)

    def drop(self) -> None:
        """Nobody will act upon the verdict. Does not wait; a closing loop waits for its threads."""
        if self.queue.abandon(self) and isinstance(self.verdict, Granted):
            asyncio.get_running_loop().run_in_executor(None, self.queue.give_back, [self])


class ClaimQueue:
    """Of one event loop. Only `_call` and `give_back` run in threads."""

    def __init__(self, fences: FenceStore, most: int, calls: int) -> None:
        self._fences = fences
        self._soon = fences if isinstance(fences, SoonFences) else None
        self._most = most
        self._free = calls
        self._waiting: deque[QueuedClaim] = deque()
        self._leaving = False
        self._lock = threading.Lock()
        """between a caller who gives up and the thread that brings his verdict: exactly one of them gives it back"""

    def add(self, asking: QueuedClaim, loop: asyncio.AbstractEventLoop) -> None:
        self._waiting.append(asking)
        if self._free and not self._leaving:
            # Not here and now: what else the loop has ready in this turn comes along.
            self._leaving = True
            loop.call_soon(self._leave, loop)

    def abandon(self, asking: QueuedClaim) -> bool:
        """Whether its verdict is here. If not, the thread that brings it gives back what was won."""
        with self._lock:
            asking.abandoned = True
            return asking.back

    async def give_up(self, asking: QueuedClaim) -> None:
        if self.abandon(asking):
            await to_the_end(self.give_back, [asking])
        elif asking.left:
            asking.ended = asyncio.get_running_loop().create_future()
            await asking.ended

    def _leave(self, loop: asyncio.AbstractEventLoop) -> None:
        self._leaving = False
        while self._free and self._waiting:
            together: list[QueuedClaim] = []
            while self._waiting and len(together) < self._most:
                asking = self._waiting.popleft()
                if not asking.abandoned:
                    asking.left = True
                    together.append(asking)
            if together:
                self._free -= 1
                if not self._ask_soon(loop, together):
                    self._ask_in_thread(loop, together)

    def _ask_soon(self, loop: asyncio.AbstractEventLoop, together: Sequence[QueuedClaim]) -> bool:
        asked_at = time.monotonic()

        def told(verdicts: Sequence[Verdict] | None) -> None:
            if (
                verdicts is None
            ):  # a thread finds out what is wrong; by his token everybody gets what he was granted now
                self._ask_in_thread(loop, together)
                return
            if gone := self._arrived(together, verdicts, None, asked_at):
                loop.run_in_executor(None, self.give_back, gone)
            self._back(loop, together)

        return self._soon is not None and self._soon.claim_soon([asking.claim for asking in together], told)

    def _ask_in_thread(self, loop: asyncio.AbstractEventLoop, together: Sequence[QueuedClaim]) -> None:
        def done(call: asyncio.Future[None]) -> None:
            if not call.cancelled():
                call.exception()  # looked at, or asyncio complains that nobody did
            self._back(loop, together)

        loop.run_in_executor(None, self._call, together).add_done_callback(done)

    def _call(self, together: Sequence[QueuedClaim]) -> None:
        verdicts: Sequence[Verdict | None] = [None] * len(together)
        error, asked_at = None, time.monotonic()
        try:
            verdicts = self._fences.claim([asking.claim for asking in together])
        except TransientError as away:
            error = away
        finally:
            # Whatever else was wrong, such as one record that cannot be read, is found again by the one it belongs to:
            # everybody asks again, alone, and by his token gets what he was granted now.
            gone = self._arrived(together, verdicts, error, asked_at)
        self.give_back(gone)

    def _arrived(
        self,
        together: Sequence[QueuedClaim],
        verdicts: Sequence[Verdict | None],
        error: TransientError | None,
        asked_at: float,
    ) -> list[QueuedClaim]:
        """Returns those who are gone, and must not keep what was granted to them."""
        with self._lock:
            for asking, verdict in zip(together, verdicts, strict=True):
                asking.asked_at, asking.verdict, asking.error, asking.back = asked_at, verdict, error, True
            return [asking for asking in together if asking.abandoned]

    def _back(self, loop: asyncio.AbstractEventLoop, together: Sequence[QueuedClaim]) -> None:
        self._free += 1
        for asking in together:
            if not asking.answered.done():
                asking.answered.set_result(None)
            if asking.ended is not None and not asking.ended.done():
                asking.ended.set_result(None)
        if self._waiting and not self._leaving:
            self._leave(loop)

    def give_back(self, gone: Sequence[QueuedClaim]) -> None:
        """What was granted to them. If that cannot be said to the store, the leases run out by themselves."""
        refs = [
            asking.request.lease_ref(asking.verdict.record.token, epoch=asking.verdict.record.fence.epoch)
            for asking in gone
            if isinstance(asking.verdict, Granted)
        ]
        if refs:
            with contextlib.suppress(TransientError):
                self._fences.release(refs, CANCELLED, refund=True)
