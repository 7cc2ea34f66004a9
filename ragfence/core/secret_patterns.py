"""What a secret looks like: addresses, phone numbers, tokens, card numbers, and what a policy's own expressions find.

Work grows linearly with the text: the built-in patterns cannot backtrack, and custom ones run on RE2.

International phone numbers without a plus: a country calling code, and what its numbers look like behind it.

For runs of digits that nothing marks as a phone number. The lengths and first digits are those of ordinary lines and
mobiles; what is rare is left out, so that fewer ids are taken for numbers.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Final, TypeAlias

from ragfence.errors import PolicyError

_NATIONAL: Final = {
    "1": r"[2-9]\d\d[2-9]\d{6}",
    "7": r"[3-9]\d{9}",
    "20": r"1[0125]\d{8}|[23]\d{8}",
    "27": r"[1-8]\d{8}",
    "30": r"2\d{9}|69\d{8}",
    "31": r"[1-9]\d{8}",
    "32": r"4\d{8}|[1-9]\d{7}",
    "33": r"[1-9]\d{8}",
    "34": r"[6-9]\d{8}",
    "36": r"[1-9]\d{7,8}",
    "39": r"3\d{8,9}|0\d{8,10}",
    "40": r"[237]\d{8}",
    "41": r"[2-9]\d{8}",
    "43": r"[1-7]\d{7,10}",
    "44": r"[1-37-9]\d{9}",
    "45": r"[2-9]\d{7}",
    "46": r"[1-9]\d{7,8}",
    "47": r"[2-9]\d{7}",
    "48": r"[1-9]\d{8}",
    "49": r"1[5-7]\d{8,9}|[2-9]\d{7,9}",
    "51": r"9\d{8}|[14-8]\d{7}",
    "52": r"[2-9]\d{9}",
    "54": r"9?[1-3]\d{9}",
    "55": r"[1-9]{2}9\d{8}|[1-9]{2}[2-5]\d{7}",
    "56": r"[2-9]\d{8}",
    "57": r"[36]\d{9}",
    "58": r"[24]\d{9}",
    "60": r"1\d{8,9}|[3-9]\d{7,8}",
    "61": r"[2-478]\d{8}",
    "62": r"8\d{8,10}|2[1-9]\d{7,8}",
    "63": r"9\d{9}|[2-8]\d{8}",
    "64": r"2\d{7,9}|[3-9]\d{7}",
    "65": r"[3689]\d{7}",
    "66": r"[689]\d{8}|[2-7]\d{7}",
    "81": r"[7-9]0\d{8}|[1-9]\d{8}",
    "82": r"1[016-9]\d{7,8}|2\d{7,8}|[3-6]\d{8}",
    "84": r"[35789]\d{8}|2\d{9}",
    "86": r"1[3-9]\d{9}|10\d{8}|2\d{9}|[3-9]\d{9,10}",
    "90": r"[2-5]\d{9}",
    "91": r"[1-9]\d{9}",
    "92": r"3\d{9}|[2-9]\d{8}",
    "93": r"7\d{8}",
    "94": r"[1-9]\d{8}",
    "95": r"9\d{7,9}",
    "98": r"[1-9]\d{9}",
    "212|213": r"[5-7]\d{8}",
    "216": r"[2-9]\d{7}",
    "218|244|251|260|593|595|963|992|998": r"9\d{8}",
    "221|256": r"[37]\d{8}",
    "225": r"[0-2]\d{9}",
    "233": r"[235]\d{8}",
    "234": r"[7-9]\d{9}",
    "237": r"[26]\d{8}",
    "243": r"[89]\d{8}",
    "250|263|962|967": r"7\d{8}",
    "254": r"[17]\d{8}",
    "255": r"[67]\d{8}",
    "258": r"8\d{8}",
    "351": r"[29]\d{8}",
    "352|355": r"6\d{8}",
    "353": r"[1-9]\d{7,8}",
    "354": r"[4-8]\d{6}",
    "356": r"[279]\d{7}",
    "357": r"[29]\d{7}",
    "358": r"4\d{7,9}|5\d{7,8}|[1-9]\d{7,8}",
    "359": r"[2-9]\d{7,8}",
    "370": r"[3-9]\d{7}",
    "371": r"[26]\d{7}",
    "372": r"5\d{6,7}|[3-7]\d{6}",
    "373": r"[2-9]\d{7}",
    "375": r"[1-4]\d{8}",
    "380": r"[3-79]\d{8}",
    "381|385": r"[1-9]\d{7,8}",
    "382|386|387|389": r"[1-7]\d{7}",
    "420": r"[2-7]\d{8}",
    "421": r"[2-59]\d{8}",
    "502|503|505|506": r"[2-8]\d{7}",
    "504": r"[2-9]\d{7}",
    "507": r"6\d{7}",
    "591": r"[67]\d{7}",
    "598": r"9\d{7}",
    "852|853": r"[2-9]\d{7}",
    "855": r"[1-9]\d{7,8}",
    "856": r"20\d{8}",
    "880": r"1[3-9]\d{8}",
    "886": r"9\d{8}|[2-8]\d{7,8}",
    "961": r"[37-9]\d{6,7}",
    "964": r"7\d{9}",
    "965": r"[569]\d{7}",
    "966": r"[15]\d{8}",
    "968": r"[279]\d{7}",
    "970|995": r"5\d{8}",
    "971|972": r"5\d{8}|[2-9]\d{7}",
    "973": r"[13]\d{7}",
    "974": r"[3-7]\d{7}",
    "976": r"[89]\d{7}",
    "977": r"9\d{9}",
    "994": r"[1-9]\d{8}",
    "996": r"[579]\d{8}",
}

_A_DATE: Final = r"(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])"
"""20201231 and a counter behind it is as often an order number as a line in Cairo"""

WITHOUT_PLUS: Final = (
    rf"(?=\d{{10,15}}(?!\d))(?!{_A_DATE})(?:"
    + "|".join(f"(?:{code})(?:{rest})" for code, rest in _NATIONAL.items())
    + ")"
)
"""an expression; whoever uses it says what may stand before it and behind it"""


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
            f"{pattern!r} is not a redaction pattern",
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
