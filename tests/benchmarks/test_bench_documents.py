"""Part 2 of the benchmark measures what it says it does. Never how fast anything is: that is `make bench`'s to say."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests import servers
from tests.bench import docs, documents_report, documents_run, report, run
from tests.bench.documents_goals import GOALS, figures, verdicts
from tests.bench.documents_rates import AGAIN, FIRST, RAGFENCE, WITH_SINK, named
from tests.bench.documents_scale import FULL, QUICK, DocumentsScale
from tests.bench.goals import Outcome
from tests.bench.peers.corpus import corpus
from tests.bench.peers.process import DUPLICATES_ONLY, LANGCHAIN, UPSERTS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__)]

TINY = DocumentsScale(
    rounds=2,
    documents=30,
    batch=20,
    raced=40,
    races=1,
    few=10,
    many=50,
    changes=2,
    hydrations=1,
    streamed=600,
    weighed=100,
    requested=20,
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny run without the peers, as it comes back from its file."""
    path = tmp_path_factory.mktemp("bench") / "out" / "bench-documents.json"
    run.write(path, documents_run.measure(TINY, python=None))
    return json.loads(path.read_text())


@pytest.fixture
def beside_peers(measured: Any) -> Any:
    """The same run as if the peers had been there, each half as fast as ragfence."""
    others = (LANGCHAIN, UPSERTS, DUPLICATES_ONLY)
    rates = dict(measured["rates"])
    for kind in (AGAIN, FIRST):
        rates |= {named(kind, who): [rate / 2 for rate in rates[named(kind, RAGFENCE)]] for who in others}
    race = measured["race"] | {who: [{"embeds": 80, "rows": 80, "left": 40}] for who in others}
    peers = {who: {"package-of": "1.0"} for who in others}
    return measured | {"rates": rates, "race": race, "peers": peers}


def test_a_run_has_known_and_new_documents_in_every_round(measured):
    assert set(measured["rates"]) == {named(AGAIN, RAGFENCE), named(FIRST, RAGFENCE), named(FIRST, WITH_SINK)}
    assert all(len(rates) == TINY.rounds and min(rates) > 0 for rates in measured["rates"].values())


def test_a_run_says_what_it_was_measured_on(measured):
    assert measured["objects"] == "local folder"
    assert {"cores", "python", "redis-py", "server", "load_before", "load_after"} <= set(measured["machine"])
    assert measured["scale"]["full"] is False
    assert measured["peers"] == {}


def test_two_processes_chunk_and_write_every_document_once(measured):
    (race,) = measured["race"][RAGFENCE]
    assert race == dict.fromkeys(("embeds", "rows", "left", "chunked", "stored"), TINY.raced)


def test_a_run_counts_bytes_requests_and_memory(measured):
    assert measured["bytes"]["keys_per_document"] >= 1
    assert measured["bytes"]["document_bytes"] > 3 * 16
    assert measured["requests"]["first"]["PutObject"] >= 2
    assert measured["requests"]["again"] == {}
    assert measured["memory"]["documents"] == TINY.streamed
    assert measured["memory"]["peak_bytes"] >= measured["memory"]["before_bytes"] > 1 << 20
    assert measured["growth"]["hydration"]["receipts"] == TINY.many


def test_every_goal_is_judged_and_those_beside_a_peer_are_not_measured_without_it(measured):
    assert [goal["figure"] for goal in measured["goals"]] == [goal.figure for goal in GOALS]
    for goal in measured["goals"]:
        assert (goal["outcome"] == Outcome.NOT_MEASURED) == (" / L" in goal["figure"]), goal["figure"]


def test_a_ratio_says_how_many_times_faster_ragfence_is(beside_peers):
    found = figures(beside_peers)
    assert {found[f"{kind} / {who}"].middle for kind in (AGAIN, FIRST) for who in (LANGCHAIN, UPSERTS)} == {2.0}


def test_time_among_many_documents_is_compared_not_the_rate(measured):
    few, many = (f"a changed document among {known}" for known in (TINY.few, TINY.many))
    changed = {few: [100.0], many: [50.0]}  # a second: half the rate, twice the time
    slower = measured | {"growth": measured["growth"] | {"changed": changed}}
    assert figures(slower)["many / few"].middle == 2.0


def test_the_terminal_and_the_page_show_every_goal_and_nothing_of_this_machine(measured, beside_peers):
    for one in (measured, beside_peers):
        terminal = io.StringIO()
        documents_report.show(Console(width=220, file=terminal), one)
        shown, section = terminal.getvalue(), documents_report.section(one)
        for verdict in verdicts(one):
            assert report.wanted(verdict.goal) in section
            assert report.wanted(verdict.goal) in shown
            assert verdict.outcome.value in section
        for text in (shown, section):
            assert "local folder" in text
            assert str(Path.cwd()) not in text
            assert servers.HOST not in text
        assert "no full run" in section


def test_the_page_holds_the_section_of_documents_after_that_of_operations():
    assert docs.PAGE.endswith("{documents}")
    assert documents_report.SECTION.startswith("\n## Documents\n")  # where the page's #documents leads


def test_documents_are_the_same_for_everybody_who_names_their_corpus():
    first = list(corpus("first", 50))
    assert first == list(corpus("first", 50))
    assert first[:20] == list(corpus("first", 20))
    assert {len(each.text) for each in first} == {1_000}
    assert len({each.text for each in [*first, *corpus("second", 50)]}) == 100
    assert first[0].metadata == {"source": first[0].doc_id}


def test_a_smaller_scale_is_not_a_full_run():
    assert FULL.is_full
    assert not QUICK.is_full
    assert not replace(FULL, streamed=100_000).is_full
