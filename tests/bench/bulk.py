"""Many keys in one call of the fence store, receipts decoded, beside pipelined `SET NX` on the same server.

A call's arguments are made ready before the clock starts, for the fence (claims) as for the floor (keys and values);
"claims built too" has the making of 500 `Claim`s on the clock as well.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence

import redis

from ragfence.core.decisions import Claim, Granted, Replay, Seal, Sealed
from ragfence.core.layout import TOKEN_BYTES
from ragfence.core.policy import Policy
from ragfence.core.receipts import Decision, Flags, Receipt
from ragfence.engine.results import Results
from ragfence.stores.redis.store import RedisFences
from tests.bench.rounds import Subject, clocked
from tests.bench.scale import Scale
from tests.bench.single import KIND, RAW_VALUE, RESULT

TENANT = "default"
TTL_MS = 3_600_000
CONTEXT = b'{"kind":"bench","source_id":"000000000000","owner":"bench:1"}'
FINGERPRINT = b"f" * 16

Batches = list[list[Claim]]


class Bulk:
    def __init__(self, url: str, tenant: str = TENANT) -> None:
        self._store = RedisFences(url, tenant, solo=True)
        self._results = Results(tenant, Policy(), None)
        self._result = self._results.store(RESULT, "bench")
        self._dice = random.Random(1)

    def claims(self, keys: Sequence[bytes]) -> list[Claim]:
        return [
            Claim(
                key=key,
                fingerprint=FINGERPRINT,
                token=os.urandom(TOKEN_BYTES),
                pending_ttl_ms=TTL_MS,
                kind=KIND,
                owner="bench:1",
                context=CONTEXT,
            )
            for key in keys
        ]

    def keys(self, count: int) -> list[bytes]:
        """As digests are: spread evenly over the shards."""
        return [bytes((self._dice.randrange(64),)) + self._dice.randbytes(32) for _ in range(count)]

    def fresh(self, batches: int, size: int) -> Batches:
        return [self.claims(self.keys(size)) for _ in range(batches)]

    def replay(self, claims: list[Claim]) -> list[Receipt]:
        receipt, duplicate, flags = self._results.receipt, Decision.DUPLICATE, Flags()
        receipts = []
        for claim, verdict in zip(claims, self._store.claim(claims), strict=True):
            if not isinstance(verdict, Replay) or verdict.record is None:
                raise RuntimeError(f"a sealed key was answered with {type(verdict).__name__}")
            receipts.append(receipt(claim.key, verdict.record, duplicate, flags))
        return receipts

    def perform(self, claims: list[Claim]) -> None:
        seals = []
        for claim, verdict in zip(claims, self._store.claim(claims), strict=True):
            if not isinstance(verdict, Granted):
                raise RuntimeError(f"a new key was answered with {type(verdict).__name__}")
            seals.append(
                Seal(
                    key=claim.key,
                    token=claim.token,
                    fence=verdict.record.fence,
                    result=self._result,
                    ttl_ms=TTL_MS,
                    context=CONTEXT,
                )
            )
        for outcome in self._store.seal(seals):
            if not isinstance(outcome, Sealed):
                raise RuntimeError(f"a seal was answered with {type(outcome).__name__}")

    def close(self) -> None:
        self._store.close()


class PipelinedSetNx:
    """The floor: as many round trips as the fence's batch, no decision, no row, no receipt."""

    def __init__(self, client: redis.Redis, batches: int, size: int) -> None:
        self._client, self._batches, self._size = client, batches, size

    @property
    def subject(self) -> Subject:
        count = self._batches * self._size
        return Subject("pipelined SET NX", count, clocked(self._work, prepare=self._prepare, check=self._tidy))

    def _prepare(self, number: int) -> list[list[bytes]]:
        return [[os.urandom(33) for _ in range(self._size)] for _ in range(self._batches)]

    def _work(self, batches: list[list[bytes]]) -> None:
        for keys in batches:
            with self._client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.set(key, RAW_VALUE, nx=True, px=TTL_MS)
                pipe.execute()

    def _tidy(self, batches: list[list[bytes]]) -> None:
        for keys in batches:
            if self._client.unlink(*keys) != len(keys):
                raise RuntimeError("not every SET NX was a new key")


@contextlib.contextmanager
def subjects(url: str, scale: Scale) -> Iterator[list[Subject]]:
    with redis.Redis.from_url(url) as client, contextlib.closing(Bulk(url, "bulk")) as bulk:
        yield [
            PipelinedSetNx(client, scale.batches, scale.batch).subject,
            *_of(bulk, scale.batches, scale.batch),
        ]


def _of(bulk: Bulk, batches: int, size: int) -> list[Subject]:
    sealed = bulk.keys(size)
    bulk.perform(bulk.claims(sealed))
    count = batches * size

    def replay(ready: Batches) -> None:
        for claims in ready:
            bulk.replay(claims)

    def build_and_replay(_ready: None) -> None:
        for _ in range(batches):
            bulk.replay(bulk.claims(sealed))

    def perform(ready: Batches) -> None:
        for claims in ready:
            bulk.perform(claims)

    def again(_number: int) -> Batches:  # other tokens every time: else it would be the same call, repeated
        return [bulk.claims(sealed) for _ in range(batches)]

    return [
        Subject("bulk replay", count, clocked(replay, prepare=again)),
        Subject("bulk replay, claims built too", count, clocked(build_and_replay, prepare=lambda _: None)),
        Subject("bulk new", count, clocked(perform, prepare=lambda _: bulk.fresh(batches, size))),
    ]
