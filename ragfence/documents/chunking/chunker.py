"""Chunkers cut the text of a document into pieces; a recipe stands for how they do it.

A chunker is anything with a name, a version, parameters and `split`. Two are here: for plain text and for Markdown.
They cut at borders that an edit elsewhere does not move (`borders.py`), and leave to `semantic-text-splitter` what has
none: lines that are too long for one piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple, NoReturn, Protocol

from ragfence.core.canonical import JsonValue, canonical_json
from ragfence.core.hashing import digest
from ragfence.core.operations import checked_text
from ragfence.documents.chunking.boundaries import line_borders, overlapping, spans
from ragfence.documents.chunking.markdown import MAX_SECTION_BYTES, outline
from ragfence.errors import NotJson, ValidationError

ADAPTER = 1
"""Raised with every change of how these chunkers cut: snippets cut in two ways must not pass for one recipe."""
MAX_SIZE = 2**24


class Piece(NamedTuple):
    """`text[start:end]` of the normalised text is the snippet."""

    start: int
    end: int
    section_id: str = ""
    """the headings it stands under, such as `Guide/Install`"""


class Chunker(Protocol):
    """What cuts texts. It has to be deterministic: name, version and parameters decide how any text is cut."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def parameters(self) -> Mapping[str, JsonValue]: ...
    def split(self, text: str) -> Sequence[Piece]: ...


@dataclass(frozen=True, slots=True)
class _SizedChunker:
    size: int = 1000
    """the most characters of a piece, overlap included"""
    overlap: int = 0
    """how far, at most, a piece reaches back into the one before it"""

    def __post_init__(self) -> None:
        for field, value in (("size", self.size), ("overlap", self.overlap)):
            if type(value) is not int:
                raise ValidationError(f"{field} must be an integer, got {type(value).__name__}")
        if not 1 <= self.size <= MAX_SIZE:
            raise ValidationError(f"size must be from 1 to {MAX_SIZE:,} characters, not {self.size}")
        if not 0 <= self.overlap < self.size:
            raise ValidationError(f"overlap must be from 0 to below the size of {self.size}, not {self.overlap}")

    @property
    def version(self) -> str:
        return f"{ADAPTER}+{_splitter_version()}"

    @property
    def parameters(self) -> Mapping[str, JsonValue]:
        return {"size": self.size, "overlap": self.overlap}


@dataclass(frozen=True, slots=True)
class TextChunker(_SizedChunker):
    """Cuts at paragraphs, and where these are too long at lines, sentences, words.

    >>> TextChunker(size=9).split("One two.\\n\\nThree.")
    [Piece(start=0, end=8, section_id=''), Piece(start=10, end=16, section_id='')]
    """

    name: ClassVar[str] = "text"

    def split(self, text: str) -> Sequence[Piece]:
        found = spans(text, line_borders(text), self.size - self.overlap, self.name)
        return [Piece(start, end) for start, end in overlapping(text, found, self.overlap, lambda _: 0)]


@dataclass(frozen=True, slots=True)
class MarkdownChunker(_SizedChunker):
    """Cuts at headings first, and names the section of each piece.

    A heading stays with what follows it, and no piece reaches back over one.

    >>> MarkdownChunker().split("# Guide\\n## Install\\nWith pip.")[0].section_id
    'Guide'
    """

    name: ClassVar[str] = "markdown"

    def split(self, text: str) -> Sequence[Piece]:
        plan = outline(text)
        found = spans(text, plan.borders, self.size - self.overlap, self.name)
        reached = overlapping(text, found, self.overlap, plan.section_start)
        return [Piece(start, end, plan.section_id(start)) for start, end in reached]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How documents are cut. It is part of their keys: old snippets never answer for a new chunker."""

    text: str
    """canonical JSON"""
    digest: bytes

    @classmethod
    def of(cls, chunker: Chunker) -> Recipe:
        name = checked_text("the name of a chunker", chunker.name)
        version = checked_text(f"the version of chunker {name!r}", chunker.version)
        if not isinstance(chunker.parameters, Mapping):
            raise ValidationError(
                f"the parameters of chunker {name!r} must be a mapping, got {type(chunker.parameters).__name__}",
                hint="pass a dict of what changes the pieces",
            )
        try:
            text = canonical_json({"name": name, "version": version, "parameters": dict(chunker.parameters)})
        except NotJson as wrong:
            raise ValidationError(
                f"the parameters of chunker {name!r} are not JSON: {wrong.message}",
                hint="they hold what changes the pieces: text, numbers, true, false, null, lists and dicts",
            ) from wrong
        return cls.written(text.decode())

    @classmethod
    def written(cls, text: str) -> Recipe:
        """The recipe of a row in the log."""
        return cls(text, digest("ragfence/recipe/1", text.encode()))


def pieces_of(chunker: Chunker, text: str, doc_id: str) -> list[Piece]:
    """The checked pieces that a chunker makes of a document: it may be a user's. Blank pieces are left out."""
    pieces: list[Piece] = []
    last = 0
    try:
        made = chunker.split(text)
    except StopIteration:  # in a generator around us it would look like its end, or like a fault of ours
        _refuse(chunker, doc_id, "split() raised StopIteration")
    for number, piece in enumerate(made):
        fault = _fault_in(piece, len(text), last)
        if fault:
            _refuse(chunker, doc_id, f"piece {number} {fault}")
        last = piece[0]
        if not text[last : piece[1]].isspace():
            pieces.append(piece if type(piece) is Piece else Piece(*piece))
    return pieces


def _fault_in(piece: object, size: int, last: int) -> str:
    if not isinstance(piece, tuple) or len(piece) != 3:
        return f"is {type(piece).__name__}, not Piece(start, end, section_id)"
    start, end, section_id = piece
    if type(start) is not int or type(end) is not int:
        return f"has offsets that are not integers: {start!r} and {end!r}"
    if not 0 <= start < end <= size:
        return f"is [{start}:{end}], which is empty or outside of {size} characters"
    if start < last:
        return f"starts at {start}, before the one before it, which starts at {last}"
    try:
        if type(section_id) is str and (section_id == "" or len(section_id.encode()) <= MAX_SECTION_BYTES):
            return ""
    except UnicodeEncodeError:
        pass
    return f"has a section_id that is not a text of at most {MAX_SECTION_BYTES} bytes"


def _refuse(chunker: Chunker, doc_id: str, problem: str) -> NoReturn:
    raise ValidationError(
        f"chunker {chunker.name!r} on document {doc_id[:80]!r}: {problem}",
        hint="pieces are parts of the text that split() was given, text[start:end], ordered by start",
    )


@cache
def _splitter_version() -> str:
    from importlib.metadata import version

    return version("semantic-text-splitter")
