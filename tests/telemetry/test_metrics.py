"""What is counted, against what really happened."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from ragfence import Document, Operation, Policy
from ragfence.errors import (
    Conflict,
    DocumentInvalid,
    FencedOut,
    InFlight,
    Quarantined,
    Stale,
    StoreUnavailable,
    TerminalError,
)
from ragfence.stores.sqlite import SqliteFences
from ragfence.telemetry import Metrics, exposition
from ragfence.telemetry.gauges import read_figures
from ragfence.telemetry.metrics import BoundedLabels, kind_of, route_of
from ragfence.testing import FaultyFences, MemoryFences, MemoryObjects, VirtualClock
from tests.documents.chunkers import Failing
from tests.engine.worlds import abandon, elsewhere

PATIENT = {"lease": {"max_attempts": 2, "seal_retry_s": 0}}


@pytest.fixture
def value(registry):
    def value(name, **labels):
        """The sum over all series that have these labels."""
        samples = [sample for family in registry.collect() for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    return value


def ticket(number: str, **more) -> Operation:
    return Operation(kind="ticket", source_id=number, **more)


def perform(fence, operation, payload=None, **options):
    with fence.claim(operation, payload=payload, **options) as op:
        if op.is_new:
            op.seal()
    return op


def test_decisions_are_counted_as_the_ledger_has_them(open_fence, registry, value):
    fence = open_fence(observe=Metrics(registry), route="nightly")
    perform(fence, ticket("a"), {"n": 1})
    perform(fence, ticket("a"), {"n": 1}, route="POST /tickets")
    with pytest.raises(Conflict):
        perform(fence, ticket("a"), {"n": 2})
    perform(fence, ticket("s", sequence=5))
    with pytest.raises(Stale):
        perform(fence, ticket("s", sequence=4))
    with fence.claim(ticket("b")) as op, pytest.raises(InFlight):
        elsewhere(lambda: perform(fence, ticket("b"), wait_s=0))
    assert op.is_new  # left without a seal: released, so nothing was decided
    fence.documents.ingest_many([Document(f"d{at}", f"text {at}") for at in range(3)])
    fence.documents.ingest_many([Document(f"d{at}", f"text {at}") for at in range(3)])
    rows = fence.audit.decisions().to_pylist()
    told = Counter(
        row["decision"]
        for row in rows
        if row["decision"] != "new" or (row["sealed_at"] is not None and row["error_code"] is None)
    )
    assert told == {"new": 5, "duplicate": 4, "conflict": 1, "stale": 1, "in_flight": 1}
    for decision, count in told.items():
        assert value("ragfence_decisions_total", decision=decision) == count
    assert value("ragfence_decisions_total", endpoint="POST /tickets", decision="duplicate", tenant="default") == 1
    assert value("ragfence_decisions_total", kind="document", endpoint="nightly", decision="duplicate") == 3
    assert (value("ragfence_hits_total"), value("ragfence_misses_total")) == (4, 5)
    assert value("ragfence_hit_ratio") == pytest.approx(4 / 9)
    assert value("ragfence_effects_total", outcome="created") == 5


def test_a_conflict_whose_diff_is_kept_counts_once(open_fence, registry, value):
    policy = Policy(on_conflict={"include_diff": True})
    fence = open_fence(observe=Metrics(registry), policy=policy)
    perform(fence, ticket("a"), {"n": 1})
    with pytest.raises(Conflict):
        perform(fence, ticket("a"), {"n": 2})
    assert value("ragfence_decisions_total", decision="conflict", kind="ticket") == 1


def test_locks_takeovers_and_waits(registry, value, open_fence):
    clock = VirtualClock()
    fence = open_fence(
        MemoryFences(clock=clock), objects=MemoryObjects(), observe=Metrics(registry), policy=Policy(**PATIENT)
    )
    abandon(fence, ticket("a"))
    with pytest.raises(InFlight):
        perform(fence, ticket("a"), wait_s=0.05)
    assert value("ragfence_lock_conflicts_total", kind="ticket") >= 1
    clock.advance(30_001)
    perform(fence, ticket("a"))
    assert value("ragfence_takeovers_total", kind="ticket") == 1
    assert value("ragfence_locks_acquired_total", kind="ticket") == 2
    assert value("ragfence_retry_delay_seconds_count", decision="new") == 1
    assert value("ragfence_retry_delay_seconds_sum", decision="new") == pytest.approx(30.001)


def test_whoever_waited_and_got_an_answer_is_in_the_histogram(open_fence, registry, value):
    fence, other = open_fence(observe=Metrics(registry)), open_fence()
    waiting = threading.Event()
    with other.claim(ticket("a")) as op:

        def wait():
            waiting.set()
            perform(fence, ticket("a"), wait_s=30)

        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        while not value("ragfence_lock_conflicts_total", kind="ticket"):
            assert thread.is_alive()
        op.seal()
    thread.join()
    assert value("ragfence_lock_wait_seconds_count", kind="ticket") == 1
    assert value("ragfence_hits_total", kind="ticket") == 1


def test_an_effect_that_was_fenced_out_is_a_double_effect_and_no_hit(registry, value, open_fence):
    clock = VirtualClock()
    fence = open_fence(MemoryFences(solo=True, clock=clock), observe=Metrics(registry))
    with fence.claim(ticket("a")) as late:
        clock.advance(30_001)
        elsewhere(lambda: perform(fence, ticket("a")))
        with pytest.raises(FencedOut):
            late.seal()
    assert value("ragfence_double_effects_detected_total", kind="ticket") == 1
    assert value("ragfence_effects_total", outcome="fenced_out") == 1
    assert (value("ragfence_hits_total"), value("ragfence_misses_total")) == (0, 1)


def test_failures_and_quarantine(open_fence, registry, value):
    fence = open_fence(observe=Metrics(registry), policy=Policy(**PATIENT))

    def fails(error):
        @fence.once(kind="ticket", key=lambda name: name)
        def effect(name):
            raise error

        return effect

    with pytest.raises(TerminalError):
        fails(TerminalError("for good"))("a")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            fails(RuntimeError("again"))("b")
    with pytest.raises(Quarantined):
        fails(RuntimeError("again"))("b")
    assert value("ragfence_effects_total", outcome="failed") == 1
    assert value("ragfence_quarantine_refusals_total", kind="ticket") == 1
    assert value("ragfence_quarantined_keys", tenant="default") == 1
    assert value("ragfence_active_keys", state="failed", kind="ticket") == 1


def test_a_document_that_is_quarantined_is_counted_with_the_others(open_fence, registry, value):
    fence = open_fence(observe=Metrics(registry), policy=Policy(**PATIENT))
    documents = fence.documents.using(chunker=Failing())
    for _ in range(3):
        documents.ingest_many([Document("bad", "fail")])
    assert value("ragfence_quarantined_keys", tenant="default") == 1
    assert [(found.what, found.kind, found.count) for found in fence.audit.anomalies()] == [
        ("quarantined", "document", 1)
    ]


def test_errors_of_the_store_are_counted_by_their_code(registry, value, open_fence):
    fences = FaultyFences(MemoryFences())
    fence = open_fence(fences, objects=MemoryObjects(), observe=Metrics(registry))
    perform(fence, ticket("a"))
    before = value("ragfence_store_calls_total")
    fences.on("claim").fail_before()
    with pytest.raises(StoreUnavailable):
        perform(fence, ticket("b"))
    assert value("ragfence_store_errors_total", method="claim", error=StoreUnavailable.code, store="memory://") == 1
    assert value("ragfence_store_calls_total") == before + 1


def test_ttls_and_times_are_distributions(open_fence, registry, value):
    fence = open_fence(observe=Metrics(registry))
    perform(fence, ticket("a"))
    perform(fence, ticket("a"))
    assert value("ragfence_ttl_seconds_sum", kind="ticket") == fence.policy.for_kind("ticket").ttl_ms / 1000
    for name in ("dedup_check", "seal", "key_generation"):
        assert value(f"ragfence_{name}_seconds_count") >= 1
    assert value("ragfence_retry_delay_seconds_count", decision="duplicate", kind="ticket") == 1


def test_fences_of_one_registry_share_their_metrics_and_tenants_are_bounded(registry, value, open_fence, tmp_path):
    for at in range(4):
        fence = open_fence(tmp_path / "many", tenant=f"t{at}", observe=Metrics(registry, max_tenants=2))
        perform(fence, ticket("a"))
    assert [value("ragfence_misses_total", tenant=name) for name in ("t0", "t1", "other", "t2")] == [1, 1, 2, 0]
    assert [value("ragfence_active_keys", tenant=name) for name in ("t0", "t1", "other", "t2")] == [1, 1, 2, 0]
    exposition(registry)


def test_gauges_are_asked_seldom_and_not_after_the_fence_is_closed(registry, value, open_fence):
    fences = FaultyFences(MemoryFences())
    metrics = Metrics(registry)
    fence = open_fence(fences, objects=MemoryObjects(), observe=metrics)
    perform(fence, ticket("a"))
    assert [value("ragfence_active_keys"), value("ragfence_active_keys")] == [1, 1]
    assert fences.calls["stats"] == 1
    perform(fence, ticket("b"))
    assert value("ragfence_active_keys") == 1  # what was known a moment ago
    fence.close()
    assert value("ragfence_active_keys") == 0
    assert fences.calls["stats"] == 1


def test_a_store_that_cannot_be_asked_fails_no_scrape(registry, value, open_fence):
    fences = FaultyFences(MemoryFences())
    open_fence(fences, objects=MemoryObjects(), observe=Metrics(registry))
    fences.on("stats").fail_before()
    assert b"ragfence_store_calls_total" in exposition(registry)[0]
    assert value("ragfence_store_errors_total", method="stats") == 1


def test_a_drain_ends_the_lag_and_what_expired_is_a_backlog(registry, value, tmp_path, open_fence):
    clock = VirtualClock()
    store = SqliteFences(tmp_path / "fences.db", clock=clock)
    fence = open_fence(store, objects=tmp_path / "objects", observe=Metrics(registry))
    perform(fence, ticket("a"))
    abandon(fence, ticket("b"))
    clock.advance(400_000)
    metrics = Metrics(registry)
    assert value("ragfence_stream_lag_seconds", tenant="default") == pytest.approx(400)
    assert value("ragfence_undrained_rows") == 3
    assert value("ragfence_oldest_pending_seconds") == pytest.approx(400)
    store.drop_rows(store.row_entries())
    clock.advance(fence.policy.for_kind("ticket").ttl_ms)
    metrics.gauges.invalidate()
    assert (value("ragfence_stream_lag_seconds"), value("ragfence_undrained_rows")) == (0, 0)
    assert value("ragfence_expiry_backlog") == 1


def test_redis_tells_its_memory(valkey_server, registry, value, open_fence):
    fence = open_fence(valkey_server.url, tenant=f"telemetry-{os.getpid()}", observe=Metrics(registry))
    perform(fence, ticket("a"))
    assert 0 < value("ragfence_redis_memory_used_ratio") < 1
    assert value("ragfence_storage_bytes", store=fence.inspector.fences.url) > 0
    assert value("ragfence_undrained_rows") == 2
    assert value("ragfence_expiry_backlog") == 0


WORKER = """
import sys, ragfence
from ragfence.telemetry import exposition
fence = ragfence.open(sys.argv[1], observe="metrics")
for at in range(int(sys.argv[2])):
    with fence.claim(ragfence.Operation(kind="ticket", source_id=f"{sys.argv[3]}-{at}")) as op:
        op.seal()
sys.stdout.write(exposition()[0].decode())
fence.close()
"""


def test_workers_that_share_a_port_are_added_up_by_whichever_is_scraped(tmp_path):
    (tmp_path / "prom").mkdir()
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "prom")}
    pages = [
        subprocess.run(
            [sys.executable, "-c", WORKER, str(tmp_path / "fence"), str(count), name],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for name, count in (("one", 2), ("two", 3))
    ]
    assert 'ragfence_misses_total{kind="ticket",tenant="default"} 5.0' in pages[1]
    assert re.search(r'ragfence_active_keys\{[^}]*state="sealed"[^}]*\} 5\.0', pages[1])
    assert "hit_ratio" not in pages[1]


def test_labels_are_bounded_and_found_without_parsing():
    bound = BoundedLabels(2)
    assert [bound(name) for name in ("a", "b", "c", "a")] == ["a", "b", "other", "a"]
    tricky = r'{"kind":"ki\"nd","source_id":"x\"route\":\"no","route":"POST /ü"}'.encode()
    assert (kind_of(tricky), route_of(tricky)) == ('ki"nd', "POST /ü")
    assert route_of(b'{"kind":"x"}') == ""


def test_import_ragfence_loads_no_telemetry():
    heavy = ("prometheus_client", "structlog", "opentelemetry")
    code = f"import ragfence, sys; ragfence.open; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("package", "name"), [("prometheus_client", "metrics"), ("structlog", "logs"), ("opentelemetry", "traces")]
)
def test_a_missing_package_is_named_with_what_to_install(package, name, tmp_path):
    code = f"""
import sys
sys.modules[{package!r}] = None
import ragfence
try:
    ragfence.open({str(tmp_path)!r}, observe={name!r})
except ragfence.errors.Unsupported as refused:
    print(refused.hint)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "pip install 'ragfence[audit]'"
    assert not list(Path(tmp_path).iterdir())


def test_the_default_registry_is_that_of_the_process():
    assert Metrics().registry is REGISTRY
    assert Metrics().gauges is Metrics().gauges


def test_refused_documents_are_counted_apart_from_decisions(open_fence, registry, value):
    fence = open_fence(observe=Metrics(registry), route="nightly")
    fence.documents.ingest_many([Document("a", "fine"), Document("", "x"), Document("b", "\0")])
    with pytest.raises(DocumentInvalid):
        fence.documents.ingest(Document("", "x"))
    fence.documents.sync([Document("c", "\0")])
    fence.documents.ingest_many([Document("", "x")], dry_run=True)
    assert value("ragfence_documents_refused_total", code="VALIDATION.document") == 4
    assert value("ragfence_documents_refused_total", endpoint="nightly") == 3
    assert value("ragfence_decisions_total") == 1
    assert {row["source_id"] for row in fence.audit.decisions().to_pylist()} == {"a"}


@pytest.mark.parametrize("off_s", [-90, 0, 90])
def test_the_clock_skew_is_that_of_the_store(tmp_path: Path, off_s: int) -> None:
    store = SqliteFences(tmp_path / "fences.db", clock=lambda: round((time.time() + off_s) * 1000))
    with closing(store):
        assert round(read_figures(store).clock_skew_s / 30) * 30 == off_s
