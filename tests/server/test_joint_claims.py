"""Claims that arrive together: one call to the store, and for each of them what it would have got alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence import Fence, Operation, Policy
from ragfence.core.decisions import Claim, Granted, Replay, Verdict
from ragfence.core.layout import State
from ragfence.engine.aio import ClaimBatcher
from ragfence.engine.claim_block import ClaimBlock
from ragfence.engine.requests import Request
from ragfence.errors import FormatTooNew, StoreUnavailable
from tests.server.conftest import OpenFence
from tests.servers import RedisServer


class Counting:
    """The calls to a store's `claim`, and a gate that holds them up."""

    def __init__(self, fence: Fence, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.open = threading.Event()
        self.open.set()
        self.at_the_gate = threading.Event()
        self.error: Callable[[Sequence[Claim]], Exception | None] = lambda claims: None
        self.after = False
        """whether the error comes after the store has done its part"""
        claim = fence.inspector.fences.claim

        def counted(claims: Sequence[Claim]) -> list[Verdict]:
            self.sizes.append(len(claims))
            self.at_the_gate.set()
            self.open.wait(30)
            error = self.error(claims)
            if error is not None and not self.after:
                raise error
            verdicts = claim(claims)
            if error is not None:
                raise error
            return verdicts

        monkeypatch.setattr(fence.inspector.fences, "claim", counted)


@pytest.fixture
def fence(open_fence: OpenFence) -> Fence:
    """One that has been used before: the first claim of all makes the store ready."""
    fence = open_fence()
    fence.hydrate()
    return fence


@pytest.fixture
def counting(fence: Fence, monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(fence, monkeypatch)


def request(fence: Fence, name: str, payload: object = None) -> Request:
    return fence._engine.request(Operation(kind="test", source_id=name), payload)


def claimed(fence: Fence, joint: ClaimBatcher, name: str, payload: object = None, wait_ms: int = 0) -> ClaimBlock:
    return ClaimBlock(fence._engine.runner, request(fence, name, payload), wait_ms=wait_ms, verdict=True, batcher=joint)


async def performed(op: ClaimBlock, result: object = "done") -> tuple[str, Any]:
    async with op:
        if op.error is not None:
            return str(op.decision), op.error.code
        if op.is_new:
            await asyncio.to_thread(op.seal, result=result)
            return "new", result
        return "duplicate", op.receipt.result


def record(fence: Fence, name: str) -> Any:
    (held,) = fence.inspector.fences.read([request(fence, name).lookup])
    return held.record


def rows(fence: Fence) -> list[tuple[str, str]]:
    told = fence.audit.decisions(since="1h").to_pylist()
    return sorted((row["source_id"], row["decision"]) for row in told if row["kind"] == "test")


def test_claims_that_arrive_together_are_one_call(fence: Fence, counting: Counting) -> None:
    joint = ClaimBatcher(fence.inspector.fences)

    async def story() -> None:
        first = await asyncio.gather(*(performed(claimed(fence, joint, f"k{n}"), n) for n in range(20)))
        assert first == [("new", n) for n in range(20)]
        again = await asyncio.gather(*(performed(claimed(fence, joint, f"k{n}")) for n in range(20)))
        assert again == [("duplicate", n) for n in range(20)]

    asyncio.run(story())
    assert counting.sizes == [20, 20]


def test_what_arrives_during_a_call_leaves_with_the_next_and_no_call_is_too_long(
    fence: Fence, counting: Counting
) -> None:
    joint = ClaimBatcher(fence.inspector.fences, max_claims=8)

    async def story() -> None:
        counting.open.clear()
        early = asyncio.create_task(performed(claimed(fence, joint, "early")))
        await asyncio.to_thread(counting.at_the_gate.wait)
        late = [asyncio.create_task(performed(claimed(fence, joint, f"late{n}"))) for n in range(11)]
        await asyncio.sleep(0)
        counting.open.set()
        await asyncio.gather(early, *late)

    asyncio.run(story())
    assert counting.sizes == [1, 8, 3]


def test_every_claim_leaves_the_row_that_it_leaves_alone(open_fence: OpenFence) -> None:
    together, alone = open_fence(tenant="together"), open_fence(tenant="alone")
    names = ["a", "b", "a", "c", "a"]

    async def jointly() -> None:
        joint = ClaimBatcher(together.inspector.fences)
        await asyncio.gather(*(performed(claimed(together, joint, name, wait_ms=0)) for name in set(names)))
        await asyncio.gather(*(performed(claimed(together, joint, name, wait_ms=0)) for name in names))

    async def one_by_one() -> None:
        for name in [*sorted(set(names)), *names]:
            op = alone.claim(Operation(kind="test", source_id=name), wait_s=0, verdict=True)
            await performed(op)

    asyncio.run(jointly())
    asyncio.run(one_by_one())
    assert rows(together) == rows(alone)


@pytest.mark.parametrize("store", ["sqlite", "valkey"])
def test_twins_in_one_call_have_one_effect(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with opened(store, tmp_path, request) as fence:
        joint = ClaimBatcher(fence.inspector.fences)

        async def story() -> None:
            twins = [performed(claimed(fence, joint, f"k{n % 4}", wait_ms=20_000), n) for n in range(24)]
            answers = await asyncio.gather(*twins)
            assert sum(decision == "new" for decision, _ in answers) == 4
            for n in range(4):
                assert len({result for _, result in answers[n::4]}) == 1
            others = [performed(claimed(fence, joint, f"k{n % 4}", {"other": n}), n) for n in range(8)]
            assert {decision for decision, _ in await asyncio.gather(*others)} == {"conflict"}

        asyncio.run(story())


def opened(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> Fence:
    if store == "sqlite":
        return ragfence.open(tmp_path / "fence", tenant="acme")
    server: RedisServer = request.getfixturevalue("valkey_server")
    return ragfence.open(server.url, objects=tmp_path / "objects", tenant=tmp_path.name, policy=Policy())


@pytest.mark.parametrize("times", [1, 3])
def test_who_is_cancelled_during_the_call_holds_nothing(fence: Fence, counting: Counting, times: int) -> None:
    joint = ClaimBatcher(fence.inspector.fences)

    async def story() -> None:
        counting.open.clear()
        gone = asyncio.create_task(performed(claimed(fence, joint, "gone")))
        stays = asyncio.create_task(performed(claimed(fence, joint, "stays")))
        await asyncio.to_thread(counting.at_the_gate.wait)
        queued = asyncio.create_task(performed(claimed(fence, joint, "queued")))
        await asyncio.sleep(0)
        for _ in range(times):
            gone.cancel()
            queued.cancel()
            await asyncio.sleep(0)
        counting.open.set()
        assert await stays == ("new", "done")
        for task in (gone, queued):
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(story())  # which waits for its threads
    assert (record(fence, "gone").state, record(fence, "gone").error) == (State.RELEASED, "CANCELLED")
    assert record(fence, "queued") is None
    assert asyncio.run(performed(claimed(fence, joint, "gone"))) == ("new", "done")


def test_a_verdict_that_nobody_acts_upon_is_given_back(fence: Fence) -> None:
    joint = ClaimBatcher(fence.inspector.fences)

    async def story() -> None:
        op = claimed(fence, joint, "k")
        assert await op.try_replay() is None
        op.discard()
        never_known = claimed(fence, joint, "other")
        assert await never_known.try_replay(timeout_s=0) is None
        never_known.discard()

    asyncio.run(story())
    assert record(fence, "k").state is State.RELEASED
    assert record(fence, "other") is None or record(fence, "other").state is State.RELEASED


def test_who_cannot_wait_any_longer_may_go_on_waiting_later(fence: Fence, counting: Counting) -> None:
    joint = ClaimBatcher(fence.inspector.fences)

    async def story() -> None:
        counting.open.clear()
        op = claimed(fence, joint, "k")
        assert await op.try_replay(timeout_s=0.01) is None
        counting.open.set()
        assert await performed(op) == ("new", "done")

    asyncio.run(story())
    assert counting.sizes == [1]
    assert rows(fence) == [("k", "new")] * 2  # of its claim and of its seal


def test_a_store_that_is_away_is_told_to_everybody(fence: Fence, counting: Counting) -> None:
    joint = ClaimBatcher(fence.inspector.fences)
    counting.error = lambda claims: StoreUnavailable("the store did not answer")

    async def story() -> Any:
        ops = [performed(claimed(fence, joint, f"k{n}")) for n in range(3)]
        return await asyncio.gather(*ops, return_exceptions=True)

    errors = asyncio.run(story())
    assert [type(error) for error in errors] == [StoreUnavailable] * 3
    assert len({id(error) for error in errors}) == 3
    assert counting.sizes == [3]


@pytest.mark.parametrize("after", [False, True])
def test_one_that_cannot_be_read_spoils_nobody_else(fence: Fence, counting: Counting, after: bool) -> None:
    """Also if the store had granted the others by then: they ask again with their tokens."""
    joint = ClaimBatcher(fence.inspector.fences)
    bad = request(fence, "bad").key
    counting.after = after

    def unreadable(claims: Sequence[Claim]) -> Exception | None:
        return FormatTooNew("from the future") if any(claim.key == bad for claim in claims) else None

    counting.error = unreadable

    async def story() -> Any:
        names = ["a", "bad", "b"]
        return await asyncio.gather(*(performed(claimed(fence, joint, name)) for name in names), return_exceptions=True)

    a, spoilt, b = asyncio.run(story())
    assert a == b == ("new", "done")
    assert isinstance(spoilt, FormatTooNew)
    assert [record(fence, name).attempt for name in "ab"] == [1, 1]


def test_a_store_that_forgot_is_made_ready_first(tmp_path: Path, valkey_server: RedisServer) -> None:
    with ragfence.open(valkey_server.url, objects=tmp_path / "objects", tenant=tmp_path.name) as fence:
        joint = ClaimBatcher(fence.inspector.fences)
        assert asyncio.run(performed(claimed(fence, joint, "k"))) == ("new", "done")
        with valkey_server.client() as client:
            client.flushall()

        async def story() -> None:
            answers = await asyncio.gather(*(performed(claimed(fence, joint, name)) for name in ("k", "l")))
            assert answers == [("duplicate", "done"), ("new", "done")]

        asyncio.run(story())


def test_a_verdict_is_known_without_a_second_look_only_if_its_result_is_near(fence: Fence) -> None:
    joint = ClaimBatcher(fence.inspector.fences)
    large = "x" * 600_000

    async def story() -> None:
        await performed(claimed(fence, joint, "small"), "s")
        await performed(claimed(fence, joint, "large"), large)
        small, far = claimed(fence, joint, "small"), claimed(fence, joint, "large")
        replayed = await small.try_replay()
        assert replayed is not None
        assert replayed.receipt().result == "s"
        assert await far.try_replay() is None
        assert await performed(far) == ("duplicate", large)

    asyncio.run(story())


def test_two_loops_share_nothing_but_the_store(fence: Fence) -> None:
    joint = ClaimBatcher(fence.inspector.fences)
    answers: list[Any] = []

    def in_a_loop() -> None:
        async def story() -> None:
            answers.extend(
                await asyncio.gather(*(performed(claimed(fence, joint, f"k{n}", wait_ms=20_000)) for n in range(5)))
            )

        asyncio.run(story())

    threads = [threading.Thread(target=in_a_loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(decision for decision, _ in answers) == ["duplicate"] * 5 + ["new"] * 5


def test_verdicts_are_those_of_the_store(fence: Fence) -> None:
    joint = ClaimBatcher(fence.inspector.fences)

    async def story() -> None:
        asking = joint.submit(request(fence, "k"))
        asked = await asking.wait()
        assert asked is not None
        assert isinstance(asked.verdict, Granted)
        asking.discard()
        await performed(claimed(fence, joint, "l"))
        known = await joint.submit(request(fence, "l")).wait()
        assert known is not None
        assert isinstance(known.verdict, Replay)

    asyncio.run(story())
