"""Worlds with an object store, as for the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents.places import IN_PROCESS, PLACES, Place, place
from tests.engine.worlds import WITH_OBJECTS, World
from tests.engine.worlds import world as make_world


@pytest.fixture(params=WITH_OBJECTS)
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with make_world(request.param, tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture(params=PLACES)
def here(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with place(request.param, tmp_path, monkeypatch, lambda: request.getfixturevalue("valkey_server")) as made:
        yield made


@pytest.fixture(params=IN_PROCESS)
def near(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with place(request.param, tmp_path, monkeypatch, lambda: request.getfixturevalue("valkey_server")) as made:
        yield made


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Place]:
    with place("memory", tmp_path, monkeypatch, lambda: request.getfixturevalue("valkey_server")) as made:
        yield made
