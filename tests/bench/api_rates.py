"""Requests per second of every server, with few connections and many, one after the other in every round."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests import servers
from tests.bench import api_servers, machine
from tests.bench.api_load import KNOWN
from tests.bench.api_scale import ApiScale
from tests.bench.api_servers import Generator, Running
from tests.bench.peers.asgi_route import MEMORY
from tests.bench.rounds import WARM_UP, Subject, interleave
from tests.bench.run import Say

CEILING, NOTHING = "the load alone", "a route that does nothing"
SERVE_SQLITE, SERVE_VALKEY = "ragfence serve, SQLite", "ragfence serve, Valkey"
MIDDLEWARE_SQLITE, MIDDLEWARE_VALKEY = "IdempotencyMiddleware, SQLite", "IdempotencyMiddleware, Valkey"
PEER_MEMORY, PEER_REDIS = "asgi-idempotency-header, memory", "asgi-idempotency-header, Valkey"
NEW, REPLAY, ANY = "new", "replay", "request"
LATENCIES = ("p50_ms", "p95_ms", "p99_ms")
_WARM_UP_S = 0.3
_FILLING = 8
"""connections by which the keys that are replayed are made known"""


class Marks(NamedTuple):
    """What tells a first answer from a replayed one."""

    first: str = ""
    again: str = ""


OURS, THEIRS, NONE = (
    Marks("idempotency-status: stored", "idempotency-status: replayed"),
    Marks("", "idempotent-replayed"),
    Marks(),
)


def named(subject: str, run: str, connections: int) -> str:
    return f"{run}, {subject}, {connections}"


class Asked(NamedTuple):
    """A server that is measured."""

    subject: str
    server: Running
    marks: Marks
    counts: bool = False
    """its effects can be asked for"""

    @property
    def runs(self) -> tuple[str, ...]:
        return (REPLAY, NEW) if self.marks.again else (ANY,)


class Cell:
    """A server, asked for one thing by so many connections. Gathers what `interleave` does not."""

    def __init__(self, generator: Generator, asked: Asked, run: str, connections: int, seconds: float) -> None:
        self.name = named(asked.subject, run, connections)
        self.found: list[dict[str, float]] = []
        self._generator, self._asked, self._run = generator, asked, run
        self._connections, self._seconds = connections, seconds

    def per_request(self, number: int) -> float:
        """The seconds of one request, so that their number in a second is the rate."""
        server = self._asked.server
        seconds = _WARM_UP_S if number == WARM_UP else self._seconds
        effects, cpu = self._effects(), machine.cpu_s(server.process.pid)
        told = _load(self._generator, self._asked, self._run, self._connections, seconds=seconds)
        cpu = machine.cpu_s(server.process.pid) - cpu
        expected = told["requests"] if self._run == NEW else 0
        if self._asked.counts and self._effects() - effects != expected:
            raise RuntimeError(f"{self.name}: {self._effects() - effects} effects, not {expected}")
        if number != WARM_UP:
            self.found.append(told | {"cpu_us": 1e6 * cpu / told["requests"]})
        return told["seconds"] / told["requests"]

    def _effects(self) -> int:
        if not self._asked.counts:
            return 0
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._asked.server.port)) as connection:
            connection.request("GET", "/counted")
            return int(json.loads(connection.getresponse().read()))


def measure(
    folder: Path, valkey: servers.RedisServer, python: Path | None, scale: ApiScale, say: Say
) -> dict[str, Any]:
    """`python`: the interpreter of the environment that has the peer, if there is one."""
    with api_servers.generator() as generator, _servers(folder, valkey.url, python) as asked:
        for one in asked:
            if one.marks.again:
                _load(generator, one, NEW, _FILLING, count=KNOWN)
        cells = [
            Cell(generator, one, run, connections, scale.seconds)
            for connections in scale.connections
            for one in asked
            for run in one.runs
        ]
        subjects = [Subject(cell.name, 1, cell.per_request) for cell in cells]
        rates = interleave(subjects, scale.rounds, lambda text: say(f"load over HTTP, {text}"))
        kinds = (*LATENCIES, "cpu_us", "busy")
        return {
            "rates": rates,
            "cells": {cell.name: {kind: [each[kind] for each in cell.found] for kind in kinds} for cell in cells},
            "versions": {one.subject: one.server.versions for one in asked if one.server.versions},
        }


@contextlib.contextmanager
def _servers(folder: Path, url: str, python: Path | None) -> Iterator[list[Asked]]:
    for name in ("bare", "route-sqlite", "route-valkey", "peer"):
        (folder / name).mkdir()
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        asked = [
            Asked(CEILING, enter(api_servers.ceiling()), NONE),
            Asked(NOTHING, enter(api_servers.bare(folder / "bare")), NONE),
            Asked(SERVE_SQLITE, enter(api_servers.ragfence_serve(str(folder / "fence"), folder / "objects")), OURS),
            Asked(SERVE_VALKEY, enter(api_servers.ragfence_serve(url, folder / "objects-valkey")), OURS),
            Asked(
                MIDDLEWARE_SQLITE,
                enter(api_servers.fenced(folder / "route-sqlite", str(folder / "route-fence"))),
                OURS,
                counts=True,
            ),
            Asked(MIDDLEWARE_VALKEY, enter(api_servers.fenced(folder / "route-valkey", url)), OURS, counts=True),
        ]
        if python is not None:
            for subject, where in ((PEER_MEMORY, MEMORY), (PEER_REDIS, url)):
                server = enter(api_servers.peer(python, folder / "peer", where))
                asked.append(Asked(subject, server, THEIRS, counts=True))
        yield asked


def _load(
    generator: Generator, asked: Asked, run: str, connections: int, *, seconds: float = 0.0, count: int = 0
) -> dict[str, float]:
    has, lacks = (asked.marks.again, "") if run == REPLAY else (asked.marks.first, asked.marks.again)
    return generator.run(
        port=asked.server.port,
        token=asked.server.token,
        name=asked.subject.replace(" ", "-").replace(",", ""),
        run=NEW if run == ANY else run,
        connections=connections,
        seconds=seconds,
        count=count,
        status=201,
        has=has,
        lacks=lacks,
    )
