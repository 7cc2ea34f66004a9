"""The outline of a Markdown text: its sections, and the places where it may be cut.

A reader of lines, no parser: it knows what decides where sections begin (ATX and setext headings, and the code blocks,
comments and front matter in which there are none) and takes one pass. The inside of lists and quotes is not its
business; a setext heading in there opens no section.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from ragfence.documents.chunking.boundaries import ITEM, LINE, PARAGRAPH, Border

MAX_SECTION_BYTES = 512

_MAX_TITLE = 1024
"""Characters of a title that are looked at: a line of megabytes may begin with a #."""

# Possessive where a hostile text could make an expression try all ways to split a long run.
_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]|$)")
_UNDERLINE = re.compile(r" {0,3}(?:=++|-++)[ \t]*+$")
_RULE = re.compile(r" {0,3}(?:(?:-[ \t]*+){3,}+|(?:\*[ \t]*+){3,}+|(?:_[ \t]*+){3,}+)$")
_ITEM = re.compile(r"(?:[-+*]|\d{1,9}[.)])(?:[ \t]|$)")
# Also behind the marks of lists and quotes: if the beginning of a code block is overlooked, its end is taken for one.
_FENCE = re.compile(r" {0,3}(?:(?:[-+*]|\d{1,9}[.)]) {1,4}|> ?)*+(`{3,}+(?!.*`)|~{3,}+)")
_HTML = re.compile(r" {0,3}<(?:(!--)|(pre|script|style|textarea)(?=[\s>]|$))", re.IGNORECASE)
_FRONT_MATTER = re.compile(r"---[ \t]*+\n(?=[ \t]*+\S)")
_END_OF_FRONT_MATTER = re.compile(r"^(?:---|\.\.\.)[ \t]*+$", re.MULTILINE)
_BROKEN_ESCAPE = re.compile("%.?$")


class Outline:
    """Kept in arrays: a text of some megabytes can have millions of lines and headings."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.border_starts = array("q")
        self.border_kinds = bytearray()
        # Of each section where it starts, the section above it, and where its title is. The first is the text before
        # the first heading.
        self.starts = array("q", [0])
        self.parents = array("q", [0])
        self.titles = array("q", [0, 0])

    @property
    def borders(self) -> Iterator[Border]:
        return zip(self.border_starts, self.border_kinds, strict=True)

    def section_start(self, offset: int) -> int:
        return self.starts[self._section_at(offset)]

    def section_id(self, offset: int) -> str:
        """`Guide/Install`: what could be taken for a separator is escaped; headings without a title are left out."""
        titles: list[str] = []
        section = self._section_at(offset)
        while section:
            start, end = self.titles[2 * section : 2 * section + 2]
            title = " ".join(self.text[start:end].split())
            titles.append(title.replace("%", "%25").replace("/", "%2F"))
            section = self.parents[section]
        path = "/".join(filter(None, reversed(titles)))
        if len(path.encode()) > MAX_SECTION_BYTES:
            path = _BROKEN_ESCAPE.sub("", path.encode()[:MAX_SECTION_BYTES].decode(errors="ignore"))
        return path

    def _section_at(self, offset: int) -> int:
        return bisect_right(self.starts, offset) - 1


def outline(text: str) -> Outline:
    found = Outline(text)
    _OutlineReader(found).read()
    return found


class _Paragraph(NamedTuple):
    """What has to be known of a paragraph when its last line turns out to be the underline of a heading."""

    start: int
    borders: int
    """how many there were before it"""
    below_heading: bool


class _OutlineReader:
    def __init__(self, found: Outline) -> None:
        self._text = found.text
        self._found = found
        self._above: list[tuple[int, int]] = []
        """the sections that this line is in: level and number"""
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
                    self._border(start, LINE)
            elif not line or line.isspace():
                self._fresh, self._paragraph = True, None
            elif line[0].isalpha():
                self._prose(start)
            elif line[0] == "\t" or line.startswith("    "):  # code, or the inside of a list
                self._border(start, LINE)
                self._fresh = False
            elif found := _HEADING.match(line):
                self._heading(len(found[1]), start, start + found.end(), start + _unclosed(line))
            elif self._paragraph and _UNDERLINE.match(line):
                self._underlined(1 if "=" in line else 2, self._paragraph, start)
            else:
                closing = self._marked(start, line)

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

    def _prose(self, start: int) -> None:
        if self._fresh:
            self._paragraph = _Paragraph(start, len(self._found.border_kinds), self._below_heading)
        self._border(start, PARAGRAPH if self._fresh else LINE)
        self._fresh = False

    def _marked(self, start: int, line: str) -> re.Pattern[str] | None:
        """A line that begins with a mark. Returns what ends the block it opens, if only a certain mark does."""
        closing, item = _closing(line), _ITEM.match(line)
        if closing is None and _RULE.match(line):
            self._border(start, PARAGRAPH)
            self._fresh, self._paragraph = True, None
        elif closing is None and not item and line[0] not in " \t>|<":
            self._prose(start)
        else:
            self._border(start, ITEM if item else PARAGRAPH if self._fresh and line[0] != " " else LINE)
            self._fresh, self._paragraph = False, None
        return closing

    def _border(self, start: int, kind: int) -> None:
        # A heading stays with what it is the heading of.
        if not self._below_heading:
            self._found.border_starts.append(start)
            self._found.border_kinds.append(kind)
        self._below_heading = False

    def _underlined(self, level: int, paragraph: _Paragraph, underline: int) -> None:
        del self._found.border_starts[paragraph.borders :]
        del self._found.border_kinds[paragraph.borders :]
        self._below_heading = paragraph.below_heading
        self._heading(level, paragraph.start, paragraph.start, underline)

    def _heading(self, level: int, start: int, title: int, title_end: int) -> None:
        self._border(start, level - 1)
        while self._above and self._above[-1][0] >= level:
            self._above.pop()
        found = self._found
        found.parents.append(self._above[-1][1] if self._above else 0)
        self._above.append((level, len(found.starts)))
        found.starts.append(start)
        found.titles.extend((title, min(title_end, title + _MAX_TITLE)))
        self._fresh, self._below_heading, self._paragraph = True, True, None


def _closing(line: str) -> re.Pattern[str] | None:
    if found := _FENCE.match(line):
        mark = found[1]
        return re.compile(rf"^[ \t>]*+{mark[0]}{{{len(mark)},}}+[ \t]*+$")
    if found := _HTML.match(line):
        closing = re.compile("-->" if found[1] else f"</{found[2]}>", re.IGNORECASE)
        return None if closing.search(line, found.end()) else closing
    return None


def _unclosed(heading: str) -> int:
    """Where the title ends: before the closing marks of `## Title ##`, but not before the mark of `# C#`."""
    whole = heading.rstrip()
    bare = whole.rstrip("#")
    return len(bare) if not bare or bare[-1] in " \t" else len(whole)
