"""A document belongs to the source that brought it: another source cannot replace or prune it without saying so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ragfence import Document
from ragfence.documents.documents import Documents
from ragfence.documents.log import stored_in
from ragfence.documents.origins import Origins, origin_digest
from ragfence.documents.sources import DocumentsSource, FolderSource, Item
from ragfence.documents.sync.report import SyncReport
from ragfence.errors import OriginConflict
from ragfence.stores.objects import ObjectStore
from ragfence.testing import MemoryObjects
from tests.engine.worlds import World


@pytest.fixture
def documents(world: World) -> Documents:
    return world.open().documents


def sync(documents: Documents, origin: str, **texts: str) -> SyncReport:
    given = [Document(doc_id, text) for doc_id, text in texts.items()]
    return documents.sync(DocumentsSource(given, name=origin), prune=False)


def prune(documents: Documents, origin: str, how: Any = "scoped", take_over: bool = False, **texts: str) -> SyncReport:
    given = [Document(doc_id, text) for doc_id, text in texts.items()]
    source = DocumentsSource(given, name=origin)
    return documents.sync(source, prune=how, max_prune_share=1.0, take_over=take_over)


def text_of(documents: Documents, doc_id: str) -> str:
    return "".join(snippet.text for snippet in documents.snippets(doc_id))


def owner(documents: Documents, doc_id: str) -> bytes:
    head = documents.internals.reads.head(doc_id)
    return stored_in(head.record).owner if head and head.live and head.record else b""


def test_two_folders_of_one_name_do_not_replace_each_others_documents(documents: Documents, tmp_path: Path) -> None:
    for place in ("one", "two"):
        (tmp_path / place / "docs").mkdir(parents=True)
        (tmp_path / place / "docs" / "README.md").write_text(f"of {place}")
    assert documents.sync(tmp_path / "one" / "docs").decisions["new"] == 1
    report = documents.sync(tmp_path / "two" / "docs")
    assert (report.decisions["conflict"], report.failed, report.ok) == (1, 1, False)
    (failure,) = report.failures
    assert failure.code == "CONFLICT.origin"
    assert f"folder:{tmp_path}/one/docs" in failure.message
    assert f"folder:{tmp_path}/two/docs" in failure.message
    assert text_of(documents, "README.md") == "of one"
    apart = documents.sync(tmp_path / "two" / "docs", prefix="two/")
    assert (apart.decisions["new"], apart.ok) == (1, True)
    assert text_of(documents, "two/README.md") == "of two"


def test_the_owner_edits_and_others_conflict_for_ever_without_a_quarantine(documents: Documents) -> None:
    sync(documents, "one", a="first")
    for _ in range(8):
        assert sync(documents, "two", a="other").decisions["conflict"] == 1
    assert sync(documents, "one", a="second").decisions["new"] == 1
    assert text_of(documents, "a") == "second"


def test_a_conflict_is_a_row_that_names_the_origin(world: World) -> None:
    fence = world.open()
    sync(fence.documents, "one", a="first")
    sync(fence.documents, "two", a="other")
    (row,) = [row for row in fence.audit.decisions().to_pylist() if row["decision"] == "conflict"]
    assert (row["source_id"], row["origin"], row["error_code"]) == ("a", "two", "CONFLICT.origin")
    assert fence.audit.check().ok


@pytest.mark.parametrize("metadata", [{}, {"of": "two"}], ids=["other content", "other metadata"])
def test_a_conflict_leaves_nothing_pending(world: World, metadata: dict[str, Any]) -> None:
    fence = world.open()
    sync(fence.documents, "one", a="first", b="first")
    text = "first" if metadata else "other"
    given = [Document("a", text, metadata), Document("b", text, metadata)]
    fence.documents.sync(DocumentsSource(given, name="two"), prune=False)
    stats = fence.stats()
    assert (stats.pending, stats.oldest_pending) == (0, None)
    assert sync(fence.documents, "one", a="second").decisions["new"] == 1
    assert fence.audit.check().ok


def test_equal_content_is_a_duplicate_and_changes_no_owner(documents: Documents) -> None:
    sync(documents, "one", a="same")
    assert sync(documents, "two", a="same").decisions["duplicate"] == 1
    assert owner(documents, "a") == origin_digest("one")
    other = DocumentsSource([Document("a", "same", {"of": "two"})], name="two")
    for _ in range(2):
        report = documents.sync(other)
        assert (report.decisions["duplicate"], report.metadata_updated) == (1, 0)
    stored = documents.get("a")
    assert stored is not None
    assert stored.metadata == {}


def test_stale_is_decided_before_the_owner(documents: Documents) -> None:
    documents.sync(DocumentsSource([Document("a", "two", sequence=2)], name="one"))
    report = documents.sync(DocumentsSource([Document("a", "one", sequence=1)], name="two"))
    assert (report.decisions["stale"], report.decisions["conflict"]) == (1, 0)


def test_a_take_over_replaces_and_owns(documents: Documents) -> None:
    sync(documents, "one", a="first")
    given = DocumentsSource([Document("a", "other")], name="two")
    assert documents.sync(given, take_over=True).decisions["new"] == 1
    assert owner(documents, "a") == origin_digest("two")
    assert sync(documents, "one", a="first again").decisions["conflict"] == 1


def test_documents_without_an_origin_never_own_and_never_conflict(documents: Documents) -> None:
    sync(documents, "one", a="first")
    documents.ingest(Document("a", "by hand"))
    assert text_of(documents, "a") == "by hand"
    assert owner(documents, "a") == origin_digest("one")
    documents.ingest(Document("b", "by hand"))
    assert owner(documents, "b") == b""
    assert sync(documents, "two", b="of two").decisions["new"] == 1
    assert owner(documents, "b") == origin_digest("two")


def test_after_a_retract_the_next_origin_owns(documents: Documents) -> None:
    sync(documents, "one", a="first")
    documents.retract("a")
    assert sync(documents, "two", a="other").decisions["new"] == 1
    assert owner(documents, "a") == origin_digest("two")


@pytest.mark.parametrize("how", ["scoped", "full"])
def test_a_prune_retracts_what_its_origin_owns_and_no_other_still_names(documents: Documents, how: str) -> None:
    sync(documents, "one", a="a", shared="same", gone="g")
    sync(documents, "two", b="b", shared="same")
    report = prune(documents, "one", how, a="a")
    assert report.pruned_ids == ("gone",)
    assert report.kept == (2 if how == "full" else 1)
    assert {head.doc_id for head in documents.heads()} == {"a", "b", "shared"}
    assert prune(documents, "two", how, b="b").pruned_ids == ()  # it has found it, and does not own it
    assert prune(documents, "one", how, a="a").pruned_ids == ("shared",)


def test_a_full_prune_takes_what_nobody_owns_and_with_a_take_over_all(documents: Documents) -> None:
    sync(documents, "one", a="a")
    sync(documents, "two", b="b")
    documents.ingest(Document("by hand", "text"))
    assert prune(documents, "one", "scoped", a="a").pruned == 0
    assert prune(documents, "one", "full", a="a").pruned_ids == ("by hand",)
    assert prune(documents, "one", "full", take_over=True, a="a").pruned_ids == ("b",)


def test_owners_survive_hydration_and_compaction(world: World) -> None:
    fence = world.open(documents={"keep_superseded_days": 0})
    sync(fence.documents, "one", a="first", b="b")
    sync(fence.documents, "one", a="second")
    sync(fence.documents, "one", a="first")  # revived: its positions are in another segment
    fence.hydrate()
    assert owner(fence.documents, "a") == owner(fence.documents, "b") == origin_digest("one")
    fence.documents.compact()
    assert owner(fence.documents, "a") == owner(fence.documents, "b") == origin_digest("one")
    other = world.open().documents
    assert sync(other, "two", a="other", b="other").decisions["conflict"] == 2
    assert fence.documents.verify().findings == ()


def test_a_dry_run_foresees_the_conflict(documents: Documents) -> None:
    sync(documents, "one", a="first")
    given = DocumentsSource([Document("a", "other")], name="two")
    assert documents.sync(given, dry_run=True).decisions["conflict"] == 1
    assert documents.sync(given, dry_run=True, take_over=True).decisions["new"] == 1
    assert text_of(documents, "a") == "first"


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_doc_id_listed_twice_with_different_content_is_refused(documents: Documents, dry_run: bool) -> None:
    given = [Document("a", "first"), Document("a", "second"), Document("a", "first")]
    report = documents.sync(given, dry_run=dry_run)
    assert (report.decisions["new"], report.decisions["duplicate"], report.decisions["refused"]) == (1, 1, 1)
    assert "more than once, with different content" in report.failures[0].message
    if not dry_run:
        assert text_of(documents, "a") == "first"
        assert [receipt.decision for receipt in documents.ingest_many(given)] == ["duplicate", "new", "duplicate"]


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_doc_id_whose_first_one_was_refused_is_not_answered_by_the_next(documents: Documents, dry_run: bool) -> None:
    sync(documents, "one", a="of one")
    given = DocumentsSource([Document("a", "of two"), Document("a", "of one"), Document("a", "of two")], name="two")
    report = documents.sync(given, dry_run=dry_run)
    assert (report.decisions["conflict"], report.decisions["refused"], report.decisions["duplicate"]) == (1, 2, 0)
    for failure in report.failures[1:]:
        assert failure.message == "two lists a more than once, and the first one was not ingested"


def test_documents_with_an_owner_are_counted_as_others_are(world: World) -> None:
    fence = world.open(documents={"keep_superseded_days": 0})
    fence.documents.ingest(Document("by hand", "text"))
    sync(fence.documents, "one", a="a", b="b", c="c")
    sync(fence.documents, "two", a="other")
    sync(fence.documents, "one", a="second")
    sync(fence.documents, "one", a="a")
    assert prune(fence.documents, "one", a="a", b="b").pruned_ids == ("c",)
    assert fence.stats().documents == 3
    fence.hydrate()
    assert fence.stats().documents == 3
    fence.documents.compact()
    assert fence.stats().documents == 3


def test_the_digest_of_an_origin_is_fixed_and_its_name_is_kept() -> None:
    assert origin_digest("folder:/srv/handbook").hex() == "9482ba5e25b440c1"
    objects = MemoryObjects()
    origins = Origins("acme", objects)
    origin = origins.origin("folder:/srv/handbook", take_over=False)
    origins.settle(origin)
    origins.settle(origin)
    assert objects.get(f"acme/origins/{origin.digest.hex()}") == b'{"version": 1, "name": "folder:/srv/handbook"}'
    assert Origins("acme", objects).name_of(origin.digest) == "folder:/srv/handbook"
    assert "without a name" in Origins("acme", objects).name_of(bytes(8))


def test_the_error_names_both(documents: Documents) -> None:
    sync(documents, "one", a="first")
    (failure,) = sync(documents, "two", a="other").failures
    assert failure.hint == OriginConflict.default_hint
    assert failure.message == "document 'a' of two has other content than that of one, which owns the doc_id"


def test_equal_content_of_a_document_that_nobody_owns_leaves_it_so(documents: Documents) -> None:
    documents.ingest(Document("a", "by hand"))
    sync(documents, "one", a="by hand")
    documents.sync(DocumentsSource([Document("a", "by hand", {"of": "one"})], name="one"))
    stored = documents.get("a")
    assert stored is not None
    assert (stored.metadata, owner(documents, "a")) == ({"of": "one"}, b"")
    assert prune(documents, "one").pruned_ids == ()


def aged(folder: Path, **texts: str) -> Path:
    """Files whose size and mtime can be relied on."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.md").write_text(text)
        os.utime(folder / f"{name}.md", (1_600_000_000, 1_600_000_000))
    return folder


def make_notes_old(objects: ObjectStore, folder: Path) -> None:
    """Rewrites the notes of a folder as they were before origins: under its base name, without an origin."""
    (name,) = [entry.name for entry in objects.list("default/sources/")]
    data = objects.get(name)
    assert data is not None
    table = pq.read_table(pa.BufferReader(data))
    former = f"folder:{folder.name}".encode()
    metadata = {key: value for key, value in table.schema.metadata.items() if key != b"ragfence.origin"}
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(metadata | {b"ragfence.name": former}), sink)
    objects.delete([name])
    assert objects.put_new(f"default/sources/{sha256(former).hexdigest()}/{10**20 - 2}", bytes(sink.getvalue())).won


def test_a_folder_that_was_noted_by_its_former_name_is_not_read_again(world: World, tmp_path: Path) -> None:
    documents, objects = world.open().documents, world.objects
    assert objects is not None
    folder = aged(tmp_path / "docs", a="a", b="b")
    documents.sync(folder)
    make_notes_old(objects, folder)
    assert documents.sync(folder, dry_run=True).unread == 2
    assert documents.sync(folder).unread == 2
    # From now on the notes are those of the path: what becomes of the former ones does not matter.
    former = sha256(b"folder:docs").hexdigest()
    objects.delete([entry.name for entry in objects.list(f"default/sources/{former}/")])
    assert documents.sync(folder).unread == 2


def test_notes_without_an_origin_protect_nothing_from_a_prune(world: World, tmp_path: Path) -> None:
    documents, objects = world.open().documents, world.objects
    assert objects is not None
    folder = aged(tmp_path / "docs", a="a", b="b")
    documents.sync(folder)
    make_notes_old(objects, folder)
    documents.sync(folder)
    (folder / "a.md").unlink()
    assert documents.sync(folder, prune="scoped", max_prune_share=1.0).pruned_ids == ("a.md",)


def test_a_named_source_does_not_look_at_former_names(world: World, tmp_path: Path) -> None:
    documents, objects = world.open().documents, world.objects
    assert objects is not None
    folder = aged(tmp_path / "docs", a="a")
    documents.sync(folder)
    make_notes_old(objects, folder)
    assert documents.sync(FolderSource(folder, name="handbook"), origin=f"folder:{folder}").unread == 0


def test_a_document_that_was_moved_since_the_prune_looked_at_it_is_left_alone(documents: Documents) -> None:
    sync(documents, "one", a="a", gone="first")

    class Racing:
        name = "one"
        listed = 0

        def items(self) -> Iterator[Item]:
            self.listed += 1
            if self.listed == 2:  # the first listing decides what goes
                documents.ingest(Document("gone", "somebody needs it"))
            yield Item("a", "", lambda: Document("a", "a"))

    report = documents.sync(Racing(), prune="scoped", max_prune_share=1.0)
    assert (report.pruned, report.failed) == (0, 0)
    assert text_of(documents, "gone") == "somebody needs it"
