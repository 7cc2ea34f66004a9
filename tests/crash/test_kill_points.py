"""A worker is killed or frozen at each point of an operation; others finish, and there is one receipt per key.

The attacks and the verdict are those of `tests.chaos`, with leases of half a second.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ragfence.engine.crash_points import OPERATION_POINTS
from tests.chaos import attacks, crew
from tests.chaos.scenarios import Scenario, run
from tests.chaos.sites import SQLITE, VALKEY_FOLDER

ONE_MORE_EXECUTION = {"kill": {"after_effect"}, "freeze": {"in_effect", "after_effect"}}
"""Where the effect is performed, or will be, by somebody who has not committed it when his lease runs out."""


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[crew.Nursery]:
    with crew.nursery(tmp_path_factory.mktemp("nursery")) as made:
        yield made


@pytest.mark.parametrize("backend", [SQLITE, VALKEY_FOLDER])
@pytest.mark.parametrize("action", ["kill", "freeze"])
@pytest.mark.parametrize("point", OPERATION_POINTS)
def test_one_receipt_whoever_stops_where(point: str, action: str, backend: str, nursery: crew.Nursery) -> None:
    scenario = Scenario(f"{action} {point}", backend, attacks.strike(action, point), lease_s=0.5)
    found = run(scenario, seed=1, nursery=nursery, s3=None).evidence
    assert found.problems == []
    assert found.commits == found.receipts == found.expected
    assert found.pending == 0
    if point in ONE_MORE_EXECUTION[action]:
        assert found.executions > found.tasks
