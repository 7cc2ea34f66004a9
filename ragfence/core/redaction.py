"""Takes secrets out of payloads and error messages before anything is stored.

A redacted value is `[redacted]` and nothing else: a digest of it would let anyone who guesses the secret
confirm the guess. Work grows linearly with the text, whatever the text.

Canonical JSON without secrets, of the metadata of a million documents in a row.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from ragfence.core.canonical import JsonValue, canonical_json, parse_json
from ragfence.core.named_secrets import normal, without_named_secrets
from ragfence.core.secret_patterns import (
    CARD_LIKE,
    DEFAULT_PATTERNS,
    METADATA_PATTERNS,
    PHONE_FIELDS,
    PHONE_LIKE,
    REDACTED,
    Replace,
    replacement,
    without_url_users,
)
from ragfence.errors import PolicyError

__all__ = ["DEFAULT_FIELDS", "DEFAULT_PATTERNS", "METADATA_PATTERNS", "REDACTED", "Redaction"]

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

_PHONES = frozenset(map(normal, PHONE_FIELDS))
_PHONE_DIGITS = 6
"""in the value of a field named so: `mobile: true` and `phone: home` are not phone numbers"""

_INDEX = re.compile(r"\[(?:\d*+|\*)\]")
_MEMBER = re.compile(r"\[[\"']?+([^\[\]\"']++)[\"']?+\]")


@dataclass(frozen=True)
class Redaction:
    """Which values are secrets: by the name of their field, or by what they look like.

    A field is a name (`password`) or the end of a path (`user.email`); `*` stands for exactly one name, lists
    do not count, and case, `-` and `_` do not matter. `$.users[*].email` and `/users/0/email` mean `users.email`.
    A name in a payload that has dots or brackets is a path as well: `db.password` is a secret. A pattern is a
    built-in name (`email`, `phone`, `bearer_token`, `card`) or `re:` and a regular expression. The default fields
    always apply. `phone` is also the value of a field such as `phone` or `mobile_number`, if it has six digits or more.

    >>> Redaction(fields=("user.email",)).redact({"user": {"email": "a@example.org"}, "apiKey": 1})
    {'apiKey': '[redacted]', 'user': {'email': '[redacted]'}}
    """

    fields: tuple[str, ...] = ()
    patterns: tuple[str, ...] = DEFAULT_PATTERNS
    _by_name: dict[str, list[tuple[str, ...]]] = field(init=False, repr=False, compare=False)
    _anywhere: frozenset[str] = field(init=False, repr=False, compare=False)
    _reach: int = field(init=False, repr=False, compare=False)
    _replacements: tuple[Replace, ...] = field(init=False, repr=False, compare=False)
    _custom: tuple[Replace, ...] = field(init=False, repr=False, compare=False)
    _digits_like: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _phone_names: frozenset[str] = field(init=False, repr=False, compare=False)
    harmless_below: int = field(init=False, repr=False, compare=False)
    """a number nearer to 0 is not a secret: too short for a card number; 0 where custom patterns must see them all"""

    def __post_init__(self) -> None:
        by_name: dict[str, list[tuple[str, ...]]] = {}
        for spec in (*DEFAULT_FIELDS, *self.fields):
            for *parents, name in _rules(spec):
                by_name.setdefault(name, []).append(tuple(parents))
        # Text has no path: a rule that asks for particular parents cannot be judged there.
        anywhere = (name for name, rules in by_name.items() if any(set(parents) <= {"*"} for parents in rules))
        object.__setattr__(self, "_by_name", by_name)
        object.__setattr__(self, "_anywhere", frozenset(anywhere))
        object.__setattr__(self, "_reach", max(1, *(len(parents) for rules in by_name.values() for parents in rules)))
        replacements = {pattern: replacement(pattern) for pattern in self.patterns}
        custom = tuple(replace for pattern, replace in replacements.items() if pattern.startswith("re:"))
        object.__setattr__(self, "_replacements", tuple(replacements.values()))
        object.__setattr__(self, "_custom", custom)
        object.__setattr__(self, "harmless_below", 0 if custom else _CARD)
        phones = "phone" in self.patterns
        object.__setattr__(self, "_digits_like", PHONE_LIKE if phones else CARD_LIKE)
        object.__setattr__(self, "_phone_names", _PHONES if phones else frozenset())

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
        steps = _steps(name)
        return not (self._is_secret(steps, 0) or steps[-1] in self._phone_names) and self.redact_text(name) == name

    def redact_text(self, text: str) -> str:
        """Free text, such as an error message, without secrets."""
        for replace in self._replacements:
            text = replace(text)
        return without_named_secrets(without_url_users(text), self._anywhere)

    def _redacted(self, value: JsonValue, path: tuple[str, ...]) -> JsonValue:
        if path and path[-1] in self._phone_names and _has_phone_digits(value):
            return REDACTED
        if isinstance(value, str):
            return self.redact_text(value)
        if isinstance(value, list | tuple):  # both are written as arrays
            return [self._redacted(item, path) for item in value]
        if isinstance(value, dict):
            result: dict[str, JsonValue] = {}
            # Sorted, so that keys which become equal are numbered the same way whatever their order was.
            for name in sorted(value):
                here = (*path, *_steps(name))
                secret = self._is_secret(here, len(path))
                shown = _unused(self.redact_text(name), result)
                # No rule looks further back, and names come from strangers: paths of any length would add up.
                result[shown] = REDACTED if secret else self._redacted(value[name], here[-self._reach :])
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
        else:  # not JSON: refused when it is written
            return False
        # What stands behind a point is long enough for a card number, and passes its checksum by chance.
        patterns = self._custom if abs(number) < _CARD else self._replacements
        return any(replace(text) != text for replace in patterns)

    def _is_secret(self, path: tuple[str, ...], start: int) -> bool:
        """Whether a step of the path, from this one on, leads to a secret: `password.value` does with its first."""
        for at in range(start, len(path)):
            rules = self._by_name.get(path[at])
            if rules and any(_ends_with(path, at, parents) for parents in rules):
                return True
        return False


def _has_phone_digits(value: JsonValue) -> bool:
    if isinstance(value, str):
        return sum(map(str.isdecimal, value)) >= _PHONE_DIGITS
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) >= 10 ** (_PHONE_DIGITS - 1)


def _steps(name: str) -> tuple[str, ...]:
    """The path that the name of a value is: `db.password` and `user[password]` were objects before they were flat."""
    if "." not in name and "[" not in name:
        return (normal(name),)
    return tuple(normal(step) for step in _split(name) if step) or (normal(name),)


def _split(path: str) -> list[str]:
    return _MEMBER.sub(r".\1", _INDEX.sub("", path)).split(".")


def _rules(spec: str) -> Iterator[list[str]]:
    """The paths that a field of a policy means, which may be written as a JSON path or a JSON pointer, too."""
    path = spec.strip()
    if path.startswith("/"):
        yield _rule(spec, [step for step in _split(path[1:].replace("/", ".")) if not step.isdigit()])
    elif path.startswith(("$.", "$[")):
        yield _rule(spec, _split(path[1:].lstrip("."))[path[1] == "[" :])
    else:
        yield _rule(spec, _split(path))
        if "/" in path:  # one name with a slash, or two
            yield _rule(spec, _split(path.replace("/", ".")))


def _rule(spec: str, steps: list[str]) -> list[str]:
    steps = [step.strip() for step in steps]
    odd = any(step == "$" or ("*" in step and step != "*") or "[" in step or "]" in step for step in steps)
    if odd or not steps or not all(steps) or steps[-1] == "*":
        raise PolicyError(
            f"{spec!r} is not a field to redact",
            hint="write a name (password), the end of a path (user.email), or * for one name (*.token)",
        )
    return [normal(step) for step in steps]


def _ends_with(path: tuple[str, ...], end: int, parents: tuple[str, ...]) -> bool:
    """Whether the path has these parents before its step at `end`."""
    start = end - len(parents)
    return start >= 0 and all(wanted in ("*", name) for wanted, name in zip(parents, path[start:end], strict=True))


def _unused(name: str, taken: Iterable[str]) -> str:
    if name not in taken:
        return name
    number = 2
    while (numbered := f"{name} ({number})") in taken:
        number += 1
    return numbered


_quoted: Callable[[str], str] = json.encoder.encode_basestring
_KNOWN_AT_MOST = 1024

Shape = tuple[tuple[str, str], ...]
"""names in their order, each with what stands before its value"""


class CleanJson:
    """What is left of canonical JSON after `redaction.redact(...)`, as canonical JSON.

    Most metadata is flat: a few names, always the same ones, with texts and numbers in which nothing is a secret. What
    the names come to is worked out once, and such a dict is then written in one pass, in half the time.
    """

    def __init__(self, redaction: Redaction) -> None:
        self.redaction = redaction
        self._shapes: dict[tuple[Any, ...], Shape] = {}

    def write(self, given: dict[str, Any]) -> bytes:
        """Raises `NotJson`."""
        names = tuple(given)
        shape = self._shapes.get(names)
        if shape is None:
            shape = self._learnt(names)
        harmless, below, text = self.redaction.is_harmless, self.redaction.harmless_below, ""
        for name, start in shape:
            value = given[name]
            if type(value) is str and value.isascii() and harmless(value):
                text += start + _quoted(value)
            elif type(value) is int and -below < value < below:
                text += f"{start}{value}"
            else:
                break
        else:
            if text:
                return f"{text}}}".encode("ascii")
        # Written first, which refuses what is not JSON, and read again: a secret is looked for in what would be stored,
        # where names and texts are in NFC, tuples are lists, and whole numbers have no point.
        return canonical_json(self.redaction.redact(parse_json(canonical_json(given))))

    def _learnt(self, names: tuple[Any, ...]) -> Shape:
        """Empty, if one of them may be a secret itself, or make one of its value, or is no plain name."""
        shape: Shape = ()
        if all(type(name) is str and name.isascii() and self.redaction.is_harmless_name(name) for name in names):
            marks = "{" + "," * len(names)
            shape = tuple((name, f"{mark}{_quoted(name)}:") for mark, name in zip(marks, sorted(names), strict=False))
        if len(self._shapes) >= _KNOWN_AT_MOST:  # names come from callers
            self._shapes.clear()
        self._shapes[names] = shape
        return shape
