"""The identity of a document: its key, its source, its fingerprint, and the ids of its snippets.

A document's key is the key of an ordinary operation (kind `document`, the content hash as revision, the recipe as
index_hash), so whatever finds operations finds documents. It is computed for a million documents in a row, so the
common prefix of the digests of a tenant and a recipe is framed once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import NamedTuple

import xxhash

from ragfence.core.hashing import SHARDS, Algorithm, ContentKey, content_hash, framed, sized
from ragfence.core.operations import Operation
from ragfence.stores.fences import SOURCE_BYTES

KIND = "document"
INGEST, RETRACT = "ingest", "retract"
SNIPPET_BYTES = 16


_size = struct.Struct(">Q").pack
_SIZES = [_size(size) for size in range(2048)]
"""length prefixes of short parts; longer than an id can be"""
_FIRST = _size(0)
_SNIPPET = framed("ragfence/snippet/1", ())
_SHARD = [bytes((shard,)) for shard in range(SHARDS)]


class SourcePlace(NamedTuple):
    """Where a document is stored in the fence store."""

    shard: int
    source: bytes


class Content(NamedTuple):
    """The part of a document that decides whether it is new."""

    hash: str
    size: int
    """of the hashed bytes; compared in addition to the hash"""


class Identity:
    """The digests of one tenant's documents.

    Keys, sources and snippet ids are sha256. Fingerprint and metadata hash, which are only compared within one key, use
    the tenant's content hash: xxh3 for trusted pipelines, sha256 if documents come from strangers. With hmac, every
    digest of text or metadata is keyed; a key is the sha256 of such a content hash.
    """

    def __init__(
        self,
        tenant: str,
        algorithm: Algorithm,
        key: ContentKey | None = None,
        *,
        first: Callable[[], Algorithm] | None = None,
    ) -> None:
        """`first` returns the algorithm of the tenant's first document, which may have changed since."""
        self.tenant = tenant
        self.algorithm = algorithm
        self._compared, self._hash = _functions_of(algorithm, key)
        self._content_key = key
        tenant_bytes = tenant.encode()
        # `framed` joins a tag and length-prefixed parts, so a prefix of it can be made once.
        self._shard = framed("ragfence/shard/1", (tenant_bytes,))
        self._source = framed("ragfence/document-source/1", (tenant_bytes,))
        self._key = framed("ragfence/operation/1", (tenant_bytes, KIND.encode(), b""))
        self._fingerprint = framed("ragfence/document/1", ())
        self._metadata = framed("ragfence/metadata/1", ())
        self._first = first or (lambda: algorithm)
        self._described: dict[str, bytes] = {}
        """by content type: the last part of what the metadata hash of a document without a URL covers"""

    def digests(
        self, doc_id: bytes, content_hash: str, size: int, tail: bytes, metadata: bytes, url: str, content_type: str
    ) -> tuple[bytes, bytes, bytes, bytes]:
        """Key, source, fingerprint and metadata hash at once, in half the time of `place`, `key` and the others.

        Called for every document. A property test proves that both ways agree.
        """
        name, revision = _SIZES[len(doc_id)] + doc_id, content_hash.encode()
        rest = _SIZES[len(revision)] + revision
        described = self._described.get(content_type) if url == "" else None
        if described is None:
            described = self._describe(url, content_type)
        return (
            _SHARD[xxhash.xxh3_64_intdigest(self._shard + name) % SHARDS]
            + sha256(b"%b%b%b%b" % (self._key, name, rest, tail)).digest(),
            sha256(self._source + name).digest()[:SOURCE_BYTES],
            self._compared(b"%b%b%b" % (self._fingerprint, rest, _size(size))),
            self._compared(b"%b%b%b%b" % (self._metadata, _size(len(metadata)), metadata, described)),
        )

    def _describe(self, url: str, content_type: str) -> bytes:
        parts = url.encode(), content_type.encode()
        described = b"%b%b%b%b" % (_size(len(parts[0])), parts[0], _size(len(parts[1])), parts[1])
        if url == "":
            if len(self._described) >= 256:  # types come from callers
                self._described.clear()
            self._described[content_type] = described
        return described

    def place(self, doc_id: bytes) -> SourcePlace:
        name = sized(doc_id)
        shard: int = xxhash.xxh3_64_intdigest(self._shard + name) % SHARDS
        return SourcePlace(shard, sha256(self._source + name).digest()[:SOURCE_BYTES])

    def key(self, shard: int, doc_id: bytes, content_hash: str, tail: bytes) -> bytes:
        """The key of a document; `tail` is made by `key_tail`."""
        revision = content_hash.encode()
        sizes = len(doc_id).to_bytes(8, "big"), len(revision).to_bytes(8, "big")
        frame = b"%b%b%b%b%b%b" % (self._key, sizes[0], doc_id, sizes[1], revision, tail)
        return bytes((shard,)) + sha256(frame).digest()

    def fingerprint(self, content: Content) -> bytes:
        revision = content.hash.encode()
        return self._compared(
            b"%b%b%b%b"
            % (self._fingerprint, len(revision).to_bytes(8, "big"), revision, content.size.to_bytes(8, "big"))
        )

    def no_content(self) -> bytes:
        """The fingerprint of what has no content, such as a retraction: it stays if the algorithm changes."""
        compared, _ = _functions_of(self._first(), self._content_key)
        return compared(self._fingerprint + sized(b"") + _size(0))

    def metadata_hash(self, metadata: bytes, source_url: str, content_type: str) -> bytes:
        """Of all that describes a document and is no content: a change of it moves the head and chunks nothing."""
        url, kind = source_url.encode(), content_type.encode()
        sizes = len(metadata).to_bytes(8, "big"), len(url).to_bytes(8, "big"), len(kind).to_bytes(8, "big")
        return self._compared(b"%b%b%b%b%b%b%b" % (self._metadata, sizes[0], metadata, sizes[1], url, sizes[2], kind))

    def content(self, text: bytes) -> Content:
        return Content(self._hash(text), len(text))

    def state(self, state: str) -> str:
        """What is noted of the state of an item: that of S3 is often an MD5 of its content."""
        if self._content_key is None or not state:
            return state
        return self._content_key.digest("ragfence/source-state/1", state.encode("utf-8", "surrogatepass"))[:16].hex()


def _functions_of(
    algorithm: Algorithm, key: ContentKey | None
) -> tuple[Callable[[bytes], bytes], Callable[[bytes], str]]:
    """Two functions: the 16 bytes of what is compared, and the tagged hash of content."""
    if algorithm == "xxh3":
        return xxhash.xxh3_128_digest, lambda data: "xxh3:" + xxhash.xxh3_128_hexdigest(data)
    if algorithm == "sha256":
        return lambda data: sha256(data).digest()[:16], lambda data: "sha256:" + sha256(data).hexdigest()
    if key is None:
        raise ValueError("the content hash is keyed, but there is not a key")
    return lambda data: key.digest_frame(data)[:16], lambda data: content_hash(data, "hmac", key)


def operation_of(tenant: str, doc_id: str, content_hash: str, recipe: str, action: str = INGEST) -> Operation:
    """The operation whose key is the document's."""
    return Operation(
        kind=KIND, source_id=doc_id, revision=content_hash, index_hash=recipe, action=action, tenant=tenant
    )


def key_tail(recipe: str, action: str = INGEST) -> bytes:
    """The last part of what the key of every document with this recipe covers."""
    whole = framed("ragfence/operation/1", (recipe.encode(), action.encode()))
    return whole[len(framed("ragfence/operation/1", ())) :]


def snippet_ids(doc_id: str, recipe: bytes, texts: Sequence[str], key: ContentKey | None = None) -> list[bytes]:
    """The ids of snippets, made from their texts: an edited document keeps the ids of its unchanged snippets.

    Equal texts in one document get different ids, by their number among them.
    """
    start = b"%b%b%b" % (_SNIPPET, sized(doc_id.encode()), sized(recipe))
    made = _sha256 if key is None else key.digest_frame
    if len(texts) == 1:  # short documents have one, and most documents are short
        data = texts[0].encode()
        return [made(b"%b%b%b%b" % (start, _size(len(data)), data, _FIRST))[:SNIPPET_BYTES]]
    seen: dict[str, int] = {}
    ids = []
    for text in texts:
        number = seen[text] = seen.get(text, -1) + 1
        data = text.encode()
        frame = b"%b%b%b%b" % (start, _size(len(data)), data, _size(number))
        ids.append(made(frame)[:SNIPPET_BYTES])
    return ids


def _sha256(frame: bytes) -> bytes:
    return sha256(frame).digest()


def snippet_texts(ids: bytes) -> tuple[str, ...]:
    """Concatenated ids as text: 32 hex digits each, which is also a valid UUID."""
    if len(ids) == SNIPPET_BYTES:  # as most have
        return (ids.hex(),)
    return tuple(ids.hex("-", SNIPPET_BYTES).split("-")) if ids else ()
