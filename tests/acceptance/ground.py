"""The servers of a run, each with one role, and the numbers that come out of them past ragfence.

fences     a replicated Valkey under sentinels, with commits in a folder: flushed and failed over
queue      a Valkey of its own: never flushed, never lost
database   PostgreSQL: the effects, and what a consumer's own transactions remember
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

import ragfence
from tests import servers
from tests.servers.postgres import postgres

LEASE_S, VISIBILITY_S = 3.0, 3.5
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Processes are killed here, not the machine: nothing has to reach a disk. PostgreSQL runs without fsync, too."""

metadata = sa.MetaData()
effects = sa.Table(
    "effects",
    metadata,
    sa.Column("id", sa.BigInteger, primary_key=True),
    sa.Column("place", sa.String(40), nullable=False),
    sa.Column("key", sa.String(64), nullable=False),
    sa.Column("value", sa.BigInteger, nullable=False, server_default="0"),
    sa.Index("effects_place", "place", "key"),
)
"""No unique key: what happens twice is there twice."""


@dataclass(frozen=True, slots=True)
class Ground:
    folder: Path
    database: str
    queue: servers.RedisServer
    fences: servers.SentinelPair
    known: set[str] = field(default_factory=set)

    @property
    def objects(self) -> str:
        return str(self.folder / "objects")

    def open_fence(self, tenant: str = "default") -> ragfence.Fence:
        return ragfence.open(self.fences.url, objects=self.objects, tenant=tenant, policy=policy())

    def queue_url(self, name: str) -> str:
        return f"{self.queue.url}?queue={name}"

    def query(self, text: str, **values: Any) -> list[Any]:
        engine = sa.create_engine(self.database, poolclass=sa.NullPool)
        with engine.connect() as connection:
            return list(connection.execute(sa.text(text), values))

    def effects_of(self, place: str) -> dict[str, int]:
        """How often each key's effect is in the table."""
        rows = self.query("SELECT key, count(*) FROM effects WHERE place = :place GROUP BY key", place=place)
        return {key: int(times) for key, times in rows}


def policy() -> ragfence.Policy:
    return ragfence.Policy.from_mapping({"lease": {"ttl_s": LEASE_S, "max_attempts": 100, "seal_retry_s": 30.0}})


@contextlib.contextmanager
def prepared() -> Iterator[Ground]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragfence-acceptance-", dir=MEMORY)))
        database = stack.enter_context(postgres())
        engine = sa.create_engine(database, poolclass=sa.NullPool)
        metadata.create_all(engine)
        queue = stack.enter_context(servers.valkey())
        pair = stack.enter_context(servers.valkey_pair())
        ground = Ground(folder, database, queue, pair)
        with ground.open_fence() as fence:
            fence.hydrate()
        yield ground
