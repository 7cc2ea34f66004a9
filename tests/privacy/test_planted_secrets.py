"""Secrets planted in metadata, payloads, errors and requests are nowhere in the stores and in no log line."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from unicodedata import normalize

import pyarrow.parquet as pq
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ragfence
from ragfence import Document, Operation, Policy
from ragfence.core.canonical import canonical_json, parse_json
from ragfence.core.redaction import REDACTED, CleanJson, Redaction
from ragfence.errors import Conflict, EffectFailed, NotJson, TerminalError
from tests import servers
from tests.server.processes import served

POLICY: dict[str, Any] = {
    "on_conflict": {"include_diff": True},
    "redaction": {"patterns": ["email", "phone", "bearer_token", "card"], "fields": ["patient.name"]},
}
LETTERS = st.text("abcdefghijkmnpqrstuvwxyz", min_size=12, max_size=20)


@st.composite
def secrets(draw: Any) -> tuple[dict[str, Any], list[str]]:
    """Values with a secret in them, by what they look like or by the name of their field; and the secrets."""
    words = [draw(LETTERS) for _ in range(5)]
    number = "".join(str(draw(st.integers(0, 9))) for _ in range(7))
    email, phone = f"{words[0]}@{words[1]}.example", f"+4930{number}"
    token, password, name = f"Bearer {words[2]}{words[3]}", f"p{words[3]}!", f"N{words[4]}"
    values = {
        "note": draw(st.sampled_from(["{}", "mail {} now", "to: {}"])).format(email),
        "called": f"at {phone}, twice",
        "sent_with": token,
        "password": password,
        "patient": {"name": name, "ward": 7},
        "list": [f"<{email}>", {"api-key": password}],
    }
    return values, [email, phone, token.split()[1], password, name]


@contextlib.contextmanager
def everything(kind: str, valkey: Callable[[], servers.RedisServer]) -> Iterator[tuple[Path, Any, Callable[[], bytes]]]:
    """A place for a fence, and all bytes that are stored there."""
    with TemporaryDirectory() as folder:
        place = Path(folder)
        if kind == "embedded":
            yield place, place / "fence", lambda: _files(place)
            return
        server = valkey()
        client = redis.Redis.from_url(server.url)
        client.flushall()
        try:
            yield place, server.url, lambda: _files(place) + _server(client)
        finally:
            client.close()


def _files(place: Path) -> bytes:
    pieces = []
    for file in sorted(place.rglob("*")):
        if file.is_file():
            pieces.append(file.read_bytes())
            if file.read_bytes()[:4] == b"PAR1":  # its pages are compressed
                pieces.append(repr(pq.read_table(file).to_pylist()).encode())
    return b"\n".join(pieces)


def _server(client: Any) -> bytes:
    pieces = []
    for name in client.scan_iter(count=1000):
        pieces.append(name)
        kind = client.type(name)
        if kind == b"string":
            pieces.append(client.get(name))
        elif kind == b"stream":
            pieces += [value for _, fields in client.xrange(name) for pair in fields.items() for value in pair]
        else:
            pieces.append(client.dump(name))
    return b"\n".join(pieces)


@pytest.mark.parametrize("kind", ["embedded", "valkey"])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(planted=secrets())
def test_what_is_planted_in_metadata_payloads_and_errors_is_nowhere(
    kind: str, planted: Any, request: pytest.FixtureRequest
) -> None:
    values, hidden = planted
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    logging.getLogger().addHandler(handler)
    try:
        with everything(kind, lambda: request.getfixturevalue("valkey_server")) as (place, store, stored):
            policy = Policy.from_mapping(POLICY)
            with ragfence.open(store, objects=place / "objects", policy=policy) as fence:
                _work(fence, values, hidden)
                fence.documents.verify()
                held = stored()
    finally:
        logging.getLogger().removeHandler(handler)
    for secret in hidden:
        assert secret.encode() not in held, secret
        assert secret not in lines.getvalue(), secret
    assert REDACTED.encode() in held


def _work(fence: ragfence.Fence, values: dict[str, Any], hidden: list[str]) -> None:
    document = Document(
        "a", "a text of its own", values, source_url=f"https://u:{hidden[3]}@x.example/?token={hidden[2]}"
    )
    fence.documents.ingest(document)
    assert fence.documents.ingest(document).decision == "duplicate"
    fence.documents.ingest_many([document._replace(metadata={**values, "more": 1}), Document("b", "another", values)])
    stored = fence.documents.get("a")
    assert stored is not None
    assert stored.metadata["password"] == REDACTED
    assert stored.metadata["patient"]["ward"] == 7
    with fence.claim(Operation(kind="hook", source_id="1"), payload=values) as op:
        op.seal()
    with pytest.raises(Conflict), fence.claim(Operation(kind="hook", source_id="1"), payload={**values, "x": 1}):
        pass

    @fence.once(kind="failing", key=lambda n: str(n))
    def fails(n: int) -> None:
        raise TerminalError(f"refused: {values['note']}, {values['sent_with']}, password={hidden[3]}")

    @fence.once(kind="breaking", key=lambda n: str(n))
    def breaks(n: int) -> None:
        raise RuntimeError(f"cannot reach {values['note']} {values['called']}")

    with pytest.raises(TerminalError):
        fails(1)
    with pytest.raises(EffectFailed):
        fails(1)
    with pytest.raises(RuntimeError):
        breaks(1)


def test_what_is_planted_in_requests_is_nowhere(tmp_path: Path) -> None:
    email, token, cookie = "somebody@secret.example", "verysecrettokenvalue123456", "sessioncookie98765"
    values = {"note": f"write to {email}", "password": "hunter2hunter2"}
    with served(tmp_path, **POLICY) as api:
        caller = api.caller()
        headers = {"Cookie": f"id={cookie}", "X-Correlation-Id": "c-1", "X-Api-Token": token}
        body = {"doc_id": "a", "text": "a text of its own", "metadata": values}
        assert caller.post("/v1/documents", body, key="k", headers=headers).status_code == 201
        assert caller.post("/v1/documents", body, key="k", headers=headers).status_code == 201
        other = body | {"metadata": values | {"note": f"or to another.{email}"}}
        assert caller.post("/v1/documents", other, key="k", headers=headers).status_code == 409
        lines = (f'{{"doc_id":"b{n}","text":"x","metadata":{{"password":"hunter2hunter2"}}}}\n' for n in range(3))
        ndjson = headers | {"Content-Type": "application/x-ndjson"}
        caller.ask("POST", "/v1/documents:batch", "kb", content="".join(lines).encode(), headers=ndjson)
        held = _files(tmp_path)
    for secret in (email, token, cookie, "hunter2hunter2", caller.token, caller.token.split("_")[3]):
        assert secret.encode() not in held, secret


PHONES = {
    "note": "call +4915112345679 or 0171 2345678",
    "text": "(555) 123-4567, 030/7654321",
    "contact": {"phone": 5559876543, "mobile": "12 34 56 78"},
}
PHONE_DIGITS = ("4915112345679", "0171 2345678", "123-4567", "7654321", "5559876543", "12 34 56 78")


@pytest.mark.parametrize("kind", ["embedded", "valkey"])
def test_phone_numbers_are_nowhere_in_a_snapshot_unless_the_policy_says_so(
    kind: str, request: pytest.FixtureRequest
) -> None:
    operation = Operation(kind="hook", source_id="1")
    for rules, masked in (({}, True), ({"redaction": {"patterns": ["card"]}}, False)):
        with everything(kind, lambda: request.getfixturevalue("valkey_server")) as (place, store, stored):
            policy = Policy.from_mapping({"on_conflict": {"include_diff": True}, **rules})
            with ragfence.open(store, objects=place / "objects", policy=policy) as fence:
                with fence.claim(operation, payload={**PHONES, "order": 5559876543, "day": "2024-01-02"}) as op:
                    op.seal()
                with pytest.raises(Conflict) as refused, fence.claim(operation, payload={**PHONES, "order": 7}):
                    pass
                held, shown = stored(), str(refused.value.details)
        assert b"2024-01-02" in held  # the payload was kept
        for digits in set(PHONE_DIGITS) - {"5559876543"}:  # the order's number is not masked
            assert (digits.encode() in held) is not masked, digits
            assert not masked or digits not in shown
        assert (b'"phone":5559876543' in held) is not masked


def test_metadata_keeps_phone_numbers_unless_the_policy_names_them(tmp_path: Path) -> None:
    for name, rules, masked in (("a", {}, False), ("b", {"redaction": {"patterns": ["card", "phone"]}}, True)):
        with ragfence.open(tmp_path / name, policy=Policy.from_mapping(rules)) as fence:
            fence.documents.ingest(Document("a", "a text", {"contact": "+4915112345679"}))
            kept = fence.documents.get("a")
            assert kept is not None
            assert kept.metadata == {"contact": REDACTED if masked else "+4915112345679"}


_NUMBERS = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, 7, 4111111111111111, 4111111111111111.0, 123456789, 123456789.0])
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.text(max_size=12), st.one_of(st.text(max_size=40), _NUMBERS, st.none(), st.booleans())),
    st.sampled_from([(), ("re:[0-9]{9}",), ("re:0|true|null",)]),
)
def test_the_quick_way_is_the_long_way(given_values: dict[str, Any], custom: tuple[str, ...]) -> None:
    """`CleanJson` writes what `redact` leaves, whatever it thinks to be harmless."""
    redaction = Redaction(patterns=("email", "phone", "bearer_token", "card", *custom))
    _assert_equally_clean(redaction, given_values)


@pytest.mark.parametrize("number", [123456789, 123456789.0, 4111111111111111, 4111111111111111.0])
def test_numbers_hide_no_secret_whichever_they_are(number: float) -> None:
    clean = CleanJson(Redaction(patterns=("card", "re:[0-9]{9}")))
    assert clean.write({"a": 1, "n": number, "ok": True}) == b'{"a":1,"n":"[redacted]","ok":true}'


_PIECES = (
    "4111|1111|555|123|4567|7|\u0665| |-|.|(|)|+|:|=|@|://|x|.org|token|password|BEARER |bearer |0123456789abcdef"
    "|eyJhbGciOiJI|UzI1NiIsInR5|'|\"|\\|[|]|{|%5D|;|Cookie|\n"
)
_SUSPICIOUS = st.lists(
    st.sampled_from(_PIECES.split("|")),
    max_size=12,
).map("".join)


@settings(max_examples=500, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["a", "title", "token", "a.title", "db.token", "token[0]"]), _SUSPICIOUS),
    st.sets(st.sampled_from(["email", "phone", "bearer_token", "card", "re:x[0-9]"])),
)
def test_the_quick_way_is_the_long_way_for_what_looks_like_a_secret(given_values: Any, patterns: set[str]) -> None:
    """Whichever patterns a policy has: what is nearly a secret stays, what is one goes, on both ways alike."""
    _assert_equally_clean(Redaction(patterns=tuple(sorted(patterns))), given_values)


@settings(max_examples=100, deadline=None)
@given(secrets(), st.booleans())
def test_the_quick_way_misses_no_secret(planted: Any, first: bool) -> None:
    values, hidden = planted
    redaction = Redaction(patterns=("email", "phone", "bearer_token", "card"), fields=("patient.name",))
    for name, value in values.items():
        flat = {"before": "x", name: value} if first else {name: value, "after": 3}
        written = _assert_equally_clean(redaction, flat)
        assert not any(secret in written.decode() for secret in hidden)


@pytest.mark.parametrize("name", ["db.password", "user[password]", "patient.name"])
def test_flat_names_hide_no_secret(name: str) -> None:
    clean = CleanJson(Redaction(fields=("patient.name",)))
    for _ in "12":  # the second time the names are known
        assert clean.write({name: "hunter2", "z.name": "x"}) == f'{{"{name}":"[redacted]","z.name":"x"}}'.encode()


@pytest.mark.parametrize("wrap", [list, tuple])
def test_lists_hide_no_secret_whichever_they_are(wrap: Callable[[list[Any]], Any]) -> None:
    redaction = Redaction(patterns=("email",))
    given_values = {"authors": wrap([{"password": "hunter2"}, wrap(["a@example.org"])]), "token": wrap(["t"])}
    expected = b'{"authors":[{"password":"[redacted]"},["[redacted]"]],"token":"[redacted]"}'
    assert CleanJson(redaction).write(given_values) == expected


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_secret_is_found_in_whichever_characters_it_is_written(form: Literal["NFC", "NFD"]) -> None:
    redaction = Redaction(fields=(normalize(form, "contraseña"),), patterns=("email",))
    for written in ("NFC", "NFD"):
        given_values = {normalize(written, "contraseña"): "hunter2", "by": normalize(written, "josé@example.org")}
        stored = CleanJson(redaction).write(given_values)
        assert stored == '{"by":"[redacted]","contraseña":"[redacted]"}'.encode()


def _assert_equally_clean(redaction: Redaction, given_values: dict[str, Any]) -> bytes:
    """Twice, since the second time the names are known; and in the reverse order of names."""
    clean = CleanJson(redaction)
    try:
        expected = canonical_json(redaction.redact(parse_json(canonical_json(given_values))))
    except NotJson:
        with pytest.raises(NotJson):
            clean.write(given_values)
        return b""
    assert clean.write(given_values) == expected
    assert clean.write(given_values) == expected
    assert clean.write(dict(reversed(given_values.items()))) == expected
    return expected
