"""Where a text is cut, so that an edit moves few of the cuts.

Packing a text from its beginning is unstable: a longer paragraph near the top can shift every cut below it, and every
snippet gets a new id and is embedded again. Here a piece that is too big is cut at the *strongest* border inside it,
and its parts in the same way, until all of them fit. How strong a border is depends on nothing but its kind (heading,
paragraph, line) and a hash of the words behind it. So an edit moves the cuts around itself and no others: a changed
paragraph makes one or two new pieces, and seldom a third.

The price is that pieces are about 0.6 of the size that is allowed, where packing reaches 0.7.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

HEADINGS = range(6)
"""Kinds of borders, the strongest first: headings by their level, then these."""
PARAGRAPH, ITEM, LINE = 6, 7, 8

_FIRST_WORDS = 128
"""Characters behind a border that its strength depends on: an edit further on does not weaken it."""
_FAN = 64


class Border(NamedTuple):
    at: int
    kind: int
    end: int
    """of the line that starts here"""


class Span(NamedTuple):
    start: int
    end: int


def cut(text: str, whole: Span, borders: Iterable[Border], size: int) -> list[Span]:
    """`whole` in spans of at most `size` characters, or without a border inside them. They leave no gaps."""
    if whole.end - whole.start <= size:
        return [whole]
    at: list[int] = []
    strengths: list[int] = []
    for border in borders:
        if whole.start < border.at < whole.end:
            strengths.append(_strength(text, border, len(at)))
            at.append(border.at)
    strongest = _Strongest(strengths)
    margin = size // 4  # nearer to the ends of a piece, a cut would leave a scrap
    spans: list[Span] = []
    waiting = [whole]
    while waiting:
        span = waiting.pop()
        if span.end - span.start <= size:
            spans.append(span)
            continue
        first, last = bisect_right(at, span.start), bisect_left(at, span.end)
        found = strongest.among(
            bisect_left(at, span.start + margin, first, last), bisect_right(at, span.end - margin, first, last)
        )
        if found is None or found.kind > PARAGRAPH:
            # Rather a scrap than a paragraph cut in two.
            anywhere = strongest.among(first, last)
            if found is None or (anywhere is not None and anywhere.kind <= PARAGRAPH):
                found = anywhere
        if found is None:
            spans.append(span)
        else:
            middle = at[found.number]
            waiting += (Span(middle, span.end), Span(span.start, middle))  # so that spans come in order
    return spans


def _strength(text: str, border: Border, number: int) -> int:
    """One number to compare by: the kind, then the hash, then the place. The lowest is the strongest."""
    words = text[border.at : min(border.end, border.at + _FIRST_WORDS)]
    return border.kind << 64 | xxhash.xxh32_intdigest(words.encode()) << 32 | number


class _Found(NamedTuple):
    kind: int
    number: int


class _Strongest:
    """The strongest border of a range, in a few steps also for a text that somebody sorted by our hash."""

    def __init__(self, strengths: list[int]) -> None:
        self._floors = [strengths]
        while len(strengths) > _FAN:
            strengths = [min(strengths[at : at + _FAN]) for at in range(0, len(strengths), _FAN)]
            self._floors.append(strengths)

    def among(self, first: int, last: int) -> _Found | None:
        if first >= last:
            return None
        found: list[int] = []
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
        return _Found(strength >> 64, strength & 0xFFFF_FFFF)
