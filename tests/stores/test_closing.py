"""A fence that is closed beneath running calls: each ends or is told so, and no connection is left open."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import redis

import ragfence
from ragfence.core.decisions import Mode
from ragfence.errors import SealUncertain, StoreClosed
from ragfence.stores.redis.connection import RedisCall
from ragfence.stores.redis.store import RedisFences
from ragfence.testing.contracts.fence_calls import claim, granted
from tests import servers
from tests.engine.jobs import Job
from tests.engine.worlds import World, eventually


@pytest.fixture
def client(valkey_server: servers.RedisServer) -> Iterator[Any]:
    with redis.Redis.from_url(valkey_server.url, decode_responses=True) as client:
        client.flushall()
        yield client


def _others(client: Any) -> list[str]:
    return [each["addr"] for each in client.client_list() if int(each["id"]) != client.client_id()]


def test_a_reply_that_is_awaited_while_the_store_is_closed_still_comes(
    valkey_server: servers.RedisServer, client: Any
) -> None:
    before = set(_others(client))
    store = RedisFences(valkey_server.url, solo=True)
    begun = store._link.begin([RedisCall(0, (b"GET", b"nothing"))])
    store.close()
    assert begun.end().replies == [None]
    eventually(lambda: set(_others(client)) <= before)
    with pytest.raises(StoreClosed):
        store.now_ms()
    assert set(_others(client)) <= before


def test_a_fence_that_is_closed_beneath_coroutines_answers_in_its_own_words(
    valkey_server: servers.RedisServer, client: Any
) -> None:
    before = set(_others(client))

    async def run(turn: int) -> list[Any]:
        fence = ragfence.open(valkey_server.url)

        @fence.once(kind="t", key=lambda number: f"{turn} {number}", wait_s=20)
        async def effect(number: int) -> int:
            await asyncio.sleep(0)
            return number

        calls = [asyncio.create_task(effect(number % 20)) for number in range(60)]
        await asyncio.sleep(turn * 0.002)
        fence.close()
        ended = list(await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60))
        with pytest.raises(StoreClosed):
            await effect(99)
        return ended

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        for turn in range(10):
            odd = [each for each in asyncio.run(run(turn)) if not isinstance(each, ragfence.Receipt)]
            assert all(isinstance(each, StoreClosed | SealUncertain) for each in odd), odd
        gc.collect()
    eventually(lambda: set(_others(client)) <= before)


def test_a_closed_cluster_leaves_no_connection_open(valkey_cluster_server: servers.RedisCluster) -> None:
    store = RedisFences(valkey_cluster_server.url, solo=True)
    for shard in range(0, 64, 8):
        granted(store, claim(Mode.KEYED, by=f"closing {shard}", shard=shard))
    store.infos()
    store.lock("name", "token", 1000)
    pools = [node.redis_connection.connection_pool for node in store._link.client.get_nodes() if node.redis_connection]
    store.close()
    with pytest.raises(StoreClosed):
        store.lock("name", "token", 1000)
    assert pools
    assert not any(each._sock for pool in pools for each in (*pool._available_connections, *pool._in_use_connections))


def test_a_closed_fence_performs_nothing_although_it_would_while_its_store_is_away(tmp_path: Any) -> None:
    fence, job = ragfence.open(tmp_path / "fence", policy=ragfence.Policy(on_store_error="open")), Job()
    fence.close()
    with pytest.raises(StoreClosed):
        job.on(fence)()
    assert job.done == 0


def test_an_effect_whose_fence_is_closed_is_uncertain_at_once(embedded: World) -> None:
    fence, job = embedded.open(lease={"seal_retry_s": 600}), Job()
    job.during.append(fence.close)
    with pytest.raises(SealUncertain):
        job.on(fence)()
