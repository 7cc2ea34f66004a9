"""What a sealed record costs in the server's memory, ours and the peer's, each on a server of its own."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis

from tests.bench.machine import redis_server
from tests.bench.peers.process import powertools
from tests.bench.scale import Scale
from tests.bench.single import RESULT, guarded

SAMPLED = 1_000
REHASHED_WITHIN_S = 30.0
WARM = 1_000
"""operations first, so that markers, counters, scripts and buffers are there before anything is compared"""


def measure(scale: Scale, peer: Path | None) -> dict[str, Any]:
    measured: dict[str, Any] = {"result_characters": len(RESULT), "records": scale.records}
    with _server() as (url, folder, client), guarded(url, folder) as ours:
        measured["ragfence"] = _of(client, scale.records, lambda count: ours.each(ours.fresh(count)))
    if peer is not None:
        with _server() as (url, _, client), powertools(peer, url) as other:
            measured["Powertools"] = _of(client, scale.records, lambda count: other.seconds("new", count, 0))
    return measured


def drop_rows(client: redis.Redis) -> None:
    """Trims the decision rows away; the only streams there are."""
    for name in client.scan_iter(count=1_000, _type="stream"):
        client.xtrim(name, maxlen=0, approximate=False)


def _of(client: redis.Redis, records: int, seal: Callable[[int], object]) -> dict[str, Any]:
    seal(WARM)
    drop_rows(client)
    names_before, used_before = set(client.scan_iter(count=1_000)), used_memory(client)
    seal(records)
    drop_rows(client)
    used = used_memory(client) - used_before
    names = sorted(set(client.scan_iter(count=1_000)) - names_before)
    if len(names) != records:
        raise RuntimeError(f"{records} operations made {len(names)} keys")
    with client.pipeline(transaction=False) as pipe:
        for name in names[:: max(1, len(names) // SAMPLED)]:
            pipe.memory_usage(name, samples=0)
        sizes = pipe.execute()
    return {
        "record_bytes": statistics.mean(sizes),
        "record_bytes_highest": max(sizes),
        "server_bytes_per_record": used / records,
    }


def used_memory(client: redis.Redis) -> int:
    """After the tables are rehashed, which goes on in the background; what connections need comes and goes."""
    give_up_at = time.monotonic() + REHASHED_WITHIN_S
    while client.info("memory").get("mem_overhead_db_hashtable_rehashing", 0) and time.monotonic() < give_up_at:
        time.sleep(0.1)
    readings = []
    for _ in range(5):
        readings.append(int(client.info("memory")["used_memory"]))
        time.sleep(0.1)
    return int(statistics.median(readings))


@contextlib.contextmanager
def _server() -> Iterator[tuple[str, Path, redis.Redis]]:
    with redis_server() as server, redis.Redis.from_url(server.url) as client:
        yield server.url, server.folder, client
