"""Key strategies, and the warning about keys that change with every retry."""

from __future__ import annotations

import json
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import settings as checked
from hypothesis import strategies as st
from pydantic import BaseModel

from ragfence.core.canonical import canonical_json, parse_json
from ragfence.core.key_strategies import KeyStrategy, KeyWarning, by_fields, by_id, by_id_and_fields
from ragfence.errors import NotJson, ValidationError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "core.json").read_text(encoding="utf-8"))


@dataclass
class Event:
    id: Any
    amount: int = 5


class Pair(NamedTuple):
    id: Any
    amount: int = 5


class Model(BaseModel):
    id: Any
    amount: int = 5


@contextmanager
def _silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("vector", GOLDEN["canonical"], ids=lambda vector: str(vector["json"])[:30])
def test_canonical_forms_never_change(vector: dict[str, str]) -> None:
    written = canonical_json(parse_json(vector["json"]))
    assert written.decode() == vector["canonical"]
    assert sha256(written).hexdigest() == vector["sha256"]


@pytest.mark.parametrize("vector", GOLDEN["strategies"], ids=lambda vector: str(vector["strategy"])[:40])
def test_keys_made_by_strategies_never_change(vector: dict[str, Any]) -> None:
    given = vector["strategy"]
    strategy = KeyStrategy(id=given["id"], fields=tuple(given["fields"]), name=given["name"])
    assert list(strategy(vector["payload"])) == vector["key"]


def test_fields_make_a_key_of_content() -> None:
    strategy = by_fields("order.id", "amount")
    source_id, revision = strategy({"order": {"id": "o1"}, "amount": 5, "sent_at": "2024-01-02T03:04:05Z"})
    assert source_id.startswith("f:")
    assert len(source_id) == 2 + 64
    assert revision == ""
    assert strategy({"amount": 5.0, "order": {"id": "o1", "more": 1}}) == (source_id, "")
    assert strategy({"order": {"id": "o1"}, "amount": 6})[0] != source_id
    assert by_fields("amount", "order.id") == strategy


@given(st.lists(st.text("ab", max_size=3), min_size=4, max_size=4))
@checked(max_examples=200, deadline=None)
def test_different_values_never_share_a_key(values: list[str]) -> None:
    """Moving a character from one field into the next gives another key."""
    a, b, c, d = values
    first, second = by_fields("x", "y")({"x": a, "y": b}), by_fields("x", "y")({"x": c, "y": d})
    assert (first == second) == ((a, b) == (c, d))


def test_the_name_keeps_equal_values_of_different_meaning_apart() -> None:
    payload = {"id": 1}
    assert by_fields("id")(payload) != by_fields("id", name="refund")(payload)
    assert by_fields("id")({"id": 1}) != by_fields("id")({"id": "1"})
    assert by_fields("id")({"id": 1}) != by_fields("no")({"no": 1})


@pytest.mark.parametrize("kind", [Event, Pair, Model, lambda id: {"id": id}])
def test_an_id_is_taken_as_it_is_from_any_kind_of_payload(kind: Any) -> None:
    assert by_id("id")(kind(id="evt_1")) == ("evt_1", "")
    assert by_id("event.id")({"event": kind(id=7)}) == ("7", "")
    assert by_id("events.1.id")({"events": [None, kind(id="b")]}) == ("b", "")


def test_id_and_fields_make_a_source_and_its_revision() -> None:
    strategy = by_id_and_fields(id="doc.id", fields=["body"])
    first = strategy({"doc": {"id": "d1"}, "body": "a"})
    second = strategy({"doc": {"id": "d1"}, "body": "b"})
    assert first[0] == second[0] == "d1"
    assert first[1] != second[1]
    assert first[1] == by_fields("body")({"body": "a"})[0]


def test_a_missing_field_is_named_with_what_there_is() -> None:
    with pytest.raises(ValidationError) as missing:
        by_fields("event.ident")({"event": {"id": 1, "type": "x"}})
    assert "'event.ident'" in missing.value.message
    assert "no 'ident' in event" in missing.value.message
    assert "id, type" in missing.value.hint
    with pytest.raises(ValidationError) as missing:
        by_id("event.id.value")({"event": {"id": 1}})
    assert "it is a int" in missing.value.hint


@pytest.mark.parametrize("value", [None, "", True, 1.5, [1], {"a": 1}])
def test_an_id_must_identify(value: object) -> None:
    with pytest.raises(ValidationError, match="the id in 'id' is"):
        by_id("id")({"id": value})


def test_fields_that_are_all_null_identify_nothing() -> None:
    assert by_fields("a", "b")({"a": None, "b": 1})
    with pytest.raises(ValidationError, match="all key fields are null"):
        by_fields("a", "b")({"a": None, "b": None})


def test_a_field_that_is_no_json_is_refused() -> None:
    with pytest.raises(NotJson):
        by_fields("a")({"a": b"x"})


@pytest.mark.parametrize("fields", [(), ("a", "a"), ("a..b",), ("",), (3,)])
def test_fields_must_be_named_once(fields: Any) -> None:
    with pytest.raises(ValidationError):
        by_fields(*fields)
    with pytest.raises(ValidationError):
        by_id_and_fields(id="id", fields=fields)


def test_a_text_is_no_list_of_fields() -> None:
    with pytest.raises(ValidationError, match="list of names"):
        by_id_and_fields(id="id", fields="body")


TIMES = [
    datetime(2024, 1, 2, tzinfo=UTC),
    datetime(2024, 1, 2),  # noqa: DTZ001  # midnight, but a point in time
    "2024-01-02T03:04:05Z",
    "2024-01-02 03:04:05.123456+02:00",
    "20240102T030405Z",
]
RANDOM = [uuid.UUID("6f1e7e0a-3c4d-4b5e-8f90-123456789abc"), "6F1E7E0A-3C4D-4B5E-8F90-123456789ABC"]
STEADY = [
    "evt_1",
    date(2024, 1, 2),
    "2024-01-02",
    "2024-01-02T10:00 Meeting",
    uuid.uuid5(uuid.NAMESPACE_URL, "x"),
    "2cdfc91f-e178-11f1-8002-000000000001",
    "6f1e7e0a3c4d4b5e8f90123456789abc",
    42,
]


@pytest.mark.parametrize("value", [*TIMES, *RANDOM])
def test_a_key_field_that_changes_with_every_retry_warns_and_says_why(value: object) -> None:
    for payload in ({"a": value}, {"a": [{"b": value}]}):
        with pytest.warns(KeyWarning, match=r"'a' holds .* retry") as caught:
            by_fields("a")(payload)
        assert caught[0].filename == __file__


@pytest.mark.parametrize("value", TIMES)
def test_an_id_that_is_a_time_warns(value: object) -> None:
    with pytest.warns(KeyWarning, match="a point in time") as caught:
        source_id, _ = by_id("id")({"id": value})
    assert source_id.startswith("2024")
    assert caught[0].filename == __file__


@pytest.mark.parametrize("value", [*RANDOM, *STEADY])
def test_an_id_that_is_a_uuid4_is_normal(value: object) -> None:
    with _silent():
        assert by_id("id")({"id": value}) == (str(value), "")


@pytest.mark.parametrize("value", STEADY)
def test_steady_fields_do_not_warn(value: object) -> None:
    with _silent():
        by_fields("a")({"a": value, "sent_at": TIMES[0]})


def test_a_repeated_warning_is_shown_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for second in range(3):
            by_fields("a")({"a": f"2024-01-02T03:04:0{second}Z"})
    assert len(caught) == 1
