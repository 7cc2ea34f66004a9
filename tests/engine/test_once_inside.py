"""`@fence.once` from the inside: its lease, its result, and its own key, which it cannot claim again."""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import ragfence
from ragfence import Operation, Receipt
from ragfence.core.layout import State
from ragfence.errors import (
    LeaseLost,
    NestedClaim,
    NotJson,
    ResultTooBig,
)
from tests.engine.worlds import REQUEST, Request, Tickets, World, key_of, record_of


def in_another_thread(call: Callable[[], Any], context: contextvars.Context | None = None) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(context.run, call).result() if context else pool.submit(call).result()


def test_the_same_key_inside_its_own_effect_is_refused_at_once(world: World) -> None:
    fence = world.open()

    @fence.once(kind="t", key=lambda n: "a", payload=lambda n: None)
    def recursive(n: int) -> int:
        with pytest.raises(NestedClaim, match="inside its own effect"):
            recursive(n + 1)
        with pytest.raises(NestedClaim), fence.claim(Operation(kind="t", source_id="a")):
            pass
        return n

    assert recursive(0).result == 0


def test_the_same_key_inside_its_own_async_effect_is_refused_at_once(memory: World) -> None:
    fence = memory.open()

    @fence.once(kind="t", key=lambda n: "a", payload=lambda n: None)
    async def recursive(n: int) -> int:
        with pytest.raises(NestedClaim):
            await recursive(n + 1)
        with pytest.raises(NestedClaim):
            await asyncio.create_task(recursive(n + 1))
        with pytest.raises(NestedClaim):
            async with fence.claim(Operation(kind="t", source_id="a")):
                pass
        return n

    assert asyncio.run(recursive(0)).result == 0


def test_a_helper_thread_with_the_callers_context_is_inside_the_effect_too(memory: World) -> None:
    @memory.open().once(kind="t", key=lambda n: "a", payload=lambda n: None)
    def recursive(n: int) -> int:
        with pytest.raises(NestedClaim):
            in_another_thread(lambda: recursive(n + 1), contextvars.copy_context())
        return n

    assert recursive(0).result == 0


def test_another_key_inside_an_effect_is_fine(world: World, tickets: Tickets) -> None:
    fence = world.open()
    create = tickets.on(fence)

    @fence.once(kind="outer", key=lambda req: req["id"])
    def outer(req: Request) -> Any:
        return [create(req).result, create({**req, "version": "2"}).result]

    assert outer(REQUEST).result == [{"number": 1}, {"number": 2}]


def test_another_revision_of_the_same_sequenced_source_inside_an_effect_is_refused(world: World) -> None:
    fence = world.open()

    @fence.once(kind="t", key=lambda n: ("a", None, n))  # type: ignore[arg-type, return-value]
    def apply(n: int) -> int:
        with pytest.raises(NestedClaim):
            apply(n + 1)
        return n

    assert apply(1).result == 1


def test_a_key_is_free_again_for_whatever_outlives_its_effect(memory: World) -> None:
    fence = memory.open()

    @fence.once(kind="t", key=lambda: "a")
    async def effect() -> str:
        done = asyncio.Event()

        async def afterwards() -> Receipt:
            await done.wait()
            with pytest.raises(LeaseLost):
                ragfence.current_lease()
            return await effect()

        background.append((done, asyncio.create_task(afterwards())))
        return "x"

    background: list[tuple[asyncio.Event, asyncio.Task[Receipt]]] = []

    async def run() -> tuple[Receipt, Receipt]:
        first = await effect()
        done, task = background[0]
        done.set()
        return first, await task

    first, later = asyncio.run(run())
    assert later == first
    assert len(background) == 1


def test_an_effect_that_fails_by_nesting_can_be_tried_again(memory: World) -> None:
    nested = [True, False]

    @memory.open().once(kind="t", key=lambda n: "a", payload=lambda n: None)
    def recursive(n: int) -> Any:
        return recursive(n).result if nested.pop(0) else n

    with pytest.raises(NestedClaim):
        recursive(0)
    assert recursive(1).result == 1


def test_an_effect_can_see_its_lease(world: World) -> None:
    fence = world.open()
    seen: list[Any] = []

    @fence.once(kind="t", key=lambda: "a")
    def effect() -> str:
        lease = ragfence.current_lease()
        lease.check()
        seen.append(lease)
        return str(lease.fence)

    receipt = effect()
    assert (receipt.result, seen[0].key, seen[0].attempt) == (receipt.fence, receipt.key, 1)
    assert seen[0].fence.epoch > 0


def test_an_async_effect_can_see_its_lease_too(memory: World) -> None:
    @memory.open().once(kind="t", key=lambda: "a")
    async def effect() -> str:
        await asyncio.sleep(0)
        return ragfence.current_lease().key

    receipt = asyncio.run(effect())
    assert receipt.result == receipt.key


def test_outside_of_an_effect_there_is_no_lease(memory: World, tickets: Tickets) -> None:
    tickets.on(memory.open())(REQUEST)
    with pytest.raises(LeaseLost, match="no fenced effect"):
        ragfence.current_lease()


class Opaque:
    pass


@pytest.mark.parametrize(
    "result", [Opaque(), {"a": {1, 2}}, b"bytes", {1: "key"}, math.nan, [math.inf], "\ud800", {"x": Opaque()}]
)
def test_a_result_that_is_no_json_seals_nothing_and_gives_the_key_back(
    memory: World, tickets: Tickets, result: object
) -> None:
    tickets.then = [result]
    fence = memory.open()
    create = tickets.on(fence)
    with pytest.raises(NotJson, match=key_of()):
        create(REQUEST)
    record = record_of(fence, key_of())
    assert (record.state, record.error) == (State.RELEASED, NotJson.code)
    assert [entry.name for entry in memory.objects.list("default/sealed/")] == []  # type: ignore[union-attr]
    assert create(REQUEST).flags.attempt == 2


def test_a_result_that_is_no_json_says_where_and_what_to_do(solo: World, tickets: Tickets) -> None:
    tickets.then = [{"rows": [1, Opaque()]}]
    with pytest.raises(NotJson, match=r"\$\.rows\[1\]: Opaque is not JSON") as refused:
        tickets.on(solo.open())(REQUEST)
    assert "return dicts, lists" in refused.value.hint


def test_an_async_result_that_is_no_json_gives_the_key_back_too(solo: World, tickets: Tickets) -> None:
    tickets.then = [Opaque()]
    fence = solo.open()
    with pytest.raises(NotJson):
        asyncio.run(tickets.on_async(fence)(REQUEST))
    assert record_of(fence, key_of()).state is State.RELEASED


def test_a_large_result_is_an_object_named_by_its_digest(backed: World, tickets: Tickets) -> None:
    large = {"text": "x" * 5000}
    tickets.then = [large, large]
    fence = backed.open(results={"inline_max_bytes": 1000})
    create = tickets.on(fence)
    first = create(REQUEST)
    assert first.result == large
    assert create(REQUEST) == first
    assert create({**REQUEST, "version": "2"}).result == large
    assert len(record_of(fence, first.key).result) == 33
    assert backed.objects is not None
    assert len(list(backed.objects.list("default/results/"))) == 1, "equal results are one object"


def test_a_result_at_the_limit_stays_in_the_record(solo: World, tickets: Tickets) -> None:
    tickets.then = ["x" * 98, "x" * 99]
    create = tickets.on(solo.open(results={"inline_max_bytes": 100}))
    assert create(REQUEST).result == "x" * 98
    with pytest.raises(ResultTooBig):
        create({**REQUEST, "version": "2"})


def test_without_an_object_store_a_large_result_is_refused_and_the_key_given_back(
    solo: World, tickets: Tickets
) -> None:
    tickets.then = ["x" * 300_000]
    fence = solo.open()
    with pytest.raises(ResultTooBig, match="300,002 bytes; without an object store at most 262,144") as refused:
        tickets.on(fence)(REQUEST)
    assert "objects=" in refused.value.hint
    assert record_of(fence, key_of()).state is State.RELEASED


def test_a_result_above_the_policys_limit_is_refused_and_nothing_is_stored(memory: World, tickets: Tickets) -> None:
    tickets.then = ["x" * 3000]
    fence = memory.open(results={"inline_max_bytes": 1000, "max_bytes": 2000})
    with pytest.raises(ResultTooBig, match="3,002 bytes, the policy allows 2,000") as refused:
        tickets.on(fence)(REQUEST)
    assert "results.max_bytes" in refused.value.hint
    assert record_of(fence, key_of()).state is State.RELEASED
    assert [entry.name for entry in memory.objects.list("default/") if "epochs" not in entry.name] == []  # type: ignore[union-attr]
