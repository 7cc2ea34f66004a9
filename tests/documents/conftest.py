"""Worlds with an object store, as for the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.worlds import WITH_OBJECTS, World
from tests.unit.worlds import world as make_world


@pytest.fixture(params=WITH_OBJECTS)
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with make_world(request.param, tmp_path, monkeypatch) as made:
        yield made
