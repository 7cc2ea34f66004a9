"""Worlds for the engine's tests, see `worlds.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.ages import aging_world
from tests.engine.jobs import Job
from tests.engine.worlds import BACKENDS, WITH_OBJECTS, Tickets, World
from tests.engine.worlds import world as make_world


@pytest.fixture(params=BACKENDS)
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with make_world(request.param, tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture(params=WITH_OBJECTS)
def backed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with make_world(request.param, tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with make_world("embedded", tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with make_world("memory", tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def solo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with make_world("solo", tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def tickets() -> Tickets:
    return Tickets()


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture(params=["embedded", "memory"])
def old(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """In which time passes: commits grow old."""
    with aging_world(request.param, tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def old_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with aging_world("memory", tmp_path, monkeypatch) as made:
        yield made
