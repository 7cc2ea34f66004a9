"""The log of documents: its objects, the contents of a row, and the result in a sealed record.

    <tenant>/segments/<epoch>/<batch>   rows; the commit point of a batch
    <tenant>/snippets/<epoch>/<batch>   the texts of the snippets that the batch made; written first

A row is one head move. Positions belong to the revision, so they are in its `ingest` row; `revive` and `metadata`
rows name the segment of that row (`origin`). Everything is readable with DuckDB, Polars or pandas: see docs/formats.md.

The record of a document in the fence store holds, as its result, the ids of its snippets and where its rows are:

    d ids                       the row and the positions are in the segment that epoch and token of the record name
    e origin:16 ids             the positions are in another segment
    x row:16 origin:16 ids      after a compaction: both are in other segments
    D, E, X                     the same, with owner:8 after the letter: the source that owns the document

The owner is the digest of an origin's name (see `origins`); a document that was never synced from a source has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ragfence.core.layout import BATCH_BYTES, ELSEWHERE, HERE, MOVED, ids_in, owner_and_addresses, pack_address
from ragfence.core.operations import encoded
from ragfence.core.records import KeyRecord
from ragfence.errors import FormatCorrupt

INGEST, REVIVE, METADATA, RETRACT, PURGE = "ingest", "revive", "metadata", "retract", "purge"

NO_OWNER = b""


class Address(NamedTuple):
    """A segment: the epoch in its name, and its batch."""

    epoch: int
    batch: bytes

    def encode(self) -> bytes:
        return pack_address(self.epoch, self.batch)

    @property
    def text(self) -> str:
        return f"{self.epoch:020d}/{self.batch.hex()}"


def address_in(name: str) -> Address:
    """Parses an object name, or the text of an address: both end in <epoch>/<batch>."""
    try:
        *_, epoch, batch = name.split("/")
        return Address(int(epoch), bytes.fromhex(batch))
    except ValueError as broken:
        raise FormatCorrupt(f"{name!r} is not the name of a segment") from broken


class StoredResult(NamedTuple):
    """The result in the record of a document: its snippets, and the segments of its newest row and its positions."""

    row: Address
    origin: Address
    ids: bytes
    """concatenated"""
    owner: bytes = NO_OWNER
    """the digest of the origin that owns the document"""


def stored_in(record: KeyRecord) -> StoredResult:
    result = record.result
    here = Address(record.fence.epoch, record.token[:BATCH_BYTES])
    if result[:1] == HERE or not result:
        return StoredResult(here, here, ids_in(result))
    owner, addresses = owner_and_addresses(result)
    row, origin = here, here
    if addresses:
        origin = Address(*addresses[-1])
    if len(addresses) > 1:
        row = Address(*addresses[0])
    return StoredResult(row, origin, ids_in(result), owner)


def result_of(ids: bytes, origin: Address | None = None, row: Address | None = None, owner: bytes = NO_OWNER) -> bytes:
    if row is not None:
        tag, rest = MOVED, row.encode() + (origin or row).encode()
    elif origin is not None:
        tag, rest = ELSEWHERE, origin.encode()
    else:
        tag, rest = HERE, b""
    return b"%b%b%b%b" % (tag.upper() if owner else tag, owner, rest, ids)


class Positions(NamedTuple):
    """The positions of a revision's snippets in its normalised text, in their order."""

    starts: Sequence[int]
    ends: Sequence[int]
    sections: Sequence[str]


NO_POSITIONS = Positions((), (), ())


class Detail(NamedTuple):
    """The part of a log row that the engine does not interpret."""

    doc_id: str
    action: str
    content_hash: str
    size: int
    metadata: str
    source_url: str
    content_type: str
    recipe: str
    at_ms: int
    ids: bytes
    positions: Positions = NO_POSITIONS
    dead: bytes = b""
    """the ids that die with this move"""
    origin: str = ""
    """the segment that holds the positions; empty if it is this one"""
    before: str = ""
    """the segment of the head that this move followed"""
    fresh: Sequence[tuple[bytes, str]] = ()
    """id and text of snippets that are not stored yet; they go into the snippets object, not into the row"""
    owner: str = ""
    """the digest of the origin that owns the document, in hex"""


class Snippet(NamedTuple):
    """The immutable part of a snippet."""

    snippet_id: str
    doc_id: str
    recipe: str
    text: str
    tokens: int
    """an estimate that needs no tokenizer: a quarter of the bytes in UTF-8, rounded up"""


def estimated_tokens(text: str) -> int:
    """Estimates the tokens of one text, as `encode_snippets` does for many."""
    return ((len(text) if text.isascii() else len(text.encode())) + 3) // 4


class Layout:
    """The names of one tenant's objects."""

    def __init__(self, tenant: str) -> None:
        self.segments = f"{encoded(tenant)}/segments"
        self.snippets = f"{encoded(tenant)}/snippets"
        self.vectors = f"{encoded(tenant)}/vectors"
        """<embedder>/<epoch>/<batch>: of the snippets there; see ragfence.indexes.vectors"""
        self.kept_vectors = f"{encoded(tenant)}/vectors-kept"
        self.vector_parts = f"{encoded(tenant)}/vectors-parts"
        """<embedder>/<epoch>/<batch>/<part>"""

    def rows_at(self, address: Address) -> str:
        return f"{self.segments}/{address.text}"

    def snippets_at(self, address: Address) -> str:
        return f"{self.snippets}/{address.text}"
