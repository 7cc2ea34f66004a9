"""A consumer in a process of its own, which kills or freezes itself at a point of an operation.

The handler notes that it runs, in a file; then it writes one row in a transaction of its own database, with an `Inbox`
unless the job says otherwise. The table has no unique key: what happens twice is there twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

import ragfence
from ragfence.core.backoff import Backoff
from ragfence.outbox import Inbox
from ragfence.queues import Consumer, Message, Transport, open_transport
from ragfence.testing import freeze_at, kill_at

AT_ONCE = Backoff(attempts=100, first_s=0.05, longest_s=0.2)
metadata = sa.MetaData()
effects = sa.Table(
    "effects",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("place", sa.String(100), nullable=False),
    sa.Column("key", sa.String(100), nullable=False),
)


@dataclass(frozen=True, slots=True)
class ConsumerJob:
    store: str
    objects: str
    queue: str
    database: str
    place: str
    """names the rows of one test"""
    runs: str
    """a file with one line for each time the handler ran"""
    inbox: bool = True
    lease_s: float = 1.0
    visibility_s: float = 1.5
    strike: str = ""
    """`kill after_seal`, `freeze in_effect`: at the first message that comes there"""

    def open_queue(self) -> Transport:
        return open_transport(self.queue, visibility_s=self.visibility_s)

    def open_fence(self) -> ragfence.Fence:
        policy = ragfence.Policy.from_mapping({"lease": {"ttl_s": self.lease_s}})
        return ragfence.open(self.store, objects=self.objects, policy=policy)


class Handler:
    def __init__(self, job: ConsumerJob) -> None:
        self._job = job
        self._engine = sa.create_engine(job.database, poolclass=sa.NullPool)
        self._inbox = Inbox(self._engine) if job.inbox else None

    def __call__(self, message: Message) -> dict[str, int]:
        key, place = message.body["id"], self._job.place
        with open(self._job.runs, "ab", buffering=0) as file:
            file.write(f"{key}\n".encode())
        with self._engine.begin() as tx:
            if self._inbox is None or self._inbox.first(tx, key, source=place, payload=message.body):
                tx.execute(sa.insert(effects).values(place=place, key=key))
        return {"by": os.getpid()}


@contextlib.contextmanager
def opened(job: ConsumerJob) -> Iterator[tuple[Consumer, Transport]]:
    queue = job.open_queue()
    with job.open_fence() as fence:
        yield Consumer(fence, queue, Handler(job), key=message_key, retry=AT_ONCE, batch=4), queue
    queue.close()


def message_key(message: Message) -> str:
    return str(message.body["id"])


def consume_all(job: ConsumerJob, within_s: float = 120.0) -> Mapping[str, int]:
    """Consumes until nothing is left in the queue."""
    with opened(job) as (consumer, queue):
        give_up_at = time.monotonic() + within_s
        while time.monotonic() < give_up_at:
            if not consumer.run_once(0.2) and _is_empty(queue):
                return dict(consumer.counts)
        raise TimeoutError(f"still in the queue: {queue.depth()}")


def _is_empty(queue: Transport) -> bool:
    depth = queue.depth()
    return depth.visible == depth.in_flight == 0


def work(job: ConsumerJob) -> None:
    """The life of a process. It writes its counts beside the file of its runs."""
    action, _, point = job.strike.partition(" ")
    struck: Any = contextlib.nullcontext()
    if action:
        struck = kill_at(point) if action == "kill" else freeze_at(point)
    with struck:
        counts = consume_all(job)
    Path(f"{job.runs}.{os.getpid()}").write_text(json.dumps(counts))
