"""`fence.documents.sync`: what is read and what is not, what is remembered, and what a prune takes away."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import pickle
import uuid
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence import Document, Fence, Policy
from ragfence.documents.documents import Documents
from ragfence.documents.sources import DocumentsSource, FolderSource, Item, JsonlSource, Source
from ragfence.documents.sync import sync as sync_module
from ragfence.documents.sync.report import SyncReport
from ragfence.documents.sync.state import SyncNote, SyncStates
from ragfence.documents.sync.sync import PAGE
from ragfence.errors import (
    DocumentInvalid,
    PruneTooLarge,
    StoreUnavailable,
    ValidationError,
)
from tests.documents.chunkers import Failing, Paragraphs
from tests.engine.worlds import Crash, Process
from tests.engine.worlds import world as make_world

LONG_AGO_NS = 1_600_000_000 * 10**9
Open = Callable[..., Fence]


@pytest.fixture(params=["sqlite", "valkey"])
def open_fence(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Another fence on the same stores: a fence store of each kind, and a folder of objects."""
    for name in ("STORE", "OBJECTS", "TENANT", "POLICY"):
        monkeypatch.delenv(f"RAGFENCE_{name}", raising=False)
    store = tmp_path / "fences.db"
    if request.param == "valkey":
        store = request.getfixturevalue("valkey_server").url
    tenant, opened = f"sync-{uuid.uuid4().hex}", []

    def open_one(**policy: Any) -> Fence:
        fence = ragfence.open(store, objects=tmp_path / "objects", tenant=tenant, policy=Policy(**policy))
        opened.append(fence)
        return fence

    yield open_one
    for fence in opened:
        fence.close()


@pytest.fixture
def documents(open_fence: Open) -> Documents:
    return open_fence().documents


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "handbook"
    made.mkdir()
    return made


def write(folder: Path, name: str, text: str, *, later: int = 0) -> Path:
    """A file that was changed long ago, so that its size and mtime can be relied on; `later` makes it another mtime."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    at = LONG_AGO_NS + later
    os.utime(file, ns=(at, at))
    return file


def fill(folder: Path, count: int) -> None:
    for number in range(count):
        write(folder, f"{number % 7}/{number:05d}.md", f"# Page {number}\n\nWhat stands on page {number}.")


class Counted:
    """A source that says which of its documents were read."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.read: list[str] = []

    @property
    def name(self) -> str:
        return self._source.name

    def items(self) -> Iterator[Item]:
        for item in self._source.items():
            yield item._replace(load=lambda item=item: self._load(item))

    def _load(self, item: Item) -> Document:
        self.read.append(item.doc_id)
        return item.load()


def synced(documents: Documents, folder: Path, **more: Any) -> tuple[SyncReport, list[str]]:
    """The report, and which documents were read for it."""
    source = Counted(FolderSource(folder))
    return documents.sync(source, **more), source.read


def live(documents: Documents) -> set[str]:
    return {head.doc_id for head in documents.heads()}


def rows(documents: Documents) -> list[dict[str, Any]]:
    fence = Fence(documents._engine)
    return fence.audit.decisions().to_pylist()


def noted(fence: Fence, source: str) -> list[str]:
    """The objects that hold the state of a source, the newest first."""
    prefix = f"{fence.tenant}/sources/{sha256(source.encode()).hexdigest()}/"
    assert fence.inspector.objects is not None
    return [entry.name for entry in fence.inspector.objects.list(prefix)]


def test_a_folder_that_did_not_change_is_not_read_again(documents: Documents, folder: Path) -> None:
    many = 2 * PAGE + 30
    fill(folder, many)
    first, read = synced(documents, folder)
    assert len(read) == many
    assert (first.listed, first.decisions["new"], first.decisions["duplicate"]) == (many, many, 0)
    assert (first.unread, first.failed, first.snippets_saved) == (0, 0, 0)
    assert first.snippets_made == sum(len(head.snippet_ids) for head in documents.heads())
    again, read = synced(documents, folder)
    assert read == []
    assert (again.listed, again.unread, again.decisions["duplicate"]) == (many, many, many)
    assert (again.decisions["new"], again.snippets_made) == (0, 0)
    assert again.snippets_saved == first.snippets_made
    assert again.characters_saved == sum(len(file.read_text()) for file in folder.rglob("*.md"))
    assert again.ok


def test_another_process_does_not_read_it_either(open_fence: Open, folder: Path) -> None:
    fill(folder, 20)
    synced(open_fence().documents, folder)
    report, read = synced(open_fence().documents, folder)
    assert (read, report.unread) == ([], 20)


def test_a_skipped_document_leaves_a_decision_row_that_says_so(documents: Documents, folder: Path) -> None:
    write(folder, "a.md", "text")
    synced(documents, folder)
    (claimed, sealed) = rows(documents)
    assert (claimed["route"], sealed["route"]) == ("sync", "sync")
    synced(documents, folder)
    *_, last = rows(documents)
    assert (last["decision"], last["route"], last["source_id"]) == ("duplicate", "unchanged", "a.md")
    for name in ("idempotency_key", "effect_id", "revision", "index_hash", "payload_hash", "winner", "fence"):
        assert last[name] == sealed[name], name
    assert len(rows(documents)) == 3
    assert Fence(documents._engine).audit.check().ok


def test_a_touched_file_with_the_same_content_is_read_once_and_then_remembered(
    documents: Documents, folder: Path
) -> None:
    fill(folder, 10)
    synced(documents, folder)
    write(folder, "0/00000.md", (folder / "0/00000.md").read_text(), later=5 * 10**9)
    report, read = synced(documents, folder)
    assert read == ["0/00000.md"]
    assert (report.decisions["duplicate"], report.unread) == (10, 9)
    assert synced(documents, folder)[1] == []


def test_a_changed_file_is_read_and_the_others_are_not(documents: Documents, folder: Path) -> None:
    fill(folder, 10)
    write(folder, "long.txt", "\n\n".join(f"{number} {'word ' * 150}" for number in range(20)))
    before, _ = synced(documents, folder)
    write(folder, "long.txt", "\n\n".join(f"{number} {'word ' * 150}" for number in (*range(19), 99)), later=1)
    write(folder, "added.md", "a new one")
    report, read = synced(documents, folder)
    assert sorted(read) == ["added.md", "long.txt"]
    assert (report.decisions["new"], report.decisions["duplicate"], report.unread) == (2, 10, 10)
    assert report.snippets_made < 5  # all but one paragraph of the long one were there
    assert report.snippets_made + report.snippets_saved > before.snippets_made
    assert synced(documents, folder)[1] == []


def test_a_file_too_young_to_rely_on_is_read_again(documents: Documents, folder: Path) -> None:
    (folder / "a.md").write_text("written just now")
    assert synced(documents, folder)[1] == ["a.md"]
    assert synced(documents, folder)[1] == ["a.md"]
    os.utime(folder / "a.md", ns=(LONG_AGO_NS, LONG_AGO_NS))
    assert synced(documents, folder)[1] == ["a.md"]
    assert synced(documents, folder)[1] == []


def test_another_chunker_reads_everything(open_fence: Open, folder: Path) -> None:
    fill(folder, 12)
    synced(open_fence().documents, folder)
    other = open_fence(documents={"chunk_size": 500})
    report, read = synced(other.documents, folder)
    assert (len(read), report.decisions["new"], report.unread) == (12, 12, 0)
    assert synced(other.documents, folder)[1] == []
    # And back: known, so nothing is cut, but it has to be read to be brought back.
    report, read = synced(open_fence().documents, folder)
    assert (len(read), report.revived, report.decisions["duplicate"]) == (12, 12, 12)


def test_other_metadata_that_counts_as_content_reads_everything(open_fence: Open, folder: Path) -> None:
    fill(folder, 5)
    write(folder, "bad.md", "later unreadable")
    synced(open_fence().documents, folder)
    write(folder, "bad.md", "later unreadable").write_bytes(b"\xff\xfe\xff")
    counting = open_fence(documents={"content_fields": ["path"]}).documents
    report, read = synced(counting, folder)
    assert (len(read), report.decisions["new"], report.failed) == (6, 5, 1)
    # What could not be read then is not skipped later because of the older hash.
    write(folder, "bad.md", "later unreadable")
    report, read = synced(counting, folder)
    assert (read, report.decisions["new"], report.unread) == (["bad.md"], 1, 5)


def test_what_somebody_retracted_is_read_and_revived(documents: Documents, folder: Path) -> None:
    fill(folder, 5)
    synced(documents, folder)
    documents.retract("1/00001.md")
    report, read = synced(documents, folder)
    assert read == ["1/00001.md"]
    assert (report.revived, report.unread, report.decisions["new"]) == (1, 4, 0)
    assert "1/00001.md" in live(documents)
    assert synced(documents, folder)[1] == []


def test_what_somebody_else_edited_is_read_and_set_right(documents: Documents, folder: Path) -> None:
    fill(folder, 5)
    synced(documents, folder)
    documents.ingest(Document("1/00001.md", "somebody's own words", {"path": "1/00001.md"}))
    text = (folder / "2/00002.md").read_text()
    documents.ingest(Document("2/00002.md", text, {"path": "elsewhere"}, content_type="text/markdown"))
    report, read = synced(documents, folder)
    assert read == ["1/00001.md", "2/00002.md"]
    assert (report.revived, report.metadata_updated, report.unread) == (1, 1, 3)
    assert [snippet.text for snippet in documents.snippets("1/00001.md")] == [(folder / "1/00001.md").read_text()]


def test_changed_metadata_alone_cuts_nothing(documents: Documents, folder: Path) -> None:
    write(folder, "a.html", "<title>One</title><p>text</p>")
    synced(documents, folder)
    write(folder, "a.html", "<title>Two</title><p>text</p>", later=1)
    report, _ = synced(documents, folder)
    assert (report.metadata_updated, report.decisions["duplicate"], report.snippets_made) == (1, 1, 0)
    assert synced(documents, folder)[1] == []


def test_an_empty_fence_store_is_hydrated_and_nothing_is_read(open_fence: Open, folder: Path, tmp_path: Path) -> None:
    fill(folder, 20)
    fence = open_fence()
    synced(fence.documents, folder)
    fence.hydrate()
    report, read = synced(open_fence().documents, folder)
    assert (read, report.unread) == ([], 20)


def test_the_notes_are_a_log_whose_newest_comes_first(open_fence: Open, folder: Path) -> None:
    fence = open_fence()
    for number in range(5):
        write(folder, f"{number}.md", f"text {number}")
        synced(fence.documents, folder)
    names = noted(fence, f"folder:{folder}")
    assert [name.rpartition("/")[2] for name in names] == [f"{10**20 - 1 - number}" for number in (5, 4)]
    synced(fence.documents, folder)
    assert noted(fence, f"folder:{folder}") == names  # nothing changed, nothing is written


def test_the_notes_are_parquet_that_others_can_read(open_fence: Open, folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fence = open_fence()
    write(folder, "a.md", "text")
    synced(fence.documents, folder)
    (name,) = noted(fence, f"folder:{folder}")
    assert fence.inspector.objects is not None
    table = pq.read_table(pa.BufferReader(fence.inspector.objects.get(name)))
    found = fence.documents.get("a.md")
    assert found is not None
    (row,) = table.to_pylist()
    assert row.pop("metadata_hash")
    assert row == {
        "doc_id": "a.md",
        "state": f"4:{LONG_AGO_NS}",
        "content_hash": found.content_hash,
        "size": 4,
        "characters": 4,
        "content_type": "text/markdown",
        "sequence": None,
    }
    assert table.schema.metadata[b"ragfence.name"] == f"folder:{folder}".encode()


@pytest.mark.parametrize("dry_run", [True, False])
def test_what_vanished_stays_without_a_prune(documents: Documents, folder: Path, dry_run: bool) -> None:
    fill(folder, 5)
    synced(documents, folder)
    (folder / "0/00000.md").unlink()
    report, read = synced(documents, folder, dry_run=dry_run)
    assert (report.pruned, report.listed, read) == (0, 4, [])
    assert len(live(documents)) == 5


@pytest.mark.parametrize("prune", ["scoped", "full"])
def test_a_prune_retracts_what_the_source_no_longer_has(documents: Documents, folder: Path, prune: Any) -> None:
    fill(folder, 21)
    synced(documents, folder)
    (folder / "0/00000.md").unlink()
    (folder / "1/00001.md").unlink()
    report, read = synced(documents, folder, prune=prune)
    assert (report.pruned, report.pruned_ids, read) == (2, ("0/00000.md", "1/00001.md"), [])
    assert (report.failed, report.not_pruned) == (0, "")
    assert len(live(documents)) == 19
    assert [row["route"] for row in rows(documents) if row["action"] == "retract"] == ["prune"] * 4
    again, _ = synced(documents, folder, prune=prune)
    assert (again.pruned, again.unread) == (0, 19)
    # And back it comes, with what it was.
    write(folder, "0/00000.md", "# Page 0\n\nWhat stands on page 0.")
    report, read = synced(documents, folder, prune=prune)
    assert (read, report.revived) == (["0/00000.md"], 1)


def test_scoped_leaves_alone_what_others_brought_and_full_does_not(documents: Documents, folder: Path) -> None:
    fill(folder, 20)
    synced(documents, folder)
    documents.ingest(Document("by hand", "text"))
    (folder / "0/00000.md").unlink()
    assert synced(documents, folder, prune="scoped")[0].pruned_ids == ("0/00000.md",)
    assert "by hand" in live(documents)
    assert synced(documents, folder, prune="full")[0].pruned_ids == ("by hand",)
    assert len(live(documents)) == 19


def test_scoped_reaches_back_over_syncs_that_did_not_prune(documents: Documents, folder: Path) -> None:
    fill(folder, 30)
    synced(documents, folder)
    (folder / "0/00000.md").unlink()
    synced(documents, folder)
    (folder / "1/00001.md").unlink()
    synced(documents, folder)
    documents.retract("1/00001.md")  # so it is none of those that would go, nor of those that are live
    assert synced(documents, folder, prune="scoped", max_prune_share=1 / 29)[0].pruned_ids == ("0/00000.md",)


def test_what_was_pruned_and_then_brought_by_somebody_else_is_theirs(documents: Documents, folder: Path) -> None:
    fill(folder, 20)
    synced(documents, folder)
    (folder / "0/00000.md").unlink()
    assert synced(documents, folder, prune="scoped")[0].pruned == 1
    documents.ingest(Document("0/00000.md", "by hand"))
    assert synced(documents, folder, prune="scoped")[0].pruned == 0


@pytest.mark.parametrize("prune", ["scoped", "full"])
def test_too_large_a_prune_is_refused_and_nothing_changed(documents: Documents, folder: Path, prune: Any) -> None:
    fill(folder, 10)
    synced(documents, folder)
    for number in (0, 7):
        (folder / f"0/{number:05d}.md").unlink()
    write(folder, "new.md", "would be ingested")
    before, told = documents.corpus_digest(), rows(documents)
    with pytest.raises(PruneTooLarge, match="would retract 2 of 10 live documents, and at most 10 %") as refused:
        synced(documents, folder, prune=prune)
    assert (refused.value.wanted, refused.value.live) == (2, 10)
    assert refused.value.doc_ids == ("0/00000.md", "0/00007.md")
    assert "max_prune_share" in refused.value.hint
    assert refused.value.code == "VALIDATION.prune_too_large"
    assert (documents.corpus_digest(), rows(documents)) == (before, told)
    report, _ = synced(documents, folder, prune=prune, max_prune_share=0.2)
    assert (report.pruned, report.decisions["new"]) == (2, 1)


def test_a_refused_prune_notes_nothing_either(open_fence: Open, folder: Path) -> None:
    fence = open_fence()
    fill(folder, 6)
    synced(fence.documents, folder)
    fence.documents.retract("0/00000.md")
    for number in (0, 1):
        (folder / f"{number}/{number:05d}.md").unlink()
    names = noted(fence, f"folder:{folder}")
    with pytest.raises(PruneTooLarge, match="1 of 5"):
        synced(fence.documents, folder, prune="scoped")
    assert noted(fence, f"folder:{folder}") == names


def test_the_policy_says_how_much_may_go(open_fence: Open, folder: Path) -> None:
    documents = open_fence(documents={"max_prune_share": 0.5}).documents
    fill(folder, 4)
    synced(documents, folder)
    for number in (0, 1):
        (folder / f"{number}/{number:05d}.md").unlink()
    assert synced(documents, folder, prune="scoped")[0].pruned == 2
    (folder / "2/00002.md").unlink()
    with pytest.raises(PruneTooLarge):
        synced(documents, folder, prune="scoped", max_prune_share=0)


@pytest.mark.parametrize("prune", ["scoped", "full"])
def test_an_empty_source_prunes_everything_only_if_that_is_said(documents: Documents, folder: Path, prune: Any) -> None:
    fill(folder, 3)
    synced(documents, folder)
    for file in folder.rglob("*.md"):
        file.unlink()
    with pytest.raises(PruneTooLarge, match="3 of 3"):
        synced(documents, folder, prune=prune)
    assert synced(documents, folder, prune=prune, max_prune_share=1)[0].pruned == 3
    assert live(documents) == set()


class Broken(Counted):
    """A source whose listing breaks off."""

    def __init__(self, source: Source, after: int, passes: int = 0) -> None:
        super().__init__(source)
        self._after = after
        self._passes = passes

    def items(self) -> Iterator[Item]:
        self._passes -= 1
        for number, item in enumerate(super().items()):
            if self._passes < 0 and number == self._after:
                raise StoreUnavailable("the drive is gone")
            yield item


@pytest.mark.parametrize("passes", [0, 1], ids=["while it looks what would go", "while it ingests"])
@pytest.mark.parametrize("prune", ["scoped", "full"])
def test_nothing_is_pruned_after_a_listing_that_broke_off(
    documents: Documents, folder: Path, prune: Any, passes: int
) -> None:
    fill(folder, 10)
    synced(documents, folder)
    (folder / "0/00000.md").unlink()
    with pytest.raises(StoreUnavailable):
        documents.sync(Broken(FolderSource(folder), 5, passes), prune=prune, max_prune_share=1.0)
    assert len(live(documents)) == 10
    # What the source had is still known, also of what was not listed any more.
    report, read = synced(documents, folder, prune=prune, max_prune_share=1.0)
    assert (report.pruned_ids, read) == (("0/00000.md",), [])


def test_what_was_done_before_it_broke_off_is_remembered_and_told(documents: Documents, folder: Path) -> None:
    fill(folder, 2 * PAGE)
    with pytest.raises(StoreUnavailable) as stopped:
        documents.sync(Broken(FolderSource(folder), PAGE + 10))
    report = stopped.value.details["report"]
    assert (report.listed, report.decisions["new"]) == (PAGE + 10, PAGE + 10)
    assert pickle.loads(pickle.dumps(stopped.value)).details["report"] == report  # noqa: S301  # our own bytes
    report, read = synced(documents, folder)
    assert (len(read), report.unread) == (PAGE - 10, PAGE + 10)


def test_the_lines_of_a_damaged_file_that_could_be_read_are_ingested(documents: Documents, tmp_path: Path) -> None:
    file = tmp_path / "docs.jsonl.gz"
    with gzip.open(file, "wt") as lines:
        lines.writelines(json.dumps({"id": number, "text": os.urandom(50).hex()}) + "\n" for number in range(500))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValidationError, match="damaged after line") as stopped:
        documents.sync(file)
    listed = stopped.value.details["report"].listed
    assert 0 < listed == len(live(documents)) < 500
    file.write_bytes(whole)
    report = documents.sync(file)
    assert (report.decisions["duplicate"], report.decisions["new"]) == (listed, 500 - listed)


def test_a_store_that_is_away_while_a_document_is_read_stops_the_sync(documents: Documents, folder: Path) -> None:
    def away() -> Document:
        raise StoreUnavailable("the bucket does not answer")

    class Away(Counted):
        def items(self) -> Iterator[Item]:
            yield from super().items()
            yield Item("z", "", away)

    fill(folder, 3)
    with pytest.raises(StoreUnavailable, match="bucket"):
        documents.sync(Away(FolderSource(folder)), prune="full", max_prune_share=1.0)


def test_a_document_that_cannot_be_read_is_an_entry_and_is_never_pruned(documents: Documents, folder: Path) -> None:
    fill(folder, 5)
    synced(documents, folder)
    write(folder, "1/00001.md", "", later=1).write_bytes(b"\xff\xfe\x00")
    source = Counted(FolderSource(folder))

    class Failed(Counted):
        def items(self) -> Iterator[Item]:
            for item in super().items():
                yield item if item.doc_id != "2/00002.md" else item._replace(state="", load=_cannot)

    def _cannot() -> Document:
        raise PermissionError(13, "Permission denied")

    report = documents.sync(Failed(source), prune="full", max_prune_share=1.0)
    assert (report.failed, report.pruned, report.ok) == (2, 0, False)
    first, second = report.failures
    assert (first.doc_id, first.code) == ("1/00001.md", "VALIDATION.document")
    assert "binary data" in first.message
    assert "convert it to text" in first.hint
    assert (second.doc_id, "Permission denied" in second.message) == ("2/00002.md", True)
    assert len(live(documents)) == 5
    # It becomes readable again, and was known all the time.
    assert synced(documents, folder, prune="scoped")[0].pruned == 0


def test_nothing_is_pruned_beside_a_document_that_cannot_be_told(documents: Documents, tmp_path: Path) -> None:
    file = tmp_path / "docs.jsonl"
    lines = [json.dumps({"doc_id": f"d{number}", "text": f"text {number}"}) for number in range(10)]
    file.write_text("\n".join(lines))
    assert documents.sync(file).decisions["new"] == 10
    file.write_text("\n".join(["{broken", *lines[1:]]))
    for prune in ("scoped", "full"):
        report = documents.sync(file, prune=prune, max_prune_share=1.0)
        assert (report.pruned, report.failed, report.ok) == (0, 1, False)
        assert "it is unknown which documents are gone" in report.not_pruned
        assert "line 1" in report.failures[0].message
    assert len(live(documents)) == 10
    file.write_text("\n".join(lines[1:]))
    assert documents.sync(file, prune="scoped").pruned_ids == ("d0",)


def test_a_folder_that_cannot_be_listed_keeps_its_documents(documents: Documents, folder: Path) -> None:
    fill(folder, 14)
    synced(documents, folder)

    class Locked(Counted):
        """As a folder source has it for a folder without rights, which root has everywhere."""

        def items(self) -> Iterator[Item]:
            yield from (item for item in super().items() if not item.doc_id.startswith("3/"))
            yield Item("3/", "", self._refuse)

        def _refuse(self) -> Document:
            raise DocumentInvalid("the folder 3/ cannot be listed: Permission denied")

    report = documents.sync(Locked(FolderSource(folder)), prune="scoped", max_prune_share=1.0)
    assert (report.pruned, report.failed) == (0, 1)
    assert len(live(documents)) == 14


def test_documents_without_a_state_are_read_each_time_and_written_once(open_fence: Open, tmp_path: Path) -> None:
    fence = open_fence()
    file = tmp_path / "docs.jsonl"
    file.write_text("\n".join(json.dumps({"id": number, "text": f"text {number}"}) for number in range(10)))
    assert fence.documents.sync(file).decisions["new"] == 10
    report = fence.documents.sync(file)
    assert (report.decisions["duplicate"], report.unread) == (10, 0)
    assert len(noted(fence, f"jsonl:{file}")) == 1


def test_a_doc_id_that_comes_twice_stays_with_the_first_and_is_reported(documents: Documents, tmp_path: Path) -> None:
    file = tmp_path / "docs.jsonl"
    lines = [{"id": "a", "text": "first"}, {"id": "b", "text": "b"}, {"id": "a", "text": "last"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    for _ in range(2):
        report = documents.sync(file, prune="full")
        assert (report.listed, report.repeated, report.repeated_ids) == (3, 1, ("a",))
        assert [snippet.text for snippet in documents.snippets("a")] == ["first"]


def test_a_repeated_doc_id_is_not_skipped_behind_another_content(documents: Documents) -> None:
    """The first item is as it was noted, and not read; the second has other content, and is refused every time."""
    first, second = Document("a", "first"), Document("a", "second")

    class Twice:
        name = "twice"

        def items(self) -> Iterator[Item]:
            yield Item("a", "1", lambda: first)
            yield Item("a", "2", lambda: second)

    for unread in (0, 1, 1):
        report = documents.sync(Twice())
        assert (report.repeated, report.unread, report.decisions["refused"]) == (1, unread, 1)
        assert [snippet.text for snippet in documents.snippets("a")] == ["first"]


def test_stale_documents_are_counted_and_are_no_failures(documents: Documents) -> None:
    documents.sync([Document("a", "five", sequence=5)])
    report = documents.sync([Document("a", "three", sequence=3), Document("b", "b")])
    assert (report.decisions["stale"], report.decisions["new"], report.failed, report.ok) == (1, 1, 0, True)
    assert [snippet.text for snippet in documents.snippets("a")] == ["five"]


def test_conflicts_and_chunkers_that_fail_are_entries(open_fence: Open) -> None:
    documents = open_fence().documents.using(chunker=Failing())
    documents.sync([Document("a", "five", sequence=5)])
    report = documents.sync(
        [Document("a", "other", sequence=5), Document("b", "fail"), Document("", "no id"), Document("c", "c")],
        prune="full",
        max_prune_share=1.0,
    )
    assert (report.decisions["conflict"], report.decisions["new"], report.failed) == (1, 1, 3)
    assert {failure.code for failure in report.failures} == {
        "CONFLICT.idempotency.payload_mismatch",
        "EFFECT.failed",
        "VALIDATION.document",
    }
    assert all(failure.message for failure in report.failures)
    assert live(documents) == {"a", "c"}


def test_a_sequence_that_was_noted_is_skipped_only_while_it_is_the_newest(documents: Documents) -> None:
    class Ordered:
        name = "ordered"
        read = 0

        def items(self) -> Iterator[Item]:
            yield Item("a", "the state", self._load)

        def _load(self) -> Document:
            self.read += 1
            return Document("a", "text", sequence=3)

    source = Ordered()
    documents.sync(source)
    assert (documents.sync(source).unread, source.read) == (1, 1)
    documents.ingest(Document("a", "text", sequence=4))
    assert (documents.sync(source).decisions["stale"], source.read) == (1, 2)


def test_a_source_that_gives_another_document_than_it_lists_is_refused(documents: Documents) -> None:
    class Wrong:
        name = "wrong"

        def items(self) -> Iterator[Item]:
            yield Item("a", "", lambda: Document("b", "text"))
            yield Item("c", "", lambda: "text")  # type: ignore[arg-type, return-value]

    report = documents.sync(Wrong(), prune="full")
    assert (report.failed, live(documents)) == (2, set())
    assert "lists a and gives the document b" in report.failures[0].message
    assert report.not_pruned


def test_names_in_nfd_and_nfc_are_one_document(documents: Documents) -> None:
    for doc_id in ("Cafe\u0301", "Caf\u00e9", "Cafe\u0301"):
        report = documents.sync([Document(doc_id, "text")], prune="full")
        assert (report.failed, report.pruned) == (0, 0)
    assert live(documents) == {"Caf\u00e9"}


def test_a_dry_run_says_what_would_happen_and_writes_nothing(open_fence: Open, folder: Path) -> None:
    fence = open_fence()
    documents = fence.documents
    fill(folder, 20)
    synced(documents, folder)
    (folder / "0/00000.md").unlink()
    write(folder, "1/00001.md", "changed", later=1)
    write(folder, "new.md", "new")
    before, told, names = documents.corpus_digest(), rows(documents), noted(fence, f"folder:{folder}")
    would, read = synced(documents, folder, prune="scoped", dry_run=True)
    assert would.dry_run
    assert sorted(read) == ["1/00001.md", "new.md"]
    assert (documents.corpus_digest(), rows(documents), noted(fence, f"folder:{folder}")) == (before, told, names)
    did, _ = synced(documents, folder, prune="scoped")
    for field in ("listed", "decisions", "unread", "pruned_ids", "snippets_made", "snippets_saved", "characters_saved"):
        assert getattr(would, field) == getattr(did, field), field


@pytest.mark.parametrize("page", [1, 2, 1000])
def test_a_dry_run_judges_a_document_that_comes_again_by_what_came_before_it(
    documents: Documents, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr(sync_module, "PAGE", page)
    documents.sync([Document("a", "one"), Document("b", "one")])
    sent = [Document("a", text) for text in ("two", "two", "one", "three")] + [Document("c", "one")] * 2
    would = documents.sync(sent, "scoped", max_prune_share=1.0, dry_run=True)
    did = documents.sync(sent, "scoped", max_prune_share=1.0)
    assert dataclasses.replace(would, dry_run=False, seconds=0) == dataclasses.replace(did, seconds=0)
    assert (would.decisions["new"], would.decisions["duplicate"], would.decisions["refused"]) == (2, 2, 2)


def test_a_dry_run_of_too_large_a_prune_says_that_it_would_be_refused(documents: Documents, folder: Path) -> None:
    fill(folder, 4)
    synced(documents, folder)
    (folder / "0/00000.md").unlink()
    report, _ = synced(documents, folder, prune="scoped", dry_run=True)
    assert "1 of 4" in report.not_pruned
    assert (report.pruned, report.ok) == (0, False)


@pytest.mark.parametrize("prune", [True, None, "everything", 0, 1, ["full"]])
def test_a_prune_that_is_none_of_the_known_is_refused(documents: Documents, prune: Any) -> None:
    with pytest.raises(ValidationError, match="scoped"):
        documents.sync([], prune=prune)


@pytest.mark.parametrize("share", [-0.1, 1.1, True, "all", float("nan")])
def test_a_share_that_is_none_is_refused(documents: Documents, share: Any) -> None:
    with pytest.raises(ValidationError, match="max_prune_share"):
        documents.sync([], prune="full", max_prune_share=share)


def test_an_iterator_can_be_pruned_after(documents: Documents) -> None:
    documents.sync(iter([Document("a", "a"), Document("b", "b")]))
    report = documents.sync((Document(doc_id, doc_id) for doc_id in "b"), prune="scoped", max_prune_share=0.5)
    assert (report.pruned_ids, live(documents)) == (("a",), {"b"})
    with pytest.raises(ValidationError, match="already read"):
        documents.sync(DocumentsSource(iter([Document("c", "c")])), prune="full", max_prune_share=1.0)
    assert live(documents) == {"b"}


def test_documents_without_a_state_are_noted_by_their_ids_and_asked_about_like_known_ones(open_fence: Open) -> None:
    fence = open_fence()
    given = [Document("a", "one"), Document("b", "two")]
    assert fence.documents.sync(given).decisions["new"] == 2
    (first,) = noted(fence, "documents")
    assert fence.inspector.objects is not None
    states = SyncStates(fence.tenant, "documents", fence.inspector.objects, fence.policy.documents.content_fields)
    assert states.newest().of(["a", "b"]) == [SyncNote("a"), SyncNote("b")]
    report = fence.documents.sync([*given, Document("c", "three")])
    assert (report.decisions["new"], report.decisions["duplicate"], report.unread) == (1, 2, 0)
    assert (report.snippets_saved, report.characters_saved) == (2, len("one") + len("two"))
    newest, second = noted(fence, "documents")
    assert second == first
    edited = fence.documents.sync([Document("a", "other"), *given[1:], Document("c", "three")])
    assert (edited.decisions["new"], edited.decisions["duplicate"]) == (1, 2)
    assert noted(fence, "documents") == [newest, first]  # there is nothing new to note
    again = [row for row in rows(fence.documents) if row["decision"] == "duplicate"]
    assert sorted((row["source_id"], row["route"]) for row in again) == [
        (doc_id, "sync") for doc_id in ("a", "b", "b", "c")
    ]


def test_of_two_contents_of_a_known_document_in_one_page_the_first_one_counts(documents: Documents) -> None:
    one, other = Document("a", "one"), Document("a", "another one")
    for given in ([one], [other, one], [one, other], [other, one, other, one]):
        report = documents.sync(given)
        assert report.listed == len(given)
        assert [each.text for each in documents.snippets("a")] == [given[0].text]


def test_progress_is_told_page_by_page(documents: Documents, folder: Path) -> None:
    fill(folder, PAGE + 1)
    told: list[int] = []
    documents.sync(folder, progress=told.append)
    assert told == [PAGE, PAGE + 1]


def test_large_documents_are_not_gathered(open_fence: Open, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragfence.documents.sync.sync.MOST_CHARACTERS", 1000)
    chunker = Paragraphs()
    documents = open_fence().documents.using(chunker=chunker)
    for number in range(5):
        write(folder, f"{number}.txt", f"{number}" * 600)
    source = Counted(FolderSource(folder))
    seen: list[tuple[int, int]] = []
    split = chunker.split

    def watched(text: str) -> Any:
        seen.append((len(source.read), len(chunker.cut)))
        return split(text)

    chunker.split = watched  # type: ignore[method-assign]
    documents.sync(source)
    assert seen == [(2, 0), (2, 1), (4, 2), (4, 3), (5, 4)]


def test_a_crash_before_the_notes_are_written_costs_reading_only(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(folder, 10)
    with make_world("embedded", tmp_path, monkeypatch) as world:
        process = Process(world)

        class Deadly(Counted):
            def items(self) -> Iterator[Item]:
                yield from super().items()
                process.die()

        with pytest.raises(Crash):
            process.fence.documents.sync(Deadly(FolderSource(folder)))
        # The page was not full, so nothing of it was ingested either.
        documents = world.open().documents
        monkeypatch.setattr("ragfence.documents.sync.sync.PAGE", 4)
        process = Process(world)
        with pytest.raises(Crash):
            process.fence.documents.sync(Deadly(FolderSource(folder)))
        assert len(live(documents)) == 8
        report, read = synced(documents, folder)
        assert (len(read), report.decisions["duplicate"], report.decisions["new"]) == (10, 8, 2)
        assert synced(documents, folder)[1] == []


def test_an_interrupted_sync_remembers_what_it_did(
    documents: Documents, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragfence.documents.sync.sync.PAGE", 4)
    fill(folder, 10)

    class Interrupted(Counted):
        def items(self) -> Iterator[Item]:
            yield from super().items()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        documents.sync(Interrupted(FolderSource(folder)))
    assert len(synced(documents, folder)[1]) == 2


def test_two_syncs_at_once_lose_nothing_that_either_noted(open_fence: Open, folder: Path) -> None:
    fill(folder, 10)
    first, second = open_fence().documents, open_fence().documents

    class Overtaken(Counted):
        """In the middle of this sync another one begins and ends, which sees a file that this one does not."""

        def items(self) -> Iterator[Item]:
            yield from super().items()
            late = write(folder, "late.md", "came late")
            second.sync(FolderSource(folder))
            late.unlink()

    first.sync(Overtaken(FolderSource(folder)))
    assert len(noted(open_fence(), f"folder:{folder}")) == 2
    report, read = synced(first, folder, prune="scoped")
    assert (report.pruned_ids, read) == (("late.md",), [])


def test_a_prune_spares_what_came_while_it_was_decided(open_fence: Open, folder: Path) -> None:
    fill(folder, 20)
    documents, other = open_fence().documents, open_fence().documents
    synced(documents, folder)

    class Growing(Counted):
        listed = 0

        def items(self) -> Iterator[Item]:
            yield from super().items()
            self.listed += 1
            if self.listed == 1:  # somebody is faster with a file that the first listing did not have
                write(folder, "late.md", "came late")
                other.sync(FolderSource(folder))

    report = documents.sync(Growing(FolderSource(folder)), prune="full")
    assert (report.pruned, "late.md" in live(documents)) == (0, True)


def test_a_file_that_was_not_listed_once_is_not_yet_pruned(documents: Documents, folder: Path) -> None:
    fill(folder, 20)
    synced(documents, folder)

    class Flickering(Counted):
        listed = 0

        def items(self) -> Iterator[Item]:
            self.listed += 1
            for item in super().items():
                if self.listed > 1 or item.doc_id != "0/00000.md":
                    yield item

    report = documents.sync(Flickering(FolderSource(folder)), prune="scoped")
    assert (report.pruned, report.listed) == (0, 20)


def test_a_jsonl_source_and_a_folder_of_one_name_do_not_share_notes(open_fence: Open, tmp_path: Path) -> None:
    fence = open_fence()
    file, folder = tmp_path / "docs.jsonl", tmp_path / "docs"
    file.write_text(json.dumps({"id": "a", "text": "a"}))
    write(folder, "b.md", "b")
    fence.documents.sync(JsonlSource(file, name="docs"))
    fence.documents.sync(FolderSource(folder, name="docs"), prune="scoped")
    assert live(fence.documents) == {"a", "b.md"}


def with_random_ids(count: int, *, first: int = 0) -> list[Document]:
    return [Document(str(uuid.uuid4()), f"text {number}") for number in range(first, first + count)]


def test_random_ids_are_noticed_on_the_second_run_and_explained(
    documents: Documents, caplog: pytest.LogCaptureFixture
) -> None:
    first = documents.sync(DocumentsSource(with_random_ids(30)))
    assert (first.random_ids, first.random_ids_hint) == (0, "")
    assert not caplog.records
    would = documents.sync(DocumentsSource(with_random_ids(30)), dry_run=True)
    second = documents.sync(DocumentsSource(with_random_ids(30)))
    for report in (would, second):
        assert (report.decisions["new"], report.random_ids, report.ok) == (30, 30, True)
        assert "an id that stays the same" in report.random_ids_hint
    assert "30 new documents have ids that look random" in caplog.text
    assert "an id that stays the same" in caplog.text
    with pytest.raises(PruneTooLarge) as refused:
        documents.sync(with_random_ids(30), prune="scoped")
    assert "the ids look random" in refused.value.hint
    assert "max_prune_share" not in refused.value.hint
    pruned = documents.sync(DocumentsSource(with_random_ids(30)), prune="scoped", max_prune_share=1.0)
    assert (pruned.random_ids, pruned.pruned) == (30, 60)


def test_random_ids_that_stay_are_nobodys_concern(documents: Documents) -> None:
    """Rows of a database, for instance: some go, others come, and a few have the same text."""
    rows = with_random_ids(30)
    documents.sync(DocumentsSource(rows))
    again = [Document(row.doc_id, f"{row.text}, edited") for row in rows[3:]]
    later = [*again, *with_random_ids(1), *with_random_ids(20, first=100)]
    assert documents.sync(DocumentsSource(later)).random_ids == 0
    assert documents.sync(DocumentsSource(later)).random_ids == 0
    named = [Document(f"handbook/{number}", f"text {number}") for number in range(60)]
    assert documents.sync(DocumentsSource(named)).random_ids == 0


def test_looking_for_random_ids_reads_a_sample_only(documents: Documents, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    heads = sync_module.Sync._heads

    def counted(self: sync_module.Sync, doc_ids: Any) -> Any:
        asked.append(len(doc_ids))
        return heads(self, doc_ids)

    documents.sync(DocumentsSource(with_random_ids(300)))
    monkeypatch.setattr(sync_module.Sync, "_heads", counted)
    assert documents.sync(DocumentsSource(with_random_ids(300))).random_ids == 300
    assert sum(asked) == 100
    documents.sync(DocumentsSource([Document(f"handbook/{number}", "x") for number in range(300)]))
    assert sum(asked) == 100
