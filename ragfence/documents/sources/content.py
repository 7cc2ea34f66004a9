"""From the bytes of a file or object to a document: which ones are read, as what, and how they are decoded."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from os.path import splitext
from types import MappingProxyType
from typing import Any

from ragfence.documents.document import PLAIN, Document
from ragfence.documents.sources.html import text_of_html
from ragfence.errors import DocumentInvalid, ValidationError

EXTENSIONS: Mapping[str, str] = MappingProxyType(
    {
        ".htm": "text/html",
        ".html": "text/html",
        ".markdown": "text/markdown",
        ".md": "text/markdown",
        ".txt": "text/plain",
    }
)
"""What is read if nothing else is asked for, and as what."""

LIMIT_BYTES = 64 * 2**20
MAX_TITLE = 500

_BOMS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}


@dataclass(frozen=True, slots=True)
class Reading:
    """How the files of a source are read. Made by `reading`, which checks what it is given."""

    types: Mapping[str, str]
    encoding: str
    limit_bytes: int

    def takes(self, name: str) -> bool:
        return splitext(name)[1].lower() in self.types

    def manner(self, name: str, base_url: str = "") -> str:
        """How a file is read, where that is not the usual way; a part of its state.

        The same bytes under another encoding, type or URL are another document, and must be read again.
        """
        extension = splitext(name)[1].lower()
        encoding, content_type = codecs.lookup(self.encoding).name, self.types[extension]
        if (encoding, content_type, base_url) == ("utf-8", EXTENSIONS.get(extension, PLAIN), ""):
            return ""
        return f":{sha256(repr((encoding, content_type, base_url)).encode()).hexdigest()[:16]}"

    def refuse_size(self, size: int, doc_id: str, source: str) -> None:
        if size > self.limit_bytes:
            raise DocumentInvalid(
                f"{doc_id} ({source}) has {size:,} bytes, and the limit is {self.limit_bytes:,}",
                hint="split it, ignore it, or raise limit_bytes",
                doc_id=doc_id,
            )

    def document(self, data: bytes, doc_id: str, *, source: str, source_url: str) -> Document:
        self.refuse_size(len(data), doc_id, source)
        text = self._decoded(data, doc_id, source)
        metadata: dict[str, Any] = {"path": doc_id}
        content_type = self.types[splitext(doc_id)[1].lower()]
        if content_type == "text/html":
            title, text = text_of_html(text)
            if title:
                metadata["title"] = title[:MAX_TITLE]
        return Document(doc_id, text, metadata, source_url=source_url, content_type=content_type)

    def _decoded(self, data: bytes, doc_id: str, source: str) -> str:
        try:
            return data.decode(self.encoding).removeprefix("\ufeff")  # the mark that some editors put first
        except UnicodeError as broken:
            where = f": {broken.reason} at byte {broken.start}" if isinstance(broken, UnicodeDecodeError) else ""
            guess = _BOMS.get(data[:2], "cp1252")
            raise DocumentInvalid(
                f"{doc_id} ({source}) is not {self.encoding} text{where}",
                hint=f"save it as {self.encoding}, or read the source with the encoding it is in: encoding={guess!r}",
                doc_id=doc_id,
            ) from None


def reading(extensions: Mapping[str, str] | Iterable[str] | None, encoding: str, limit_bytes: int) -> Reading:
    """`extensions`: a mapping to content types, or just extensions, of which unknown ones are plain text.

    >>> dict(reading(["md", ".RST"], "utf-8", LIMIT_BYTES).types)
    {'.md': 'text/markdown', '.rst': 'text/plain'}
    """
    if isinstance(extensions, str):
        raise ValidationError(
            f"extensions must be several, got the text {extensions!r}", hint=f"for example extensions=[{extensions!r}]"
        )
    try:
        "x".encode(encoding)
    except (LookupError, TypeError, UnicodeError) as unknown:
        raise ValidationError(
            f"{encoding!r} is no text encoding Python knows", hint='for example encoding="cp1252"'
        ) from unknown
    types: Mapping[str, str] = EXTENSIONS
    if isinstance(extensions, Mapping):
        types = {_dotted(extension): content_type for extension, content_type in extensions.items()}
    elif extensions is not None:
        types = {dotted: EXTENSIONS.get(dotted, PLAIN) for dotted in map(_dotted, extensions)}
    return Reading(types, encoding, limit_bytes)


def _dotted(extension: str) -> str:
    """`.md` for `md` and `.MD`; the empty one means files without any."""
    return f".{extension.lower().removeprefix('.')}" if extension else ""


def as_doc_id(value: object) -> str | None:
    """An id as text, if it can be one: other people's ids are often numbers."""
    if not isinstance(value, str):
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else None
    if not value:
        return None
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which no store could hold
        return None
    return value
