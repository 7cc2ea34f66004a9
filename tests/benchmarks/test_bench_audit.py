"""Part 6 of the benchmark measures what it says it does. Never how fast anything is: that is `make bench`'s to say."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ragfence.stores.redis.store import RedisFences
from tests import servers
from tests.bench import audit_cost, audit_report, audit_run, report, run
from tests.bench.audit_cost import CLAIMS, DOCUMENTS, OFF, ON, named
from tests.bench.audit_goals import GOALS, verdicts
from tests.bench.audit_queries import BY_DAY, BY_SOURCE
from tests.bench.audit_scale import FULL, QUICK, AuditScale
from tests.bench.goals import Outcome

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__)]

TINY = AuditScale(rows=20_000, days=2, rounds=2, documents=20, batches=1, batch=10)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny run, as it comes back from its file."""
    path = tmp_path_factory.mktemp("bench") / "out" / "bench-audit.json"
    run.write(path, audit_run.measure(TINY))
    return json.loads(path.read_text())


def test_a_run_has_every_subject_in_every_round_and_judges_every_goal(measured):
    assert set(measured["rates"]) == {named(what, how) for what in (DOCUMENTS, CLAIMS) for how in (ON, OFF)}
    assert all(len(rates) == TINY.rounds and min(rates) > 0 for rates in measured["rates"].values())
    assert [goal["figure"] for goal in measured["goals"]] == [goal.figure for goal in GOALS]
    assert all(goal["outcome"] != Outcome.NOT_MEASURED for goal in measured["goals"])
    assert measured["scale"]["full"] is False
    assert FULL.is_full
    assert not QUICK.is_full


def test_questions_find_what_is_there_with_memory_of_their_own(measured):
    asked = measured["queries"]["asked"]
    assert asked[BY_DAY]["found"] == TINY.rows
    assert 0 < asked[BY_SOURCE]["found"] < TINY.rows
    assert all(told["peak_megabytes"] > 10 and told["seconds"] > 0 for told in asked.values())


def test_rows_are_left_with_audit_and_none_without(valkey_server):
    def rows(tenant: str) -> int:
        store = RedisFences(valkey_server.url, tenant, solo=tenant == "bulk")
        try:
            return sum(1 for _ in store.rows())
        finally:
            store.close()

    with audit_cost.subjects(valkey_server, TINY) as subjects:
        for what, tenant, count in ((DOCUMENTS, "audited", TINY.documents), (CLAIMS, "bulk", TINY.batch)):
            for how, expected in ((ON, count), (OFF, 0)):
                (subject,) = [each for each in subjects if each.name == named(what, how)]
                before = rows(tenant)
                subject.seconds(0)
                assert rows(tenant) - before == expected, subject.name


def test_the_terminal_and_the_page_show_every_goal_and_nothing_of_this_machine(measured):
    terminal = io.StringIO()
    audit_report.show(Console(width=200, file=terminal), measured)
    shown, page = terminal.getvalue(), audit_report.section(measured)
    for verdict in verdicts(measured):
        assert report.wanted(verdict.goal) in page
        assert verdict.outcome.value in shown
    assert "no full run" in page
    assert str(Path.cwd()) not in page
    assert servers.HOST not in page
