"""Part 7 of the benchmark measures what it says it does. Never how fast anything is: that is `make bench`'s to say."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests import servers
from tests.bench import report, run, tenants_report, tenants_run
from tests.bench.api_servers import generator
from tests.bench.goals import Outcome
from tests.bench.tenants_goals import GOALS, figure, figures, lost_figure, verdicts
from tests.bench.tenants_hostile import BUILDS, FORMS, LARGE, REFUSED_BODIES, SLOW_BODIES, refused_bodies
from tests.bench.tenants_rounds import (
    ATTACKED,
    BESIDE,
    HOWS,
    KINDS,
    SERVE_SQLITE,
    SERVE_VALKEY,
    STORES,
    burnt_by,
    named,
    share_to_burn,
    summed_up,
)
from tests.bench.tenants_scale import FULL, QUICK, TenantsScale

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__)]

TINY = TenantsScale(
    rounds=1, seconds=0.3, lead_s=0.2, per_s=10, slow_bodies=4, builds=4, built=10, refused_s=0.05, bodies=1
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny run, as it comes back from its file."""
    path = tmp_path_factory.mktemp("bench") / "out" / "bench-tenants.json"
    run.write(path, tenants_run.measure(TINY))
    return json.loads(path.read_text())


def test_a_run_has_every_attack_on_every_store_and_what_it_stands_beside(measured):
    assert set(measured["cells"]) == {named(store, form, how) for store in STORES for form in FORMS for how in HOWS}
    for cell in measured["cells"].values():
        assert cell["requests"] == 2 * TINY.rounds * round(TINY.seconds * TINY.per_s)
        assert all(len(cell[kind]["p99_ms"]) == TINY.rounds for kind in KINDS)
    assert [goal["figure"] for goal in measured["goals"]] == [goal.figure for goal in GOALS]
    assert all(goal["outcome"] != Outcome.NOT_MEASURED for goal in measured["goals"])


def test_nothing_of_the_other_tenant_is_lost_and_every_document_is_looked_for(measured):
    for name, cell in measured["cells"].items():
        assert (cell["failed"], cell["missing"]) == ({}, 0), name
        assert cell["stored"] == cell["requests"] / 2


def test_the_attacker_is_answered_as_attackers_are(measured):
    for store in STORES:
        answers = {form: measured["cells"][named(store, form, ATTACKED)]["answers"] for form in FORMS}
        assert set(answers[SLOW_BODIES]) <= {"201", "408"}
        assert set(answers[BUILDS]) <= {"200", "201", "429"}
        assert set(answers[REFUSED_BODIES]) <= {"422"}


def test_the_terminal_and_the_page_show_every_goal_and_nothing_of_this_machine(measured):
    terminal = io.StringIO()
    tenants_report.show(Console(width=240, file=terminal), measured)
    shown, page = terminal.getvalue(), tenants_report.section(measured)
    for verdict in verdicts(measured):
        for text in (shown, page):
            assert report.wanted(verdict.goal) in text
            assert verdict.outcome.value in text
    assert "no full run" in page
    assert str(Path.cwd()) not in page
    assert servers.HOST not in page
    # Where the page's own links lead, measured or not.
    for section in (page, tenants_report.UNMEASURED):
        assert section.startswith("\n## One tenant next to a hostile one\n")


def test_latency_is_compared_within_a_round_and_losses_are_added_up(measured):
    attacked, beside = (dict(measured["cells"][named(SERVE_SQLITE, BUILDS, how)]) for how in (ATTACKED, BESIDE))
    attacked["write"], beside["write"] = {"p99_ms": [10.0, 30.0, 80.0]}, {"p99_ms": [10.0, 10.0, 20.0]}
    attacked["read"] = beside["read"] = {"p99_ms": [1.0, 1.0, 1.0]}
    alone = beside | {"failed": {"503": 2, "no answer": 1}, "missing": 1}
    cells = dict(zip((named(SERVE_SQLITE, BUILDS, how) for how in HOWS), (alone, attacked, beside), strict=True))
    found = figures(measured | {"cells": cells})
    assert found[figure(SERVE_SQLITE, BUILDS, "write")].middle == 3.0
    assert found[lost_figure(SERVE_SQLITE, BUILDS)].middle == 4.0
    assert figure(SERVE_VALKEY, BUILDS, "write") not in found
    outcomes = {v.goal.figure: v.outcome for v in verdicts(measured | {"cells": cells})}
    assert outcomes[figure(SERVE_SQLITE, BUILDS, "write")] == Outcome.MET
    assert outcomes[lost_figure(SERVE_SQLITE, BUILDS)] == Outcome.MISSED
    assert outcomes[figure(SERVE_VALKEY, BUILDS, "write")] == Outcome.NOT_MEASURED


def test_what_is_burnt_is_what_the_attack_took_beyond_the_other_tenant():
    assert share_to_burn([0.9, 0.1, 0.2], [0.25, 0.05], cores=2) == pytest.approx(0.9)
    assert share_to_burn([0.2], [0.3], cores=2) == 0.0
    assert share_to_burn([1.9, 0.9], [0.1], cores=2) == 2.0
    assert burnt_by(0.0, 2) == [0.0]
    assert burnt_by(0.9, 2) == [0.9]
    assert burnt_by(1.5, 2) == [0.75, 0.75]
    assert burnt_by(3.0, 2) == [1.0, 1.0]


def test_rounds_are_kept_one_by_one_and_together():
    rest = {"read_ms": [1.0], "stored": 2, "missing": 0, "cores": [0.12345]}
    told = summed_up(
        [
            {"write_ms": [1.0, 3.0], "failed": {"503": 1}, "answers": {"408": 2}, **rest},
            {"write_ms": [2.0, 9.0], "failed": {"503": 2}, "answers": {"429": 1, "408": 1}, **rest},
        ]
    )
    assert told["write"]["p99_ms"] == [3.0, 9.0]
    assert told["write, all rounds"]["most_ms"] == 9.0
    assert (told["failed"], told["answers"]) == ({"503": 3}, {"408": 3, "429": 1})
    assert (told["requests"], told["stored"], told["missing"]) == (6, 4, 0)


def test_a_burner_takes_its_share_and_no_more():
    with generator("tests.bench.tenants_burner") as burner:
        assert burner.run(share=0.2, most_s=30) == {"underway": True}
        time.sleep(1.0)
        assert 0 < burner.run(stop=True)["cpu_s"] < 0.6


def test_refused_bodies_are_large_json_and_no_documents():
    bodies = list(refused_bodies(1 << 17))
    assert all((1 << 17) - 100 <= len(body) <= 1 << 17 for body in bodies[:-1])
    assert all(set(json.loads(body)) - {"doc_id", "text", "metadata"} for body in bodies)
    assert max(len(body) for body in refused_bodies()) <= LARGE


def test_a_smaller_scale_is_not_a_full_run():
    assert FULL.is_full
    assert not QUICK.is_full
    assert not replace(FULL, slow_bodies=20).is_full
