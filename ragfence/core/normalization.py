"""NFC, in time that grows with the length of the text, whatever the text is, and in steps that let others run.

`unicodedata.normalize` sorts the marks on a letter by insertion, and lets no other thread run meanwhile: a few
megabytes of marks in the wrong order would take it hours. Marks of a long run are put in order here before that.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final, NamedTuple

SHORT: Final = 64
"""characters, of which any order is sorted soon"""
PIECE: Final = 16 << 10
"""characters that are normalised in one go, if a letter comes after them"""
LOOKED_AT_WHOLE: Final = 256 << 10
"""characters, which whether they are normalised is seen soon: marks in the wrong order end the look"""
JAMO: Final = (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))
"""that Hangul syllables are composed of, after the first: by a rule, and not by a table"""


def nfc(text: str) -> str:
    """The text as `unicodedata.normalize("NFC", text)` has it.

    >>> nfc("Cafe\\u0301")
    'Café'
    """
    if text.isascii():
        return text
    if len(text) <= SHORT:
        return unicodedata.normalize("NFC", text)
    if len(text) <= LOOKED_AT_WHOLE and unicodedata.is_normalized("NFC", text):  # without the tables, as most texts are
        return text
    return "".join(map(_normal, _pieces(text)))


def _pieces(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        found = _tables().separate.search(text, at + PIECE) if len(text) > at + PIECE else None
        end = found.start() if found else len(text)
        yield text[at:end]
        at = end


def _normal(text: str) -> str:
    if unicodedata.is_normalized("NFC", text):
        return text
    return unicodedata.normalize("NFC", _tables().long_run.sub(_in_order, text))


def _in_order(run: re.Match[str]) -> str:
    by_class = defaultdict[int, list[str]](list)
    for mark in run.group():
        for part in unicodedata.normalize("NFD", mark):
            by_class[unicodedata.combining(part)].append(part)
    return "".join("".join(by_class[each]) for each in sorted(by_class))


class _Tables(NamedTuple):
    long_run: re.Pattern[str]
    """so many marks in a row that their order takes long"""
    separate: re.Pattern[str]
    """a character that nothing before it changes, nor is changed by it"""


@cache
def _tables() -> _Tables:
    """Made when they are first needed, since all characters there are have to be looked at."""
    marks: set[int] = set()
    others = set(JAMO)
    for at in range(sys.maxunicode + 1):
        first, *rest = list(unicodedata.normalize("NFD", chr(at)))
        if unicodedata.combining(first):
            marks.add(at)
        others.update(map(ord, rest))
    mark, joined = _ranges(marks), _ranges(marks | others)
    # It begins where a run begins, so that each is looked at once.
    return _Tables(re.compile(f"(?<![{mark}])[{mark}]{{{SHORT},}}+"), re.compile(f"[^{joined}]"))


def _ranges(points: Iterable[int]) -> str:
    """As they stand in a set of a regular expression."""
    ranges: list[list[int]] = []
    for at in sorted(points):
        if ranges and ranges[-1][1] == at - 1:
            ranges[-1][1] = at
        else:
            ranges.append([at, at])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)
