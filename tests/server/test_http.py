"""HTTP as RFC 9110 has it: methods, conditional requests, and the headers that every response carries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from ragfence.server.app import create_app
from ragfence.server.scopes import ROUTES, Role
from tests.server.processes import Caller, Served, served


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("http")) as made:
        yield made


@pytest.fixture
def caller(api: Served, request: pytest.FixtureRequest) -> Caller:
    return api.caller(f"tenant{abs(hash(request.node.name)) % 10**8}")


def _allowed(headers: str) -> set[str]:
    return {method.strip() for method in headers.split(",")}


def _address(template: str) -> str:
    filled = template.replace("{doc_id:path}", "a/b").replace("{index_hash}", "0" * 64)
    return filled.replace("{alias}", "docs").replace("{key}", "0" * 66)


def _routes() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for method, template in ROUTES:
        found.setdefault(_address(template), set()).add(method)
    for path in ("/healthz", "/readyz", "/metrics", "/openapi.json", "/docs"):
        found[path] = {"GET"}
    return found


@pytest.mark.parametrize("path", sorted(_routes()))
def test_options_and_405_name_every_method_of_an_address(caller: Caller, path: str) -> None:
    expected = _routes()[path] | {"OPTIONS"} | ({"HEAD"} if "GET" in _routes()[path] else set())
    options = caller.ask("OPTIONS", path)
    assert (options.status_code, options.content) == (204, b"")
    # A parameter of another address may match this one, too: `x:swap` could be an alias.
    assert _allowed(options.headers["allow"]) >= expected
    refused = caller.ask("PATCH", path)
    assert refused.status_code == 405
    assert refused.json()["code"] == "VALIDATION.method"
    assert refused.headers["allow"] == options.headers["allow"]


def test_the_methods_of_a_document_are_named_together(caller: Caller) -> None:
    told = caller.ask("PATCH", "/v1/documents/a").headers["allow"]
    assert _allowed(told) == {"GET", "HEAD", "PUT", "DELETE", "OPTIONS"}
    assert _allowed(caller.ask("HEAD", "/v1/documents:batch").headers["allow"]) == {"POST", "OPTIONS"}


def test_options_tells_a_stranger_nothing(api: Served) -> None:
    for path in ("/v1/documents", "/v1/nothing"):
        answer = api.client.options(path)
        assert answer.status_code == 401
        assert "allow" not in answer.headers


def test_head_is_get_without_its_body(caller: Caller) -> None:
    caller.put("/v1/documents/a", {"text": "one"})
    for path in ("/v1/documents/a", "/v1/builds", "/v1/aliases", "/v1/keys", "/healthz", "/openapi.json"):
        full, head = caller.get(path), caller.ask("HEAD", path)
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers["content-length"] == str(len(full.content))
        assert head.headers["content-type"] == full.headers["content-type"]
    assert caller.ask("HEAD", "/v1/documents/a").headers["etag"] == caller.get("/v1/documents/a").headers["etag"]
    missing = caller.ask("HEAD", "/v1/documents/unknown")
    assert (missing.status_code, missing.content) == (404, b"")


def test_head_needs_the_scope_of_get(api: Served) -> None:
    assert api.scoped("ingest").ask("HEAD", "/v1/documents/a").status_code == 403


def test_a_document_that_has_not_changed_is_not_sent_again(caller: Caller) -> None:
    etag = caller.put("/v1/documents/a", {"text": "one"}).headers["etag"]
    for condition in (etag, f"W/{etag}", f'"1.1", {etag}', "*"):
        same = caller.get("/v1/documents/a", headers={"If-None-Match": condition})
        assert (same.status_code, same.content) == (304, b""), condition
        assert same.headers["etag"] == etag
        assert "content-length" not in same.headers
    assert caller.ask("HEAD", "/v1/documents/a", headers={"If-None-Match": etag}).status_code == 304
    for condition in ('"0.0"', "nonsense", "", "0.0", f'"0.0" {etag}'):
        assert caller.get("/v1/documents/a", headers={"If-None-Match": condition}).status_code == 200
    caller.put("/v1/documents/a", {"text": "two"})
    assert caller.get("/v1/documents/a", headers={"If-None-Match": etag}).status_code == 200
    assert caller.get("/v1/documents/unknown", headers={"If-None-Match": "*"}).status_code == 404


def test_any_version_of_a_document_will_do(caller: Caller) -> None:
    missing = caller.put("/v1/documents/a", {"text": "one"}, headers={"If-Match": "*"})
    assert missing.status_code == 412
    assert missing.json()["code"] == "DOCUMENT.moved"
    caller.put("/v1/documents/a", {"text": "one"})
    assert caller.put("/v1/documents/a", {"text": "two"}, headers={"If-Match": "*"}).status_code == 201
    assert caller.delete("/v1/documents/a", headers={"If-Match": "*"}).status_code == 200
    assert caller.put("/v1/documents/a", {"text": "three"}, headers={"If-Match": "*"}).status_code == 412


@pytest.mark.parametrize("other", ['"abc"', "W/{}", '"9.9", "a,b"', '""', '"*"', ', "\xe4" ,'])
def test_an_etag_that_does_not_match_fails_the_condition(caller: Caller, other: str) -> None:
    etag = caller.put("/v1/documents/a", {"text": "one"}).headers["etag"]
    sent: Any = {"If-Match": other.format(etag).encode("latin-1")}
    for refused in (
        caller.put("/v1/documents/a", {"text": "two"}, headers=sent),
        caller.delete("/v1/documents/a", headers=sent),
        caller.put("/v1/documents/b", {"text": "two"}, headers=sent),
    ):
        assert (refused.status_code, refused.json()["code"]) == (412, "DOCUMENT.moved")


@pytest.mark.parametrize("given", ["{}", '"9.9", {}', '{} ,,W/"1.2"', ', "a,b",{}'])
def test_one_etag_of_a_list_is_enough(caller: Caller, given: str) -> None:
    etag = caller.put("/v1/documents/a", {"text": "one"}).headers["etag"]
    assert caller.get("/v1/documents/a", headers={"If-None-Match": given.format(etag)}).status_code == 304
    put = caller.put("/v1/documents/a", {"text": "two"}, headers={"If-Match": given.format(etag)})
    assert put.status_code == 201
    assert caller.delete("/v1/documents/a", headers={"If-Match": given.format(put.headers["etag"])}).status_code == 200


@pytest.mark.parametrize("other", [{"If-Match": '"9.9"'}, {"If-Match": "*"}, {"If-None-Match": "*"}, {}])
def test_another_condition_under_a_used_key_is_a_conflict(caller: Caller, other: dict[str, str]) -> None:
    etag = caller.put("/v1/documents/a", {"text": "one"}).headers["etag"]
    sent = {"If-Match": etag}
    assert caller.put("/v1/documents/a", {"text": "two"}, key="k", headers=sent).status_code == 201
    assert (
        caller.put("/v1/documents/a", {"text": "two"}, key="k", headers=sent).headers["x-idempotency-status"] == "HIT"
    )
    conflict = caller.put("/v1/documents/a", {"text": "two"}, key="k", headers=other)
    assert conflict.status_code == 409
    assert {"if-match", *(name.lower() for name in other)} == set(conflict.json()["differs"])


def test_a_condition_of_a_delete_is_compared(caller: Caller) -> None:
    etag = caller.put("/v1/documents/a", {"text": "one"}).headers["etag"]
    assert caller.delete("/v1/documents/a", key="k", headers={"If-Match": etag}).status_code == 200
    assert caller.delete("/v1/documents/a", key="k", headers={"If-Match": etag}).status_code == 200
    assert caller.delete("/v1/documents/a", key="k").status_code == 409


def test_every_response_forbids_caching_and_sniffing(api: Served, caller: Caller) -> None:
    reader = api.caller("reader", Role.READ)
    batch = {"headers": {"Content-Type": "application/x-ndjson"}, "content": b'{"doc_id": "b", "text": "b"}\n'}
    answers = [
        *(caller.get(path) for path in ("/v1/builds", "/healthz", "/readyz", "/openapi.json", "/docs", "/v1/nothing")),
        api.client.get("/metrics"),
        api.client.get("/v1/builds"),
        reader.post("/v1/documents", {"doc_id": "a", "text": "one"}),
        caller.put("/v1/documents/a", {"text": "one"}, key="one"),
        caller.put("/v1/documents/a", {"text": "one"}, key="one"),
        caller.put("/v1/documents/a", {"text": "two"}, key="one"),
        caller.put("/v1/documents/a", {"text": "two", "nonsense": 1}),
        caller.ask("POST", "/v1/documents:batch", **batch),
        caller.ask("PATCH", "/v1/documents/a"),
        caller.ask("OPTIONS", "/v1/documents/a"),
        caller.ask("HEAD", "/v1/documents/a"),
        caller.get("/v1/documents/a", headers={"If-None-Match": "*"}),
        caller.post("/v1/documents", content=b"x" * (5 << 20), headers={"Content-Type": "application/json"}),
    ]
    assert {answer.status_code for answer in answers} >= {200, 201, 204, 304, 401, 403, 404, 405, 409, 413, 422}  # type: ignore[attr-defined]
    for answer in answers:
        assert answer.headers.get_list("cache-control") == ["no-store"], (answer.request, answer.headers)  # type: ignore[attr-defined]
        assert answer.headers.get_list("x-content-type-options") == ["nosniff"], (answer.request, answer.headers)  # type: ignore[attr-defined]


def test_the_type_of_the_metrics_is_described(api: Served) -> None:
    described = api.client.get("/openapi.json").json()["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert set(described) == {"text/plain; version=0.0.4"}


def test_metrics_have_the_type_that_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGFENCE_METRICS_TOKEN", "s3cret")
    with served(tmp_path) as api:
        page = api.client.get("/metrics", headers={"Authorization": "Bearer s3cret"})
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "# HELP" in page.text


def _put_raw(
    api: Served, raw_path: bytes, path: str, method: str = "PUT", query: bytes = b""
) -> tuple[int, dict[str, Any]]:
    """With a path that no HTTP client would send, as a server hands it over."""
    sent: list[Any] = []
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": raw_path,
        "query_string": query,
        "headers": [(b"authorization", f"Bearer {api.caller().token}".encode()), (b"idempotency-key", b"k")],
    }

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(api.app(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"] or b"{}")


@pytest.mark.parametrize("raw", [b"%ff", b"%fe", b"%c3", b"%ed%a0%80", b"%c0%af", b"%", b"%zz", b"a%2", b"%u0041"])
def test_a_path_that_is_not_utf8_is_refused(api: Served, raw: bytes) -> None:
    # As uvicorn reads it: every byte that is not UTF-8 becomes the same character.
    status, problem = _put_raw(api, b"/v1/documents/" + raw, "/v1/documents/\ufffd")
    assert (status, problem["code"]) == (400, "VALIDATION.path")
    assert _put_raw(api, b"/v1/documents/" + raw, "/v1/documents/\ufffd", "HEAD") == (400, {})


@pytest.mark.parametrize("raw", [b"%ff", b"%fe", b"%ed%a0%80", b"%", b"%zz", b"\xff"])
def test_a_query_that_is_not_utf8_is_refused(api: Served, raw: bytes) -> None:
    status, problem = _put_raw(api, b"/v1/documents/a", "/v1/documents/a", query=b"source_id=" + raw)
    assert (status, problem["code"]) == (400, "VALIDATION.path")
    assert "query" in problem["detail"]


def test_a_query_that_is_utf8_is_read(caller: Caller) -> None:
    assert caller.get("/v1/decisions?source_id=%C3%A9%25+%20a").status_code == 200


def test_a_path_that_is_utf8_is_read(caller: Caller) -> None:
    for doc_id, path in (("é", "%C3%A9"), ("100%", "100%25"), ("\ufffd", "%EF%BF%BD"), ("a b/c", "a%20b/c")):
        made = caller.put(f"/v1/documents/{path}", {"text": "one"})
        assert made.status_code == 201, made.text
        assert made.json()["doc_id"] == doc_id


@pytest.mark.parametrize(
    "header",
    [
        *("X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Forwarded", "Via"),
        *("X-Client-IP", "CF-Connecting-IP", "True-Client-IP"),
    ],
)
def test_metrics_are_not_open_through_a_proxy_on_the_same_machine(api: Served, header: str) -> None:
    local = TestClient(api.app, base_url="http://app", client=("127.0.0.1", 50000))
    assert local.get("/metrics").status_code == 200
    refused = local.get("/metrics", headers={header: "for=203.0.113.7"})
    assert (refused.status_code, refused.json()["code"]) == (401, "AUTH.missing")


@pytest.fixture(scope="module")
def without_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    place = tmp_path_factory.mktemp("without-keys")
    app = create_app(place / "fence", objects=place / "objects", insecure_dev=True)
    with TestClient(app, base_url="http://127.0.0.1:8080") as client:
        yield client


@pytest.mark.parametrize(
    "host", ["rebound.example", "rebound.example:8080", "127.0.0.1.example", "0.0.0.0:8080", "", "[x", "a@localhost"]
)
def test_without_api_keys_a_name_that_was_rebound_to_this_machine_is_refused(
    without_keys: TestClient, host: str
) -> None:
    for path in ("/v1/documents/a", "/healthz", "/docs"):
        refused = without_keys.get(path, headers={"Host": host})
        assert (refused.status_code, refused.json()["code"]) == (403, "AUTH.host")


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:8080", "127.8.8.8", "[::1]:8080"])
def test_without_api_keys_this_machine_is_served(without_keys: TestClient, host: str) -> None:
    for origin in ({}, {"Origin": f"http://{host}"}):
        assert without_keys.get("/v1/builds", headers={"Host": host} | origin).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "https://127.0.0.1:8080"])
def test_without_api_keys_another_website_is_refused(without_keys: TestClient, origin: str) -> None:
    headers = {"Origin": origin, "Idempotency-Key": origin}
    refused = without_keys.post("/v1/documents", json={"doc_id": "a", "text": "one"}, headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (403, "AUTH.origin")
    assert without_keys.get("/v1/documents/a").status_code == 404


def test_with_api_keys_any_name_will_do(caller: Caller) -> None:
    headers = {"Host": "ingest.example", "Origin": "https://console.example"}
    assert caller.get("/v1/builds", headers=headers).status_code == 200
