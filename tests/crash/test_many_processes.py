"""Eight processes want the same operations, in the same order: each is performed once, and everybody is told so.

On SeaweedFS, where a new operation costs a LIST, a GET and a PUT, there are fewer operations here;
`python -m tests.chaos --only "8 processes"` has all 2,000 on it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos import attacks, crew
from tests.chaos.scenarios import Scenario, run
from tests.chaos.sites import SQLITE, VALKEY, VALKEY_S3

PROCESSES = 8

pytestmark = pytest.mark.xdist_group("many processes")


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[crew.Nursery]:
    with crew.nursery(tmp_path_factory.mktemp("nursery")) as made:
        yield made


@pytest.mark.parametrize(("backend", "operations"), [(SQLITE, 2000), (VALKEY, 2000), (VALKEY_S3, 400)])
def test_eight_processes_perform_every_operation_once_and_all_get_its_receipt(
    backend: str, operations: int, nursery: crew.Nursery, request: pytest.FixtureRequest
) -> None:
    s3 = request.getfixturevalue("seaweed_server") if backend == VALKEY_S3 else None
    attack = attacks.many(processes=PROCESSES, keyed=operations)
    outcome = run(Scenario("many", backend, attack, lease_s=30.0), seed=1, nursery=nursery, s3=s3)
    found = outcome.evidence
    assert found.problems == []
    assert found.executions == found.commits == found.receipts == operations
    assert found.answers == operations * (PROCESSES + 1)  # one more asks for everything again at the end
    assert found.errors == {}
