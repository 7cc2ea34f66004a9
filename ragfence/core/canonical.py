"""Canonical JSON (RFC 8785): equal values have equal bytes, so their digests can stand for them.

Stricter than the RFC where two readers could disagree: text and keys are compared after NFC, keys that are
equal after it are duplicates, and integers that a double cannot hold are refused instead of rounded. Whatever
is refused raises `NotJson`, which names the place: `$.items[3].price`.
"""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from ragfence.core.json_values import (
    MAX_DEPTH,
    JsonValue,
    Path,
    enter,
    refuse,
    refuse_duplicate,
    refuse_key,
    refuse_type,
    to_jsonable,
)
from ragfence.core.normalization import nfc
from ragfence.errors import NotJson

__all__ = ["MAX_SAFE_INTEGER", "JsonValue", "canonical_json", "canonical_payload", "parse_json", "to_jsonable"]

MAX_SAFE_INTEGER = 2**53 - 1

_plain = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")
)


def _made_once() -> Callable[[Any], str]:
    """The encoder of the standard library, which it would make anew for every value."""
    try:
        pieces = json.encoder.c_make_encoder(  # type: ignore[attr-defined]
            None, _plain.default, json.encoder.encode_basestring, None, ":", ",", True, False, False
        )
        if "".join(pieces({"b": [1, None], "a": "x"}, 0)) != '{"a":"x","b":[1,null]}':
            return _plain.encode
    except (AttributeError, TypeError):  # another Python than CPython
        return _plain.encode
    return lambda value: "".join(pieces(value, 0))


_encode_plain = _made_once()
_quote: Callable[[str], str] = json.JSONEncoder(ensure_ascii=False).encode


def canonical_json(value: object) -> bytes:
    """The one byte string that stands for a JSON value.

    >>> canonical_json({"b": 1.0, "a": "x"})
    b'{"a":"x","b":1}'
    """
    if _is_plain(value, 0):
        return _encode_plain(value).encode("ascii")
    pieces: list[str] = []
    _write(value, [], pieces.append)
    return "".join(pieces).encode()


def canonical_payload(value: object) -> bytes:
    """The canonical JSON of whatever a caller passes: models, dataclasses and dates as `to_jsonable` has them."""
    if _is_plain(value, 0):
        return _encode_plain(value).encode("ascii")
    return canonical_json(to_jsonable(value))


def parse_json(text: str | bytes) -> Any:
    """JSON text as Python values, without the leniencies of `json.loads` that would hide a difference."""
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as broken:
            raise NotJson(f"not UTF-8 at byte {broken.start}", hint="send JSON as UTF-8") from broken
    _reader.doubts = 0
    try:
        value = _reader.read(text)
    except json.JSONDecodeError as broken:
        raise NotJson(f"not JSON at line {broken.lineno}, column {broken.colno}: {broken.msg}") from broken
    except RecursionError:
        raise NotJson(f"nested deeper than {MAX_DEPTH} levels", hint="flatten it") from None
    # Writing it again finds what is wrong, and where. That costs more than reading, so it is done only where
    # something can be wrong: escapes and other scripts may hide lone surrogates, and keys equal after NFC.
    deep = text.count("[") + text.count("{") > MAX_DEPTH
    if _reader.doubts or deep or "\\u" in text or not text.isascii():
        _write(value, [], lambda _: None)
    return value


def _is_plain(value: Any, depth: int) -> bool:
    """Whether the encoder of the standard library already writes this value as the RFC wants it."""
    kind = type(value)
    if kind is str:
        return str.isascii(value)
    if kind is int:
        return -MAX_SAFE_INTEGER <= int(value) <= MAX_SAFE_INTEGER
    if value is None or kind is bool:
        return True
    if depth == MAX_DEPTH:
        return False
    if kind is dict:
        for name, item in value.items():
            if type(name) is not str or not name.isascii():
                return False
            if not (item.isascii() if type(item) is str else _is_plain(item, depth + 1)):  # most are texts
                return False
        return True
    if kind is list or kind is tuple:
        for item in value:  # noqa: SIM110  # a generator here costs as much as the rest of the walk
            if not _is_plain(item, depth + 1):
                return False
        return True
    return False


def _write(value: object, path: Path, out: Callable[[str], None]) -> None:
    if value is None or value is True or value is False:
        out(_encode_plain(value))
    elif isinstance(value, _Duplicate):
        refuse_duplicate(path, value)
    elif isinstance(value, str):
        out(_quote(_normal_text(value, path)))
    elif isinstance(value, int):
        if not -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER:
            refuse(path, "an integer beyond 2^53 - 1, which JSON readers round", "send it as a string")
        out(int.__repr__(value))
    elif isinstance(value, float):
        if not math.isfinite(value):
            refuse(path, f"{float.__repr__(value)} is not a JSON number", "send null or a string")
        out(_number(value))
    elif isinstance(value, dict):
        enter(path)
        named: dict[str, tuple[str, object]] = {}
        for name, item in value.items():
            if not isinstance(name, str):
                refuse_key(path, name)
            normal = _normal_text(name, path)
            if normal in named:
                refuse_duplicate(path, normal)
            named[normal] = (name, item)
        separator = "{"
        for normal in sorted(named, key=_utf16_order):
            out(f"{separator}{_quote(normal)}:")
            separator = ","
            name, item = named[normal]
            path.append(name)
            _write(item, path, out)
            path.pop()
        out("}" if named else "{}")
    elif isinstance(value, list | tuple):
        enter(path)
        separator = "["
        for index, item in enumerate(value):
            out(separator)
            separator = ","
            path.append(index)
            _write(item, path, out)
            path.pop()
        out("]" if value else "[]")
    else:
        refuse_type(path, value)


def _normal_text(text: str, path: Path) -> str:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as broken:
        refuse(
            path,
            f"a lone surrogate at character {broken.start}",
            "decode the text as UTF-8 before sending it",
        )
    return nfc(text)


def _utf16_order(name: str) -> bytes:
    # ECMAScript compares UTF-16 code units: U+10000 sorts before U+FFFF there, and after it in Python.
    return name.encode("utf-16-be")


def _number(value: float) -> str:
    """A finite double as ECMAScript writes it: the digits of `repr`, placed differently."""
    if value == 0:
        return "0"
    sign = "-" if value < 0 else ""
    mantissa, _, exponent = float.__repr__(abs(value)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    point = len(digits) - len(fraction) + int(exponent or 0)
    digits = digits.rstrip("0")
    if len(digits) <= point <= 21:
        return sign + digits.ljust(point, "0")
    if 0 < point <= 21:
        return f"{sign}{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    tail = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{tail}e{point - 1:+d}"


class _Duplicate(str):
    """Stands where an object with a repeated key was: the parser's hooks do not know where they are."""


class _JsonReader(threading.local):
    """A strict parser. What it cannot judge on the spot it lets through and counts as a doubt.

    One per thread: to make it takes longer than to read most values.
    """

    def __init__(self) -> None:
        self.doubts = 0
        self.read = json.JSONDecoder(
            object_pairs_hook=self._object,
            parse_int=self._integer,
            parse_float=self._float,
            parse_constant=self._constant,
        ).decode

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Duplicate:
        value = dict(pairs)
        if len(value) == len(pairs):
            return value
        self.doubts += 1
        times = Counter(name for name, _ in pairs)
        return _Duplicate(times.most_common(1)[0][0])

    def _integer(self, digits: str) -> int | float:
        # int() takes quadratic time; no literal this long can be right.
        value = int(digits[:25])
        if -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER:
            return value
        # 1e17 is written as 100000000000000000, and must come back as the same double.
        if len(digits) < 25 and _number(float(value)) == digits:
            return float(value)
        self.doubts += 1
        return value

    def _float(self, digits: str) -> float:
        value = float(digits)
        self.doubts += math.isinf(value)
        return value

    def _constant(self, name: str) -> float:
        self.doubts += 1
        return float(name)


_reader = _JsonReader()
