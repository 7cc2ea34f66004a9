"""The server dies between an effect and the answer that is kept of it: what the retry under the same key gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.crew import Nursery, until
from tests.chaos.sites import SQLITE
from tests.server.killed.asking import Ask, Client, Notes, Reply
from tests.server.killed.conftest import OpenSite
from tests.server.killed.places import Forked, Place


class World:
    """One server, and clients who ask one after the other."""

    def __init__(self, server: Forked) -> None:
        self.server = server
        self._numbers = iter(range(1, 1000))

    def send(self, method: str, path: str, body: Any = None, key: str = "", **headers: str) -> Reply:
        reply = self._answered(method, path, body, key or f"key-{next(self._numbers)}", headers)
        assert reply is not None
        return reply

    def killed_after_effect(
        self, times: int, method: str, path: str, body: Any = None, *, key: str, **headers: str
    ) -> None:
        """The request is sent, and its server dies at the n-th `after_effect`; the last one is that of the answer."""
        self.server.set_trap("after_effect", times)
        reply = self._answered(method, path, body, key, headers, once=True)
        assert reply is None, reply
        until(lambda: self.server.status is not None, "the server is dead", within_s=30.0)
        self.server.spring_trap()
        self.server.start()
        self.server.wait_listening()

    def _answered(
        self, method: str, path: str, body: Any, key: str, headers: dict[str, str], *, once: bool = False
    ) -> Reply | None:
        notes = Notes()
        client = Client(self.server.port, self.server.token, notes)
        sent = b"" if body is None else json.dumps(body).encode()
        ask = Ask(method, path, key, sent, headers=tuple(headers.items()))
        try:
            return client.answered(ask, stopped=lambda: once and bool(notes.met["lost"]))
        finally:
            client.close()
            assert notes.problems == []


@pytest.fixture
def world(open_site: OpenSite, servers_cradle: Nursery) -> Iterator[World]:
    server = Forked(servers_cradle, Place(open_site(SQLITE)))
    server.start()
    server.wait_listening()
    yield World(server)
    server.end()


def test_a_document_that_was_ingested_is_answered_with_the_same_snippets(world: World) -> None:
    world.killed_after_effect(2, "POST", "/v1/documents", {"doc_id": "a", "text": "one"}, key="k")
    again = world.send("POST", "/v1/documents", {"doc_id": "a", "text": "one"}, key="k")
    assert again.status == 200  # the document was there; that the first request had put it there nobody knows
    other = world.send("POST", "/v1/documents", {"doc_id": "a", "text": "one"})
    assert json.loads(other.body)["snippet_ids"] == json.loads(again.body)["snippet_ids"]


def test_a_replaced_document_is_no_reason_to_refuse_the_request_that_replaced_it(world: World) -> None:
    first = json.loads(world.send("PUT", "/v1/documents/a", {"text": "one"}).body)["etag"]
    match = {"If-Match": f'"{first}"'}
    world.killed_after_effect(2, "PUT", "/v1/documents/a", {"text": "two"}, key="k", **match)
    again = world.send("PUT", "/v1/documents/a", {"text": "two"}, key="k", **match)
    assert again.status in (200, 201), again.body


def test_a_rollback_that_happened_is_not_rolled_back_by_its_retry(world: World) -> None:
    built = []
    for text in ("one", "two"):
        world.send("PUT", "/v1/documents/a", {"text": text})
        built.append(json.loads(world.send("POST", "/v1/builds", {}).body)["index_hash"])
        world.send("POST", "/v1/aliases/docs:swap", {"index_hash": built[-1]})
    world.killed_after_effect(1, "POST", "/v1/aliases/docs:rollback", {}, key="k")
    assert json.loads(world.send("POST", "/v1/aliases/docs:rollback", {}, key="k").body)["index_hash"] == built[0]


@pytest.mark.parametrize("numbered", [False, True], ids=["", "numbered"])
@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_a_request_that_another_one_has_overtaken_is_answered_and_not_performed_again(
    world: World, method: str, numbered: bool
) -> None:
    def put(text: str, sequence: int, key: str = "") -> Reply:
        return world.send("PUT", "/v1/documents/a", ingested(text, sequence), key)

    def ingested(text: str, sequence: int) -> dict[str, Any]:
        return {"text": text, "sequence": sequence} if numbered else {"text": text}

    path = "/v1/documents/a?sequence=2" if numbered and method == "DELETE" else "/v1/documents/a"
    body = ingested("one", 2) if method == "PUT" else None
    put("before", 1)
    world.killed_after_effect(2, method, path, body, key="k")
    put("two", 3)
    again = world.send(method, path, body, key="k")
    assert again.status == 200, again.body
    stored = json.loads(put("two", 3).body)
    assert (stored["decision"], stored["flags"]["revived"]) == ("duplicate", False)
    if method == "PUT":
        told = json.loads(again.body)
        assert told["flags"]["healed"] is True
        assert told["snippet_ids"] == json.loads(put("one", 4).body)["snippet_ids"]
