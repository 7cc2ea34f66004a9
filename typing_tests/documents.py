"""`fence.documents`: what each call returns, by its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import assert_type

from ragfence import Document, Fence, Receipt

DOCUMENTS = [Document(doc_id="a", text="A lease expires.")]


def calls(fence: Fence) -> None:
    documents = fence.documents
    assert_type(documents.ingest(DOCUMENTS[0]), Receipt)
    assert_type(documents.ingest(DOCUMENTS[0]).snippet_ids, tuple[str, ...])
    assert_type(documents.ingest_many(DOCUMENTS), Sequence[Receipt])
    assert_type(documents.ingest_many(DOCUMENTS, stream=False), Sequence[Receipt])
    assert_type(documents.ingest_many(DOCUMENTS, stream=True), Iterator[Receipt])
    assert_type(documents.retract("a"), Receipt)
    documents.ingest("a")  # type: ignore[arg-type]
    documents.ingest_many(DOCUMENTS, streaming=True)  # type: ignore[call-overload]


def searches(fence: Fence) -> None:
    for hit in fence.search("docs", "How does a lease expire?", k=3):
        assert_type(hit.doc_id, str)
        assert_type(hit.score, float)
