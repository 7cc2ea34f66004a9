"""HTML to text: what a reader would see, as Markdown that can be cut into sections."""

from __future__ import annotations

from html import escape

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ragfence.documents.chunking.markdown import outline
from ragfence.documents.readers.html import text_of_html


def text(html: str) -> str:
    return text_of_html(html).text


@pytest.mark.parametrize(
    ("html", "shown"),
    [
        ("plain", "plain"),
        ("", ""),
        ("<p>a</p><p>b</p>", "a\n\nb"),
        ("<p>a<p>b", "a\n\nb"),
        ("<div>a<div>b</div>c</div>", "a\n\nb\n\nc"),
        ("a <b>bold</b>er <i>word</i>", "a bolder word"),
        ("  a \n\t b\r\n c&nbsp; d ", "a b c d"),
        ("one<br>two<br/>three", "one\ntwo\nthree"),
        ("<h1>A</h1>x<h2 class=b>B <em>c</em></h2>y<h6>D</h6>", "# A\n\nx\n\n## B c\n\ny\n\n###### D"),
        ("<h2>two<br>lines</h2>", "## two lines"),
        ("<h2><div>A</div></h2><p>b", "## A\n\nb"),
        ("<h2>Unclosed<p>b", "## Unclosed\n\nb"),
        ("<h2></h2><p>b", "b"),
        ("<ul><li>a</li><li>b</li></ul>c", "- a\n- b\n\nc"),
        ("<ol><li>a<li><p>b</p></ol>", "- a\n- b"),
        ("<ul><li>a<ul><li>b</ul><li>c</ul>", "- a\n  - b\n- c"),
        ("<ul><li>a<br>b</ul>", "- a\n  b"),
        ("<li>outside", "- outside"),
        ("<dl><dt>a<dd>b</dl>", "a\n\nb"),
        ("<table><tr><th>A<th>B</tr><tr><td> 1 </td><td></td><td>2</table>x", "A | B\n1 | 2\n\nx"),
        ("a<hr>b", "a\n\nb"),
        ("<a href='x>y' title=\"a>b\">link</a>", "link"),
        ("<p title=it's>a</p><p>b's</p>", "a\n\nb's"),
        ("a &lt;b&gt; &amp;amp; &eacute; &#233; &#xe9; &unknown; &", "a <b> &amp; \u00e9 \u00e9 \u00e9 &unknown; &"),
        ("1 < 2 <3 a<", "1 < 2 <3 a<"),
        ("a<!-- <p>no</p> -->b<!-->c<!--->d<!-- x --!>e", "abcde"),
        ("<!doctype html><?xml version='1.0'?><![CDATA[x]]>a</>b</ c>d", "abd"),
        ("<![if IE]>a<![endif]>", "a"),
        ("a<SCRIPT>if (1 < 2) '<p>' </SCRIPT >b", "ab"),
        ("a<script src=x />b", "ab"),
        ("a<style>p{}</style>b<noscript><p>no</noscript>c<iframe>no</iframe>d", "abcd"),
        ("a<template>no<template>no</template>no</template>b", "ab"),
        ("a</template>b", "ab"),
        ("a<script>b</scripty>c</script>d", "ad"),
        ("<section>a</section><custom-thing>b</custom-thing>", "a\n\nb"),
    ],
)
def test_the_text_is_what_is_shown(html: str, shown: str) -> None:
    assert text(html) == shown


def test_preformatted_text_is_kept_as_it_is_in_a_fence() -> None:
    html = "<p>Run:<pre class=sh>\n# not a heading\n  indented  <b>x</b> &lt;y&gt;<br>z\n\n</pre>then"
    assert text(html) == "Run:\n\n```\n# not a heading\n  indented  x <y>\nz\n```\n\nthen"


def test_the_fence_is_longer_than_any_inside() -> None:
    assert text("<pre>````\nx\n````</pre>") == "`````\n````\nx\n````\n`````"


def test_an_empty_or_closed_pre_leaves_no_trace() -> None:
    assert text("a<pre> \n </pre>b<pre/>c  d") == "a\n\nb\n\nc d"


@pytest.mark.parametrize("line", ["# a", "###### a", "#", "```", "~~~ x", "===", "---"])
def test_a_line_that_only_looks_like_markdown_does_not_become_a_heading_or_a_fence(line: str) -> None:
    assert text(f"<p>x<br>{line}</p>") == f"x\n\\{line}"


@pytest.mark.parametrize("line", ["<script> loads code", "<PRE>", "<style", "<textarea>", "<!-- begins a comment"])
def test_a_tag_that_the_page_shows_as_text_does_not_open_a_block(line: str) -> None:
    assert text(f"<p>x<br>{escape(line)}</p>") == f"x\n\\{line}"


@pytest.mark.parametrize(("marks", "fence"), [("> ", "```"), ("- ", "~~~ x"), ("1. ", "```"), ("> - >", "````a")])
def test_a_fence_behind_the_marks_of_lists_and_quotes_does_not_open_a_block(marks: str, fence: str) -> None:
    assert text(f"<p>{escape(marks + fence)}</p>") == rf"{marks}\{fence}"


@pytest.mark.parametrize(
    "line",
    ["#a", "####### a", "`a`", "a # b", "- a", "--x", "<b>", "<prefix>", "<pre>a</pre>", "<!-- a -->", "- ```a```"],
)
def test_other_lines_are_left_alone(line: str) -> None:
    assert text(f"<p>{escape(line)}</p>") == line


MARKS = ["#", "`", "~", "```", "~~~", ">", "-", "+", "*", "1.", "9)", "=", "---", "<", "<!--", "-->", "</", " ", "a"]
TAGS = ["pre", "script", "STYLE", "textarea", "div", "<pre>", "</pre>", "<script ", "</Script>"]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from([*MARKS, *TAGS]), max_size=8).map("".join), st.sampled_from(["p", "li", "td", "pre"]))
def test_whatever_a_page_shows_as_text_the_headings_after_it_are_found(line: str, tag: str) -> None:
    """For any text in any block, a reader of Markdown finds the heading that follows, and only that one."""
    shown = text(f"<table><{tag}>first<br>{escape(line)}</{tag}><{tag}>{escape(line)}</{tag}></table><h2>After</h2>end")
    found = outline(shown)
    assert [found.section_id(start) for start in found.starts] == ["", "After"]


def test_the_title_is_kept_apart_and_the_rest_of_the_head_dropped() -> None:
    page = text_of_html(
        "<html><head><meta charset=utf-8><title>\n A &amp; <b>B</b> </title><style>x</style><link rel=y></head>"
        "<body><p>text</p><svg><title>icon</title></svg></body>"
    )
    assert page == ("A & <b>B</b>", "text\n\nicon")


def test_a_head_that_is_never_closed_does_not_swallow_the_page() -> None:
    assert text_of_html("<head><title>T</title><body>text") == ("T", "text")


def test_a_title_that_is_never_closed_does_not_swallow_the_page() -> None:
    assert text_of_html("<title>T<p>text") == ("", "T\n\ntext")


@pytest.mark.parametrize("html", ["a<p", "a<p title='x>y", "a<!-- b", "a<script>b", "a<?b", "a</p"])
def test_what_is_never_closed_lasts_until_the_end(html: str) -> None:
    assert text(html) == "a"


def test_deep_lists_are_indented_only_so_far() -> None:
    lines = text("<ul><li>x" * 5000).splitlines()
    assert len(lines) == 5000
    assert max(map(len, lines)) == 19


PIECES = [
    *("<", ">", "</", "/>", "<!", "<!--", "-->", "--!>", "<![", "<![CDATA[", "]]>", "<?", "&", "&#", "&#x", ";", "="),
    *("'", '"', " ", "\n", "\r", "\x00", "\xa0", "#", "`", "~", "-", "a", "\u00e9", "\U0001f600", "9999999999", "div"),
    *(
        f"<{tag}>"
        for tag in ("p", "h1", "ul", "li", "pre", "script", "template", "title", "tr", "td", "br", "b/", "head")
    ),
    *(
        f"</{tag}>"
        for tag in ("p", "h1", "ul", "li", "pre", "script", "template", "title", "tr", "td", "table", "head")
    ),
]


@settings(max_examples=500, deadline=None)
@given(st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
@example("&#" + "9" * 5000 + ";")
@example("<title>&#" + "9" * 5000)
@example("<![x")
def test_any_text_gives_a_text_of_clean_lines(html: str) -> None:
    """It never raises; outside of code no line ends in a space, and never are there two empty lines."""
    title, shown = text_of_html(html)
    assert text_of_html(html) == (title, shown)
    assert title == title.strip(" ")
    if "<pre" not in html.lower():
        assert "\n\n\n" not in shown
        assert shown == "\n".join(line.rstrip(" ") for line in shown.split("\n"))
        assert "\r" not in shown or "&" in html


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(st.characters(categories=["L", "N"]), min_size=1), min_size=1))
def test_words_survive_whatever_markup_stands_around_them(words: list[str]) -> None:
    tags = ["<p>{}</p>", "<li>{}", "<h2>{}</h2>", "<td>{}</td>", "<b>{}</b> ", "<pre>{}</pre>", "{}<br>"]
    html = "".join(tags[at % len(tags)].format(word) for at, word in enumerate(words))
    shown = text(html)
    at = 0
    for word in words:
        at = shown.index(word, at) + len(word)


@pytest.mark.parametrize(
    "piece",
    ["<", "<a ", "<!--", "<![CDATA[", "&#", "&a", "</", "<a b='", "<title>", "<pre>`", "<ul><li>x", "<td>x", "<p>#"],
)
def test_no_input_takes_more_than_linear_time(piece: str) -> None:
    """With quadratic time half a megabyte of it would take longer than any test may."""
    text_of_html(piece * (2**19 // len(piece)))
