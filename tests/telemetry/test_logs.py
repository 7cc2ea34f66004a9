"""Log lines: one per decision, with what the policy includes, and without secrets."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragfence import Document, Operation, Policy
from ragfence.core.policy import ROW_FIELDS
from ragfence.errors import Conflict, StoreUnavailable
from ragfence.telemetry import Logs
from ragfence.telemetry.logs import DuplicateRates, json_lines
from ragfence.testing import FaultyFences, MemoryFences, MemoryObjects, VirtualClock
from tests.engine.worlds import abandon, elsewhere
from tests.telemetry.conftest import Lines

EVERYTHING = {"logging": {"include_fields": sorted(ROW_FIELDS)}}
SECRET = "4111 1111 1111 1111"


def perform(fence, operation, payload=None, **options):
    with fence.claim(operation, payload=payload, **options) as op:
        if op.is_new:
            op.seal(effect_id="ticket-9")


def test_a_key_is_told_from_claim_to_replay_with_all_its_fields(open_fence, lines):
    policy = Policy(**EVERYTHING)
    fence = open_fence(observe=Logs(policy, logger=json_lines(lines)), policy=policy, run_id="run-1")
    operation = Operation(kind="ticket", source_type="jira", source_id="a", revision="1")
    for _ in range(2):
        perform(fence, operation, {"n": 1}, route="POST /t", correlation_id="c-1")
    claimed, sealed, replayed = lines.all
    assert [line["event"] for line in lines.all] == ["claimed", "sealed", "replayed"]
    assert [(line["from_state"], line["to_state"]) for line in lines.all] == [
        ("absent", "held"),
        ("held", "sealed"),
        ("sealed", "sealed"),
    ]
    for line in lines.all:
        assert (line["tenant"], line["kind"], line["source_type"], line["source_id"]) == (
            "default",
            "ticket",
            "jira",
            "a",
        )
        assert (line["route"], line["run_id"], line["correlation_id"], line["attempt"]) == (
            "POST /t",
            "run-1",
            "c-1",
            1,
        )
        assert line["idempotency_key"] == operation.in_tenant("default").key.hex()
        assert len(line["payload_hash"]) == 32
        assert line["timestamp"].endswith("Z")
    assert [line["decision"] for line in lines.all] == ["new", "new", "duplicate"]
    assert sealed["effect_id"] == replayed["effect_id"] == "ticket-9"
    assert replayed["winner"] == sealed["winner"] == claimed["winner"]
    ttl_s = fence.policy.for_kind("ticket").ttl_ms / 1000
    assert sealed["ttl_remaining"] == ttl_s
    assert 0 < replayed["ttl_remaining"] <= ttl_s


def test_the_policy_chooses_the_fields(open_fence, lines):
    policy = Policy(logging={"include_fields": ["decision"]})
    perform(
        open_fence(observe=Logs(policy, logger=json_lines(lines)), policy=policy), Operation(kind="t", source_id="a")
    )
    assert set(lines.all[0]) == {
        "event", "level", "timestamp", "tenant", "decision", "from_state", "to_state", "ttl_remaining"
    }  # fmt: skip


def test_what_somebody_should_look_at_is_a_warning(open_fence, lines):
    clock, policy = VirtualClock(), Policy()
    fences = FaultyFences(MemoryFences(clock=clock))
    logs = Logs(policy, logger=json_lines(lines), now_ms=clock)
    fence = open_fence(fences, objects=MemoryObjects(), observe=logs)
    abandon(fence, Operation(kind="t", source_id="a"))
    clock.advance(30_001)
    perform(fence, Operation(kind="t", source_id="a"), None)
    (taken,) = lines.of("taken_over")
    assert (taken["level"], taken["from_state"], taken["to_state"]) == ("warning", "held", "held")
    with pytest.raises(Conflict):
        perform(fence, Operation(kind="t", source_id="a"), {"other": 1})
    assert lines.of("conflicted")[0]["level"] == "warning"
    with fence.claim(Operation(kind="t", source_id="b")):
        pass
    assert lines.of("released")[0]["to_state"] == "released"
    with fence.claim(Operation(kind="t", source_id="b")):
        assert lines.of("claimed")[-1]["from_state"] == "released"
    fences.on("claim").fail_before(error=StoreUnavailable(f"card {SECRET}"))
    with pytest.raises(StoreUnavailable):
        perform(fence, Operation(kind="t", source_id="c"))
    (error,) = lines.of("store_error")
    assert (error["level"], error["method"], error["error_code"]) == ("error", "claim", StoreUnavailable.code)
    assert SECRET not in lines.getvalue()


def test_many_documents_answered_at_once_are_one_line(open_fence, lines):
    policy = Policy()
    fence = open_fence(observe=Logs(policy, logger=json_lines(lines), each_up_to=2))
    documents = [Document(f"d{at}", f"text {at}") for at in range(3)]
    fence.documents.ingest_many(documents)
    fence.documents.ingest_many(documents)
    assert [line["count"] for line in lines.of("replayed")] == [3]
    fence.documents.ingest_many(documents[:2])
    assert [line["source_id"] for line in lines.of("replayed")[1:]] == ["d0", "d1"]
    assert lines.of("replayed")[1]["effect_id"] == fence.documents.ingest(documents[0]).effect_id


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["source_id", "source_type", "revision", "event_id", "correlation_id", "route", "effect_id"]))
def test_a_secret_in_any_field_of_the_caller_is_in_no_line(open_fence, field):
    """Whatever field it stands in: what the policy's patterns find is redacted before it is written."""
    lines, policy = Lines(), Policy(**EVERYTHING)
    logs = Logs(policy, logger=json_lines(lines))
    fence = open_fence(MemoryFences(), objects=MemoryObjects(), observe=logs, policy=policy)
    words = {field: f"paid with {SECRET}"}
    own = {name: words.get(name, "") for name in ("source_type", "revision")}
    operation = Operation(kind="ticket", source_id=words.get("source_id", "a"), **own)
    told = {name: words.get(name, "") for name in ("event_id", "correlation_id", "route")}
    for _ in range(2):
        with fence.claim(operation, **told) as op:
            if op.is_new:
                op.seal(effect_id=words.get("effect_id"))
    assert SECRET not in lines.getvalue()
    assert "[redacted]" in lines.getvalue()


def test_digests_are_never_taken_for_secrets(open_fence, lines):
    """A key may hold thirteen digits in a row that pass for a card number."""
    policy = Policy(**EVERYTHING, redaction={"patterns": ["re:[0-9a-f]{8}"]})
    fence = open_fence(observe=Logs(policy, logger=json_lines(lines)), policy=policy)
    perform(fence, Operation(kind="t", source_id="deadbeef"))
    assert lines.all[0]["source_id"] == "[redacted]"
    assert len(lines.all[0]["idempotency_key"]) == 66


class TestRates:
    """Sources that are sent again abnormally often."""

    def clocked(self, **options):
        self.now = 0.0
        return DuplicateRates(clock=lambda: self.now, **options)

    def test_a_source_in_a_loop_is_told_once_per_window(self):
        rates = self.clocked()
        found = [told for _ in range(100) for told in rates.count([b"loop"])]
        assert [(told.source, told.duplicates) for told in found] == [(b"loop", 20)]
        self.now += 151
        assert rates.count([b"loop"]) == []  # still within the window
        self.now += 301
        assert [told.duplicates for _ in range(20) for told in rates.count([b"loop"])] == [20]

    def test_everything_sent_again_once_is_normal(self):
        rates = self.clocked()
        for _ in range(30):
            assert rates.count([b"%d" % at for at in range(500)]) == []
            self.now += 3600

    def test_what_is_usual_for_a_tenant_raises_the_bar(self):
        rates = self.clocked(min_factor=3)
        for _ in range(40):
            for _ in range(9):
                assert rates.count([b"%d" % at for at in range(50)]) == []
            self.now += 150
        told = [one for _ in range(80) for one in rates.count([b"loop"])]
        assert [one.duplicates for one in told] == [54]  # three times the usual 18 of a window
        assert told[0].usual == pytest.approx(18, abs=0.1)

    def test_memory_is_bounded_and_a_loop_is_still_found(self):
        rates = self.clocked(max_sources=100)
        found = []
        for at in range(5_000):
            found += rates.count([b"%d" % at, b"loop"])
            assert len(rates._now) <= 100
        assert [told.source for told in found] == [b"loop"]

    def test_the_log_names_the_source(self, open_fence, lines):
        policy = Policy()
        logs = Logs(policy, logger=json_lines(lines), rates=lambda: DuplicateRates(min_duplicates=3, min_factor=1))
        fence = open_fence(observe=logs)
        for _ in range(6):
            perform(fence, Operation(kind="webhook", source_type="stripe", source_id="evt_1"))
        (warned,) = lines.of("abnormal_duplicate_rate")
        assert (warned["level"], warned["source_type"], warned["source_id"]) == ("warning", "stripe", "evt_1")
        assert (warned["duplicates"], warned["tenant"]) == (3, "default")


def test_a_waiter_is_told_how_long_the_lease_lasts(open_fence, lines):
    policy, clock = Policy(wait={"mode": "raise"}), VirtualClock()
    logs = Logs(policy, logger=json_lines(lines), now_ms=clock)
    fence = open_fence(MemoryFences(clock=clock), objects=MemoryObjects(), observe=logs, policy=policy)
    with fence.claim(Operation(kind="t", source_id="a")):
        clock.advance(10_000)
        elsewhere(lambda: fence.claim(Operation(kind="t", source_id="a"), verdict=True).__enter__())
    assert lines.of("in_flight")[0]["ttl_remaining"] == 20.0


def test_a_refused_document_has_a_line_without_what_it_holds_secret(open_fence, lines):
    fence = open_fence(observe=Logs(Policy(), logger=json_lines(lines), each_up_to=2))
    fence.documents.ingest_many([Document("a", "fine"), Document("b", "\0")])
    (line,) = lines.of("refused")
    assert (line["level"], line["decision"], line["source_id"]) == ("warning", "refused", "b")
    assert line["error_code"] == "VALIDATION.document"
    fence.documents.ingest_many([Document("", "x")] * 3)
    assert [line.get("count") for line in lines.of("refused")] == [None, 3]


def test_a_line_tells_by_default_which_attempt_of_which_call_it_is_of(open_fence, lines):
    fence = open_fence(observe=Logs(Policy(), logger=json_lines(lines)))
    operation = Operation(kind="ticket", source_type="jira", source_id="a")
    perform(fence, operation, {"n": 1}, route="POST /t", correlation_id="c-1", event_id="e-1")
    for line in lines.all:
        told = (line["attempt"], line["event_id"], line["correlation_id"], line["route"])
        assert told == (1, "e-1", "c-1", "POST /t")
        assert line["winner"]
