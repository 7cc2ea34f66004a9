"""The ingestion API: documents, indexes and looks, as a loader uses them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from ragfence.core.canonical import canonical_json
from ragfence.server.routes import documents
from ragfence.server.scopes import Role
from tests.chaos.crew import until
from tests.server.processes import Caller, Served, served

LEAVE = {"doc_id": "handbook/leave", "text": "# Leave\n\nThirty days a year.", "metadata": {"team": "people"}}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("api")) as made:
        yield made


@pytest.fixture
def tenant(request: pytest.FixtureRequest) -> str:
    """One of its own for every test."""
    return str(request.node.name)[:100]


@pytest.fixture
def caller(api: Served, tenant: str) -> Caller:
    return api.caller(tenant)


def test_a_document_is_ingested_once_whatever_the_key(caller: Caller) -> None:
    first = caller.post("/v1/documents", LEAVE)
    assert first.status_code == 201, first.text
    assert first.json()["decision"] == "new"
    assert first.headers["idempotency-status"] == "stored"
    again = caller.post("/v1/documents", LEAVE)
    assert again.status_code == 200
    assert again.json()["decision"] == "duplicate"
    assert again.json()["snippet_ids"] == first.json()["snippet_ids"] != []


def test_a_retry_gets_the_same_bytes(caller: Caller) -> None:
    first = caller.post("/v1/documents", LEAVE, key="k1")
    again = caller.post("/v1/documents", LEAVE, key="k1")
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert again.headers["idempotency-status"] == "replayed"
    assert (first.headers["x-idempotency-status"], again.headers["x-idempotency-status"]) == ("MISS", "HIT")
    assert again.headers["etag"] == first.headers["etag"]


def test_another_document_under_a_used_key_is_a_conflict_that_tells_where_but_not_what(caller: Caller) -> None:
    caller.post("/v1/documents", LEAVE, key="k1")
    answer = caller.post("/v1/documents", LEAVE | {"text": "Forty days."}, key="k1")
    assert answer.status_code == 409
    told = answer.json()
    assert told["code"] == "CONFLICT.idempotency.payload_mismatch"
    assert [each["path"] for each in told["diff"]] == ["/text"]
    assert "Forty" not in answer.text
    assert answer.headers["x-idempotency-status"] == "CONFLICT"


def test_no_digest_of_a_secret_is_kept_with_a_key(tmp_path: Path) -> None:
    """Whoever reads the stores could try every PIN, and every card, until the digest is the same."""
    secrets = {"login": {"password": "1234"}, "paid_with": "4111 1111 1111 1111", "patient": {"name": "Ann"}}
    sent = {"doc_id": "a", "text": "t", "metadata": secrets, "source_url": "https://bob:hunter2@example.org/"}
    digests = [sha256(canonical_json(value)).hexdigest() for value in secrets.values()]
    digests.append(sha256(b"https://bob:hunter2@example.org/").hexdigest())
    with served(tmp_path, redaction={"fields": ["patient.name"]}) as api:
        caller = api.caller()
        assert caller.post("/v1/documents", sent, key="k").status_code == 201
        other = caller.post("/v1/documents", sent | {"metadata": secrets | {"login": {"password": "1235"}}}, key="k")
        moved = caller.post("/v1/documents", sent | {"source_url": "https://example.com/"}, key="k")
        stored = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert (other.status_code, other.json()["diff"]) == (409, [])  # another request, that is all that is told
    assert [each["path"] for each in moved.json()["diff"]] == ["/source_url"]
    assert [digest for digest in digests if digest.encode() in stored] == []


@pytest.mark.parametrize("field", ["body", "metadata", "source_url", "body.metadata"])
def test_a_rule_may_name_what_documents_are_made_of(tmp_path: Path, field: str) -> None:
    with served(tmp_path, redaction={"fields": [field]}) as api:
        caller = api.caller()
        assert caller.post("/v1/documents", LEAVE, key="k").status_code == 201
        assert caller.post("/v1/documents", LEAVE | {"doc_id": "b"}, key="k").status_code == 409


def test_a_write_without_a_key_is_told_how_to_make_one(caller: Caller) -> None:
    answer = caller.client.post("/v1/documents", json=LEAVE, headers={"Authorization": f"Bearer {caller.token}"})
    assert answer.status_code == 400
    assert answer.json()["code"] == "VALIDATION.idempotency.key_missing"
    assert "UUID" in answer.json()["hint"]


def test_a_document_is_read_back_with_its_etag_and_its_snippets(caller: Caller) -> None:
    made = caller.post("/v1/documents", LEAVE)
    found = caller.get("/v1/documents/handbook/leave", params={"snippets": "true"})
    assert found.status_code == 200, found.text
    assert found.headers["etag"] == made.headers["etag"] == f'"{found.json()["etag"]}"'
    assert found.json()["metadata"] == {"team": "people"}
    assert [each["snippet_id"] for each in found.json()["snippets"]] == made.json()["snippet_ids"]
    assert caller.get("/v1/documents/unknown").status_code == 404


def test_a_put_replaces_only_what_its_sender_has_read(caller: Caller) -> None:
    etag = caller.put("/v1/documents/a", {"text": "one"}, headers={"If-None-Match": "*"}).headers["etag"]
    assert caller.put("/v1/documents/a", {"text": "two"}, headers={"If-Match": etag}).status_code == 201
    late = caller.put("/v1/documents/a", {"text": "three"}, headers={"If-Match": etag})
    assert late.status_code == 412
    assert late.json()["code"] == "DOCUMENT.moved"
    assert caller.put("/v1/documents/a", {"text": "four"}, headers={"If-None-Match": "*"}).status_code == 412
    assert caller.put("/v1/documents/a", {"text": "five"}, headers={"If-Match": "nonsense"}).status_code == 400


def test_a_412_is_not_kept(caller: Caller) -> None:
    condition = {"If-None-Match": "*"}
    caller.put("/v1/documents/a", {"text": "one"})
    assert caller.put("/v1/documents/a", {"text": "two"}, key="k", headers=condition).status_code == 412
    caller.delete("/v1/documents/a")
    assert caller.put("/v1/documents/a", {"text": "two"}, key="k", headers=condition).status_code == 201


def test_a_retracted_document_is_gone_and_comes_back_with_its_snippet_ids(caller: Caller) -> None:
    first = caller.post("/v1/documents", LEAVE)
    assert caller.delete("/v1/documents/handbook/leave").status_code == 200
    assert caller.get("/v1/documents/handbook/leave").status_code == 404
    back = caller.post("/v1/documents", LEAVE)
    assert back.json()["flags"]["revived"] is True
    assert back.json()["snippet_ids"] == first.json()["snippet_ids"]


def test_an_older_sequence_is_refused(caller: Caller) -> None:
    assert caller.put("/v1/documents/a", {"text": "new", "sequence": 5}).status_code == 201
    stale = caller.put("/v1/documents/a", {"text": "old", "sequence": 4})
    assert (stale.status_code, stale.json()["code"]) == (409, "CONFLICT.sequence.stale")


@pytest.mark.parametrize("released", [False, True], ids=["", "released"])
@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_a_write_that_was_cut_off_is_not_made_again_after_another_one(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, method: str, released: bool
) -> None:
    def cut_off(*_: object) -> None:
        raise ConnectionError("the answer was lost")

    body = {"json": {"text": "one"}} if method == "PUT" else {}
    caller.put("/v1/documents/a", {"text": "before"})
    with monkeypatch.context() as patched:
        patched.setattr(documents, "receipt_out" if method == "DELETE" else "receipt_answer", cut_off)
        assert caller.ask(method, "/v1/documents/a", "k", **body).status_code == 500
    caller.put("/v1/documents/a", {"text": "two"})
    if released:  # its attempts start again at 1
        (stuck,) = caller.get("/v1/keys", params={"kind": "http", "state": "released"}).json()["items"]
        assert caller.post(f"/v1/admin/keys/{stuck['key']}:release", {}).json()["released"] is True
    again = caller.ask(method, "/v1/documents/a", "k", **body)
    assert (again.status_code, again.json()["flags"]["healed"]) == (200, True)
    read = caller.get("/v1/documents/a", params={"snippets": True})
    assert [each["text"] for each in read.json()["snippets"]] == ["two"]


def test_a_mistake_in_a_body_is_told_with_its_place_and_uses_up_no_key(caller: Caller) -> None:
    wrong = caller.post("/v1/documents", {"doc_id": "a", "texxt": "one"}, key="k")
    assert wrong.status_code == 422
    assert {each["at"] for each in wrong.json()["errors"]} == {"/text", "/texxt"}
    assert caller.post("/v1/documents", {"doc_id": "a", "text": "one"}, key="k").status_code == 201


def test_a_key_without_the_role_is_refused(api: Served, tenant: str) -> None:
    reader, writer = api.caller(tenant, Role.READ), api.caller(tenant, Role.WRITE)
    assert reader.post("/v1/documents", LEAVE).status_code == 403
    assert writer.post("/v1/documents", LEAVE).status_code == 201
    assert reader.get("/v1/documents/handbook/leave").status_code == 200
    assert writer.post("/v1/admin/purge-expired").status_code == 403
    assert api.caller(tenant).post("/v1/admin/purge-expired").status_code == 200


@pytest.mark.parametrize("path", ["/v1/documents/a", "/v1/nothing", "/anything", "/v1/admin/x"])
def test_nobody_passes_without_a_key(api: Served, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer rf_nonsense"}, {"Authorization": "Basic eDp5"}):
        answer = api.client.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")


def test_a_build_is_made_once_and_searched_through_its_alias(caller: Caller) -> None:
    for number in range(3):
        caller.post("/v1/documents", {"doc_id": f"d{number}", "text": f"leases expire after {number} seconds"})
    built = caller.post("/v1/builds", {})
    assert built.status_code == 201, built.text
    index_hash = built.json()["index_hash"]
    assert caller.post("/v1/builds").json()["index_hash"] == index_hash
    swapped = caller.post("/v1/aliases/docs:swap", {"index_hash": index_hash, "expect": None})
    assert swapped.status_code == 200, swapped.text
    assert caller.post("/v1/aliases/docs:swap", {"index_hash": index_hash, "expect": None}).status_code == 412
    hits = caller.get("/v1/search", params={"alias": "docs", "q": "when do leases expire?", "k": 2}).json()["hits"]
    assert len(hits) == 2
    assert {hit["index_hash"] for hit in hits} == {index_hash}
    assert caller.get("/v1/aliases/docs").json()["index_hash"] == index_hash
    assert [each["change"] for each in caller.get("/v1/aliases/docs/history").json()["items"]] == ["swap"]
    assert [each["aliases"] for each in caller.get("/v1/builds").json()["items"]] == [["docs"]]
    assert caller.get(f"/v1/builds/{index_hash}").json()["rows"] == 3
    assert caller.post("/v1/aliases/docs:swap", {"index_hash": "0" * 64}).json()["code"] == "INDEX.not_sealed"
    assert caller.get("/v1/search", params={"alias": "none", "q": "x"}).status_code == 404
    assert caller.post("/v1/aliases/docs:rollback").status_code in (404, 409, 422)


def test_a_build_goes_nowhere_that_the_policy_does_not_name(caller: Caller) -> None:
    for wrong in ({"backend": "http://169.254.169.254/"}, {"embedder": "openai+http://x#y"}):
        answer = caller.post("/v1/builds", wrong)
        assert (answer.status_code, answer.json()["code"]) == (422, "VALIDATION.body")


def test_a_receipt_is_found_by_its_key(caller: Caller) -> None:
    made = caller.post("/v1/documents", LEAVE).json()
    found = caller.get(f"/v1/receipts/{made['key']}")
    assert found.status_code == 200, found.text
    assert found.json()["snippet_ids"] == made["snippet_ids"]
    assert found.json()["source_id"] == "handbook/leave"
    assert caller.get("/v1/receipts/" + "00" * 33).status_code in (400, 404)


def test_decisions_and_keys_come_in_pages_that_miss_nothing(caller: Caller) -> None:
    for number in range(7):
        caller.post("/v1/documents", {"doc_id": f"d{number}", "text": "the same"}, key=f"page-{number}")
    for path, name, whole in (("/v1/decisions", "row_id", None), ("/v1/keys", "key", 7)):
        seen, cursor = [], ""
        while True:
            page = caller.get(path, params={"limit": 3, "cursor": cursor}).json()
            assert len(page["items"]) <= 3
            seen += [each[name] for each in page["items"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert len(seen) == len(set(seen))
        everything = caller.get(path, params={"limit": 1000}).json()["items"]
        assert seen == [each[name] for each in everything]
        assert whole is None or len(seen) == whole


@pytest.mark.parametrize("path", ["/v1/decisions", "/v1/keys"])
@pytest.mark.parametrize("text", [None, "0 zz", "0 ", " 00", "0 ٣٤", "0 0f 1"])
def test_a_cursor_that_nobody_gave_is_refused(caller: Caller, path: str, text: str | None) -> None:
    cursor = "!!" if text is None else base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
    answer = caller.get(path, params={"cursor": cursor})
    assert (answer.status_code, answer.json()["code"]) == (422, "VALIDATION.parameter")


def test_stats_tell_the_hit_rate_and_the_duplicates_of_each_endpoint(caller: Caller) -> None:
    caller.post("/v1/documents", LEAVE, key="k1")
    caller.post("/v1/documents", LEAVE, key="k1")
    told = caller.get("/v1/stats").json()
    route = next(each for each in told["endpoints"] if each["route"] == "POST /v1/documents")
    assert route["duplicate"] == 1
    assert 0 < told["hit_rate"] < 1


def test_a_document_is_purged_for_good(api: Served, caller: Caller) -> None:
    secret = "a sentence that nobody may ever read again"
    caller.post("/v1/documents", {"doc_id": "a", "text": secret, "metadata": {"who": "a name to be forgotten"}})
    assert caller.post("/v1/admin/purge", {"doc_id": "a"}).json()["found"] is True
    assert caller.get("/v1/documents/a").status_code == 404
    for file in api.place.rglob("*"):
        if file.is_file():
            held = file.read_bytes()
            assert secret.encode() not in held
            assert b"a name to be forgotten" not in held


def test_decisions_are_drained_into_the_ledger_while_it_serves(tmp_path: Path) -> None:
    with served(tmp_path, audit={"drain_every_s": 0.05}) as api:
        caller = api.caller()
        caller.post("/v1/documents", LEAVE, key="k1")
        until(lambda: list((tmp_path / "objects").rglob("ledger/**/*.parquet")), "rows are in the ledger")
        caller.post("/v1/documents", LEAVE, key="k1")
        told = caller.get("/v1/decisions", params={"kind": "http"}).json()["items"]
        assert [each["decision"] for each in told] == ["new", "new", "duplicate"]  # claimed, sealed, replayed


def test_the_service_tells_that_it_is_alive_and_ready(api: Served) -> None:
    assert api.client.get("/healthz").json() == {"status": "alive"}
    assert api.client.get("/readyz").json() == {"status": "ready"}
    assert api.client.get("/openapi.json").json()["info"]["title"] == "ragfence"


def test_an_unhandled_500_carries_the_idempotency_headers(
    api: Served, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("ragfence.indexes.aliases.Aliases.rollback", fail)
    refused = caller.post("/v1/aliases/docs:rollback", {}, key="k")
    assert refused.status_code == 500
    assert refused.headers["x-idempotency-key"] == "k"
    assert refused.headers["x-idempotency-status"] == "MISS"
    assert "secret" not in refused.text
