"""What every `Sink` must do, as tests. A sink of your own proves itself with a few lines:

    class TestMySink(SinkContract):
        @pytest.fixture
        def sink(self, tmp_path):
            yield MySink(tmp_path)       # empty

A sink that names an embedder is given vectors here, as everywhere.

Call `pytest.register_assert_rewrite("ragfence.testing.contracts.sinks")` in your conftest for readable failures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence.core.document import Document
from ragfence.documents.documents import Documents
from ragfence.documents.sinks.sink import PAGE, Settled, SinkSnippet

TEXT = "\n\n".join(f"paragraph {at} is about number {at}" for at in range(4))


def snippet(number: int, doc_id: str = "doc", text: str = "") -> SinkSnippet:
    """A made-up snippet; another number is another id."""
    return SinkSnippet(f"{number:032x}", doc_id, text or f"text {number}", 0, 7, "", number, 2, "", {"number": number})


def give(sink: Any, snippets: Sequence[SinkSnippet]) -> None:
    """As ragfence would: with vectors, if the sink names an embedder."""
    if (named := getattr(sink, "embedder", None)) is None:
        sink.upsert(snippets)
        return
    from ragfence.indexes.embedders.embedder import EmbedderId, embed_texts
    from ragfence.indexes.embedders.registry import to_embedder

    embedder = to_embedder(named)
    sink.upsert(snippets, embed_texts(embedder, EmbedderId.of(embedder), [snippet.text for snippet in snippets]))


class SinkContract:
    @pytest.fixture
    def sink(self) -> Any:
        raise NotImplementedError("override the fixture `sink` in the subclass")

    @pytest.fixture
    def documents(self, tmp_path: Path, sink: Any) -> Iterator[Documents]:
        with ragfence.open(tmp_path / "fence", journal=tmp_path / "journal") as fence:
            yield fence.documents.using(sink=sink)

    def test_what_was_given_is_held_until_it_is_deleted(self, sink: Any) -> None:
        give(sink, [snippet(1, "a"), snippet(2, "a"), snippet(3, "b")])
        assert set(sink.ids()) == {snippet(number).snippet_id for number in (1, 2, 3)}
        assert set(sink.ids(["a"])) == {snippet(1).snippet_id, snippet(2).snippet_id}
        sink.delete([snippet(2).snippet_id, snippet(9).snippet_id])
        assert set(sink.ids()) == {snippet(1).snippet_id, snippet(3).snippet_id}

    def test_both_calls_may_be_repeated(self, sink: Any) -> None:
        for _ in range(2):
            give(sink, [snippet(1), snippet(2)])
        assert sorted(sink.ids()) == [snippet(1).snippet_id, snippet(2).snippet_id]
        for _ in range(2):
            sink.delete([snippet(1).snippet_id])
        assert list(sink.ids()) == [snippet(2).snippet_id]

    def test_a_call_may_have_a_whole_page(self, sink: Any) -> None:
        give(sink, [snippet(number) for number in range(PAGE)])
        assert len(set(sink.ids())) == PAGE
        sink.delete([snippet(number).snippet_id for number in range(PAGE)])
        assert not list(sink.ids())

    def test_it_follows_the_documents(self, sink: Any, documents: Documents) -> None:
        first = documents.ingest(Document("a", TEXT))
        assert set(sink.ids()) == set(first.snippet_ids)
        second = documents.ingest(Document("a", TEXT.replace("number 3", "something else")))
        assert set(sink.ids()) == set(second.snippet_ids)
        documents.retract("a")
        assert not list(sink.ids())

    def test_a_full_settle_leaves_alone_what_others_wrote(self, sink: Any, documents: Documents) -> None:
        foreign = {snippet(number, "theirs").snippet_id for number in range(5)}
        give(sink, [snippet(number, "theirs") for number in range(5)])
        live = set(documents.ingest(Document("a", TEXT)).snippet_ids)
        assert documents.settle(full=True) == Settled(0, 0, foreign=5)
        assert set(sink.ids()) == live | foreign
        assert documents.verify(repair=True).ok
        assert set(sink.ids()) == live | foreign

    def test_what_we_wrote_and_is_dead_is_an_orphan(self, sink: Any, documents: Documents) -> None:
        dead = documents.ingest(Document("a", TEXT)).snippet_ids[0]
        documents.retract("a")
        give(sink, [SinkSnippet(dead, "a", "written too late", 0, 7, "", 0, 2, "", {}), snippet(1, "theirs")])
        assert documents.settle(full=True) == Settled(0, 0, orphaned=1, foreign=1)
        assert set(sink.ids()) == {snippet(1).snippet_id}

    def test_foreign_rows_are_deleted_only_where_it_is_asked_for(self, sink: Any, documents: Documents) -> None:
        give(sink, [snippet(1, "theirs")])
        live = set(documents.ingest(Document("a", TEXT)).snippet_ids)
        assert documents.settle(full=True, foreign="delete") == Settled(0, 0, orphaned=1)
        assert set(sink.ids()) == live

    def test_with_an_embedder_it_gets_the_vector_of_each_text(
        self, sink: Any, documents: Documents, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those of its own embedder, in the order of the snippets, also when they come back."""
        if (named := getattr(sink, "embedder", None)) is None:
            pytest.skip("this sink names no embedder")
        from ragfence.indexes.embedders.embedder import EmbedderId, embed_texts
        from ragfence.indexes.embedders.registry import to_embedder

        embedder, upsert = to_embedder(named), sink.upsert
        given: list[str] = []

        def watched(snippets: Sequence[SinkSnippet], vectors: Any) -> None:
            wanted = embed_texts(embedder, EmbedderId.of(embedder), [each.text for each in snippets])
            assert vectors.shape == wanted.shape
            assert abs(vectors - wanted).max() <= 1e-5
            given.extend(each.text for each in snippets)
            upsert(snippets, vectors)

        monkeypatch.setattr(sink, "upsert", watched)
        first = documents.ingest(Document("a", TEXT))
        documents.retract("a")
        assert documents.ingest(Document("a", TEXT)).snippet_ids == first.snippet_ids
        assert given == [each.text for each in documents.snippets("a")] * 2
        assert set(sink.ids()) == set(first.snippet_ids)
