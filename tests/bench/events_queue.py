"""Consumers beside a bare loop: receive, upsert, acknowledge, with the same transport and the same upsert.

The queue is a Valkey of its own. Messages are sent before the clock starts. An upsert is one HSET: of a message alone,
as a handler would do it; of documents in one pipeline for each batch, as a bulk loader would.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ragfence
from ragfence.queues import Consumer, DocumentConsumer, Envelope, Message
from ragfence.queues.streams import RedisStreamTransport
from tests.bench.documents_ours import WholeText
from tests.bench.events_scale import EventsScale
from tests.bench.machine import redis_server
from tests.bench.peers.corpus import corpus
from tests.bench.rounds import Subject, clocked

BARE, CONSUMER, ON_OBJECTS, AGAIN = "bare loop", "Consumer", "Consumer, with objects", "Consumer, duplicates"
BARE_DOCUMENTS, DOCUMENTS = "bare loop, documents", "DocumentConsumer"
PLAIN = (BARE, CONSUMER, ON_OBJECTS, AGAIN)

_rounds = itertools.count()


@dataclass(frozen=True, slots=True)
class Ready:
    """A queue with the messages of a round."""

    queue: RedisStreamTransport
    count: int


class Upserts:
    """What the loops write to: counted on the server, outside ragfence."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def one(self, message: Message) -> None:
        self._client.hset(f"row:{message.body['id']}", mapping={"body": json.dumps(message.body)})

    def many(self, messages: Sequence[Message]) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for message in messages:
                pipeline.hset(f"row:{message.body['doc_id']}", mapping={"body": json.dumps(message.body)})
            pipeline.execute()

    def check(self, count: int) -> None:
        found = self._client.dbsize()
        if found < count:
            raise RuntimeError(f"{found:,} rows were written, not {count:,}")
        self._client.flushdb()


@dataclass(frozen=True, slots=True)
class Documents:
    """What a consumer of documents needs of a fence, with the chunker of the benchmark."""

    tenant: str
    policy: Any
    documents: Any
    notify: Callable[[object], None]


@contextlib.contextmanager
def subjects(scale: EventsScale) -> Iterator[list[Subject]]:
    with contextlib.ExitStack() as stack:
        messages, rows, fences = (stack.enter_context(redis_server()) for _ in range(3))
        upserts = Upserts(stack.enter_context(rows.client(db=0)))
        alone = stack.enter_context(ragfence.open(fences.url, tenant="alone", journal=fences.folder / "journal"))
        backed = stack.enter_context(_backed(fences.url, fences.folder, "backed"))
        whole = Documents(backed.tenant, backed.policy, backed.documents.using(chunker=WholeText()), lambda event: None)

        def sent(bodies: Sequence[Any]) -> Ready:
            queue = RedisStreamTransport(messages.url, f"q{next(_rounds)}", high_water=10_000_000)
            for at in range(0, len(bodies), 500):
                queue.send([Envelope(body=body) for body in bodies[at : at + 500]])
            return Ready(queue, len(bodies))

        def events(number: int) -> Ready:
            first = next(_rounds)
            return sent([{"id": f"{first}-{at}", "amount": at} for at in range(scale.messages)])

        def known(number: int) -> Ready:
            return sent([{"id": f"known-{at}", "amount": at} for at in range(scale.messages)])

        def documents(number: int) -> Ready:
            texts = corpus(f"events-{next(_rounds)}", scale.documents)
            return sent([{"doc_id": each.doc_id, "text": each.text} for each in texts])

        def empty(ready: Ready) -> None:
            depth = ready.queue.depth()
            if depth.visible or depth.in_flight or depth.dead:
                raise RuntimeError(f"not everything was consumed: {depth}")
            ready.queue.close()
            with messages.client() as client:
                client.flushall()

        def upserted(ready: Ready) -> None:
            upserts.check(ready.count)
            empty(ready)

        def bare(ready: Ready) -> None:
            while received := ready.queue.receive(scale.batch, 0.0):
                for message in received:
                    upserts.one(message)
                ready.queue.ack(received)

        def bare_documents(ready: Ready) -> None:
            while received := ready.queue.receive(scale.document_batch, 0.0):
                upserts.many(received)
                ready.queue.ack(received)

        def consumed(fence: Any) -> Callable[[Ready], None]:
            def work(ready: Ready) -> None:
                consumer = Consumer(
                    fence, ready.queue, upserts.one, key=lambda message: str(message.body["id"]), batch=scale.batch
                )
                _until_empty(consumer, ready)

            return work

        def ingested(ready: Ready) -> None:
            _until_empty(DocumentConsumer(whole, ready.queue, batch=scale.document_batch), ready)

        consumed(alone)(known(0))
        upserts.check(scale.messages)
        yield [
            Subject(BARE, scale.messages, clocked(bare, prepare=events, check=upserted)),
            Subject(CONSUMER, scale.messages, clocked(consumed(alone), prepare=events, check=upserted)),
            Subject(ON_OBJECTS, scale.messages, clocked(consumed(backed), prepare=events, check=upserted)),
            Subject(AGAIN, scale.messages, clocked(consumed(alone), prepare=known, check=empty)),
            Subject(BARE_DOCUMENTS, scale.documents, clocked(bare_documents, prepare=documents, check=upserted)),
            Subject(DOCUMENTS, scale.documents, clocked(ingested, prepare=documents, check=empty)),
        ]


def _until_empty(consumer: Consumer | DocumentConsumer, ready: Ready) -> None:
    """`run`, which stops when everything is settled."""
    left = ready.count

    def count(message: Message, result: str, receipt: Any) -> None:
        nonlocal left
        if result not in ("new", "duplicate"):
            raise RuntimeError(f"a message is {result}")
        left -= 1
        if not left:
            consumer.stop()

    consumer._on_result = count
    consumer.run()


@contextlib.contextmanager
def _backed(url: str, folder: Path, tenant: str) -> Iterator[ragfence.Fence]:
    with ragfence.open(url, objects=folder / "objects", tenant=tenant, journal=folder / "journal-2") as fence:
        fence.hydrate()
        yield fence
