"""No tenant can read, replay, conflict with, or learn of another's keys: what B is told is what it would be told if
there were no A. Asked of every route there is; one that nobody has listed here fails."""

from __future__ import annotations

import difflib
import json
import pprint
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from tests.server.processes import Caller, Served, served

SHARED = "the-same-key-for-everybody"
DOCUMENT = {"doc_id": "a", "text": "what a tenant has", "metadata": {"whose": "somebody's"}}
VOLATILE = frozenset(
    """
    ts row_id fence winner owner first_seen sealed_at expires_at updated updated_ms etag at waited_ms run_id
    next_cursor score error_code api_key
    """.split()  # noqa: SIM905
)
HEADERS = ("idempotency-status", "x-idempotency-status", "content-type", "location", "allow")


class Known:
    """What A has, by which B asks."""

    key = "00" * 33
    http_key = "00" * 33
    index_hash = "0" * 64


def writes(caller: Caller, key: str) -> dict[str, Any]:
    """Everything that a tenant can have."""
    made = caller.post("/v1/documents", DOCUMENT, key=key)
    assert made.status_code == 201, made.text
    built = caller.post("/v1/builds", {}, key=key)
    assert built.status_code == 201, built.text
    index_hash = built.json()["index_hash"]
    assert caller.post("/v1/aliases/docs:swap", {"index_hash": index_hash}, key=key).status_code == 200
    batch = caller.ask(
        "POST", "/v1/documents:batch", key, content=b'{"doc_id":"b","text":"in a batch"}\n', headers=NDJSON
    )
    assert batch.status_code == 200, batch.text
    keys = caller.get("/v1/keys").json()["items"]
    return {"key": made.json()["key"], "index_hash": index_hash, "http_key": keys[0]["key"]}


NDJSON = {"Content-Type": "application/x-ndjson"}

ASKS: dict[tuple[str, str], Any] = {
    ("POST", "/v1/documents"): lambda b, a: b.post("/v1/documents", DOCUMENT | {"text": "B's own"}, key=SHARED),
    ("PUT", "/v1/documents/{doc_id:path}"): lambda b, a: b.put("/v1/documents/a", {"text": "by B"}, key=SHARED),
    ("DELETE", "/v1/documents/{doc_id:path}"): lambda b, a: b.delete("/v1/documents/b", key=SHARED),
    ("GET", "/v1/documents/{doc_id:path}"): lambda b, a: b.get("/v1/documents/a?snippets=true"),
    ("POST", "/v1/documents:batch"): lambda b, a: b.ask(
        "POST", "/v1/documents:batch", SHARED, content=b'{"doc_id":"b","text":"B\'s batch"}\n', headers=NDJSON
    ),
    ("POST", "/v1/builds"): lambda b, a: b.post("/v1/builds", {"metric": "dot"}, key=SHARED),
    ("GET", "/v1/builds"): lambda b, a: b.get("/v1/builds"),
    ("GET", "/v1/builds/{index_hash}"): lambda b, a: b.get(f"/v1/builds/{a['index_hash']}"),
    ("POST", "/v1/aliases/{alias}:swap"): lambda b, a: b.post(
        "/v1/aliases/docs:swap", {"index_hash": a["index_hash"]}, key=SHARED
    ),
    ("POST", "/v1/aliases/{alias}:rollback"): lambda b, a: b.post("/v1/aliases/docs:rollback", {}, key=SHARED),
    ("GET", "/v1/aliases"): lambda b, a: b.get("/v1/aliases"),
    ("GET", "/v1/aliases/{alias}"): lambda b, a: b.get("/v1/aliases/docs"),
    ("GET", "/v1/aliases/{alias}/history"): lambda b, a: b.get("/v1/aliases/docs/history"),
    ("GET", "/v1/search"): lambda b, a: b.get("/v1/search?alias=docs&q=what+a+tenant+has"),
    ("GET", "/v1/idempotency"): lambda b, a: b.get(
        "/v1/idempotency", params={"key": SHARED, "method": "POST", "route": "/v1/documents"}
    ),
    ("GET", "/v1/receipts/{key}"): lambda b, a: [
        b.get(f"/v1/receipts/{a['key']}"),
        b.get(f"/v1/receipts/{a['http_key']}"),
    ],
    # Not those of the API keys, whose ids are random.
    ("GET", "/v1/decisions"): lambda b, a: [
        b.get("/v1/decisions", params={"kind": kind}) for kind in ("document", "http", "index", "vectors", "alias")
    ],
    ("GET", "/v1/keys"): lambda b, a: b.get("/v1/keys"),
    ("GET", "/v1/stats"): lambda b, a: b.get("/v1/stats"),
    ("POST", "/v1/admin/keys/{key}:release"): lambda b, a: b.post(
        f"/v1/admin/keys/{a['http_key']}:release", key=SHARED
    ),
    ("POST", "/v1/admin/purge-expired"): lambda b, a: b.post("/v1/admin/purge-expired", key=SHARED),
    ("POST", "/v1/admin/purge"): lambda b, a: b.post("/v1/admin/purge", {"doc_id": "a"}, key=SHARED),
    ("GET", "/healthz"): lambda b, a: b.get("/healthz"),
    ("GET", "/readyz"): lambda b, a: b.get("/readyz"),
    ("GET", "/metrics"): None,  # for whoever runs the server, by a rule of its own
}


def routes_of(routes: Any) -> Iterator[tuple[str, str]]:
    for route in routes:
        branches = getattr(route, "effective_candidates", None)
        if callable(branches):
            yield from routes_of(branches())
            continue
        inner = getattr(route, "starlette_route", None) or route
        if isinstance(inner, APIRoute) or hasattr(inner, "methods"):
            for method in sorted(inner.methods - {"HEAD"}):
                yield method, inner.path


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Caller, Caller, dict[str, Any], Served, Caller]]:
    """B beside A, and B alone; and what A has."""
    with (
        served(tmp_path_factory.mktemp("both")) as both,
        served(tmp_path_factory.mktemp("alone")) as alone,
    ):
        a = both.caller("a-tenant", principal="loader")
        known = writes(a, SHARED)
        yield both.caller("b", principal="loader"), alone.caller("b", principal="loader"), known, both, a


def told(answer: Any) -> Any:
    if isinstance(answer, list):
        return [told(each) for each in answer]
    body = [json.loads(line) for line in answer.text.splitlines() if line]
    return answer.status_code, {name: answer.headers.get(name) for name in HEADERS}, steady(body)


def difference(one: Any, other: Any) -> list[str]:
    lines = [pprint.pformat(each, width=120).splitlines() for each in (one, other)]
    return list(difflib.unified_diff(*lines, n=0, lineterm=""))


def steady(value: Any) -> Any:
    if isinstance(value, dict):
        if value.get("kind") == "vectors":  # of a segment, whose name is random
            return {"kind": "vectors"}
        if value.get("kind") == "apikey":  # of a key, whose id is random
            return {"kind": "apikey", "decision": value["decision"]}
        kept = {name: steady(each) for name, each in value.items() if name not in VOLATILE}
        if value.get("revision") == "purged":  # keys of tombstones are random: nothing can be guessed from them
            kept |= {"idempotency_key": "", "effect_id": ""}
        return kept | ({"effect_id": ""} if value.get("kind") == "index" else {})  # a name with a token in it
    if isinstance(value, list):
        # Keys of segments are in the order of random names.
        return sorted((steady(each) for each in value), key=lambda each: str(each) if isinstance(each, dict) else "")
    return value


def test_every_route_is_asked_about(tmp_path: Path) -> None:
    with served(tmp_path) as api:
        there = {
            (method, path)
            for method, path in routes_of(api.app.routes)
            if path not in ("/openapi.json", "/docs", "/docs/oauth2-redirect")
        }
    assert there == set(ASKS)


def test_b_is_told_what_it_would_be_told_without_a(worlds: Any) -> None:
    beside, alone, known, _, a = worlds
    # Reads first, while B has nothing; then everything twice, so that replays are compared, too.
    order = sorted(ASKS, key=lambda each: each[0] != "GET")
    for method, path in (*order, *order):
        ask = ASKS[method, path]
        if ask is None:
            continue
        with_a, without_a = told(ask(beside, known)), told(ask(alone, known))
        assert with_a == without_a, "\n".join([method, path, *difference(with_a, without_a)])
        assert "what a tenant has" not in str(with_a)
    # And A has what it had: its key is replayed, its document stands.
    again = a.post("/v1/documents", DOCUMENT, key=SHARED)
    assert again.headers["idempotency-status"] == "replayed"
    assert a.get("/v1/documents/a").status_code == 200
    assert a.get("/v1/aliases/docs").json()["index_hash"] == known["index_hash"]


def test_two_principals_of_one_tenant_have_keys_of_their_own(worlds: Any) -> None:
    *_, api, _ = worlds
    other = api.caller("a-tenant", principal="another")
    answer = other.post("/v1/documents", {"doc_id": "z", "text": "another request"}, key=SHARED)
    assert answer.status_code == 201
    assert answer.headers["idempotency-status"] == "stored"
