"""What people ask the decision rows: the same answers from the fence store, from the ledger, and from both."""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from ragfence import Document, Fence, Operation
from ragfence.audit.anomalies import Anomaly
from ragfence.audit.audit import Audit
from ragfence.core.decision_rows import Row, with_context
from ragfence.core.layout import CONFLICT_POSITION, FENCED_OUT, SEAL_POSITION, TAKEOVER, RowKind
from ragfence.errors import Conflict, ValidationError
from ragfence.testing.clock import START_MS
from tests.audit.conftest import Place
from tests.audit.made import DAY_MS, row


@pytest.fixture(params=["in the store", "drained", "half of them drained", "drained and compacted"])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def settle(place: Place, where: str, rows: list[Row]) -> Audit:
    """The rows, moved as far as `where` says."""
    half = len(rows) // 2
    place.write(rows[:half])
    if where == "half of them drained":
        place.audit().drain()
    place.write(rows[half:])
    audit = place.audit()
    if where == "drained and compacted":
        place.clock.advance(10 * DAY_MS)
    if where.startswith("drained"):
        audit.drain(every_day=True)
    return audit


def replay(number: int, of: Row, **more: Any) -> Row:
    return row(number, kind=RowKind.DUPLICATE, position=0, key=of.key, winner=of.winner, context=of.context, **more)


def test_counts_are_by_day_and_by_what_one_likes(memory_place: Place, where: str) -> None:
    rows = [row(n, ts_ms=START_MS + n * DAY_MS // 4) for n in range(16)]
    rows += [replay(100 + n, rows[n], ts_ms=START_MS + DAY_MS * 2) for n in range(5)]
    audit = settle(memory_place, where, rows)
    table = audit.counts(by=("decision",))
    assert table.column_names == ["day", "decision", "count"]
    assert sum(table.column("count").to_pylist()) == 21
    by_decision: dict[str, int] = {}
    for line in table.to_pylist():
        by_decision[line["decision"]] = by_decision.get(line["decision"], 0) + line["count"]
    assert by_decision == {"new": 16, "duplicate": 5}
    assert len({line["day"] for line in table.to_pylist()}) in (4, 5)
    assert memory_place.audit().counts(since="2100-01-01").num_rows == 0


def test_counts_tell_what_callers_were_told_and_by_phase_every_row(place: Place) -> None:
    """A claim and its seal both say `new`: counting them both would double every figure."""
    fence = place.open()
    told: Counter[str] = Counter()
    for _ in range(2):
        for receipt in fence.documents.ingest_many(Document(f"d{n}", f"It rains in town {n}.") for n in range(3)):
            told[str(receipt.decision)] += 1
    _perform(fence, "a", {"amount": 1})
    with pytest.raises(Conflict):
        _perform(fence, "a", {"amount": 2})
    told += Counter(new=1, conflict=1)
    with pytest.raises(ZeroDivisionError), fence.claim(Operation(kind="ticket", source_id="fails")):
        raise ZeroDivisionError
    for where in ("in the store", "drained"):
        if where == "drained":
            fence.audit.drain()
        counted: Counter[str] = Counter()
        for line in fence.audit.counts().to_pylist():
            counted[line["decision"]] += line["count"]
        assert counted == told == {"new": 4, "duplicate": 3, "conflict": 1}
        phases = {line["phase"]: line["count"] for line in fence.audit.counts(by=("phase",)).to_pylist()}
        assert phases == {"claim": 5, "seal": 4, "replay": 3, "conflict": 1, "release": 1}
        assert fence.audit.decisions(phase="seal").num_rows == 4
        assert set(fence.audit.decisions(phase="claim").column("decision").to_pylist()) == {"new"}


def test_counts_by_what_is_no_text_are_refused(memory_place: Place) -> None:
    with pytest.raises(ValidationError, match="cannot be counted by ts"):
        memory_place.audit().counts(by=("ts",))


def test_decisions_of_another_tenant_are_refused(memory_place: Place) -> None:
    audit = memory_place.audit()
    assert audit.decisions(tenant="default").num_rows == 0
    with pytest.raises(ValidationError, match="'other'"):
        audit.decisions(tenant="other")


def test_a_source_is_found_wherever_its_rows_are(memory_place: Place, where: str) -> None:
    rows = [row(n, ts_ms=START_MS + n * DAY_MS // 8) for n in range(16)]
    rows += [replay(100 + n, rows[3], ts_ms=START_MS + DAY_MS * 2 + n) for n in range(4)]
    audit = settle(memory_place, where, rows)
    assert audit.decisions(source_id="s3").column("decision").to_pylist() == ["new", *["duplicate"] * 4]
    assert audit.decisions(source_id="s3", decision="duplicate").num_rows == 4
    occurrences = audit.timeline("s3")
    assert [(each.event.what, each.event.count) for each in occurrences] == [("sealed", 1), ("replayed", 4)]
    assert len(audit.timeline("s3", every=True)) == 5
    assert {each.key for each in occurrences} == {rows[3].key.hex()}


def test_savings_are_effects_that_were_not_performed(memory_place: Place, where: str) -> None:
    rows = [row(n, first_seen_ms=START_MS - 400) for n in range(4)]
    rows += [replay(100 + n, rows[0], ts_ms=START_MS + 1) for n in range(11)]
    rows += [replay(200, rows[1], flags=FENCED_OUT, ts_ms=START_MS + 2)]  # it was performed, too
    found = settle(memory_place, where, rows).savings()
    (kind,) = found.kinds
    assert (kind.performed, kind.saved, kind.effect_ms) == (4, 11, 400)
    assert kind.saved_ms == 4400
    assert (found.characters, found.snippets, found.unknown_documents) == (0, 0, 0)
    (source,) = found.sources
    assert (source.kind, source.source_id, source.saved) == (kind.kind, "s0", 11)
    assert memory_place.audit().savings(until=timedelta(days=4000)).sources == ()


def test_documents_saved_are_told_in_characters_and_snippets(place: Place) -> None:
    fence = place.open()
    documents = [Document(doc_id=f"d{n}", text="\n\n".join([f"It rains in town {n}."] * 3)) for n in range(3)]
    first = fence.documents.ingest_many(documents)
    for _ in range(2):
        fence.documents.ingest_many(documents)
    fence.audit.drain()
    found = fence.audit.savings()
    assert found.snippets == 2 * sum(len(receipt.snippet_ids) for receipt in first)
    assert found.characters == 2 * sum(len(document.text) for document in documents)
    duplicates = fence.audit.decisions(decision="duplicate").to_pylist()
    assert sum(each["saved"] for each in duplicates) == found.characters
    (kind,) = [each for each in found.kinds if each.kind == "document"]
    assert (kind.performed, kind.saved) == (3, 6)
    (day,) = found.days
    assert (day.performed, day.saved, day.kinds) == (found.performed, found.saved, {"document": 6})
    assert (day.characters, day.snippets) == (found.characters, found.snippets)
    assert {each.source_id for each in found.sources} == {"d0", "d1", "d2"}
    for each, document, receipt in zip(
        sorted(found.sources, key=lambda each: each.source_id), documents, first, strict=True
    ):
        assert (each.kind, each.saved, each.characters) == ("document", 2, 2 * len(document.text))
        assert each.snippets == 2 * len(receipt.snippet_ids)


def test_a_conflict_is_told_with_its_diff(memory_place: Place, where: str) -> None:
    first = row(1)
    diff = json.dumps([{"op": "replace", "path": "/amount", "value": 12}], separators=(",", ":"))
    other = row(2, kind=RowKind.CONFLICT, position=CONFLICT_POSITION, key=first.key, fingerprint=b"x" * 16)
    other = with_context(other, source_id="s1", diff_size=40, diff=diff)
    audit = settle(memory_place, where, [first, other])
    (case,) = audit.conflicts()
    assert case.diff == ({"op": "replace", "path": "/amount", "value": 12},)
    assert (case.diff_size, case.source_id, case.first_payload_hash) == (40, "s1", first.fingerprint.hex())
    assert audit.conflicts(kind="other") == []


def test_a_conflict_of_a_real_call_names_both_payloads(place: Place) -> None:
    fence = place.open()
    _perform(fence, "a", {"amount": 1})
    with pytest.raises(Conflict):
        _perform(fence, "a", {"amount": 2})
    (case,) = fence.audit.conflicts()
    assert case.first_payload_hash not in ("", case.payload_hash)
    assert case.diff is None


def test_a_conflict_names_the_payload_of_the_life_it_met(memory_place: Place) -> None:
    first = row(1, fingerprint=b"a" * 16, expires_ms=START_MS + DAY_MS)
    second = row(2, key=first.key, fingerprint=b"b" * 16, ts_ms=START_MS + 2 * DAY_MS)
    later = {"ts_ms": second.ts_ms + 1, "kind": RowKind.CONFLICT, "position": 0}
    refused = row(3, key=first.key, fingerprint=b"a" * 16, **later)
    (case,) = settle(memory_place, "in the store", [first, second, refused]).conflicts()
    assert (case.payload_hash, case.first_payload_hash) == (refused.fingerprint.hex(), second.fingerprint.hex())


def test_an_id_is_found_in_whichever_characters_it_is_asked_for(place: Place) -> None:
    composed, decomposed = "Caf\u00e9.txt", "Cafe\u0301.txt"
    fence = place.open()
    fence.documents.ingest(Document(decomposed, "x"))
    for name in (composed, decomposed):
        assert fence.audit.decisions(source_id=name).num_rows == 2
        assert len(fence.audit.timeline(name)) == 2


def test_contention_tells_waits_by_call(memory_place: Place, where: str) -> None:
    rows = [row(n, waited_ms=n * 10) for n in range(1, 101)]
    # A call that waited looked several times; its last look counts.
    looks = [row(100, kind=RowKind.IN_FLIGHT, position=at, waited_ms=at, sealed_at_ms=0) for at in range(1, 4)]
    taken = [row(500, flags=TAKEOVER, position=0, sealed_at_ms=0)]
    fenced = [row(501, kind=RowKind.DUPLICATE, flags=FENCED_OUT, position=SEAL_POSITION)]
    found = settle(memory_place, where, [*rows, *looks, *taken, *fenced]).contention()
    (kind,) = found.kinds
    assert (kind.calls, kind.waited, kind.longest_ms) == (102, 100, 1000)
    assert (kind.p50_ms, kind.p99_ms) == (pytest.approx(505.0), pytest.approx(990.1))  # type: ignore[comparison-overlap]
    assert (kind.in_flight, kind.takeovers, kind.fenced_out) == (1, 1, 1)
    assert found.hottest[0] == ("ticket", "s100", 1000)
    assert memory_place.audit().contention(since="2100-01-01").kinds == ()


def kinds_of(found: list[Anomaly]) -> dict[str, Anomaly]:
    return {each.what: each for each in found}


def test_a_hit_rate_that_drops_is_an_anomaly(memory_place: Place) -> None:
    number, rows = 0, []
    for day in range(6):
        for call in range(200):
            number += 1
            made = row(number, ts_ms=START_MS + day * DAY_MS + call)
            rows.append(made if call < (180 if day == 5 else 60) else replay(number, made, ts_ms=made.ts_ms))
    memory_place.clock.advance(5 * DAY_MS + 1000)
    memory_place.write(rows)
    memory_place.audit().drain()
    (found,) = memory_place.audit().anomalies()
    assert (found.what, found.kind) == ("hit_rate_drop", "ticket")
    assert "10% of 200 calls" in found.text
    assert "usually 70%" in found.text


def test_lifetimes_that_are_too_short_and_effects_done_twice_are_anomalies(memory_place: Place) -> None:
    first = row(1, expires_ms=START_MS + 1000)
    again = row(2, ts_ms=START_MS + 5000, key=first.key, context=first.context, expires_ms=START_MS + 9000)
    fenced = row(3, kind=RowKind.DUPLICATE, flags=FENCED_OUT, position=SEAL_POSITION)
    memory_place.write([first, again, fenced])
    found = kinds_of(memory_place.audit().anomalies())
    assert set(found) == {"ttl_too_short", "double_effects"}
    assert "up to 5 s after" in found["ttl_too_short"].text
    assert found["ttl_too_short"].examples == (first.key.hex(),)


def test_rows_that_nobody_drains_are_an_anomaly(memory_place: Place) -> None:
    memory_place.write([row(1)])
    memory_place.clock.advance(6 * 60_000)
    assert set(kinds_of(memory_place.audit().anomalies())) == {"drain_lag"}
    memory_place.audit().drain()
    assert memory_place.audit().anomalies() == []


def test_batches_are_days_in_order(memory_place: Place, where: str) -> None:
    rows = [row(n, ts_ms=START_MS + n * DAY_MS // 2) for n in range(8)]
    audit = settle(memory_place, where, rows)
    tables = list(audit.batches())
    assert 4 <= len(tables) <= 5
    assert [each for table in tables for each in table.column("row_id").to_pylist()] == [each.row_id for each in rows]


def _perform(fence: Fence, source_id: str, payload: object) -> None:
    with fence.claim(Operation(kind="ticket", source_id=source_id), payload=payload) as op:
        if op.is_new:
            op.seal()
