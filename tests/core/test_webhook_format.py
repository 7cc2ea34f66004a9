"""Paths, comparisons and sequences: a small language, read the same way whatever a payload contains."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfence.core.policy import Policy
from ragfence.core.webhook_format import MISSING, Comparison, PayloadPath, sequence_in
from ragfence.errors import PolicyError, ValidationError

PAGE = {"page": {"id": 7, "tags": ["a", {"x y": None}], "ok": True, "version": "12"}}
HOOK = {"scheme": "standard", "secret_env": "CMS_SECRET", "document": {"doc_id": "$.page.id", "text": "$.page.body"}}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("$", PAGE),
        ("$.page.id", 7),
        ("$.page.tags[0]", "a"),
        ('$.page.tags[1]["x y"]', None),
        ('$["page"]["ok"]', True),
        ("$.page.tags[2]", MISSING),
        ("$.page.id.more", MISSING),
        ("$.page[0]", MISSING),
        ("$.other", MISSING),
    ],
)
def test_a_path_finds_one_value_or_none(path: str, value: Any) -> None:
    assert PayloadPath.parse(path).find(PAGE) is value or PayloadPath.parse(path).find(PAGE) == value


@pytest.mark.parametrize(
    "path",
    [
        "",
        "page.id",
        "$.",
        "$..id",
        "$.*",
        "$[*]",
        "$[-1]",
        "$[?(@.x)]",
        "$.a b",
        '$["a]',
        "$" + ".a" * 17,
        "$." + "a" * 256,
    ],
)
def test_what_is_not_a_path_is_refused(path: str) -> None:
    with pytest.raises(PolicyError, match="is not a path"):
        PayloadPath.parse(path)


@given(st.text(max_size=60))
def test_no_text_breaks_the_language(text: str) -> None:
    for parse in (PayloadPath.parse, Comparison.parse):
        try:
            parse("$" + text)
        except PolicyError:
            continue


@pytest.mark.parametrize(
    ("comparison", "holds"),
    [
        ("$.page.id == 7", True),
        ("$.page.id == 7.0", True),
        ('$.page.id == "7"', False),
        ("$.page.ok == true", True),
        ("$.page.ok == 1", False),
        ("$.page.id != 8", True),
        ("$.page.id != 7", False),
        ("$.page.id in [6, 7]", True),
        ("$.page.id in []", False),
        ('$.page.tags[0]=="a"', True),
        ('$.missing == "a"', False),
        ('$.missing != "a"', False),
        ("$.missing == null", False),
        ('$.page.tags[1]["x y"] == null', True),
    ],
)
def test_a_comparison_holds_for_values_that_are_there(comparison: str, holds: bool) -> None:
    assert Comparison.parse(comparison).holds(PAGE) is holds


@pytest.mark.parametrize(
    "text", ["$.a", "$.a ==", "$.a == x", "$.a in 1", "$.a == {}", "$.a == [1]", "$.a > 1", "a == 1", "$.a == 1 and 2"]
)
def test_what_is_not_a_comparison_is_refused(text: str) -> None:
    with pytest.raises(PolicyError):
        Comparison.parse(text)


@pytest.mark.parametrize(
    ("value", "sequence"),
    [
        (3, 3),
        ("12", 12),
        ("-5", -5),
        ("1970-01-01T00:00:01Z", 1_000_000),
        ("1970-01-01T01:00:00.5+01:00", 500_000),
        ("1970-01-01 00:00:00.000001z", 1),
    ],
)
def test_a_sequence_is_an_integer_or_a_time(value: Any, sequence: int) -> None:
    assert sequence_in(PayloadPath.parse("$"), value) == sequence


@pytest.mark.parametrize(
    "value", [True, 1.5, "", "x", "1" * 20, "2026-01-31T12:00:00", "2026-99-31T12:00:00Z", None, [], {}]
)
def test_anything_else_is_not_a_sequence(value: Any) -> None:
    with pytest.raises(ValidationError, match="has to be an integer"):
        sequence_in(PayloadPath.parse("$"), value)


def problem(**changes: Any) -> str:
    with pytest.raises(PolicyError) as refused:
        Policy.from_mapping({"webhooks": {"cms": HOOK | changes}})
    (found,) = refused.value.details["problems"]
    return str(found)


def test_the_documented_form_is_a_policy() -> None:
    document = {"doc_id": "$.page.id", "text": "$.page.body", "sequence": "$.page.version"}
    hook = Policy.from_mapping({"webhooks": {"cms": HOOK | {"document": document}}}).webhooks["cms"]
    assert (hook.secret_env, hook.mode, hook.document.sequence) == (("CMS_SECRET",), "inline", "$.page.version")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"secret_env": []}, "has no secret"),
        ({"secret_env": ["A", ""]}, "has no secret"),
        ({"secret_env": None}, "has no secret"),
        ({"scheme": "github", "header": "X"}, "header does not apply to scheme github"),
        ({"scheme": "github", "tolerance_s": 5.0}, "tolerance_s does not apply"),
        ({"verify_token_env": "T"}, "verify_token_env does not apply"),
        ({"scheme": "hmac"}, "needs the header"),
        ({"scheme": "hmac", "header": "a b"}, "is not the name of an HTTP header"),
        ({"scheme": "hmac", "header": "X", "signed": "{timestamp}.{body}"}, "if and only if"),
        ({"scheme": "hmac", "header": "X", "signed": "{id}.{body}"}, "no id_header"),
        ({"mode": "inbox", "inbox_env": ""}, "needs inbox_env"),
        ({"events": []}, "names no event"),
        ({"max_body_bytes": 1 << 29}, "must not be above http.max_body_bytes"),
        ({"tolerance_s": 0}, "greater than 0"),
        ({"document": {"doc_id": "page.id", "text": "$.t"}}, "is not a path"),
        ({"document": {"doc_id": "$.id", "text": "$.t", "delete_when": "$.a"}}, "is not a comparison"),
        ({"document": {"doc_id": "$.id", "text": "$.t", "metadata": {"a": "b"}}}, "is not a path"),
    ],
)
def test_a_webhook_that_cannot_work_is_refused_with_its_reason(changes: dict[str, Any], said: str) -> None:
    assert said in problem(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"secret_env": "whsec_c2VjcmV0"},
        {"secret_env": "s3cr3t/value+="},
        {"secret_env": ["A", 53.5]},
        {"secret_env": 53.5},
    ],
)
def test_a_secret_in_the_wrong_place_is_not_repeated(changes: dict[str, Any]) -> None:
    said = problem(**changes)
    assert "secret_env" in said
    assert "c2VjcmV0" not in said
    assert "s3cr3t" not in said
    assert "53.5" not in said


def test_the_name_of_a_webhook_is_a_part_of_a_path() -> None:
    for name in ("CMS", "a/b", "", "-a", "a" * 65):
        with pytest.raises(PolicyError, match="is not a valid name of a webhook"):
            Policy.from_mapping({"webhooks": {name: HOOK}})
