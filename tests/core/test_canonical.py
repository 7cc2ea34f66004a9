"""Canonical JSON: the vectors of RFC 8785, and what is refused beyond it."""

from __future__ import annotations

import dataclasses
import json
import random
import struct
from collections import UserDict, deque
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, RootModel

from ragfence.core import canonical
from ragfence.core.canonical import MAX_SAFE_INTEGER, canonical_json, parse_json, to_jsonable
from ragfence.errors import NotJson

# RFC 8785, appendix B: the bits of a double, and its text.
NUMBERS = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "8000000000000001": "-5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "ffefffffffffffff": "-1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "c340000000000000": "-9007199254740992",
    "4430000000000000": "295147905179352830000",
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "44b52d02c7e14af6": "1e+23",
    "44b52d02c7e14af7": "1.0000000000000001e+23",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef4f": "999999999999999900000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "41b3de4355555554": "333333333.33333325",
    "41b3de4355555555": "333333333.3333333",
    "41b3de4355555556": "333333333.3333334",
    "41b3de4355555557": "333333333.33333343",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}

texts = st.text(max_size=8)  # hypothesis makes no lone surrogates unless asked for them
numbers = st.integers(-MAX_SAFE_INTEGER, MAX_SAFE_INTEGER) | st.floats(allow_nan=False, allow_infinity=False)


def _distinct_after_nfc(value: dict[str, Any]) -> bool:
    return len({normalize("NFC", name) for name in value}) == len(value)


json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4).filter(_distinct_after_nfc),
    max_leaves=12,
)
plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-MAX_SAFE_INTEGER, MAX_SAFE_INTEGER)
    | st.text(st.characters(max_codepoint=127), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(max_codepoint=127), max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
checked = settings(max_examples=200, deadline=None)


def _nfc(value: Any) -> Any:
    if isinstance(value, str):
        return normalize("NFC", value)
    if isinstance(value, list):
        return [_nfc(item) for item in value]
    if isinstance(value, dict):
        return {normalize("NFC", name): _nfc(item) for name, item in value.items()}
    return value


def _carefully(value: object) -> bytes:
    pieces: list[str] = []
    canonical._write(value, [], pieces.append)
    return "".join(pieces).encode()


def _shuffled(value: Any, chance: random.Random) -> Any:
    if isinstance(value, list):
        return [_shuffled(item, chance) for item in value]
    if isinstance(value, dict):
        names = list(value)
        chance.shuffle(names)
        return {name: _shuffled(value[name], chance) for name in names}
    return value


def _refusal(attempt: Callable[[], object]) -> NotJson:
    with pytest.raises(NotJson) as refused:
        attempt()
    return refused.value


@pytest.mark.parametrize(("bits", "text"), NUMBERS.items())
def test_doubles_are_written_as_in_the_table_of_the_rfc(bits: str, text: str) -> None:
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical_json(number) == text.encode()
    assert parse_json(text) == number


def test_the_sample_of_the_rfc_is_written_byte_for_byte() -> None:
    sample = r"""{
      "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
      "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
      "literals": [null, true, false]
    }"""
    assert (
        canonical_json(parse_json(sample))
        == (
            '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
            '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
        ).encode()
    )


def test_keys_stand_in_the_order_of_utf_16_code_units() -> None:
    # The sample of the RFC, with U+FF21 for its U+FB33, which is two other characters after NFC.
    names = ["\u20ac", "\r", "\uff21", "1", "\U0001f600", "\u0080", "\u00f6"]
    written = canonical_json(dict.fromkeys(names, 0)).decode()
    assert list(json.loads(written)) == ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\uff21"]


def test_text_and_keys_are_compared_after_nfc() -> None:
    assert canonical_json({"cafe\u0301": "e\u0301"}) == canonical_json({"caf\u00e9": "\u00e9"})
    assert canonical_json("\u007f\u2028\x1f/") == '"\u007f\u2028\\u001f/"'.encode()


@pytest.mark.parametrize(
    ("value", "where", "what"),
    [
        ({"items": [0, 1, 2, {"price": float("nan")}]}, "$.items[3].price", "nan"),
        ([float("-inf")], "$[0]", "-inf"),
        ({"id": 2**53}, "$.id", "2^53 - 1"),
        ({"a": {"id": -(2**53)}}, "$.a.id", "2^53 - 1"),
        ({"a": {1: "x"}}, "$.a", "int"),
        ({"unit price": "\ud800"}, '$["unit price"]', "surrogate"),
        ({"a": {"\udfff": 1}}, "$.a", "surrogate"),
        ({"a": {"\u00e9": 1, "e\u0301": 2}}, "$.a", "twice"),
        ({"a": b"x"}, "$.a", "bytes"),
        ({"a": {1, 2}}, "$.a", "set"),
        ({"a": object()}, "$.a", "object"),
    ],
)
def test_what_is_no_json_is_refused_with_its_place(value: object, where: str, what: str) -> None:
    refused = _refusal(lambda: canonical_json(value))
    assert refused.details["path"] == where
    assert refused.message.startswith(f"{where}: ")
    assert what in refused.message
    assert refused.hint


def test_the_largest_exact_integers_are_written() -> None:
    assert canonical_json([MAX_SAFE_INTEGER, -MAX_SAFE_INTEGER]) == b"[9007199254740991,-9007199254740991]"
    assert "string" in _refusal(lambda: canonical_json(MAX_SAFE_INTEGER + 1)).hint


@pytest.mark.parametrize("write", [canonical_json, to_jsonable])
@pytest.mark.parametrize("leaf", [1, "\u00e9"])
def test_depth_is_bounded_and_a_value_inside_itself_ends_there(write: Any, leaf: object) -> None:
    deepest: Any = leaf
    for _ in range(100):
        deepest = {"a": deepest}
    assert write(deepest)
    assert "deeper than 100" in _refusal(lambda: write([deepest])).message
    itself: list[object] = [leaf]
    itself.append(itself)
    assert "inside itself" in _refusal(lambda: write(itself)).message


@given(json_values, st.randoms(use_true_random=False))
@checked
def test_the_order_of_keys_never_matters(value: Any, chance: random.Random) -> None:
    """canonical(permuted(x)) == canonical(x)"""
    assert canonical_json(_shuffled(value, chance)) == canonical_json(value)


@given(json_values)
@checked
def test_reading_what_was_written_gives_the_value_after_nfc(value: Any) -> None:
    """parse(canonical(x)) == NFC(x), and writing that again gives the same bytes"""
    written = canonical_json(value)
    read = parse_json(written)
    assert read == _nfc(value)
    assert canonical_json(read) == written


@given(plain_values)
@checked
def test_the_fast_path_and_the_careful_path_agree(value: Any) -> None:
    assert canonical._is_plain(value, 0)
    assert canonical_json(value) == _carefully(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": {"b": 1, "b": 1}}', '$.a: the key "b" twice'),
        ('[{"x": 0}, {"\\u00e9": 1, "e\\u0301": 2}]', "$[1]: the key"),
        ('{"a": [NaN]}', "$.a[0]: nan"),
        ('{"a": -Infinity}', "$.a: -inf"),
        ('{"a": 1e999}', "$.a: inf"),
        ('{"a": ["\\ud800"]}', "$.a[0]: a lone surrogate"),
        ('{"\\udc00": 1}', "$: a lone surrogate"),
        ('{"a": 9007199254740993}', "$.a: an integer beyond"),
        ('{"a": 1' + "0" * 5000 + "}", "$.a: an integer beyond"),
        ("[" * 101 + "]" * 101, "nested deeper than 100"),
        ("[" * 100_000, "nested deeper than 100"),
        ('{"a": 1,}', "not JSON at line 1, column"),
        ('{"a": 1} x', "not JSON at line 1, column 10"),
        ("{\n'a': 1}", "not JSON at line 2, column 1"),
        ('"\t"', "not JSON at line 1, column 2"),
        ("", "not JSON at line 1, column 1"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
    ],
)
def test_reading_is_strict_and_says_where(text: str | bytes, message: str) -> None:
    assert message in _refusal(lambda: parse_json(text)).message


def test_reading_accepts_what_is_well_formed() -> None:
    assert parse_json(b' {"a": [1, -0, 1.5, "\\ud83d\\ude00", {}]} ') == {"a": [1, 0, 1.5, "\U0001f600", {}]}
    assert parse_json("[" * 100 + "]" * 100)
    read = parse_json("100000000000000000")
    assert type(read) is float
    assert canonical_json(read) == b"100000000000000000"


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Size(StrEnum):
    BIG = "big"


class Shout(str):
    def __str__(self) -> str:
        return "SHOUTED"


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Order:
    id: UUID
    points: tuple[Point, ...]


class Model(BaseModel):
    at: datetime
    tags: list[str]


class Names(RootModel[list[str]]):
    pass


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (Order(UUID(int=1), (Point(1, 2),)), {"id": str(UUID(int=1)), "points": [{"x": 1, "y": 2}]}),
        (Model(at=datetime(2024, 1, 2, tzinfo=UTC), tags=["a"]), {"at": "2024-01-02T00:00:00Z", "tags": ["a"]}),
        (Names(["a", "b"]), ["a", "b"]),
        (UserDict(a=(1, 2)), {"a": [1, 2]}),
        ([Colour.RED, Level.HIGH, Size.BIG], ["red", 3, "big"]),
        ({Size.BIG: 1, Colour.RED: 2}, {"big": 1, "red": 2}),
        ([datetime(2024, 1, 2, 3, 4), date(2024, 1, 2)], ["2024-01-02T03:04:00", "2024-01-02"]),  # noqa: DTZ001
        ([Decimal("1.50"), None, True, 1.5], ["1.50", None, True, 1.5]),
    ],
)
def test_python_values_become_what_they_mean(value: object, meaning: object) -> None:
    assert to_jsonable(value) == meaning
    assert canonical_json(to_jsonable(value)) == canonical_json(meaning)


def test_subclasses_lose_what_they_add() -> None:
    assert to_jsonable(Shout("quiet")) == "quiet"
    assert type(to_jsonable(Shout("quiet"))) is str
    assert type(to_jsonable(Level.HIGH)) is int


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (b"raw", "base64"),
        (bytearray(b"raw"), "base64"),
        ({1, 2}, "sorted"),
        (frozenset(), "sorted"),
        (object(), "payload=lambda"),
        (Path("/"), "payload=lambda"),
        (deque([1]), "payload=lambda"),
        (Order, "payload=lambda"),
        ({2: "x"}, "str keys"),
        ({"red": 1, Colour.RED: 2}, "every key once"),
    ],
)
def test_values_without_one_meaning_are_refused_with_advice(value: object, hint: str) -> None:
    refused = _refusal(lambda: to_jsonable({"a": [value]}))
    assert hint in refused.hint
    assert refused.details["path"] == "$.a[0]"


def test_a_model_that_cannot_be_dumped_is_refused() -> None:
    class Holder(BaseModel):
        value: Any

    assert "Holder cannot be dumped" in _refusal(lambda: to_jsonable([Holder(value=object())])).message
