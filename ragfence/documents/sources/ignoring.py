"""Which paths of a folder or prefix are passed over, in the language of .gitignore.

Written here rather than taken from a package: of all that .gitignore can say, this is the part that is decided by a
path alone. Case matters on every machine, and paths are compared after NFC, so that the same files are ignored
everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from unicodedata import normalize

from ragfence.errors import ValidationError

IGNORED = (".*", "node_modules", "__pycache__")
"""Hidden files and folders, and what no one means by documents."""


class Ignore:
    """The last pattern that matches decides; `!` takes back what an earlier one ignores.

    As in git, nothing can be taken back out of a folder that is ignored itself.

    >>> ignore = Ignore([*IGNORED, "*.draft.md", "!keep.draft.md", "/archive/"])
    >>> [ignore.skips(path) for path in ("a/x.draft.md", "a/keep.draft.md", "archive/", "a/archive/", ".git/")]
    [True, False, True, False, True]
    """

    def __init__(self, lines: Iterable[str]) -> None:
        rules = list(_rules(lines))
        grouped = [(keeps, list(group)) for keeps, group in groupby(rules, key=lambda rule: rule[0])]
        # The last one that matches decides, so the search starts at the end.
        self._rules = [
            (keeps, re.compile("|".join(f"(?:{rule})" for _, rule in group), re.DOTALL))
            for keeps, group in reversed(grouped)
        ]

    def skips(self, path: str) -> bool:
        """Whether this very path is ignored: relative, in NFC, with a slash at its end if it is a folder."""
        for keeps, rule in self._rules:
            if rule.fullmatch(path):
                return not keeps
        return False

    def skips_inside(self, path: str) -> bool:
        """Whether the path or any folder it is in is ignored: for listings that are no trees."""
        at = path.find("/")
        while at >= 0:
            if self.skips(path[: at + 1]):
                return True
            at = path.find("/", at + 1)
        return self.skips(path)


def _rules(lines: Iterable[str]) -> Iterator[tuple[bool, str]]:
    """(whether it takes back, the regular expression of the paths it means)"""
    for line in lines:
        pattern = _without_trailing_spaces(normalize("NFC", line.rstrip("\r\n")))
        if not pattern or pattern.startswith("#"):
            continue
        keeps = pattern.startswith("!")
        pattern = pattern.removeprefix("!")
        if not pattern.strip("/") or "//" in pattern:
            continue  # it names nothing
        try:
            rule = _translated(pattern)
            re.compile(rule)
        except re.error as broken:
            raise ValidationError(
                f"{line!r} is no pattern to ignore files by: {broken.msg}", hint="patterns are those of .gitignore"
            ) from None
        yield keeps, rule


def _without_trailing_spaces(pattern: str) -> str:
    bare = pattern.rstrip(" ")
    return bare + " " if bare.endswith("\\") and len(bare) < len(pattern) else bare


def _translated(pattern: str) -> str:
    end = "/" if pattern.endswith("/") else "/?"
    parts = pattern.rstrip("/").split("/")
    if parts[0] == "":
        parts = parts[1:]
    elif len(parts) == 1 and parts[0] != "**":
        parts = ["**", *parts]  # without a slash in it, it means a name at any depth
    # `a/**/b` is also `a/b`, while `a/**` is all that `a` holds, without `a` itself.
    rule = "".join("(?:.*/)?" if part == "**" else _segment(part) + "/" for part in parts[:-1])
    return rule + (".+" if parts[-1] == "**" else _segment(parts[-1])) + end


_ONE = r"(?:\\.|[^\]\\])"
_CLASS = r"\[:[^\]]*:\]"
# Possessive: what is in a set is decided from its beginning, not by where it could end.
_SET = rf"[!^]?(?:\](?:-{_ONE})?)?(?:{_CLASS}|{_ONE}(?:-{_ONE})?)*+"
_TOKEN = re.compile(rf"\\(?P<literal>.)|(?P<stars>\*+)|(?P<any>\?)|\[(?P<set>{_SET})\]|(?P<other>.)", re.DOTALL)


def _segment(part: str) -> str:
    if not part.strip("*"):
        return "[^/]+"  # there is no empty name
    out = []
    for token in _TOKEN.finditer(part):
        if token["stars"]:
            out.append("[^/]*")
        elif token["any"]:
            out.append("[^/]")
        elif token["set"] is not None:
            out.append(_set(token["set"]))
        else:
            out.append(re.escape(token["literal"] or token["other"]))
    return "".join(out)


_MEMBER = re.compile(rf"({_CLASS})|(\\?.)(?:-(\\?.))?", re.DOTALL)
_CLASSES = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": r"\t\ ",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": r"\x21-\x7e",
    "lower": "a-z",
    "print": r"\x20-\x7e",
    "punct": r"\x21-\x2f\x3a-\x40\x5b-\x60\x7b-\x7e",
    "space": r"\t-\r\ ",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}
"""As git has them: of ASCII, in every language."""


def _set(inside: str) -> str:
    negated = inside[:1] in ("!", "^") and len(inside) > 1
    # Each one is escaped: two of some characters in a row mean something else to `re` than to git.
    members = [
        _class(named) if named else re.escape(first[-1]) + (f"-{re.escape(last[-1])}" if last else "")
        for named, first, last in _MEMBER.findall(inside[negated:])
    ]
    return f"(?!/)[{'^' if negated else ''}{''.join(members)}]"


def _class(named: str) -> str:
    try:
        return _CLASSES[named[2:-2]]
    except KeyError:
        raise re.error(f"there is no class {named}") from None
