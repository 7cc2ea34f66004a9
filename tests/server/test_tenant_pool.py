"""Sessions: nothing is closed under a request, and what nobody uses makes room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence import Fence
from ragfence.server import tenant_pool as module
from ragfence.server.tenant_pool import TenantPool, TenantSession


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tenants whose sessions were closed."""
    tenants: list[str] = []
    close = TenantSession.close

    async def noted(self: TenantSession) -> None:
        tenants.append(self.fence.tenant)
        await close(self)

    monkeypatch.setattr(TenantSession, "close", noted)
    return tenants


def opener(place: Path) -> Callable[[str], Fence]:
    return lambda tenant: ragfence.open(place / "fence", tenant=tenant)


def test_what_is_opened_together_is_not_closed_before_it_is_used(
    tmp_path: Path, closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        at_once = asyncio.Event()

        async def run_blocking(work: Callable[..., Any], *given: Any) -> Any:
            done = work(*given)
            await at_once.wait()  # all openings end in the same moment
            return done

        monkeypatch.setattr(module, "run_blocking", run_blocking)
        sessions = TenantPool(opener(tmp_path), max_open=2)

        async def request(tenant: str) -> None:
            with await sessions.of(tenant) as session:
                assert session.fence.tenant == tenant
                await asyncio.sleep(0.01)
                assert tenant not in closed

        requests = [asyncio.create_task(request(f"t{number % 5}")) for number in range(10)]
        left = asyncio.create_task(request("left"))
        await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.sleep(0.01)
        at_once.set()
        await asyncio.gather(*requests)
        assert closed == ["left"]  # opened for nobody
        await request("one more")
        assert closed == ["left", "t0", "t1", "t2", "t3"]  # room is made once nobody uses them
        await sessions.close()

    asyncio.run(story())


def test_the_session_that_was_used_least_lately_makes_room(tmp_path: Path, closed: list[str]) -> None:
    async def story() -> None:
        sessions = TenantPool(opener(tmp_path), max_open=2)

        async def request(tenant: str) -> None:
            with await sessions.of(tenant):
                pass

        for tenant in ("a", "b", "a", "c"):
            await request(tenant)
        await asyncio.sleep(0)
        assert closed == ["b"]
        with await sessions.of("a"):
            await request("d")
            await request("e")
        assert closed == ["b", "c", "d"]
        await sessions.close()

    asyncio.run(story())


def test_what_is_closed_meanwhile_is_left_out_of_what_is_done_for_each(tmp_path: Path, closed: list[str]) -> None:
    async def story() -> None:
        sessions, done = TenantPool(opener(tmp_path), max_open=2), []
        loop = asyncio.get_running_loop()
        for tenant in ("a", "b"):
            await sessions.of(tenant)

        def work(fence: Fence) -> None:
            done.append(fence.tenant)
            asyncio.run_coroutine_threadsafe(sessions.of("c"), loop).result(10)

        await sessions.each(work)
        assert (done, closed) == (["a"], ["b"])
        await sessions.close()

    asyncio.run(story())
