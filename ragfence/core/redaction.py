"""Takes secrets out of payloads and error messages before anything is stored.

A redacted value is `[redacted]` and nothing else: a digest of it would let anybody who guesses the secret
confirm the guess. Work grows linearly with the text, whatever the text: the built-in patterns cannot
backtrack, and custom ones run on RE2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ragfence.core.canonical import JsonValue
from ragfence.errors import PolicyError

REDACTED: Final = "[redacted]"

DEFAULT_FIELDS: Final = (
    "password",
    "passwd",
    "secret",
    "client_secret",
    "token",
    "access_token",
    "refresh_token",
    "id_token",
    "api_key",
    "x-api-key",
    "apikey",
    "private_key",
    "authorization",
    "cookie",
    "set-cookie",
    "ssn",
    "card_number",
    "cvv",
)
DEFAULT_PATTERNS: Final = ("bearer_token", "card")

_Replace: TypeAlias = Callable[[str], str]

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

_CARD_LIKE = re.compile(r"[\d -]{13}")
_PHONE_LIKE = re.compile(r"[\d ().-]{7}")
"""in every text that holds one, and in some that hold none: a single pass, for texts that mostly hold neither"""

_URL_USER = re.compile(r"://[^\s/@]{1,256}+@")
_NAME = re.compile(r"(?<![\w-])([A-Za-z][\w-]{0,63}+)[\"']?\s{0,4}+[=:]\s{0,4}+")
_VALUE = re.compile(
    r"\"(?:[^\"\\]|\\.)*+\""
    r"|'(?:[^'\\]|\\.)*+'"
    r"|(?:(?:bearer|basic|digest|token)\s{1,4}+)?[^\s,;&\"'<>]++",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True)
class Redaction:
    """Which values are secrets: by the name of their field, or by what they look like.

    A field is a name (`password`) or the end of a path (`user.email`); `*` stands for exactly one name, lists
    do not count, and case, `-` and `_` do not matter. A pattern is a built-in name (`email`, `phone`,
    `bearer_token`, `card`) or `re:` and a regular expression. The default fields always apply.

    >>> Redaction(fields=("user.email",)).redact({"user": {"email": "a@example.org"}, "apiKey": 1})
    {'apiKey': '[redacted]', 'user': {'email': '[redacted]'}}
    """

    fields: tuple[str, ...] = ()
    patterns: tuple[str, ...] = DEFAULT_PATTERNS
    _by_name: dict[str, list[tuple[str, ...]]] = field(init=False, repr=False, compare=False)
    _replacements: tuple[_Replace, ...] = field(init=False, repr=False, compare=False)
    _custom: bool = field(init=False, repr=False, compare=False)
    _digits_like: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name: dict[str, list[tuple[str, ...]]] = {}
        for spec in (*DEFAULT_FIELDS, *self.fields):
            *parents, name = _parts(spec)
            by_name.setdefault(name, []).append(tuple(parents))
        object.__setattr__(self, "_by_name", by_name)
        object.__setattr__(self, "_replacements", tuple(_replacement(pattern) for pattern in self.patterns))
        object.__setattr__(self, "_custom", any(pattern.startswith("re:") for pattern in self.patterns))
        object.__setattr__(self, "_digits_like", _PHONE_LIKE if "phone" in self.patterns else _CARD_LIKE)

    def __reduce__(self) -> tuple[type[Redaction], tuple[tuple[str, ...], tuple[str, ...]]]:
        # Policies cross process boundaries; compiled replacements do not.
        return Redaction, (self.fields, self.patterns)

    def redact(self, value: JsonValue) -> JsonValue:
        """A copy without secrets. Keys are looked through as well: `{"a@example.org": 1}` names somebody."""
        return self._redacted(value, ())

    def is_harmless(self, text: str) -> bool:
        """As it is after `redact_text`, which is asked only where something in the text may be a secret."""
        if not (":" in text or "=" in text or "@" in text or self._digits_like.search(text) or self._custom):
            lowered = text.lower()
            if "bearer" not in lowered and "eyj" not in lowered:
                return True
        return self.redact_text(text) == text

    def is_harmless_name(self, name: str) -> bool:
        """Neither a secret itself, nor the name of one that stands in no other."""
        return not self._is_secret((_normal(name),)) and self.redact_text(name) == name

    def redact_text(self, text: str) -> str:
        """Free text, such as an error message, without secrets."""
        for replacement in self._replacements:
            text = replacement(text)
        if "://" in text:
            text = _URL_USER.sub(f"://{REDACTED}@", text)
        return "".join(self._without_named_values(text))

    def _redacted(self, value: JsonValue, path: tuple[str, ...]) -> JsonValue:
        if isinstance(value, str):
            return self.redact_text(value)
        if isinstance(value, list | tuple):  # both are written as arrays
            return [self._redacted(item, path) for item in value]
        if isinstance(value, dict):
            result: dict[str, JsonValue] = {}
            # Sorted, so that keys which become equal are numbered the same way whatever their order was.
            for name in sorted(value):
                here = (*path, _normal(name))
                shown = _unused(self.redact_text(name), result)
                result[shown] = REDACTED if self._is_secret(here) else self._redacted(value[name], here)
            return result
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**12:
            # A card number sent as a number.
            return value if (text := str(value)) == self.redact_text(text) else REDACTED
        return value

    def _is_secret(self, path: tuple[str, ...]) -> bool:
        return any(_ends_with(path[:-1], parents) for parents in self._by_name.get(path[-1], ()))

    def _without_named_values(self, text: str) -> Iterator[str]:
        """`password=hunter2` and `"token": "..."` without what stands behind the name."""
        done = 0
        for named in _NAME.finditer(text):
            wanted = self._by_name.get(_normal(named[1]), ())
            # Text has no path: a rule that asks for particular parents cannot be judged here.
            if named.start() < done or not any(set(parents) <= {"*"} for parents in wanted):
                continue
            if secret := _VALUE.match(text, named.end()):
                yield text[done : named.end()]
                yield REDACTED
                done = secret.end()
        yield text[done:]


def _normal(name: str) -> str:
    return name.casefold().replace("-", "").replace("_", "").replace(" ", "")


def _parts(spec: str) -> list[str]:
    parts = [part.strip() for part in spec.split(".")]
    if not all(parts) or parts[-1] == "*" or any("*" in part and part != "*" for part in parts):
        raise PolicyError(
            f"{spec!r} is no field to redact",
            hint="write a name (password), the end of a path (user.email), or * for one name (*.token)",
        )
    return [_normal(part) for part in parts]


def _ends_with(path: tuple[str, ...], parents: tuple[str, ...]) -> bool:
    if len(parents) > len(path):
        return False
    tail = path[len(path) - len(parents) :]
    return all(wanted in ("*", name) for wanted, name in zip(parents, tail, strict=True))


def _unused(name: str, taken: Iterable[str]) -> str:
    if name not in taken:
        return name
    number = 2
    while (numbered := f"{name} ({number})") in taken:
        number += 1
    return numbered


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


_BUILT_IN: Final[dict[str, _Replace]] = {
    "email": lambda text: _EMAIL.sub(REDACTED, text) if "@" in text else text,
    "phone": lambda text: _PHONE.sub(REDACTED, text),
    "bearer_token": lambda text: _BEARER.sub(REDACTED, text),
    "card": _without_cards,
}


def _replacement(pattern: str) -> _Replace:
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
