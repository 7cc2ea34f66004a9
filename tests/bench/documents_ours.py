"""ragfence's documents as the benchmark uses them: on Redis and a folder, with a chunker that only counts."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ragfence
from ragfence.documents.chunking.chunker import Piece
from ragfence.documents.sinks.sink import SinkSnippet
from tests.bench.peers.corpus import Text, corpus

OBJECTS = "local folder"
"""the object store behind Redis wherever time is measured"""


class WholeText:
    """One piece per document. Counts, outside ragfence, the texts that it was given."""

    name, version = "bench-whole", "1"
    parameters: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self.chunked = 0

    def split(self, text: str) -> Sequence[Piece]:
        self.chunked += 1
        return (Piece(0, len(text), ""),)


class Thirds(WholeText):
    """Three pieces per document."""

    name = "bench-thirds"

    def split(self, text: str) -> Sequence[Piece]:
        self.chunked += 1
        one, two, end = len(text) // 3, 2 * len(text) // 3, len(text)
        return (Piece(0, one, ""), Piece(one, two, ""), Piece(two, end, ""))


class CountingSink:
    """An embedder and a vector store that count and do nothing else, as the peers have them."""

    name = "bench"

    def __init__(self) -> None:
        self.rows: list[str] = []

    def upsert(self, snippets: Sequence[SinkSnippet]) -> None:
        self.rows += [snippet.snippet_id for snippet in snippets]

    def delete(self, snippet_ids: Sequence[str]) -> None:
        pass


class Ours:
    """The documents of one tenant. What it ingests is checked: how many were new, chunked, and written to a sink."""

    def __init__(self, fence: ragfence.Fence, chunker: WholeText, sink: CountingSink | None, batch: int | None) -> None:
        self.fence = fence
        self.chunker, self.sink = chunker, sink
        self.documents = fence.documents.using(chunker=chunker, sink=sink)
        self._options: dict[str, Any] = {} if batch is None else {"batch": batch}
        self.ingest("warm-up", 1, new=1)  # connected, hydrated and with its settings

    def ingest(self, corpus_name: str, count: int, *, new: int) -> float:
        """The seconds it took; the documents are made before."""
        return self.seconds([document(each) for each in corpus(corpus_name, count)], new=new)

    def seconds(self, documents: Sequence[ragfence.Document], *, new: int) -> float:
        before, written = self.chunker.chunked, len(self.sink.rows) if self.sink else 0
        gc.collect()  # as in `rounds.clocked` and in the peers' workers
        started = time.perf_counter()
        receipts = self.documents.ingest_many(documents, **self._options)
        taken = time.perf_counter() - started
        self._check(receipts, self.chunker.chunked - before, new)
        if self.sink and len(self.sink.rows) - written != new:
            raise RuntimeError(f"{len(self.sink.rows) - written} rows were written to the sink, not {new}")
        return taken

    @staticmethod
    def _check(receipts: Sequence[ragfence.Receipt], chunked: int, new: int) -> None:
        decisions = [receipt.decision for receipt in receipts]
        found = decisions.count(ragfence.Decision.NEW), decisions.count(ragfence.Decision.DUPLICATE), chunked
        if found != (new, len(receipts) - new, new):
            raise RuntimeError(f"(new, duplicate, chunked) of {len(receipts)} documents: {found}; {new} are new")
        if not all(receipt.snippet_ids for receipt in receipts):
            raise RuntimeError("a receipt has no snippet_ids")


def document(each: Text) -> ragfence.Document:
    return ragfence.Document(each.doc_id, each.text, each.metadata)


@contextlib.contextmanager
def ours(
    url: str,
    folder: Path,
    *,
    tenant: str = "default",
    batch: int | None = None,
    chunker: WholeText | None = None,
    sink: CountingSink | None = None,
    objects: Any = None,
) -> Iterator[Ours]:
    """On Redis and a folder, unless another object store is given. The audit cannot be turned off."""
    behind = folder / "objects" if objects is None else objects
    with ragfence.open(url, objects=behind, tenant=tenant, journal=folder / "journal") as fence:
        yield Ours(fence, chunker or WholeText(), sink, batch)
