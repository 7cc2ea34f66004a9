"""Webhooks beside a bare route that only verifies. Each has a server of its own on loopback; deliveries are signed."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from standardwebhooks import Webhook

from tests.bench.api_load import Connection
from tests.bench.api_servers import Running, listening
from tests.bench.events_scale import EventsScale
from tests.bench.events_server import BARE, PATH, SECRET
from tests.bench.machine import redis_server
from tests.bench.rounds import Subject, clocked

BARE_ROUTE, INLINE, AGAIN = "bare route, verifies", "webhooks, inline", "webhooks, delivered again"
ROUTES = (BARE_ROUTE, INLINE, AGAIN)
TEXT = "of a lease that has run out, " * 16

_numbers = itertools.count()


class Deliveries:
    """What `api_load.Connection` asks for: the next request, and whether the answer is as it should be."""

    def __init__(self, requests: list[bytes]) -> None:
        self._requests = iter(requests)
        self.next = self._requests.__next__
        self.left = len(requests)
        self.ends_at = float("inf")
        self.taken: list[float] = []
        self.wrong = b""

    def judge(self, answer: bytes) -> None:
        if not answer.startswith(b"HTTP/1.1 200 ") and not self.wrong:
            self.wrong = answer


@contextlib.contextmanager
def subjects(scale: EventsScale) -> Iterator[list[Subject]]:
    with contextlib.ExitStack() as stack:
        fences = stack.enter_context(redis_server())
        bare = stack.enter_context(_server(BARE))
        ours = stack.enter_context(_server(fences.url))
        known = [f"msg_known{number}" for number in range(scale.deliveries)]
        _send(scale, ours, requests(ours.port, known))

        def fresh(running: Running) -> list[bytes]:
            return requests(running.port, [f"msg_{next(_numbers)}" for _ in range(scale.deliveries)])

        def subject(name: str, running: Running, *, again: bool = False) -> Subject:
            return Subject(
                name,
                scale.deliveries,
                clocked(
                    lambda made: _send(scale, running, made),
                    prepare=lambda number: requests(running.port, known) if again else fresh(running),
                ),
            )

        yield [subject(BARE_ROUTE, bare), subject(INLINE, ours), subject(AGAIN, ours, again=True)]


def requests(port: int, ids: list[str]) -> list[bytes]:
    """Signed now, as a provider would; the tolerance is minutes."""
    webhook, now = Webhook(SECRET), datetime.datetime.now(datetime.UTC)
    made = []
    for number, message_id in enumerate(ids):
        body = json.dumps({"type": "page.updated", "page": {"id": f"p{number}", "version": number, "body": TEXT}})
        head = {
            "host": f"127.0.0.1:{port}",
            "content-type": "application/json",
            "content-length": str(len(body)),
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": webhook.sign(message_id, now, body),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        made.append(f"POST {PATH} HTTP/1.1\r\n{lines}\r\n{body}".encode())
    return made


def _send(scale: EventsScale, running: Running, made: list[bytes]) -> None:
    load: Any = Deliveries(made)

    async def deliver() -> None:
        loop = asyncio.get_running_loop()
        pairs = [
            await loop.create_connection(lambda: Connection(load), "127.0.0.1", running.port)
            for _ in range(scale.connections)
        ]
        for _, connection in pairs:
            connection.send()
        async with asyncio.timeout(120):
            await asyncio.gather(*(connection.ended for _, connection in pairs))
        for transport, _ in pairs:
            transport.close()

    asyncio.run(deliver())
    if load.wrong or len(load.taken) != len(made):
        raise RuntimeError(f"{len(load.taken)} of {len(made)} answers, not as expected: {load.wrong[:500]!r}")


def _server(where: str | Path) -> contextlib.AbstractContextManager[Running]:
    return listening([sys.executable, "-m", "tests.bench.events_server", str(where)])
