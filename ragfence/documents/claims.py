"""Claims of documents: a document is validated, hashed and addressed, a million times in a row.

Optimistic concurrency: a document is moved only if it is still at the version that its caller has read. A version is
the fence number of the head (`Receipt.fence`, `StoredDocument.fence`), which no two moves share. It is compared under
the lease, when no other process can move the head; the check before that only spares most callers an attempt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from ragfence.core.canonical import canonical_json, parse_json
from ragfence.core.decisions import Claim, Granted, HeadQuery, Mode
from ragfence.core.document import CheckedDocument, Document, DocumentLimits, checked
from ragfence.core.hashing import ContentKey, framed
from ragfence.core.layout import NO_METADATA
from ragfence.core.operations import checked_text
from ragfence.core.policy import DocumentRules, KindRules
from ragfence.core.records import Head
from ragfence.core.redaction import CleanJson, Redaction
from ragfence.documents.chunking.chunker import Chunker, MarkdownChunker, Recipe, TextChunker
from ragfence.documents.identity import INGEST, KIND, RETRACT, Content, Identity, key_tail
from ragfence.documents.origins import Origin
from ragfence.engine.batch_commit import Declined, FinishedEffect
from ragfence.engine.requests import acting_key
from ragfence.errors import DocumentMoved, ValidationError
from ragfence.stores.fences import FenceStore, Lookup

_quoted: Callable[[str], str] = json.encoder.encode_basestring
MARKDOWN_TYPES = frozenset({"text/markdown", "text/html"})
"""An HTML page becomes Markdown, headings included, before it becomes a document."""


class Recipes:
    """The chunker of each content type: one for all types, or the default ones."""

    def __init__(self, chunker: Chunker | None, rules: DocumentRules, key: ContentKey | None = None) -> None:
        size, overlap = rules.chunk_size, rules.chunk_overlap
        self._text = ChunkerRecipe.by(chunker or TextChunker(size=size, overlap=overlap), key)
        self._markdown = self._text if chunker else ChunkerRecipe.by(MarkdownChunker(size=size, overlap=overlap), key)

    def of(self, content_type: str) -> ChunkerRecipe:
        return self._markdown if content_type in MARKDOWN_TYPES else self._text


class ChunkerRecipe(NamedTuple):
    """A chunker with everything that is derived from it once."""

    chunker: Chunker
    recipe: Recipe
    name: str
    """the digest of the recipe, as in rows and keys"""
    key_tail: bytes
    content_key: ContentKey | None
    """for a tenant whose snippet ids are keyed"""

    @classmethod
    def by(cls, chunker: Chunker, key: ContentKey | None = None) -> ChunkerRecipe:
        recipe = Recipe.of(chunker)
        name = recipe.digest.hex()
        return cls(chunker, recipe, name, key_tail(name), key)


class Retraction(NamedTuple):
    """A document that is to be retracted, among others that are ingested."""

    doc_id: str
    sequence: int | None = None


class GivenDocument(NamedTuple):
    """One of several documents that are ingested, or retracted, together for different callers."""

    document: Document | CheckedDocument | Retraction
    waited_s: float = 0.0
    """how long it has waited already; reported in its error"""
    event_id: str = ""
    """stored in its decision rows"""
    api_key: str = ""
    """the id of the API key it was sent with; stored there as well"""
    correlation_id: str = ""
    """stored there, instead of that of the fence"""


DocumentQuery = tuple[HeadQuery, CheckedDocument, Content, ChunkerRecipe]
"""asks whether a document is live as it was sent; a plain tuple, since one is made for every document"""


class PreparedDocument(NamedTuple):
    """A document with its claim."""

    doc: CheckedDocument
    content: Content
    cut: ChunkerRecipe
    claim: Claim
    origin: Origin | None = None
    """the source of a `sync` that brings it"""
    expected: Expected | None = None
    """the version it must be at, see `require_version`"""
    under_other_hash: Callable[[PreparedDocument], PreparedDocument] | None = None
    """the same document by the other content hash, while a tenant has two"""
    is_second: bool = False
    """by the content hash that documents are only recognised by, not written with"""

    def suited_to(self, head: Head | None) -> PreparedDocument:
        """Returns the document by the content hash that its head is known by, if it is live with this content.

        Without such a head: by the one that documents are written with.
        """
        if self.under_other_hash is None or (head is not None and head.live and head.digest == self.claim.digest):
            return self
        other = self.under_other_hash(self)
        if head is not None and head.live and head.digest == other.claim.digest:
            return other
        return other if self.is_second else self


class OtherHash(Declined):
    """The head of the document calls for the other content hash: the move has to be claimed by that."""

    def __init__(self, subject: PreparedDocument) -> None:
        super().__init__("the document is known by another content hash")
        self.subject = subject


class ClaimBuilder:
    def __init__(
        self,
        identity: Identity,
        rules: DocumentRules,
        kind_rules: KindRules,
        recipes: Recipes,
        redaction: Redaction,
        also: Identity | None = None,
    ) -> None:
        """`also`: by which documents are recognised as well, while a tenant has two content hashes."""
        self._clean = CleanJson(redaction)
        self.identity = identity
        self.also = also
        self._limits = DocumentLimits.of(rules)
        self._content_fields = rules.content_fields
        self.kind_rules = kind_rules
        self.recipes = recipes

    def check(self, document: Document, position: int | None = None) -> CheckedDocument:
        """Returns the document as it is stored. Raises `DocumentInvalid`, which names the document."""
        return checked(document, self._limits, position=position, clean=self._clean)

    def query(
        self,
        document: Document | CheckedDocument,
        token: bytes,
        caller: Caller,
        position: int | None = None,
        event_id: str = "",
        api_key: str = "",
        correlation_id: str = "",
    ) -> DocumentQuery:
        """Builds the query whether it is ingested already. Raises `DocumentInvalid`, which names the document."""
        if isinstance(document, CheckedDocument):
            doc = document
        else:
            doc = checked(document, self._limits, position=position, clean=self._clean)
        doc_id, text, text_bytes, metadata, url, sequence, content_type = doc
        cut = self.recipes.of(content_type)
        hashed, size = content = self.identity.content(self._counted(doc) if self._content_fields else text_bytes)
        key, source, fingerprint, metadata_hash = self.identity.digests(
            doc_id.encode(), hashed, size, cut.key_tail, metadata, url, content_type
        )
        context = caller.context(
            doc_id,
            hashed,
            cut.name,
            sequence,
            len(text),
            event_id=event_id,
            api_key=api_key,
            correlation_id=correlation_id,
        )
        return HeadQuery(key, source, fingerprint, metadata_hash, sequence, token, context), doc, content, cut

    def ingest(
        self, document: Document | CheckedDocument, token: bytes, caller: Caller, event_id: str = ""
    ) -> PreparedDocument:
        """Builds the claim of a document. Raises `DocumentInvalid`, which names the document."""
        return self.claim(self.query(document, token, caller, event_id=event_id), token, caller)

    def claim(
        self, query: DocumentQuery, token: bytes, caller: Caller, origin: Origin | None = None
    ) -> PreparedDocument:
        """Builds the claim of a document that is not ingested yet, with a token of its own."""
        (key, source, fingerprint, metadata_hash, sequence, _, context), doc, content, cut = query
        rules = self.kind_rules
        claim = Claim(
            key,
            fingerprint,
            token,
            Mode.DOCUMENT,
            source,
            sequence,
            metadata_hash,
            False,
            rules.lease_ms,
            rules.max_attempts,
            0,
            0,
            KIND,
            caller.owner,
            b"",
            0,
            0,
            context,
        )
        other = None if self.also is None else self._under_other_hash
        second = self.also is not None and self.identity_of(content.hash) is self.also
        return PreparedDocument(doc, content, cut, claim, origin, None, other, second)

    def suited_to(self, queries: Mapping[int, DocumentQuery], heads: FenceStore) -> dict[int, DocumentQuery]:
        """Returns each query by the content hash that its document is known by; reads the heads if there are two."""
        if self.also is None or not queries:
            return dict(queries)
        held = heads.read([Lookup(query[0].key, Mode.DOCUMENT, query[0].source) for query in queries.values()])
        return {
            at: self.query_suited_to(query, found.source.head if found.source else None)
            for (at, query), found in zip(queries.items(), held, strict=True)
        }

    def query_suited_to(self, query: DocumentQuery, head: Head | None) -> DocumentQuery:
        ask, doc, content, cut = query
        if self.also is None or head is None or not head.live or head.digest == ask.key[1:]:
            return query
        other, (key, _, fingerprint, metadata_hash) = self._digests_under(self.also, doc, cut)
        if head.digest != key[1:]:
            return query
        context = _with_revision(ask.context, content, other)
        return (
            ask._replace(key=key, fingerprint=fingerprint, metadata_hash=metadata_hash, context=context),
            doc,
            other,
            cut,
        )

    def identity_of(self, content_hash: str) -> Identity:
        """The identity that made a content hash, if it is one of the tenant's."""
        if self.also is not None and content_hash.startswith(f"{self.also.algorithm}:"):
            return self.also
        return self.identity

    def _under_other_hash(self, prepared: PreparedDocument) -> PreparedDocument:
        assert self.also is not None
        content, claim = prepared.content, prepared.claim
        identity = self.also if self.identity_of(content.hash) is self.identity else self.identity
        other, (key, _, fingerprint, metadata_hash) = self._digests_under(identity, prepared.doc, prepared.cut)
        context = _with_revision(claim.context, content, other)
        changed = claim._replace(key=key, fingerprint=fingerprint, metadata_hash=metadata_hash, context=context)
        return prepared._replace(content=other, claim=changed, is_second=identity is self.also)

    def _digests_under(
        self, identity: Identity, doc: CheckedDocument, cut: ChunkerRecipe
    ) -> tuple[Content, tuple[bytes, bytes, bytes, bytes]]:
        content = identity.content(self._counted(doc) if self._content_fields else doc.text_bytes)
        digests = identity.digests(
            doc.doc_id.encode(),
            content.hash,
            content.size,
            cut.key_tail,
            doc.metadata,
            doc.source_url,
            doc.content_type,
        )
        return content, digests

    def retract(
        self,
        doc_id: str,
        sequence: int | None,
        token: bytes,
        caller: Caller,
        event_id: str = "",
        correlation_id: str = "",
    ) -> PreparedDocument:
        doc = checked(Document(doc_id, "", sequence=sequence), replace(self._limits, allow_empty_text=True))
        cut, identity = self.recipes.of(doc.content_type), self.identity
        name = doc.doc_id.encode()
        shard, source = identity.place(name)
        content = Content("", 0)
        claim = Claim(
            key=identity.key(shard, name, "", key_tail("", RETRACT)),
            fingerprint=identity.no_content(),
            token=token,
            mode=Mode.DOCUMENT,
            source=source,
            sequence=doc.sequence,
            metadata_hash=NO_METADATA,
            retract=True,
            lease_ms=self.kind_rules.lease_ms,
            max_attempts=self.kind_rules.max_attempts,
            kind=KIND,
            owner=caller.owner,
            context=caller.context(
                doc.doc_id,
                "",
                "",
                doc.sequence,
                0,
                action=RETRACT,
                event_id=event_id,
                correlation_id=correlation_id,
            ),
        )
        return PreparedDocument(doc, content, cut, claim)

    def _counted(self, doc: CheckedDocument) -> bytes:
        """The bytes of the content hash, if the policy lists metadata fields that are part of the content."""
        metadata = parse_json(doc.metadata)
        assert isinstance(metadata, Mapping)
        counted = {name: metadata[name] for name in self._content_fields if name in metadata}
        return framed("ragfence/content/1", (doc.text_bytes, canonical_json(counted)))


def _with_revision(context: bytes, before: Content, after: Content) -> bytes:
    # Quotes inside of values are escaped, so no doc_id contains this.
    return context.replace(f'"revision":"{before.hash}"'.encode(), f'"revision":"{after.hash}"'.encode(), 1)


class Caller:
    """What the decision rows of a call say about its caller."""

    def __init__(self, owner: str, run_id: str, correlation_id: str = "", route: str = "", origin: str = "") -> None:
        self.owner = owner
        self._api_key = acting_key.get()
        self.route = route
        known = {"owner": owner, "run_id": run_id, "route": route, "origin": origin}
        self._rest = "".join(f',"{field}":{_quoted(value)}' for field, value in known.items() if value)
        self._tail = f',"correlation_id":{_quoted(correlation_id)}{self._rest}' if correlation_id else self._rest

    def context(
        self,
        doc_id: str,
        content_hash: str,
        recipe: str,
        sequence: int | None,
        characters: int,
        *,
        action: str = INGEST,
        event_id: str = "",
        api_key: str = "",
        correlation_id: str = "",
    ) -> bytes:
        ordered = "" if sequence is None else f',"sequence":"{sequence}"'
        if event_id:
            ordered += f',"event_id":{_quoted(checked_text("event_id", event_id))}'
        api_key = api_key or self._api_key
        tail = self._tail
        if correlation_id:
            tail = f',"correlation_id":{_quoted(checked_text("correlation_id", correlation_id))}{self._rest}'
        if api_key:
            tail = f'{tail},"api_key":{_quoted(api_key)}'
        return (
            f'{{"kind":"{KIND}","source_id":{_quoted(doc_id)},"revision":"{content_hash}","index_hash":"{recipe}",'
            f'"action":"{action}"{ordered},"characters":{characters}{tail}}}'
        ).encode()


def split_waves(prepared: Mapping[int, PreparedDocument]) -> Iterator[dict[int, PreparedDocument]]:
    """Splits a batch that holds a source twice into successive batches, in the order given."""
    waves: list[dict[int, PreparedDocument]] = []
    seen: dict[tuple[int, bytes], int] = {}
    for at, each in prepared.items():
        place = (each.claim.key[0], each.claim.source)
        wave = seen[place] = seen.get(place, -1) + 1
        if wave == len(waves):
            waves.append({})
        waves[wave][at] = each
    yield from waves


NOTHING = ""
"""the version of a document that does not exist"""
ANY = "*"
"""expects that the document exists, at any version"""

Expected = str | frozenset[str]
"""a version, or several of which any is accepted"""

Effect = Callable[[PreparedDocument, Granted], FinishedEffect]


def version_of(head: Head | None) -> str:
    return str(head.record.fence) if head is not None and head.live and head.record else NOTHING


def is_applied(head: Head | None, claim: Claim) -> bool:
    """Whether the head already is what the claim would make it, perhaps by an interrupted attempt of the same caller.

    RFC 9110, 13.1.1: a condition that fails because the change was already made may be answered as done.
    """
    if claim.retract:
        return head is None or not head.live
    return (
        head is not None
        and head.live
        and head.digest == claim.digest
        and head.metadata_hash == claim.metadata_hash
        and (claim.sequence is None or claim.sequence == head.sequence)
    )


def check_version(doc_id: str, head: Head | None, expected: Expected | None, claim: Claim) -> None:
    """Raises `DocumentMoved` if the head is neither at an expected version nor already what the claim would make it."""
    if expected is None:
        return
    if not isinstance(expected, str | frozenset):
        raise ValidationError(
            f"expect must be a version, such as receipt.fence, or a frozenset of versions, not {expected!r}"
        )
    current = version_of(head)
    if isinstance(expected, frozenset):
        as_expected = current != NOTHING and current in expected
    else:
        as_expected = current != NOTHING if expected == ANY else current == expected
    if not as_expected and not is_applied(head, claim):
        where = f"at version {current}" if current else "missing"
        wanted = f"expected at {expected}" if expected else "expected not to exist"
        if isinstance(expected, frozenset):
            wanted = f"expected at {' or '.join(sorted(expected)) or 'another version, by a weak ETag'}"
        if expected == ANY:
            wanted = "expected to exist"
        raise DocumentMoved(f"document {doc_id!r} is {where}, but was {wanted}", doc_id=doc_id, current=current)


def require_version(effect: Effect, expected: Expected | None) -> Effect:
    """Returns the effect with a check of the version before it."""
    if expected is None:
        return effect

    def checked_first(subject: PreparedDocument, grant: Granted) -> FinishedEffect:
        check_version(subject.doc.doc_id, grant.head, expected, subject.claim)
        return effect(subject, grant)

    return checked_first
