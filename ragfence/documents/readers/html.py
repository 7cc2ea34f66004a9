"""HTML as the text it shows, with its headings, lists and code as Markdown, so that it can be cut into sections.

The tags are found here and not by `html.parser`. That one raises on some input (`<![x`), takes quadratic time on
other (20 KB of `<a ` without an end took it 8 seconds), and changes with patch releases of Python: the text of a file
is hashed, and an upgrade of Python must not make every page a changed one. Tags are found as browsers do it, where
whatever is never closed lasts until the end; so every character is looked at once, whatever the input.
"""

from __future__ import annotations

import re
from html import unescape
from typing import NamedTuple

_BLOCKS = frozenset(
    [
        "address",
        "article",
        "aside",
        "blockquote",
        "body",
        "caption",
        "center",
        "dd",
        "details",
        "dialog",
        "dir",
        "div",
        "dl",
        "dt",
        "fieldset",
        "figcaption",
        "figure",
        "footer",
        "form",
        "head",
        "header",
        "hgroup",
        "hr",
        "html",
        "legend",
        "main",
        "menu",
        "nav",
        "ol",
        "optgroup",
        "option",
        "p",
        "search",
        "section",
        "select",
        "summary",
        "table",
        "tbody",
        "tfoot",
        "thead",
        "ul",
    ]
)
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_LISTS = frozenset({"ul", "ol", "menu", "dir"})
# `head` is not among what is dropped, since its end is often left out and its content is dropped by itself.
_RAW = {
    tag: re.compile(rf"</{tag}(?=[ \t\n\f/>])", re.IGNORECASE)
    for tag in ("script", "style", "noscript", "iframe", "noembed", "noframes")
}
_TITLE_END = re.compile(r"</title(?=[ \t\n\f/>])", re.IGNORECASE)
# Deeper than this a list is indented no further: the spaces of nested lists grow with the square of the depth.
_MAX_INDENT = 8

_TAG_NAME = re.compile(r"/?([a-zA-Z][^ \t\n\f/>]*)")
_TAG_STOP = re.compile(r">|=[ \t\n\f]*[\"']")
_COMMENT_END = re.compile("--!?>")
_SPACE = re.compile(r"[ \t\n\f\r\xa0]+")
# Where a line of the page would otherwise be a heading to a reader of Markdown, or open a block in which there are none
# any more: the fence of code, also behind marks of lists and quotes, or an element that lasts until it is closed.
_NOT_MARKDOWN = re.compile(
    r"^(?:(?=#{1,6}(?:\s|$)|`{3}|~{3}|(?:=+|-+)$"
    r"|<!--(?!.*-->)|<(pre|script|style|textarea)(?=[\s>]|$)(?!.*</\1>))"
    r"|(?P<marks>(?:(?:[-+*]|\d{1,9}[.)]) |> ?)++)(?=`{3,}+(?!.*`)|~{3}))",
    re.IGNORECASE,
)
_FENCES = re.compile("`{3,}")
_ABSURD = re.compile("&#[0-9]{1000,};?")


class HtmlPage(NamedTuple):
    title: str
    text: str


def text_of_html(html: str) -> HtmlPage:
    """Never raises, whatever the text is.

    >>> text_of_html("<title>T</title><h2>Leases</h2><p>They <b>expire</b>.<ul><li>a<li>b</ul>").text
    '## Leases\\n\\nThey expire.\\n\\n- a\\n- b'
    """
    page = _Writer()
    title: str | None = None
    html = html.replace("\r\n", "\n").replace("\r", "\n")
    at, templates = 0, 0  # templates nest, and nothing in them is shown
    while (tag_at := html.find("<", at)) >= 0:
        if not templates:
            page.text(html[at:tag_at])
        if named := _TAG_NAME.match(html, tag_at + 1):
            at = _tag_end(html, named.end())
            if at < 0:
                return page.finished(title)
            tag, closes, closed = named[1].lower(), html[tag_at + 1] == "/", html[at - 2] == "/"
            if tag == "template":
                templates = max(0, templates + (-1 if closes else not closed))
            elif templates:
                continue
            elif closes:
                page.end(tag)
            elif tag in _RAW and not closed:
                end = _RAW[tag].search(html, at)
                if end is None:
                    return page.finished(title)
                at = end.start()
            elif tag == "title" and title is None and not closed:
                end = _TITLE_END.search(html, at)
                # Looked for only once, or a page of nothing but such tags would take quadratic time.
                title = _collapsed(_unescaped(html[at : end.start()])) if end else ""
                at = end.start() if end else at
            else:
                page.start(tag)
                if closed:
                    page.end(tag)
        elif html.startswith("<!--", tag_at):
            end = _COMMENT_END.search(html, tag_at + 2)
            if end is None:
                return page.finished(title)
            at = end.end()
        elif html.startswith(("<!", "<?", "</"), tag_at):
            at = html.find(">", tag_at) + 1
            if not at:
                return page.finished(title)
        else:
            if not templates:
                page.text("<")
            at = tag_at + 1
    if not templates:
        page.text(html[at:])
    return page.finished(title)


def _tag_end(html: str, at: int) -> int:
    """Behind the `>` of a tag; a quoted value may hold others. -1 if there is none."""
    while stop := _TAG_STOP.search(html, at):
        if stop[0] == ">":
            return stop.end()
        at = html.find(stop[0][-1], stop.end()) + 1
        if not at:
            return -1
    return -1


def _unescaped(text: str) -> str:
    try:
        return unescape(text)
    except ValueError:  # a number with more digits than Python will read
        return unescape(_ABSURD.sub("\ufffd", text))


def _collapsed(text: str) -> str:
    return _SPACE.sub(" ", text).strip(" ")


class _Writer:
    """Gathers the text of the current block, and writes it out when the next begins."""

    def __init__(self) -> None:
        self._out: list[str] = []
        self._lines: list[str] = []
        self._line: list[str] = []
        self._prefix = ""  # of the block to come: what makes it a heading or an item of a list
        self._tight = False  # whether the last block written was an item or a row, which the next may follow closely
        self._lists = 0
        self._in_pre = False
        self._in_row = False
        self._in_new_cell = False
        self._row_has_text = False

    def text(self, raw: str) -> None:
        if not raw:
            return
        if self._in_row and not raw.isspace():
            if self._in_new_cell and self._row_has_text:
                self._line.append(" | ")
            self._in_new_cell, self._row_has_text = False, True
        self._line.append(_unescaped(raw) if "&" in raw else raw)

    def start(self, tag: str) -> None:
        if self._in_pre:
            if tag == "br":
                self._line.append("\n")
        elif tag == "br":
            self._end_line()
        elif tag in _HEADINGS:
            self._end_block()
            self._prefix = _HEADINGS[tag]
        elif tag == "li":
            self._end_block()
            self._prefix = "  " * min(max(self._lists - 1, 0), _MAX_INDENT) + "- "
        elif tag == "pre":
            self._end_block()
            self._in_pre = True
        elif tag == "tr":
            self._end_block()
            self._in_row = True
        elif tag in ("td", "th"):
            self._in_new_cell = True
        elif tag in _BLOCKS:
            self._end_block()
            self._lists += tag in _LISTS

    def end(self, tag: str) -> None:
        if tag == "pre":
            self._end_pre()
        elif self._in_pre:
            return
        elif tag in _HEADINGS or tag == "li":
            self._end_block()
            self._prefix = ""
        elif tag in ("tr", "table"):
            self._end_block()
            self._in_row = False
        elif tag in _BLOCKS:
            self._end_block()
            if tag in _LISTS:
                self._lists = max(0, self._lists - 1)

    def finished(self, title: str | None) -> HtmlPage:
        self._end_pre()
        self._end_block()
        return HtmlPage(title or "", "".join(self._out))

    def _end_line(self) -> None:
        if self._line:
            self._lines.append(_collapsed("".join(self._line)))
            self._line = []

    def _end_block(self) -> None:
        self._end_line()
        self._row_has_text = False
        if not self._lines:
            return
        lines, self._lines = [line for line in self._lines if line], []
        if not lines:
            return
        prefix, self._prefix = self._prefix, ""
        if prefix.startswith("#"):
            self._write(prefix + " ".join(lines), tight=False)
        else:
            between = "\n" + " " * len(prefix)
            lines = [_NOT_MARKDOWN.sub(r"\g<marks>\\", line) for line in lines]
            self._write(prefix + between.join(lines), tight=bool(prefix) or self._in_row)

    def _end_pre(self) -> None:
        if not self._in_pre:
            return
        code, self._line = "".join(self._line).removeprefix("\n").rstrip(), []
        self._in_pre, self._prefix = False, ""
        if code:
            # A `#` at the start of a line of code is not a heading; the fence makes that clear.
            fence = "`" * max(3, 1 + max(map(len, _FENCES.findall(code)), default=0))
            self._write(f"{fence}\n{code}\n{fence}", tight=False)

    def _write(self, block: str, *, tight: bool) -> None:
        if self._out:
            self._out.append("\n" if tight and self._tight else "\n\n")
        self._out.append(block)
        self._tight = tight
