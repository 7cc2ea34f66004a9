"""A tenant that changes its content hash: every process keeps both for a while, and no document is ingested again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from ragfence import Document, Policy
from ragfence.core.receipts import Decision
from ragfence.documents.claims import ClaimBuilder, GivenDocument
from ragfence.documents.documents import Documents
from ragfence.documents.identity import Content, Identity
from ragfence.documents.reads import DocumentReads
from ragfence.engine.content_hash import KnownHashes
from ragfence.errors import Conflict, DocumentMoved, FormatCorrupt, FormatTooNew, PolicyError, Stale
from tests.documents.chunkers import Paragraphs
from tests.documents.places import Place

OLD: dict[str, Any] = {"content_hash": "xxh3"}
STAGE_1: dict[str, Any] = {"content_hash": "xxh3", "content_hash_also": "sha256"}
STAGE_2: dict[str, Any] = {"content_hash": "sha256", "content_hash_also": "xxh3"}
NEW: dict[str, Any] = {"content_hash": "sha256"}
A, B, C = "one\n\ntwo", "three", "four\n\nfive"


@pytest.fixture
def chunker() -> Paragraphs:
    return Paragraphs()


@pytest.fixture(autouse=True)
def _promises(here: Place) -> Iterator[None]:
    yield
    here.assert_no_promise_was_broken()


def documents(here: Place, policy: dict[str, Any], chunker: Paragraphs) -> Documents:
    return here.open(**policy).documents.using(chunker=chunker)


def entries(here: Place) -> list[dict[str, Any]]:
    return [json.loads(here.kept.get(name) or b"") for name in here.names("documents/hashes/")]


def hash_of(found: Documents, doc_id: str) -> str:
    stored = found.get(doc_id)
    assert stored is not None
    return stored.content_hash.partition(":")[0]


@pytest.mark.parametrize(("before", "after"), [(OLD, STAGE_2), (NEW, STAGE_1), (STAGE_1, STAGE_2), (STAGE_2, STAGE_1)])
def test_known_documents_are_answered_with_their_first_receipt(
    here: Place, chunker: Paragraphs, before: dict[str, Any], after: dict[str, Any]
) -> None:
    first = documents(here, before, chunker).ingest_many([Document("a", A, {"x": 1}), Document("b", B)])
    fence = here.open(**after)
    later = fence.documents.using(chunker=chunker)
    later.ingest(Document("new", C))
    assert hash_of(later, "new") == after["content_hash"]
    digest, cut, rows = later.corpus_digest(), list(chunker.cut), len(list(here.store.rows()))
    again = [Document("a", A, {"x": 1}), Document("b", B)]
    answers = [
        *later.ingest_many(again, dry_run=True),
        *later.ingest_many(again),
        *later.ingest_each([GivenDocument(each) for each in again]),
        *map(later.ingest, again),
        *(later.ingest(each, dry_run=True) for each in again),
    ]
    assert [answer.decision for answer in answers] == [Decision.DUPLICATE] * 10  # type: ignore[union-attr]
    assert answers == [*first] * 5
    assert (later.corpus_digest(), chunker.cut) == (digest, cut)
    assert len(list(here.store.rows())) == rows + 6
    assert later.verify().ok
    here.flush()
    fence.hydrate()
    assert later.ingest(again[0]) == first[0]


def test_a_sync_leaves_known_documents_unread_and_reads_none_twice(here: Place, chunker: Paragraphs) -> None:
    folder = here.folder / "texts"
    folder.mkdir()
    for name, text in (("a.txt", A), ("b.txt", B)):
        (folder / name).write_text(text)
        os.utime(folder / name, ns=(10**18, 10**18))
    assert documents(here, OLD, chunker).sync(folder).decisions["new"] == 2
    later = documents(here, STAGE_2, chunker)
    assert later.sync(folder).unread == 2
    os.utime(folder / "b.txt", ns=(10**18, 10**18 + 1))
    for dry_run in (True, False):
        report = later.sync(folder, dry_run=dry_run)
        assert (report.unread, report.decisions["duplicate"], report.decisions["new"]) == (1, 2, 0)
    assert later.sync(folder).unread == 2
    assert later.sync([Document("a.txt", A), Document("a.txt", A)]).decisions["duplicate"] == 2
    assert len(chunker.cut) == 2
    assert later.content_hashes() == {"xxh3": 2}


def test_only_metadata_changes_and_the_document_stays_known_by_its_hash(here: Place, chunker: Paragraphs) -> None:
    first = documents(here, OLD, chunker).ingest(Document("a", A, {"x": 1}))
    later = documents(here, STAGE_2, chunker)
    assert later.ingest(Document("a", A, {"x": 2}), dry_run=True).flags.metadata_updated
    moved = later.ingest(Document("a", A, {"x": 2}))
    assert (moved.decision, moved.flags.metadata_updated, moved.snippet_ids) == ("duplicate", True, first.snippet_ids)
    assert (hash_of(later, "a"), len(chunker.cut)) == ("xxh3", 1)
    stored = later.get("a")
    assert stored is not None
    assert stored.metadata == {"x": 2}


def test_other_content_is_written_with_the_hash_of_the_policy(here: Place, chunker: Paragraphs) -> None:
    documents(here, OLD, chunker).ingest(Document("a", A))
    later = documents(here, STAGE_2, chunker)
    assert later.ingest(Document("a", B)).is_new
    assert hash_of(later, "a") == "sha256"
    # A process that is a stage behind knows it by that hash.
    lagging = documents(here, STAGE_1, chunker)
    assert lagging.ingest(Document("a", B)).decision is Decision.DUPLICATE
    assert len(chunker.cut) == 2


def test_a_retraction_is_known_under_both_and_content_that_returns_has_its_snippet_ids(
    here: Place, chunker: Paragraphs
) -> None:
    first = documents(here, OLD, chunker).ingest(Document("a", A))
    earlier, later = documents(here, STAGE_1, chunker), documents(here, STAGE_2, chunker)
    assert earlier.retract("a").is_new
    assert later.retract("a").decision is Decision.DUPLICATE
    assert later.retract("a", dry_run=True).decision is Decision.DUPLICATE
    back = later.ingest(Document("a", A))
    assert (back.decision, back.snippet_ids, hash_of(later, "a")) == (Decision.NEW, first.snippet_ids, "sha256")
    assert later.retract("a").is_new
    assert earlier.retract("a").decision is Decision.DUPLICATE
    assert later.ingest(Document("a", A)).flags.revived
    assert len(chunker.cut) == 2


def test_sequences_hold_across_both(here: Place, chunker: Paragraphs) -> None:
    first = documents(here, OLD, chunker).ingest(Document("a", A, sequence=5))
    later = documents(here, STAGE_2, chunker)
    assert later.ingest(Document("a", A, sequence=5)).snippet_ids == first.snippet_ids
    with pytest.raises(Stale):
        later.ingest(Document("a", A, sequence=4))
    with pytest.raises(Conflict):
        later.ingest(Document("a", B, sequence=5))
    assert later.ingest(Document("a", A, sequence=7)).decision is Decision.DUPLICATE
    with pytest.raises(Stale):
        later.ingest(Document("a", B, sequence=6))
    assert len(chunker.cut) == 1


def test_versions_are_compared_as_ever(here: Place, chunker: Paragraphs) -> None:
    first = documents(here, OLD, chunker).ingest(Document("a", A))
    later = documents(here, STAGE_2, chunker)
    assert later.ingest(Document("a", A), expect=first.fence) == first
    assert later.ingest(Document("a", A), expect="") == first  # it is there already, as wanted
    with pytest.raises(DocumentMoved):
        later.ingest(Document("a", B), expect="")
    assert later.ingest(Document("a", B), expect=first.fence).is_new


def test_another_length_is_a_conflict_and_not_a_duplicate(
    here: Place, chunker: Paragraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Identity.content

    def collided(identity: Identity, text: bytes) -> Content:
        made = honest(identity, text)
        return Content("xxh3:" + 32 * "0", made.size) if identity.algorithm == "xxh3" else made

    monkeypatch.setattr(Identity, "content", collided)
    first = documents(here, OLD, chunker).ingest(Document("a", A))
    later = documents(here, STAGE_2, chunker)
    assert later.ingest(Document("a", A)) == first
    with pytest.raises(Conflict, match="another length"):
        later.ingest(Document("a", A + "!"))
    assert later.ingest_many([Document("a", A + "!")])[0].decision is Decision.CONFLICT
    assert len(chunker.cut) == 1


@pytest.mark.parametrize("sequence", [None, 5])
def test_a_document_that_another_process_ingests_meanwhile_is_recognised_under_the_lease(
    here: Place, chunker: Paragraphs, monkeypatch: pytest.MonkeyPatch, sequence: int | None
) -> None:
    later = documents(here, STAGE_2, chunker)
    later.ingest(Document("other", C))
    documents(here, STAGE_1, chunker).ingest(Document("a", A, sequence=sequence))
    # What it would have seen a moment earlier.
    monkeypatch.setattr(DocumentReads, "head", lambda *_: None)
    monkeypatch.setattr(ClaimBuilder, "suited_to", lambda _, queries, __: dict(queries))
    first = documents(here, STAGE_1, chunker).ingest(Document("a", A, sequence=sequence))
    cut = list(chunker.cut)
    assert later.ingest(Document("a", A, sequence=sequence)) == first
    assert list(later.ingest_many([Document("a", A, sequence=sequence)])) == [first]
    assert later.sync([Document("a", A, sequence=sequence)]).decisions["duplicate"] == 1
    assert chunker.cut == cut


def test_a_process_with_only_the_old_hash_cannot_write_after_the_switch(here: Place, chunker: Paragraphs) -> None:
    lagging = documents(here, OLD, chunker)
    lagging.ingest(Document("a", A))
    documents(here, STAGE_1, chunker).ingest(Document("b", B))
    lagging.ingest(Document("c", C))  # nothing has changed yet
    later = documents(here, STAGE_2, chunker)
    later.ingest(Document("a", B))
    for change in (
        lambda: lagging.ingest(Document("a", A)),
        lambda: lagging.ingest(Document("d", C)),
        lambda: lagging.ingest_many([Document("a", B)]),
        lambda: lagging.retract("b"),
        lambda: documents(here, OLD, chunker).get("a"),
        lambda: documents(here, NEW, chunker).ingest(Document("b", B)),
    ):
        with pytest.raises(PolicyError, match="hashed with xxh3 and sha256") as refused:
            change()
        assert "content_hash: sha256 and content_hash_also: xxh3" in str(refused.value.hint)
    assert {head.doc_id for head in later.heads()} == {"a", "b", "c"}
    assert later.content_hashes() == {"sha256": 1, "xxh3": 2}
    # Nobody waits for what was refused, and no attempt of it counts.
    assert later.ingest(Document("d", C)).flags.attempt == 1


def test_the_change_is_finished_once_no_document_is_known_by_the_old_hash(here: Place, chunker: Paragraphs) -> None:
    documents(here, OLD, chunker).ingest_many([Document("a", A), Document("b", B)])
    lagging, later = documents(here, STAGE_1, chunker), documents(here, STAGE_2, chunker)
    lagging.ingest(Document("c", C))
    later.ingest(Document("a", C))
    assert later.finish_content_hash() == {"sha256": 1, "xxh3": 2}
    with pytest.raises(PolicyError, match="no longer written with xxh3") as refused:
        lagging.ingest(Document("d", A))
    assert "content_hash: sha256 and content_hash_also: xxh3" in str(refused.value.hint)
    with pytest.raises(PolicyError, match="hashed with xxh3 and sha256"):
        documents(here, NEW, chunker).ingest(Document("a", C))
    later.ingest(Document("b", A))
    later.retract("c")
    assert later.finish_content_hash() == later.finish_content_hash() == {"sha256": 2}
    assert [(each["known"], each["written"]) for each in entries(here)] == [
        (["xxh3", "sha256"], ["xxh3"]),
        (["xxh3", "sha256"], ["xxh3", "sha256"]),
        (["xxh3", "sha256"], ["sha256"]),
        (["sha256"], ["sha256"]),
    ]
    cut = len(chunker.cut)
    alone = documents(here, NEW, chunker)
    assert alone.ingest(Document("a", C)).decision is Decision.DUPLICATE
    assert alone.retract("c").decision is Decision.DUPLICATE  # also by what was retracted under the other hash
    assert later.ingest(Document("b", A)).decision is Decision.DUPLICATE
    assert len(chunker.cut) == cut
    with pytest.raises(PolicyError, match="hashed with sha256"):
        documents(here, OLD, chunker).ingest(Document("a", C))


def test_the_change_can_be_taken_back(here: Place, chunker: Paragraphs) -> None:
    documents(here, OLD, chunker).ingest(Document("a", A))
    documents(here, STAGE_2, chunker).ingest(Document("b", B))
    back = documents(here, STAGE_1, chunker)
    assert back.ingest(Document("b", B)).decision is Decision.DUPLICATE
    back.retract("b")
    assert back.finish_content_hash() == {"xxh3": 1}
    assert documents(here, OLD, chunker).ingest(Document("a", A)).decision is Decision.DUPLICATE
    assert len(chunker.cut) == 2


def test_nothing_is_stored_for_the_change_before_a_document_is_written_with_it(
    here: Place, chunker: Paragraphs
) -> None:
    documents(here, OLD, chunker).ingest(Document("a", A))
    later = documents(here, STAGE_2, chunker)
    later.ingest(Document("a", A))
    later.ingest(Document("b", B), dry_run=True)
    assert later.verify().ok
    documents(here, STAGE_1, chunker).ingest(Document("c", C))
    assert entries(here) == []
    assert documents(here, OLD, chunker).ingest(Document("a", A)).decision is Decision.DUPLICATE


def test_entries_that_cannot_be_read_are_refused(here: Place, chunker: Paragraphs) -> None:
    documents(here, OLD, chunker).ingest(Document("a", A))
    here.kept.put_new("default/documents/hashes/000001", b'{"version": 3, "known": ["md5"], "written": ["md5"]}')
    with pytest.raises(FormatCorrupt, match="000001"):
        documents(here, OLD, chunker).get("a")
    here.kept.put_new("default/documents/hashes/000002", b'{"version": 4}')
    with pytest.raises(FormatTooNew, match="format 4"):
        documents(here, OLD, chunker).get("a")


def test_an_owner_keeps_equal_content_that_another_origin_brings_with_another_chunker(here: Place) -> None:
    first = here.open(**OLD).documents.using(chunker=Paragraphs())
    first.sync([Document("a", A)], origin="one")
    later = here.open(**STAGE_2).documents.using(chunker=Paragraphs(version="2"))
    report = later.sync([Document("a", A)], origin="two")
    assert (report.failed, report.decisions["new"]) == (0, 1)


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        ({"content_hash": "hmac", "content_hash_also": "xxh3"}, "cannot change between hmac and xxh3"),
        ({"content_hash": "xxh3", "content_hash_also": "xxh3"}, "must be another algorithm"),
        ({"content_hash_also": "sha256"}, "needs content_hash"),
        ({"content_hash": "xxh3", "content_hash_also": "hmac"}, "content_hash_also: must be 'xxh3' or 'sha256'"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(policy: dict[str, str], problem: str, here: Place) -> None:
    del here
    with pytest.raises(PolicyError, match=problem):
        Policy.from_mapping(policy)


def test_the_numbers_of_entries_decide_which_counts(here: Place, chunker: Paragraphs) -> None:
    fence = here.open(**STAGE_2)
    fence.documents.using(chunker=chunker).ingest(Document("a", A))
    assert fence._engine.content_hash.hashes() == KnownHashes(("sha256",), ("sha256",))
