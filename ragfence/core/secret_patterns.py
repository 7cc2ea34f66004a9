"""What a secret looks like: addresses, phone numbers, tokens, card numbers, and what a policy's own expressions find.

Work grows linearly with the text: the built-in patterns cannot backtrack, and custom ones run on RE2.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, TypeAlias

from ragfence.errors import PolicyError

REDACTED: Final = "[redacted]"
DEFAULT_PATTERNS: Final = ("bearer_token", "card")

Replace: TypeAlias = Callable[[str], str]

# Every pattern starts where its run of characters starts (the look-behind) and takes the run as a whole
# (`++`), so no character is looked at more than a few times.
_EMAIL = re.compile(r"(?<![\w.%+'-])[\w.%+'-]++@(?:[\w-]++\.)+\w{2,}")
_PHONE = re.compile(
    r"(?<![\w+])\+\d(?:[ ().-]{0,2}\d){6,14}(?!\d)"  # +49 (0)30 123456
    r"|(?<!\w)\(?\d{3}\)?[ .-]\d{3}[ .-]\d{4}(?!\w)"  # (555) 123-4567
)
_BEARER = re.compile(
    r"(?<!\w)bearer\s{1,8}[\w.~+/-]{16,}+=*+"
    r"|(?<![\w-])eyJ[\w-]{8,}+\.[\w-]{8,}+\.[\w-]++",  # a JSON Web Token
    re.IGNORECASE,
)
_DIGIT_GROUPS = re.compile(r"(?<!\d)\d++(?:[ -]\d++)*+")
_DIGITS = re.compile(r"\d++")

CARD_LIKE = re.compile(r"[\d -]{13}")
PHONE_LIKE = re.compile(r"[\d ().-]{7}")
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


_BUILT_IN: Final[dict[str, Replace]] = {
    "email": lambda text: _EMAIL.sub(REDACTED, text) if "@" in text else text,
    "phone": lambda text: _PHONE.sub(REDACTED, text),
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
