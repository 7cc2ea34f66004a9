"""From a document to a claim: checked, hashed, and addressed, for a million documents in a row.

Optimistic concurrency: a document is moved only if it still is at the version that its caller has read.

A version is the fence number of the head (`Receipt.fence`, `StoredDocument.fence`), which no two moves share. It is
compared under the lease, when nobody else can move the head; asking before that only spares most callers an attempt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from ragfence.core.canonical import canonical_json, parse_json
from ragfence.core.decisions import Ask, Claim, Granted, Mode
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
from ragfence.engine.batch_commit import FinishedEffect
from ragfence.engine.requests import acting_key
from ragfence.errors import DocumentMoved, ValidationError

_quoted: Callable[[str], str] = json.encoder.encode_basestring
MARKDOWN_TYPES = frozenset({"text/markdown", "text/html"})
"""Headings of HTML become headings of Markdown before a document is made of it."""


class Recipes:
    """Which chunker cuts which content type: one for all, or the usual ones."""

    def __init__(self, chunker: Chunker | None, rules: DocumentRules, key: ContentKey | None = None) -> None:
        size, overlap = rules.chunk_size, rules.chunk_overlap
        self._text = ChunkerRecipe.by(chunker or TextChunker(size=size, overlap=overlap), key)
        self._markdown = self._text if chunker else ChunkerRecipe.by(MarkdownChunker(size=size, overlap=overlap), key)

    def of(self, content_type: str) -> ChunkerRecipe:
        return self._markdown if content_type in MARKDOWN_TYPES else self._text


class ChunkerRecipe(NamedTuple):
    """A chunker with all that is derived from it once."""

    chunker: Chunker
    recipe: Recipe
    name: str
    """the recipe's digest, as rows and keys have it"""
    key_tail: bytes
    content_key: ContentKey | None
    """of a tenant whose snippet ids are keyed"""

    @classmethod
    def by(cls, chunker: Chunker, key: ContentKey | None = None) -> ChunkerRecipe:
        recipe = Recipe.of(chunker)
        name = recipe.digest.hex()
        return cls(chunker, recipe, name, key_tail(name), key)


class GivenDocument(NamedTuple):
    """A document of several that are sent together, each by somebody else."""

    document: Document | CheckedDocument
    waited_s: float = 0.0
    """so long it has waited already: its error tells"""
    event_id: str = ""
    """kept in its decision rows"""
    api_key: str = ""
    """the id of the key with which it was sent; kept there, too"""


DocumentQuery = tuple[Ask, CheckedDocument, Content, ChunkerRecipe]
"""the question, and what it was made of; a plain tuple, since one is made for every document sent again"""


class PreparedDocument(NamedTuple):
    """A document that may be claimed."""

    doc: CheckedDocument
    content: Content
    cut: ChunkerRecipe
    claim: Claim
    origin: Origin | None = None
    """the source that brings it through `sync`"""
    expected: Expected | None = None
    """the version it must be at: see `expecting`"""


class ClaimBuilder:
    def __init__(
        self,
        identity: Identity,
        rules: DocumentRules,
        kind_rules: KindRules,
        recipes: Recipes,
        redaction: Redaction,
    ) -> None:
        self._clean = CleanJson(redaction)
        self._identity = identity
        self._limits = DocumentLimits.of(rules)
        self._content_fields = rules.content_fields
        self._kind_rules = kind_rules
        self._recipes = recipes

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
    ) -> DocumentQuery:
        """Is it ingested already? Raises `DocumentInvalid`, which names the document."""
        doc = document if isinstance(document, CheckedDocument) else self.check(document, position)
        doc_id, text, text_bytes, metadata, url, sequence, content_type = doc
        cut = self._recipes.of(content_type)
        hashed, size = content = self._identity.content(self._counted(doc) if self._content_fields else text_bytes)
        key, source, fingerprint, metadata_hash = self._identity.digests(
            doc_id.encode(), hashed, size, cut.key_tail, metadata, url, content_type
        )
        context = caller.context(doc_id, hashed, cut.name, sequence, len(text), event_id=event_id, api_key=api_key)
        return Ask(key, source, fingerprint, metadata_hash, sequence, token, context), doc, content, cut

    def ingest(
        self, document: Document | CheckedDocument, token: bytes, caller: Caller, event_id: str = ""
    ) -> PreparedDocument:
        """Raises `DocumentInvalid`, which names the document."""
        return self.claim(self.query(document, token, caller, event_id=event_id), token, caller)

    def claim(
        self, query: DocumentQuery, token: bytes, caller: Caller, origin: Origin | None = None
    ) -> PreparedDocument:
        """What was asked about is not ingested: how it is claimed, by a token of its own."""
        (key, source, fingerprint, metadata_hash, sequence, _, context), doc, content, cut = query
        rules = self._kind_rules
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
        return PreparedDocument(doc, content, cut, claim, origin)

    def retract(
        self, doc_id: str, sequence: int | None, token: bytes, caller: Caller, event_id: str = ""
    ) -> PreparedDocument:
        doc = checked(Document(doc_id, "", sequence=sequence), replace(self._limits, allow_empty_text=True))
        cut, identity = self._recipes.of(doc.content_type), self._identity
        name = doc.doc_id.encode()
        shard, source = identity.place(name)
        content = Content("", 0)
        claim = Claim(
            key=identity.key(shard, name, "", key_tail("", RETRACT)),
            fingerprint=identity.fingerprint(content),
            token=token,
            mode=Mode.DOCUMENT,
            source=source,
            sequence=doc.sequence,
            metadata_hash=NO_METADATA,
            retract=True,
            lease_ms=self._kind_rules.lease_ms,
            max_attempts=self._kind_rules.max_attempts,
            kind=KIND,
            owner=caller.owner,
            context=caller.context(doc.doc_id, "", "", doc.sequence, 0, action=RETRACT, event_id=event_id),
        )
        return PreparedDocument(doc, content, cut, claim)

    def _counted(self, doc: CheckedDocument) -> bytes:
        """What the content hash is made of where the policy lists metadata that counts."""
        metadata = parse_json(doc.metadata)
        assert isinstance(metadata, Mapping)
        counted = {name: metadata[name] for name in self._content_fields if name in metadata}
        return framed("ragfence/content/1", (doc.text_bytes, canonical_json(counted)))


class Caller:
    """What the decision rows of a call say of who called."""

    def __init__(self, owner: str, run_id: str, correlation_id: str = "", route: str = "", origin: str = "") -> None:
        self.owner = owner
        self._api_key = acting_key.get()
        self.route = route
        known = {"correlation_id": correlation_id, "owner": owner, "run_id": run_id, "route": route, "origin": origin}
        self._tail = "".join(f',"{field}":{_quoted(value)}' for field, value in known.items() if value)

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
    ) -> bytes:
        ordered = "" if sequence is None else f',"sequence":"{sequence}"'
        if event_id:
            ordered += f',"event_id":{_quoted(checked_text("event_id", event_id))}'
        api_key = api_key or self._api_key
        tail = f'{self._tail},"api_key":{_quoted(api_key)}' if api_key else self._tail
        return (
            f'{{"kind":"{KIND}","source_id":{_quoted(doc_id)},"revision":"{content_hash}","index_hash":"{recipe}",'
            f'"action":"{action}"{ordered},"characters":{characters}{tail}}}'
        ).encode()


def split_waves(prepared: Mapping[int, PreparedDocument]) -> Iterator[dict[int, PreparedDocument]]:
    """The same source twice in a batch goes into successive ones, in the order given."""
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
"""the version of a document that is not there"""
ANY = "*"
"""expects that the document is there, at whatever version"""

Expected = str | frozenset[str]
"""a version, or several of which any will do"""

Effect = Callable[[PreparedDocument, Granted], FinishedEffect]


def version_of(head: Head | None) -> str:
    return str(head.record.fence) if head is not None and head.live and head.record else NOTHING


def is_applied(head: Head | None, claim: Claim) -> bool:
    """Whether the head is what the claim wants to make it: perhaps by an attempt of the same caller that was cut off.

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
    """Raises `DocumentMoved`, unless it is as the claim wants it. None expects nothing."""
    if expected is None:
        return
    if not isinstance(expected, str | frozenset):
        raise ValidationError(f"expect is a version, as receipt.fence, or a frozenset of them, not {expected!r}")
    current = version_of(head)
    if isinstance(expected, frozenset):
        as_expected = current != NOTHING and current in expected
    else:
        as_expected = current != NOTHING if expected == ANY else current == expected
    if not as_expected and not is_applied(head, claim):
        where = f"at version {current}" if current else "not there"
        wanted = f"expected at {expected}" if expected else "expected not to be there"
        if isinstance(expected, frozenset):
            wanted = f"expected at {' or '.join(sorted(expected)) or 'another, by a weak tag'}"
        if expected == ANY:
            wanted = "expected to be there"
        raise DocumentMoved(f"document {doc_id!r} is {where}, and {wanted}", doc_id=doc_id, current=current)


def require_version(effect: Effect, expected: Expected | None) -> Effect:
    """The effect, unless the head has moved."""
    if expected is None:
        return effect

    def checked_first(subject: PreparedDocument, grant: Granted) -> FinishedEffect:
        check_version(subject.doc.doc_id, grant.head, expected, subject.claim)
        return effect(subject, grant)

    return checked_first
