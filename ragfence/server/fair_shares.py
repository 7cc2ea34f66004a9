"""Fair shares: how much of a server one tenant may use, once the caller is known.

A tenant may use at most `share` times what is free. A single tenant with `share=1` gets half, two busy tenants get a
third each, and so on: there is always room for another tenant, and nothing has to be configured per tenant.

This limits the requests in progress, the request bodies that are still arriving (so a slow sender delays only its own
requests), the bytes of those bodies, and the bytes of batches until they are done. Blocking work of one tenant uses at
most `threads` threads of the server; builds have a pool of their own, with a limit per tenant.

Large bodies of one tenant are checked and parsed one at a time: threads share one interpreter, so parsing several at a
time would not be faster, and all other tenants would wait for them. Large bodies that are refused are answered one
after the other, each after a pause: a flood of invalid bodies slows down only its sender.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from ragfence.engine.aio import run_blocking, shield_until_done
from ragfence.server.asgi import App, Message, Receive, Scope, Send
from ragfence.server.load_shedding import EXCHANGE, READS, BoundedExchange, body_length
from ragfence.wire.problems import Problem, RequestRefused, refusal

P = ParamSpec("P")
R = TypeVar("R")

MAX_BUILDS: Final = 64
"""Builds of all tenants that run or wait for a thread."""
SHARE: Final = "ragfence.share"
"""In the state of a request: whose share it uses, if not that of its tenant."""
LARGE_BODY: Final = 64 << 10
"""Bytes. A longer body is parsed in a thread; only documents may be longer."""
PAUSE_S: Final = 0.1
"""Seconds before the answer to a large body that is refused."""


pause = asyncio.sleep


class Turns:
    """The locks of one tenant."""

    def __init__(self, threads: int) -> None:
        self.threads = asyncio.Semaphore(threads)
        self.large = asyncio.Lock()
        """For checking and parsing a large body."""
        self.refused = asyncio.Lock()
        """For refusing a large body."""


_turns: contextvars.ContextVar[Turns | None] = contextvars.ContextVar("ragfence_turns", default=None)


class Shares:
    """Units of one resource, in use by tenants."""

    def __init__(self, most: int, *, share: float = 1.0) -> None:
        self._most = most
        self._share = share
        self._total = 0
        self._used: Counter[str] = Counter()

    def take(self, tenant: str, amount: int = 1, *, uncounted: int = 0) -> bool:
        """Takes `amount` for the tenant, if its share allows. `uncounted`: units that it uses in addition."""
        used = self._used[tenant] + uncounted
        # What the tenant uses before this request decides, so a single request may take any amount that fits.
        if used >= self._share * (self._most - self._total) or self._total + amount > self._most:
            return False
        self._used[tenant] += amount
        self._total += amount
        return True

    def give(self, tenant: str, amount: int = 1) -> None:
        self.change(tenant, -amount)

    def change(self, tenant: str, amount: int) -> None:
        """Counts units without a limit."""
        self._total += amount
        self._used[tenant] += amount
        if not self._used[tenant]:
            del self._used[tenant]

    def is_exceeded(self, tenant: str) -> bool:
        """Returns whether the tenant uses more than its share."""
        return self.used(tenant) > self._share * (self._most - self._total)

    def used(self, tenant: str) -> int:
        return self._used.get(tenant, 0)


class TenantShares:
    """ASGI middleware, between `AuthMiddleware`, which identifies the caller, and the routes.

    Args:
        app: The application.
        max_concurrent: Largest number of requests in progress in this process.
        max_arriving: Largest number of requests whose body is still arriving.
        max_arriving_bytes: Largest size of those bodies together.
        share: A tenant may use at most this many times what is free of each.
        threads: Threads of the server that one tenant may use at a time.
    """

    def __init__(
        self,
        app: App,
        *,
        max_concurrent: int = 256,
        max_arriving: int = 1024,
        max_arriving_bytes: int = 1 << 28,
        share: float = 1.0,
        threads: int = 8,
    ) -> None:
        self._app = app
        self._in_progress = Shares(max_concurrent, share=share)
        self._arriving = Shares(max_arriving, share=share)
        self._bytes = Shares(max_arriving_bytes, share=share)
        self._threads = threads
        self._turns: WeakValueDictionary[str, Turns] = WeakValueDictionary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.get("state", {})
        caller = state.get("caller") if scope["type"] == "http" else None
        if caller is None:
            await self._app(scope, receive, send)
            return
        tenant: str = state.get(SHARE) or caller.tenant
        # Referenced by this request: the dictionary drops it after the last one.
        turns = self._turns.get(tenant)
        if turns is None:
            turns = self._turns[tenant] = Turns(self._threads)
        abandoned = state["session"].contract.abandoned
        units = _RequestUnits(self, tenant, abandoned)
        exchange: BoundedExchange = state[EXCHANGE]
        if (problem := units.enter(has_body=scope["method"] not in READS and body_length(scope) != 0)) is not None:
            exchange.refuse(problem)
            return

        async def receive_counted() -> Message:
            message = await receive()
            problem = units.count(message) if message["type"] == "http.request" else None
            return message if problem is None else exchange.refuse(problem)

        async def send_in_turn(message: Message) -> None:
            if (
                message["type"] == "http.response.start"
                and message["status"] // 100 == 4
                and units.received > LARGE_BODY
            ):
                async with turns.refused:
                    await pause(PAUSE_S)
            await send(message)

        before = _turns.set(turns)
        try:
            await self._app(scope, receive_counted, send_in_turn)
        finally:
            _turns.reset(before)
            units.leave()


def share_refusal(tenant: str, shares: Shares, what: str) -> Problem:
    wait_s = random.randint(1, 4)  # random, or clients that were refused together return together
    if not shares.used(tenant):
        return refusal("DEPENDENCY.overloaded", retry_after=wait_s)
    return refusal("RATE_LIMIT.share", f"this tenant uses its share of the server's {what}", retry_after=wait_s)


class UnfinishedBatch:
    """The bytes of one batch, from the first one until its work has ended and its file is deleted."""

    def __init__(self, shares: Shares, tenant: str) -> None:
        self._shares = shares
        self._tenant = tenant
        self._size = 0
        self._loop = asyncio.get_running_loop()

    def take(self, size: int) -> None:
        """Raises `RequestRefused` if that is more than the share of the tenant."""
        if not self._shares.take(self._tenant, size):
            raise RequestRefused(share_refusal(self._tenant, self._shares, "room for unfinished batches"))
        self._size += size

    def end(self) -> None:
        """Called in any thread: the one that worked on the batch may be the last to close its file."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._give)

    def _give(self) -> None:
        self._shares.give(self._tenant, self._size)
        self._size = 0


class _RequestUnits:
    """The units of one request: first one of the arriving bodies, then one of the requests in progress."""

    def __init__(self, limits: TenantShares, tenant: str, abandoned: int) -> None:
        self._limits = limits
        self._tenant = tenant
        self._abandoned = abandoned
        self._place: Shares | None = None
        self._size = 0
        self.received = 0
        """Bytes of its body so far."""

    def enter(self, *, has_body: bool) -> Problem | None:
        """Returns why the request is refused; None if it has a place."""
        if has_body:
            return self._take(self._limits._arriving, "arriving request bodies")
        return self._take(self._limits._in_progress, "requests in progress", uncounted=self._abandoned)

    def count(self, message: Message) -> Problem | None:
        """Counts a part of the body; after the last one the request is in progress."""
        limits = self._limits
        if self._place is not limits._arriving:
            return None
        size = len(message.get("body", b""))
        if not limits._bytes.take(self._tenant, size):
            return share_refusal(self._tenant, limits._bytes, "memory for arriving request bodies")
        self._size += size
        self.received += size
        if message.get("more_body", False):
            return None
        self.leave()
        return self.enter(has_body=False)

    def leave(self) -> None:
        if self._place is not None:
            self._place.give(self._tenant)
            self._limits._bytes.give(self._tenant, self._size)
            self._place, self._size = None, 0

    def _take(self, shares: Shares, what: str, *, uncounted: int = 0) -> Problem | None:
        if not shares.take(self._tenant, uncounted=uncounted):
            return share_refusal(self._tenant, shares, what)
        self._place = shares
        return None


async def run_in_turn(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function in a thread, once the tenant of this request uses fewer threads than it may."""
    turns = _turns.get()
    if turns is None:
        return await run_blocking(call, *args, **kwargs)
    async with turns.threads:
        return await run_blocking(call, *args, **kwargs)


async def run_large(call: Callable[[], R]) -> R:
    """Like `run_in_turn`, for the work on a large body: one at a time for each tenant."""
    turns = _turns.get()
    if turns is None:
        return await run_blocking(call)
    async with turns.large:
        return await run_in_turn(call)


class BuildPool:
    """Threads for builds: they take long, so they do not use the threads of other requests."""

    def __init__(self, *, threads: int = 8, per_tenant: int = 2) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="ragfence-build")
        self._per_tenant = per_tenant
        self._used: Counter[str] = Counter()

    def reserve(self, tenant: str) -> BuildPlace | None:
        """Returns a place for one build; None if the tenant, or the server, has as many as it may have."""
        if self._used[tenant] >= self._per_tenant or self._used.total() >= MAX_BUILDS:
            return None
        self._used[tenant] += 1
        return BuildPlace(self, tenant)

    async def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        run = functools.partial(contextvars.copy_context().run, call, *args, **kwargs)
        return await shield_until_done(asyncio.get_running_loop().run_in_executor(self._executor, run))

    def close(self) -> None:
        self._executor.shutdown(wait=False)

    def refusal(self) -> RequestRefused:
        detail = f"a tenant may have at most {self._per_tenant} builds in progress"
        return RequestRefused(refusal("RATE_LIMIT.builds", detail, retry_after=random.randint(2, 8)))


class BuildPlace:
    """The place of one build, until the build has ended."""

    def __init__(self, pool: BuildPool, tenant: str) -> None:
        self._pool = pool
        self._tenant = tenant
        self.is_running = False
        self.has_ended = False

    def end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self._pool._used[self._tenant] -= 1
            if not self._pool._used[self._tenant]:
                del self._pool._used[self._tenant]
