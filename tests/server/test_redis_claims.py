"""The contract and batched claims on Redis, also when a connection breaks, or the server is stopped."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import ragfence
from ragfence import Fence, Operation, Policy
from ragfence.core.decisions import Claim, Granted
from ragfence.engine.aio import ClaimBatcher
from ragfence.engine.requests import Request
from ragfence.errors import StoreUnavailable
from ragfence.server import Answer, Call, Contract
from tests import servers
from tests.servers import RedisServer


@pytest.fixture
def fence(valkey_server: RedisServer, tmp_path: Path) -> Iterator[Fence]:
    policy = Policy.from_mapping({"on_conflict": {"include_diff": True}})
    with ragfence.open(valkey_server.url, tenant=f"claims{tmp_path.name}", policy=policy) as opened:
        with opened.claim(Operation(kind="first", source_id="of all")) as op:  # brings the scripts there
            op.seal()
        yield opened


def request(fence: Fence, name: str, payload: object = None) -> Request:
    return fence._engine.request(Operation(kind="http", source_id=name), payload)


def claim_of(fence: Fence, name: str, payload: object = None) -> Claim:
    return request(fence, name, payload).claim(os.urandom(12), 0, 0)


def rows(fence: Fence) -> list[tuple[str, str]]:
    told = fence.audit.decisions(since="1h").to_pylist()
    return sorted((row["source_id"], row["decision"]) for row in told if row["kind"] == "http")


def cut(server: RedisServer) -> None:
    with server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)


def forget_scripts(server: RedisServer) -> None:
    with server.client() as client:
        client.script_flush()


@pytest.mark.parametrize("trouble", [cut, forget_scripts])
def test_a_broken_connection_or_a_missing_script_is_no_error(
    fence: Fence, valkey_server: RedisServer, trouble: Callable[[RedisServer], None]
) -> None:
    async def story() -> None:
        claims = ClaimBatcher(fence.inspector.fences)
        trouble(valkey_server)
        found = await asyncio.gather(*(claims.submit(request(fence, f"j{n}")).wait() for n in range(5)))
        assert all(each is not None and isinstance(each.verdict, Granted) for each in found)

    asyncio.run(story())


def test_a_server_that_is_gone_is_an_error_and_none_that_hangs(tmp_path: Path) -> None:
    with servers.valkey() as server, ragfence.open(server.url, tenant="gone") as fence:

        async def story() -> None:
            claims = ClaimBatcher(fence.inspector.fences)
            server.stop()
            with pytest.raises(StoreUnavailable):
                await claims.submit(request(fence, "k")).wait()

        asyncio.run(story())


def test_who_gives_up_meanwhile_holds_nothing(fence: Fence) -> None:
    async def story() -> None:
        claims = ClaimBatcher(fence.inspector.fences)
        waiting = asyncio.create_task(claims.submit(request(fence, "k")).wait())
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
