"""A fence, a backend in a folder, and builds that were sealed by hand, for tests of aliases and gc."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import ragfence
from ragfence.indexes.aliases import Aliases
from ragfence.indexes.backends.backend import Shape, row_schema
from ragfence.indexes.build_log import Attempt, BuildEntry, BuildLog, BuildSeal
from ragfence.indexes.catalog import Catalog
from ragfence.indexes.gc import BuildCollector
from tests.indexes.folder_backend import FolderBackend, WordEmbedder

BACKEND = "folder"
TEXTS = (
    "leases expire on the clock of the store",
    "a fence number never goes back",
    "an alias points at a sealed build",
    "documents are ingested once",
    "the catalog is a log of numbers",
)


def hash_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


class AliasWorld:
    def __init__(
        self,
        folder: Path,
        *,
        tenant: str = "default",
        store: Any = None,
        objects: Any = None,
        policy: dict[str, Any] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.fence = ragfence.open(
            store or folder / "fence",
            objects=objects,
            tenant=tenant,
            policy=ragfence.Policy.from_mapping(policy or {}),
            journal=folder / "journal",
        )
        self.engine = self.fence._engine
        assert self.engine.objects is not None
        self.builds = BuildLog(tenant, self.engine.objects)
        self.catalog = Catalog(tenant, self.engine.objects)
        self.backend = FolderBackend(folder / "backend")
        self.other = FolderBackend(folder / "other")
        self.embedders: dict[str, WordEmbedder] = {}
        self.coverage: dict[str, float] = {}
        self.over: set[str] = set()
        """tokens of attempts whose lease has ended"""
        self.aliases = self.new_aliases()
        self.collecting = BuildCollector(
            self.engine, self.builds, self.backend_of, has_expired=lambda attempt: attempt.token in self.over
        )

    def new_aliases(self) -> Aliases:
        """Of somebody who knows nothing yet."""
        return Aliases(
            self.engine,
            self.builds,
            self.backend_of,
            lambda seal: self.embedders.get(seal.index_hash, WordEmbedder()),
            lambda seal: self.coverage.get(seal.index_hash, 1.0),
        )

    def backend_of(self, name: str) -> FolderBackend:
        return {BACKEND: self.backend, "other": self.other}[name]

    def begin(self, name: str, *, at_ms: int | None = None) -> Attempt:
        """Somebody claims the build and begins to write."""
        index_hash, token = hash_of(name), os.urandom(16).hex()
        newest = self.builds.newest(index_hash)
        number = newest.number + 1 if newest else 1
        physical = f"rf-{index_hash[:16]}-{token[:16]}"
        now_ms = self.engine.fences.now_ms() if at_ms is None else at_ms
        attempt = Attempt(index_hash, token, physical, BACKEND, number, now_ms, "builder")
        self.builds.begin(attempt)
        return attempt

    def write(
        self, attempt: Attempt, texts: Sequence[str] = TEXTS, *, embedder: WordEmbedder | None = None
    ) -> BuildSeal:
        embedder = embedder or WordEmbedder()
        rows = [
            {
                "snippet_id": hash_of(text),
                "doc_id": f"doc-{at}",
                "section_id": "",
                "ordinal": 0,
                "start": 0,
                "end": len(text),
                "tokens": len(text.split()),
                "text": text,
                "source_url": "",
                "metadata": "{}",
                "vector": vector,
            }
            for at, (text, vector) in enumerate(zip(texts, embedder.embed(texts).tolist(), strict=True))
        ]
        table = pa.Table.from_pylist(rows, schema=row_schema(embedder.dimension))
        self.embedders[attempt.index_hash] = embedder
        self.backend_of(attempt.backend).write(attempt.physical, Shape(embedder.dimension), [table])
        return BuildSeal(
            index_hash=attempt.index_hash,
            physical=attempt.physical,
            backend=attempt.backend,
            rows=len(rows),
            documents=len(rows),
            dimension=embedder.dimension,
            metric="cosine",
            content_digest="",
            corpus_digest="",
        )

    def seal(self, attempt: Attempt, seal: BuildSeal) -> bool:
        now_ms = self.engine.fences.now_ms()
        entry = BuildEntry(attempt.number, "sealed", now_ms, attempt.owner, attempt.token, seal)
        return self.builds.append(attempt.index_hash, entry)

    def build(self, name: str, texts: Sequence[str] = TEXTS, *, embedder: WordEmbedder | None = None) -> str:
        """A build from beginning to end; its INDEX_HASH."""
        attempt = self.begin(name)
        seal = self.write(attempt, texts, embedder=embedder)
        assert self.seal(attempt, seal)
        self.builds.forget_attempt(attempt)
        return attempt.index_hash

    def physical(self, index_hash: str) -> str:
        entry = self.builds.newest(index_hash)
        assert entry is not None
        assert entry.seal is not None
        return entry.seal.physical

    def close(self) -> None:
        self.fence.close()
