"""The fence on Redis alone, audit on, beside raw redis-py on the same server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import redis

import ragfence
from ragfence.core.decisions import Claim, Granted, Replay, Seal
from ragfence.stores.fences_redis import RedisFences
from tests import servers
from tests.bench.rounds import Subject

BATCH = 500
RESULT = b'j"' + b"r" * 36 + b'"'
CONTEXT = b'{"kind":"bench","source_id":"source-000000"}'


@contextmanager
def subjects() -> Iterator[list[Subject]]:
    with servers.valkey() as server, redis.Redis.from_url(server.url) as raw:
        fence = ragfence.open(server.url, journal=server.folder / "journal")
        store = RedisFences(server.url, "bulk", solo=True)

        @fence.once(kind="bench", key=lambda number: str(number), payload=lambda number: None)
        def effect(number: int) -> str:
            return "r" * 36

        raw.set("floor", b"x" * 100)
        effect(0)
        _bulk_new(store, 0, 1)
        yield [
            Subject("raw GET", lambda _: [raw.get("floor") for _ in range(300)].__len__()),
            Subject("replay, once", lambda _: [effect(0) for _ in range(300)].__len__()),
            Subject("raw SET NX + SET", lambda _: _set_twice(raw, 200)),
            Subject("new, once", lambda n: [effect(f"{n}.{i}") for i in range(200)].__len__()),
            Subject("pipelined SET NX", lambda _: _pipelined(raw, BATCH * 4)),
            Subject("bulk replay", lambda _: _bulk_replay(store, 4)),
            Subject("bulk new", lambda n: _bulk_new(store, n + 2, 2)),
        ]
        store.close()
        fence.close()


def _set_twice(raw: redis.Redis, count: int) -> int:
    for _ in range(count):
        key = os.urandom(16)
        raw.set(key, b"pending", nx=True, px=60_000)
        raw.set(key, b"x" * 100, px=60_000)
    return count


def _pipelined(raw: redis.Redis, count: int) -> int:
    for _ in range(count // BATCH):
        with raw.pipeline(transaction=False) as pipe:
            for _ in range(BATCH):
                pipe.set(os.urandom(16), b"x" * 100, nx=True, px=60_000)
            pipe.execute()
    return count


def _claims(series: int) -> list[Claim]:
    return [
        Claim(
            key=bytes((number % 64,)) + series.to_bytes(16, "big") + number.to_bytes(16, "big"),
            fingerprint=b"f" * 16,
            token=os.urandom(16),
            pending_ttl_ms=3_600_000,
            kind="bench",
            context=CONTEXT,
        )
        for number in range(BATCH)
    ]


def _bulk_new(store: RedisFences, series: int, batches: int) -> int:
    for batch in range(batches):
        claims = _claims(series * 1000 + batch)
        verdicts = store.claim(claims)
        seals = []
        for claim, verdict in zip(claims, verdicts, strict=True):
            assert isinstance(verdict, Granted)
            seals.append(
                Seal(
                    key=claim.key,
                    token=claim.token,
                    fence=verdict.record.fence,
                    result=RESULT,
                    ttl_ms=3_600_000,
                    context=CONTEXT,
                )
            )
        store.seal(seals)
    return batches * BATCH


def _bulk_replay(store: RedisFences, batches: int) -> int:
    for _ in range(batches):
        verdicts = store.claim(_claims(0))
        assert all(isinstance(verdict, Replay) for verdict in verdicts)
    return batches * BATCH
