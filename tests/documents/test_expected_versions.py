"""`expect=`: of many who have read one version, one may replace it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from ragfence import Document
from ragfence.errors import DocumentMoved, ValidationError
from tests.engine.worlds import World


def test_a_document_is_replaced_only_at_the_version_that_was_read(world: World) -> None:
    documents = world.open().documents
    first = documents.ingest(Document("a", "one"), expect="")
    second = documents.ingest(Document("a", "two"), expect=first.fence)
    with pytest.raises(DocumentMoved) as moved:
        documents.ingest(Document("a", "three"), expect=first.fence)
    assert moved.value.details["current"] == second.fence
    stored = documents.get("a")
    assert stored is not None
    assert stored.fence == second.fence
    assert [snippet.text for snippet in documents.snippets("a")] == ["two"]


def test_a_version_does_not_come_back_with_its_content(world: World) -> None:
    documents = world.open().documents
    first = documents.ingest(Document("a", "one"))
    documents.ingest(Document("a", "two"))
    assert documents.ingest(Document("a", "one")).fence != first.fence
    with pytest.raises(DocumentMoved):
        documents.retract("a", expect=first.fence)


def test_new_metadata_is_another_version(world: World) -> None:
    documents = world.open().documents
    first = documents.ingest(Document("a", "one", {"team": "people"}))
    documents.ingest(Document("a", "one", {"team": "legal"}), expect=first.fence)
    with pytest.raises(DocumentMoved):
        documents.ingest(Document("a", "one", {"team": "sales"}), expect=first.fence)


def test_a_document_that_must_not_be_there_is_made_once_and_again_after_a_retraction(world: World) -> None:
    documents = world.open().documents
    documents.ingest(Document("a", "one"), expect="")
    with pytest.raises(DocumentMoved):
        documents.ingest(Document("a", "two"), expect="")
    documents.retract("a")
    assert documents.ingest(Document("a", "two"), expect="").is_new


def test_what_is_already_as_it_was_to_be_is_answered_as_done(world: World) -> None:
    """An attempt that was cut off after its effect is tried again with the version that it has replaced itself."""
    documents = world.open().documents
    first = documents.ingest(Document("a", "one"))
    second = documents.ingest(Document("a", "two"), expect=first.fence)
    again = documents.ingest(Document("a", "two"), expect=first.fence)
    assert (again, again.fence, again.decision) == (second, second.fence, "duplicate")
    documents.retract("a", expect=second.fence)
    assert documents.retract("a", expect=second.fence).decision == "duplicate"


def test_what_is_no_version_is_refused(world: World) -> None:
    with pytest.raises(ValidationError):
        world.open().documents.ingest(Document("a", "one"), expect=7)  # type: ignore[arg-type]


def test_of_many_who_have_read_one_version_one_replaces_it(world: World) -> None:
    writers = 6
    first = world.open().documents.ingest(Document("a", "the first"))
    barrier = Barrier(writers)

    def replace(at: int) -> str:
        documents = world.open().documents
        barrier.wait()
        try:
            return documents.ingest(Document("a", f"by {at}"), expect=first.fence).fence
        except DocumentMoved:
            return ""

    with ThreadPoolExecutor(writers) as pool:
        won = [fence for fence in pool.map(replace, range(writers)) if fence]
    stored = world.open().documents.get("a")
    assert stored is not None
    assert won == [stored.fence]


def test_a_dry_run_finds_out_that_the_document_has_moved(world: World) -> None:
    documents = world.open().documents
    first = documents.ingest(Document("a", "one"))
    second = documents.ingest(Document("a", "two"))
    for expected in (first.fence, ""):
        with pytest.raises(DocumentMoved):
            documents.ingest(Document("a", "three"), expect=expected, dry_run=True)
        with pytest.raises(DocumentMoved):
            documents.retract("a", expect=expected, dry_run=True)
    assert documents.ingest(Document("a", "three"), expect=second.fence, dry_run=True).is_new
    assert documents.ingest(Document("a", "two"), expect=first.fence, dry_run=True).decision == "duplicate"
    assert [snippet.text for snippet in documents.snippets("a")] == ["two"]
