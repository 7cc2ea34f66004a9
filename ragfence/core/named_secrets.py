"""Secrets in free text, found by the name before them: `password=hunter2`, `"token": ["..."]`, `Cookie: a=b; c=d`.

Messages show values as JSON, as Python's repr, as headers or query strings, quoted, escaped, and cut off anywhere. A
value is taken as far as its own way of writing goes; where the end is missing, too much is taken rather than too
little. Work grows linearly with the text: what is looked through for an end is taken, or it is the one stretch per
kind of quote in which that quote does not close.
"""

from __future__ import annotations

import re
from typing import Final
from unicodedata import normalize
from urllib.parse import unquote

from ragfence.core.secret_patterns import REDACTED

# Like the patterns: names start where their run of characters starts, and no quantifier gives anything back.
_NAME = re.compile(
    r"(?<![\w%-])(?!\d[\dT-]*+(?![\w%-]))"  # hours and minutes name nothing, and there are many of them
    r"([\w%-]++)"  # --password, user%5Bpassword%5D
    r"\]?+(?:\[\d{0,9}\])?+([\\\"'\]]*+)"  # user[password], password[0], "password", \"password\"
    r"\s{0,4}+[=:]{1,3}+>?+\s*+"
)
_WORD = re.compile(r"[\w-]++")

_WHOLE_LINES: Final = frozenset(("authorization", "proxyauthorization", "cookie", "setcookie"))
"""headers whose values hold blanks, commas and semicolons"""
_LINE_END = re.compile(r"[\r\n]")
_SHOWN_LINE_END = re.compile(r"[\r\n]|(?:\\r)?+\\n")
"""also as a repr shows it"""

_SCHEME = re.compile(r"(?:bearer|basic|digest|token)\s{1,4}+", re.IGNORECASE)
_PLAIN = re.compile(
    r"(?:<{1,2}+(?=\w))?+"
    r"(?:[^\s,;&\"'<>(\[{]|[\"'](?=\w))++"  # a quote before a letter closes nothing
)
_OPENING = re.compile(r"(?<![\w\\])[BbFfRrUu]{0,2}+(\\{0,15}+)([\"'])")
_CLOSING: Final = {quote: re.compile(rf"(?<!\\)(\\*+){quote}") for quote in "\"'"}
_STRUCTURE = re.compile(rf"{_OPENING.pattern}|[(\[{{)\]}}]")
_GOES_ON = re.compile(r"(?![\s,;&\"'<>)\]}\\]|[.:!?](?:\s|\Z)|\Z)")
_BLANKS = re.compile(r"\s++")


def normal(name: str) -> str:
    if not name.isascii():
        name = normalize("NFC", name)  # as names are stored, whatever system wrote them
    return name.casefold().replace("-", "").replace("_", "").replace(" ", "")


def without_named_secrets(text: str, names: frozenset[str]) -> str:
    """The text without what stands behind these names, which are as `normal` writes them."""
    pieces, done = [], 0
    for named in _NAME.finditer(text):
        if named.start() < done or (name := _name(text, named, names)) not in names:
            continue
        whole_line = name in _WHOLE_LINES and _is_header(text, named)
        end = _end_of_header(text, named) if whole_line else _end_of_value(text, named.end())
        if end > named.end():
            pieces += [text[done : named.end()], REDACTED]
            done = end
    return "".join((*pieces, text[done:])) if pieces else text


def _name(text: str, named: re.Match[str], names: frozenset[str]) -> str:
    run = named[1]
    if "%" in run:  # of a query string: the last word, user%5Bpassword%5D%5B0%5D
        run = next((word for word in reversed(_WORD.findall(unquote(run))) if not word.isdigit()), "")
    name = normal(run)
    if name not in names and run[:1] in ("n", "r") and _before(text, named) == "\\":
        name = normal(run[1:])  # of a repr, where a line break is two letters
    return name


def _is_header(text: str, named: re.Match[str]) -> bool:
    """Neither a name within quotes, nor one with a quoted value, nor a part of a query string."""
    quoted = named[2].strip("\\]") or _OPENING.match(text, named.end())
    return not quoted and _before(text, named) not in ("?", "&")


def _before(text: str, named: re.Match[str]) -> str:
    return text[max(0, named.start() - 1) : named.start()]


def _end_of_header(text: str, named: re.Match[str]) -> int:
    """Where its line ends, or the text in quotes that it is: `-H "Cookie: a=b" https://...`"""
    start, end, quote = named.end(), len(text), _before(text, named)
    before = text[max(0, named.start() - 17) : named.start() - 1]
    escapes = len(before) - len(before.rstrip("\\"))
    if quote in _CLOSING and escapes < 16:
        closing = _closing(text, start, quote, escapes=escapes)
        end = closing.start() if closing else end
    return _start_of(_SHOWN_LINE_END, text, start, end)


def _end_of_value(text: str, start: int) -> int:
    while True:
        if scheme := _SCHEME.match(text, start):
            start = scheme.end()
        end = _end_of_pieces(text, start)
        blanks = _BLANKS.match(text, end) if text[start:end].endswith(":") else None
        if blanks is None:
            return end
        start = blanks.end()  # another name was in between: `password: value: hunter2`


def _end_of_pieces(text: str, start: int) -> int:
    """Of what is written without a gap: `b'hunter2'`, `Secret(value="hunter2")`, `'it''s'`, `[redacted]!`."""
    if text.startswith("-----BEGIN", start):
        return _end_of_pem(text, start)
    if opening := _OPENING.match(text, start):
        end, mark = _end_of_quoted(text, opening)[0], opening[1] + opening[2]
        while (again := _OPENING.match(text, end)) and again[0] == mark:
            end, _ = _end_of_quoted(text, again)
        # Two quotes and no more are how some languages write one.
        return _end_of_plain(text, end) if text[opening.end() : end] == mark else end
    return _end_of_plain(text, start)


def _end_of_plain(text: str, end: int) -> int:
    while True:
        if plain := _PLAIN.match(text, end):
            end = plain.end()
        if not text.startswith(("(", "[", "{"), end):
            return end
        end = _end_of_brackets(text, end)
        if not _GOES_ON.match(text, end):
            return end


def _end_of_quoted(text: str, opening: re.Match[str]) -> tuple[int, bool]:
    """And whether it was closed there; otherwise it was cut off."""
    start = opening.end()
    if closing := _closing(text, start, opening[2], escapes=len(opening[1])):
        own = len(closing[1]) >= len(opening[1])  # with fewer backslashes it closes the text around
        return (closing.end() if own else closing.start()), own
    if text.startswith("-----BEGIN", start):
        return _end_of_pem(text, start), False
    return _start_of(_LINE_END, text, start, len(text)), False


def _closing(text: str, start: int, quote: str, *, escapes: int) -> re.Match[str] | None:
    """The quote that closes one with this many backslashes; each level of escaping doubles them, and adds one."""
    for found in _CLOSING[quote].finditer(text, start):
        given = len(found[1])
        if given < escapes or given % (2 * escapes + 2) == escapes:
            return found
    return None


def _end_of_brackets(text: str, start: int) -> int:
    depth = 0
    while found := _STRUCTURE.search(text, start):
        start = found.end()
        if found[2]:
            start, closed = _end_of_quoted(text, found)
            if not closed:
                return start
        elif found[0] in "([{":
            depth += 1
        else:
            depth -= 1
            if not depth:
                return start
    return len(text)


def _end_of_pem(text: str, start: int) -> int:
    """A private key has lines of its own."""
    end = text.find("-----END", start)
    end = text.find("-----", end + 8) if end >= 0 else end
    return end + 5 if end >= 0 else len(text)


def _start_of(pattern: re.Pattern[str], text: str, start: int, end: int) -> int:
    found = pattern.search(text, start, end)
    return found.start() if found else end
