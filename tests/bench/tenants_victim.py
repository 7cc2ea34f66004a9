"""The tenant that does nothing wrong: documents and reads at a steady pace, whatever the server does meanwhile.

A process of its own. What is due is sent when it is due, however many answers are awaited, and its time counts from
then: a server that makes one request wait cannot hold back those behind it.

    stdin   {"do": "pace", "port": 40123, "token": "rf_...", "name": "acme", "seconds": 10, "per_s": 20}
    stdout  {"write_ms": [10.3, ...], "read_ms": [...], "failed": {"503": 1}}

    stdin   {"do": "check", ...}: every document that this pace was told to be stored
    stdout  {"stored": 200, "missing": 0}

An answer that is not as it should be, or does not come within a minute, is in `failed`, by its status.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import uvloop

from tests.bench.api_load import template
from tests.bench.tenants_http import Reply, Streams, head, opened, reply

PATIENCE_S = 60.0
WARM = 4
"""connections that are open before anything is due"""
KNOWN = 64
"""documents that are read; the first that were sent"""
NO_ANSWER = "no answer"


class Victim:
    """Of one server."""

    def __init__(self, port: int, token: str, name: str) -> None:
        self._port, self._token, self._name = port, token, name
        self._made = template(name, port, token)
        self._numbers: Iterator[int] = itertools.count()
        self._idle: list[Streams] = []
        self._dice = random.Random(1)
        self._stored: list[int] = []
        self._filled = False

    async def pace(self, seconds: float, per_s: float) -> dict[str, Any]:
        if not self._filled:
            for _ in range(KNOWN):
                await self._write(next(self._numbers))
            self._filled = True
        while len(self._idle) < WARM:
            self._idle.append(await opened(self._port))
        self._stored = []
        failed: Counter[str] = Counter()
        taken: dict[str, list[float]] = {"write_ms": [], "read_ms": []}
        gc.collect()
        gc.disable()  # a pause here would count as one of the server's
        started = time.perf_counter()

        async def at(due: float, kind: str) -> None:
            await asyncio.sleep(started + due - time.perf_counter())
            told = await (self._write(next(self._numbers)) if kind == "write_ms" else self._read(self._any()))
            taken[kind].append(round(1000 * (time.perf_counter() - started - due), 3))
            if told:
                failed[told] += 1

        tasks = [
            asyncio.create_task(at((number + part) / per_s, kind))
            for number in range(round(seconds * per_s))
            for part, kind in ((0.0, "write_ms"), (0.5, "read_ms"))
        ]
        await asyncio.gather(*tasks)
        gc.enable()
        return {**taken, "failed": dict(failed)}

    async def check(self) -> dict[str, int]:
        missing = 0
        for number in self._stored:
            missing += bool(await self._read(number))
        return {"stored": len(self._stored), "missing": missing}

    def _any(self) -> int:
        return self._dice.randrange(KNOWN)

    async def _write(self, number: int) -> str:
        """Empty: as it should be."""
        told = await self._ask(self._made % (number, number))
        if told is not None and told.status == 201 and json.loads(told.body)["doc_id"] == self._doc_id(number):
            self._stored.append(number)
            return ""
        return str(told.status) if told else NO_ANSWER

    async def _read(self, number: int) -> str:
        told = await self._ask(head("GET", f"/v1/documents/{self._doc_id(number)}", self._port, self._token))
        if told is not None and told.status == 200 and json.loads(told.body)["doc_id"] == self._doc_id(number):
            return ""
        return str(told.status) if told else NO_ANSWER

    def _doc_id(self, number: int) -> str:
        return f"{self._name}-{number:012d}"

    async def _ask(self, request: bytes) -> Reply | None:
        """None: no answer. A connection that was closed while it was idle is no fault: the request goes again."""
        with contextlib.suppress(OSError, EOFError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while self._idle:
                    with contextlib.suppress(OSError, EOFError):
                        return await self._asked(self._idle.pop(), request)
                return await self._asked(await opened(self._port), request)
        return None

    async def _asked(self, streams: Streams, request: bytes) -> Reply:
        reader, writer = streams
        kept = False
        try:
            writer.write(request)
            told = await reply(reader)
            kept = not told.closed
        finally:
            if kept:
                self._idle.append(streams)
            else:
                writer.close()
        return told


def main() -> None:
    victims: dict[int, Victim] = {}
    print(json.dumps({"known": KNOWN}), flush=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin:
            asked = json.loads(line)
            victim = victims.setdefault(asked["port"], Victim(asked["port"], asked["token"], asked["name"]))
            work = victim.check() if asked["do"] == "check" else victim.pace(asked["seconds"], asked["per_s"])
            print(json.dumps(runner.run(work)), flush=True)


if __name__ == "__main__":
    main()
