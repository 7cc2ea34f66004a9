"""Secrets in text, by the name before them: whichever way the value is written, and wherever it is cut off."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragfence.core.redaction import Redaction

PLAIN = Redaction()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{'password': b'hunter2'}", "{'password': [redacted]}"),
        ("{'password': b'hunter2', 'n': 1}", "{'password': [redacted], 'n': 1}"),
        ("login(password=u'hunter2', n=1)", "login(password=[redacted], n=1)"),
        ("{'password': ['hunter2', 'x'], 'n': 1}", "{'password': [redacted], 'n': 1}"),
        ("{'password': ('hunter2', 'x')}", "{'password': [redacted]}"),
        ('{"password": {"value": "hunter2"}}', '{"password": [redacted]}'),
        ('{"password": {"a": ["}", {}], "b": "hunter2"}, "n": 1}', '{"password": [redacted], "n": 1}'),
        ("password=Secret('hunter2') n=1", "password=[redacted] n=1"),
        ("password=Secret(value='hunter2', n=1) n=1", "password=[redacted] n=1"),
        ("password='it''s hunter2' n=1", "password=[redacted] n=1"),
        ("password=''hunter2", "password=[redacted]"),
        ('"{""password"":""hunter2"",""n"":1}"', '"{""password"":[redacted]"",""n"":1}"'),
        ("password=hun'ter2 n=1", "password=[redacted] n=1"),
        ("password=<hunter2> n=1", "password=[redacted]> n=1"),
        ("password=4111111111111111!hunter2 n=1", "password=[redacted] n=1"),
        ("password: value: hunter2 and more", "password: [redacted] and more"),
        ("password => 'hunter2'", "password => [redacted]"),
        ("password =       hunter2", "password =       [redacted]"),
        ("psql --password=hunter2 -h x", "psql --password=[redacted] -h x"),
        (repr("at login\npassword: hunter2, n: 1"), r"'at login\npassword: [redacted], n: 1'"),
        ("password = {not closed hunter2", "password = [redacted]"),
        ("password = {\n  'a': 'hunter2'\n", "password = [redacted]"),
    ],
)
def test_a_value_goes_as_a_whole(text: str, shown: str) -> None:
    assert PLAIN.redact_text(text) == shown
    assert PLAIN.redact_text(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r'body was "{\"password\": \"hunter2\"}" here', r'body was "{\"password\": [redacted]}" here'),
        (r'"{\"password\":\"a\\\"hunter2\",\"n\":1}"', r'"{\"password\":[redacted],\"n\":1}"'),
        (r'"{\\\"password\\\": \\\"hunter2\\\", \\\"n\\\": 1}"', r'"{\\\"password\\\": [redacted], \\\"n\\\": 1}"'),
        (r"'{\'password\': \'hunter2\'}'", r"'{\'password\': [redacted]}'"),
        (r'"{\"password\": \"hunter2", "n": 1', r'"{\"password\": [redacted]", "n": 1'),
        (r'"{\"password\": [\"hunter2]\"], \"n\": 1}"', r'"{\"password\": [redacted], \"n\": 1}"'),
        (r'{"password": "a\\", "n": 1}', r'{"password": [redacted], "n": 1}'),
    ],
)
def test_a_value_within_an_escaped_text_goes_and_what_is_around_it_stays(text: str, shown: str) -> None:
    assert PLAIN.redact_text(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('password = "hunter2 (cut off', "password = [redacted]"),
        ('password = "hunter2 (cut off\nnext line', "password = [redacted]\nnext line"),
        ("password: 'hunter2 hunter2\r\nnext line", "password: [redacted]\r\nnext line"),
    ],
)
def test_a_quote_that_is_not_closed_takes_the_rest_of_its_line(text: str, shown: str) -> None:
    assert PLAIN.redact_text(text) == shown


@pytest.mark.parametrize("quote", ["", '"'])
@pytest.mark.parametrize("newline", ["\n", "\\n"])
def test_a_private_key_goes_with_all_its_lines(quote: str, newline: str) -> None:
    lines = ["-----BEGIN RSA PRIVATE KEY-----", "MIIhunter2", "MIIhunter2", "-----END RSA PRIVATE KEY-----"]
    text = f"private_key={quote}{newline.join(lines)}{quote} n=1"
    assert PLAIN.redact_text(text) == "private_key=[redacted] n=1"
    assert PLAIN.redact_text(text[:90]) == "private_key=[redacted]"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: ApiKey hunter2hunter2", "Authorization: [redacted]"),
        ("Authorization: AWS4 Credential=A/x, Signature=hunter2\nn: 1", "Authorization: [redacted]\nn: 1"),
        ("authorization=ApiKey hunter2", "authorization=[redacted]"),
        ("Cookie: lang=en; session=hunter2\r\nHost: x", "Cookie: [redacted]\r\nHost: x"),
        (r"b'GET /\r\nSet-Cookie: a=b; c=hunter2\r\nHost: x'", r"b'GET /\r\nSet-Cookie: [redacted]\r\nHost: x'"),
        ("curl -H 'Cookie: a=b; c=hunter2' https://x", "curl -H 'Cookie: [redacted]' https://x"),
        (r'["Cookie: a=\"x\"; c=hunter2", "Host: x"]', '["Cookie: [redacted]", "Host: x"]'),
        (r'"[\"Cookie: a=b; c=hunter2\", 1]"', r'"[\"Cookie: [redacted]\", 1]"'),
        ("{'Cookie': 'a=b; c=hunter2', 'Host': 'x'}", "{'Cookie': [redacted], 'Host': 'x'}"),
        ("{'cookie': [b'a=b', b'c=hunter2'], 'Host': 'x'}", "{'cookie': [redacted], 'Host': 'x'}"),
        ("f(cookie='a=b; c=hunter2', host='x')", "f(cookie=[redacted], host='x')"),
        ("/x?cookie=hunter2&authorization=hunter2&n=1", "/x?cookie=[redacted]&authorization=[redacted]&n=1"),
    ],
)
def test_headers_go_to_the_end_of_their_line(text: str, shown: str) -> None:
    assert PLAIN.redact_text(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/x?user[password]=hunter2&n=1", "/x?user[password]=[redacted]&n=1"),
        ("/x?user[password][]=hunter2&n=1", "/x?user[password][]=[redacted]&n=1"),
        ("/x?password[0]=hunter2&password[1]=hunter2", "/x?password[0]=[redacted]&password[1]=[redacted]"),
        ("/x?user%5Bpassword%5D=hunter2&n=1", "/x?user%5Bpassword%5D=[redacted]&n=1"),
        ("/x?user%5bpassword%5d%5b0%5d=hunter2&n=1", "/x?user%5bpassword%5d%5b0%5d=[redacted]&n=1"),
        ("api%5Fkey=hunter2&%70assword=hunter2", "api%5Fkey=[redacted]&%70assword=[redacted]"),
        ("os.environ['PASSWORD'] = 'hunter2'", "os.environ['PASSWORD'] = [redacted]"),
        ("/x?password=&n=1", "/x?password=&n=1"),
    ],
)
def test_names_are_known_in_brackets_and_percent_encoded(text: str, shown: str) -> None:
    assert PLAIN.redact_text(text) == shown


def test_names_may_start_with_a_digit() -> None:
    redaction = Redaction(fields=("2fa_code",))
    assert redaction.redact_text("at 2026-01-02T10:00:00 2fa-code=123") == "at 2026-01-02T10:00:00 2fa-code=[redacted]"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://bob:p@hunter2@host/x", "https://[redacted]@host/x"),
        (f"https://AWS:{'hunter2' * 50}@host/x", "https://[redacted]@host/x"),
        ("https://bob:hunter2?#@host/x", "https://[redacted]@host/x"),
        ("https://bob:hunter2@host?to=a@b", "https://[redacted]@host?to=a@b"),
        ("https://host/x@y and https://host:80", "https://host/x@y and https://host:80"),
        (f'["https://host","{"x" * 300}","a@b"]', f'["https://host","{"x" * 300}","a@b"]'),
    ],
)
def test_users_of_urls_go_to_the_last_at(text: str, shown: str) -> None:
    assert PLAIN.redact_text(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "passwords: are kept, tokens: as well; a secretary: yes",
        "the token (see below) and the password [optional]",
        "{'user': 'bob', 'n': [1, 2]} is no 'password'",
        "at 12:30:00 = noon, f(x)[0]: {}",
        "<label>Password:</label>",
        "50%: done",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert PLAIN.redact_text(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the token: see below, and don't (ever) worry", "the token: [redacted] below, and don't (ever) worry"),
        ("the token: (don't use it) is old", "the token: [redacted] is old"),
        ("no password: 'x'. Then: a 'b'", "no password: [redacted]. Then: a 'b'"),
        ("['no password=', 'token', 'token': 'hunter2']", "['no password=[redacted]token', 'token': [redacted]]"),
        ("password=a, secret=b; token=c&n=1", "password=[redacted], secret=[redacted]; token=[redacted]&n=1"),
    ],
)
def test_what_stands_around_a_value_stays(text: str, shown: str) -> None:
    assert PLAIN.redact_text(text) == shown


WAYS: dict[str, Callable[[Any], str]] = {
    "json": json.dumps,
    "minified": lambda value: json.dumps(value, separators=(",", ":")),
    "indented": lambda value: json.dumps(value, indent=2),
    "json in json": lambda value: json.dumps([json.dumps(value)]),
    "json in json in json": lambda value: json.dumps([json.dumps({"a": json.dumps(value)})]),
    "repr": repr,
    "repr of bytes": lambda value: repr({**value, "password": repr(value["password"]).encode()}),
}
SECRET = st.lists(st.sampled_from(["'", '"', "\\", "(", ")", "[]", "{", "}", ",", ";", ": ", "=", "&", "\n", "<", ">"]))


@pytest.mark.parametrize("way", WAYS)
@given(between=SECRET, wrapped=st.sampled_from(["plain", "list", "dict"]), cut=st.integers(0, 80))
@settings(max_examples=150, deadline=None)
def test_nothing_of_a_secret_stays_however_it_is_written_and_cut_off(
    way: str, between: list[str], wrapped: str, cut: int
) -> None:
    """Whatever the secret is made of: no word of it is left, and what stands before it is as it was."""
    secret = "hunter".join(["", *between, ""])
    value: Any = {"plain": secret, "list": [secret, [secret]], "dict": {"a": {"b": secret}, "c": secret}}[wrapped]
    text = WAYS[way]({"user": "bob", "password": value, "n": 1})
    before, _, _ = text.partition("password")
    text = text[: max(len(text) - cut, len(before))]
    shown = PLAIN.redact_text(text)
    assert "hunt" not in shown
    assert shown.startswith(before)


@given(st.text(max_size=20), st.sampled_from(["password", "user[password]", "api_key", "users[0][token]"]))
def test_nothing_of_a_secret_stays_in_a_query_string(secret: str, name: str) -> None:
    text = urlencode({"n": 1, name: f"{secret}hunter{secret}", "m": 2})
    assert PLAIN.redact_text(text) == f"n=1&{urlencode({name: ''})}[redacted]&m=2"


PIECES = (
    "password|token|Cookie|a|=|:| |\n|'|\"|\\|\\\\\\|(|)|[|]|{|}|%5B|%|&|?|;|,|<|b|://|@|/|-----BEGIN|-----END|[0]|\\n"
)


@given(*[st.lists(st.sampled_from(PIECES.split("|")), min_size=1, max_size=6).map("".join)] * 2)
@settings(max_examples=150, deadline=None)
def test_no_text_takes_more_than_linear_time(before: str, unit: str) -> None:
    """40,000 characters made of any few pieces are looked through within a second; they take some hundredths."""
    text = before + unit * (40_000 // len(unit))
    started = time.process_time()
    PLAIN.redact_text(text)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("kinds", [("'", '"'), ("'", '"', "\\'", '\\"', "\\\\\\'")])
def test_quotes_that_do_not_close_are_looked_for_once(kinds: tuple[str, ...]) -> None:
    text = "".join(f"password={kind}x\n" for kind in kinds) + "password=(\\\\x\n" * 20_000
    started = time.process_time()
    assert "x" not in PLAIN.redact_text(text)
    assert time.process_time() - started < 5
