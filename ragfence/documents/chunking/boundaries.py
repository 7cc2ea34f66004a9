"""Where a text is cut, so that an edit moves few of the cuts.

Packing a text from its beginning is unstable: a longer paragraph near the top can shift every cut below it, and every
snippet gets a new id and is embedded again. Here a piece that is too big is cut at the *strongest* border inside it,
and its parts in the same way, until all of them fit. How strong a border is depends on nothing but its kind (heading,
paragraph, line) and a hash of the words behind it. So an edit moves the cuts around itself and no others: a changed
paragraph makes one or two new pieces, seldom three, and more in about one edit of two hundred.

The price: pieces are about 0.6 of the size that is allowed, where packing reaches 0.7 to 0.85.

From borders to the spans of pieces: trimmed, long lines split, each overlapping the one before it.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import xxhash

Border: TypeAlias = tuple[int, int]
"""Where a new line (or sentence) starts, and its kind: the lower, the stronger. Headings are 0 to 5 by their level."""
PARAGRAPH, ITEM, LINE = 6, 7, 8

_FIRST_WORDS = 64
"""Characters behind a border that its strength depends on: an edit further on does not weaken it."""
_FAN = 32


class Span(NamedTuple):
    start: int
    end: int


def cut(text: str, whole: Span, borders: Iterable[Border], size: int) -> list[Span]:
    """`whole` in spans of at most `size` characters, or without a border inside them. They leave no gaps."""
    if whole.end - whole.start <= size:
        return [whole]
    at = array("q")
    strengths = array("Q")
    for start, kind in borders:
        if whole.start < start < whole.end:
            strengths.append(_strength(text, start, kind, len(at)))
            at.append(start)
    strongest = _Strongest(strengths)
    spans: list[Span] = []
    waiting = [whole]
    while waiting:
        span = waiting.pop()
        number = _middle(at, strongest, span, size) if span.end - span.start > size else None
        if number is None:
            spans.append(span)
        else:
            waiting += (Span(at[number], span.end), Span(span.start, at[number]))  # so that spans come in order
    return spans


def _middle(at: Sequence[int], strongest: _Strongest, span: Span, size: int) -> int | None:
    """Where to cut a span: the number of a border, if there is one."""
    first, last = bisect_right(at, span.start), bisect_left(at, span.end)

    def beyond(margin: int) -> _StrongBorder | None:
        return strongest.among(
            bisect_left(at, span.start + margin, first, last), bisect_right(at, span.end - margin, first, last)
        )

    # A cut near an end leaves a small piece. Rather that than a paragraph cut in two, but not for a mere scrap.
    central = beyond(size * 3 // 10)
    if central is not None and central.kind <= PARAGRAPH:
        return central.number
    wider = beyond(size // 10)
    if wider is not None and wider.kind <= PARAGRAPH:
        return wider.number
    found = central or wider or beyond(0)
    return found.number if found else None


def _strength(text: str, start: int, kind: int, number: int) -> int:
    """One number of 64 bits to compare by: the kind, then the hash, then the place. The lowest is the strongest."""
    words, _, _ = text[start : start + _FIRST_WORDS].partition("\n")
    return kind << 60 | xxhash.xxh32_intdigest(words.encode()) >> 4 << 32 | number


class _StrongBorder(NamedTuple):
    kind: int
    number: int


class _Strongest:
    """The strongest border of a range, in a few steps also for a text that was sorted by our hash on purpose."""

    def __init__(self, strengths: array[int]) -> None:
        self._floors = [strengths]
        while len(strengths) > _FAN:
            strengths = array("Q", (min(strengths[at : at + _FAN]) for at in range(0, len(strengths), _FAN)))
            self._floors.append(strengths)

    def among(self, first: int, last: int) -> _StrongBorder | None:
        if first >= last:
            return None
        found = array("Q")
        for floor in self._floors:
            # Whole groups are asked on the next floor; what hangs over at both ends, on this one.
            first_group, last_group = -(-first // _FAN), last // _FAN
            if first_group >= last_group or floor is self._floors[-1]:
                found += floor[first:last]
                break
            found += floor[first : first_group * _FAN]
            found += floor[last_group * _FAN : last]
            first, last = first_group, last_group
        strength = min(found)
        return _StrongBorder(strength >> 60, strength & 0xFFFF_FFFF)


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
