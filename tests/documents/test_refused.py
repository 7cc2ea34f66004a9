"""A document that was not ingested is never taken for one that was: by its receipt, its count, and its log line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from ragfence import Decision, Document
from ragfence.documents.documents import Documents
from ragfence.errors import Conflict, DocumentInvalid, Stale, ValidationError
from tests.documents.chunkers import Failing
from tests.engine.worlds import World

FOREIGN: Any = type("Document", (), {"doc_id": "f", "text": "of another class"})()
INVALID = [Document("", "no id"), Document("n", "a \0 in it"), FOREIGN]


@pytest.fixture
def documents(world: World) -> Documents:
    return world.open().documents


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_refused_document_is_not_new(documents: Documents, dry_run: bool) -> None:
    receipts = documents.ingest_many([Document("a", "fine"), *INVALID], dry_run=dry_run)
    assert [receipt.decision for receipt in receipts] == ["new", "refused", "refused", "refused"]
    assert [receipt.is_new for receipt in receipts] == [True, False, False, False]
    for receipt in receipts[1:]:
        assert (receipt.key, receipt.effect_id, receipt.snippet_ids) == ("", "", ())
        assert receipt.failed
        assert receipt.failure is not None
        assert receipt.failure["code"] == "VALIDATION.document"


def test_a_document_whose_chunker_fails_is_not_new_either(world: World) -> None:
    (receipt,) = world.open().documents.using(chunker=Failing()).ingest_many([Document("a", "to fail")])
    assert (receipt.decision, receipt.is_new, receipt.failed) == (Decision.REFUSED, False, True)
    assert receipt.key  # it was claimed, and its rows are found by its key


def test_whoever_only_prints_receipts_sees_the_failure(documents: Documents) -> None:
    fine, refused = documents.ingest_many([Document("a", "fine"), Document("", "no id")])
    for text in (repr(refused), str(refused), f"{refused}"):
        assert text.startswith("Receipt(refused: ")
        assert "VALIDATION.document" in text
        assert "its doc_id is empty" in text
    assert repr(fine).startswith(f"Receipt(key={fine.key!r}")


def test_a_refusal_is_no_decision_row(world: World) -> None:
    fence = world.open()
    fence.documents.ingest_many([Document("a", "fine"), *INVALID])
    told = fence.audit.decisions().to_pylist()
    assert {row["source_id"] for row in told} == {"a"}


def test_refusals_are_logged_once_for_a_batch(documents: Documents, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ragfence.documents"):
        documents.ingest_many([Document("a", "fine")])
        assert not caplog.records
        documents.ingest_many([Document("a", "fine"), *INVALID])
    (line,) = caplog.records
    assert "3 of 4 documents were not ingested" in line.getMessage()
    assert "its doc_id is empty" in line.getMessage()


class TestStopping:
    def test_the_error_of_the_first_is_raised_and_what_came_before_stays(self, documents: Documents) -> None:
        given = [Document("a", "one"), Document("b", "two"), Document("", "no id"), Document("c", "three")]
        with pytest.raises(DocumentInvalid, match="position 2") as stopped:
            documents.ingest_many(given, on_error="raise")
        assert stopped.value.details["position"] == 2
        assert [receipt.decision for receipt in stopped.value.details["receipts"]] == ["new", "new"]
        assert [documents.get(doc_id) is not None for doc_id in "abc"] == [True, True, False]

    def test_documents_behind_the_batch_are_not_even_read(self, documents: Documents) -> None:
        read: list[str] = []

        def endless() -> Iterator[Document]:
            for at in range(100):
                read.append(f"d{at}")
                yield Document(f"d{at}", "\0" if at == 3 else "text")

        with pytest.raises(DocumentInvalid):
            documents.ingest_many(endless(), on_error="raise", batch=2)
        assert len(read) == 4

    def test_a_stream_gives_what_was_ingested_and_raises_then(self, documents: Documents) -> None:
        given = [Document("a", "one"), Document("", "no id"), Document("b", "two")]
        receipts = documents.ingest_many(given, on_error="raise", stream=True)
        assert next(receipts).is_new
        with pytest.raises(DocumentInvalid):
            next(receipts)
        assert documents.get("b") is None

    def test_errors_are_those_of_ingest(self, documents: Documents, world: World) -> None:
        documents.ingest(Document("a", "one", sequence=5))
        with pytest.raises(Stale):
            documents.ingest_many([Document("a", "zero", sequence=4)], on_error="raise")
        with pytest.raises(Conflict):
            documents.ingest_many([Document("a", "other", sequence=5)], on_error="raise", dry_run=True)
        failing = world.open().documents.using(chunker=Failing())
        with pytest.raises(RuntimeError):
            failing.ingest_many([Document("b", "to fail")], on_error="raise")

    def test_nothing_is_raised_where_all_is_fine(self, documents: Documents) -> None:
        receipts = documents.ingest_many([Document("a", "one"), Document("a", "one")], on_error="raise")
        assert [receipt.decision for receipt in receipts] == ["new", "duplicate"]

    def test_another_word_is_refused(self, documents: Documents) -> None:
        with pytest.raises(ValidationError, match="on_error"):
            documents.ingest_many([], on_error="ignore")  # type: ignore[call-overload]


def test_every_listed_document_is_in_one_decision_of_the_report(documents: Documents) -> None:
    documents.ingest(Document("late", "two", sequence=2))
    given = [Document("a", "fine"), Document("late", "one", sequence=1), *INVALID]
    report = documents.sync(given)
    assert report.decisions == {"new": 1, "duplicate": 0, "conflict": 0, "in_flight": 0, "stale": 1, "refused": 3}
    assert (report.listed, report.failed) == (5, 3)
