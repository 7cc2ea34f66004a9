"""The servers that are measured, and the load, each a process of its own; killed by their handles at the end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragfence._open import open_objects_of
from ragfence.server.apikeys import ApiKeys, Role  # type: ignore[attr-defined]
from tests.bench.api_route import BARE
from tests.bench.peers.process import ROOT

API = "api"
"""the environment that has asgi-idempotency-header"""
KEPT_S = 24 * 3600
LEASE_S = 30.0
_KEPT_BACK = ("PYTHON", "RAGFENCE_", "AWS_", "REDIS_", "UVICORN_")


@dataclass(frozen=True, slots=True)
class Running:
    """A server that listens."""

    process: subprocess.Popen[str]
    port: int
    versions: dict[str, str]
    token: str = ""
    """of the first tenant"""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """tenant -> token"""


@contextlib.contextmanager
def ragfence_serve(store: str, objects: Path, *, tenants: Sequence[str] = ("bench",)) -> Iterator[Running]:
    """`ragfence serve`, with a key that may write for each of these tenants."""
    shared = open_objects_of(store, objects)
    assert shared is not None
    with contextlib.closing(shared):
        keys = ApiKeys(shared)
        tokens = {tenant: keys.create(tenant, Role.WRITE).token for tenant in tenants}
    argv = ["-m", "ragfence", "serve", "--port", "0", "--json", "--store", store, "--objects", str(objects)]
    with _started([sys.executable, *argv]) as (process, told):
        yield Running(process, told["port"], {}, tokens[tenants[0]], tokens)


@contextlib.contextmanager
def bare(folder: Path) -> Iterator[Running]:
    with listening([sys.executable, "-m", "tests.bench.api_route", str(folder), BARE, "0"]) as running:
        yield running


@contextlib.contextmanager
def fenced(
    folder: Path, store: str, *, port: int = 0, kept_s: float = KEPT_S, lease_s: float = LEASE_S
) -> Iterator[Running]:
    argv = ["-m", "tests.bench.api_route", str(folder), store, str(port), str(kept_s), str(lease_s)]
    with listening([sys.executable, *argv]) as running:
        yield running


@contextlib.contextmanager
def peer(python: Path, folder: Path, where: str, *, port: int = 0, kept_s: int = KEPT_S) -> Iterator[Running]:
    argv = ["-m", "tests.bench.peers.asgi_header", str(folder), where, str(port), str(kept_s)]
    with listening([str(python), *argv]) as running:
        yield running


@contextlib.contextmanager
def ceiling() -> Iterator[Running]:
    with listening([sys.executable, "-m", "tests.bench.api_ceiling"]) as running:
        yield running


class Generator:
    """The load, on the other side of two pipes: a line is asked, a line is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, **asked: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        told: dict[str, Any] = _line(self._process)
        return told


@contextlib.contextmanager
def generator(module: str = "tests.bench.api_load") -> Iterator[Generator]:
    with _started([sys.executable, "-m", module]) as (process, _):
        yield Generator(process)


@contextlib.contextmanager
def listening(argv: Sequence[str]) -> Iterator[Running]:
    with _started(argv) as (process, told):
        yield Running(process, told["port"], told["versions"])


@contextlib.contextmanager
def _started(argv: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """With what it says first, when it is up."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(_KEPT_BACK)},
    )
    with process:  # waits, and closes the pipes
        try:
            yield process, _line(process)
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended with {process.wait()}; its words stand above")
    return json.loads(line)
