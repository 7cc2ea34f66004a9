"""`fence.lock`: one holder at a time, numbers that only grow, and a holder who learns that it lost the lock."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

import ragfence
from ragfence.core.decision_rows import Phase
from ragfence.engine.lock import lock_operation
from ragfence.errors import InFlight, LeaseLost, ValidationError
from ragfence.stores.fences import all_of
from tests import servers

NAME = "reindex:docs"


@pytest.fixture(params=["embedded", "valkey"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "embedded":
        return str(tmp_path / "store")
    server: servers.RedisServer = request.getfixturevalue("valkey_server")
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    return server.url


@pytest.fixture
def fence(url: str) -> Iterator[ragfence.Fence]:
    with ragfence.open(url) as opened:
        yield opened


def test_a_lock_gives_a_lease_with_a_number_that_grows(fence: ragfence.Fence) -> None:
    numbers = []
    for _ in range(7):  # more than max_attempts
        with fence.lock(NAME) as lease:
            lease.check()
            numbers.append(lease.fence)
    assert sorted(set(numbers)) == numbers
    assert list(all_of(fence.inspector.fences)) == []


def test_a_lock_that_is_held_is_refused_with_its_holder(fence: ragfence.Fence) -> None:
    with fence.lock(NAME, ttl_s=20), pytest.raises(InFlight) as refused, fence.lock(NAME):
        pass
    error = refused.value
    assert error.holder.endswith(f":{os.getpid()}")
    assert 15_000 < error.retry_after_ms <= 20_000
    assert error.key == lock_operation(NAME).in_tenant(fence.tenant).key.hex()
    assert "'reindex:docs' is held by" in error.message
    with fence.lock(NAME), fence.lock("another"):
        pass


def test_whoever_waits_gets_the_lock_when_it_is_released(fence: ragfence.Fence) -> None:
    order: list[str] = []
    entered = threading.Event()

    def hold() -> None:
        with fence.lock(NAME):
            entered.set()
            time.sleep(0.2)
            order.append("first")

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait(10)
    with fence.lock(NAME, wait_s=20):
        order.append("second")
    holder.join()
    assert order == ["first", "second"]
    acquired = [row for row in fence.audit.rows() if row.phase is Phase.CLAIM]
    assert acquired[-1].waited_ms >= 50


def test_only_one_of_many_is_inside(fence: ragfence.Fence) -> None:
    inside, most, done = 0, 0, 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most, done
        for _ in range(4):
            with fence.lock(NAME, wait_s=60):
                with guard:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0.002)
                with guard:
                    inside -= 1
                    done += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, done) == (1, 16)


def test_an_async_block_holds_the_lock_and_can_be_cancelled(fence: ragfence.Fence) -> None:
    async def scenario() -> None:
        async with fence.lock(NAME) as lease:
            lease.check()
            with pytest.raises(InFlight):
                async with fence.lock(NAME):
                    pass
            waiting = asyncio.create_task(_hold(fence))
            await asyncio.sleep(0.1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        async with fence.lock(NAME):
            pass

    asyncio.run(scenario())
    assert list(all_of(fence.inspector.fences)) == []


async def _hold(fence: ragfence.Fence) -> None:
    async with fence.lock(NAME, wait_s=60):
        raise AssertionError("the lock was held")


def test_the_heartbeat_keeps_a_lock_past_its_ttl(fence: ragfence.Fence) -> None:
    with fence.lock(NAME, ttl_s=0.6) as lease:
        for _ in range(6):
            time.sleep(0.2)
            with pytest.raises(InFlight), fence.lock(NAME):
                pass
        lease.check()


def test_an_error_in_the_block_releases_the_lock_and_passes_on(fence: ragfence.Fence) -> None:
    with pytest.raises(KeyError), fence.lock(NAME):
        raise KeyError("x")
    with fence.lock(NAME):
        pass
    released = [row.error_code for row in fence.audit.rows() if row.phase is Phase.RELEASE]
    assert released == ["KeyError", "RELEASED"]


def test_a_lock_that_was_taken_away_is_lost_at_the_check_and_at_the_end(fence: ragfence.Fence) -> None:
    lock = fence.lock(NAME, ttl_s=0.6)
    with pytest.raises(LeaseLost, match="before its block ended"), lock as first:  # noqa: PT012
        assert fence.release(lock.key) is True
        with fence.lock(NAME) as second:
            assert second.fence > first.fence
            _until(lambda: first.lost)
            with pytest.raises(LeaseLost):
                first.check()
            second.check()
    with fence.lock(NAME) as third:
        third.check()


def test_a_lost_lock_does_not_free_that_of_the_next_holder(fence: ragfence.Fence) -> None:
    with pytest.raises(KeyError), fence.lock(NAME):  # noqa: PT012  # the error of the block wins
        fence.release(lock_operation(NAME))
        second = fence.lock(NAME)
        second.__enter__()
        raise KeyError("x")
    with pytest.raises(InFlight), fence.lock(NAME):
        pass
    second.__exit__(None, None, None)


def test_releasing_a_lock_that_nobody_holds_says_so(fence: ragfence.Fence) -> None:
    with fence.lock(NAME):
        pass
    assert fence.release(lock_operation(NAME)) is False


def test_the_ttl_is_below_the_timeout_of_the_function_by_a_margin(fence: ragfence.Fence) -> None:
    with pytest.raises(ValidationError, match="outlive its holder") as refused:
        fence.lock(NAME, ttl_s=30, timeout_s=30)
    assert "ttl_s=27" in refused.value.hint
    with pytest.raises(LeaseLost), fence.lock(NAME, ttl_s=0.9, timeout_s=1.0) as lease:  # noqa: PT012
        with fence.lock(NAME, wait_s=30):  # it was not renewed
            pass
        lease.check()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("", {}),
        ("a\x00b", {}),
        ("x" * 2000, {}),
        (7, {}),
        (NAME, {"ttl_s": "30"}),
        (NAME, {"wait_s": None}),
        (NAME, {"ttl_s": True}),
        (NAME, {"ttl_s": 0}),
        (NAME, {"ttl_s": -1}),
        (NAME, {"ttl_s": float("nan")}),
        (NAME, {"ttl_s": 10**9}),
        (NAME, {"wait_s": -1}),
        (NAME, {"wait_s": float("inf")}),
        (NAME, {"timeout_s": 0}),
        (NAME, {"timeout_s": float("nan")}),
    ],
)
def test_a_lock_that_makes_no_sense_is_refused(fence: ragfence.Fence, name: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        fence.lock(name, **given)


def test_a_lock_object_is_used_again_but_not_while_it_is_held(fence: ragfence.Fence) -> None:
    lock = fence.lock(NAME)
    for _ in range(2):
        with lock, pytest.raises(ValidationError, match="in use"), lock:
            pass
    with fence.lock(NAME), pytest.raises(InFlight), lock:
        pass
    with lock:
        assert repr(lock) == "<Lock 'reindex:docs', held>"


def test_the_kind_of_locks_belongs_to_them(fence: ragfence.Fence) -> None:
    with pytest.raises(ValidationError, match=r"fence\.lock"), fence.claim(lock_operation(NAME)):
        pass
    with fence.claim(ragfence.Operation(kind="lock", source_id=NAME)) as op:  # a kind of one's own
        op.seal()


def test_a_forked_child_has_no_lock(fence: ragfence.Fence) -> None:
    with fence.lock(NAME) as lease:
        child = os.fork()
        if child == 0:
            try:
                lease.check()
            except LeaseLost:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        lease.check()
        with pytest.raises(InFlight), fence.lock(NAME):
            pass


def test_a_flushed_store_gives_the_next_holder_a_higher_number(url: str, tmp_path: Path) -> None:
    if not url.startswith("redis"):
        pytest.skip("SQLite is not flushed")
    for objects in (None, str(tmp_path / "objects")):
        with ragfence.open(url, objects=objects, tenant=f"t{bool(objects)}") as fence:
            _flush_while_held(fence, url)


def _flush_while_held(fence: ragfence.Fence, url: str) -> None:
    with pytest.raises(LeaseLost), fence.lock(NAME, ttl_s=1) as first:  # noqa: PT012
        with redis.Redis.from_url(url) as client:
            client.flushall()
        with fence.lock(NAME) as second:
            assert second.fence > first.fence
            _until(lambda: first.lost)
        first.check()


def test_an_epoch_ends_a_lock_and_its_holder_learns_it(tmp_path: Path) -> None:
    with ragfence.open(tmp_path / "store") as fence:
        with pytest.raises(LeaseLost), fence.lock(NAME, ttl_s=0.6) as lease:  # noqa: PT012
            fence.hydrate()
            _until(lambda: lease.lost)
            lease.check()
        with fence.lock(NAME, wait_s=5) as after:
            assert after.fence > lease.fence


def _until(holds: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)
