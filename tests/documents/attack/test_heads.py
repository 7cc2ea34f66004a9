"""Heads and segments, one rule at a time: what each row holds, and what is left when somebody dies beside it.

Fast, and in memory: these are the tests by which `make mutants` is caught.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ragfence import Document
from ragfence.documents.documents import Documents
from ragfence.engine.crash_points import AFTER_CLAIM, AFTER_COMMIT, AFTER_EFFECT, BEFORE_SEAL
from ragfence.errors import PolicyError, StoreUnavailable
from ragfence.testing import at_point
from ragfence.testing.memory import FaultyObjects
from tests.documents.attack.corpus import Paragraphs
from tests.documents.attack.judge import read_log, snippets_written
from tests.documents.attack.places import Crash, Place, in_folder, in_memory
from tests.engine.worlds import eventually
from tests.machine.lineages import RedisLineages

A, B, C = "one\n\ntwo\n\nthree", "one\n\nchanged\n\nthree", "one\n\nchanged\n\nthree\n\nmore"


@pytest.fixture
def place() -> Place:
    return in_memory()


@pytest.fixture
def documents(place: Place) -> Documents:
    return place.writer().documents


def texts(documents: Documents, doc_id: str = "a") -> list[str]:
    return [snippet.text for snippet in documents.snippets(doc_id)]


def rows(place: Place, doc_id: str = "a") -> list[dict[str, Any]]:
    """All rows of a document, in the order of their fences."""
    return [row.values for row in sorted(read_log(place.objects, "default")[doc_id], key=lambda row: row.fence)]


def hexed(ids: list[bytes]) -> tuple[str, ...]:
    return tuple(each.hex() for each in ids)


def test_every_move_is_a_row_that_says_what_it_did_and_what_died_of_it(place: Place, documents: Documents) -> None:
    a = documents.ingest(Document("a", A)).snippet_ids
    b = documents.ingest(Document("a", B)).snippet_ids
    documents.ingest(Document("a", A))
    documents.ingest(Document("a", A, {"views": 1}))
    documents.retract("a")
    documents.ingest(Document("a", B))
    told = [(row["action"], row["live"], hexed(row["snippet_ids"]), hexed(row["dead"])) for row in rows(place)]
    assert told == [
        ("ingest", True, a, ()),
        ("ingest", True, b, (a[1],)),
        ("revive", True, a, (b[1],)),
        ("metadata", True, a, ()),
        ("retract", False, (), a),
        ("revive", True, b, ()),
    ]


def test_rows_without_positions_name_the_segment_that_has_them(place: Place, documents: Documents) -> None:
    documents.ingest(Document("a", A))
    documents.ingest(Document("a", B))
    documents.ingest(Document("a", A))
    documents.ingest(Document("a", A, {"views": 1}))
    made, _, revived, described = rows(place)
    assert made["origin"] == ""
    assert made["starts"]
    for row in (revived, described):
        assert row["starts"] == []
        assert row["origin"]
        assert place.objects.get(f"default/segments/{row['origin']}") is not None
    assert revived["origin"] == described["origin"]


def test_what_is_revived_or_described_anew_is_read_with_its_first_positions(place: Place, documents: Documents) -> None:
    documents.ingest(Document("a", A))
    documents.ingest(Document("a", B))
    documents.ingest(Document("a", A))
    assert texts(documents) == A.split("\n\n")
    documents.ingest(Document("a", A, {"views": 1}))
    assert texts(documents) == A.split("\n\n")
    place.forget()
    described = documents.get("a")
    assert described is not None
    assert described.metadata == {"views": 1}
    assert texts(documents) == A.split("\n\n")


def test_what_comes_out_of_the_log_finds_its_row_again(place: Place, documents: Documents) -> None:
    documents.ingest_many([Document(f"{number}", A, {"number": number}) for number in range(5)])
    place.forget()
    for number in range(5):
        described = documents.get(f"{number}")
        assert described is not None
        assert described.metadata == {"number": number}
        assert texts(documents, f"{number}") == A.split("\n\n")


def test_unchanged_snippets_are_found_however_long_ago_they_were_written(place: Place, documents: Documents) -> None:
    """`one` was written by the first revision, `changed` by the second; the third wrote `more` alone."""
    for text in (A, B, C):
        documents.ingest(Document("a", text))
    assert snippets_written(place.objects) == 3 + 1 + 1
    assert texts(documents) == C.split("\n\n")
    documents.ingest(Document("a", A))
    documents.ingest(Document("a", f"{A}\n\nlast"))  # follows the revived one, not C
    assert texts(documents) == [*A.split("\n\n"), "last"]
    place.forget()
    assert texts(documents) == [*A.split("\n\n"), "last"]


def test_revisions_that_differ_in_blank_lines_alone_keep_their_own_positions(
    place: Place, documents: Documents
) -> None:
    """They have the same ids. In a compacted segment their rows stand side by side."""
    close, wide = "one\n\ntwo", "one\n\n\n\n\n\ntwo"
    for text in (close, wide):
        documents.ingest(Document("a", text))
    for other in range(4):
        documents.ingest(Document(f"{other}", "filling"))
    for step in (lambda: None, documents.compact, place.forget):
        step()
        for text in (close, wide):
            documents.ingest(Document("a", text))
            assert [text[each.start : each.end] for each in documents.snippets("a")] == ["one", "two"]


def test_a_snippet_that_comes_back_is_written_again_only_if_the_head_lacks_it(
    place: Place, documents: Documents
) -> None:
    documents.ingest(Document("a", "one\n\ntwo"))
    documents.ingest(Document("a", "one"))
    written = snippets_written(place.objects)
    documents.ingest(Document("a", "one\n\ntwo\n\nthree"))
    assert snippets_written(place.objects) == written + 2
    assert texts(documents) == ["one", "two", "three"]


def test_equal_snippets_of_one_document_are_all_kept(documents: Documents) -> None:
    first = documents.ingest(Document("a", "same\n\nsame\n\nother\n\nsame"))
    assert len(set(first.snippet_ids)) == 4
    fewer = documents.ingest(Document("a", "same\n\nother\n\nsame"))
    assert set(fewer.snippet_ids) < set(first.snippet_ids)
    assert texts(documents) == ["same", "other", "same"]


def test_no_row_says_that_snippets_exist_that_could_not_be_written(place: Place) -> None:
    faulty = FaultyObjects(place.objects)
    broken = Place(place.lineages, faulty, None).writer().documents
    broken.ingest(Document("before", A))
    faulty.on("put_new", match="default/snippets/*").fail_before(times=None)
    with pytest.raises(StoreUnavailable):
        broken.ingest(Document("a", A))
    for forgets in (False, True):
        if forgets:
            place.forget()
        place.let_leases_run_out()
        documents = place.writer().documents
        assert documents.get("a") is None
        assert [head.doc_id for head in documents.heads()] == ["before"]
    assert place.writer().documents.ingest(Document("a", A)).decision == "new"


def test_who_dies_between_snippets_and_rows_has_committed_nothing(place: Place) -> None:
    victim = place.writer()
    with pytest.raises(Crash), victim.at("after_snippets", victim.die):
        victim.documents.ingest(Document("a", A))
    assert snippets_written(place.objects) == 3
    place.forget()
    assert place.writer().documents.get("a") is None


def test_who_dies_between_rows_and_seal_has_committed_everything(place: Place) -> None:
    victim = place.writer()
    with pytest.raises(Crash), victim.at(AFTER_COMMIT, victim.die):
        victim.documents.ingest_many([Document("a", A), Document("b", B)])
    place.forget()
    documents = place.writer().documents
    assert (texts(documents, "a"), texts(documents, "b")) == (A.split("\n\n"), B.split("\n\n"))
    assert documents.ingest(Document("a", A)).decision == "duplicate"


def test_the_row_with_the_highest_fence_is_the_head_in_whatever_order_segments_are_listed(
    place: Place, documents: Documents
) -> None:
    names = [f"doc-{number}" for number in range(12)]
    for text in (A, B, C):
        for name in names:
            documents.ingest(Document(name, text))
    place.forget()
    assert {name: texts(documents, name) for name in names} == {name: C.split("\n\n") for name in names}


def test_receipts_of_superseded_revisions_come_back_out_of_the_log(place: Place, documents: Documents) -> None:
    first = documents.ingest(Document("a", A))
    documents.ingest(Document("a", B))
    place.forget()
    back = documents.ingest(Document("a", A))
    assert (back, back.decision, back.flags.revived) == (first, "duplicate", True)


def test_what_was_retracted_is_no_head_after_a_flush(place: Place, documents: Documents) -> None:
    documents.ingest(Document("a", A))
    documents.retract("a")
    place.forget()
    assert documents.get("a") is None


def test_a_move_without_a_sequence_stores_the_one_that_counts(place: Place, documents: Documents) -> None:
    documents.ingest(Document("a", A, sequence=5))
    documents.ingest(Document("a", B))
    documents.retract("a")
    assert [row["sequence"] for row in rows(place)] == [5, 5, 5]
    place.forget()
    (late,) = documents.ingest_many([Document("a", C, sequence=4)])
    assert late.decision == "stale"


def test_a_higher_sequence_of_the_same_content_is_a_row(place: Place, documents: Documents) -> None:
    documents.ingest(Document("a", A, sequence=3))
    documents.ingest(Document("a", A, sequence=5))
    assert [(row["action"], row["sequence"]) for row in rows(place)] == [("ingest", 3), ("metadata", 5)]
    place.forget()
    (late,) = documents.ingest_many([Document("a", B, sequence=4)])
    assert late.decision == "stale"


@pytest.fixture(params=["memory", "valkey"])
def ordered(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Place]:
    """The replays of a batch are answered by the store, so the order within one is the store's matter, too."""
    if request.param == "memory":
        yield in_memory()
        return
    made = in_folder(RedisLineages(request.getfixturevalue("valkey_server").url), tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("sent", ["AB", "ABA", "ABAB", "AAB", "BA", "BAA", "BBAC"])
def test_a_document_that_stands_often_in_a_batch_ends_as_the_last_of_it(ordered: Place, sent: str) -> None:
    documents = ordered.writer().documents
    contents = {"A": A, "B": B, "C": C}
    for known in (False, True):  # the second time A is live at the start
        receipts = documents.ingest_many([Document("a", contents[each]) for each in sent])
        assert [receipt.failure for receipt in receipts] == [None] * len(sent)
        assert texts(documents) == contents[sent[-1]].split("\n\n")
        ids = {each: receipt.snippet_ids for each, receipt in zip(sent, receipts, strict=True)}
        assert [receipt.snippet_ids for receipt in receipts] == [ids[each] for each in sent]
        if not known:
            documents.ingest(Document("a", A))


def test_an_unsettled_document_is_written_again_even_as_it_stands(place: Place) -> None:
    """Whoever died may have committed B: an answer from the head alone would be undone by the next flush."""
    documents = place.writer().documents
    first = documents.ingest(Document("a", A))
    victim = place.writer()
    with pytest.raises(Crash), victim.at(BEFORE_SEAL, victim.die):
        victim.documents.ingest(Document("a", B))
    place.let_leases_run_out()
    (again,) = documents.ingest_many([Document("a", A)])
    assert (again, again.decision) == (first, "duplicate")
    place.forget()
    assert texts(documents) == A.split("\n\n")


@pytest.mark.parametrize("call", ["ingest", "ingest_many", "retract"])
def test_a_dry_run_leaves_no_trace_and_hinders_nobody(place: Place, call: str) -> None:
    documents = place.writer().documents
    documents.ingest(Document("known", A))
    before = [entry.name for entry in place.objects.list("default/")], len(list(place.fences.rows()))
    reached: list[str] = []
    with (
        at_point(AFTER_CLAIM, lambda: reached.append(AFTER_CLAIM)),
        at_point(AFTER_EFFECT, lambda: reached.append("cut")),
    ):
        if call == "ingest":
            assert documents.ingest(Document("new", A), dry_run=True).decision == "new"
        elif call == "ingest_many":
            told = documents.ingest_many([Document("new", A), Document("known", B)], dry_run=True)
            assert [receipt.decision for receipt in told] == ["new", "new"]
        else:
            assert documents.retract("known", dry_run=True).decision == "new"
    assert reached == []
    assert ([entry.name for entry in place.objects.list("default/")], len(list(place.fences.rows()))) == before
    # A lease left behind would be found now: others are told at once that somebody is at it.
    other = place.writer().documents
    assert other.ingest(Document("new", A)).flags.takeover is False
    assert other.ingest(Document("known", B)).decision == "new"


def test_the_content_hash_is_pinned_with_the_first_document(place: Place, documents: Documents) -> None:
    documents.ingest(Document("a", A))
    with pytest.raises(PolicyError, match="xxh3"):
        place.writer(content_hash="sha256").documents.ingest(Document("a", A))
    with pytest.raises(PolicyError, match="xxh3"):
        place.writer(content_hash="sha256").documents.get("a")


def test_another_chunker_is_another_key(documents: Documents) -> None:
    first = documents.ingest(Document("a", A))
    other = documents.using(chunker=Paragraphs(version="2")).ingest(Document("a", A))
    assert (other.decision, other.key == first.key) == ("new", False)


@pytest.mark.parametrize("change", [{"metadata": {"x": 1}}, {"source_url": "https://b"}, {"content_type": "text/csv"}])
def test_every_part_of_the_description_counts(documents: Documents, change: dict[str, Any]) -> None:
    plain = Document("a", A, {}, "https://a")
    first, digest = documents.ingest(plain), documents.corpus_digest()
    moved = documents.ingest(plain._replace(**change))
    assert (moved, moved.flags.metadata_updated) == (first, True)
    assert documents.corpus_digest() != digest


@pytest.mark.parametrize("call", ["ingest", "ingest_many", "corpus_digest"])
def test_whoever_is_answered_by_a_server_that_was_split_off_is_not_so_for_ever(place: Place, call: str) -> None:
    """Nothing that is only replayed looks for a newer epoch; so a thread does, now and then."""
    behind, server = place.writer(watching=True), place.fences
    place.writer().documents.ingest(Document("a", A))
    behind.watch._interval_s = 0.01
    ask = {
        "ingest": lambda: behind.documents.ingest(Document("a", A)),
        "ingest_many": lambda: behind.documents.ingest_many([Document("a", A)]),
        "corpus_digest": behind.documents.corpus_digest,
    }[call]
    ask()
    place.lineages.fail_over(place.lineages.snapshot())
    place.writer().documents.ingest(Document("a", B))
    assert place.fences is not server
    eventually(lambda: not any(server.markers()))
    behind.watch.stop()
    assert texts(behind.documents) == B.split("\n\n")
