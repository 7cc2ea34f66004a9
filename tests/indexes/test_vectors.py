"""A snippet is embedded once per embedder: over builds, processes, deaths and rewritings of the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ragfence import Document, Fence
from ragfence.documents.log import address_in
from ragfence.errors import EmbedderUnavailable, FormatCorrupt, NotReady
from ragfence.indexes import build as building
from ragfence.indexes import vectors
from ragfence.testing import at_point
from tests.documents.chunkers import Paragraphs
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
    with at_point(vectors.MID_EMBED, lambda: near.open().documents.compact()):  # type: ignore[arg-type]
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


class PurgingEmbedder(CountingEmbedder):
    """While it embeds, somebody purges a document, every few calls."""

    batch = 6

    def __init__(self, near: Place, victims: list[str], every: int = 2) -> None:
        super().__init__()
        self._documents = near.open().documents
        self._victims = victims
        self._every = every
        self.calls = 0

    def embed(self, texts: Sequence[str]) -> Any:
        self.calls += 1
        if self.calls % self._every == 0 and self._victims:
            self._documents.purge(self._victims.pop())
        return super().embed(texts)


def test_a_build_gets_on_while_documents_are_purged_all_the_time(near: Place) -> None:
    fence = near.open(indexes={"embed_workers": 1})
    names = [f"doc-{at:02}" for at in range(30)]
    ingested(fence, names)  # one segment: every purge rewrites it
    embedder = PurgingEmbedder(near, names[20:], every=1)
    build = fence.indexes.build(spec_in(near.folder, embedder))
    assert shown(rows_of(fence, build)) == live_snippets(fence)
    assert build.documents == 20, "all were purged meanwhile"
    assert set(embedder.seen.values()) == {1}


def test_a_build_that_gives_up_has_kept_what_it_embedded(near: Place) -> None:
    fence, embedder = near.open(indexes={"embed_workers": 1}), CountingEmbedder()
    names = [f"doc-{at:02}" for at in range(20)]
    ingested(fence, names)
    victims, purging = names[10:], near.open().documents
    purges = at_point(building.BEFORE_SEALING, lambda: purging.purge(victims.pop()), times=100)  # type: ignore[arg-type]
    with purges, pytest.raises(NotReady) as given_up:
        fence.indexes.build(spec_in(near.folder, embedder))
    assert "the vectors of 60 snippets are stored" in given_up.value.message
    assert set(embedder.seen.values()) == {1}
    embedder.seen.clear()
    build = near.open().indexes.build(spec_in(near.folder, embedder))
    assert shown(rows_of(fence, build)) == live_snippets(fence)
    assert not embedder.seen


def test_what_was_embedded_before_a_builder_died_is_kept_in_parts(near: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "PART_INTERVAL_S", 0.0)
    fence = near.open(indexes={"embed_workers": 1})
    ingested(fence, [f"doc-{at:02}" for at in range(10)])

    class Mortal(CountingEmbedder):
        batch = 6

        def embed(self, texts: Sequence[str]) -> Any:
            if len(self.seen) == 18:
                raise Died
            return super().embed(texts)

    embedder = Mortal()
    with pytest.raises(Died):
        fence.indexes.build(spec_in(near.folder, embedder))
    near.let_leases_run_out()
    embedder = CountingEmbedder()  # type: ignore[assignment]
    build = near.open().indexes.build(spec_in(near.folder, embedder))
    assert shown(rows_of(fence, build)) == live_snippets(fence)
    assert embedder.seen.total() == 12
    assert fence.documents.compact().segments_before == 1
    fence.documents.purge("doc-00")
    assert not near.names("vectors-parts/"), "they moved with their segment"
    fence.indexes.build(spec_in(near.folder, embedder, metric="l2"))
    assert embedder.seen.total() == 12


def put(fence: Fence, doc_id: str, *paragraphs: str) -> None:
    receipt = fence.documents.using(chunker=Paragraphs()).ingest(Document(doc_id, "\n\n".join(paragraphs)))
    assert receipt.failure is None


HISTORIES: dict[str, list[tuple[str, ...] | None]] = {
    "a snippet that comes back": [("one", "two"), ("three",), ("two", "four")],
    "after a retraction": [("one", "two"), None, ("two", "four")],
    "after many editions": [("one", "two"), ("one", "x"), ("one", "y"), ("z",), ("two", "one")],
    "an earlier edition again": [("one", "two"), ("three", "two"), ("four",), ("one", "two"), ("three",)],
}


@pytest.mark.parametrize("story", HISTORIES)
@pytest.mark.parametrize("built", ["after each edition", "at the end and again", "with another metric"])
def test_a_snippet_is_embedded_once_as_long_as_a_revision_has_it(near: Place, story: str, built: str) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    put(fence, "other", "something else")
    for at, edition in enumerate(HISTORIES[story]):
        if edition is None:
            fence.documents.retract("doc")
        else:
            put(fence, "doc", *edition)
        if built != "at the end and again":
            metric = ("cosine", "dot", "l2")[at % 3] if built == "with another metric" else "cosine"
            build = fence.indexes.build(spec_in(near.folder, embedder, metric=metric))
            assert shown(rows_of(fence, build)) == live_snippets(fence)
    for metric in ("cosine", "l2"):
        build = fence.indexes.build(spec_in(near.folder, embedder, metric=metric))
        assert shown(rows_of(fence, build)) == live_snippets(fence)
    assert set(embedder.seen.values()) == {1}


def test_an_earlier_revision_is_found_where_a_purge_has_moved_it(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, ["doc-0", "doc-1"])  # one segment
    fence.indexes.build(spec_in(near.folder, embedder))
    put(fence, "doc-0", "something else altogether")
    fence.documents.purge("doc-1")
    ingested(fence, ["doc-0"], edition=1)
    build = fence.indexes.build(spec_in(near.folder, embedder, metric="l2"))
    assert shown(rows_of(fence, build)) == live_snippets(fence)
    assert set(embedder.seen.values()) == {1}


def test_an_earlier_revision_is_found_after_its_retraction_was_compacted(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    for name in NAMES:
        ingested(fence, [name])
    fence.indexes.build(spec_in(near.folder, embedder))
    fence.documents.retract(NAMES[0])
    assert fence.documents.compact().segments_after == 1
    ingested(fence, NAMES[:1], edition=1)
    build = fence.indexes.build(spec_in(near.folder, embedder, metric="l2"))
    assert shown(rows_of(fence, build)) == live_snippets(fence)
    assert set(embedder.seen.values()) == {1}


def test_what_is_dead_is_not_embedded(near: Place) -> None:
    fence, embedder = near.open(), CountingEmbedder()
    ingested(fence, NAMES)
    ingested(fence, NAMES[:2], edition=1)
    fence.documents.retract(NAMES[3])
    fence.indexes.build(spec_in(near.folder, embedder))
    assert set(embedder.seen) == {text for _, _, _, text in live_snippets(fence).values()}
