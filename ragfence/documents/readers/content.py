"""Content readers: which files and objects are read, as which type, and how their bytes become documents."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from os.path import splitext
from types import MappingProxyType
from typing import Any

from ragfence.core.document import PLAIN, Document
from ragfence.documents.readers.html import text_of_html
from ragfence.errors import DocumentInvalid, Hint, ValidationError

EXTENSIONS: Mapping[str, str] = MappingProxyType(
    {
        ".htm": "text/html",
        ".html": "text/html",
        ".markdown": "text/markdown",
        ".md": "text/markdown",
        ".txt": "text/plain",
    }
)
"""The extensions that are read by default, with their content types."""

LIMIT_BYTES = 64 * 2**20
MAX_TITLE = 500

NO_EXTENSION, OTHER_EXTENSIONS = "(none)", "(other)"
MAX_EXTENSIONS = 100
MAX_EXTENSION = 20

_BOMS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_CONTROLS = bytes({*range(32), 127} - set(b"\t\n\v\f\r\x1b"))
_MAX_CONTROL_SHARE = 0.01
_NON_ASCII = bytes(range(128, 256))
_LONG_NON_ASCII_RUN = re.compile(rb"[\x80-\xff]{4}")


@dataclass(slots=True)
class SkippedFiles:
    """Counts of files that a listing skips although no pattern ignores them."""

    extensions: Counter[str] = field(default_factory=Counter)
    """files without a reader; after MAX_EXTENSIONS extensions, further ones are counted as OTHER_EXTENSIONS"""
    special: int = 0
    """links that are not followed, pipes, sockets and devices"""

    @property
    def total(self) -> int:
        return self.extensions.total() + self.special

    def add_file(self, name: str) -> None:
        found = splitext(name)[1].lower().encode("utf-8", "backslashreplace").decode()
        extension = found or NO_EXTENSION
        if len(extension) > MAX_EXTENSION or (
            len(self.extensions) >= MAX_EXTENSIONS and extension not in self.extensions
        ):
            extension = OTHER_EXTENSIONS
        self.extensions[extension] += 1


@dataclass(frozen=True, slots=True)
class ContentReader:
    """How the files of a source are read. Made by `reading`, which checks what it is given."""

    types: Mapping[str, str]
    encoding: str
    limit_bytes: int

    def takes(self, name: str) -> bool:
        return splitext(name)[1].lower() in self.types

    def manner(self, name: str, base_url: str = "") -> str:
        """Returns how a file is read, as a part of its state; empty for the default way.

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
            return data.decode(self.encoding).removeprefix("\ufeff")  # the byte order mark that some editors write
        except UnicodeError as broken:
            where = f": {broken.reason} at byte {broken.start}" if isinstance(broken, UnicodeDecodeError) else ""
            guess = guess_encoding(data)
            if guess is None and is_binary(data):
                raise DocumentInvalid(
                    f"{doc_id} ({source}) is binary data, not text",
                    hint="convert it to text, or ignore it",
                    doc_id=doc_id,
                ) from None
            read_it = f"save it as {self.encoding}, or read the source with the encoding it is in: "
            raise DocumentInvalid(
                f"{doc_id} ({source}) is not {self.encoding} text{where}",
                hint=Hint(
                    f"{read_it}encoding={guess!r}" if guess else f"{read_it}encoding=...",
                    cli=f"{read_it}--encoding {guess or 'NAME'}",
                ),
                doc_id=doc_id,
            ) from None


def is_binary(data: bytes) -> bool:
    """Whether the data is not text in any 8-bit encoding: it holds NUL, or too many control characters."""
    controls = len(data) - len(data.translate(None, _CONTROLS))
    return b"\0" in data or controls > _MAX_CONTROL_SHARE * len(data)


def _is_mostly_ascii(data: bytes) -> bool:
    """Whether it looks like text of Western Europe in an 8-bit encoding; Cyrillic or Japanese text does not."""
    non_ascii = len(data) - len(data.translate(None, _NON_ASCII))
    return 3 * non_ascii <= len(data) and _LONG_NON_ASCII_RUN.search(data) is None


def guess_encoding(data: bytes) -> str | None:
    """Guesses the encoding of text that is not UTF-8; None if there is no good guess.

    >>> guess_encoding("Käse".encode("cp1252")), guess_encoding("Käse".encode("utf-16-le"))
    ('cp1252', 'utf-16-le')
    >>> guess_encoding("книга".encode("koi8-r")) is None
    True
    """
    guess = _BOMS.get(data[:2])
    if guess is None and b"\0" in data:
        # Most characters of Western text have a zero for one of their two bytes.
        first, second = data[::2].count(0), data[1::2].count(0)
        if min(first, second) == 0 and max(first, second) > len(data) // 4:
            guess = "utf-16-be" if first else "utf-16-le"
    if guess is None and b"\0" not in data and _is_mostly_ascii(data):
        guess = "cp1252"
    if guess is None:
        return None
    try:
        text = data.decode(guess)
    except UnicodeError:
        return None
    return None if any(chr(control) in text for control in _CONTROLS) else guess


def content_reader(
    extensions: Mapping[str, str] | Iterable[str] | None, encoding: str, limit_bytes: int
) -> ContentReader:
    """Makes a reader. `extensions` maps extensions to content types, or lists extensions; unknown ones are plain text.

    >>> dict(reading(["md", ".RST"], "utf-8", LIMIT_BYTES).types)
    {'.md': 'text/markdown', '.rst': 'text/plain'}
    """
    if isinstance(extensions, str):
        raise ValidationError(
            f"extensions must be a list, not the text {extensions!r}",
            hint=Hint(f"for example extensions=[{extensions!r}]", cli=f"for example --ext {extensions}"),
        )
    try:
        "x".encode(encoding)
    except (LookupError, TypeError, UnicodeError) as unknown:
        raise ValidationError(
            f"{encoding!r} is not a text encoding that Python knows",
            hint=Hint('for example encoding="cp1252"', cli="for example --encoding cp1252"),
        ) from unknown
    types: Mapping[str, str] = EXTENSIONS
    if isinstance(extensions, Mapping):
        types = {_dotted(extension): content_type for extension, content_type in extensions.items()}
    elif extensions is not None:
        types = {dotted: EXTENSIONS.get(dotted, PLAIN) for dotted in map(_dotted, extensions)}
    return ContentReader(types, encoding, limit_bytes)


def _dotted(extension: str) -> str:
    """`.md` for `md` and `.MD`; the empty text stands for files without an extension."""
    return f".{extension.lower().removeprefix('.')}" if extension else ""


def as_doc_id(value: object) -> str | None:
    """Returns an id as text, or None if it is not a valid one: ids of other systems are often numbers."""
    if not isinstance(value, str):
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else None
    if not value:
        return None
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which no store could hold
        return None
    return value
