"""Redaction: what is taken out, what stays, and that no text makes it slow."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragfence.core.redaction import DEFAULT_FIELDS, REDACTED, Redaction
from ragfence.errors import PolicyError

EVERYTHING = Redaction(
    fields=("user.email", "*.pin"), patterns=("email", "phone", "bearer_token", "card", "re:ACME-[0-9]+")
)


@pytest.mark.parametrize("name", DEFAULT_FIELDS)
def test_default_fields_are_redacted_at_any_depth(name: str) -> None:
    payload: Any = {name: "s3cret", "nested": [{name.upper(): {"deep": 1}}], "kept": "s3cret"}
    assert Redaction().redact(payload) == {
        name: REDACTED,
        "nested": [{name.upper(): REDACTED}],
        "kept": "s3cret",
    }


@pytest.mark.parametrize("name", ["apiKey", "API-KEY", "api key", "Set_Cookie", "accessToken"])
def test_case_and_separators_of_a_name_do_not_matter(name: str) -> None:
    assert Redaction().redact({name: 1}) == {name: REDACTED}


def test_paths_match_the_end_and_lists_do_not_count() -> None:
    redaction = Redaction(fields=("user.email", "*.pin"))
    assert redaction.redact({"event": {"user": [{"email": "x", "name": "n"}]}, "email": "kept"}) == {
        "event": {"user": [{"email": REDACTED, "name": "n"}]},
        "email": "kept",
    }
    assert redaction.redact({"pin": 1, "a": {"pin": 2}}) == {"pin": 1, "a": {"pin": REDACTED}}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mail bob.o'hara+x@exa-mple.co.uk now", "mail [redacted] now"),
        ("grüße@bücher.example", "[redacted]"),
        ("a@b is no address", "a@b is no address"),
        ("call +49 (0)30 1234567 or (555) 123-4567.", "call [redacted] or [redacted]."),
        ("on 2024-01-02T10:00:00 or 2024-01-02", "on 2024-01-02T10:00:00 or 2024-01-02"),
        ("Bearer abcdefghijklmnop.qrs=", "[redacted]"),
        ("Bearer token", "Bearer token"),
        ("jwt eyJhbGciOiJIUzI1.eyJzdWIiOiIx.c2ln end", "jwt [redacted] end"),
        ("paid with 4111 1111 1111 1111 12 times", "paid with [redacted] 12 times"),
        ("order 4111111111111112", "order 4111111111111112"),
        ("at 1700000000000", "at 1700000000000"),
        ("ACME-123 and ACME-x", "[redacted] and ACME-x"),
    ],
)
def test_patterns_take_out_what_looks_like_a_secret(text: str, shown: str) -> None:
    assert EVERYTHING.redact_text(text) == shown
    assert EVERYTHING.redact({"text": [text]}) == {"text": [shown]}


@given(st.lists(st.integers(0, 99999), max_size=4), st.sampled_from(" -"))
@settings(max_examples=200, deadline=None)
def test_a_card_number_is_found_among_other_groups_of_digits(before: list[int], separator: str) -> None:
    """Whatever digits stand in front of it, no group of the card survives."""
    text = separator.join([*map(str, before), "4000", "0566", "5566", "5556", "7"])
    assert Redaction().redact_text(text).endswith((REDACTED, f"{REDACTED}{separator}7"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("login failed: password=hunter2, user=bob", "login failed: password=[redacted], user=bob"),
        ('{"api_key": "a\\"b", "k": 1}', '{"api_key": [redacted], "k": 1}'),
        ("redis://:s3cr3t@host:6379/0 refused", "redis://[redacted]@host:6379/0 refused"),
        ("Authorization: Basic dXNlcjpwdw==", "Authorization: [redacted]"),
        ("GET https://x/?a=1&token=abc&b=2", "GET https://x/?a=1&token=[redacted]&b=2"),
        ('password="x token=abc" rest', "password=[redacted] rest"),
        ("pin=1 email=x", "pin=[redacted] email=x"),
        ("no secret here", "no secret here"),
    ],
)
def test_error_messages_lose_named_values(text: str, shown: str) -> None:
    assert EVERYTHING.redact_text(text) == shown


def test_keys_are_looked_through_and_stay_apart() -> None:
    payload: Any = {"b@x.org": 1, "a@x.org": 2, "n": 4111111111111111, "ok": 10**13}
    first = EVERYTHING.redact(payload)
    assert first == {"[redacted]": 2, "[redacted] (2)": 1, "n": REDACTED, "ok": 10**13}
    assert EVERYTHING.redact(dict(reversed(payload.items()))) == first


@pytest.mark.parametrize("number", [4111111111111111, 4111111111111111.0, -4111111111111111.0, 4000056655665556.0])
def test_a_card_number_is_a_secret_whichever_number_it_is_sent_as(number: float) -> None:
    # Tables with a gap in a column make doubles of its integers.
    assert Redaction().redact({"n": number, "in": [number]}) == {"n": REDACTED, "in": [REDACTED]}


@pytest.mark.parametrize("number", [123456789, -123456789, 123456789.0, 0.123456789, 1.123456789e-7])
def test_custom_expressions_see_numbers_as_they_are_written(number: float) -> None:
    redaction = Redaction(patterns=("re:[0-9]{9}",))
    assert redaction.redact([number, 12345678, 1.5, True, None]) == [REDACTED, 12345678, 1.5, True, None]


def test_custom_expressions_see_what_is_stored_and_not_what_python_shows() -> None:
    assert Redaction(patterns=("re:^7$",)).redact([7, 7.0, 70, 1e21, True]) == [REDACTED, REDACTED, 70, 1e21, True]
    assert Redaction(patterns=(r"re:e\+21",)).redact([1e21, 1e20]) == [REDACTED, 1e20]
    assert Redaction(patterns=("re:true|null",)).redact([True, None, 1]) == [True, None, 1]


@pytest.mark.parametrize("patterns", [("card",), ("card", "re:ACME")])
def test_the_digits_of_a_fraction_are_no_card_number(patterns: tuple[str, ...]) -> None:
    # One score of twenty would pass the checksum by chance.
    assert Redaction(patterns=patterns).redact([0.4111111111111111, 1e300]) == [0.4111111111111111, 1e300]


def test_the_input_is_not_changed_and_equal_secrets_leave_no_trace() -> None:
    payload: Any = {"password": "one", "user": {"email": ["x"]}, "list": [{"token": 1}]}
    before = copy.deepcopy(payload)
    shown = EVERYTHING.redact(payload)
    assert payload == before
    assert shown == EVERYTHING.redact({**payload, "password": "two"})


def test_a_redaction_crosses_process_boundaries() -> None:
    again = pickle.loads(pickle.dumps(EVERYTHING))  # noqa: S301
    assert again == EVERYTHING
    assert again.redact_text("ACME-1") == REDACTED


@pytest.mark.parametrize(
    "field",
    [
        "user.email",
        "$.user.email",
        "$..user.email",
        "$.event.user[*].email",
        "$['user']['email']",
        "/user/email",
        "/event/user/0/email",
        "user/email",
        "user[0].email",
        "user[].email",
        'user["email"]',
        "user.email[]",
        "$.*.email",
    ],
)
def test_a_path_may_be_written_as_json_paths_and_pointers_are(field: str) -> None:
    payload: Any = {"event": {"user": [{"email": "x", "name": "n"}]}, "email": "kept"}
    assert Redaction(fields=(field,)).redact(payload) == {
        "event": {"user": [{"email": REDACTED, "name": "n"}]},
        "email": "kept",
    }


@pytest.mark.parametrize(
    "name",
    [
        "db.password",
        "spring.datasource.Password",
        "password.value",
        "password[0]",
        "user[password]",
        "user[0][password]",
        "users.0.api-key",
        "user['password']",
    ],
)
def test_a_name_with_dots_or_brackets_is_a_path(name: str) -> None:
    assert Redaction().redact({name: "x", "in": {name: 1}}) == {name: REDACTED, "in": {name: REDACTED}}
    assert not Redaction().is_harmless_name(name)


def test_paths_go_on_in_names_with_dots() -> None:
    redaction = Redaction(fields=("user.email", "example.org/pin", "$cost", "/x.y/z"))
    assert redaction.redact({"a.user": {"email": 1}, "user": {"b.email": 2}, "x": {"user.email": 3}, "a.email": 4}) == {
        "a.user": {"email": REDACTED},
        "user": {"b.email": 2},
        "x": {"user.email": REDACTED},
        "a.email": 4,
    }
    assert redaction.redact({"$cost": 1, "x": {"y.z": 2}}) == {"$cost": REDACTED, "x": {"y.z": REDACTED}}
    assert redaction.redact({"example.org/pin": 1, "pin": 2}) == {"example.org/pin": REDACTED, "pin": 2}
    assert redaction.redact({"a.b": 1, "v1.2": 2, ".": 3, "": 4, "[]": 5}) == {
        "a.b": 1,
        "v1.2": 2,
        ".": 3,
        "": 4,
        "[]": 5,
    }


def test_long_names_take_no_more_than_linear_time() -> None:
    redaction = Redaction(fields=("x.a",))
    started = time.process_time()
    for unit in ("a.", "[", "[a", "[ ", "[0]", "]"):
        redaction.redact({unit * (200_000 // len(unit)): {str(n): n for n in range(1000)}})
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "field",
    ["", "a..b", "*", "user.*", "*_token", ".a", "$", "$.", "/", "[0]", "user[email", "user]", "a//b", "user/*", "$.*"],
)
def test_a_field_that_means_nothing_is_refused(field: str) -> None:
    with pytest.raises(PolicyError, match="is not a field to redact"):
        Redaction(fields=(field,))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("emial", "is not a redaction pattern"),
        ("re:(a", "missing \\)"),
        ("re:(?<=a)b", "invalid perl operator"),
        ("re:a*", "matches empty text"),
    ],
)
def test_a_pattern_that_cannot_work_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Redaction(patterns=(pattern,))


def _seconds(redaction: Redaction, text: str) -> float:
    started = time.process_time()
    redaction.redact_text(f"{text} @")  # an @ keeps the search for addresses from ending early
    return time.process_time() - started


@pytest.mark.parametrize(
    "unit",
    [
        "a",
        "a@",
        "a@a.",
        "1",
        "1-",
        "4111 ",
        "+1",
        "bearer ",
        "-eyJ",
        "eyJaaaaaaaaaaa.",
        'password="',
        "a=",
        "://a",
        "\\",
    ],
)
def test_no_repetition_takes_more_than_linear_time(unit: str) -> None:
    # 200,000 characters: linear work takes some tenths of a second, quadratic work many minutes.
    assert _seconds(EVERYTHING, unit * (200_000 // len(unit))) < 5


@given(st.text("a1@.-+ \"'=:\\/eyJbr(", min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_no_text_takes_more_than_linear_time(unit: str) -> None:
    """20,000 characters made of any short unit are looked through within a second."""
    assert _seconds(EVERYTHING, unit * (20_000 // len(unit))) < 1


def test_custom_expressions_cannot_backtrack() -> None:
    # Python's own engine needs 2^60 steps for this one.
    assert _seconds(Redaction(patterns=("re:(a+)+$",)), "a" * 60 + "b") < 1


PHONE_NUMBERS = [
    "+4915112345678",
    "+1 555 123 4567",
    "+49 (0)30 123456",
    "+44 20 7946 0958",
    "+1.5551234567",
    "+49/30/123456",
    "0049 30 1234567",
    "0044 (0)20 7946 0958",
    "004915112345678",
    "01711234567",
    "0301234567",
    "01 23 45 67 89",
    "01.23.45.67.89",
    "(030) 123456",
    "030/1234567",
    "030 / 1234567",
    "030 12 34 56 78",
    "0171-2345678",
    "07911 123456",
    "020 7946 0958",
    "04 1234 5678",
    "555-123-4567",
    "(555)123-4567",
    "555.123.4567",
    "1-800-555-0199",
    "+49\u00a030\u00a0901820",
    "+49\u202f30\u2009901820",
    "+49\u201130\u2013901820",
    "030\u2013901820",
    "\uff0b\uff14\uff19\uff13\uff10\uff19\uff10\uff11\uff18\uff12\uff10",
    "\uff10\uff11\uff17\uff11\uff11\uff12\uff13\uff14\uff15\uff16\uff17",
    "\u0660\u0661\u0667\u0661\u0661\u0662\u0663\u0664\u0665\u0666\u0667",
    "(0)30 901820",
    "(0) 171 2345678",
    "14155552671",
    "447946095800",
    "33612345678",
    "4930901820",
    "4915112345678",
    "34612345678",
    "8613800138000",
    "919876543210",
    "5511987654321",
    "351912345678",
]

NOT_PHONE_NUMBERS = [
    "2024-01-02",
    "2024-11-18 14:58:29",
    "2024-01-02T10:00:00.123456+0200",
    "20240102T100000Z",
    "02-03-2024 10:00",
    "01-02-2024 10 items",
    "01/02/2024 10:00:00",
    "01.02.2024 10 Uhr",
    "12:30-13:45",
    "1700000000",
    "1700000000000",
    "1700000000.123",
    "1234567890",
    "ACME-0123456789",
    "/orders/0123456789",
    "0000012345678",
    "192.168.10.200",
    "10.0.0.1:6379",
    "2001:0db8:85a3:0000:0000:8a2e:0370:7334",
    "01:23:45:67:89:01",
    "01-23-45-67-89-01",
    "1.22.333-4444",
    "2024.10.1",
    "1,234,567.89",
    "1.234.567,89",
    "1 234 567 890",
    "12 345 678",
    "0.0123456789",
    "3.0123456789",
    "d41d8cd98f00b204e9800998ecf8427e",
    "01234567-89ab-4def-8123-456789abcdef",
    "978-3-16-148410-0",
    "sha256:0123456789012345",
    "mobile: true",
    "phone: at home",
    "1763468800",
    "1763468800123",
    "1763468800123456",
    "1763468800123456789",
    "4006381333931",
    "9783161484100",
    "202511181234",
    "20251118123456",
    "201511180001",
    "100000000042",
    "000000000042",
    "11111111111",
    "99999999999",
    "44794609580",
    "4479460958001",
    "order-447946095800",
    "/orders/447946095800",
    "447946095800.50",
    "447946095800x",
    "4 930 901 820",
    "\u0661\u0662\u0663\u0664\u0665",
]


@pytest.mark.parametrize("around", ["{}", "call {}, please", '{{"to": "{}"}}', "<{}>", "number={}", "sms:{}", "{}."])
@pytest.mark.parametrize("number", PHONE_NUMBERS)
def test_phone_numbers_are_masked_by_default(number: str, around: str) -> None:
    text = Redaction(patterns=("phone",)).redact_text(around.format(number))
    assert text == around.format(REDACTED)
    shown = Redaction().redact_text(around.format(number))
    assert not any(character.isdigit() for character in shown)
    assert not Redaction().is_harmless(around.format(number))


@pytest.mark.parametrize("around", ["{}", "it was {}, then", '{{"value": "{}"}}', "value={}"])
@pytest.mark.parametrize("text", NOT_PHONE_NUMBERS)
def test_ids_times_amounts_versions_and_addresses_are_not_phone_numbers(text: str, around: str) -> None:
    assert Redaction(patterns=("phone",)).redact_text(around.format(text)) == around.format(text)


def test_characters_without_a_width_hide_no_phone_number() -> None:
    redact = Redaction(patterns=("phone",)).redact_text
    assert redact("\u202a+49 30 901820\u202c") == f"\u202a{REDACTED}\u202c"
    assert (
        redact("gr\u00fc\u00dfe +49\u200b30\ufeff901820 \u2013 b\u00f6b")
        == f"gr\u00fc\u00dfe {REDACTED} \u2013 b\u00f6b"
    )
    assert Redaction().redact({"phone": "\uff10\uff13\uff10\uff19\uff10\uff11"}) == {"phone": REDACTED}
    assert not Redaction().is_harmless("+49\u00a030\u00a0901820")


SEPARATED = st.lists(st.text("0123456789", min_size=2, max_size=4), min_size=3, max_size=3)


@given(st.integers(1, 999), SEPARATED, st.sampled_from(["", " ", "-", "."]))
@settings(max_examples=300, deadline=None)
def test_whatever_has_a_plus_and_enough_digits_is_a_phone_number(
    country: int, groups: list[str], separator: str
) -> None:
    number = separator.join([f"+{country}", *groups])
    assert Redaction(patterns=("phone",)).redact_text(f"call {number} now") == f"call {REDACTED} now"


@given(st.integers(1, 9), st.text("0123456789", min_size=1, max_size=3), st.text("0123456789", min_size=7, max_size=8))
@settings(max_examples=300, deadline=None)
def test_whatever_has_a_trunk_prefix_is_a_phone_number(first: int, area: str, subscriber: str) -> None:
    for number in (f"0{first}{area} {subscriber}", f"(0{first}{area}) {subscriber}", f"0{first}{area}/{subscriber}"):
        assert Redaction(patterns=("phone",)).redact_text(f"call {number} now") == f"call {REDACTED} now"


NOBODYS_NUMBER = st.one_of(
    st.datetimes().map(lambda moment: moment.isoformat()),
    st.datetimes().map(str),
    st.dates().map(str),
    st.dates().map(lambda day: f"{day:%d.%m.%Y}"),
    st.dates().map(lambda day: f"{day:%m/%d/%Y}"),
    st.times().map(str),
    st.uuids().map(str),
    st.uuids().map(lambda made: made.hex),
    st.binary(min_size=8, max_size=32).map(bytes.hex).filter(lambda text: not text.isdigit()),
    st.ip_addresses().map(str),
    st.tuples(st.ip_addresses(v=4), st.integers(1, 65535)).map(lambda both: f"{both[0]}:{both[1]}"),
    st.integers(0, 10**9 - 1).map(str),
    st.integers(10**9, 2 * 10**9 - 1).map(str),  # seconds since 1970, and as milliseconds, microseconds and nanoseconds
    st.integers(10**12, 2 * 10**12 - 1).map(str),
    st.integers(10**15, 2**63).map(str),
    st.integers(0, 2**63).map(lambda number: f"{number:,}"),
    st.integers(0, 2**63).map(lambda number: f"{number:,}".replace(",", " ")),
    st.decimals(0, 10**9, places=2).map(str),
    st.floats(0, 1e15).map(repr),
    st.tuples(*[st.integers(0, 999)] * 3).map(lambda parts: "{}.{}.{}".format(*parts)),
)


@given(NOBODYS_NUMBER)
@settings(max_examples=1000, deadline=None)
def test_no_id_time_amount_version_or_address_is_taken_for_a_phone_number(text: str) -> None:
    redaction = Redaction(patterns=("phone",))
    assert redaction.redact_text(text) == text
    assert redaction.redact_text(f"at {text}, it ended") == f"at {text}, it ended"


def test_a_field_for_phone_numbers_is_masked_however_they_are_written() -> None:
    payload: Any = {"phone": 5551234567, "contact": {"mobileNumber": ["555 1234", "none"], "fax": {"ext": 123}}}
    kept: Any = {"mobile": True, "tel": "home", "number": 5551234567, "phone_id": 1234567}
    assert Redaction().redact({**payload, **kept}) == {
        "phone": REDACTED,
        "contact": {"mobileNumber": [REDACTED, "none"], "fax": {"ext": 123}},
        **kept,
    }
    assert Redaction(patterns=("card",)).redact(payload) == payload
    assert not Redaction().is_harmless_name("user.phone")
    for text in ("tel:5551234567", "Phone number: 5551234567", "phone_no=5551234567", '"mobile": 5551234567'):
        assert Redaction().redact_text(text).endswith(REDACTED)
        assert "555" not in Redaction().redact_text(text)


@given(
    st.sampled_from(
        [
            "+1",
            "0",
            "00",
            "01-",
            "49",
            "447",
            "(0)",
            "+4\u00a0",
            "\uff10",
            "(0",
            "1 ",
            "tel ",
            "phone_",
            "+49 (",
            "030/",
            "555-",
        ]
    ),
    st.integers(1, 7),
)
@settings(max_examples=60, deadline=None)
def test_no_beginning_of_a_phone_number_takes_more_than_linear_time(unit: str, digits: int) -> None:
    text = (unit + "1" * digits) * (20_000 // (len(unit) + digits))
    assert _seconds(Redaction(patterns=("phone",)), text) < 1
