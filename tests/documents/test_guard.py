"""`fence.documents`: ingest, replays, edits, revival, retraction, metadata, batches, dry runs, reading back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ragfence
from ragfence import Decision, Document, Receipt
from ragfence.documents.claims import GivenDocument
from ragfence.documents.documents import Documents
from ragfence.documents.parquet import ParquetCodec
from ragfence.errors import (
    Conflict,
    DocumentInvalid,
    InFlight,
    ObjectsRequired,
    PolicyError,
    Quarantined,
    Stale,
    StoreUnavailable,
    TerminalError,
    ValidationError,
)
from ragfence.testing import FaultyFences, FaultyObjects, at_point
from tests.documents.chunkers import Failing, Paragraphs
from tests.engine.worlds import World
from tests.engine.worlds import world as make_world

A = "first paragraph\n\nsecond paragraph\n\nthird paragraph"
B = "first paragraph\n\nanother paragraph\n\nthird paragraph"


@pytest.fixture
def chunker() -> Paragraphs:
    return Paragraphs()


@pytest.fixture
def documents(world: World, chunker: Paragraphs) -> Documents:
    return world.open().documents.using(chunker=chunker)


def texts(documents: Documents, doc_id: str) -> list[str]:
    return [snippet.text for snippet in documents.snippets(doc_id)]


def test_every_later_call_gets_the_snippet_ids_of_the_first(documents: Documents, chunker: Paragraphs) -> None:
    first = documents.ingest(Document("a", A))
    again = documents.ingest(Document("a", A))
    assert (first.decision, again.decision) == (Decision.NEW, Decision.DUPLICATE)
    assert first == again
    assert len(first.snippet_ids) == len(set(first.snippet_ids)) == 3
    assert chunker.cut == [A]


@pytest.mark.parametrize("text", ["", "one paragraph", A])
def test_a_batch_answers_with_the_ids_of_a_revived_revision(documents: Documents, text: str) -> None:
    """However many: the record of a revived empty document is as long as that of a new one with one snippet."""
    documents = documents.using(allow_empty_text=True)
    first = documents.ingest(Document("a", text))
    (same,) = documents.ingest_many([Document("a", text)])
    documents.ingest(Document("a", B))
    revived = documents.ingest(Document("a", text))
    (again,) = documents.ingest_many([Document("a", text)])
    assert same == first
    assert revived.flags.revived
    assert again == first
    assert again.decision is Decision.DUPLICATE


def test_another_process_gets_them_too(world: World, documents: Documents) -> None:
    first = documents.ingest(Document("a", A))
    assert world.open().documents.using(chunker=Paragraphs()).ingest(Document("a", A)) == first


def test_an_edit_keeps_the_ids_of_unchanged_snippets(documents: Documents) -> None:
    before = documents.ingest(Document("a", A)).snippet_ids
    after = documents.ingest(Document("a", B))
    assert after.decision is Decision.NEW
    assert after.snippet_ids[::2] == before[::2]
    assert after.snippet_ids[1] not in before
    assert texts(documents, "a") == B.split("\n\n")


def test_equal_paragraphs_have_ids_of_their_own(documents: Documents) -> None:
    receipt = documents.ingest(Document("a", "same\n\nsame\n\nsame"))
    assert len(set(receipt.snippet_ids)) == 3
    other = documents.ingest(Document("b", "same\n\nsame\n\nsame"))
    assert not set(receipt.snippet_ids) & set(other.snippet_ids)


def test_going_back_is_answered_with_the_first_receipt_and_cuts_nothing(
    documents: Documents, chunker: Paragraphs
) -> None:
    first = documents.ingest(Document("a", A))
    documents.ingest(Document("a", B))
    back = documents.ingest(Document("a", A))
    assert back == first
    assert (back.decision, back.flags.revived) == (Decision.DUPLICATE, True)
    assert chunker.cut == [A, B]
    assert texts(documents, "a") == A.split("\n\n")
    assert documents.ingest(Document("a", A)).flags.revived is False


def test_a_retracted_document_is_gone_until_its_content_comes_again(documents: Documents, chunker: Paragraphs) -> None:
    first = documents.ingest(Document("a", A))
    assert documents.retract("a").decision is Decision.NEW
    assert documents.retract("a").decision is Decision.DUPLICATE
    assert documents.get("a") is None
    assert documents.snippets("a") == []
    assert list(documents.heads()) == []
    back = documents.ingest(Document("a", A))
    assert (back, back.flags.revived) == (first, True)
    assert chunker.cut == [A]
    assert documents.retract("a").decision is Decision.NEW


def test_retracting_what_never_was_is_a_duplicate(documents: Documents) -> None:
    receipt = documents.retract("nobody")
    assert (receipt.decision, receipt.snippet_ids) == (Decision.DUPLICATE, ())


def test_metadata_alone_keeps_the_ids_and_cuts_nothing(documents: Documents, chunker: Paragraphs) -> None:
    first = documents.ingest(Document("a", A, {"views": 1}, source_url="https://a.example/1"))
    moved = documents.ingest(Document("a", A, {"views": 2}, source_url="https://a.example/2"))
    assert moved == first
    assert (moved.decision, moved.flags.metadata_updated) == (Decision.DUPLICATE, True)
    found = documents.get("a")
    assert found is not None
    assert (found.metadata, found.source_url) == ({"views": 2}, "https://a.example/2")
    assert {snippet.source_url for snippet in documents.snippets("a")} == {"https://a.example/2"}
    assert texts(documents, "a") == A.split("\n\n")
    assert documents.ingest(Document("a", A, {"views": 2}, source_url="https://a.example/2")).flags == first.flags
    assert chunker.cut == [A]


def test_metadata_that_counts_makes_another_revision(world: World, chunker: Paragraphs) -> None:
    documents = world.open(documents={"content_fields": ["lang"]}).documents.using(chunker=chunker)
    first = documents.ingest(Document("a", A, {"lang": "en", "views": 1}))
    assert documents.ingest(Document("a", A, {"lang": "en", "views": 2})) == first
    other = documents.ingest(Document("a", A, {"lang": "de", "views": 2}))
    assert (other.decision, len(chunker.cut)) == (Decision.NEW, 2)
    assert other.key != first.key


def test_the_size_is_that_of_the_text_whatever_metadata_counts(world: World) -> None:
    documents = world.open(documents={"content_fields": ["lang"]}).documents
    text = "Gr\u00fc\u00dfe"
    for metadata in ({"lang": "de"}, {"lang": "de", "views": 1}):
        documents.ingest(Document("a", text, metadata))
        stored = documents.get("a")
        assert stored is not None
        assert (stored.size, stored.metadata) == (len(text.encode()), metadata)
    assert documents.verify().ok


def test_another_chunker_is_not_answered_with_old_snippets(documents: Documents) -> None:
    first = documents.ingest(Document("a", A))
    other = documents.using(chunker=Paragraphs(version="2")).ingest(Document("a", A))
    assert other.decision is Decision.NEW
    assert not set(other.snippet_ids) & set(first.snippet_ids)


def test_many_are_answered_in_their_order_and_a_bad_one_spoils_nothing(world: World) -> None:
    documents = world.open().documents.using(chunker=Failing())
    receipts = documents.ingest_many(
        [Document("a", A), Document("", A), Document("b", "fail here"), Document("c", "x\0y"), Document("d", B)]
    )
    assert [receipt.failed for receipt in receipts] == [False, True, True, True, False]
    codes = [receipt.failure and receipt.failure["code"] for receipt in receipts]
    assert codes[1] == codes[3] == DocumentInvalid.code
    assert "position 1" in _message(receipts[1])
    assert "'c'" in _message(receipts[3])
    assert "the chunker cannot read this" in _message(receipts[2])
    assert {head.doc_id for head in documents.heads()} == {"a", "d"}


def test_the_same_document_twice_in_a_batch_is_taken_in_order(documents: Documents, chunker: Paragraphs) -> None:
    receipts = documents.ingest_many(
        [Document("a", A), Document("b", A), Document("a", B), Document("a", A), Document("a", A)]
    )
    assert [receipt.decision.value for receipt in receipts] == ["new", "new", "new", "duplicate", "duplicate"]
    assert receipts[3] == receipts[0]
    assert texts(documents, "a") == A.split("\n\n")
    assert len(chunker.cut) == 3


def test_a_stream_is_lazy_and_goes_on_where_it_is_read(documents: Documents) -> None:
    taken = []

    def source() -> Any:
        for number in range(10):
            taken.append(number)
            yield Document(f"doc-{number}", A)

    receipts = documents.ingest_many(source(), batch=2, stream=True)
    assert taken == []
    assert next(receipts).decision is Decision.NEW
    assert taken == [0, 1]
    assert len(list(receipts)) == 9


def test_a_single_document_is_not_taken_for_many(documents: Documents) -> None:
    with pytest.raises(ValidationError, match="many documents"):
        documents.ingest_many(Document("a", A))  # type: ignore[arg-type, call-overload]


def test_progress_is_told_after_every_batch(documents: Documents) -> None:
    told: list[int] = []
    documents.ingest_many([Document(f"{number}", A) for number in range(5)], batch=2, progress=told.append)
    assert told == [2, 4, 5]


def test_sequences_order_revisions_whatever_the_order_they_come_in(documents: Documents) -> None:
    documents.ingest(Document("a", "one", sequence=1))
    documents.ingest(Document("a", "three", sequence=3))
    with pytest.raises(Stale) as stale:
        documents.ingest(Document("a", "two", sequence=2))
    assert "sequence 2" in stale.value.message
    (entry,) = documents.ingest_many([Document("a", "two", sequence=2)])
    assert (entry.decision, entry.failed) == (Decision.STALE, True)
    assert texts(documents, "a") == ["three"]
    with pytest.raises(Conflict):
        documents.ingest(Document("a", "other three", sequence=3))


def test_a_replay_with_a_higher_sequence_raises_it(documents: Documents) -> None:
    documents.ingest(Document("a", A, sequence=3))
    assert documents.ingest(Document("a", A, sequence=5)).decision is Decision.DUPLICATE
    with pytest.raises(Stale):
        documents.ingest(Document("a", B, sequence=4))
    documents.retract("a", sequence=6)
    with pytest.raises(Stale):
        documents.ingest(Document("a", A, sequence=5))


def test_a_failing_chunker_is_quarantined_after_its_attempts(world: World) -> None:
    documents = world.open(lease={"max_attempts": 2}).documents.using(chunker=Failing())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot read"):
            documents.ingest(Document("a", "fail"))
    with pytest.raises(Quarantined) as refused:
        documents.ingest(Document("a", "fail"))
    assert "RuntimeError" in refused.value.message
    assert documents.ingest(Document("a", A)).decision is Decision.NEW


def test_a_quarantined_document_gets_new_attempts_when_it_is_released(world: World) -> None:
    fence = world.open(lease={"max_attempts": 1})
    chunker = Failing()
    documents = fence.documents.using(chunker=chunker)
    with pytest.raises(RuntimeError):
        documents.ingest(Document("a", "fail"))
    with pytest.raises(Quarantined) as refused:
        documents.ingest(Document("a", "fail"))
    assert f"ragfence release {refused.value.key}" in refused.value.hint
    assert fence.release(refused.value.key)
    with pytest.raises(RuntimeError):
        documents.ingest(Document("a", "fail"))


def test_another_writer_of_the_document_is_waited_for_or_told(world: World) -> None:
    holder = world.open(owner="holder").documents.using(chunker=Paragraphs())
    other = world.open(wait={"mode": "raise"}).documents.using(chunker=Paragraphs())
    patient = world.open(wait={"deadline_s": 1}).documents.using(chunker=Paragraphs())
    refused: list[InFlight] = []

    def meanwhile() -> None:
        with pytest.raises(InFlight) as told:
            other.ingest(Document("a", B))
        refused.append(told.value)
        for call in (lambda: patient.ingest(Document("a", B)), lambda: patient.purge("a")):
            with pytest.raises(InFlight, match="waited 1000 ms"):
                call()

    with at_point("after_effect", meanwhile):
        holder.ingest(Document("a", A))
    assert "holder" in refused[0].message
    assert "waited 0 ms" in refused[0].message
    assert other.ingest(Document("a", B)).decision is Decision.NEW


def test_a_dry_run_says_what_would_happen_and_changes_nothing(documents: Documents, world: World) -> None:
    first = documents.ingest(Document("a", A, {"views": 1}))
    rows = len(list(world.store.rows()))
    wanted = [Document("a", A, {"views": 1}), Document("a", A, {"views": 2}), Document("a", B), Document("n", A)]
    foreseen = documents.ingest_many(wanted, dry_run=True)
    assert [receipt.decision.value for receipt in foreseen] == ["duplicate", "duplicate", "new", "new"]
    assert foreseen[0] == foreseen[1] == first
    assert foreseen[1].flags.metadata_updated
    assert documents.retract("a", dry_run=True).decision is Decision.NEW
    assert len(list(world.store.rows())) == rows
    assert texts(documents, "a") == A.split("\n\n")
    assert documents.ingest(Document("n", A)).snippet_ids == foreseen[3].snippet_ids


@pytest.mark.parametrize("batch", [1, 3, 1000])
def test_a_dry_run_judges_a_document_that_comes_again_by_what_came_before_it(documents: Documents, batch: int) -> None:
    sent = [
        *(Document("a", A), Document("a", A), Document("a", B), Document("a", A), Document("a", A, {"views": 1})),
        *(Document("b", A, sequence=2), Document("b", B, sequence=1), Document("b", B, sequence=2)),
        *(Document("b", A), Document("b", B, sequence=3), Document("b", A, sequence=2)),
    ]
    would = documents.ingest_many(sent, dry_run=True, batch=batch)
    assert list(documents.heads()) == []
    did = documents.ingest_many(sent, batch=batch)
    assert [outline(receipt) for receipt in would] == [outline(receipt) for receipt in did]
    assert [receipt.decision.value for receipt in would[:4]] == ["new", "duplicate", "new", "duplicate"]
    assert [receipt.decision.value for receipt in would[5:]] == [
        *("new", "stale", "conflict"),
        *("duplicate", "new", "stale"),
    ]


def test_a_dry_run_foresees_when_a_document_that_keeps_failing_would_be_quarantined(world: World) -> None:
    documents = world.open().documents.using(chunker=Failing())
    sent = [Document("a", "fail")] * 7
    would = documents.ingest_many(sent, dry_run=True)
    assert [outline(receipt) for receipt in would] == [outline(receipt) for receipt in documents.ingest_many(sent)]
    assert would[-1].failure
    assert would[-1].failure["code"] == Quarantined.code


class Gone(Mapping[str, Any]):
    """Metadata that is fetched when it is looked at."""

    def __getitem__(self, name: str) -> Any:
        raise OSError("the database is gone")

    def __iter__(self) -> Iterator[str]:
        return iter(["team"])

    def __len__(self) -> int:
        return 1


def test_metadata_that_cannot_be_read_is_the_failure_of_its_document_alone(documents: Documents) -> None:
    first, second, third = documents.ingest_many([Document("a", A), Document("b", A, Gone()), Document("c", A)])
    assert (first.is_new, third.is_new) == (True, True)
    assert second.failure
    assert (second.failure["code"], "'b'" in second.failure["message"]) == (DocumentInvalid.code, True)
    with pytest.raises(DocumentInvalid, match="the database is gone") as refused:
        documents.ingest(Document("b", A, Gone()))
    assert isinstance(refused.value.__cause__, OSError)


@pytest.mark.parametrize("event_id", ["\udc00", "a\nb", 5, "x" * 2000])
def test_an_event_id_that_is_none_is_refused(documents: Documents, event_id: Any) -> None:
    with pytest.raises(ValidationError, match="event_id"):
        documents.ingest(Document("a", A), event_id=event_id)
    with pytest.raises(ValidationError, match="event_id"):
        documents.retract("a", event_id=event_id)
    wrong, right = documents.ingest_each(
        [GivenDocument(Document("a", A), event_id=event_id), GivenDocument(Document("b", A))]
    )
    assert isinstance(wrong, ValidationError)
    assert isinstance(right, Receipt)
    assert [head.doc_id for head in documents.heads()] == ["b"]


SENT = st.builds(
    Document,
    st.sampled_from("ab"),
    st.sampled_from([A, B, ""]),
    st.sampled_from([{}, {"views": 1}]),
    sequence=st.sampled_from([None, None, 1, 2]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(SENT | st.sampled_from("ab"), max_size=4), st.lists(SENT, max_size=6), st.integers(1, 6))
def test_a_dry_run_foresees_just_what_happens(before: list[Document | str], sent: list[Document], batch: int) -> None:
    """Whatever was ingested and retracted before, and whatever is sent: the receipts are those that come then."""
    with pytest.MonkeyPatch.context() as patch, make_world("memory", Path(), patch) as world:
        documents = world.open().documents.using(chunker=Paragraphs())
        for each in before:
            documents.retract(each) if isinstance(each, str) else documents.ingest_many([each])
        would = documents.ingest_many(sent, dry_run=True, batch=batch)
        did = documents.ingest_many(sent, batch=batch)
        assert [outline(receipt) for receipt in would] == [outline(receipt) for receipt in did]


def outline(receipt: Receipt) -> tuple[object, ...]:
    """All but when it was, and by which lease."""
    return receipt, receipt.decision, receipt.flags, receipt.failure


def test_the_corpus_digest_changes_with_the_live_documents_and_only_with_them(documents: Documents) -> None:
    empty = documents.corpus_digest()
    documents.ingest(Document("a", A))
    one = documents.corpus_digest()
    assert one != empty
    documents.ingest(Document("a", A))
    assert documents.corpus_digest() == one
    documents.ingest(Document("b", A))
    two = documents.corpus_digest()
    documents.ingest(Document("a", A, {"x": 1}))
    assert len({empty, one, two, documents.corpus_digest()}) == 4
    documents.ingest(Document("a", A))
    assert documents.corpus_digest() == two
    documents.retract("b")
    assert documents.corpus_digest() == one
    documents.retract("a")
    assert documents.corpus_digest() == empty


def test_everything_survives_a_rebuild_of_the_fence_store(world: World, chunker: Paragraphs) -> None:
    fence = world.open()
    documents = fence.documents.using(chunker=chunker)
    first = documents.ingest(Document("a", A))
    documents.ingest(Document("a", B))
    documents.ingest(Document("a", B, {"x": 1}))
    documents.ingest(Document("gone", A))
    documents.retract("gone")
    before = (documents.corpus_digest(), documents.get("a"), documents.snippets("a"))
    fence.hydrate()
    assert (documents.corpus_digest(), documents.get("a"), documents.snippets("a")) == before
    assert documents.ingest(Document("a", B, {"x": 1})).decision is Decision.DUPLICATE
    assert documents.retract("gone").decision is Decision.DUPLICATE
    back = documents.ingest(Document("a", A))
    assert (back, back.flags.revived) == (first, True)
    assert texts(documents, "a") == A.split("\n\n")
    assert len(chunker.cut) == 3


def test_the_content_hash_of_a_tenant_is_fixed_with_its_first_document(world: World) -> None:
    world.open(content_hash="sha256").documents.ingest(Document("a", A))
    with pytest.raises(PolicyError, match="sha256") as refused:
        world.open().documents.ingest(Document("a", A))
    assert "content_hash: sha256" in refused.value.hint
    assert world.open(content_hash="sha256").documents.ingest(Document("a", A)).decision is Decision.DUPLICATE


def test_looking_and_dry_runs_do_not_fix_the_content_hash(world: World) -> None:
    documents = world.open().documents
    documents.ingest(Document("a", A), dry_run=True)
    documents.ingest_many([Document("a", A)], dry_run=True)
    documents.sync([Document("a", A)], dry_run=True)
    documents.retract("a")
    assert (documents.get("a"), documents.snippets("a"), documents.verify().ok) == (None, [], True)
    assert world.open(content_hash="sha256").documents.ingest(Document("a", A)).is_new
    # It was looked for when nothing was fixed yet, but what decides is what is there at the commit.
    with pytest.raises(PolicyError, match="sha256"):
        documents.ingest(Document("b", A))
    assert [head.doc_id for head in world.open(content_hash="sha256").documents.heads()] == ["a"]
    with pytest.raises(PolicyError, match="sha256"):
        world.open().documents.get("a")


def test_an_empty_text_is_a_document_without_snippets_where_it_is_allowed(documents: Documents) -> None:
    documents = documents.using(allow_empty_text=True)
    receipt = documents.ingest(Document("a", ""))
    assert (receipt.decision, receipt.snippet_ids) == (Decision.NEW, ())
    assert documents.ingest(Document("a", "")).decision is Decision.DUPLICATE
    assert [head.doc_id for head in documents.heads()] == ["a"]


@pytest.mark.parametrize("text", ["", " \n", "\t\u2003\r\n\u00a0"])
def test_a_text_without_a_word_is_refused_and_replaces_nothing(documents: Documents, world: World, text: str) -> None:
    first = documents.ingest(Document("a", A))
    with pytest.raises(DocumentInvalid, match=r"document 'a': its text is (empty|only white space)") as refused:
        documents.ingest(Document("a", text))
    assert "documents.allow_empty_text" in refused.value.hint
    assert "--allow-empty-text" in refused.value.hint
    bad, good = documents.ingest_many([Document("b", text), Document("c", A)])
    assert (bad.decision, good.decision) == (Decision.REFUSED, Decision.NEW)
    assert documents.ingest(Document("a", A)) == first
    assert documents.retract("a").decision is Decision.NEW  # a retraction has no text, and is none the worse for it
    allowed = world.open(documents={"allow_empty_text": True}).documents
    assert allowed.ingest(Document("b", text)).is_new
    with pytest.raises(DocumentInvalid):
        allowed.using(allow_empty_text=False).ingest(Document("b", text))


def test_documents_need_an_object_store(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_world("solo", tmp_path, monkeypatch) as solo, pytest.raises(ObjectsRequired):
        _ = solo.open().documents


def test_every_answer_leaves_a_decision_row(documents: Documents, world: World) -> None:
    documents.ingest_many([Document("a", A), Document("a", A), Document("a", B)])
    told = [row.columns() for row in world.store.rows()]
    assert {row["source_id"] for row in told} == {"a"}
    assert [row["decision"] for row in told if row["row_id"].endswith("fa")] == ["new", "new"]
    assert sum(row["decision"] == "duplicate" for row in told) == 1
    assert {row["characters"] for row in told} == {len(A), len(B)}


def test_the_auditor_finds_every_promise_kept(world: World) -> None:
    fence = world.open()
    documents = fence.documents.using(chunker=Paragraphs())
    for text in (A, A, B, A):
        documents.ingest(Document("a", text))
    documents.retract("a")
    fence.hydrate()
    documents.ingest_many([Document("a", A), Document("a", A, {"x": 1}), Document("b", B), Document("a", B)])
    documents.retract("a")
    documents.retract("a")
    assert str(fence.audit.check()).endswith("every promise kept")


def test_the_auditor_finds_a_document_that_was_ingested_twice(world: World) -> None:
    fence = world.open()
    documents = fence.documents.using(chunker=Paragraphs())
    documents.ingest(Document("a", A))
    (seal,) = [row for row in world.store.rows() if row.row_id.endswith("fa")]
    other = dataclasses.replace(seal, token=b"o" * 12, winner=b"o" * 12, ts_ms=seal.ts_ms + 1)
    world.store.record([other])
    assert [found.invariant for found in fence.audit.check().findings] == ["one_seal"]


def test_ragfence_document_is_public() -> None:
    assert ragfence.Document is Document


def _message(receipt: Receipt) -> str:
    assert receipt.failure is not None
    return str(receipt.failure["message"])


def test_a_rebuilt_store_still_knows_when_a_document_came(world: World, documents: Documents) -> None:
    first = documents.ingest(Document("a", A))
    world.open().hydrate()
    again = documents.ingest(Document("a", A))
    assert again.first_seen_ms == first.first_seen_ms
    assert again.sealed_at_ms is not None


class Refused(Exception):  # as urllib's HTTPError has it
    code = 503


def test_an_error_of_somebody_else_with_a_code_of_its_own_spoils_nothing(documents: Documents) -> None:
    broken = documents.using(chunker=Failing(Refused("busy")))
    one, two = broken.ingest_many([Document("a", "fail"), Document("b", B)])
    assert one.failure == {"type": "Refused", "code": "EFFECT.failed", "message": "Refused: busy"}
    assert (two.failure, two.decision) == (None, Decision.NEW)
    assert documents.ingest(Document("a", A)).decision is Decision.NEW


@pytest.mark.parametrize("step", ["list", "seal"])
def test_what_goes_wrong_after_the_commit_holds_nobody_up(world: World, chunker: Paragraphs, step: str) -> None:
    objects, fences = FaultyObjects(world.objects), FaultyFences(world.make_fences())  # type: ignore[arg-type]
    documents = world.open(fences=lambda _: fences, objects=objects).documents.using(chunker=chunker)
    documents.ingest(Document("before", A))
    stores: Any = objects if step == "list" else fences
    with at_point("after_commit", lambda: stores.on(step).fail_before(times=1)), pytest.raises(StoreUnavailable):
        documents.ingest_many([Document("a", A), Document("b", B)])
    impatient = world.open(wait={"deadline_s": 0}).documents.using(chunker=chunker)
    assert [each.failure for each in impatient.ingest_many([Document("a", A), Document("b", B)])] == [None, None]


@pytest.mark.parametrize("count", [2, 250])
def test_a_batch_that_cannot_be_written_gives_its_leases_back(
    documents: Documents, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A large one is encoded in a thread of its own: what goes wrong there is told here."""
    sent = [Document(f"d{number}", A) for number in range(count)]
    with monkeypatch.context() as patched:
        patched.setattr(ParquetCodec, "encode", _fail)
        with pytest.raises(MemoryError, match="too many"):
            documents.ingest_many(sent)
    receipts = documents.ingest_many(sent)
    assert {(each.decision, each.flags.takeover) for each in receipts} == {(Decision.NEW, False)}


def _fail(_: ParquetCodec, rows: Sequence[Any]) -> bytes:
    raise MemoryError(f"too many rows: {len(rows)}")


def _stops(*_: object) -> None:
    raise StopIteration


@pytest.mark.parametrize("stream", [False, True])
def test_a_progress_that_stops_iterating_is_an_error_that_names_it(documents: Documents, stream: bool) -> None:
    with pytest.raises(TerminalError, match="progress raised StopIteration"):
        list(documents.ingest_many([Document("a", A)], progress=_stops, stream=stream))  # type: ignore[call-overload]
    with pytest.raises(TerminalError, match="progress raised StopIteration"):
        documents.sync([Document("b", A)], progress=_stops)
