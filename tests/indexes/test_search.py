"""A search answers with citations, out of one sealed build."""

from __future__ import annotations

from typing import Any

import pytest

from ragfence import Document, Fence
from ragfence.errors import (
    AliasUnknown,
    BuildMissing,
    EmbedderInvalid,
    EmbedderUnknown,
    ObjectsRequired,
    ValidationError,
)
from ragfence.indexes import ranking
from ragfence.indexes.gates import GoldenQuery
from ragfence.indexes.spec import IndexSpec
from tests.documents.places import Place
from tests.indexes.building import CountingEmbedder, ingested, spec_in, text_of

NAMES = [f"doc-{at}" for at in range(5)]


def searchable(place: Place, embedder: Any | None = None, **policy: Any) -> Fence:
    fence = place.open(**policy)
    ingested(fence, NAMES, team="core")
    build = fence.indexes.build(spec_in(place.folder, embedder or CountingEmbedder()))
    fence.aliases.swap("docs", build.index_hash)
    return fence


def test_a_hit_can_be_cited(here: Place) -> None:
    fence = searchable(here)
    (hit, *_) = fence.search("docs", "paragraph 1 of doc-3 tells of doc-31 and nothing else", k=3)
    assert (hit.doc_id, hit.ordinal, hit.metadata) == ("doc-3", 1, {"team": "core"})
    assert text_of("doc-3")[hit.start : hit.end] == hit.text
    assert hit.score == pytest.approx(1, abs=1e-5)
    target = fence.aliases.resolve("docs")
    assert (hit.index_hash, hit.generation) == (target.index_hash, target.generation)
    assert hit.snippet_id in {snippet.snippet_id for snippet in fence.documents.snippets("doc-3")}


def test_ties_are_broken_by_section_and_snippet(near: Place) -> None:
    fence = near.open()
    fence.documents.ingest_many([Document(f"twin-{at}", "the very same text") for at in range(6)])
    build = fence.indexes.build(spec_in(near.folder, CountingEmbedder()))
    fence.aliases.swap("docs", build.index_hash)
    found = [(hit.section_id, hit.snippet_id) for hit in fence.search("docs", "the very same text", k=6)]
    assert len(found) == 6
    assert found == sorted(found)


@pytest.mark.parametrize("backend", ["lance:{}/lance", "qdrant+file://{}/qdrant"])
def test_fewer_hits_are_the_first_of_more_also_among_equals(near: Place, backend: str) -> None:
    fence, text = near.open(), "the very same text"
    fence.documents.ingest_many([Document(f"twin-{at}", text) for at in range(90)])
    spec = IndexSpec(embedder=CountingEmbedder(), backend=backend.format(near.folder))
    build = fence.indexes.build(spec)
    fence.aliases.swap("docs", build.index_hash)
    found = {k: [hit.doc_id for hit in fence.search("docs", text, k=k)] for k in (1, 3, 20, 90)}
    assert len(found[90]) == 90
    for k, first in found.items():
        assert first == found[90][:k]
    golden = [GoldenQuery(text, frozenset(found[1]), k=1)]
    assert fence.indexes.judge_golden(build.index_hash, golden).ok, "a gate sees what a search finds"


def test_a_search_asks_the_backend_once_unless_equals_are_cut_off(near: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = searchable(near)
    backend = fence.indexes.backend(fence.aliases.resolve("docs").backend)
    asked, plain = [], backend.search
    monkeypatch.setattr(backend, "search", lambda name, vector, k: asked.append(k) or plain(name, vector, k))
    assert len(fence.search("docs", "paragraph 1 of doc-3 tells of doc-31 and nothing else", k=3)) == 3
    assert len(asked) == 1
    assert len(fence.search("docs", "anything at all", k=50)) == 15
    assert len(asked) == 2


def test_equals_without_end_are_not_asked_for_for_ever(near: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "MORE", (1, 2))
    fence, text = near.open(), "the very same text"
    fence.documents.ingest_many([Document(f"twin-{at}", text) for at in range(9)])
    fence.aliases.swap("docs", fence.indexes.build(spec_in(near.folder, CountingEmbedder())).index_hash)
    assert len(fence.search("docs", text, k=2)) == 2


def test_an_approximate_index_is_asked_for_no_more_than_it_was_made_for(near: Place) -> None:
    """LanceDB refuses to find more than `ef` rows."""
    fence = near.open()
    ingested(fence, NAMES)
    spec = spec_in(near.folder, CountingEmbedder(), index="ivf_hnsw_sq", parameters={"ef": 10, "num_partitions": 1})
    fence.aliases.swap("docs", fence.indexes.build(spec).index_hash)
    assert len(fence.search("docs", "paragraph 1 of doc-3", k=10)) == 10


def test_a_new_process_opens_the_embedder_that_it_was_given(near: Place) -> None:
    embedder = CountingEmbedder()
    searchable(near, embedder)
    other = near.open()
    with pytest.raises(EmbedderUnknown):
        other.search("docs", "doc-1")
    other.indexes.use(CountingEmbedder())
    assert other.search("docs", "doc-1", k=1)


def test_another_revision_of_the_embedder_is_not_used_for_queries(near: Place) -> None:
    searchable(near)
    other = near.open()
    other.indexes.use(CountingEmbedder("2"))
    with pytest.raises((EmbedderUnknown, EmbedderInvalid)):
        other.search("docs", "doc-1")


@pytest.mark.parametrize(("text", "k"), [("", 5), ("  ", 5), ("x", 0), ("x", 10_001), ("x", True), (None, 5)])
def test_a_search_that_makes_no_sense_is_refused(near: Place, text: Any, k: Any) -> None:
    with pytest.raises(ValidationError):
        searchable(near).search("docs", text, k=k)


def test_a_query_without_a_direction_is_refused(near: Place) -> None:
    embedder = CountingEmbedder()
    fence = searchable(near, embedder)
    embedder.spoil = lambda made: 0 * made
    with pytest.raises(ValidationError, match="length 0"):
        fence.search("docs", "anything")


def test_an_unknown_alias_and_a_dropped_index_say_so(near: Place) -> None:
    fence = searchable(near)
    with pytest.raises(AliasUnknown):
        fence.search("other", "x")
    target = fence.aliases.resolve("docs")
    fence.indexes.backend(target.backend).drop(target.physical)
    with pytest.raises(BuildMissing, match="docs"):
        fence.search("docs", "x")


def test_a_search_that_gc_overtook_resolves_the_alias_again(near: Place) -> None:
    """Between resolving and searching the alias moves on twice, and gc drops what it left."""
    embedder = CountingEmbedder()
    fence = searchable(near, embedder, indexes={"keep_targets": 1, "max_shrinkage": 1})
    first = fence.aliases.resolve("docs")
    other = near.open(indexes={"keep_targets": 1, "max_shrinkage": 1})

    def overtake(made: Any) -> Any:
        embedder.spoil = lambda made: made
        for metric in ("dot", "l2"):
            build = other.indexes.build(spec_in(near.folder, CountingEmbedder(), metric=metric))
            other.aliases.swap("docs", build.index_hash)
        assert other.indexes.gc(dry_run=False, min_age_s=0).retired == [first.index_hash]
        return made

    embedder.spoil = overtake
    hits = fence.search("docs", "paragraph")
    assert hits
    assert {hit.index_hash for hit in hits} == {other.aliases.resolve("docs").index_hash} != {first.index_hash}


def test_rows_that_are_missing_are_told_with_what_the_log_of_the_build_says(near: Place) -> None:
    embedder = CountingEmbedder()
    fence = searchable(near, embedder)
    target = fence.aliases.resolve("docs")
    fence.indexes.backend(target.backend).drop(target.physical)
    with pytest.raises(BuildMissing) as missing:
        fence.search("docs", "x")
    assert "resolve the alias again" in missing.value.hint
    assert "outside ragfence" in missing.value.hint
    again = fence.indexes.build(spec_in(near.folder, embedder))
    assert again.index_hash == target.index_hash
    with pytest.raises(BuildMissing, match="built again since") as missing:
        fence.search("docs", "x")
    assert f"ragfence swap docs {target.index_hash}" in missing.value.hint
    fence.aliases.swap("docs", again.index_hash)
    assert fence.search("docs", "paragraph")


def test_without_objects_there_is_neither_index_nor_search() -> None:
    import ragfence
    from ragfence.testing.memory import MemoryFences

    with ragfence.open(MemoryFences(solo=True)) as fence:
        for ask in (lambda: fence.indexes, lambda: fence.aliases, lambda: fence.search("docs", "x")):
            with pytest.raises(ObjectsRequired):
                ask()
