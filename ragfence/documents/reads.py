"""Reads of stored documents: their descriptions, their snippets, and which of them are live.

The fence store knows which documents are live; everything else is in the segment that a record names, so reading one
document takes a few objects, however many there are. If a compaction moves segments away in between, the read starts
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from ragfence.core.canonical import parse_json
from ragfence.core.decisions import Mode
from ragfence.core.document import StoredSnippet
from ragfence.core.hashing import SHARDS
from ragfence.core.operations import FenceNumber, checked_text
from ragfence.core.records import Head, KeyRecord, SourceRecord
from ragfence.documents.identity import Identity, snippet_texts
from ragfence.documents.log import INGEST, Address, Layout, Snippet, address_in, stored_in
from ragfence.documents.parquet import decode_snippets, whole_rows
from ragfence.engine.hydration import TenantStores
from ragfence.engine.segment_log import LogRow
from ragfence.errors import FormatCorrupt, StoreUnavailable
from ragfence.stores.fences import Lookup

ATTEMPTS = 3
T = TypeVar("T")


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


class SegmentMoved(Exception):
    """A segment was compacted away while it was being read."""


class DocumentReads:
    def __init__(self, stores: TenantStores, identity: Identity) -> None:
        self._fences = stores.fences
        self._objects = stores.objects
        self._epochs = stores.epochs
        self._hydrator = stores.hydrator
        self._identity = identity
        self._layout = Layout(stores.tenant)

    def get(self, doc_id: str) -> StoredDocument | None:
        stored_as = checked_text("doc_id", doc_id)  # a path from another system may be in NFD
        return self._again(lambda: self._get(stored_as))

    def snippets(self, doc_id: str) -> list[StoredSnippet]:
        stored_as = checked_text("doc_id", doc_id)
        return self._again(lambda: self._snippets(stored_as))

    def head(self, doc_id: str) -> Head | None:
        """Returns the head of a document in the fence store, live or not."""
        source = self.source(doc_id)
        return source.head if source else None

    def source(self, doc_id: str) -> SourceRecord | None:
        self._hydrator.ensure_ready()
        shard, source = self._identity.place(doc_id.encode())
        (held,) = self._fences.read([Lookup(bytes((shard,)) + bytes(32), Mode.DOCUMENT, source)])
        return held.source

    def live(self) -> Iterator[LogRow]:
        """Yields the newest row of every live document, in no particular order."""
        self._hydrator.ensure_ready()
        wanted: dict[tuple[int, FenceNumber], bytes] = {}
        for shard in range(SHARDS):
            for source, head in self._fences.heads(shard):
                if head.live and head.record:
                    wanted[shard, head.record.fence] = source
        for _ in range(ATTEMPTS):
            segments = self.segments()
            try:
                for row in self._whole_rows(segments):
                    if wanted.pop((row.key[0], row.fence), None) == row.source:
                        yield row
            except StoreUnavailable:
                # The log was rewritten, old objects are gone. Rows keep their fences: the next attempt finds the rest.
                if self.segments() == segments:
                    raise
                continue
            if not (wanted := self._moved_on(wanted)):
                return
        raise FormatCorrupt(
            f"{len(wanted)} live documents have no row in the log", hint="run `ragfence verify` to see which"
        )

    def _moved_on(self, missing: dict[tuple[int, FenceNumber], bytes]) -> dict[tuple[int, FenceNumber], bytes]:
        """Reads heads without a row again: a compaction may have dropped revisions superseded in the meantime."""
        if missing:
            self._hydrator.ensure_ready()
        lookups = [Lookup(bytes((shard,)) + bytes(32), Mode.DOCUMENT, source) for (shard, _), source in missing.items()]
        heads = [held.source.head if held.source else None for held in self._fences.read(lookups)]
        return {
            (shard, head.record.fence): source
            for ((shard, _), source), head in zip(missing.items(), heads, strict=True)
            if head and head.live and head.record
        }

    def log(self) -> Iterator[LogRow]:
        """Yields every row of the log, with its details."""
        return self._whole_rows(self.segments())

    def _whole_rows(self, segments: Iterable[str]) -> Iterator[LogRow]:
        for name in segments:
            data = self._objects.get(name)
            if data is None:
                raise StoreUnavailable(f"the segment {name} is listed but cannot be read")
            yield from whole_rows(name, data)

    def segments(self) -> list[str]:
        """Returns the names of the segments that are part of the log now."""
        return self._epochs.truth()

    def describe(self, row: LogRow) -> StoredDocument:
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
        return self.describe(self._row(record, doc_id)) if record else None

    def _snippets(self, doc_id: str) -> list[StoredSnippet]:
        record = self._live_record(doc_id)
        if record is None:
            return []
        row, stored = self._row(record, doc_id), stored_in(record)
        made, address = self._ingest_row(stored.origin, doc_id, row.key)
        texts = self._texts(made, address, doc_id)
        snippets = []
        places = zip(snippet_texts(stored.ids), *made.detail.positions, strict=True)
        for ordinal, (snippet_id, start, end, section) in enumerate(places):
            known = texts[snippet_id]
            snippets.append(
                StoredSnippet(
                    snippet_id, doc_id, known.text, start, end, section, ordinal, known.tokens, row.detail.source_url
                )
            )
        return snippets

    def _live_record(self, doc_id: str) -> KeyRecord | None:
        head = self.head(doc_id)
        return head.record if head and head.live else None

    def _row(self, record: KeyRecord, doc_id: str) -> LogRow:
        _, rows = self._rows(stored_in(record).row, doc_id)
        for row in rows:
            if row.fence == record.fence:
                return row
        raise SegmentMoved

    def _ingest_row(self, address: Address, doc_id: str, key: bytes) -> tuple[LogRow, Address]:
        address, rows = self._rows(address, doc_id)
        for row in rows:
            # By the key, not by the ids: revisions that differ only in white space share snippets at other positions.
            if row.detail.action == INGEST and row.key == key:
                return row, address
        raise SegmentMoved

    def _rows(self, address: Address, doc_id: str) -> tuple[Address, Iterator[LogRow]]:
        """Returns the rows of the document in a segment, and the present address of the segment."""
        name = self._layout.rows_at(address)
        data = self._objects.get(name)
        if data is None:
            # A purge rewrites segments in a new epoch, with the same batch in their names.
            name = next((each for each in reversed(self.segments()) if address_in(each).batch == address.batch), "")
            data = self._objects.get(name) if name else None
        if data is None:
            raise SegmentMoved
        return address_in(name), whole_rows(name, data, doc_id=doc_id)

    def _texts(self, made: LogRow, address: Address, doc_id: str) -> dict[str, Snippet]:
        """Returns the snippets of a revision: those it made, and those it shares with earlier heads."""
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
                raise SegmentMoved
            made, address = self._followed(made, doc_id)
        return found

    def _followed(self, row: LogRow, doc_id: str) -> tuple[LogRow, Address]:
        """Returns the ingest row of the head that this row replaced, and its address."""
        address, rows = self._rows(address_in(row.detail.before), doc_id)
        # A compacted segment may hold several revisions of a document: the row replaced the newest earlier one.
        earlier = [each for each in rows if each.live and each.fence < row.fence]
        if not earlier:
            raise SegmentMoved
        before = max(earlier, key=lambda each: each.fence)
        origin = address_in(before.detail.origin) if before.detail.origin else address
        return self._ingest_row(origin, doc_id, before.key)

    def _again(self, read: Callable[[], T]) -> T:
        for _ in range(ATTEMPTS):
            try:
                return read()
            except SegmentMoved:
                continue
        raise FormatCorrupt(
            "the log does not hold the rows that the fence store names",
            hint="run `ragfence verify` to see what is missing",
        )
