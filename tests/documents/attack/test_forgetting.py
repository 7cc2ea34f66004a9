"""Redis forgets everything, at any moment: every document is still answered with its first ids.

FLUSHALL strikes at a named point, so each moment is met every time; under load it is `make chaos` that strikes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ragfence import Document
from ragfence.engine.crash_points import HYDRATION_POINTS
from ragfence.testing import at_point
from tests.documents.attack.corpus import chunkings, doc_id, document, parts
from tests.documents.attack.places import Crash, Place
from tests.documents.attack.strikes import STRIKES

COUNT = 20
(SENT,) = parts(COUNT, batch=COUNT)
A, B = (Document("one", f"What {content} says.\n\nAnd what both say.", {"as": content}) for content in "AB")


def ids_of(place: Place) -> dict[str, tuple[str, ...]]:
    return {each.doc_id: each.snippet_ids for each in place.writer().documents.heads()}


def test_a_then_b_then_a_then_a_flush_leaves_a_live(place: Place) -> None:
    writer = place.writer()
    first = writer.documents.ingest(A)
    writer.documents.ingest(B)
    back = writer.documents.ingest(A)
    assert (back, back.decision, back.flags.revived) == (first, "duplicate", True)
    place.forget()
    described = place.writer().documents.get("one")
    assert described is not None
    assert (described.metadata, described.snippet_ids) == ({"as": "A"}, first.snippet_ids)
    again = place.writer().documents.ingest(A)
    assert (again, again.decision, again.flags.revived) == (first, "duplicate", False)
    assert [snippet.text for snippet in writer.documents.snippets("one")] == A.text.split("\n\n")


def test_what_was_retracted_stays_retracted_after_a_flush_and_can_be_revived(place: Place) -> None:
    writer = place.writer()
    first = writer.documents.ingest(A)
    writer.documents.retract("one")
    empty = writer.documents.corpus_digest()
    place.forget()
    fresh = place.writer().documents
    assert fresh.get("one") is None
    assert fresh.snippets("one") == []
    assert list(fresh.heads()) == []
    assert fresh.corpus_digest() == empty
    assert fresh.retract("one").decision == "duplicate"
    back = fresh.ingest(A)
    assert (back, back.decision, back.flags.revived) == (first, "duplicate", True)


def test_a_flush_between_two_runs_chunks_nothing_again(place: Place) -> None:
    first = place.writer().documents.ingest_many(SENT.documents())
    digest = place.writer().documents.corpus_digest()
    place.forget()
    again = place.writer().documents.ingest_many(SENT.documents())
    assert list(again) == list(first)
    assert {receipt.decision for receipt in again} == {"duplicate"}
    assert place.writer().documents.corpus_digest() == digest
    assert place.trace is not None
    assert set(chunkings(place.trace).values()) == {1}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("point", STRIKES)
def test_a_flush_during_a_run_changes_no_id(place: Place, point: str, times: int) -> None:
    """Half of the documents are known before. `times`: whoever takes over after the flush meets another one."""
    known = place.writer().documents.ingest_many(SENT.documents()[: COUNT // 2])
    struck = place.writer()

    def flush_often(left: int) -> Callable[[], None]:
        def act() -> None:
            place.forget()
            if left > 1:
                other = place.writer()
                with other.at(point, flush_often(left - 1)):
                    other.documents.ingest_many([document(99)])

        return act

    with struck.at(point, flush_often(times)):
        first = struck.documents.ingest_many(SENT.documents())
    assert [receipt.failure for receipt in first] == [None] * COUNT
    assert list(first[: COUNT // 2]) == list(known)
    for _ in range(2):
        again = place.writer().documents.ingest_many(SENT.documents())
        assert list(again) == list(first)
        assert {receipt.decision for receipt in again} == {"duplicate"}
        place.forget()
    live = ids_of(place)
    assert {doc_id(number): live[doc_id(number)] for number in SENT.numbers} == {
        doc_id(number): receipt.snippet_ids for number, receipt in zip(SENT.numbers, first, strict=True)
    }


@pytest.mark.parametrize("point", HYDRATION_POINTS)
def test_a_flush_during_hydration_changes_no_id(place: Place, point: str) -> None:
    first = place.writer().documents.ingest_many(SENT.documents())
    digest = place.writer().documents.corpus_digest()
    place.forget()
    with at_point(point, place.forget):
        again = place.writer().documents.ingest_many(SENT.documents())
    assert list(again) == list(first)
    assert {receipt.decision for receipt in again} == {"duplicate"}
    assert place.writer().documents.corpus_digest() == digest
    assert place.trace is not None
    assert set(chunkings(place.trace).values()) == {1}


@pytest.mark.parametrize("point", HYDRATION_POINTS)
def test_whoever_dies_while_hydrating_leaves_nothing_half_loaded(place: Place, point: str) -> None:
    first = place.writer().documents.ingest_many(SENT.documents())
    place.forget()
    victim = place.writer()
    with pytest.raises(Crash), victim.at(point, victim.die):
        victim.documents.ingest_many(SENT.documents())
    place.let_leases_run_out()
    again = place.writer().documents.ingest_many(SENT.documents())
    assert list(again) == list(first)
    assert {receipt.decision for receipt in again} == {"duplicate"}
