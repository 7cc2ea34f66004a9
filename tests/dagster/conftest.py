"""A world in a folder of its own; Dagster writes nowhere else, and calls nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from tests.dagster.world import World


@pytest.fixture(autouse=True)
def _dagster_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "dagster_home"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("DAGSTER_DISABLE_TELEMETRY", "1")
    for name in ("RAGFENCE_STORE", "RAGFENCE_OBJECTS", "RAGFENCE_TENANT", "RAGFENCE_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def world(tmp_path: Path, instance: dg.DagsterInstance) -> World:
    return World(tmp_path, instance)
