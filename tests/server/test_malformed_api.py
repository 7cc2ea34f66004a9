"""A thousand malformed bodies, headers and encodings at the ingestion API: each gets a clear 4xx, nothing is stored."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import ragfence
from ragfence import Policy
from ragfence._open import open_objects_of
from ragfence.server.apikeys import ApiKeys
from ragfence.server.app import create_app
from ragfence.server.scopes import Role
from tests.server.test_malformed import JSON, KEY, bad_bodies, bad_keys

Headers = list[tuple[bytes, bytes]]
Ask = tuple[str, str, Headers, bytes]
GOOD = {"doc_id": "a", "text": "one", "metadata": {"x": [1, None]}, "source_url": "http://x/", "sequence": 3}
NDJSON = (b"content-type", b"application/x-ndjson")
WRONG: list[Any] = [None, True, 1, 1.5, [], ["a"], {}, {"a": 1}, "", "\x00", "x" * 5000, -(2**63) - 1, 2**63]


def wrong_documents() -> list[bytes]:
    """Documents of which one field is missing, of another type, or too much."""
    found: list[Any] = [{name: value for name, value in GOOD.items() if name != left} for left in ("doc_id", "text")]
    for name in GOOD:
        found += [GOOD | {name: wrong} for wrong in WRONG if not _fits(name, wrong)]
    found += [GOOD | {"more": 1}, GOOD | {"DOC_ID": "a"}, [GOOD], "a", 7, None, {}, []]
    found += [GOOD | {"text": "a\x00b"}, GOOD | {"doc_id": "a\nb"}, GOOD | {"content_type": "x" * 300}]
    found += [GOOD | {"metadata": {"k": "v" * 70_000}}, GOOD | {"doc_id": "é" * 1025}]
    return [json.dumps(each).encode() for each in found]


def _fits(name: str, value: Any) -> bool:
    match name:
        case "sequence":
            return value is None or (type(value) is int and -(2**63) <= value < 2**63)
        case "metadata":
            return isinstance(value, dict)
        case "text":
            return isinstance(value, str) and "\x00" not in value
        case "source_url":
            return isinstance(value, str) and len(value) <= 4096 and "\x00" not in value
        case _:
            return isinstance(value, str) and 0 < len(value) <= 1024 and "\x00" not in value


def asks() -> list[Ask]:
    chance = random.Random(11)
    good = json.dumps(GOOD).encode()
    found: list[Ask] = [("POST", "/v1/documents", [*headers, JSON], good) for headers in bad_keys(chance)]
    found += [("POST", "/v1/documents:batch", [*headers, NDJSON], good) for headers in bad_keys(chance)]
    bodies = [*bad_bodies(chance), *wrong_documents()]
    for method, path in (("POST", "/v1/documents"), ("PUT", "/v1/documents/a")):
        # A PUT has its doc_id in the address: a document with one is a mistake there.
        right = json.dumps({name: value for name, value in GOOD.items() if name != "doc_id"}).encode()
        found += [(method, path, [KEY, JSON], body) for body in bodies if method == "POST" or body != right]
    swap = ["{}", '{"index_hash":1}', '{"index_hash":"zz"}', '{"index_hash":"' + "0" * 64 + '","force":1}', "[]", "1"]
    found += [("POST", "/v1/aliases/docs:swap", [KEY, JSON], body.encode()) for body in swap]
    found += [("POST", "/v1/aliases/DOCS!:swap", [KEY, JSON], b'{"index_hash":"' + b"0" * 64 + b'"}')]
    found += [("POST", "/v1/aliases/docs:rollback", [KEY, JSON], body) for body in (b"[]", b'{"to":"x"}', b'{"x":1}')]
    builds = (b'{"metric":"x"}', b'{"embedder":1}', b'{"parameters":[]}', b"[1]", b'{"backend":"http://x"}', b"{")
    found += [("POST", "/v1/builds", [KEY, JSON], body) for body in builds]
    found += [("POST", "/v1/admin/purge", [KEY, JSON], body) for body in (b"{}", b'{"doc_id":""}', b'{"doc_id":1}')]
    found += [("POST", "/v1/admin/purge-expired", [KEY, JSON], b'{"limit":0}')]
    found += [("POST", "/v1/admin/keys/nonsense:release", [KEY, JSON], b"{}")]
    types = (b"", b"text/plain", b"application/xml", b"multipart/form-data", b"application/jsonx", b"\xff", b"json")
    found += [("POST", "/v1/documents", [KEY, (b"content-type", value)], good) for value in types]
    coded = [(b"content-encoding", value) for value in (b"gzip", b"br", b"identity, gzip", b"\xff")]
    found += [("POST", "/v1/documents", [KEY, JSON, each], good) for each in coded]
    found += [("POST", "/v1/documents:batch", [KEY, JSON], good), ("POST", "/v1/documents:batch", [NDJSON], good)]
    found += [("POST", "/v1/documents:batch", [KEY, NDJSON, coded[0]], good)]
    matches = (b"x", b'"', b"1.1", b'"a" "b"', b'w/"1.1"', b'W/ "1.1"', b'"a b"', b'"1.1", *', b"*, *", b",", b"\xff")
    found += [("PUT", "/v1/documents/a", [KEY, JSON, (b"if-match", value)], b'{"text":"x"}') for value in matches]
    found += [("PUT", "/v1/documents/a", [KEY, JSON, (b"if-none-match", b'"1.1"')], b'{"text":"x"}')]
    found += [("DELETE", "/v1/documents/a", [KEY, JSON], b"{}"), ("DELETE", "/v1/documents/%00", [KEY], b"")]
    found += [("DELETE", "/v1/documents/a?sequence=x", [KEY], b"")]
    times = (b"", b"-1", b"0", b"\xff", b"soon", b"1e3", b"NaN")
    found += [("POST", "/v1/documents", [KEY, JSON, (b"x-request-timeout", value)], good) for value in times]
    queries = ("limit=0", "limit=x", "cursor=%ff", "since=soon", "decision=maybe", "until=%00", "cursor=" + "a" * 300)
    found += [("GET", f"/v1/decisions?{query}", [], b"") for query in queries]
    found += [("GET", "/v1/search?alias=docs", [], b""), ("GET", "/v1/search?alias=docs&q=x&k=0", [], b"")]
    found += [("PATCH", "/v1/documents/a", [KEY, JSON], b"{}"), ("POST", "/v1/nothing", [KEY, JSON], b"{}")]
    found += [("POST", "/v1/documents", [KEY, JSON], b'{"doc_id":"a","text":"' + b"x" * (5 << 20) + b'"}')]
    return found


def test_a_malformed_request_gets_a_clear_4xx_and_stores_nothing(tmp_path: Path) -> None:
    app = create_app(tmp_path / "fence", objects=tmp_path / "objects", policy=Policy())
    shared = open_objects_of(tmp_path / "fence", tmp_path / "objects")
    assert shared is not None
    token = ApiKeys(shared).create("acme", Role.ADMIN).token

    async def ask(method: str, address: str, headers: Headers, body: bytes) -> tuple[int, bytes]:
        sent: list[Any] = []
        pieces = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return pieces.pop() if pieces else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        path, _, query = address.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path.replace("%00", "\x00"),
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": query.encode(),
            "headers": [*headers, (b"authorization", f"Bearer {token}".encode())],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        await app(scope, receive, send)
        return sent[0]["status"], sent[1]["body"]

    async def all_of_them() -> None:
        async with app.router.lifespan_context(app):
            for method, address, headers, body in asks():
                status, told = await ask(method, address, headers, body)
                problem = json.loads(told)
                assert 400 <= status < 500, (method, address, headers, body[:200], problem)
                assert problem["status"] == status
                assert problem["code"].startswith(("VALIDATION", "DOCUMENT.")), problem
                assert problem["detail"], problem
                assert problem["hint"], problem

    asyncio.run(all_of_them())
    shared.close()
    assert len(asks()) >= 1000
    policy = Policy(content_hash="sha256")
    with ragfence.open(tmp_path / "fence", objects=tmp_path / "objects", tenant="acme", policy=policy) as fence:
        assert fence.audit.decisions().column("kind").to_pylist() == ["apikey"]
        assert list(fence.documents.heads()) == []
        assert list(fence.aliases.names()) == []
        assert fence.inspector.fences.stats().records == {}
