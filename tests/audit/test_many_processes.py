"""Eight processes decide, two drain, all of them are killed: whatever a caller was told is in the ledger, once.

The workers' own files are the evidence. `python -m tests.chaos --only ledger` has 100,000 operations.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ragfence.core.layout import FENCED_POSITION, SEAL_POSITION, RowKind
from tests import servers
from tests.audit.many.judge import Verdict, gathered, missing
from tests.audit.many.plan import Plan
from tests.audit.many.running import attack, cradle, notebook_problems
from tests.chaos.crew import Nursery
from tests.chaos.sites import SQLITE, VALKEY_FOLDER, VALKEY_S3, site

pytestmark = pytest.mark.xdist_group("many processes")

OPERATIONS, KILLS = 1_500, 2


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with cradle(tmp_path_factory.mktemp("cradle")) as made:
        yield made


@pytest.mark.parametrize("backend", [SQLITE, VALKEY_FOLDER, pytest.param(VALKEY_S3, marks=pytest.mark.slow)])
def test_every_decision_that_a_caller_received_is_in_the_ledger_once_whoever_is_killed(
    backend: str, nursery: Nursery, tmp_path: Path, s3_env: None, request: pytest.FixtureRequest
) -> None:
    s3: servers.S3Server | None = request.getfixturevalue("seaweed_server") if backend == VALKEY_S3 else None
    plan = Plan(seed=random.randrange(1 << 32), operations=OPERATIONS)
    print(plan)
    with site(backend, tmp_path, s3=s3) as place:
        found = attack(place, nursery, plan, kills=KILLS, lease_s=1.0, effect_s=0.05)
        if backend != VALKEY_FOLDER:  # two of three will do
            found.problems += notebook_problems(place)
    assert found.problems == [], "\n".join(found.problems)
    assert found.kills["worker"] == KILLS
    assert found.kills["drainer"] >= KILLS
    assert found.answers >= OPERATIONS
    assert {"new", "duplicate", "conflict"} <= set(found.decisions)
    assert found.rows >= found.answers
    assert found.drained > 0


def test_a_row_that_is_missing_or_that_nobody_was_told_of_is_found(nursery: Nursery, tmp_path: Path) -> None:
    with site(SQLITE, tmp_path) as place:
        assert attack(place, nursery, Plan(seed=1, operations=150), kills=0, lease_s=5.0, effect_s=0.0).problems == []
        with place.opened() as (fence, _, _):
            rows = list(fence.audit.rows())
    told = gathered(sorted(tmp_path.glob("worker-*.lines")))
    assert list(missing(told, rows, Verdict())) == []
    rows = [row for row in rows if row.position != FENCED_POSITION]  # these answer nobody
    answers = [row for row in rows if row.kind is RowKind.DUPLICATE or row.position == SEAL_POSITION]
    assert len(answers) > 100
    for row in answers:
        assert list(missing(told, (each for each in rows if each is not row), Verdict())), row
        assert list(missing(told, (*rows, replace(row, token=bytes(12))), Verdict())), row
        changed = replace(row, kind=RowKind.STALE, position=0)
        assert list(missing(told, (changed if each is row else each for each in rows), Verdict())), row
