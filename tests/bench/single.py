"""One operation at a time through the public API, beside raw redis-py on the same server."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis

import ragfence
from tests.bench.rounds import Subject, clocked
from tests.bench.scale import Scale

KIND = "bench"
RESULT = "r" * 36
RAW_VALUE = b"x" * 100


def request(name: str) -> dict[str, Any]:
    """The payload; the peer is given the same."""
    return {"id": name, "amount": 12}


class Guarded:
    """A function behind `@fence.once`, as a user writes it. Keeps count of its effects."""

    def __init__(self, fence: ragfence.Fence) -> None:
        self.fence = fence
        self.effects = 0
        self._fresh = itertools.count()

        @fence.once(kind=KIND, key=lambda request: request["id"])
        def effect(request: dict[str, Any]) -> str:
            self.effects += 1
            return RESULT

        self.call: Callable[[dict[str, Any]], ragfence.Receipt] = effect

    def fresh(self, count: int) -> list[dict[str, Any]]:
        return [request(f"{next(self._fresh):012d}") for _ in range(count)]

    def subject(self, name: str, count: int, requests: Callable[[int], list[dict[str, Any]]], *, new: bool) -> Subject:
        """Calls with what `requests` makes; all of them must run the effect, or none."""
        seen = 0

        def prepare(number: int) -> list[dict[str, Any]]:
            nonlocal seen
            seen = self.effects
            return requests(number)

        def check(ready: list[dict[str, Any]]) -> None:
            expected = len(ready) if new else 0
            if self.effects - seen != expected:
                raise RuntimeError(f"{name}: {self.effects - seen} effects, not {expected}")

        return Subject(name, count, clocked(self.each, prepare=prepare, check=check))

    def each(self, requests: list[dict[str, Any]]) -> None:
        call = self.call
        for one in requests:
            call(one)

    def replay(self, name: str, count: int) -> Subject:
        sealed = request("replayed")
        self.call(sealed)
        return self.subject(name, count, lambda _: [sealed] * count, new=False)

    def new(self, name: str, count: int) -> Subject:
        return self.subject(name, count, lambda _: self.fresh(count), new=True)


@contextlib.contextmanager
def guarded(url: str, folder: Path, **options: Any) -> Iterator[Guarded]:
    """On Redis alone, unless `objects` is among the options. The audit cannot be turned off."""
    with ragfence.open(url, journal=folder / "journal", **options) as fence:
        yield Guarded(fence)


def raw_get(client: redis.Redis, count: int) -> Subject:
    client.set("floor", RAW_VALUE)

    def work(_ready: None) -> None:
        get = client.get
        for _ in range(count):
            get("floor")

    return Subject("raw GET", count, clocked(work, prepare=lambda _: None))


@contextlib.contextmanager
def subjects(url: str, folder: Path, scale: Scale) -> Iterator[list[Subject]]:
    with redis.Redis.from_url(url) as client, guarded(url, folder) as ours:
        yield [
            raw_get(client, scale.replays),
            ours.replay("replay", scale.replays),
            ours.new("new", scale.news),
        ]
