"""Both clients behind one face: every test of the behaviour runs with each."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from ragfence.client import AsyncClient, Client
from tests.client.scripted import RECEIPT, Scripted, said


class Slept:
    """A clock that moves only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


class Asks:
    """A client whose calls are made by name, and answered when they are done."""

    def __init__(self, kind: type[Client] | type[AsyncClient], *args: Any, slept: Slept | None = None, **options: Any):
        self.runner = asyncio.Runner()
        if slept is not None:
            options["clock"] = slept.clock
            options["sleep"] = slept.sleep
            if kind is AsyncClient:
                options["sleep"] = self._asleep(slept)
        # Reading the certificates of all authorities takes longer than most of these tests.
        plain = httpx.HTTPTransport if kind is Client else httpx.AsyncHTTPTransport
        options.setdefault("transport", plain(verify=False))
        self.client = kind(*args, **options)

    @staticmethod
    def _asleep(slept: Slept) -> Any:
        async def sleep(seconds: float) -> None:
            slept.sleep(seconds)

        return sleep

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            came = getattr(self.client, name)(*args, **kwargs)
            if inspect.isasyncgen(came):
                return self.runner.run(_listed(came))
            if inspect.isgenerator(came):
                return list(came)
            return self.runner.run(came) if inspect.isawaitable(came) else came  # type: ignore[arg-type]

        return call

    def end(self) -> None:
        self.close()
        self.runner.close()


async def _listed(items: Any) -> list[Any]:
    return [item async for item in items]


Opening = Callable[..., Asks]


@pytest.fixture
def slept() -> Slept:
    return Slept()


@pytest.fixture
def server() -> Iterator[Scripted]:
    with Scripted(said(RECEIPT, 201)) as scripted:
        yield scripted


@pytest.fixture(params=[Client, AsyncClient], ids=["sync", "async"])
def opened(request: pytest.FixtureRequest) -> Iterator[Opening]:
    """`opened(url, ...)`: a client of the one kind, and then of the other."""
    all_of_them: list[Asks] = []

    def opening(*args: Any, **options: Any) -> Asks:
        all_of_them.append(Asks(request.param, *args, **options))
        return all_of_them[-1]

    yield opening
    for each in all_of_them:
        each.end()


@pytest.fixture
def client(opened: Opening, server: Scripted, slept: Slept) -> Asks:
    return opened(server.url, "rf_secret", slept=slept)
