"""One contract, every sink: those for tests, the one in docs/sinks.md on Qdrant, and one on LanceDB."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from ragfence.documents.sinks.sink import SinkSnippet
from ragfence.testing.contracts.sinks import SinkContract
from ragfence.testing.memory_sinks import ListSink, SqliteSink
from tests.indexes.building import CountingEmbedder

DOCS = Path(__file__).parents[2] / "docs" / "sinks.md"


class TestListSink(SinkContract):
    @pytest.fixture
    def sink(self) -> Any:
        return ListSink()


class TestListSinkWithVectors(SinkContract):
    @pytest.fixture
    def sink(self) -> Any:
        return ListSink(embedder=CountingEmbedder())


class TestSqliteSink(SinkContract):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> Any:
        return SqliteSink(tmp_path / "sink.db")


class TestQdrantSink(SinkContract):
    """The code that docs/sinks.md shows, as it stands there."""

    @pytest.fixture
    def sink(self) -> Iterator[Any]:
        from qdrant_client import QdrantClient, models

        client = QdrantClient(":memory:")
        client.create_collection(
            "handbook", vectors_config=models.VectorParams(size=2, distance=models.Distance.EUCLID)
        )
        yield documented()["QdrantSink"](client, "handbook", lambda texts: [[float(len(text)), 1.0] for text in texts])
        client.close()


class TestQdrantSinkWithVectors(SinkContract):
    """The other one of docs/sinks.md."""

    @pytest.fixture
    def sink(self) -> Iterator[Any]:
        from qdrant_client import QdrantClient, models

        client, embedder = QdrantClient(":memory:"), CountingEmbedder()
        size, distance = embedder.dimension, models.Distance.EUCLID
        client.create_collection("handbook", vectors_config=models.VectorParams(size=size, distance=distance))
        yield documented()["SharingSink"](client, "handbook", embedder)
        client.close()


def documented() -> dict[str, Any]:
    """The classes that docs/sinks.md shows."""
    from qdrant_client import models

    code = re.findall(r"```python\n(class \w+Sink\b.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(code) == 2
    names = {name: getattr(models, name) for name in ("FieldCondition", "Filter", "MatchAny", "PointStruct")}
    scope: dict[str, Any] = {**names, "UUID": UUID, "asdict": asdict}
    for each in code:
        exec(each, scope)  # our own documentation
    return scope


class LanceSink:
    """As one would write it for LanceDB."""

    name = "lance:live"

    def __init__(self, folder: Path) -> None:
        import lancedb
        import pyarrow as pa

        fields = [("snippet_id", pa.string()), ("doc_id", pa.string()), ("text", pa.string())]
        self._table = lancedb.connect(str(folder)).create_table("live", schema=pa.schema(fields))

    def upsert(self, snippets: Sequence[SinkSnippet]) -> None:
        rows = [{"snippet_id": each.snippet_id, "doc_id": each.doc_id, "text": each.text} for each in snippets]
        merge = self._table.merge_insert("snippet_id").when_matched_update_all().when_not_matched_insert_all()
        merge.execute(rows)

    def delete(self, snippet_ids: Sequence[str]) -> None:
        listed = ", ".join(f"'{each}'" for each in snippet_ids)
        if listed:
            self._table.delete(f"snippet_id IN ({listed})")

    def ids(self, doc_ids: Sequence[str] | None = None) -> Iterable[str]:
        rows = self._table.search().select(["snippet_id", "doc_id"]).limit(None).to_list()
        return [row["snippet_id"] for row in rows if doc_ids is None or row["doc_id"] in doc_ids]


class TestLanceSink(SinkContract):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> Any:
        return LanceSink(tmp_path / "lance")
