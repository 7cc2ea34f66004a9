"""Full garbage collections of a server are short, and cycles are freed all the same."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from ragfence.server import full_collections
from ragfence.server.full_collections import short_full_collections


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()


class Node:
    def __init__(self) -> None:
        self.itself = self


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_what_survives_a_long_collection_is_not_visited_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve() -> tuple[int, int]:
        with short_full_collections():
            kept = [[number] for number in range(100_000)]
            before = gc.get_freeze_count()
            gc.collect()
            await settle()
            return len(kept), gc.get_freeze_count() - before

    monkeypatch.setattr(full_collections, "LONG_S", 0.0)
    count, frozen = asyncio.run(serve())
    assert frozen >= count


def test_a_short_collection_freezes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve() -> int:
        with short_full_collections():
            before = gc.get_freeze_count()
            kept = [[number] for number in range(1000)]
            gc.collect()
            await settle()
            assert kept
            return gc.get_freeze_count() - before

    monkeypatch.setattr(full_collections, "LONG_S", 60.0)
    assert asyncio.run(serve()) <= 0


def test_a_cycle_that_was_frozen_is_freed_after_the_next_thaw(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve() -> bool:
        with short_full_collections():
            node: Node | None = Node()
            gone = weakref.ref(node)
            gc.collect()
            await settle()
            node = None
            gc.collect()  # visits no frozen object
            await settle()
            assert gone() is not None
            monkeypatch.setattr(full_collections, "THAW_EVERY_S", 0.0)
            gc.collect()
            await settle()
            gc.collect()
            return gone() is None

    monkeypatch.setattr(full_collections, "LONG_S", 0.0)
    assert asyncio.run(serve())


def test_nothing_is_left_behind() -> None:
    async def serve() -> None:
        with short_full_collections():
            assert gc.get_freeze_count() > 0

    before = list(gc.callbacks)
    asyncio.run(serve())
    assert gc.callbacks == before
    assert gc.get_freeze_count() == 0
