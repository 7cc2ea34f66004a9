"""The tenant that takes what it can get: one of three attacks, until it is told to stop.

A process of its own, on loopback, with one API key. Every attack is bounded: so many connections, so many seconds.

    stdin   {"form": "slow bodies", "port": 40123, "token": "rf_...", "count": 210, "every_s": 0.1, "most_s": 60}
    stdout  {"underway": 210}       every connection has sent something
    stdin   {"stop": true}
    stdout  {"answers": {"408": 210, "closed": 3}}
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvloop

from tests.bench.tenants_http import head, opened, reply
from tests.server.hostile import huge_refused_body

SLOW_BODIES, BUILDS, REFUSED_BODIES = "slow bodies", "builds", "refused bodies"
FORMS = (SLOW_BODIES, BUILDS, REFUSED_BODIES)
BODY = b'{"doc_id":"slow","text":"' + b"x" * 973 + b'"}'
LARGE = 4 << 20
UNDERWAY_WITHIN_S = 30.0
_numbers = itertools.count(1)


class Attack:
    """What the connections of one attack share."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.port, self.token, self.every_s = asked["port"], asked["token"], asked["every_s"]
        self.count: int = asked["count"]
        self.answers: Counter[str] = Counter()
        self.underway = 0
        self.all_underway = asyncio.Event()

    def under_way(self) -> None:
        self.underway += 1
        if self.underway == self.count:
            self.all_underway.set()


async def slow_body(attack: Attack) -> None:
    """A body, byte by byte; when the server ends that, the next one."""
    counted = False
    while True:
        try:
            reader, writer = await opened(attack.port)
        except OSError:
            attack.answers["closed"] += 1
            await asyncio.sleep(attack.every_s)
            continue
        with contextlib.closing(writer), _answer(reader) as answer:
            key = f"slow-{next(_numbers)}"
            writer.write(head("POST", "/v1/documents", attack.port, attack.token, key=key, length=len(BODY)))
            with contextlib.suppress(OSError):
                for byte in BODY:
                    if answer.done():
                        break
                    writer.write(bytes((byte,)))
                    if not counted:
                        counted = True
                        attack.under_way()
                    await asyncio.sleep(attack.every_s)
            attack.answers[await answer] += 1
            if answer.result() not in ("201", "408"):  # refused at once, and would be again
                await asyncio.sleep(attack.every_s)


async def build(attack: Attack) -> None:
    """A build of its own each time: the number of rows to train with is another one, and so is the INDEX_HASH."""
    for number in itertools.count():
        own = next(_numbers)
        body = json.dumps({"index": "ivf_pq", "parameters": {"num_partitions": 1, "sample_rate": 64 + own}}).encode()
        if not number:
            attack.under_way()
        status = await _sent(attack, "/v1/builds", f"build-{own}", body)
        attack.answers[status] += 1
        if status not in ("200", "201"):
            await asyncio.sleep(attack.every_s)


async def refused_body(attack: Attack) -> None:
    bodies = itertools.cycle(refused_bodies())
    for number, body in enumerate(bodies):
        if not number:
            attack.under_way()
        attack.answers[await _sent(attack, "/v1/documents", f"refused-{next(_numbers)}", body)] += 1


def refused_bodies(size: int = LARGE) -> Iterator[bytes]:
    """JSON of this size or little less, and no document: refused before it is parsed, after, and in between."""
    yield huge_refused_body(size)
    for start, filler, end in (
        (b'{"doc_id":"a","text":"b","', b"n", b'":1}'),
        (b'{"doc_id":"a","wrong":1,"text":"', b"word ", b'"}'),
        (b'{"doc_id":"a","wrong":1,"text":"', b"\\u00e9", b'"}'),
        (b'{"doc_id":"a","wrong":1,"text":"b","metadata":{"x":[' + b"0," * 50_000 + b'0],"y":"', b"long ", b'"}}'),
    ):
        yield start + filler * ((size - len(start) - len(end)) // len(filler)) + end


ATTACKS: dict[str, Callable[[Attack], Awaitable[None]]] = {
    SLOW_BODIES: slow_body,
    BUILDS: build,
    REFUSED_BODIES: refused_body,
}


async def _sent(attack: Attack, path: str, key: str, body: bytes) -> str:
    try:
        reader, writer = await opened(attack.port)
    except OSError:
        return "closed"
    with contextlib.closing(writer), _answer(reader) as answer:
        with contextlib.suppress(OSError):
            writer.write(head("POST", path, attack.port, attack.token, key=key, length=len(body)) + body)
            await writer.drain()
        return await answer


@contextlib.contextmanager
def _answer(reader: asyncio.StreamReader) -> Iterator[asyncio.Task[str]]:
    """Read while the request is still being sent: it may be refused before its end."""
    task = asyncio.create_task(_status(reader))
    try:
        yield task
    finally:
        task.cancel()


async def _status(reader: asyncio.StreamReader) -> str:
    try:
        return str((await reply(reader)).status)
    except (OSError, EOFError):
        return "closed"


async def run(asked: dict[str, Any]) -> dict[str, Any]:
    attack = Attack(asked)
    tasks = [asyncio.ensure_future(ATTACKS[asked["form"]](attack)) for _ in range(attack.count)]
    stop = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(attack.all_underway.wait(), UNDERWAY_WITHIN_S)
    print(json.dumps({"underway": attack.underway}), flush=True)
    await asyncio.wait([stop], timeout=asked["most_s"])
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    await stop
    for each in ended:
        if isinstance(each, Exception):  # an attack of fewer connections than were asked for
            raise each
    return {"answers": dict(attack.answers)}


def main() -> None:
    print(json.dumps({"forms": FORMS}), flush=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while line := sys.stdin.readline():
            print(json.dumps(runner.run(run(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
