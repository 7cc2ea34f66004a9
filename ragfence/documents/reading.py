"""What is stored of documents: their descriptions out of the log, their snippets, and who is live.

Who is live is asked of the fence store; everything else is in the segment that a record names, so reading one document
costs a few objects however many there are. A compaction may move segments away between the two: then it is asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from ragfence.core.canonical import parse_json
from ragfence.core.decisions import Mode
from ragfence.core.hashing import SHARDS
from ragfence.core.operations import Fence
from ragfence.core.records import Head, KeyRecord, SourceRecord
from ragfence.documents.identity import Identity, snippet_texts
from ragfence.documents.parquet import decode_snippets, whole_rows
from ragfence.documents.segments import INGEST, Address, Layout, Snippet, address_in, stored_in
from ragfence.engine.epochs import Epochs
from ragfence.engine.hydration import Hydrator
from ragfence.engine.segment_log import LogRow
from ragfence.errors import FormatCorrupt, StoreUnavailable
from ragfence.stores.fences import FenceStore, Lookup
from ragfence.stores.objects import ObjectStore

ATTEMPTS = 3
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """The live revision of a document, without its text."""

    doc_id: str
    key: str
    content_hash: str
    size: int
    """of the text, in bytes"""
    metadata: dict[str, Any]
    source_url: str
    content_type: str
    sequence: int | None
    recipe: str
    snippet_ids: tuple[str, ...]
    updated_ms: int
    fence: str


@dataclass(frozen=True, slots=True)
class StoredSnippet:
    """A snippet of a live document: `text` is `document_text[start:end]` of its normalised text."""

    snippet_id: str
    doc_id: str
    text: str
    start: int
    end: int
    section_id: str
    ordinal: int
    tokens: int
    source_url: str


class Moved(Exception):
    """A segment was compacted away while it was looked for."""


class Reading:
    def __init__(
        self,
        fences: FenceStore,
        objects: ObjectStore,
        epochs: Epochs,
        hydrator: Hydrator,
        identity: Identity,
        layout: Layout,
    ) -> None:
        self._fences = fences
        self._objects = objects
        self._epochs = epochs
        self._hydrator = hydrator
        self._identity = identity
        self._layout = layout

    def get(self, doc_id: str) -> StoredDocument | None:
        return self._again(lambda: self._get(doc_id))

    def snippets(self, doc_id: str) -> list[StoredSnippet]:
        return self._again(lambda: self._snippets(doc_id))

    def head(self, doc_id: str) -> Head | None:
        """The head of a document as the fence store has it, live or not."""
        source = self.source(doc_id)
        return source.head if source else None

    def source(self, doc_id: str) -> SourceRecord | None:
        self._hydrator.ensure_ready()
        shard, source = self._identity.place(doc_id.encode())
        (held,) = self._fences.read([Lookup(bytes((shard,)) + bytes(32), Mode.DOCUMENT, source)])
        return held.source

    def live(self) -> Iterator[LogRow]:
        """The newest row of every live document, in no order: the fence store says who, the log says what."""
        self._hydrator.ensure_ready()
        wanted: dict[tuple[int, Fence], bytes] = {}
        for shard in range(SHARDS):
            for source, head in self._fences.heads(shard):
                if head.live and head.record:
                    wanted[shard, head.record.fence] = source
        for row in self.log():
            if wanted.pop((row.key[0], row.fence), None) == row.source:
                yield row
        if wanted:
            raise FormatCorrupt(
                f"{len(wanted)} live documents have no row in the log", hint="run `ragfence verify` to see which"
            )

    def log(self) -> Iterator[LogRow]:
        """Every row that counts, with its details."""
        for name in self.segments():
            data = self._objects.get(name)
            if data is None:
                raise StoreUnavailable(f"the segment {name} is listed but cannot be read")
            yield from whole_rows(name, data)

    def segments(self) -> list[str]:
        """The truth: the segments that count now."""
        return self._epochs.truth()

    def described(self, row: LogRow) -> StoredDocument:
        detail = row.detail
        metadata = parse_json(detail.metadata.encode())
        assert isinstance(metadata, dict)
        return StoredDocument(
            doc_id=detail.doc_id,
            key=row.key.hex(),
            content_hash=detail.content_hash,
            size=detail.size,
            metadata=metadata,
            source_url=detail.source_url,
            content_type=detail.content_type,
            sequence=row.sequence,
            recipe=detail.recipe,
            snippet_ids=snippet_texts(detail.ids),
            updated_ms=detail.at_ms,
            fence=str(row.fence),
        )

    def _get(self, doc_id: str) -> StoredDocument | None:
        record = self._live_record(doc_id)
        return self.described(self._row(record, doc_id)) if record else None

    def _snippets(self, doc_id: str) -> list[StoredSnippet]:
        record = self._live_record(doc_id)
        if record is None:
            return []
        url = self._row(record, doc_id).detail.source_url
        stored = stored_in(record)
        made = self._ingest_row(stored.origin, doc_id, stored.ids)
        texts = self._texts(made, stored.origin, doc_id)
        snippets = []
        places = zip(snippet_texts(stored.ids), *made.detail.positions, strict=True)
        for ordinal, (snippet_id, start, end, section) in enumerate(places):
            known = texts[snippet_id]
            snippets.append(
                StoredSnippet(snippet_id, doc_id, known.text, start, end, section, ordinal, known.tokens, url)
            )
        return snippets

    def _live_record(self, doc_id: str) -> KeyRecord | None:
        head = self.head(doc_id)
        return head.record if head and head.live else None

    def _row(self, record: KeyRecord, doc_id: str) -> LogRow:
        for row in self._rows(stored_in(record).row, doc_id):
            if row.fence == record.fence:
                return row
        raise Moved

    def _ingest_row(self, address: Address, doc_id: str, ids: bytes) -> LogRow:
        for row in self._rows(address, doc_id):
            if row.detail.action == INGEST and row.detail.ids == ids:
                return row
        raise Moved

    def _rows(self, address: Address, doc_id: str) -> Iterator[LogRow]:
        name = self._layout.rows_at(address)
        data = self._objects.get(name)
        if data is None:
            raise Moved
        return whole_rows(name, data, doc_id=doc_id)

    def _texts(self, made: LogRow, address: Address, doc_id: str) -> dict[str, Snippet]:
        """The snippets of a revision: those it made, and those it took over from the heads before it."""
        missing = set(snippet_texts(made.detail.ids))
        found: dict[str, Snippet] = {}
        while missing:
            name = self._layout.snippets_at(address)
            if (data := self._objects.get(name)) is not None:
                for snippet in decode_snippets(name, data):
                    if snippet.snippet_id in missing and snippet.doc_id == doc_id:
                        missing.discard(snippet.snippet_id)
                        found[snippet.snippet_id] = snippet
            if not missing:
                break
            if not made.detail.before:
                raise Moved
            made, address = self._followed(made, doc_id)
        return found

    def _followed(self, row: LogRow, doc_id: str) -> tuple[LogRow, Address]:
        """The ingest row of the head that this row's move replaced, and where it is."""
        address = address_in(row.detail.before)
        for before in self._rows(address, doc_id):
            if before.fence < row.fence and before.live:
                at = address_in(before.detail.origin) if before.detail.origin else address
                return self._ingest_row(at, doc_id, before.detail.ids), at
        raise Moved

    def _again(self, read: Callable[[], Found]) -> Found:
        for _ in range(ATTEMPTS):
            try:
                return read()
            except Moved:
                continue
        raise FormatCorrupt(
            "the log does not hold what the fence store says of it",
            hint="run `ragfence verify` to see what is missing",
        )
