"""The outline of Markdown: which lines open a section, and how a piece is told where it stands."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragfence.documents.chunking.boundaries import ITEM, LINE, PARAGRAPH
from ragfence.documents.chunking.markdown import MAX_SECTION_BYTES, outline


def sections(text: str) -> dict[int, str]:
    """The section of each line, by the number of the line."""
    found = outline(text)
    starts = [0, *(at + 1 for at, mark in enumerate(text) if mark == "\n")]
    return {number: found.section_id(start) for number, start in enumerate(starts)}


def headings(text: str) -> list[str]:
    """Each section once, in their order, without the text before the first."""
    found = outline(text)
    return [found.section_id(start) for start in found.starts[1:]]


def borders(text: str) -> dict[str, int]:
    return {text[at:].partition("\n")[0]: kind for at, kind in outline(text).borders}


def test_a_section_is_named_by_the_headings_above_it() -> None:
    text = "intro\n# Guide\ntext\n## Install\ntext\n### Linux\ntext\n## Use\ntext\n# Help\ntext"
    assert sections(text) == {
        0: "",
        1: "Guide",
        2: "Guide",
        3: "Guide/Install",
        4: "Guide/Install",
        5: "Guide/Install/Linux",
        6: "Guide/Install/Linux",
        7: "Guide/Use",
        8: "Guide/Use",
        9: "Help",
        10: "Help",
    }


def test_a_level_that_is_left_out_is_left_out_in_the_path() -> None:
    assert headings("# A\n### C\n## B\n#### D") == ["A", "A/C", "A/B", "A/B/D"]
    assert headings("## A\n# B\n## C") == ["A", "B", "B/C"]


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("# One", ["One"]),
        ("   ###### Six", ["Six"]),
        ("#\tTab", ["Tab"]),
        ("## Closed ##", ["Closed"]),
        ("## Closed ##   ", ["Closed"]),
        ("# C#", ["C#"]),
        ("# C #\\#", ["C #\\#"]),
        ("# a   b \t c", ["a b c"]),
        ("# Überschrift ä", ["Überschrift ä"]),
        ("# TCP/IP at 100 %", ["TCP%2FIP at 100 %25"]),
        ("# %2F\n## a/b", ["%252F", "%252F/a%2Fb"]),
        ("# A\n##\n### C", ["A", "A", "A/C"]),
        ("One\n===", ["One"]),
        ("One\n=", ["One"]),
        ("One\n-", ["One"]),
        ("One\nmore\n---\nTwo\n  ---  ", ["One more", "Two"]),
        ("# A\nB\n---\ntext", ["A", "A/B"]),
        ("***\nOne\n---", ["One"]),
        ("```\ncode\n```\nOne\n---", ["One"]),
        ("1984\n====", ["1984"]),
        ("(draft)\n---", ["(draft)"]),
        ("#hashtag\n---", ["#hashtag"]),
    ],
)
def test_headings_are_those_of_commonmark(text: str, paths: list[str]) -> None:
    assert headings(text) == paths


@pytest.mark.parametrize(
    "text",
    [
        "#hashtag",
        "####### seven",
        "    # code",
        "\t# code",
        "\\# escaped",
        "text # text",
        "```\n# code\n```",
        "```python\n# code\nx = 1\n---\n```",
        "~~~\n# code\n```\n# code\n~~~",
        "````\n```\n# code\n````",
        "```\n# never closed",
        "- ```sh\n  # code\n  ```\n",
        "1. ~~~\n   # code\n   ~~~",
        "> ```\n> # code\n> ```",
        "- item\n\n  ```\n  # code\n  ```",
        "<!--\n# comment\n\n# comment\n-->",
        "<pre>\n# text\n\n# text\n</pre>",
        "<SCRIPT>\n# text\n</SCRIPT>",
        "---",
        "text\n\n---",
        "- item\n---",
        "- item\nlazy\n---",
        "> quote\n---",
        "| a |\n---",
        "* * *\n---",
        "text\n--- x",
        "text\n==-",
        "---\ntitle: x\n# comment\n---",
        "---\ntitle: x\n...",
    ],
)
def test_what_only_looks_like_a_heading_opens_no_section(text: str) -> None:
    assert headings(f"{text}\n") == []


@pytest.mark.parametrize(
    "text",
    [
        "```\n# code\n```",
        "~~~ a\n~~~~~",
        "``` not`a`fence",
        "- ```\n  code\n  ```",
        "<!-- one line -->",
        "<!--\nx\n--> y",
        "<pre>x</pre>",
        "<pre>\n</pre>",
        "<prelude>",
        "---\ntitle: x\n---",
        "---\n\ntext",
    ],
)
def test_what_holds_no_headings_comes_to_its_end(text: str) -> None:
    assert headings(f"{text}\n# After\n") == ["After"]


def test_a_rule_on_the_first_line_is_no_front_matter() -> None:
    assert headings("---\n\n# One\n\n---\n\n# Two") == ["One", "Two"]
    assert headings("---\nnever: closed\n\n# One") == ["One"]


def test_a_long_path_is_cut_between_characters_and_never_inside_an_escape() -> None:
    for size in range(500, 520):
        path = headings(f"# {'x' * size}/é/é")[0]
        whole = f"{'x' * size}%2Fé%2Fé"
        assert whole.startswith(path)
        assert MAX_SECTION_BYTES - 3 < len(path.encode()) <= MAX_SECTION_BYTES
        assert not whole[len(path) :] or not path.endswith(("%", "%2"))
    assert headings(f"# {'word ' * 1_000_000}")[0].startswith("word word")


def test_borders_are_as_strong_as_what_they_separate() -> None:
    text = (
        "Intro.\nIts second line.\n\n# Heading\n\nBelow it.\n\n- item\n- next\n  more\n\nPlain.\n\n"
        "Title\n---\nBelow.\n\n```\ncode\n\n# comment\n```\n\n| a |\n| b |\n\n***\n\n> quote\n"
    )
    assert borders(text) == {
        "Intro.": PARAGRAPH,
        "Its second line.": LINE,
        "# Heading": 0,
        "- item": ITEM,
        "- next": ITEM,
        "  more": LINE,
        "Plain.": PARAGRAPH,
        "Title": 1,
        "```": PARAGRAPH,
        "code": LINE,
        "# comment": LINE,
        "| a |": PARAGRAPH,
        "| b |": LINE,
        "***": PARAGRAPH,
        "> quote": PARAGRAPH,
    }


def test_a_heading_stays_with_what_follows_it() -> None:
    assert borders("text\n\n# A\n\n## B\n\nbelow\n\nmore") == {"text": PARAGRAPH, "# A": 0, "more": PARAGRAPH}
    assert borders("# A\nB\n---\nbelow\n\nmore") == {"# A": 0, "more": PARAGRAPH}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(["# a", "## b", "```", "~~~", "text", "---", "===", "", "- x", "> q", "<!--", "-->", "    # c"])
        | st.text("#-=`~<>!* \ta0.é\x0c", max_size=12),
        max_size=30,
    )
)
def test_any_text_has_an_outline(lines: list[str]) -> None:
    """Sections and borders come in order, at the starts of lines, and every section has a name of bounded size."""
    text = "\n".join(lines)
    found = outline(text)
    places = [at for at, _ in found.borders]
    assert places == sorted(set(places))
    assert list(found.starts[1:]) == sorted(set(found.starts[1:]))
    for at in (*places, *found.starts):
        assert at == 0 or text[at - 1] == "\n"
        assert len(found.section_id(at).encode()) <= MAX_SECTION_BYTES
