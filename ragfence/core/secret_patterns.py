"""What a secret looks like: addresses, phone numbers, tokens, card numbers, and what a policy's own expressions find.

Work grows linearly with the text: the built-in patterns cannot backtrack, and custom ones run on RE2.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Final, TypeAlias

from ragfence.core.calling_codes import WITHOUT_PLUS
from ragfence.errors import PolicyError

REDACTED: Final = "[redacted]"
DEFAULT_PATTERNS: Final = ("bearer_token", "card", "phone")
"""of payload snapshots, messages and log lines"""
METADATA_PATTERNS: Final = ("bearer_token", "card")
"""of documents, whose metadata callers get back: a phone number there is data unless the policy says otherwise"""

PHONE_FIELDS: Final = (
    "phone",
    "phone_number",
    "phone_no",
    "home_phone",
    "work_phone",
    "mobile",
    "mobile_phone",
    "mobile_number",
    "cell_phone",
    "telephone",
    "telephone_number",
    "tel",
    "fax",
    "fax_number",
    "msisdn",
    "whatsapp",
)
"""whose values are phone numbers however they are written, if they have enough digits"""

Replace: TypeAlias = Callable[[str], str]

# Every pattern starts where its run of characters starts (the look-behind) and takes the run as a whole
# (`++`), so no character is looked at more than a few times.
_EMAIL = re.compile(r"(?<![\w.%+'-])[\w.%+'-]++@(?:[\w-]++\.)+\w{2,}")
# A phone number without a name in front of it starts with +, 00 or 0, has groups of 3, 3 and 4 digits, or is one run of
# digits that begins with a calling code and is as long as numbers of that country are. Other groups of digits are as
# often ids, times and amounts. A number within a word, a path, a version, an address, a
# decimal or a timestamp is not a phone number. All repetitions are bounded.
_PHONE_START = r"(?<![\w+/-])(?<!\d[.,:])"
_PHONE_END = r"(?!\w|[.,:/-]\w)"
_PHONE = re.compile(
    r"(?<![\w+])\+[1-9](?:[ ().\-/]{0,2}\d){6,14}(?!\d)"  # +4930123456, +49 (0)30 123456
    rf"|{_PHONE_START}(?:(?<!\d )|(?!\d{{3}}(?: \d{{3}}){{2}}(?!\d)))(?:"  # not within 2 001 000 000
    rf"{WITHOUT_PLUS}"  # 4930123456
    r"|\(0\) ?(?=[1-9](?:[ /-]?\d){6})\d(?:[ /-]?\d){6,11}"  # (0)30 123456
    r"|00[1-9]\d{10,12}"  # 004930123456789
    r"|00[1-9]\d{0,2}[ /-]\(?\d(?:[ ()/-]{0,2}\d){5,11}"  # 0049 30 123456
    r"|0[1-9]\d{8,9}"  # 01711234567
    r"|0[1-9](?:(?: \d\d){4}|(?:\.\d\d){4}|(?:-\d\d){4})"  # 01 23 45 67 89
    r"|(?:\(0[1-9]\d{0,4}\)[ /-]{0,2}"  # (030) 123456
    r"|(?!0\d[ -][0-3]\d[ -](?:19|20)\d\d(?!\d)|\d\d(?:-\d\d){5}(?!\d))"  # 02-03-2024 10, 01-23-45-67-89-01
    r"0[1-9]\d{0,4}(?:[ /-]| [/-] ))(?=(?:[ -]?\d){6})\d(?:[ -]?\d){5,9}"  # 030 123456, 0171/1234567
    r"|(?:1[ .-])?(?:\(\d{3}\)[ .-]?|\d{3}[ .-])\d{3}[ .-]\d{4}"  # (555) 123-4567
    rf"){_PHONE_END}"
)
_NAMED_PHONE = re.compile(
    r"(?<![^\W_])(tel(?:ephone|efon)?|(?:tele)?phone|mobile|fax|msisdn|whatsapp)"
    r"(?:[ _-]?(?:number|num|no|nr))?+[\"']?\W{1,4}?(?=[\d(])(\(?\d(?:[ ().\-/]{0,2}\d){6,14})(?!\w)",
    re.IGNORECASE,
)
_BEARER = re.compile(
    r"(?<!\w)bearer\s{1,8}[\w.~+/-]{16,}+=*+"
    r"|(?<![\w-])eyJ[\w-]{8,}+\.[\w-]{8,}+\.[\w-]++",  # a JSON Web Token
    re.IGNORECASE,
)
_DIGIT_GROUPS = re.compile(r"(?<!\d)\d++(?:[ -]\d++)*+")
_DIGITS = re.compile(r"\d++")

_SPACES: Final = "\u00a0\u1680\u2000-\u200f\u202a-\u202f\u205f-\u2064\u2066-\u2069\u3000\ufeff\u00ad"
"""as web pages and address books put them into numbers and around them; some have no width"""
_DASHES: Final = "\u2010-\u2015\u2212\ufe58\ufe63\uff0d"
_WIDE: Final = {"\uff0b": "+", "\uff08": "(", "\uff09": ")", "\uff0e": ".", "\uff0f": "/"}

_DASH = re.compile(f"[{_DASHES}]")
_ODD = re.compile(rf"(?![0-9])\d|[{_SPACES}{_DASHES}{''.join(_WIDE)}]")

CARD_LIKE = re.compile(r"[\d -]{13}")
PHONE_LIKE = re.compile(rf"[\d ()./{_SPACES}{_DASHES}{''.join(_WIDE)}-]{{7}}")
"""in every text that holds one, and in some that hold none: a single pass, for texts that mostly hold neither"""

_URL_USER = re.compile(
    r"://(?:[^\s/@]{1,256}+|[^\s/@\"<>]++)@"  # further than that only while it looks like a URL
    r"(?:[^\s/?#@\"'<>]*+@)*+"  # bob:p@ss@host
)


def without_url_users(text: str) -> str:
    return _URL_USER.sub(f"://{REDACTED}@", text) if "://" in text else text


def _without_cards(text: str) -> str:
    return _DIGIT_GROUPS.sub(_without_card, text)


def _without_card(found: re.Match[str]) -> str:
    """The run of digit groups without card numbers: neighbouring groups that together pass the checksum."""
    run = found[0]
    if len(run) < 13:
        return run
    groups = list(_DIGITS.finditer(run))
    pieces, done, covered = [], 0, -1
    for first, group in enumerate(groups):
        last = _end_of_card(groups, first)
        if last <= covered:
            continue
        # Chance makes some windows valid that only overlap a card, so all of them go, not just the first.
        if first > covered:
            pieces += [run[done : group.start()], REDACTED]
        covered = last
        done = groups[last].end()
    return "".join((*pieces, run[done:]))


def _end_of_card(groups: list[re.Match[str]], first: int) -> int:
    """The last group of the longest card number that starts with the group `first`; -1 if none does."""
    digits, end = "", -1
    if groups[first][0][0] not in "23456":
        return end
    for last in range(first, len(groups)):
        digits += groups[last][0]
        if len(digits) > 19:
            break
        if len(digits) >= 13 and _luhn(digits):
            end = last
    return end


def _luhn(digits: str) -> bool:
    total = sum(map(int, digits[-1::-2]))
    return (total + sum(sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])) % 10 == 0


def _without_phones(text: str) -> str:
    if PHONE_LIKE.search(text) is None:
        return text
    return _without(_NAMED_PHONE, _without(_PHONE, text), 2)


def _without(pattern: re.Pattern[str], text: str, group: int = 0) -> str:
    """What the pattern finds is found however its digits and separators are written; all else stays as it is."""
    plain = text if text.isascii() else _ODD.sub(_in_ascii, text)  # one character for each, so places are the same
    pieces, done = [], 0
    for found in pattern.finditer(plain):
        pieces += [text[done : found.start(group)], REDACTED]
        done = found.end(group)
    return "".join((*pieces, text[done:])) if pieces else text


def _in_ascii(found: re.Match[str]) -> str:
    character = found[0]
    if character in _WIDE:
        return _WIDE[character]
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    return "-" if _DASH.match(character) else " "


_BUILT_IN: Final[dict[str, Replace]] = {
    "email": lambda text: _EMAIL.sub(REDACTED, text) if "@" in text else text,
    "phone": _without_phones,
    "bearer_token": lambda text: _BEARER.sub(REDACTED, text),
    "card": _without_cards,
}


def replacement(pattern: str) -> Replace:
    if pattern in _BUILT_IN:
        return _BUILT_IN[pattern]
    if not pattern.startswith("re:"):
        raise PolicyError(
            f"{pattern!r} is no redaction pattern",
            hint=f"use one of {', '.join(_BUILT_IN)}, or re: and a regular expression (re:ACME-[0-9]+)",
        )
    # Python's own engine takes exponential time for some expressions, and payloads come from strangers.
    import pyarrow as pa
    import pyarrow.compute as pc

    expression = pattern.removeprefix("re:")
    try:
        matches_nothing = pc.match_substring_regex(pa.array([""]), pattern=expression)[0].as_py()
    except pa.ArrowInvalid as broken:
        raise PolicyError(f"{pattern!r}: {broken}", hint="RE2 syntax: no back-references, no look-around") from broken
    if matches_nothing:
        raise PolicyError(f"{pattern!r} matches empty text", hint="write an expression that needs a character")

    def replace(text: str) -> str:
        # Arrow holds UTF-8; an error message may hold half a surrogate pair.
        readable = pa.array([text.encode("utf-8", "replace").decode()])
        return str(pc.replace_substring_regex(readable, pattern=expression, replacement=REDACTED)[0].as_py())

    return replace
