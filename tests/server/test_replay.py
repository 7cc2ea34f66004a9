"""A retry is answered before any route is looked up, and meets everything else that a request meets."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ragfence
from ragfence import Document
from ragfence.server.replay import operation_of
from ragfence.server.routes.documents import _compared
from ragfence.server.scopes import Role
from tests.server.processes import Served, served

DOCUMENT = {"doc_id": "a", "text": "Thirty days of leave a year."}


@contextmanager
def held(place: Path, text: str) -> Iterator[None]:
    """Somebody else is at it: the key of this document, sent by `loader`, is claimed."""
    operation = operation_of("k1", "loader", "POST", "/v1/documents", "acme")
    body = _compared(Document("a", text), None)
    payload = {"method": "POST", "path": "/v1/documents", "query": "", "body": body}
    elsewhere = contextvars.Context()  # not the test's own, in which the server runs
    with ragfence.open(place / "fence", objects=place / "objects", tenant="acme") as fence:
        claim = fence.claim(operation, payload=payload)
        assert elsewhere.run(claim.__enter__).is_new
        try:
            yield
        finally:
            elsewhere.run(claim.__exit__, None, None, None)


def without_routes(app: Served) -> None:
    app.app.router.routes.clear()


@pytest.mark.parametrize("store", ["sqlite", "valkey"])
def test_it_needs_no_route(tmp_path: Path, store: str, request: pytest.FixtureRequest) -> None:
    url = None if store == "sqlite" else request.getfixturevalue("valkey_server").url
    with served(tmp_path, url) as app:
        caller = app.caller(tenant=f"t{tmp_path.name}")
        first = caller.post("/v1/documents", DOCUMENT, "k1")
        assert (first.status_code, first.headers["idempotency-status"]) == (201, "stored")
        without_routes(app)
        for _ in range(3):
            again = caller.post("/v1/documents", DOCUMENT, "k1")
            assert (again.status_code, again.content) == (201, first.content)
            assert again.headers["idempotency-status"] == "replayed"
            assert again.headers["x-idempotency-status"] == "HIT"
            for name in ("etag", "location", "content-type", "content-length", "idempotency-expires"):
                assert again.headers[name] == first.headers[name]
        assert caller.post("/v1/documents", DOCUMENT, "k2").status_code == 404


def test_every_retry_leaves_its_row(tmp_path: Path) -> None:
    with served(tmp_path) as app:
        caller = app.caller()
        for number in range(4):
            caller.post("/v1/documents", DOCUMENT, "k1", headers={"X-Correlation-Id": f"c{number}"})
        rows = [row for row in caller.get("/v1/decisions?kind=http").json()["items"] if row["source_id"] == "k1"]
        assert sorted(row["decision"] for row in rows) == ["duplicate"] * 3 + ["new"] * 2  # claimed and sealed
        assert {row["correlation_id"] for row in rows} == {"c0", "c1", "c2", "c3"}


def test_other_bytes_of_the_same_meaning_are_a_replay_and_another_meaning_is_a_conflict(tmp_path: Path) -> None:
    with served(tmp_path) as app:
        caller = app.caller()
        first = caller.post("/v1/documents", DOCUMENT, "k1")
        turned = b'{"text": "Thirty days of leave a year.",  "doc_id": "a"}'
        json = {"Content-Type": "application/json"}
        again = caller.ask("POST", "/v1/documents", "k1", content=turned, headers=json)
        assert (again.status_code, again.content) == (201, first.content)
        other = caller.post("/v1/documents", DOCUMENT | {"text": "Another."}, "k1")
        assert other.status_code == 409
        assert other.json()["code"] == "CONFLICT.idempotency.payload_mismatch"
        assert caller.post("/v1/documents", DOCUMENT, "k1").content == first.content


def test_it_is_scoped_and_checked_as_any_other_request(tmp_path: Path) -> None:
    with served(tmp_path) as app:
        writer = app.caller(principal="loader")
        first = writer.post("/v1/documents", DOCUMENT, "k1")
        assert app.caller(role=Role.READ, principal="loader").post("/v1/documents", DOCUMENT, "k1").status_code == 403
        assert writer.client.post("/v1/documents", json=DOCUMENT).status_code == 401
        rotated = app.caller(role=Role.WRITE, principal="loader").post("/v1/documents", DOCUMENT, "k1")
        assert (rotated.content, rotated.headers["idempotency-status"]) == (first.content, "replayed")
        somebody = app.caller(principal="somebody").post("/v1/documents", DOCUMENT, "k1")
        assert somebody.headers["idempotency-status"] == "stored"
        stranger = app.caller(tenant="other").post("/v1/documents", DOCUMENT, "k1")
        assert (stranger.status_code, stranger.headers["idempotency-status"]) == (201, "stored")
        assert writer.post("/v1/documents", DOCUMENT, "k1", headers={"X-Request-Timeout": "soon"}).status_code == 400


def test_it_is_paid_for(tmp_path: Path) -> None:
    with served(tmp_path, http={"quotas": ["2/hour"]}) as app:
        caller = app.caller()
        assert [caller.post("/v1/documents", DOCUMENT, "k1").status_code for _ in range(3)] == [201, 201, 429]


def test_one_whose_first_is_still_under_way_goes_on_to_its_route(tmp_path: Path) -> None:
    """Told so while another holds the key; performed, once, by the first that finds it free."""
    with served(tmp_path) as app:
        caller = app.caller(principal="loader")
        with held(tmp_path, DOCUMENT["text"]):
            told = [caller.post("/v1/documents", DOCUMENT, "k1") for _ in range(2)]
        assert [answer.status_code for answer in told] == [202, 202]
        performed = caller.post("/v1/documents", DOCUMENT, "k1")
        assert (performed.status_code, performed.headers["idempotency-status"]) == (201, "stored")
        without_routes(app)
        assert caller.post("/v1/documents", DOCUMENT, "k1").content == performed.content


def test_one_that_won_its_key_and_lost_its_route_gives_the_key_back(tmp_path: Path) -> None:
    with served(tmp_path) as app:
        caller = app.caller(principal="loader")
        with held(tmp_path, "x"):
            assert caller.post("/v1/documents", {"doc_id": "a", "text": "x"}, "k1").status_code == 202
        routes = list(app.app.router.routes)
        without_routes(app)
        assert caller.post("/v1/documents", {"doc_id": "a", "text": "x"}, "k1").status_code == 404
        app.app.router.routes.extend(routes)
        answers = [caller.post("/v1/documents", {"doc_id": "a", "text": "x"}, "k1").status_code for _ in range(2)]
        assert answers[-1] == 201


def test_what_fails_before_the_routes_is_told_as_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path) as app:
        caller = app.caller()
        caller.post("/v1/documents", DOCUMENT, "k1")

        def broken(*_: object) -> bool:
            raise RuntimeError("a secret of another tenant")

        monkeypatch.setattr("ragfence.server.replay.RequestReader.may_know", broken)
        answer = caller.post("/v1/documents", DOCUMENT, "k1")
        assert (answer.status_code, answer.json()["code"]) == (500, "TRANSIENT.unexpected")
        assert "secret" not in answer.text
