"""LlamaIndex's `IngestionPipeline` with a document store on Redis, as its documentation has it.

    argv[1]  the server's URL; a question says how: "upserts" or "duplicates_only"

Set up for speed: hiredis, writes pipelined by 1,000 (its own default is one by one, more than twice as slow), no cache
of transformations, an embedder and a vector store that count and do nothing else. It stores the texts, as by default.
Documents are their own nodes, so splitting is free; in a race its `SentenceSplitter` makes nodes with ids of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import redis
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, Document, TransformComponent
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from llama_index.storage.docstore.redis import RedisDocumentStore
from llama_index.storage.kvstore.redis import RedisKVStore
from pydantic import PrivateAttr

from tests.bench.peers.corpus import Text
from tests.bench.peers.worker import Counts, serve

PACKAGES = ("llama-index-core", "llama-index-storage-docstore-redis", "redis", "hiredis")
BATCH = 1_000
VECTOR = [0.0]


class CountingEmbedder(TransformComponent):
    _worker: Worker = PrivateAttr()

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def __call__(self, nodes: Sequence[BaseNode], **more: Any) -> Sequence[BaseNode]:
        self._worker.counts.embeds += len(nodes)
        for node in nodes:
            node.embedding = VECTOR
        return nodes


class CountingStore(BasePydanticVectorStore):
    stores_text: bool = True
    _worker: Worker = PrivateAttr()

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    @property
    def client(self) -> Any:
        return None

    def add(self, nodes: Sequence[BaseNode], **more: Any) -> list[str]:
        ids = [node.node_id for node in nodes]
        self._worker.counts.rows += ids
        return ids

    def delete(self, ref_doc_id: str, **more: Any) -> None:
        pass

    def query(self, query: Any, **more: Any) -> Any:
        raise NotImplementedError


class Worker:
    def __init__(self, url: str) -> None:
        self.counts = Counts()
        self._kvstore, self._client = RedisKVStore(url), redis.Redis.from_url(url)
        self._embedder, self._store = CountingEmbedder(self), CountingStore(self)

    def ready(self, state: str, how: str, documents: Iterable[Text], *, race: bool) -> Callable[[], object]:
        made = [Document(id_=each.doc_id, text=each.text, metadata=each.metadata) for each in documents]
        pipeline = IngestionPipeline(
            transformations=[SentenceSplitter(), self._embedder] if race else [self._embedder],
            docstore=RedisDocumentStore(self._kvstore, namespace=_namespace(state, how), batch_size=BATCH),
            vector_store=self._store,
            docstore_strategy=DocstoreStrategy(how),
            disable_cache=True,
        )
        self._kvstore.get("connected?")
        return lambda: pipeline.run(documents=made)

    def forget(self, state: str, how: str) -> None:
        for name in self._client.scan_iter(f"{_namespace(state, how)}/*"):
            self._client.unlink(name)


def _namespace(state: str, how: str) -> str:
    return f"llamaindex-{how}-{state}"


if __name__ == "__main__":
    serve(Worker(sys.argv[1]), PACKAGES)
