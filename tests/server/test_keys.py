from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfence.wire.headers import budget_in, check_required, format_key, key_of, parse_key, principal_from
from ragfence.wire.messages import Call
from ragfence.wire.problems import RequestRefused

PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=255)


def call(*headers: tuple[str, str]) -> Call:
    return Call("POST", "/", headers=headers)


@given(PRINTABLE)
def test_a_key_is_read_as_it_was_written(key: str) -> None:
    assert parse_key(format_key(key)) == key


@given(st.text(max_size=300))
def test_whatever_is_sent_is_a_key_or_refused(text: str) -> None:
    with contextlib.suppress(RequestRefused):
        key = parse_key(text)
        assert 1 <= len(key) <= 255
        assert key.isascii()
        assert key.isprintable()


def test_the_quoted_and_the_bare_form_are_the_same_key() -> None:
    assert key_of(call(("idempotency-key", ' "refund:17" '))) == key_of(call(("idempotency-key", "refund:17")))
    assert parse_key(r'"a\"b\\c"') == 'a"b\\c'


@pytest.mark.parametrize(
    "text",
    [
        "",
        '""',
        '"',
        '"a',
        "a\tb",
        '"a";b=1',
        '"a", "b"',
        "a,b",
        '"a" "b"',
        "ü",
        "a\x7f",
        "x" * 256,
        '"' + "x" * 256 + '"',
    ],
)
def test_a_malformed_key_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        parse_key(text)
    assert refused.value.problem.code == "VALIDATION.idempotency.key_malformed"
    assert refused.value.problem.hint


def test_the_longest_key_is_taken() -> None:
    assert len(parse_key("x" * 255)) == 255
    assert len(parse_key('"' + "x" * 255 + '"')) == 255


def test_two_headers_are_refused_even_if_they_are_equal() -> None:
    with pytest.raises(RequestRefused, match="key_malformed"):
        key_of(call(("idempotency-key", "a"), ("idempotency-key", "a")))


def test_no_header_is_no_key() -> None:
    assert key_of(call()) is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("2.5", 2.5), ("2.5s", 2.5), ("2500ms", 2.5), ("1 s", 1.0), ("9" * 9, 86400)]
)
def test_a_budget_is_in_seconds_or_milliseconds(text: str, seconds: float) -> None:
    assert budget_in(call(("x-request-timeout", text)).headers) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "soon", "1e9", "inf", "nan", "1m", "0ms", "1,5", "٣"])
def test_a_budget_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(RequestRefused, match=r"VALIDATION\.header"):
        budget_in(call(("x-request-timeout", text)).headers)


def test_no_budget_is_none() -> None:
    assert budget_in(call().headers) is None


def test_a_header_that_the_policy_requires_is_missed() -> None:
    check_required(call(("x-team", "a")), ("Idempotency-Key", "X-Team"))
    with pytest.raises(RequestRefused, match=r"VALIDATION\.header"):
        check_required(call(("x-team", "")), ("X-Team",))


def test_a_principal_tells_nothing_of_the_credentials() -> None:
    who = principal_from("Bearer secret-token")
    assert who == principal_from("Bearer secret-token") != principal_from("Bearer other-token")
    assert "secret" not in who
    assert principal_from("") == ""
