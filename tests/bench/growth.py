"""Replays in a small and in a large store: two servers, the same keys on both, only the rest differs."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import redis

from tests.bench.bulk import Bulk
from tests.bench.machine import redis_server
from tests.bench.memory import drop_rows
from tests.bench.rounds import Subject, clocked
from tests.bench.scale import Scale
from tests.bench.single import RAW_VALUE, Guarded, guarded, request

FILL_BATCH = 1_000


@contextlib.contextmanager
def subjects(scale: Scale, say: Callable[[str], None]) -> Iterator[list[Subject]]:
    with contextlib.ExitStack() as stack:
        made = []
        for records in (scale.few, scale.many):
            say(f"sealing {records:,} records")
            server = stack.enter_context(redis_server())
            ours = stack.enter_context(guarded(server.url, server.folder))
            requests = fill(ours, server.url, wanted=scale.few, records=records)
            made.append(_walk(ours, f"replay among {records:,}", requests, scale.replays))
            client = stack.enter_context(redis.Redis.from_url(server.url))
            made.append(_read(client, f"raw GET among {records:,}", scale.few, scale.replays))
        yield made


def fill(ours: Guarded, url: str, *, wanted: int, records: int) -> list[dict[str, Any]]:
    """Seals `records` records, and returns the requests of `wanted` of them, which lie evenly among the others."""
    requests = [request(f"walked-{number:06d}") for number in range(wanted)]
    others, filled = records - wanted, 0
    with contextlib.closing(Bulk(url)) as bulk, redis.Redis.from_url(url) as client:
        for number, one in enumerate(requests, 1):
            ours.call(one)
            due = others * number // wanted
            while filled < due:
                size = min(FILL_BATCH, due - filled)
                bulk.perform(bulk.claims(bulk.keys(size)))
                filled += size
        # The rows of a million decisions are no part of the question: both servers go on without any.
        drop_rows(client)
    return requests


def _walk(ours: Guarded, name: str, requests: list[dict[str, Any]], count: int) -> Subject:
    def some(number: int) -> list[dict[str, Any]]:
        return random.Random(number).choices(requests, k=count)  # the same ones on both servers

    return ours.subject(name, count, some, new=False)


def _read(client: redis.Redis, name: str, wanted: int, count: int) -> Subject:
    """What the same walk costs without us: plain values, as many as there are requests, beside all the records."""
    names = [f"floor-{number:06d}" for number in range(wanted)]
    client.mset(dict.fromkeys(names, RAW_VALUE))

    def work(some: list[str]) -> None:
        get = client.get
        for one in some:
            get(one)

    return Subject(name, count, clocked(work, prepare=lambda number: random.Random(number).choices(names, k=count)))
