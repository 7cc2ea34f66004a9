"""The engine's blocking calls, for coroutines: in threads, and safe to be cancelled at any moment."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from ragfence.core.receipts import Receipt
from ragfence.engine.requests import Request
from ragfence.engine.runner import Asked, Performer, Won

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
    performer: Performer, request: Request, wait_ms: int | None, first: Asked | None = None
) -> Won | Receipt:
    """As `Performer.acquire`, but who waits needs no thread: the owner needs one to seal what they wait for."""
    steps = performer.acquiring(request, wait_ms=wait_ms, first=first)
    while True:
        step = _Step(performer, steps)
        try:
            answer = await to_the_end(step.take)
        except asyncio.CancelledError:
            if won := step.abandon():
                await to_the_end(performer.give_back, won, CANCELLED)
            raise
        if not isinstance(answer, float):
            return answer
        await asyncio.sleep(answer)


class _Step:
    """One step of a claim. What it wins for a caller who is gone is given back, by whichever of the two is later."""

    def __init__(self, performer: Performer, steps: Iterator[Won | Receipt | float]) -> None:
        self._performer = performer
        self._steps = steps
        self._lock = threading.Lock()
        self._abandoned = False
        self._won: Won | None = None

    def take(self) -> Won | Receipt | float:
        answer = next(self._steps)
        with self._lock:
            self._won = answer if isinstance(answer, Won) else None
            too_late = self._won if self._abandoned else None
        if too_late:
            self._performer.give_back(too_late, CANCELLED)
        return answer

    def abandon(self) -> Won | None:
        """What the step has won; None when it is still under way and will see for itself."""
        with self._lock:
            self._abandoned = True
            return self._won
