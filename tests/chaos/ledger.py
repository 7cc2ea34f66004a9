"""The attack on the ledger, at length: 8 processes decide, 2 drain, and all of them are killed again and again.

The processes and the verdict are those of `tests.audit.many`; `tests.audit.test_many_processes` has the short form.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.audit.many.judge import Verdict
from tests.audit.many.plan import Plan
from tests.audit.many.running import attack, cradle, notebook_problems
from tests.chaos.attacks import Stage
from tests.chaos.evidence import Evidence
from tests.chaos.scenario import Judged, Scenario
from tests.chaos.sites import SQLITE, VALKEY_FOLDER, VALKEY_S3


def planned() -> Iterator[Scenario]:
    planned = partial(Scenario, lease_s=2.0)
    yield planned("ledger: 1,500 operations, 3 kills", VALKEY_S3, decided(1_500, kills=3), True)
    for backend in (SQLITE, VALKEY_FOLDER, VALKEY_S3):
        yield planned("ledger: 100,000 operations, 60 kills", backend, decided(100_000, kills=60))


def decided(operations: int, *, kills: int) -> Judged:
    """`kills` of workers, and at least as many of drainers."""

    def attacked(stage: Stage) -> Evidence:
        plan = Plan(seed=stage.dice.randrange(1 << 32), operations=operations)
        with cradle(stage.site.folder) as nursery:
            found = attack(stage.site, nursery, plan, kills=kills, lease_s=stage.crew.lease_s, effect_s=0.05)
        found.problems += notebook_problems(stage.site)
        print(tell(found))
        return _evidence(found)

    return attacked


def tell(found: Verdict) -> str:
    decisions = ", ".join(f"{count:,} {name}" for name, count in found.decisions.most_common())
    return (
        f"{found.answers:,} answers ({decisions}; {found.waited:,} rows of waits), {found.rows:,} rows over "
        f"{found.keys:,} keys, {found.unanswered:,} of them of calls that nobody lived to be answered; "
        f"{found.kills['worker']} workers and {found.kills['drainer']} drainers killed; the living drained "
        f"{found.drained:,} rows, the last drain {found.left_in_store:,}; {found.copies:,} copies await compaction"
    )


def _evidence(found: Verdict) -> Evidence:
    return Evidence(
        tasks=found.keys,
        executions=found.rows,
        commits=found.keys,
        receipts=found.keys,
        answers=found.answers,
        double=sum("twice" in problem for problem in found.problems),
        lost=sum("has 0 rows" in problem or "no row" in problem for problem in found.problems),
        errors=found.errors,
        flags=found.decisions,
        problems=found.problems,
    )
