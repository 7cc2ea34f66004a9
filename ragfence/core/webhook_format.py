"""What a policy says about webhooks in text: paths into a payload, comparisons, and what a signature covers.

A path is `$`, followed by `.name`, `["any name"]` or `[0]`. A comparison is a path, `==`, `!=` or `in`, and a JSON
value. There is nothing else in this language: no wildcards, no filters, no functions. So a path is read in as many
steps as it has, whatever a payload contains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, cast

from ragfence.errors import PolicyError, ValidationError

MAX_PATH_CHARACTERS: Final = 256
MAX_STEPS: Final = 16
MAX_COMPARISON_CHARACTERS: Final = 1024

Step: TypeAlias = str | int
Operator: TypeAlias = Literal["==", "!=", "in"]

_STEP: Final = re.compile(r'\.([A-Za-z_][\w-]*)|\[([0-9]{1,6})\]|\[("(?:[^"\\]|\\.)*")\]', re.ASCII)
_OPERATOR: Final = re.compile(r"(\S.*?)\s*(==|!=|\sin\s)\s*(\S.*)", re.DOTALL)
_PATH_HINT: Final = '$.page.id, $.items[0].sku or $["a name"]'
_COMPARISON_HINT: Final = '$.page.status == "deleted", or $.type in ["page.deleted", "page.archived"]'
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()


@dataclass(frozen=True, slots=True)
class PayloadPath:
    """Where a value stands in a payload.

    >>> PayloadPath.parse("$.page.tags[1]").find({"page": {"tags": ["a", "b"]}})
    'b'
    """

    text: str
    steps: tuple[Step, ...]

    @classmethod
    def parse(cls, text: str) -> PayloadPath:
        """Raises `PolicyError` for text that is not a path."""
        return _parse_path(text)

    def find(self, payload: Any) -> Any:
        """Returns the value, or `MISSING`."""
        value = payload
        for step in self.steps:
            if isinstance(step, str):
                value = value.get(step, MISSING) if isinstance(value, Mapping) else MISSING
            else:
                value = value[step] if isinstance(value, list) and step < len(value) else MISSING
        return value

    def text_in(self, payload: Any) -> str:
        """Returns the text or integer as text.

        Raises:
            ValidationError: It is missing, or of another type.
        """
        value = self.find(payload)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValidationError(f"{self.text} is {_shown(value)}, and has to be text or an integer")
        return str(value)


@lru_cache(maxsize=1024)
def _parse_path(text: str) -> PayloadPath:
    if len(text) > MAX_PATH_CHARACTERS or not text.startswith("$"):
        raise PolicyError("is not a path in a payload", hint=_PATH_HINT)
    steps: list[Step] = []
    at = 1
    while at < len(text):
        found = _STEP.match(text, at)
        if found is None or len(steps) == MAX_STEPS:
            raise PolicyError("is not a path in a payload", hint=_PATH_HINT)
        name, index, quoted = found.groups()
        try:
            steps.append(name if name is not None else int(index) if index is not None else json.loads(quoted))
        except ValueError:
            raise PolicyError("is not a path in a payload", hint=_PATH_HINT) from None
        at = found.end()
    return PayloadPath(text, tuple(steps))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of one value of a payload with constants. A value that is missing makes every comparison false.

    >>> Comparison.parse('$.status != "published"').holds({"status": "draft"})
    True
    """

    path: PayloadPath
    operator: Operator
    constants: tuple[Any, ...]

    @classmethod
    def parse(cls, text: str) -> Comparison:
        """Raises `PolicyError` for text that is not a comparison."""
        return _parse_comparison(text)

    def holds(self, payload: Any) -> bool:
        value = self.path.find(payload)
        if value is MISSING:  # a payload of another form must not delete what `!=` was not written for
            return False
        found = any(_is_equal(value, constant) for constant in self.constants)
        return not found if self.operator == "!=" else found


@lru_cache(maxsize=256)
def _parse_comparison(text: str) -> Comparison:
    matched = _OPERATOR.fullmatch(text.strip()) if len(text) <= MAX_COMPARISON_CHARACTERS else None
    if matched is None:
        raise PolicyError("is not a comparison", hint=_COMPARISON_HINT)
    operator = cast(Operator, matched[2].strip())
    try:
        constant = json.loads(matched[3])
    except (ValueError, RecursionError):
        raise PolicyError("does not end in a JSON value", hint=_COMPARISON_HINT) from None
    constants = constant if operator == "in" else [constant]
    if not isinstance(constants, list) or any(isinstance(each, list | dict) for each in constants):
        raise PolicyError(f"cannot be compared by {operator!r}", hint=_COMPARISON_HINT)
    return Comparison(PayloadPath.parse(matched[1]), operator, tuple(constants))


def sequence_in(path: PayloadPath, payload: Any) -> int:
    """Returns an integer, also one in the form of text, or a time (RFC 3339) in microseconds since 1970.

    Raises:
        ValidationError: It is missing, or something else.

    >>> sequence_in(PayloadPath.parse("$.at"), {"at": "1970-01-01T00:00:01Z"})
    1000000
    """
    value = path.find(payload)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and len(value) <= 40:
        if value.isascii() and value.removeprefix("-").isdigit() and len(value) < 20:
            return int(value)
        if _TIME.fullmatch(value):
            try:
                return (datetime.fromisoformat(value.upper()) - _EPOCH) // timedelta(microseconds=1)
            except ValueError:
                pass
    raise ValidationError(
        f"{path.text} is {_shown(value)}, and has to be an integer, or a time with its offset such as "
        "2026-01-31T12:00:00Z"
    )


def check_signed_format(signed: str, *, id_header: str, timestamp_header: str) -> None:
    """Raises `PolicyError` for a `signed` that covers no body, or a header that is not there."""
    if "{body}" not in signed or ("{timestamp}" in signed) != bool(timestamp_header):
        raise PolicyError(
            "`signed` must contain {body}, and {timestamp} if and only if there is a timestamp_header",
            hint="for example {timestamp}.{body}",
        )
    if "{id}" in signed and not id_header:
        raise PolicyError("`signed` contains {id}, and there is no id_header")


def _is_equal(value: Any, constant: Any) -> bool:
    if isinstance(value, bool) or isinstance(constant, bool):
        return value is constant
    return bool(value == constant)


def _shown(value: Any) -> str:
    """The kind of a value, never the value: it may be what a message must not contain."""
    if value is MISSING or value is None:
        return "missing"
    names = {bool: "true or false", str: "text", int: "an integer", float: "a number", list: "a list"}
    return names.get(type(value), "an object")
