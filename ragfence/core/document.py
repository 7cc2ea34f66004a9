"""A document as a caller passes it, and as it is stored after it was checked.

All that follows (hashes, offsets of snippets, ids) refers to the normalised text: NFC, lines ended by LF. So the twins
of one text, in NFC and NFD, with CRLF and LF, are one content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ragfence.core.canonical import canonical_json
from ragfence.core.normalization import nfc
from ragfence.core.operations import SEQUENCE_MAX, SEQUENCE_MIN, checked_text
from ragfence.errors import DocumentInvalid, Hint, NotJson, ValidationError

if TYPE_CHECKING:  # the client has documents, and no policy, which takes long to load
    from ragfence.core.policy import DocumentRules
    from ragfence.core.redaction import CleanJson

MAX_URL_BYTES = 4096
MAX_CONTENT_TYPE_BYTES = 255
PLAIN = "text/plain"

_MARKS = "remove the control characters before you ingest the document"
_JSON = "metadata may hold text, numbers, true, false, null, lists and dicts; give dates and paths as text"


class _NoMetadata(dict[str, Any]):
    """The metadata of documents that have none: shared by all of them, and therefore read-only."""

    def _refused(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a document without metadata cannot get some later; pass metadata= to Document(...)")

    __setitem__ = setdefault = update = __ior__ = _refused


class Document(NamedTuple):
    """A document, as its source has it. Nothing is checked here: a million of them are made in a row.

    `sequence` orders the revisions of a document: an older one never replaces a newer one.

    >>> Document("handbook/leave", "Thirty days a year.", {"team": "people"}).content_type
    'text/plain'
    """

    # A named tuple, because a frozen dataclass takes 3.5 times as long to make.
    doc_id: str
    text: str
    metadata: Mapping[str, Any] = _NoMetadata()
    source_url: str = ""
    sequence: int | None = None
    content_type: str = PLAIN


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


@dataclass(frozen=True, slots=True)
class DocumentLimits:
    """What one document may take up."""

    max_text_bytes: int = 16 * 2**20
    """of the normalised text, in UTF-8"""
    max_metadata_bytes: int = 64 * 2**10
    """of its canonical JSON"""
    allow_empty_text: bool = False
    """else a text that is empty, or white space alone, is refused"""

    @classmethod
    def of(cls, rules: DocumentRules) -> DocumentLimits:
        return cls(rules.max_text_bytes, rules.max_metadata_bytes, rules.allow_empty_text)


class CheckedDocument(NamedTuple):
    """A document as it is hashed and stored."""

    doc_id: str
    text: str
    text_bytes: bytes
    metadata: bytes
    source_url: str
    sequence: int | None
    content_type: str


def normalised(text: str) -> str:
    """NFC, with LF at the end of lines.

    >>> normalised("Cafe\\u0301\\r\\n")
    'Café\\n'
    """
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return nfc(text)


def checked(
    document: Document, limits: DocumentLimits, *, position: int | None = None, clean: CleanJson | None = None
) -> CheckedDocument:
    """The document as it is stored, or `DocumentInvalid`. `position` names a document whose id cannot.

    What is stored beside its text (metadata and source_url) holds no secrets, if `clean` is there to take them out.
    """
    if not isinstance(document, Document):
        _refuse(None, position, f"{type(document).__name__} is not a document", "pass a ragfence.Document")
    doc_id, text, metadata, source_url, sequence, content_type = document
    if type(doc_id) is not str or not doc_id.isascii() or not doc_id.isprintable() or not 0 < len(doc_id) <= 1024:
        doc_id = _checked_id(doc_id, position)
    if type(text) is str and text.isascii() and "\r" not in text and "\0" not in text:
        text_bytes = text.encode()
    else:
        text, text_bytes = _checked_text(doc_id, text, limits)
    if len(text_bytes) > limits.max_text_bytes:
        _refuse_size(doc_id, len(text_bytes), limits)
    if (not text or text.isspace()) and not limits.allow_empty_text:
        _refuse_empty(doc_id, text)
    if type(metadata) is _NoMetadata or (type(metadata) is dict and not metadata):
        stored = b"{}"
    else:
        stored = _checked_metadata(doc_id, metadata, limits, clean)
    if source_url != "":
        source_url = _checked_name(doc_id, "source_url", source_url, MAX_URL_BYTES)
        if clean is not None:
            source_url = clean.redaction.redact_text(source_url)
    if sequence is not None:
        sequence = _checked_sequence(doc_id, sequence)
    if content_type != PLAIN:
        content_type = _checked_name(doc_id, "content_type", content_type, MAX_CONTENT_TYPE_BYTES)
    return CheckedDocument(doc_id, text, text_bytes, stored, source_url, sequence, content_type)


def _checked_id(doc_id: object, position: int | None) -> str:
    if doc_id == "":
        _refuse(doc_id, position, "its doc_id is empty", "a path, a URL or a database key that stays the same")
    try:
        return checked_text("doc_id", doc_id)
    except ValidationError as wrong:
        _refuse(doc_id, position, f"its {wrong.message}", wrong.hint or _MARKS, wrong)


_TEXT_OR_NOTHING = Hint(
    "pass str(...), or leave the document out", cli="write its text in quotes, or leave the document out"
)


def _checked_text(doc_id: str, text: object, limits: DocumentLimits) -> tuple[str, bytes]:
    if not isinstance(text, str):
        hint = "decode it first" if isinstance(text, bytes | bytearray) else _TEXT_OR_NOTHING
        _refuse_named(doc_id, f"its text must be text, got {type(text).__name__}", hint)
    # No two characters become less than one byte (CR LF is the worst), so this one need not be normalised.
    if len(text) > 2 * limits.max_text_bytes:
        _refuse_size(doc_id, len(text) // 2, limits)
    if (at := text.find("\0")) >= 0:
        hint = "this is binary data, or text with padding: extract the text, or replace NUL"
        _refuse_named(doc_id, f"its text holds NUL at character {at}", hint)
    normal = normalised(text)
    try:
        return normal, normal.encode()
    except UnicodeEncodeError:
        at = next(at for at, mark in enumerate(text) if "\ud800" <= mark <= "\udfff")
        hint = Hint(
            "decode it as UTF-8 with errors='replace', not with 'surrogateescape'",
            cli="half of a character was cut off where the text was made; replace it there",
        )
        _refuse_named(doc_id, f"its text holds a lone surrogate at character {at}", hint)


def _checked_metadata(doc_id: str, metadata: object, limits: DocumentLimits, clean: CleanJson | None) -> bytes:
    if type(metadata) is not dict and not isinstance(metadata, Mapping):
        _refuse_named(doc_id, f"its metadata must be a mapping, got {type(metadata).__name__}", "pass a dict")
    plain = metadata if type(metadata) is dict else _as_dict(doc_id, metadata)
    try:
        stored = canonical_json(plain) if clean is None else clean.write(plain)
    except NotJson as wrong:
        _refuse_named(doc_id, f"its metadata is not JSON: {wrong.message}", _JSON, wrong)
    if len(stored) > limits.max_metadata_bytes:
        _refuse_named(
            doc_id,
            f"its metadata has {len(stored):,} bytes as JSON, and {limits.max_metadata_bytes:,} are allowed",
            "keep what filters and cites; put long text into the document",
        )
    return stored


def _as_dict(doc_id: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(metadata)
    except Exception as broken:  # noqa: BLE001  # somebody's mapping, which may ask a database: the others are ingested
        problem = f"its metadata cannot be read: {type(broken).__name__}: {broken}"
        _refuse_named(doc_id, problem, "pass a dict", broken)


def _checked_name(doc_id: str, field: str, value: object, max_bytes: int) -> str:
    try:
        return checked_text(field, value, max_bytes)
    except ValidationError as wrong:
        hint = f"leave {field} out" if "longer" in wrong.message else wrong.hint or _MARKS
        _refuse_named(doc_id, f"its {wrong.message}", hint, wrong)


def _checked_sequence(doc_id: str, sequence: object) -> int:
    if isinstance(sequence, bool) or not isinstance(sequence, int):
        _refuse_named(
            doc_id,
            f"its sequence must be an integer, got {type(sequence).__name__}",
            Hint("pass int(...)", cli="write a whole number, without quotes"),
        )
    if not SEQUENCE_MIN <= sequence <= SEQUENCE_MAX:
        # Not the number itself, which may have more digits than Python cares to print.
        hint = "a version number, or a time in microseconds"
        _refuse_named(doc_id, f"its sequence does not fit into 64 bits: it takes {sequence.bit_length() + 1}", hint)
    return int(sequence)


def _refuse_size(doc_id: str, size: int, limits: DocumentLimits) -> NoReturn:
    _refuse_named(
        doc_id,
        f"its text has {size:,} bytes or more, and {limits.max_text_bytes:,} are allowed",
        "split the document, or raise documents.max_text_bytes in the policy",
    )


def _refuse_empty(doc_id: str, text: str) -> NoReturn:
    _refuse_named(
        doc_id,
        "its text is only white space" if text else "its text is empty",
        "check where the text comes from, or leave the document out; documents.allow_empty_text in the policy, or"
        " ingest --allow-empty-text, accepts it",
    )


def _refuse_named(doc_id: str, problem: str, hint: str, cause: Exception | None = None) -> NoReturn:
    raise DocumentInvalid(f"document {_short(doc_id)!r}: {problem}", hint=hint, doc_id=doc_id) from cause


def _refuse(doc_id: object, position: int | None, problem: str, hint: str, cause: Exception | None = None) -> NoReturn:
    place = "a document" if position is None else f"the document at position {position}"
    given = doc_id if isinstance(doc_id, str) else None
    raise DocumentInvalid(f"{place}: {problem}", hint=hint, doc_id=given) from cause


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
