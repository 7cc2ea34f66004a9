"""The load: as many HTTP/1.1 connections as asked for, each with one request under way, for a bounded time.

Runs in a process of its own, on uvloop, with requests that are ready before the clock starts but for two numbers, and
answers of which no more is read than it takes to judge them. `api_ceiling` says how many it can do.

    stdin   {"port": 40123, "token": "rf_...", "name": "replays", "run": "replay", "connections": 64, "seconds": 1.0,
             "count": 0, "status": 201, "has": "idempotency-status: replayed", "lacks": ""}
    stdout  {"requests": 4123, "seconds": 1.01, "p50_ms": 15.1, "p95_ms": 17.2, "p99_ms": 20.9, "busy": 0.4}

"new" takes the next numbers of that name, "replay" those below KNOWN again; with a count, that many requests are sent,
however long they take. `busy` is the share of a core that this process took.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import uvloop

KNOWN = 256
"""keys that are replayed, in turn"""
BODY_BYTES = 1024
FRAGMENTS = ("of a lease that has run out, ", "of a claim that was won, ", "of a key that is sealed, ")
LATE_S = 60.0
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)


def template(name: str, port: int, token: str) -> bytes:
    """A request with two places for the same number, of 12 digits: in its key and in its doc_id."""
    start, end = f'{{"doc_id":"{name}-%012d","text":"', '"}'
    room = BODY_BYTES - len(start % 0) - len(end)
    text = "".join(itertools.islice(itertools.cycle(FRAGMENTS), 1 + room // min(map(len, FRAGMENTS))))[:room]
    head = (
        f"POST /v1/documents HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
        + (f"authorization: Bearer {token}\r\n" if token else "")
        + f"content-type: application/json\r\ncontent-length: {BODY_BYTES}\r\nidempotency-key: {name}-%012d\r\n\r\n"
    )
    return (head + start + text + end).encode()


class Load:
    """What one question asks for."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.made = template(asked["name"], asked["port"], asked["token"])
        fresh = _numbers[asked["name"]]
        known = itertools.cycle([self.made % (number, number) for number in range(KNOWN)])
        self.next: Callable[[], bytes] = (
            known.__next__ if asked["run"] == "replay" else lambda: self._fresh(next(fresh))
        )
        self.status = b"HTTP/1.1 %d " % asked["status"]
        self.has, self.lacks = asked["has"].encode(), asked["lacks"].encode()
        self.left = asked["count"] or sys.maxsize
        self.ends_at = float("inf")
        self.taken: list[float] = []
        self.wrong = b""

    def _fresh(self, number: int) -> bytes:
        return self.made % (number, number)

    def judge(self, answer: bytes) -> None:
        """The first that is not as it should be ends the run."""
        expected = answer.startswith(self.status) and self.has in answer and not (self.lacks and self.lacks in answer)
        if not expected and not self.wrong:
            self.wrong = answer


class Connection(asyncio.Protocol):
    def __init__(self, load: Load) -> None:
        self._load = load
        self._part = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(exc or ConnectionError("the server has closed the connection"))

    def send(self) -> None:
        load = self._load
        if load.left <= 0 or load.wrong or time.perf_counter() >= load.ends_at:
            self.ended.set_result(None)
            return
        load.left -= 1
        request = load.next()
        self._sent = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._part:
            data = self._part + data
        end = data.find(b"\r\n\r\n")
        length = _LENGTH.search(data, 0, end + 2) if end >= 0 else None
        if length is None or len(data) < end + 4 + int(length[1]):
            self._part = data
            return
        self._load.taken.append(time.perf_counter() - self._sent)
        self._part = b""
        self._load.judge(data)
        self.send()


async def run(asked: dict[str, Any]) -> dict[str, float]:
    load = Load(asked)
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(lambda: Connection(load), "127.0.0.1", asked["port"])
        for _ in range(asked["connections"])
    ]
    connections = [connection for _, connection in made]
    gc.collect()
    gc.disable()  # what it keeps are numbers, and a pause here would count as one of the server's
    started, cpu = time.perf_counter(), time.process_time()
    if not asked["count"]:
        load.ends_at = started + asked["seconds"]
    for connection in connections:
        connection.send()
    async with asyncio.timeout(asked["seconds"] + LATE_S):
        await asyncio.gather(*(connection.ended for connection in connections))
    seconds, busy = time.perf_counter() - started, time.process_time() - cpu
    gc.enable()
    for connection in connections:
        connection.transport.close()
    if load.wrong:
        raise RuntimeError(f"{asked['name']}, {asked['run']}: not the answer that was expected: {load.wrong[:2000]!r}")
    return {"requests": len(load.taken), "seconds": seconds, "busy": busy / seconds} | percentiles(load.taken)


def percentiles(taken: list[float]) -> dict[str, float]:
    in_order = sorted(taken)
    last = len(in_order) - 1
    return {f"p{share}_ms": 1000 * in_order[round(last * share / 100)] for share in (50, 95, 99)}


def main() -> None:
    print(json.dumps({"known": KNOWN, "bytes": BODY_BYTES}), flush=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin:
            print(json.dumps(runner.run(run(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
