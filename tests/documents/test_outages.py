"""An outage of the object store, however long, says nothing about the documents: no attempt is used up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ragfence import Decision, Document
from ragfence.errors import CommitUncertain, RagfenceError, StoreAuth, StoreUnavailable
from ragfence.testing import FaultyObjects, at_point
from tests.documents.chunkers import Failing, Paragraphs
from tests.documents.places import Place

DOCUMENTS = [Document(f"d{number}", f"text {number}\n\nand more of it") for number in range(120)]
ATTEMPTS = 5


def error_codes(here: Place) -> set[str]:
    return {row["error_code"] for row in here.open().audit.decisions().to_pylist()} - {"", None}


@pytest.mark.parametrize(
    ("error", "code"),
    [(StoreUnavailable, "STORE.unavailable"), (CommitUncertain, "STORE.commit_uncertain"), (StoreAuth, "STORE.auth")],
)
@pytest.mark.parametrize("what", ["snippets", "segments"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_documents_are_ingested_once_the_outage_is_over(
    here: Place, error: type[RagfenceError], code: str, what: str, after: bool
) -> None:
    """`after`: the object was written, and only the reply was lost."""
    objects = FaultyObjects(here.kept)
    documents = here.open(objects=objects).documents.using(chunker=Paragraphs())
    orders = objects.on("put_new", f"default/{what}/*")
    (orders.fail_after if after else orders.fail_before)(times=None, error=error("it is away"))
    for _ in range(2 * ATTEMPTS):
        with pytest.raises(error):
            documents.ingest_many(DOCUMENTS)
    assert error_codes(here) == {code}
    objects.heal()
    receipts = documents.ingest_many(DOCUMENTS)
    assert {receipt.decision for receipt in receipts} == {Decision.NEW}
    assert {receipt.flags.attempt for receipt in receipts} == {1}
    assert {receipt.decision for receipt in documents.ingest_many(DOCUMENTS)} == {Decision.DUPLICATE}
    here.assert_no_promise_was_broken()


@contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """A folder of objects that can be read and not written: a file stands where temporary files belong."""
    temp, aside = folder / ".tmp", folder / "aside"
    os.rename(temp, aside)
    temp.touch()
    yield
    temp.unlink()
    os.rename(aside, temp)


def test_a_disk_that_takes_no_writes_quarantines_nothing(tmp_path: Path) -> None:
    import ragfence

    with ragfence.open(tmp_path / "fence", objects=tmp_path / "objects") as fence:
        documents = fence.documents.using(chunker=Paragraphs())
        documents.ingest(Document("before", "the disk was full"))
        with unwritable(tmp_path / "objects"):
            for _ in range(2 * ATTEMPTS):
                with pytest.raises(StoreUnavailable):
                    documents.ingest_many(DOCUMENTS)
        assert {receipt.decision for receipt in documents.ingest_many(DOCUMENTS)} == {Decision.NEW}


def test_an_outage_inside_a_chunker_uses_up_no_attempt_of_its_document(near: Place) -> None:
    chunker = Failing(StoreUnavailable("the model is in a bucket that does not answer"))
    documents = near.documents(chunker)
    for _ in range(2 * ATTEMPTS):
        failed, kept = documents.ingest_many([Document("a", "fail"), Document("b", "fine")])
        assert failed.failure is not None
        assert failed.failure["code"] == StoreUnavailable.code
        assert kept.failure is None
    assert near.documents().ingest(Document("a", "fail")).flags.attempt == 1


def test_an_interrupted_batch_uses_up_no_attempts(near: Place) -> None:
    documents = near.documents()
    for _ in range(2 * ATTEMPTS):
        with at_point("after_effect", _interrupt), pytest.raises(KeyboardInterrupt):
            documents.ingest_many(DOCUMENTS[:3])
    assert {receipt.flags.attempt for receipt in documents.ingest_many(DOCUMENTS[:3])} == {1}


def test_a_document_that_cannot_be_cut_is_still_quarantined(near: Place) -> None:
    documents = near.documents(Failing())
    for _ in range(ATTEMPTS):
        (receipt,) = documents.ingest_many([Document("a", "fail")])
        assert receipt.failure is not None
        assert receipt.failure["code"] != "QUARANTINED"
    (receipt,) = documents.ingest_many([Document("a", "fail")])
    assert receipt.failure is not None
    assert receipt.failure["code"] == "QUARANTINED"


def test_a_document_that_kills_its_process_is_still_quarantined(near: Place) -> None:
    """Its lease runs out, and that counts: nobody was there who could have released it."""
    for _ in range(ATTEMPTS):
        with at_point("after_effect", _Dead.die), pytest.raises(_Dead):
            near.open(fences=_Mute).documents.using(chunker=Paragraphs()).ingest(DOCUMENTS[0])
        near.let_leases_run_out()
    (receipt,) = near.documents().ingest_many(DOCUMENTS[:1])
    assert receipt.failure is not None
    assert receipt.failure["code"] == "QUARANTINED"


def test_a_commit_that_nobody_sealed_is_not_forgotten_by_a_taker_that_met_an_outage(near: Place) -> None:
    """The head must not be answered with before it was written once more: a hydration would bring the commit back."""
    here = near.documents()
    first = here.ingest(Document("a", "one"))
    with at_point("after_commit", _Dead.die), pytest.raises(_Dead):
        near.open(fences=_Mute).documents.using(chunker=Paragraphs()).ingest(Document("a", "two"))
    near.let_leases_run_out()
    objects = FaultyObjects(near.kept)
    objects.on("put_new", "*").fail_before(times=None)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            near.open(objects=objects).documents.using(chunker=Paragraphs()).ingest(Document("a", "one"))
    assert here.ingest(Document("a", "one")) == first
    near.flush()
    assert [snippet.text for snippet in near.documents().snippets("a")] == ["one"]


def _interrupt() -> None:
    raise KeyboardInterrupt


class _Dead(BaseException):
    @classmethod
    def die(cls) -> None:
        raise cls


class _Mute:
    """The fence store of a process that dies: it is told nothing any more."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def release(self, *_: object, **__: object) -> list[bool]:
        raise StoreUnavailable("this process is dead")
