"""`@fence.once` on coroutines: cancelled at any moment, and in greater numbers than there are threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from ragfence import Receipt
from ragfence.core.layout import State
from tests.engine.worlds import REQUEST, Request, Tickets, World, Wrapped, eventually, key_of, record_of, rows_of


def cancelled(call: Callable[[], Any], when: Callable[[], Any], *, times: int = 1) -> None:
    """Runs the coroutine and cancels it once `when` holds; returns when it has been cancelled."""

    async def run() -> None:
        task = asyncio.ensure_future(call())
        while not when():
            assert not task.done(), task
            await asyncio.sleep(0.005)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_a_cancelled_effect_gives_its_key_back(world: World, tickets: Tickets) -> None:
    fence = world.open()
    started: list[int] = []

    @fence.once(kind="ticket", key=lambda req: (req["id"], req["version"]))
    async def endless(req: Request) -> None:
        started.append(1)
        await asyncio.sleep(3600)

    cancelled(lambda: endless(REQUEST), lambda: started)
    record = record_of(fence, key_of())
    assert (record.state, record.error) == (State.RELEASED, "CancelledError")
    assert tickets.on(fence)(REQUEST).is_new


def test_a_task_cancelled_twice_gives_its_key_back_too(memory: World) -> None:
    fence = memory.open()
    started: list[int] = []

    @fence.once(kind="ticket", key=lambda req: (req["id"], req["version"]))
    async def endless(req: Request) -> None:
        started.append(1)
        await asyncio.sleep(3600)

    cancelled(lambda: endless(REQUEST), lambda: started, times=3)
    eventually(lambda: record_of(fence, key_of()).state is State.RELEASED)


def test_a_task_cancelled_while_it_waits_stops_at_once_and_holds_nothing(memory: World, tickets: Tickets) -> None:
    fence = memory.open()
    entered, go_on = threading.Event(), threading.Event()

    @fence.once(kind="ticket", key=lambda req: (req["id"], req["version"]), payload=lambda req: req)
    def slow(req: Request) -> int:
        entered.set()
        assert go_on.wait(60)
        return 7

    waiting = tickets.on_async(fence)
    with ThreadPoolExecutor(1) as pool:
        owner = pool.submit(slow, REQUEST)
        assert entered.wait(20)
        # The owner goes on only after the waiter is gone: had it waited for its claim, this would never end.
        cancelled(lambda: waiting(REQUEST), lambda: rows_of(fence, decision="in_flight"))
        go_on.set()
        first = owner.result(20)
    assert asyncio.run(waiting(REQUEST)) == first
    assert tickets.made == []
    assert fence.audit.check().ok


@pytest.mark.parametrize("times", [1, 2])
def test_a_claim_that_is_won_for_a_task_already_cancelled_is_given_back(memory: World, times: int) -> None:
    asked, go_on = threading.Event(), threading.Event()

    class Slow(Wrapped):
        def claim(self, claims: Any) -> Any:
            asked.set()
            assert go_on.wait(20)
            return self.inner.claim(claims)

    fence = memory.open(fences=Slow)
    create = Tickets().on_async(fence)

    async def run() -> None:
        task = asyncio.ensure_future(create(REQUEST))
        await asyncio.to_thread(asked.wait, 20)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.01)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    eventually(lambda: record_of(memory.open(), key_of()).state is State.RELEASED)


def test_a_task_cancelled_after_its_effect_is_sealed_first(memory: World, tickets: Tickets) -> None:
    asked, go_on = threading.Event(), threading.Event()

    class Slow(Wrapped):
        def seal(self, seals: Any) -> Any:
            asked.set()
            assert go_on.wait(20)
            return self.inner.seal(seals)

    create = tickets.on_async(memory.open(fences=Slow))

    async def run() -> None:
        task = asyncio.ensure_future(create(REQUEST))
        await asyncio.to_thread(asked.wait, 20)
        task.cancel()
        await asyncio.sleep(0.01)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert record_of(memory.open(), key_of()).state is State.SEALED
    assert tickets.on(memory.open())(REQUEST).result == {"number": 1}


def test_a_task_cancelled_while_its_result_is_stored_is_sealed_too(memory: World, tickets: Tickets) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def slow_id(result: Any) -> str:
        asked.set()
        assert go_on.wait(20)
        return "e1"

    create = tickets.on_async(memory.open(), effect_id=slow_id)

    async def run() -> None:
        task = asyncio.ensure_future(create(REQUEST))
        await asyncio.to_thread(asked.wait, 20)
        task.cancel()
        await asyncio.sleep(0.01)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert tickets.on(memory.open())(REQUEST).effect_id == "e1"
    assert len(tickets.made) == 1


def test_a_coroutine_that_is_closed_gives_its_key_back(memory: World) -> None:
    fence = memory.open()
    started: list[int] = []

    @fence.once(kind="ticket", key=lambda req: (req["id"], req["version"]))
    async def endless(req: Request) -> None:
        started.append(1)
        await asyncio.get_running_loop().create_future()

    loop = asyncio.new_event_loop()
    coroutine = endless(REQUEST)
    task = loop.create_task(coroutine)
    while not started:
        loop.run_until_complete(asyncio.sleep(0.005))
    coroutine.close()
    assert record_of(fence, key_of()).state is State.RELEASED
    task.cancel()
    with suppress(BaseException):
        loop.run_until_complete(task)
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def test_more_tasks_can_wait_for_a_key_than_there_are_threads(memory: World) -> None:
    fence = memory.open()
    made: list[Request] = []

    @fence.once(kind="ticket", key=lambda req: (req["id"], req["version"]))
    async def create(req: Request) -> int:
        made.append(req)
        await asyncio.sleep(0.05)
        return len(made)

    async def run() -> list[Receipt]:
        # One thread for everybody: whoever waits in it would keep the owner from sealing.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        return await asyncio.gather(*(create(REQUEST) for _ in range(40)))

    receipts = asyncio.run(run())
    assert len(made) == 1
    assert all(receipt == receipts[0] for receipt in receipts)
