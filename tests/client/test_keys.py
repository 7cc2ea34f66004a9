"""Which Idempotency-Key a call has: its own, unless the run it belongs to has a name."""

from __future__ import annotations

import json
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfence import Document
from ragfence.client.retry import KEY_HEADER, Keys, content_key
from ragfence.errors import ValidationError
from tests.client.conftest import Asks, Opening
from tests.client.scripted import Scripted, outcomes

A, B = Document("x", "A"), Document("x", "B")


def test_equal_calls_have_keys_of_their_own(client: Asks, server: Scripted) -> None:
    """A key of the content alone would leave B where A was sent last, and a second retraction undone."""
    for document in (A, B, A):
        client.ingest(document)
    client.retract("x")
    client.retract("x")
    found = [asked.key for asked in server.asked]
    assert len(set(found)) == 5
    assert all(UUID(key).version == 4 for key in found)


def _calls_of_a_loader(client: Asks) -> None:
    client.ingest(A)
    client.ingest(B)
    client.ingest(A)
    client.retract("x")
    client.retract("x")


def test_a_loader_that_starts_again_sends_the_keys_of_its_run_again(opened: Opening, server: Scripted) -> None:
    for run in ("monday", "monday", "tuesday", None):
        _calls_of_a_loader(opened(server.url, run=run))
    found = [asked.key for asked in server.asked]
    first, again, other, nameless = found[:5], found[5:10], found[10:15], found[15:]
    assert first == again
    assert len({*first, *other, *nameless}) == 15


def test_the_batches_of_a_run_are_made_from_content(opened: Opening, server: Scripted) -> None:
    server.script(outcomes)
    documents = [Document(f"d{n}", "text") for n in range(5)]
    for _ in range(2):
        opened(server.url, run="monday").ingest_many(documents, batch=2)
    opened(server.url, run="monday").ingest_many([*documents[:3], Document("d3", "changed"), documents[4]], batch=2)
    found = [asked.key for asked in server.asked]
    assert found[:3] == found[3:6]
    assert (found[6] == found[0], found[7] == found[1], found[8] == found[2]) == (True, False, True)


def test_a_key_of_the_callers_own_is_sent_as_it_is(client: Asks, server: Scripted) -> None:
    client.ingest(A, idempotency_key="nightly:1")
    client.retract("x", idempotency_key="with, a comma")
    assert server.asked[0].key == "nightly:1"
    assert server.asked[1].key == '"with, a comma"'


@pytest.mark.parametrize("key", ["", "x" * 256, "ä", "a\nb", 7])
def test_a_key_that_no_server_takes_is_refused_before_it_is_sent(client: Asks, server: Scripted, key: str) -> None:
    with pytest.raises(ValidationError):
        client.ingest(A, idempotency_key=key)
    assert not server.asked


def test_a_key_of_the_callers_own_leaves_the_others_of_the_run_as_they_are() -> None:
    plain, mixed = Keys("monday"), Keys("monday")
    plain.header(None, "POST", "/", b"1")
    mixed.header("own", "POST", "/", b"1")
    assert plain.header(None, "POST", "/", b"2") == mixed.header(None, "POST", "/", b"2")


@pytest.mark.parametrize("run", ["", "a\0b", "\ud800"])
def test_a_run_needs_a_usable_name(run: str) -> None:
    with pytest.raises(ValidationError):
        Keys(run)


@given(
    st.lists(
        st.tuples(st.text(max_size=3), st.integers(0, 3), st.sampled_from(["PUT", "POST"]), st.binary(max_size=3)),
        unique=True,
        max_size=8,
    )
)
def test_calls_that_differ_in_anything_have_different_keys(calls: list[tuple[str, int, str, bytes]]) -> None:
    """Run, position, method, path and body each count, wherever one ends and the next begins."""
    keys = {content_key(run, position, method, "/v1/documents", body) for run, position, method, body in calls}
    assert len(keys) == len(calls)


def test_keys_of_content_never_change() -> None:
    body = json.dumps({"doc_id": "a", "text": "x"}, separators=(",", ":")).encode()
    key = content_key("monday", 1, "POST", "/v1/documents", body)
    assert key == "f55724516431817c631ff07b3710091687dbb3bb9f0b1715d652803ac53ce3c6"
    assert Keys("monday").header(None, "POST", "/", b"")[KEY_HEADER] == content_key("monday", 0, "POST", "/", b"")
