"""Every route needs a scope, says which in one place, and lets nobody in who lacks it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragfence.server.scopes import ROUTES, KeyScope, Role, check_listed, scopes_for
from tests.server.processes import Caller, Served, served

NEEDED = {
    "POST /v1/documents": "ingest",
    "POST /v1/documents:batch": "ingest",
    "PUT /v1/documents/{doc_id}": "ingest",
    "DELETE /v1/documents/{doc_id}": "retract",
    "GET /v1/documents/{doc_id}": "search",
    "POST /v1/builds": "build",
    "GET /v1/builds": "build swap search",
    "GET /v1/builds/{index_hash}": "build swap search",
    "POST /v1/aliases/{alias}:swap": "swap",
    "POST /v1/aliases/{alias}:rollback": "swap",
    "GET /v1/aliases": "build swap search",
    "GET /v1/aliases/{alias}": "build swap search",
    "GET /v1/aliases/{alias}/history": "swap audit",
    "GET /v1/search": "search",
    "GET /v1/idempotency": "ingest retract build swap search audit admin",
    "GET /v1/receipts/{key}": "audit",
    "GET /v1/decisions": "audit",
    "GET /v1/keys": "audit",
    "GET /v1/stats": "audit",
    "POST /v1/admin/keys/{key}:release": "admin",
    "POST /v1/admin/purge-expired": "admin",
    "POST /v1/admin/purge": "admin",
}
"""written out once more: a change of what a route needs has to be meant"""
OPEN = {"/healthz", "/readyz", "/metrics"}
FILLED = {"{doc_id}": "a/b", "{index_hash}": "0" * 64, "{alias}": "docs", "{key}": "00" * 33}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("scopes")) as made:
        yield made


@pytest.fixture(scope="module")
def operations(api: Served) -> dict[str, Any]:
    told = api.client.get("/openapi.json").json()
    return {
        f"{method.upper()} {path}": operation
        for path, methods in told["paths"].items()
        for method, operation in methods.items()
    }


@pytest.fixture(scope="module")
def callers(api: Served) -> dict[str, Caller]:
    return {scope.value: api.scoped(scope.value) for scope in KeyScope}


def test_every_route_is_listed_with_what_it_needs_and_openapi_says_so(operations: dict[str, Any]) -> None:
    assert {name for name in operations if name.split()[1] not in OPEN} == set(NEEDED)
    listed = {f"{method} {path.replace(':path', '')}": scopes for (method, path), scopes in ROUTES.items()}
    assert {name: " ".join(scope for scope in KeyScope if scope in listed[name]) for name in listed} == NEEDED
    for name, needed in NEEDED.items():
        wanted = [{"apiKey": [scope]} for scope in needed.split()] if len(needed.split()) < 7 else [{"apiKey": []}]
        assert operations[name]["security"] == wanted, name


@pytest.mark.parametrize("operation", list(NEEDED))
def test_a_route_lets_in_who_has_a_scope_it_needs_and_nobody_else(callers: dict[str, Caller], operation: str) -> None:
    method, path = operation.split()
    needed = NEEDED[operation].split()
    for part, value in FILLED.items():
        path = path.replace(part, value)
    for scope, caller in callers.items():
        answer = caller.ask(method, path, content=b"{")  # too little to do anything
        if scope in needed:
            assert answer.status_code not in (401, 403), (scope, answer.text)
            continue
        told = answer.json()
        assert (answer.status_code, told["code"]) == (403, "AUTH.forbidden"), (scope, answer.text)
        assert (told["needed_scopes"], told["scopes"]) == (needed, [scope])
        assert all(each in told["detail"] for each in needed)


@pytest.mark.parametrize("role", list(Role))
def test_a_role_may_do_what_its_scopes_may(api: Served, role: Role) -> None:
    caller = api.caller(role=role)
    for operation, needed in NEEDED.items():
        method, path = operation.split()
        for part, value in FILLED.items():
            path = path.replace(part, value)
        allowed = bool(role.scopes & set(needed.split()))
        assert (caller.ask(method, path, content=b"{").status_code != 403) == allowed, operation


def test_a_route_that_nobody_listed_is_not_served() -> None:
    with pytest.raises(RuntimeError, match="the scope it requires"):
        check_listed("POST", "/v1/everything")
    assert scopes_for("GET", "/v1/everything") is None
    assert scopes_for("PATCH", "/v1/documents") == frozenset(KeyScope)  # the router says 405
    assert scopes_for("HEAD", "/v1/search") == {KeyScope.SEARCH}  # type: ignore[comparison-overlap]
    assert scopes_for("GET", "/v1/documents/a\nb/c") == {KeyScope.SEARCH}  # type: ignore[comparison-overlap]


def test_an_address_or_a_method_that_is_not_there_is_told_to_who_has_a_key(callers: dict[str, Caller]) -> None:
    assert callers["ingest"].get("/v1/nothing").json()["code"] == "VALIDATION.not_found"
    wrong = callers["search"].ask("PATCH", "/v1/documents")
    assert (wrong.status_code, wrong.json()["code"]) == (405, "VALIDATION.method")


def test_only_an_admin_forces_an_alias_past_a_failed_gate(tmp_path: Path) -> None:
    with served(tmp_path, indexes={"min_coverage": 1.0}) as api:
        admin, swapper = api.caller(), api.caller(role=Role.WRITE)
        admin.post("/v1/documents", {"doc_id": "a", "text": "leases expire"})
        index_hash = admin.post("/v1/builds").json()["index_hash"]
        admin.post("/v1/documents", {"doc_id": "b", "text": "not in the build"})
        body = {"index_hash": index_hash, "reason": "now"}
        assert swapper.post("/v1/aliases/docs:swap", body).json()["code"] == "ALIAS.gate_failed"
        forced = swapper.post("/v1/aliases/docs:swap", body | {"force": True}, key="k")
        assert (forced.status_code, forced.json()["needed_scopes"]) == (403, ["admin"])
        assert api.scoped("admin").post("/v1/aliases/docs:swap", body | {"force": True}).status_code == 403
        assert admin.get("/v1/aliases/docs").status_code == 404
        passed = admin.post("/v1/aliases/docs:swap", body | {"force": True})
        assert (passed.status_code, passed.json()["forced"]) == (200, True)


def test_the_status_of_a_request_needs_the_scope_of_that_request(api: Served) -> None:
    sender, reader = api.scoped("ingest", principal="p"), api.scoped("search", principal="p")
    assert sender.post("/v1/documents", {"doc_id": "s", "text": "one"}, key="status").status_code == 201
    asked = {"key": "status", "method": "POST", "route": "/v1/documents"}
    assert sender.get("/v1/idempotency", params=asked).status_code == 201
    assert reader.get("/v1/idempotency", params=asked).json()["needed_scopes"] == ["ingest"]


def test_a_key_that_has_ended_is_told_why(api: Served) -> None:
    ended, revoked = api.keys.create("acme", ttl_s=0.001), api.keys.create("acme")
    api.keys.revoke("acme", revoked.key_id)
    for made, code in ((ended, "AUTH.expired"), (revoked, "AUTH.revoked")):
        answer = Caller(api.client, made.token).get("/v1/stats")
        assert (answer.status_code, answer.json()["code"]) == (401, code)
        assert answer.headers["www-authenticate"].startswith("Bearer")
