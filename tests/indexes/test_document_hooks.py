"""A purged document leaves vectors and indexes too, also those that are being built."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragfence import Document, Fence
from ragfence.core.receipts import Decision
from ragfence.indexes import build as building
from ragfence.indexes.alias_checks import alias_findings
from ragfence.indexes.backends import lance
from ragfence.indexes.build import Build
from ragfence.indexes.build_log import BuildLog
from ragfence.indexes.gc import AFTER_RETIRED
from ragfence.indexes.row_purge import ROW_PURGE_POINTS
from ragfence.testing import at_point
from tests.documents.places import Place
from tests.engine.worlds import elsewhere
from tests.indexes.building import CountingEmbedder, ingested, live_snippets, rows_of, shown, spec_in

NAMES = [f"doc-{at}" for at in range(4)]
SECRET = NAMES[1]
MARK = f"{SECRET}2"
"""a word of its text alone"""


def anywhere(folder: Path, text: str) -> list[str]:
    return [str(file) for file in folder.rglob("*") if file.is_file() and text.encode() in file.read_bytes()]


def test_its_rows_leave_every_index_and_the_others_stay(here: Place) -> None:
    fence, embedder = here.open(), CountingEmbedder()
    ingested(fence, NAMES, owner="alice")
    one = fence.indexes.build(spec_in(here.folder, embedder))
    two = fence.indexes.build(spec_in(here.folder, embedder, metric="l2"))
    fence.aliases.swap("docs", one.index_hash)
    fence.documents.purge(SECRET)
    for build in (one, two):
        rows = rows_of(fence, build)
        assert shown(rows) == live_snippets(fence)
        entry = fence.indexes.get(build.index_hash)
        assert entry is not None
        assert entry.seal is not None
        assert (entry.kind, entry.seal.rows, entry.seal.documents) == ("purged", 9, 3)
        assert entry.seal.content_digest != build.content_digest
    assert {hit.doc_id for hit in fence.search("docs", "paragraph tells", k=50)} == set(NAMES) - {SECRET}
    assert MARK not in here.everything()
    assert not anywhere(here.folder, MARK)


def test_after_it_an_index_is_built_without_it_and_nothing_is_embedded(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    first = fence.indexes.build(spec_in(near.folder, embedder))
    fence.documents.purge(SECRET)
    embedder.seen.clear()
    second = fence.indexes.build(spec_in(near.folder, embedder))
    assert second.index_hash != first.index_hash
    assert shown(rows_of(fence, second)) == live_snippets(fence)
    assert not embedder.seen


def test_ingested_again_it_is_in_a_build_of_the_same_hash_that_is_made_anew(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    first = fence.indexes.build(spec_in(near.folder, embedder))
    fence.documents.purge(SECRET)
    ingested(fence, [SECRET])
    again = fence.indexes.build(spec_in(near.folder, embedder))
    assert again.index_hash == first.index_hash
    assert again.decision is Decision.NEW
    assert again.physical != first.physical
    assert shown(rows_of(fence, again)) == live_snippets(fence)


def killed() -> None:
    raise KeyboardInterrupt


def sealed_as(fence: Fence, build: Build) -> tuple[str, int, int]:
    entry = fence.indexes.get(build.index_hash)
    assert entry is not None
    assert entry.seal is not None
    assert fence.indexes.backend(entry.seal.backend).count(entry.seal.physical) == entry.seal.rows
    return entry.kind, entry.seal.rows, entry.seal.documents


@pytest.mark.parametrize("point", ROW_PURGE_POINTS)
def test_a_purge_that_was_cut_off_is_completed_by_the_next(near: Place, point: str) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    build = fence.indexes.build(spec_in(near.folder, embedder))
    fence.aliases.swap("docs", build.index_hash)
    with at_point(point, killed), pytest.raises(KeyboardInterrupt):
        fence.documents.purge(SECRET)
    fence.documents.purge(SECRET)
    assert sealed_as(fence, build) == ("purged", 9, 3)
    assert shown(rows_of(fence, build)) == live_snippets(fence)
    assert [entry.kind for entry in fence.indexes.builds_log.history(build.index_hash)] == ["purged", "sealed"]
    assert fence.documents.verify().ok
    assert not anywhere(near.folder, MARK)


@pytest.mark.parametrize("point", [*ROW_PURGE_POINTS, "before the entry"])
def test_what_a_purge_that_was_cut_off_has_touched_does_not_answer_a_build(
    near: Place, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    first = fence.indexes.build(spec_in(near.folder, embedder))
    if point in ROW_PURGE_POINTS:
        with at_point(point, killed), pytest.raises(KeyboardInterrupt):
            fence.documents.purge(SECRET)
    else:
        with monkeypatch.context() as patched:
            patched.setattr(BuildLog, "append", lambda *_: killed())
            with pytest.raises(KeyboardInterrupt):
                fence.documents.purge(SECRET)
    ingested(fence, [SECRET])
    again = fence.indexes.build(spec_in(near.folder, embedder))
    assert again.index_hash == first.index_hash
    assert shown(rows_of(fence, again)) == live_snippets(fence)


def test_rows_that_were_marked_but_not_yet_deleted_are_deleted_by_the_next_purge(
    near: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    build = fence.indexes.build(spec_in(near.folder, embedder))
    with monkeypatch.context() as patched:
        patched.setattr(lance, "_rewrite", lambda table: killed())
        with pytest.raises(KeyboardInterrupt):
            fence.documents.purge(SECRET)
    assert sealed_as(fence, build) == ("purged", 9, 3)
    assert anywhere(near.folder, MARK)
    fence.documents.purge(SECRET)
    assert not anywhere(near.folder, MARK)


@pytest.mark.parametrize("point", ROW_PURGE_POINTS)
@pytest.mark.parametrize("within", [*ROW_PURGE_POINTS, "never"])
def test_two_purges_at_once_agree_on_what_is_left(near: Place, point: str, within: str) -> None:
    """The second one begins at a point of the first, and may be killed on its way and repeated after the first."""
    fence, embedder = near.open(owner="first"), CountingEmbedder()
    ingested(fence, NAMES)
    build = fence.indexes.build(spec_in(near.folder, embedder))
    fence.aliases.swap("docs", build.index_hash)
    other = near.open(owner="second")

    def purge_another() -> None:
        if within == "never":
            other.documents.purge(NAMES[2])
        else:
            with at_point(within, killed), pytest.raises(KeyboardInterrupt):
                other.documents.purge(NAMES[2])

    with at_point(point, lambda: elsewhere(purge_another)):
        fence.documents.purge(SECRET)
    if within != "never":
        fence.documents.purge(NAMES[2])
    assert sealed_as(fence, build) == ("purged", 6, 2)
    assert shown(rows_of(fence, build)) == live_snippets(fence)
    assert fence.documents.verify().ok
    assert not anywhere(near.folder, MARK)


def test_documents_without_a_snippet_are_counted_after_a_purge_too(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    fence.documents.using(allow_empty_text=True).ingest(Document("empty", ""))
    build = fence.indexes.build(spec_in(near.folder, embedder))
    assert (build.documents, build.rows) == (5, 12)
    fence.documents.purge(SECRET)
    assert sealed_as(fence, build) == ("purged", 9, 4)
    fence.documents.purge(NAMES[2])
    assert sealed_as(fence, build) == ("purged", 6, 3)


def test_it_leaves_a_physical_index_that_is_served_although_its_build_was_made_again(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    first = fence.indexes.build(spec_in(near.folder, embedder))
    fence.aliases.swap("docs", first.index_hash)
    fence.documents.purge(NAMES[2])
    ingested(fence, [NAMES[2]])
    again = fence.indexes.build(spec_in(near.folder, embedder))
    fence.documents.purge(SECRET)
    assert fence.aliases.resolve("docs").physical == first.physical != again.physical
    assert {hit.doc_id for hit in fence.search("docs", "paragraph tells", k=50)} == {NAMES[0], NAMES[3]}
    assert not anywhere(near.folder, MARK)


def test_it_leaves_what_gc_has_retired_and_not_dropped(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    fence.indexes.build(spec_in(near.folder, embedder))
    with at_point(AFTER_RETIRED, killed), pytest.raises(KeyboardInterrupt):
        fence.indexes.gc(dry_run=False, min_age_s=0)
    fence.documents.purge(SECRET)
    assert not anywhere(near.folder, MARK)


@pytest.mark.parametrize(
    "point",
    [
        building.AFTER_ATTEMPT,
        building.MID_WRITE,
        building.BEFORE_VERIFY,
        building.BEFORE_SEALING,
        building.AFTER_SEALING,
    ],
)
def test_a_build_under_way_is_fenced_and_made_again_without_it(near: Place, point: str) -> None:
    fence, embedder = near.open(owner="builder"), CountingEmbedder()
    ingested(fence, NAMES)

    def purge() -> None:
        elsewhere(lambda: near.open(owner="other").documents.purge(SECRET))

    with at_point(point, purge):
        build = fence.indexes.build(spec_in(near.folder, embedder))
    backend = fence.indexes.backend(build.seal.backend)
    assert shown(rows_of(fence, build)) == live_snippets(fence)
    for physical in backend.physicals():
        doc_ids = {
            doc_id for table in backend.read(physical, ["doc_id"]) for doc_id in table.column("doc_id").to_pylist()
        }
        assert SECRET not in doc_ids
    assert not anywhere(near.folder, MARK)


def test_an_attempt_is_fenced_and_what_is_served_before_it_is_not_retired(
    near: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    build = fence.indexes.build(spec_in(near.folder, embedder))
    fence.aliases.swap("docs", build.index_hash)
    fence.documents.purge(SECRET)
    ingested(fence, [SECRET])
    with monkeypatch.context() as patched, at_point(building.BEFORE_SEALING, killed):
        patched.setattr(building.IndexBuilder, "_drop_attempt", lambda *_: None)  # as by SIGKILL
        with pytest.raises(KeyboardInterrupt):
            fence.indexes.build(spec_in(near.folder, embedder))
    (attempt,) = fence.indexes.builds_log.attempts()
    fence.documents.purge("never heard of")
    backend = fence.indexes.backend(build.seal.backend)
    newest = fence.indexes.get(build.index_hash)
    assert newest is not None
    assert newest.number == attempt.number, "the number that it would have been sealed at is taken"
    assert not backend.exists(attempt.physical)
    assert sealed_as(fence, build) == ("purged", 9, 3)
    assert list(alias_findings(fence.aliases.catalog, fence.indexes.builds_log)) == []
    fence.indexes.gc(dry_run=False, min_age_s=0)
    assert fence.aliases.resolve("docs").physical == build.physical
    assert backend.physicals() == [build.physical]
    again = fence.indexes.build(spec_in(near.folder, embedder))
    assert (again.index_hash, again.decision) == (build.index_hash, Decision.NEW)
    assert shown(rows_of(fence, again)) == live_snippets(fence)


def test_verify_looks_behind_the_aliases(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    build = fence.indexes.build(spec_in(near.folder, embedder))
    fence.aliases.swap("docs", build.index_hash)
    assert fence.documents.verify().ok
    backend = fence.indexes.backend(build.seal.backend)
    backend.remove(build.physical, [SECRET])
    (found,) = fence.documents.verify().findings
    assert (found.trouble, found.place) == ("index_differs", build.physical)
    backend.drop(build.physical)
    (found,) = fence.documents.verify().findings
    assert (found.trouble, found.place) == ("index_missing", build.physical)


def test_the_auditor_knows_that_targets_were_sealed_before_the_swap(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    build = fence.indexes.build(spec_in(near.folder, embedder))
    fence.aliases.swap("docs", build.index_hash)
    assert fence.audit.check().ok
    near.kept.delete(near.names("builds/"))
    found = fence.audit.check().findings
    assert {finding.invariant for finding in found} >= {"sealed_before"}
