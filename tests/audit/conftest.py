"""Places to drain from and to: every fence store, with objects in a folder or in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence import Fence, Policy
from ragfence.audit.audit import Audit
from ragfence.audit.ledger import Ledger, Part, RowQuery
from ragfence.core.decision_rows import Row
from ragfence.stores.fences import FenceStore
from ragfence.stores.local import LocalObjects
from ragfence.stores.objects import ObjectStore
from ragfence.stores.redis.store import RedisFences
from ragfence.stores.sqlite import SqliteFences
from ragfence.testing.clock import VirtualClock
from ragfence.testing.memory import MemoryFences, MemoryObjects

_tenants = itertools.count()


@dataclass
class Place:
    fences: FenceStore
    objects: ObjectStore
    clock: VirtualClock
    folder: Path
    opened: list[Fence] = field(default_factory=list)

    def open(self, *, fences: Any = None, objects: Any = None, **audit: Any) -> Fence:
        fence = ragfence.open(
            fences or self.fences,
            objects=objects or self.objects,
            tenant=self.fences.tenant,
            policy=Policy(audit=audit),
            journal=self.folder / "journal",
        )
        self.opened.append(fence)
        return fence

    def audit(self, *, fences: Any = None, objects: Any = None, **audit: Any) -> Audit:
        """Without a fence around it."""
        return Audit(fences or self.fences, objects or self.objects, Policy(audit=audit))

    def write(self, rows: list[Row]) -> None:
        self.fences.record(rows)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.fences.tenant, self.objects)

    def parts(self) -> list[Part]:
        return self.ledger.parts()

    def in_ledger(self) -> list[str]:
        """The row ids, as often as they stand in it."""
        found: list[str] = []
        for part in self.parts():
            table = self.ledger.read(part, RowQuery(), ["row_id"])
            assert table is not None
            found += table.column("row_id").to_pylist()
        return found

    def undrained(self) -> set[str]:
        return {row.row_id for row in self.fences.rows()}


@pytest.fixture(params=["memory", "sqlite", "valkey"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    yield from _made(request.param, request, tmp_path)


@pytest.fixture
def memory_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    yield from _made("memory", request, tmp_path)


def _made(name: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[Place]:
    clock = VirtualClock()
    fences: Any
    objects: ObjectStore = LocalObjects(folder / "objects")
    if name == "memory":
        fences, objects = MemoryFences(clock=clock), MemoryObjects()
    elif name == "sqlite":
        fences = SqliteFences(folder / "fences.db", clock=clock)
    else:
        server = request.getfixturevalue("valkey_server")
        tenant, client = f"audit-{next(_tenants)}", server.client()
        client.set(f"clock-of-{tenant}", clock())
        clock = VirtualClock(on_change=lambda now_ms: client.set(f"clock-of-{tenant}", now_ms))
        clock.advance(0)
        fences = RedisFences(server.url, tenant, test_clock=f"clock-of-{tenant}")
    made = Place(fences, objects, clock, folder)
    yield made
    for fence in made.opened:
        fence.close()
    fences.close()
    if name == "valkey":
        client.close()
