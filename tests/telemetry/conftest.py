"""Fences whose every decision is seen, each with a registry and a stream of its own."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import ragfence
from ragfence import Fence

pytest.register_assert_rewrite("ragfence.testing.contracts")

OpenFence = Callable[..., Fence]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("STORE", "OBJECTS", "TENANT", "POLICY", "OBSERVE"):
        monkeypatch.delenv(f"RAGFENCE_{variable}", raising=False)


@pytest.fixture
def open_fence(tmp_path: Path) -> Iterator[OpenFence]:
    """As `ragfence.open`, on the same stores every time unless another is given."""
    opened: list[Fence] = []

    def opening(store: Any = None, **options: Any) -> Fence:
        given = tmp_path / "fence" if store is None else store
        opened.append(ragfence.open(given, **({"journal": tmp_path / "journal"} | options)))
        return opened[-1]

    yield opening
    for fence in opened:
        fence.close()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


class Lines(io.StringIO):
    """A stream of JSON lines."""

    @property
    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.all if line["event"] == event]


@pytest.fixture
def lines() -> Lines:
    return Lines()
