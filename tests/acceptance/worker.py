"""One consumer process: handles events until SIGTERM, and writes down what it did, past ragfence.

The handler's effect is a row in PostgreSQL, in one transaction with its `Inbox`. Two files of the process, opened for
appending, hold a line for every run of the handler and a line for every message that was settled, with the
milliseconds since it was sent, by the one clock of the machine.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass

import sqlalchemy as sa

import ragfence
from ragfence.core.backoff import Backoff
from ragfence.core.receipts import Receipt
from ragfence.outbox import Inbox
from ragfence.queues import Consumer, Message, open_transport
from tests.acceptance.ground import VISIBILITY_S, effects, policy


@dataclass(frozen=True, slots=True)
class Place:
    """Where a consumer works."""

    name: str
    store: str
    objects: str
    queue: str
    database: str
    notes: str
    """a prefix of the names of its files"""
    batch: int = 20
    ordered: bool = False
    """the body's `version` orders the messages of a key"""


class Notes:
    """A line per event, written at once: what a killed process had done is there."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())


class Handler:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._engine = sa.create_engine(place.database, pool_size=2)
        self._inbox = Inbox(self._engine)
        self._runs = Notes(f"{place.notes}-runs-{os.getpid()}")

    def __call__(self, message: Message) -> None:
        key, place = str(message.body["id"]), self._place.name
        event = f"{key}@{message.body['version']}" if self._place.ordered else key
        self._runs.add(event)
        with self._engine.begin() as tx:
            if self._inbox.first(tx, event, source=place, payload=message.body):
                tx.execute(sa.insert(effects).values(place=place, key=event, value=message.body.get("version", 0)))


def key_of(message: Message) -> str | tuple[str, str]:
    return str(message.body["id"])


def versioned_key_of(message: Message) -> tuple[str, str]:
    return str(message.body["id"]), str(message.body["version"])


def version_of(message: Message) -> int:
    return int(message.body["version"])


def make_consumer(place: Place, fence: ragfence.Fence, *, batch: int | None = None) -> Consumer:
    settled = Notes(f"{place.notes}-settled-{os.getpid()}")

    def note(message: Message, result: str, receipt: Receipt | None) -> None:
        waited_ms = int(time.time() * 1000) - (message.sent_ms or 0)
        settled.add(f"{result} {waited_ms} {message.sent_ms}")

    return Consumer(
        fence,
        open_transport(place.queue, visibility_s=VISIBILITY_S),
        Handler(place),
        key=versioned_key_of if place.ordered else key_of,
        sequence=version_of if place.ordered else None,
        max_attempts=100,
        batch=batch or place.batch,
        wait_s=0.5,
        retry=Backoff(attempts=100, first_s=0.2, longest_s=1.0),
        on_result=note,
    )


def work(place: Place) -> None:
    """The life of a process."""
    logging.getLogger("ragfence").setLevel(logging.ERROR)  # the fence store goes away now and then
    with ragfence.open(place.store, objects=place.objects, policy=policy()) as fence:
        make_consumer(place, fence).run()
