"""The outline of a Markdown text: its sections, and the places where it may be cut.

A reader of lines, no parser: it knows what decides where sections begin (ATX and setext headings, and the code blocks,
comments and front matter in which there are none) and takes one pass. The inside of lists and quotes is not its
business; a heading in there opens no section.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ragfence.documents.borders import ITEM, LINE, PARAGRAPH, Border

MAX_SECTION_BYTES = 512

# Possessive where a hostile text could make an expression try all ways to split a long run.
_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]|$)")
_UNDERLINE = re.compile(r" {0,3}(?:=++|-++)[ \t]*+$")
_RULE = re.compile(r" {0,3}(?:(?:-[ \t]*+){3,}+|(?:\*[ \t]*+){3,}+|(?:_[ \t]*+){3,}+)$")
_ITEM = re.compile(r"(?:[-+*]|\d{1,9}[.)])(?:[ \t]|$)")
# Also behind the marks of lists and quotes: whoever overlooks the beginning of a code block takes its end for one.
_FENCE = re.compile(r" {0,3}(?:(?:[-+*]|\d{1,9}[.)]) {1,4}|> ?)*+(`{3,}+(?!.*`)|~{3,}+)")
_HTML = re.compile(r" {0,3}<(?:(!--)|(pre|script|style|textarea)(?=[\s>]|$))", re.IGNORECASE)
_FRONT_MATTER = re.compile(r"---[ \t]*+\n(?=[ \t]*+[^\s])")
_END_OF_FRONT_MATTER = re.compile(r"^(?:---|\.\.\.)[ \t]*+$", re.MULTILINE)
_BROKEN_ESCAPE = re.compile("%.?$")


class Outline(NamedTuple):
    borders: list[Border]
    starts: list[int]
    """of sections; the first is that of the text before the first heading"""
    paths: list[str]

    def section_at(self, offset: int) -> int:
        return bisect_right(self.starts, offset) - 1


def outline(text: str) -> Outline:
    reader = _Reader(text)
    reader.read()
    return Outline(reader.borders, reader.starts, reader.paths)


class _Paragraph(NamedTuple):
    """What has to be known of a paragraph when its last line turns out to be the underline of a heading."""

    start: int
    borders: int
    """how many there were before it"""
    below_heading: bool


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self.borders: list[Border] = []
        self.starts = [0]
        self.paths = [""]
        self._titles: list[tuple[int, str]] = []
        self._fresh = True
        """a new block begins with the next line"""
        self._below_heading = False
        self._paragraph: _Paragraph | None = None

    def read(self) -> None:
        closing: re.Pattern[str] | None = None
        for start, end in self._lines():
            line = self._text[start:end]
            if closing is not None:
                if closing.search(line):
                    closing = None
                    self._fresh = True
                elif line and not line.isspace():
                    self.borders.append(Border(start, LINE, end))
            elif not line or line.isspace():
                self._fresh, self._paragraph = True, None
            elif line[0].isalpha():
                self._prose(start, end)
            elif line[0] == "\t" or line.startswith("    "):  # code, or the inside of a list
                self._border(start, end, LINE)
                self._fresh = False
            elif found := _HEADING.match(line):
                self._heading(len(found[1]), _unclosed(line[found.end() :]), start, end)
            elif self._paragraph and _UNDERLINE.match(line):
                self._underlined(1 if "=" in line else 2, self._paragraph, start)
            else:
                closing = self._marked(start, end, line)

    def _lines(self) -> Iterator[tuple[int, int]]:
        text, start = self._text, 0
        if (front := _FRONT_MATTER.match(text)) and (end_of_it := _END_OF_FRONT_MATTER.search(text, front.end())):
            start = end_of_it.end() + 1
        while start < len(text):
            end = text.find("\n", start)
            if end < 0:
                end = len(text)
            yield start, end
            start = end + 1

    def _prose(self, start: int, end: int) -> None:
        if self._fresh:
            self._paragraph = _Paragraph(start, len(self.borders), self._below_heading)
        self._border(start, end, PARAGRAPH if self._fresh else LINE)
        self._fresh = False

    def _marked(self, start: int, end: int, line: str) -> re.Pattern[str] | None:
        """A line that begins with a mark. Returns what ends the block it opens, if only a certain mark does."""
        closing, item = _closing(line), _ITEM.match(line)
        if closing is None and _RULE.match(line):
            self._border(start, end, PARAGRAPH)
            self._fresh, self._paragraph = True, None
        elif closing is None and not item and line[0] not in " \t>|<":
            self._prose(start, end)
        else:
            self._border(start, end, ITEM if item else PARAGRAPH if self._fresh and line[0] != " " else LINE)
            self._fresh, self._paragraph = False, None
        return closing

    def _border(self, start: int, end: int, kind: int) -> None:
        # A heading stays with what it is the heading of.
        if not self._below_heading:
            self.borders.append(Border(start, kind, end))
        self._below_heading = False

    def _underlined(self, level: int, paragraph: _Paragraph, underline: int) -> None:
        del self.borders[paragraph.borders :]
        self._below_heading = paragraph.below_heading
        self._heading(level, self._text[paragraph.start : underline], paragraph.start, underline)

    def _heading(self, level: int, title: str, start: int, end: int) -> None:
        self._border(start, end, level - 1)
        while self._titles and self._titles[-1][0] >= level:
            self._titles.pop()
        self._titles.append((level, " ".join(title.split())))
        self.starts.append(start)
        self.paths.append(_path(title for _, title in self._titles))
        self._fresh, self._below_heading, self._paragraph = True, True, None


def _closing(line: str) -> re.Pattern[str] | None:
    if found := _FENCE.match(line):
        mark = found[1]
        return re.compile(rf"^[ \t>]*+{re.escape(mark[0])}{{{len(mark)},}}+[ \t]*+$")
    if found := _HTML.match(line):
        closing = re.compile("-->" if found[1] else f"</{found[2]}>", re.IGNORECASE)
        return None if closing.search(line, found.end()) else closing
    return None


def _unclosed(title: str) -> str:
    """`Title ##` is `Title`, and `C#` is `C#`."""
    title = title.strip()
    bare = title.rstrip("#")
    return bare if not bare or bare[-1] in " \t" else title


def _path(titles: Iterable[str]) -> str:
    """`Guide/Install`: what could be taken for a separator is escaped, and headings without a title are left out."""
    path = "/".join(title.replace("%", "%25").replace("/", "%2F") for title in titles if title)
    if len(path.encode()) > MAX_SECTION_BYTES:
        path = _BROKEN_ESCAPE.sub("", path.encode()[:MAX_SECTION_BYTES].decode(errors="ignore"))
    return path
