"""A process that ingests into a sink with an embedder, and is killed where it is told to be.

python -m tests.indexes.sinking FOLDER POINT

FOLDER holds SQLite and the objects; `embedded` in it has a line for each text that was embedded, by whatever process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ragfence
from ragfence import Document, Policy
from ragfence.documents.documents import Documents
from ragfence.testing import kill_at
from ragfence.testing.memory_sinks import ListSink
from tests.documents.chunkers import Paragraphs
from tests.indexes.building import CountingEmbedder, text_of

NAMES = [f"doc-{at}" for at in range(20)]
POLICY = {"lease": {"ttl_s": 0.5, "max_attempts": 100}, "wait": {"deadline_s": 60}}


class NotingEmbedder(CountingEmbedder):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def embed(self, texts: Sequence[str]) -> Any:
        with self._file.open("a") as noted:
            noted.writelines(f"{json.dumps(text)}\n" for text in texts)
        return super().embed(texts)


def opened(folder: Path) -> tuple[ragfence.Fence, NotingEmbedder]:
    fence = ragfence.open(folder / "fence", policy=Policy.from_mapping(POLICY), journal=folder / "journal")
    return fence, NotingEmbedder(folder / "embedded")


def send(fence: ragfence.Fence, embedder: NotingEmbedder) -> Documents:
    documents = fence.documents.using(chunker=Paragraphs(), sink=ListSink(embedder=embedder))
    receipts = documents.ingest_many([Document(name, text_of(name)) for name in NAMES])
    assert not any(receipt.failed for receipt in receipts), receipts
    return documents


if __name__ == "__main__":
    with kill_at(sys.argv[2]):
        send(*opened(Path(sys.argv[1])))
