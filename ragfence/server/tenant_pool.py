"""One fence per tenant, opened for its first request and closed when other tenants need the room.

A request holds its tenant's session until it is answered, so its fence stays open. Work that continues for a client
that has disconnected (a build that takes longer than its budget) is finished before the fence is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import cached_property

from ragfence.engine.aio import run_blocking
from ragfence.fence import Fence
from ragfence.server.contract import Contract
from ragfence.server.group_commit import GroupCommit
from ragfence.server.ndjson_batch import NdjsonBatches

STATUS_PATH = "/v1/idempotency"

_log = logging.getLogger("ragfence.server")


class TenantSession:
    """What the routes need of a tenant: its fence, the contract, and its batches."""

    def __init__(self, fence: Fence) -> None:
        self.fence = fence
        self.contract = Contract(fence, status_path=STATUS_PATH, repeatable=True)
        self.answer_within_s = fence.policy.http.answer_within_s
        """How long a write may take whose client does not say."""
        self.held = 0

    def __enter__(self) -> TenantSession:
        self.held += 1  # it is not closed meanwhile
        return self

    def __exit__(self, *_: object) -> None:
        self.held -= 1

    @cached_property
    def grouping(self) -> GroupCommit:
        return GroupCommit(self.fence.documents)

    @cached_property
    def batches(self) -> NdjsonBatches:
        return NdjsonBatches(self.fence, self.contract)

    async def finish(self) -> None:
        await self.contract.finish()
        if "grouping" in self.__dict__:  # only if the cached property was used
            await self.grouping.finish()

    async def close(self) -> None:
        await self.finish()
        await run_blocking(self.fence.close)


class TenantPool:
    def __init__(self, open_fence: Callable[[str], Fence], *, max_open: int = 64) -> None:
        self._open_fence = open_fence
        self._max_open = max_open
        self._open: OrderedDict[str, TenantSession] = OrderedDict()
        self._opening: dict[str, asyncio.Future[TenantSession]] = {}
        self._awaited: Counter[str] = Counter()
        """Tenants whose session is awaited by requests that do not hold it yet."""
        self._closing: set[asyncio.Task[None]] = set()

    async def of(self, tenant: str) -> TenantSession:
        """Returns the session of a tenant. The caller enters it, by `with`, before awaiting anything else."""
        session = self._open.get(tenant)
        if session is None:
            return await self._opened(tenant)
        self._open.move_to_end(tenant)
        return session

    async def each(self, work: Callable[[Fence], object]) -> None:
        """Calls `work` with the fence of every open tenant, one after the other, in a thread."""
        for tenant in list(self._open):
            if (session := self._open.get(tenant)) is None:
                continue  # closed meanwhile
            with session:
                try:
                    await run_blocking(work, session.fence)
                except Exception:  # noqa: BLE001  # the others are still served
                    _log.exception("%s failed for tenant %r", getattr(work, "__name__", work), session.fence.tenant)

    def abandoned(self) -> int:
        """Returns how many requests are being executed for clients that have disconnected."""
        return sum(session.contract.abandoned for session in self._open.values())

    async def close(self) -> None:
        while self._open:
            _, session = self._open.popitem()
            try:
                await session.close()
            except Exception:  # noqa: BLE001  # the others still have to be closed
                _log.exception("a tenant's fence could not be closed")
        if self._closing:
            await asyncio.wait(set(self._closing))

    async def _opened(self, tenant: str) -> TenantSession:
        opening = self._opening.get(tenant)
        if opening is None:
            opening = self._opening[tenant] = asyncio.ensure_future(self._open_one(tenant))
            opening.add_done_callback(lambda done: self._opening.pop(tenant, None))
        self._awaited[tenant] += 1
        try:
            # Shielded: a request that is cancelled must not cancel the opening for others that wait for it.
            return await asyncio.shield(opening)
        finally:
            self._awaited[tenant] -= 1
            if not self._awaited[tenant]:
                del self._awaited[tenant]

    async def _open_one(self, tenant: str) -> TenantSession:
        fence = await run_blocking(self._open_fence, tenant)
        session = TenantSession(fence)
        try:
            await run_blocking(session.contract.content_key)  # it reads the object store, so not on the event loop
        except BaseException:
            await run_blocking(fence.close)
            raise
        self._open[tenant] = session
        self._make_room()
        return session

    def _make_room(self) -> None:
        # Other sessions that were opened at the same time may still be awaited, besides the newest.
        idle = [name for name, session in self._open.items() if not session.held and name not in self._awaited]
        for name in idle[: max(len(self._open) - self._max_open, 0)]:
            task = asyncio.create_task(self._open.pop(name).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
