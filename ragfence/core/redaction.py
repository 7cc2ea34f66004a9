"""Takes secrets out of payloads and error messages before anything is stored.

A redacted value is `[redacted]` and nothing else: a digest of it would let anybody who guesses the secret
confirm the guess. Work grows linearly with the text, whatever the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from ragfence.core.canonical import JsonValue, canonical_json
from ragfence.core.named_secrets import normal, without_named_secrets
from ragfence.core.secret_patterns import (
    CARD_LIKE,
    DEFAULT_PATTERNS,
    PHONE_LIKE,
    REDACTED,
    Replace,
    replacement,
    without_url_users,
)
from ragfence.errors import PolicyError

__all__ = ["DEFAULT_FIELDS", "DEFAULT_PATTERNS", "REDACTED", "Redaction"]

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

_CARD = 10**12
"""a number from here on may be the number of a card"""


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
    _anywhere: frozenset[str] = field(init=False, repr=False, compare=False)
    _replacements: tuple[Replace, ...] = field(init=False, repr=False, compare=False)
    _custom: tuple[Replace, ...] = field(init=False, repr=False, compare=False)
    _digits_like: re.Pattern[str] = field(init=False, repr=False, compare=False)
    harmless_below: int = field(init=False, repr=False, compare=False)
    """a number nearer to 0 is no secret: too short for a card number; 0 where custom patterns must see them all"""

    def __post_init__(self) -> None:
        by_name: dict[str, list[tuple[str, ...]]] = {}
        for spec in (*DEFAULT_FIELDS, *self.fields):
            *parents, name = _parts(spec)
            by_name.setdefault(name, []).append(tuple(parents))
        # Text has no path: a rule that asks for particular parents cannot be judged there.
        anywhere = (name for name, rules in by_name.items() if any(set(parents) <= {"*"} for parents in rules))
        object.__setattr__(self, "_by_name", by_name)
        object.__setattr__(self, "_anywhere", frozenset(anywhere))
        replacements = {pattern: replacement(pattern) for pattern in self.patterns}
        custom = tuple(replace for pattern, replace in replacements.items() if pattern.startswith("re:"))
        object.__setattr__(self, "_replacements", tuple(replacements.values()))
        object.__setattr__(self, "_custom", custom)
        object.__setattr__(self, "harmless_below", 0 if custom else _CARD)
        object.__setattr__(self, "_digits_like", PHONE_LIKE if "phone" in self.patterns else CARD_LIKE)

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
        return not self._is_secret((normal(name),)) and self.redact_text(name) == name

    def redact_text(self, text: str) -> str:
        """Free text, such as an error message, without secrets."""
        for replace in self._replacements:
            text = replace(text)
        return without_named_secrets(without_url_users(text), self._anywhere)

    def _redacted(self, value: JsonValue, path: tuple[str, ...]) -> JsonValue:
        if isinstance(value, str):
            return self.redact_text(value)
        if isinstance(value, list | tuple):  # both are written as arrays
            return [self._redacted(item, path) for item in value]
        if isinstance(value, dict):
            result: dict[str, JsonValue] = {}
            # Sorted, so that keys which become equal are numbered the same way whatever their order was.
            for name in sorted(value):
                here = (*path, normal(name))
                shown = _unused(self.redact_text(name), result)
                result[shown] = REDACTED if self._is_secret(here) else self._redacted(value[name], here)
            return result
        if isinstance(value, int | float) and not isinstance(value, bool):
            return REDACTED if self._is_secret_number(value) else value
        return value

    def _is_secret_number(self, number: float) -> bool:
        """By what would be stored of it: `4111111111111111.0` is written without its point."""
        if abs(number) < self.harmless_below:
            return False
        if isinstance(number, int):
            text = int.__repr__(number)
        elif math.isfinite(number):
            text = canonical_json(number).decode()
        else:  # no JSON: refused by whoever writes it
            return False
        # What stands behind a point is long enough for a card number, and passes its checksum by chance.
        patterns = self._custom if abs(number) < _CARD else self._replacements
        return any(replace(text) != text for replace in patterns)

    def _is_secret(self, path: tuple[str, ...]) -> bool:
        return any(_ends_with(path[:-1], parents) for parents in self._by_name.get(path[-1], ()))


def _parts(spec: str) -> list[str]:
    parts = [part.strip() for part in spec.split(".")]
    if not all(parts) or parts[-1] == "*" or any("*" in part and part != "*" for part in parts):
        raise PolicyError(
            f"{spec!r} is no field to redact",
            hint="write a name (password), the end of a path (user.email), or * for one name (*.token)",
        )
    return [normal(part) for part in parts]


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
