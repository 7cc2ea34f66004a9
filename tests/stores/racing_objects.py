"""What the processes of the race in test_objects_local do; a module of its own, so that they start fast."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ragfence.stores.local import LocalObjects

NAMES = 50


def self_evident(writer: int, number: int) -> bytes:
    body = f"{writer}/{number}/".encode() * 10_000
    return hashlib.sha256(body).digest() + body


def is_whole(data: bytes) -> bool:
    return hashlib.sha256(data[32:]).digest() == data[:32]


def race(root: Path, writer: int, together: Any, won: Any) -> None:
    store = LocalObjects(root)
    mine = []
    for number in range(NAMES):
        data = self_evident(writer, number)
        together.wait(60)
        put = store.put_new(f"race/{number % 3}/{number}", data)
        if put.won:
            mine.append(number)
        else:
            assert put.existing is not None
            assert is_whole(put.existing)
            assert put.existing != data
    won.put((writer, mine))


def watch(root: Path, finished: Any, seen: Any) -> None:
    store = LocalObjects(root)
    broken: list[str] = []
    sizes: dict[str, int] = {}
    while True:
        last = finished.is_set()
        for entry in store.list("race/"):
            data = store.get(entry.name) or b""
            if not is_whole(data) or sizes.setdefault(entry.name, entry.size) != len(data):
                broken.append(entry.name)
        if last:
            break
    seen.put((len(sizes), broken))
