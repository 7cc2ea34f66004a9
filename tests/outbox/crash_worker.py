"""A relay in a process of its own, which kills or freezes itself between publishing and marking."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import sqlalchemy as sa

import ragfence
from ragfence.core.backoff import Backoff
from ragfence.errors import TransportUnavailable
from ragfence.outbox import Outbox, Relay
from ragfence.outbox.outbox import OutboxRow
from ragfence.queues import Envelope, Transport, open_transport
from ragfence.queues.sql import open_engine

AT_ONCE = Backoff(attempts=100, first_s=0.05, longest_s=0.2)
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class RelayJob:
    database: str
    published: str
    """a file: every event that was published, by whom, in order"""
    queue: str = ""
    """where to; empty: a function, under the fence of `store`"""
    store: str = ""
    objects: str = ""
    strike: str = ""
    """`kill` or `freeze`, after the third call that published something and before it is marked"""
    batch: int = 10
    call_s: float = 3.0
    expected: int = 0
    """ends when so many events are marked"""


class Striking:
    """Publishes, and stops its own process when it has done so for the third time."""

    def __init__(self, job: RelayJob, queue: Transport | None) -> None:
        self._job, self._queue, self._times = job, queue, 0

    def send(self, envelopes: Sequence[Envelope], *, delay_s: float = 0.0) -> list[str]:
        assert self._queue is not None
        ids = self._queue.send(envelopes, delay_s=delay_s)
        self._note(*(f"{each.body['key']} {each.body['number']}" for each in envelopes))
        return ids

    def call(self, row: OutboxRow) -> dict[str, int]:
        self._note(f"{row.payload['key']} {row.payload['number']}")
        return {"by": os.getpid()}

    def _note(self, *events: str) -> None:
        with open(self._job.published, "ab", buffering=0) as file:
            file.write("".join(f"{os.getpid()} {event}\n" for event in events).encode())
        self._times += 1
        if self._times == 3 and self._job.strike:
            signal.pthread_kill(threading.get_ident(), SIGNALS[self._job.strike])


def relay_all(job: RelayJob, within_s: float = 120.0) -> None:
    """Relays until `expected` events are marked."""
    engine = open_engine(job.database)
    outbox = Outbox(engine)
    queue = open_transport(job.queue) if job.queue else None
    striking = Striking(job, queue)
    to: Any = cast(Transport, striking) if queue else striking.call
    policy = ragfence.Policy.from_mapping({"lease": {"ttl_s": 1.0}, "wait": {"deadline_s": 0.5}})
    fence = ragfence.open(job.store, objects=job.objects, policy=policy) if job.store else None
    relay = Relay(outbox, to=to, fence=fence, batch=job.batch, call_s=job.call_s, retry=AT_ONCE)
    give_up_at = time.monotonic() + within_s
    while (status := outbox.status()).pending or _marked(outbox) < job.expected:
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"not relayed: {status}")
        try:
            idle = not relay.run_once().sent
        except TransportUnavailable:  # PostgreSQL ended the transaction of one that was frozen
            idle = True
        if idle:
            time.sleep(0.02)
    if fence is not None:
        fence.close()
    if queue is not None:
        queue.close()
    engine.dispose()


def _marked(outbox: Outbox) -> int:
    query = sa.select(sa.func.count()).select_from(outbox.table).where(outbox.table.c.state == "sent")
    with outbox.engine.begin() as tx:
        return tx.scalar(query) or 0
