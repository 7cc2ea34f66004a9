"""What the tests of builds have in common: a small embedder that counts, and documents of a few paragraphs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ragfence import Document, Fence
from ragfence.indexes.build import Build
from ragfence.indexes.spec import IndexSpec

DIMENSION = 16


class CountingEmbedder:
    """Vectors out of a digest of the words: equal texts are equal, texts that share words are near."""

    name = "counting"

    def __init__(
        self, revision: str = "1", dimension: int = DIMENSION, spoil: Callable[[Any], Any] = lambda made: made
    ) -> None:
        self.revision = revision
        self.dimension = dimension
        self.seen: Counter[str] = Counter()
        self.spoil = spoil

    def embed(self, texts: Sequence[str]) -> Any:
        self.seen.update(texts)
        return self.spoil(np.stack([self._vector(text) for text in texts]))

    def _vector(self, text: str) -> Any:
        made = np.zeros(self.dimension, dtype=np.float32)
        for word in text.split() or [""]:
            seed = hashlib.sha256(word.encode()).digest()
            made += np.frombuffer((seed * 8)[: self.dimension], dtype=np.uint8).astype(np.float32) - 127.5
        return made


def spec_in(folder: Path, embedder: Any, **more: Any) -> IndexSpec:
    """LanceDB in a folder of the test's own, since not every object store has a place beside it."""
    return IndexSpec(embedder=embedder, backend=f"lance:{folder / 'lance'}", **more)


def text_of(doc: str, edition: int = 0, paragraphs: int = 3) -> str:
    """Paragraphs that differ from each other; those of a later edition differ from the first in one alone."""
    lines = [f"paragraph {at} of {doc} tells of {doc}{at} and nothing else" for at in range(paragraphs)]
    if edition:
        lines[0] = f"the beginning of {doc} was written anew, edition {edition}"
    return "\n\n".join(lines)


def ingested(fence: Fence, names: Iterable[str], edition: int = 0, **metadata: Any) -> None:
    from tests.documents.chunkers import Paragraphs

    documents = fence.documents.using(chunker=Paragraphs())
    for receipt in documents.ingest_many([Document(name, text_of(name, edition), dict(metadata)) for name in names]):
        assert receipt.failure is None, receipt.failure


def rows_of(fence: Fence, build: Build) -> dict[str, dict[str, Any]]:
    """What the backend has of a build, by snippet_id."""
    tables = fence.indexes.backend(build.seal.backend).read(build.physical)
    return {row["snippet_id"]: row for table in tables for row in table.to_pylist()}


def live_snippets(fence: Fence) -> dict[str, tuple[str, int, int, str]]:
    """snippet_id -> doc_id, start, end, text of everything that is live."""
    return {
        snippet.snippet_id: (snippet.doc_id, snippet.start, snippet.end, snippet.text)
        for head in fence.documents.heads()
        for snippet in fence.documents.snippets(head.doc_id)
    }


def shown(rows: dict[str, dict[str, Any]]) -> dict[str, tuple[str, int, int, str]]:
    return {each: (row["doc_id"], row["start"], row["end"], row["text"]) for each, row in rows.items()}
