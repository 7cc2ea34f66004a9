"""Any interleaving of claims, renewals, expiries, seals, releases, kills, lost replies, flushes, restarts, failovers
that forget the newest writes, late writes and hydrations, over several workers: at most one receipt per key is ever
returned, a token that is not current never seals, fence numbers of a source only grow, acknowledged moves are never
lost, sequences never go back, and nobody is stuck.

`RAGFENCE_EXAMPLES` scales the number of examples. A failing seed is printed; `python -m tests.machine documents 17`
replays it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.machine.drive import drive_documents, drive_guard, drive_locks, drive_operations
from tests.machine.lineages import Factory, MemoryLineages, RedisLineages, SqliteLineages

IN_MEMORY = int(os.environ.get("RAGFENCE_EXAMPLES", "600"))
ON_REAL_STORES = max(IN_MEMORY // 20, 1)

Drive = Callable[[Factory, int], None]


def _explore(drive: Drive, examples: int, make_lineages: Factory) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],  # a smaller seed is no simpler story
        database=None,
    )
    @given(seed=st.integers(0, 2**32 - 1))
    def explore(seed: int) -> None:
        drive(make_lineages, seed)

    explore()


MACHINES = pytest.mark.parametrize("drive", [drive_documents, drive_operations, drive_locks])


@MACHINES
def test_on_memory(drive: Drive) -> None:
    _explore(drive, IN_MEMORY, MemoryLineages)


@MACHINES
def test_on_sqlite(drive: Drive, tmp_path: Path) -> None:
    _explore(drive, ON_REAL_STORES, lambda: SqliteLineages(tmp_path))


@MACHINES
@pytest.mark.parametrize("server", ["valkey_server", pytest.param("redis62_server", marks=pytest.mark.slow)])
def test_on_redis(drive: Drive, server: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(server).url
    _explore(drive, ON_REAL_STORES, lambda: RedisLineages(url))


def test_the_guard_of_documents_on_memory() -> None:
    """The same stories, told with real documents: what counts in the end is whole, and read as it was sent."""
    _explore(drive_guard, max(IN_MEMORY // 20, 1), MemoryLineages)
