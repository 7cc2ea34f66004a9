"""From borders to the spans of pieces: trimmed, long lines split, each overlapping the one before it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator

from ragfence.documents.chunking.boundaries import LINE, PARAGRAPH, Border, Span, cut

_LONG = 4
"""A line of more than this many pieces is cut at sentences first: the splitter's time grows faster than its text."""
_LINE_START = re.compile(r"\n\s*")
_SENTENCE_START = re.compile(r"""[.!?…؟۔।॥]["'”’»)\]]*+\s+|[。！？｡]["”’」』）]*+\s*""")
_WORD_START = re.compile(r"\s+")


def line_borders(text: str) -> Iterator[Border]:
    """Of plain text: a line behind a blank one starts a paragraph."""
    for found in _LINE_START.finditer(text):
        yield found.end(), PARAGRAPH if text.count("\n", found.start(), found.end()) > 1 else LINE


def spans(text: str, borders: Iterable[Border], room: int, kind: str) -> Iterator[Span]:
    """All of the text but the blanks between its pieces, which have at most `room` characters each."""
    indented = kind == "markdown"  # where indentation has a meaning
    for each in cut(text, _trimmed(text, Span(0, len(text)), indented), borders, room):
        span = _trimmed(text, each, indented)
        if span.end - span.start > room:
            yield from _split(text, span, room, kind)
        elif span.start < span.end:
            yield span


def overlapping(text: str, pieces: Iterable[Span], overlap: int, floor_at: Callable[[int], int]) -> Iterator[Span]:
    """Each piece with up to `overlap` characters more in front of it, none of them below the floor at its start."""
    before: Span | None = None
    for piece in pieces:
        if before is None or not overlap:
            yield piece
        else:
            bound = max(before.start, floor_at(piece.start))
            yield Span(_reached(text, piece.start, overlap, bound), piece.end)
        before = piece


def _trimmed(text: str, span: Span, indented: bool) -> Span:
    inside = text[span.start : span.end]
    body = inside.strip()
    if not body:
        return Span(span.end, span.end)
    start = span.end - len(inside.lstrip())
    end = start + len(body)
    return Span(max(span.start, text.rfind("\n", span.start, start) + 1) if indented else start, end)


def _split(text: str, long: Span, room: int, kind: str) -> Iterator[Span]:
    # What cannot be parted from a long line is the heading above it, which the splitter would leave alone in a piece.
    last_line = text[text.rfind("\n", long.start, long.end) + 1 or long.start : long.end].lstrip()
    above = long.end - len(last_line) - long.start
    if above > room // 2:
        above = 0
    split = _splitter(kind, room - above)
    for part in _parts(text, Span(long.start + above, long.end), _LONG * room):
        for offset, chunk in split(text[part.start : part.end]):
            start = part.start + offset
            yield Span(long.start if above else start, start + len(chunk))
            above = 0


def _splitter(kind: str, room: int) -> Callable[[str], list[tuple[int, str]]]:
    """Offset (in characters) and text of the parts of a text that has no borders left."""
    from semantic_text_splitter import MarkdownSplitter, TextSplitter

    return (MarkdownSplitter if kind == "markdown" else TextSplitter)(room).chunk_indices


def _parts(text: str, long: Span, limit: int) -> Iterator[Span]:
    sentences = ((found.end(), LINE) for found in _SENTENCE_START.finditer(text, long.start, long.end))
    for start, end in cut(text, long, sentences, limit):
        while end - start > limit:
            space = text.rfind(" ", start + limit // 2, start + limit)
            middle = space + 1 if space >= 0 else start + limit
            yield Span(start, middle)
            start = middle
        yield Span(start, end)


def _reached(text: str, start: int, overlap: int, bound: int) -> int:
    """Where a piece begins that reaches back: at a line, or else a sentence, or else a word."""
    if start - overlap <= bound:
        return bound
    earliest = start - overlap
    last = earliest + len(text[earliest:start].rstrip())
    for beginning in (_LINE_START, _SENTENCE_START, _WORD_START):
        found = beginning.search(text, earliest - 1, last)
        if found and found.end() < last:
            return max(earliest, found.end())
    if last <= earliest:  # nothing but blanks
        return start
    while earliest < start and unicodedata.combining(text[earliest]):
        earliest += 1
    return earliest
