"""A purged document leaves vectors and indexes too, also those that are being built."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragfence.core.receipts import Decision
from ragfence.indexes import building
from ragfence.testing import at_point
from tests.documents.places import Place
from tests.indexes.building import CountingEmbedder, ingested, live_snippets, rows_of, shown, spec_in
from tests.unit.worlds import elsewhere

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
