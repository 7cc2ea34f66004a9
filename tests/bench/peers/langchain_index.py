"""LangChain's `index()` with an `SQLRecordManager` on SQLite, as its documentation has it.

    argv[1]  the folder of the SQLite files

Set up for speed: batches of 1,000 (of 500 to 5,000 none stood out; 100 and 200 are slower), SHA-256 keys (neither the
default SHA-1, which it warns of, nor BLAKE2b is faster), an embedder and a vector store that count and do nothing else.
`cleanup="incremental"`, so that the old version of a changed document goes, as with the others. Without it, known
documents take the same CPU time, and new ones perhaps a sixth less: the median said so, the minimum the opposite.
It takes whatever was split before, and its ids are those of the content, so a race has nothing more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from langchain_classic.indexes import SQLRecordManager
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.indexing import index
from langchain_core.vectorstores import VectorStore

from tests.bench.peers.corpus import Text
from tests.bench.peers.worker import Counts, serve

PACKAGES = ("langchain-core", "langchain-classic", "sqlalchemy")
BATCH = 1_000
VECTOR = [0.0]


class CountingEmbeddings(Embeddings):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self._worker.counts.embeds += len(texts)
        return [VECTOR] * len(texts)

    def embed_query(self, text: str) -> list[float]:
        return VECTOR


class CountingStore(VectorStore):
    def __init__(self, worker: Worker) -> None:
        self._worker, self._embeddings = worker, CountingEmbeddings(worker)

    def add_documents(self, documents: list[Document], **more: Any) -> list[str]:
        self._embeddings.embed_documents([document.page_content for document in documents])
        ids: list[str] = more["ids"]
        self._worker.counts.rows += ids
        return ids

    def delete(self, ids: list[str] | None = None, **more: Any) -> bool:
        return True

    def similarity_search(self, query: str, k: int = 4, **more: Any) -> list[Document]:
        raise NotImplementedError

    @classmethod
    def from_texts(cls, texts: Iterable[str], embedding: Embeddings, *_: Any, **more: Any) -> CountingStore:
        raise NotImplementedError


class Worker:
    def __init__(self, folder: Path) -> None:
        self.counts = Counts()
        self._folder, self._store = folder, CountingStore(self)

    def ready(self, state: str, how: str, documents: Iterable[Text], *, race: bool) -> Callable[[], object]:
        made = [Document(page_content=each.text, metadata=each.metadata, id=each.doc_id) for each in documents]
        manager = SQLRecordManager("bench", db_url=f"sqlite:///{self._file(state)}")
        manager.create_schema()
        return lambda: index(
            made,
            manager,
            self._store,
            batch_size=BATCH,
            cleanup="incremental",
            source_id_key="source",
            key_encoder="sha256",
        )

    def forget(self, state: str, how: str) -> None:
        self._file(state).unlink(missing_ok=True)

    def _file(self, state: str) -> Path:
        return self._folder / f"{state}.sqlite"


if __name__ == "__main__":
    serve(Worker(Path(sys.argv[1])), PACKAGES)
