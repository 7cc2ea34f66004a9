"""A snippet is embedded once per embedder: over builds, processes, deaths and rewritings of the log."""

from __future__ import annotations

import pytest

from ragfence.documents.segments import address_in
from ragfence.errors import EmbedderUnavailable, FormatCorrupt
from ragfence.indexes import vectors
from ragfence.testing import at_point
from tests.documents.places import Place
from tests.indexes.building import CountingEmbedder, ingested, live_snippets, rows_of, shown, spec_in

NAMES = [f"doc-{at}" for at in range(4)]


class Died(BaseException):
    """As a process would, as far as the vectors go."""


def die() -> None:
    raise Died


def test_a_builder_that_dies_leaves_what_it_embedded_to_the_next(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    for name in NAMES:
        ingested(fence, [name])  # a segment each
    with pytest.raises(Died), at_point(vectors.AFTER_VECTORS, die, times=1):
        fence.indexes.build(spec_in(near.folder, embedder))
    near.let_leases_run_out()
    build = near.open().indexes.build(spec_in(near.folder, embedder))
    assert build.rows == 12
    assert set(embedder.seen.values()) == {1}


def test_what_died_between_embedding_and_its_object_is_made_again(near: Place) -> None:
    fence, embedder = near.open(indexes={"embed_workers": 1}), CountingEmbedder()
    for name in NAMES:
        ingested(fence, [name])
    with pytest.raises(Died), at_point(vectors.AFTER_EMBEDDED, die):
        fence.indexes.build(spec_in(near.folder, embedder))
    near.let_leases_run_out()
    near.open().indexes.build(spec_in(near.folder, embedder))
    assert sorted(embedder.seen.values()) == [1] * 9 + [2] * 3  # one object, uncommitted, and no other


def test_an_embedder_that_is_away_keeps_what_it_made_before(near: Place) -> None:
    fence = near.open(indexes={"embed_workers": 1})
    for name in NAMES:
        ingested(fence, [name])
    calls = []

    def fail_at_the_third(made: object) -> object:
        calls.append(made)
        if len(calls) == 3:
            raise EmbedderUnavailable("the endpoint does not answer")
        return made

    embedder = CountingEmbedder(spoil=fail_at_the_third)
    with pytest.raises(EmbedderUnavailable):
        fence.indexes.build(spec_in(near.folder, embedder))
    embedder.seen.clear()
    assert fence.indexes.build(spec_in(near.folder, embedder)).rows == 12
    assert embedder.seen.total() <= 6  # the fourth may have been made while the third failed


def test_a_compaction_takes_vectors_along(here: Place) -> None:
    fence, embedder = here.open(), CountingEmbedder()
    for name in NAMES:
        ingested(fence, [name])
    fence.indexes.build(spec_in(here.folder, embedder))
    assert fence.documents.compact().segments_after == 1
    embedder.seen.clear()
    build = fence.indexes.build(spec_in(here.folder, embedder, metric="dot"))
    assert not embedder.seen
    assert shown(rows_of(fence, build)) == live_snippets(fence)
    (name,) = here.names("vectors/")
    (segment,) = here.names("snippets/")
    assert address_in(name) == address_in(segment)


def test_of_a_compacted_segment_only_what_was_never_embedded_is(here: Place) -> None:
    fence, embedder = here.open(), CountingEmbedder()
    for name in NAMES[:3]:
        ingested(fence, [name])
    fence.indexes.build(spec_in(here.folder, embedder))
    ingested(fence, NAMES[3:])
    assert fence.documents.compact().segments_after == 1
    assert here.names("vectors-kept/")
    embedder.seen.clear()
    build = fence.indexes.build(spec_in(here.folder, embedder))
    assert embedder.seen.total() == 3
    assert shown(rows_of(fence, build)) == live_snippets(fence)


def test_a_builder_that_reads_while_the_log_is_compacted_finds_everything(near: Place) -> None:
    fence, embedder = near.open(indexes={"embed_workers": 1}), CountingEmbedder()
    for name in NAMES:
        ingested(fence, [name])
    fence.documents.retract(NAMES[3])
    with at_point(vectors.MID_EMBED, lambda: near.open().documents.compact()):
        build = fence.indexes.build(spec_in(near.folder, embedder))
    assert shown(rows_of(fence, build)) == live_snippets(fence)


def test_an_object_of_vectors_that_somebody_deleted_is_made_again(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    fence.indexes.build(spec_in(near.folder, embedder))
    near.kept.delete(near.names("vectors/"))
    fence.indexes.build(spec_in(near.folder, embedder, metric="l2"))  # starts from no base: another metric
    assert set(embedder.seen.values()) == {2}
    assert near.names("vectors/")


def test_vectors_that_are_not_those_of_their_snippets_are_refused(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES[:1])
    ingested(fence, NAMES[1:])
    fence.indexes.build(spec_in(near.folder, embedder))
    one, two = near.names("vectors/")
    data = near.kept.get(one)
    assert data is not None
    near.kept.delete([two])
    near.kept.put_new(two, data)
    with pytest.raises(FormatCorrupt):
        fence.indexes.build(spec_in(near.folder, embedder, metric="l2"))
    assert len(list(fence.indexes.builds())) == 1
