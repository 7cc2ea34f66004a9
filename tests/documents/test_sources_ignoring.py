"""Patterns as in .gitignore: each of them beside the paths it means and those it does not."""

from __future__ import annotations

from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragfence.documents.sources.ignore_rules import MAX_PATTERNS, Ignore
from ragfence.errors import ValidationError


@pytest.mark.parametrize(
    ("pattern", "meant", "not_meant"),
    [
        ("a", ["a", "a/", "x/a", "x/y/a/"], ["ab", "ba", "x/ab", "A"]),
        ("/a", ["a", "a/"], ["x/a"]),
        ("a/", ["a/", "x/a/"], ["a", "x/a"]),
        ("x/a", ["x/a", "x/a/"], ["a", "y/x/a"]),
        ("/x/a/", ["x/a/"], ["x/a", "y/x/a/"]),
        ("*.md", ["a.md", "x/a.md", ".md"], ["a.mdx", "md"]),
        ("*", ["a", "x/a", "a/"], []),
        ("x/*", ["x/a", "x/a/"], ["x/", "x/a/b"]),
        ("*/a", ["x/a"], ["a", "x/y/a"]),
        ("a?c", ["abc", "x/a-c"], ["ac", "a/c", "abbc"]),
        ("[ab].md", ["a.md", "b.md"], ["c.md", "ab.md"]),
        ("[a-c]", ["b"], ["d", "-"]),
        ("[!a]", ["b", "x/b"], ["a"]),
        ("[^a]", ["b"], ["a"]),
        ("x[!a]y", ["xby"], ["x/y", "xay"]),
        ("[]a]", ["]", "a"], ["b"]),
        ("[[x]", ["[", "x"], ["y"]),
        ("[-&&~~||]", ["&", "~", "|", "-"], ["a"]),
        (
            "draft[[:digit:]].md",
            ["draft1.md", "x/draft9.md"],
            ["draft:.md", "draft].md", "drafta.md", "draft\u0663.md"],
        ),
        ("[[:upper:]_]*", ["A", "Ab", "_a"], ["a", ":"]),
        ("[![:alpha:]]", ["1", ":"], ["a", "Z"]),
        ("[[:alpha:][:digit:]]", ["a", "1"], ["-", ":"]),
        ("[[:alpha:]-z]", ["a", "-", "z"], ["{", "1"]),
        ("[[:punct:]]", ["!", "[", "~", "_"], ["a", " "]),
        ("[[:digit]", ["[", ":", "d"], ["1"]),
        ("[[:]", ["[", ":"], ["]"]),
        ("[A-[:digit:]]", ["A]", "[]", ":]"], ["1", "A", "1]"]),
        ("a[b", ["a[b"], ["ab"]),
        ("**/a", ["a", "x/a", "x/y/a/"], ["ab"]),
        ("**/x/a", ["x/a", "y/x/a"], ["a"]),
        ("x/**", ["x/a", "x/a/b"], ["x", "x/"]),
        ("x/**/a", ["x/a", "x/y/a", "x/y/z/a"], ["a", "xa", "y/x/a"]),
        ("x/**/", ["x/a/", "x/a/b/"], ["x/", "x/a"]),
        ("**", ["a", "x/a"], []),
        ("x/**/**/a", ["x/a", "x/y/z/a"], ["a"]),
        ("**/x/**/y/**/a", ["x/y/a", "x/x/y/y/a", "q/x/q/y/q/a"], ["x/a", "y/x/a", "x/y/a/b"]),
        ("x/**/y/*b", ["x/y/ab", "x/y/y/ab", "x/y/q/y/b"], ["x/y/q/ab", "x/ab"]),
        ("*a*b?c", ["abxc", "aab-bxc", "bababbc"], ["abc", "a/bxc", "abxcd"]),
        ("a*[bc]*d", ["abd", "accbdd"], ["ad", "ab/d"]),
        ("a**b", ["ab", "axxb"], ["a/b"]),
        ("a  ", ["a"], ["a  "]),
        ("a\\ ", ["a "], ["a"]),
        ("\\#a", ["#a"], ["a"]),
        ("\\!a", ["!a"], ["a"]),
        ("\\*", ["*"], ["a"]),
        ("a.b", ["a.b"], ["axb"]),
        ("caf\u00e9", ["caf\u00e9"], ["cafe"]),
        ("cafe\u0301", ["caf\u00e9"], ["cafe"]),
        ("# a comment", [], ["# a comment", "a"]),
        ("", [], ["a", "/"]),
        ("   ", [], ["a", " "]),
        ("/", [], ["a", "a/"]),
        ("//a", [], ["a", "x/a"]),
        ("a//b", [], ["a/b", "a/x/b"]),
        ("a\r\n", ["a"], ["a\r"]),
    ],
)
def test_a_pattern_means_these_paths_and_not_those(pattern: str, meant: list[str], not_meant: list[str]) -> None:
    ignore = Ignore([pattern])
    assert [path for path in meant if not ignore.skips(path)] == []
    assert [path for path in not_meant if ignore.skips(path)] == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("a*" * 30 + "b", "a" * 250),
        ("*a" * 30 + "*b*", "a" * 250),
        ("[ab]*?*" * 20 + "c", "ab" * 120),
        ("**/a/" * 20 + "b", "a/" * 400 + "c"),
        ("**/*a*a*a*a/" * 10 + "b", "aaaaaaaa/" * 100 + "c"),
    ],
    ids=["stars", "stars first", "sets", "folders", "stars and folders"],
)
def test_no_pattern_takes_longer_than_its_path_is_worth(pattern: str, path: str) -> None:
    assert not Ignore([pattern]).skips(path)


def test_more_patterns_than_the_limit_are_refused_and_comments_do_not_count() -> None:
    lines = [f"{number}.md" for number in range(MAX_PATTERNS)]
    assert Ignore([*lines, "", "# a comment"]).skips("0.md")
    with pytest.raises(ValidationError, match="more than 5,000 patterns"):
        Ignore([*lines, "a.md"])


def test_the_last_pattern_that_matches_decides() -> None:
    ignore = Ignore(["*.md", "!keep*.md", "keep-not.md", "!/keep-not.md"])
    decided = {path: ignore.skips(path) for path in ("a.md", "keep.md", "x/keep-not.md", "keep-not.md", "a.txt")}
    assert decided == {"a.md": True, "keep.md": False, "x/keep-not.md": True, "keep-not.md": False, "a.txt": False}


def test_in_a_flat_listing_nothing_is_taken_back_out_of_an_ignored_folder() -> None:
    ignore = Ignore(["old/", "!keep.md"])
    assert ignore.skips_inside("x/old/keep.md")
    assert not ignore.skips_inside("x/keep.md")
    assert not ignore.skips_inside("x/old.md")


def test_a_pattern_that_means_nothing_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match=r"'\[z-a\]' is not a pattern"):
        Ignore(["a", "[z-a]"])
    with pytest.raises(ValidationError, match=r"there is no class \[:digits:\]"):
        Ignore(["a", "[[:digits:]]"])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text(st.sampled_from("ab/*?[]:!^\\-# .&|~(){}+$\u00e9"), max_size=8), max_size=3),
    st.text(st.sampled_from("ab/.-[]\\ \n\u00e9"), max_size=8),
)
def test_any_pattern_is_taken_or_refused_and_never_anything_else(lines: list[str], path: str) -> None:
    try:
        ignore = Ignore(lines)
    except ValidationError:
        return
    assert ignore.skips(path) in (True, False)


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="/\r\n", exclude_categories=["Cs"]), min_size=1))
def test_a_name_with_all_its_characters_escaped_means_itself(name: str) -> None:
    name = normalize("NFC", name)
    ignore = Ignore(["/" + "".join(f"\\{character}" for character in name)])
    assert ignore.skips(name)
    assert not ignore.skips(name + "x")
