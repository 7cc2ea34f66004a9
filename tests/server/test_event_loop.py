"""Claims and seals that an event loop asks of Redis itself: the answers of a thread's, also when something breaks."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence import Fence, Operation, Policy
from ragfence.core.decisions import Claim, Granted, InFlightVerdict, Replay, Sealed, Verdict
from ragfence.engine.aio import ClaimBatcher
from ragfence.engine.requests import Request
from ragfence.errors import StoreUnavailable
from ragfence.server import Answer, Call, Contract
from ragfence.stores.redis.store import RedisFences
from tests import servers
from tests.servers import RedisServer


@pytest.fixture
def fence(valkey_server: RedisServer, tmp_path: Path) -> Iterator[Fence]:
    policy = Policy.from_mapping({"on_conflict": {"include_diff": True}})
    with ragfence.open(valkey_server.url, tenant=f"soon{tmp_path.name}", policy=policy) as opened:
        with opened.claim(Operation(kind="first", source_id="of all")) as op:  # brings the scripts there
            op.seal()
        yield opened


def redis_of(fence: Fence) -> RedisFences:
    fences = fence.inspector.fences
    assert isinstance(fences, RedisFences)
    return fences


def request(fence: Fence, name: str, payload: object = None) -> Request:
    return fence._engine.request(Operation(kind="http", source_id=name), payload)


def claim_of(fence: Fence, name: str, payload: object = None) -> Claim:
    return request(fence, name, payload).claim(os.urandom(12), 0, 0)


async def connected(fences: RedisFences) -> None:
    """Once this loop has its connection."""
    assert fences._loop_lines is not None
    give_up_at = time.monotonic() + 20
    while fences._loop_lines.of_this_loop() is None:
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.01)


async def claimed_soon(fences: RedisFences, claims: list[Claim]) -> list[Verdict] | None:
    told: asyncio.Future[list[Verdict] | None] = asyncio.get_running_loop().create_future()
    assert fences.claim_soon(claims, told.set_result)
    assert not told.done()
    return await asyncio.wait_for(told, 20)


def rows(fence: Fence) -> list[tuple[str, str]]:
    told = fence.audit.decisions(since="1h").to_pylist()
    return sorted((row["source_id"], row["decision"]) for row in told if row["kind"] == "http")


def test_until_there_is_a_connection_it_is_not_possible(fence: Fence) -> None:
    async def story() -> None:
        assert not redis_of(fence).claim_soon([claim_of(fence, "k")], lambda _: None)
        await connected(redis_of(fence))

    asyncio.run(story())


def test_each_gets_the_verdict_and_leaves_the_row_that_it_would_have_got_alone(fence: Fence) -> None:
    async def story() -> None:
        fences = redis_of(fence)
        await connected(fences)
        first, twin = claim_of(fence, "k"), claim_of(fence, "k")
        found = await claimed_soon(fences, [first, twin, first])
        assert found is not None
        assert [type(verdict) for verdict in found] == [
            Granted,
            InFlightVerdict,
            Granted,
        ]  # the last is the first, repeated
        assert isinstance(found[0], Granted)
        seal = request(fence, "k").seal(found[0], effect_id="", result=b"tx", failed=False, error="")
        told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        assert fences.seal_soon([seal, seal], told.set_result)
        assert [type(outcome) for outcome in await told] == [Sealed, Sealed]
        found = await claimed_soon(fences, [claim_of(fence, "k"), claim_of(fence, "other", {"a": 1})])
        assert found is not None
        assert [type(verdict) for verdict in found] == [Replay, Granted]

    asyncio.run(story())
    assert ("k", "duplicate") in rows(fence)
    assert ("k", "in_flight") in rows(fence)


def test_more_than_a_socket_takes_at_once_is_sent_bit_by_bit(fence: Fence) -> None:
    async def story() -> None:
        fences = redis_of(fence)
        await connected(fences)
        claims = [claim_of(fence, f"k{n}")._replace(payload=b"x" * 60_000) for n in range(256)]
        halves = await asyncio.gather(claimed_soon(fences, claims[:128]), claimed_soon(fences, claims[128:]))
        for found in halves:
            assert found is not None
            assert all(isinstance(verdict, Granted) for verdict in found)

    asyncio.run(story())


def cut(server: RedisServer) -> None:
    with server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)


def forget_scripts(server: RedisServer) -> None:
    with server.client() as client:
        client.script_flush()


@pytest.mark.parametrize("trouble", [cut, forget_scripts])
def test_trouble_is_told_as_nothing_and_a_thread_sees_to_it(
    fence: Fence, valkey_server: RedisServer, trouble: Callable[[RedisServer], None]
) -> None:
    async def story() -> None:
        fences, joint = redis_of(fence), ClaimBatcher(fence.inspector.fences)
        await connected(fences)
        trouble(valkey_server)
        assert fences._loop_lines is not None
        if fences._loop_lines.of_this_loop() is not None:
            assert await claimed_soon(fences, [claim_of(fence, "k")]) is None
        asked = await asyncio.gather(*(joint.ask(request(fence, f"j{n}")).wait() for n in range(5)))
        assert all(each is not None and isinstance(each.verdict, Granted) for each in asked)
        await connected(fences)  # and then there is a new one
        assert await claimed_soon(fences, [claim_of(fence, "l")]) is not None

    asyncio.run(story())


def test_no_reply_in_time_is_told_as_nothing(valkey_server: RedisServer, tmp_path: Path) -> None:
    tenant = f"late{tmp_path.name}"
    fences = RedisFences(valkey_server.url, tenant, solo=True, timeout_s=0.3)
    with ragfence.open(fences, tenant=tenant) as fence:

        async def story() -> None:
            await connected(fences)
            fences.claim([claim_of(fence, "first")])  # so that it would be an answer, if it came
            with valkey_server.client() as client:
                client.client_pause(60_000, all=False)  # what may write
                try:
                    assert await claimed_soon(fences, [claim_of(fence, "k")]) is None
                finally:
                    client.client_unpause()

        asyncio.run(story())


def test_a_server_that_is_gone_is_an_error_and_none_that_hangs(tmp_path: Path) -> None:
    with servers.valkey() as server, ragfence.open(server.url, tenant="gone") as fence:

        async def story() -> None:
            joint = ClaimBatcher(fence.inspector.fences)
            await connected(redis_of(fence))
            server.stop()
            with pytest.raises(StoreUnavailable):
                await joint.ask(request(fence, "k")).wait()

        asyncio.run(story())


def test_who_gives_up_meanwhile_holds_nothing(fence: Fence) -> None:
    async def story() -> None:
        joint = ClaimBatcher(fence.inspector.fences)
        await connected(redis_of(fence))
        waiting = asyncio.create_task(joint.ask(request(fence, "k")).wait())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        give_up_at = time.monotonic() + 10
        while time.monotonic() < give_up_at:  # given back by a thread, right after
            (verdict,) = await asyncio.to_thread(fence.inspector.fences.claim, [claim_of(fence, "k")])
            if isinstance(verdict, Granted):
                return
            await asyncio.sleep(0.02)
        raise AssertionError("it is held")

    asyncio.run(story())


def call(key: str) -> Call:
    return Call("POST", "/refunds", headers=(("idempotency-key", key),), body=b"x")


def answered(fence: Fence, story: Callable[[Contract], Awaitable[None]]) -> None:
    async def in_a_loop() -> None:
        await connected(redis_of(fence))
        contract = Contract(fence)
        await story(contract)
        await contract.finish()

    asyncio.run(in_a_loop())


@pytest.mark.parametrize("size", [0, 1_000, 70_000, 5_000_000])
def test_a_handler_is_performed_once_and_its_answer_kept(fence: Fence, size: int) -> None:
    times = 0

    async def perform() -> Answer:
        nonlocal times
        times += 1
        return Answer(201, (("content-type", "text/plain"),), b"y" * size)

    async def story(contract: Contract) -> None:
        first, again = [await contract.answer(call("k"), "me", perform) for _ in range(2)]
        assert times == 1
        assert first.body == b"y" * size
        assert again.header("idempotency-status") == "replayed"
        assert again.body == first.body or again.status == 409  # too long to be kept, and told so

    answered(fence, story)
    assert rows(fence) == [("k", "duplicate"), ("k", "new"), ("k", "new")]  # claimed, sealed, replayed


def test_a_client_that_leaves_during_the_seal_leaves_a_sealed_key(fence: Fence) -> None:
    async def story(contract: Contract) -> None:
        performed = asyncio.Event()

        async def perform() -> Answer:
            performed.set()
            return Answer(201, (), b"done")

        asked = asyncio.create_task(contract.answer(call("k"), "me", perform))
        await performed.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:  # also what performs it: the server is stopped
            task.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await contract.finish()
        again = await contract.answer(call("k"), "me", perform)
        assert (again.status, again.body) == (201, b"done")

    answered(fence, story)


def test_a_seal_that_nobody_answers_is_sealed_by_a_thread_also_for_a_client_that_left(
    fence: Fence, valkey_server: RedisServer
) -> None:
    """The effect happened: neither a broken connection nor a server that is stopped may give its key back."""
    times = 0

    async def story(contract: Contract) -> None:
        performed = asyncio.Event()

        async def perform() -> Answer:
            nonlocal times
            times += 1
            with valkey_server.client() as client:
                client.client_pause(60_000, all=False)
            performed.set()
            return Answer(201, (), b"done")

        asked = asyncio.create_task(contract.answer(call("k"), "me", perform))
        await performed.wait()
        await asyncio.sleep(0.05)  # the seal is on its way, and waits there
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.05)
        with valkey_server.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)
            client.client_unpause()
        await asyncio.gather(asked, return_exceptions=True)
        await contract.finish()
        again = await contract.answer(call("k"), "me", perform)
        assert (again.status, again.body, times) == (201, b"done", 1)

    answered(fence, story)


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
@pytest.mark.parametrize("where", ["in the loop", "in a thread"])
def test_whoever_waits_when_the_store_is_closed_is_told(fence: Fence, kind: str, where: str) -> None:
    """The loop lets go of the connection before it is closed: a closed socket has no number to be removed by."""
    fences = redis_of(fence)
    troubles: list[dict[str, Any]] = []

    async def asked() -> list[Verdict] | None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: troubles.append(context))
        await connected(fences)
        told: asyncio.Future[list[Verdict] | None] = loop.create_future()
        assert fences.claim_soon([claim_of(fence, "closed")], told.set_result)
        if where == "in the loop":
            fences.close()
        else:
            # Before the loop can read the reply: it stands still until the thread closes.
            closing = loop.run_in_executor(None, fences.close)
            time.sleep(0.2)
            await closing
        found = await asyncio.wait_for(told, 10)
        assert not fences.claim_soon([claim_of(fence, "closed")], told.set_result)
        return found

    make = asyncio.new_event_loop if kind == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=make) as runner:
        found = runner.run(asked())
    assert not troubles
    if where == "in the loop":
        assert found is None


def test_loops_have_connections_of_their_own(fence: Fence) -> None:
    async def story(name: str) -> None:
        await connected(redis_of(fence))
        found = await claimed_soon(redis_of(fence), [claim_of(fence, name)])
        assert found is not None
        assert isinstance(found[0], Granted)

    for name in ("a", "b", "c"):
        asyncio.run(story(name))
