"""Fair shares: how much of a server one tenant may hold, once the caller is known.

A tenant may hold at most `share` times what is still free. A lone tenant with `share=1` gets half, two busy tenants get
a third each, and so on: a tenant that comes later always finds room, and nothing has to be configured per tenant.

Counted in this way are the requests under way, the request bodies that are still arriving (a slow sender holds up no
request of anybody else), the bytes of those bodies, and the bytes of batches until they are done. Blocking work of one
tenant uses at most `threads` threads of the server; builds have a pool of their own, with a limit per tenant.

Large bodies of one tenant are checked and parsed one at a time: threads share one interpreter, so several at once would
be no quicker, and every other tenant would wait for all of them. Large bodies that are refused are answered one after
the other, each after a pause: a mistake is told a moment later, and a flood of mistakes slows down its sender alone.
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
"""builds that run or wait for a thread, of all tenants"""
LARGE_BODY: Final = 64 << 10
"""bytes: what is longer is parsed in a thread, and only documents are that long"""
PAUSE_S: Final = 0.1
"""before the answer to a large body that is refused"""


pause = asyncio.sleep


class Turns:
    """What requests of one tenant take turns at."""

    def __init__(self, threads: int) -> None:
        self.threads = asyncio.Semaphore(threads)
        self.large = asyncio.Lock()
        """checking and parsing a large body"""
        self.refused = asyncio.Lock()
        """having a large body refused"""


_turns: contextvars.ContextVar[Turns | None] = contextvars.ContextVar("ragfence_turns", default=None)


class Shares:
    """Units of one resource, held by tenants."""

    def __init__(self, most: int, *, share: float = 1.0) -> None:
        self._most = most
        self._share = share
        self._total = 0
        self._held: Counter[str] = Counter()

    def take(self, tenant: str, amount: int = 1, *, beside: int = 0) -> bool:
        """Takes `amount` for the tenant, if that is within its share. `beside`: units it holds that are not counted."""
        held = self._held[tenant] + beside
        # What a tenant holds before this request decides, so that one alone may take something of any size that fits.
        if held >= self._share * (self._most - self._total) or self._total + amount > self._most:
            return False
        self._held[tenant] += amount
        self._total += amount
        return True

    def give(self, tenant: str, amount: int = 1) -> None:
        self.change(tenant, -amount)

    def change(self, tenant: str, amount: int) -> None:
        """Counts what is there, within the share or not."""
        self._total += amount
        self._held[tenant] += amount
        if not self._held[tenant]:
            del self._held[tenant]

    def is_exceeded(self, tenant: str) -> bool:
        """Whether a tenant holds more than its share."""
        return self.held(tenant) > self._share * (self._most - self._total)

    def held(self, tenant: str) -> int:
        return self._held.get(tenant, 0)


class TenantShares:
    """ASGI, between the gate, which says who the caller is, and the routes.

    max_concurrent      requests under way in this process
    max_arriving        requests whose body is still arriving
    max_arriving_bytes  of those bodies together
    share               a tenant may hold at most so many times what is free of each
    threads             of the server's threads that one tenant may use at the same time
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
        self._underway = Shares(max_concurrent, share=share)
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
        tenant: str = caller.tenant
        # Held by this request: the dictionary forgets it with the last one.
        turns = self._turns.get(tenant)
        if turns is None:
            turns = self._turns[tenant] = Turns(self._threads)
        abandoned = state["session"].contract.abandoned
        held = _Held(self, tenant, abandoned)
        exchange: BoundedExchange = state[EXCHANGE]
        if (problem := held.enter(has_body=scope["method"] not in READS and body_length(scope) != 0)) is not None:
            exchange.refuse(problem)
            return

        async def receive_counted() -> Message:
            message = await receive()
            problem = held.count(message) if message["type"] == "http.request" else None
            return message if problem is None else exchange.refuse(problem)

        async def send_in_turn(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] // 100 == 4 and held.came > LARGE_BODY:
                async with turns.refused:
                    await pause(PAUSE_S)
            await send(message)

        before = _turns.set(turns)
        try:
            await self._app(scope, receive_counted, send_in_turn)
        finally:
            _turns.reset(before)
            held.leave()


def share_refusal(tenant: str, shares: Shares, what: str) -> Problem:
    wait_s = random.randint(1, 4)  # spread, or all that were refused together come back together
    if not shares.held(tenant):
        return refusal("DEPENDENCY.overloaded", retry_after=wait_s)
    return refusal("RATE_LIMIT.share", f"this tenant holds its share of the server's {what}", retry_after=wait_s)


class UnfinishedBatch:
    """The bytes of one batch, from the first that arrives until its work has ended and its file is gone."""

    def __init__(self, shares: Shares, tenant: str) -> None:
        self._shares = shares
        self._tenant = tenant
        self._size = 0
        self._loop = asyncio.get_running_loop()

    def take(self, size: int) -> None:
        """Raises `Refused` if it is more than the share of its tenant."""
        if not self._shares.take(self._tenant, size):
            raise RequestRefused(share_refusal(self._tenant, self._shares, "room for unfinished batches"))
        self._size += size

    def end(self) -> None:
        """In any thread: the last to have the file may be the one that worked on it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the server with it
            self._loop.call_soon_threadsafe(self._give)

    def _give(self) -> None:
        self._shares.give(self._tenant, self._size)
        self._size = 0


class _Held:
    """What one request holds: a place among the arriving bodies, then one among the requests under way."""

    def __init__(self, limits: TenantShares, tenant: str, abandoned: int) -> None:
        self._limits = limits
        self._tenant = tenant
        self._left_behind = abandoned
        self._place: Shares | None = None
        self._size = 0
        self.came = 0
        """bytes of its body"""

    def enter(self, *, has_body: bool) -> Problem | None:
        """None: it has a place."""
        if has_body:
            return self._take(self._limits._arriving, "arriving request bodies")
        return self._take(self._limits._underway, "requests under way", beside=self._left_behind)

    def count(self, message: Message) -> Problem | None:
        """A part of the body; with the last one the request is under way."""
        limits = self._limits
        if self._place is not limits._arriving:
            return None
        size = len(message.get("body", b""))
        if not limits._bytes.take(self._tenant, size):
            return share_refusal(self._tenant, limits._bytes, "memory for arriving request bodies")
        self._size += size
        self.came += size
        if message.get("more_body", False):
            return None
        self.leave()
        return self.enter(has_body=False)

    def leave(self) -> None:
        if self._place is not None:
            self._place.give(self._tenant)
            self._limits._bytes.give(self._tenant, self._size)
            self._place, self._size = None, 0

    def _take(self, shares: Shares, what: str, *, beside: int = 0) -> Problem | None:
        if not shares.take(self._tenant, beside=beside):
            return share_refusal(self._tenant, shares, what)
        self._place = shares
        return None


async def run_in_turn(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """A blocking call in a thread of the server, once the tenant of this request has one left."""
    turns = _turns.get()
    if turns is None:
        return await run_blocking(call, *args, **kwargs)
    async with turns.threads:
        return await run_blocking(call, *args, **kwargs)


async def run_large(call: Callable[[], R]) -> R:
    """As `run_in_turn`, but one at a time of the tenant: what is made of a large body."""
    turns = _turns.get()
    if turns is None:
        return await run_blocking(call)
    async with turns.large:
        return await run_in_turn(call)


class BuildPool:
    """Threads for builds, which take long: nobody else waits for them."""

    def __init__(self, *, threads: int = 8, per_tenant: int = 2) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="ragfence-build")
        self._per_tenant = per_tenant
        self._held: Counter[str] = Counter()

    def reserve(self, tenant: str) -> BuildPlace | None:
        """A place for one build; None if the tenant, or the server, has as many as it may have."""
        if self._held[tenant] >= self._per_tenant or self._held.total() >= MAX_BUILDS:
            return None
        self._held[tenant] += 1
        return BuildPlace(self, tenant)

    async def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        run = functools.partial(contextvars.copy_context().run, call, *args, **kwargs)
        return await shield_until_done(asyncio.get_running_loop().run_in_executor(self._executor, run))

    def close(self) -> None:
        self._executor.shutdown(wait=False)

    def refusal(self) -> RequestRefused:
        detail = f"at most {self._per_tenant} builds of a tenant are under way at the same time"
        return RequestRefused(refusal("RATE_LIMIT.builds", detail, retry_after=random.randint(2, 8)))


class BuildPlace:
    """Belongs to one build, until it has ended."""

    def __init__(self, pool: BuildPool, tenant: str) -> None:
        self._pool = pool
        self._tenant = tenant
        self.running = False
        self.over = False

    def end(self) -> None:
        if not self.over:
            self.over = True
            self._pool._held[self._tenant] -= 1
            if not self._pool._held[self._tenant]:
                del self._pool._held[self._tenant]
