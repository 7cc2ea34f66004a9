"""A ledger of an honest run passes the auditor; corrupted in any of these ways it does not, and the rows are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import ragfence
from ragfence import Operation
from ragfence.audit import AuditReport
from ragfence.audit.audit import Audit
from ragfence.audit.columns import to_table
from ragfence.audit.ledger import DRAINED, Ledger, split_by_day
from ragfence.core.decision_rows import Row
from ragfence.core.layout import END_POSITION, SEAL_POSITION, TOKEN_BYTES, RowKind
from ragfence.core.operations import FenceNumber
from ragfence.errors import Conflict, FencedOut
from ragfence.testing.clock import VirtualClock
from ragfence.testing.memory import MemoryFences, MemoryObjects
from tests.engine.worlds import abandon, elsewhere

Corruption = Callable[[list[Row]], list[Row]]
OTHER = b"o" * TOKEN_BYTES


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Replays, a conflict, a takeover, a fenced-out zombie, sequences and documents, drained and compacted."""
    folder: Path = tmp_path_factory.mktemp("honest")
    clock, objects = VirtualClock(), MemoryObjects()
    fences = MemoryFences(clock=clock)
    with ragfence.open(fences, objects=objects, journal=folder / "journal") as fence:
        for n in (*range(6), *range(6)):
            with fence.claim(Operation(kind="ticket", source_id=f"s{n}"), payload=n) as op:
                if op.is_new:
                    op.seal()
            clock.advance(10)
        with pytest.raises(Conflict), fence.claim(Operation(kind="ticket", source_id="s1"), payload="another"):
            pass
        slow = abandon(fence, Operation(kind="ticket", source_id="slow"))
        clock.advance(40_000)

        def take_over() -> None:
            with fence.claim(Operation(kind="ticket", source_id="slow")) as op:
                op.seal()

        elsewhere(take_over)
        with pytest.raises(FencedOut):
            slow.seal()
        for sequence in (1, 2):
            with fence.claim(Operation(kind="order", source_id="o", sequence=sequence)) as op:
                op.seal()
        for _ in range(2):
            fence.documents.ingest_many([ragfence.Document(doc_id=f"d{n}", text=f"text {n}") for n in range(3)])
        fence.documents.retract("d1")
        clock.advance(10)
        fence.audit.drain()
        assert not list(fences.rows())
        rows = list(fence.audit.rows())
    assert checked(rows).ok, str(checked(rows))
    return rows


def checked(rows: list[Row]) -> AuditReport:
    """As a ledger that holds just these."""
    objects = MemoryObjects()
    ledger = Ledger("default", objects)
    for day, table in split_by_day(to_table(rows, "default")):
        ledger.write(day, table, DRAINED)
    return Audit(MemoryFences(), objects).check()


def seal_of(rows: list[Row], source_id: str) -> Row:
    return next(each for each in rows if each.position == SEAL_POSITION and _source(each) == source_id)


def claim_of(rows: list[Row], source_id: str) -> Row:
    return next(each for each in rows if each.kind is RowKind.NEW and each.position == 0 and _source(each) == source_id)


def replay_of(rows: list[Row], source_id: str) -> Row:
    return next(each for each in rows if each.kind is RowKind.DUPLICATE and _source(each) == source_id)


def _source(row: Row) -> str:
    return str(json.loads(row.context).get("source_id", ""))


def _instead(rows: list[Row], old: Row, **changes: object) -> list[Row]:
    return [replace(each, **changes) if each is old else each for each in rows]  # type: ignore[arg-type]


def sealed_twice(rows: list[Row]) -> list[Row]:
    first = seal_of(rows, "s1")
    fence = FenceNumber(first.fence.epoch, 900)
    return [*rows, replace(first, token=OTHER, winner=OTHER, ts_ms=first.ts_ms + 1, fence=fence)]


def sealed_again_in_a_later_epoch(rows: list[Row]) -> list[Row]:
    first = seal_of(rows, "s1")
    fence = FenceNumber(first.fence.epoch + 1, 1)
    return [*rows, replace(first, token=OTHER, winner=OTHER, ts_ms=first.ts_ms + 1, fence=fence)]


def another_effect(rows: list[Row]) -> list[Row]:
    return _instead(rows, replay_of(rows, "s2"), effect_id="another")


def another_attempt(rows: list[Row]) -> list[Row]:
    return _instead(rows, replay_of(rows, "s2"), winner=OTHER)


def a_document_answered_with_another_effect(rows: list[Row]) -> list[Row]:
    return _instead(rows, replay_of(rows, "d2"), effect_id="another")


def a_fence_that_goes_back(rows: list[Row]) -> list[Row]:
    first, *_, last = [
        each for each in rows if each.kind is RowKind.NEW and each.position == 0 and _source(each) == "slow"
    ]
    return _instead(rows, last, fence=FenceNumber(first.fence.epoch, 0)) if first.fence.counter else []


def a_fence_given_twice(rows: list[Row]) -> list[Row]:
    first = claim_of(rows, "s3")
    return [*rows, replace(first, token=OTHER, winner=OTHER, key=first.key[:1] + bytes(32), context=b"{}")]


def an_outcome_nobody_sealed(rows: list[Row]) -> list[Row]:
    seal = seal_of(rows, "s3")
    return [each for each in rows if each is not seal]


def an_answer_before_the_seal(rows: list[Row]) -> list[Row]:
    return _instead(rows, replay_of(rows, "s3"), ts_ms=seal_of(rows, "s3").ts_ms - 3_600_000)


def a_seal_with_the_fence_of_another_lease(rows: list[Row]) -> list[Row]:
    seal = seal_of(rows, "s4")
    return _instead(rows, seal, fence=FenceNumber(seal.fence.epoch, seal.fence.counter + 100))


def an_effect_of_somebody_else_sealed_as_new(rows: list[Row]) -> list[Row]:
    return _instead(rows, seal_of(rows, "s4"), winner=OTHER)


def an_outcome_given_to_another_payload(rows: list[Row]) -> list[Row]:
    return _instead(rows, replay_of(rows, "s5"), fingerprint=b"p" * 16)


def a_row_under_the_key_of_another_operation(rows: list[Row]) -> list[Row]:
    claimed = claim_of(rows, "s5")
    return _instead(rows, claimed, context=claimed.context.replace(b'"s5"', b'"s99"'))


def a_document_in_the_wrong_shard(rows: list[Row]) -> list[Row]:
    claimed = claim_of(rows, "d2")
    return _instead(rows, claimed, context=claimed.context.replace(b'"d2"', b'"somewhere else"'))


CORRUPTIONS: list[tuple[Corruption, str]] = [
    (sealed_twice, "one_seal"),
    (sealed_again_in_a_later_epoch, "lost_epoch"),
    (another_effect, "equal_receipts"),
    (another_attempt, "equal_receipts"),
    (a_document_answered_with_another_effect, "equal_receipts"),
    (a_fence_that_goes_back, "fences_ascend"),
    (a_fence_given_twice, "fences_ascend"),
    (an_outcome_nobody_sealed, "known_winner"),
    (an_answer_before_the_seal, "known_winner"),
    (a_seal_with_the_fence_of_another_lease, "own_lease"),
    (an_effect_of_somebody_else_sealed_as_new, "own_lease"),
    (an_outcome_given_to_another_payload, "same_payload"),
    (a_row_under_the_key_of_another_operation, "own_key"),
    (a_document_in_the_wrong_shard, "own_key"),
]


@pytest.mark.parametrize(("corrupt", "invariant"), CORRUPTIONS, ids=lambda value: getattr(value, "__name__", value))
def test_a_corrupted_ledger_is_found_out(honest: list[Row], corrupt: Corruption, invariant: str) -> None:
    rows = corrupt(honest)
    assert rows
    report = checked(rows)
    found = [finding for finding in report.findings if finding.invariant == invariant]
    assert found, str(report)
    known = {each.row_id for each in rows}
    assert all(set(finding.rows) <= known and finding.rows for finding in found)


def test_a_ledger_is_checked_in_shares_that_fit_into_memory(honest: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = checked(honest)
    monkeypatch.setattr("ragfence.audit.audit.CHECKED_BYTES", 500)
    shares = checked(honest)
    assert (shares.rows, shares.keys, shares.ok) == (whole.rows, whole.keys, True)
    assert not checked(sealed_twice(honest)).ok


def test_after_a_loss_only_what_the_object_store_has_needs_no_seal(tmp_path: Path) -> None:
    """A store that forgot answers from what was loaded. An outcome that is not in the log was made up."""
    objects, clock = MemoryObjects(), VirtualClock()
    documents = [ragfence.Document(f"d{n}", f"It rains in town {n}.") for n in range(4)]
    fences = MemoryFences(clock=clock)
    with ragfence.open(fences, objects=objects, journal=tmp_path / "journal") as fence:
        for n in range(300):  # rows of every shard
            with fence.claim(Operation(kind="ticket", source_id=f"t{n}")) as op:
                op.seal()
        clock.advance(10)
        fence.audit.drain()
        fence.documents.ingest_many(documents)
    clock.advance(10)
    forgotten = MemoryFences(clock=clock)
    with ragfence.open(forgotten, objects=objects, journal=tmp_path / "journal") as fence:
        assert {str(each.decision) for each in fence.documents.ingest_many(documents)} == {"duplicate"}
        assert fence.audit.check().ok, str(fence.audit.check())
        answer = next(row for row in forgotten.rows() if row.kind is RowKind.DUPLICATE)
        forged = replace(answer, token=OTHER, winner=OTHER, key=answer.key[:1] + b"k" * 32)
        forgotten.record([forged])
        (found,) = fence.audit.check().findings
        assert (found.invariant, found.rows) == ("known_winner", (forged.row_id,))
        assert "is not in the log of documents" in found.text
        ended = replace(forged, position=END_POSITION, kind=RowKind.ENDED, ts_ms=forged.ts_ms + 1)
        forgotten.record([ended])
        assert fence.audit.check().ok, "it left the log later"


def test_a_store_that_did_not_forget_must_have_every_seal(tmp_path: Path) -> None:
    """Of its newest epoch: being in the object store is no excuse for an outcome that nobody sealed."""
    objects, fences = MemoryObjects(), MemoryFences(clock=VirtualClock())
    with ragfence.open(fences, objects=objects, journal=tmp_path / "journal") as fence:
        for _ in range(2):
            fence.documents.ingest(ragfence.Document("a", "It rains."))
        assert fence.audit.check().ok
        answer = next(row for row in fences.rows() if row.kind is RowKind.DUPLICATE)
        fences.record([replace(answer, token=OTHER, winner=OTHER)])
        assert "known_winner" in {each.invariant for each in fence.audit.check().findings}


def test_what_is_too_old_to_be_there_is_not_asked_for(honest: list[Row]) -> None:
    """Retention took the first days along: the seals are gone, the answers stay."""
    seals = [each.ts_ms for each in honest if each.position == SEAL_POSITION and _source(each) == "s5"]
    young = [each for each in honest if each.ts_ms > max(seals)]
    assert any(_source(each) == "s5" for each in young)
    assert checked(young).ok, str(checked(young))
