"""What each call sends, and what it makes of the answer."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest

from ragfence import Document, IndexSpec, errors
from ragfence.client import ApiError, ApiForbidden, ApiRefused, ApiUnauthorized, AsyncClient, Client
from ragfence.client.errors import error_in, in_python
from ragfence.client.steps import Reply
from ragfence.indexes.embedders.embedder import FunctionEmbedder
from ragfence.server.scopes import KeyScope, missing_scope
from ragfence.wire.problems import ERRORS, REFUSALS, problem_of, refusal
from tests.client.conftest import Asks, Opening
from tests.client.scripted import RECEIPT, Said, Scripted, problem, said

HASH = "ab" * 32
KEY = "2a" + "cd" * 32
ALIAS = {"alias": "docs", "index_hash": HASH, "generation": 4, "previous": None, "changed": True}
BUILD = {"index_hash": HASH, "decision": "duplicate", "state": "sealed", "rows": 7, "at": "2026-01-01T00:00:00Z"}
STORED = {
    "doc_id": "a",
    "key": KEY,
    "content_hash": "sha256:00",
    "size": 9,
    "metadata": {"team": "people"},
    "source_url": "",
    "content_type": "text/plain",
    "sequence": None,
    "recipe": "markdown",
    "snippet_ids": ["sn_1"],
    "updated": "2026-01-01T00:00:00Z",
    "etag": "1.7",
}
SNIPPET = {
    "snippet_id": "sn_1",
    "doc_id": "a",
    "text": "some text",
    "start": 0,
    "end": 9,
    "section_id": "",
    "ordinal": 0,
    "tokens": 2,
    "source_url": "",
}
HIT = SNIPPET | {"metadata": {}, "score": 0.5, "index_hash": HASH, "generation": 4}


def test_a_document_is_sent_as_canonical_json(client: Asks, server: Scripted) -> None:
    client.ingest(Document("a", "Cafe\u0301\r\n", {"b": 1.0, "a": [True]}, "https://x/y", 3, "text/markdown"))
    client.ingest(Document("a", "plain"))
    full, plain = server.asked
    assert (full.method, full.path) == ("POST", "/v1/documents")
    assert full.headers["content-type"] == "application/json"
    assert full.headers["authorization"] == "Bearer rf_secret"
    assert full.body.decode() == (
        '{"content_type":"text/markdown","doc_id":"a","metadata":{"a":[true],"b":1},'
        '"sequence":3,"source_url":"https://x/y","text":"Café\\n"}'
    )
    assert plain.body == b'{"doc_id":"a","text":"plain"}'


@pytest.mark.parametrize(
    "document",
    [
        Document("", "x"),
        Document("a", "x\0"),
        Document("a", "\ud800"),
        Document("a", "x", {"when": object()}),
        Document("a", "x", sequence=2**60),
        "no document",
    ],
)
def test_what_is_no_document_is_not_sent(client: Asks, server: Scripted, document: Any) -> None:
    with pytest.raises(errors.DocumentInvalid):
        client.ingest(document)
    assert not server.asked


@pytest.mark.parametrize("doc_id", ["a", "a/b c", "../x", "..", ".", "a?b#c", "50%", "ü/ß", "/lead", "x//y", "a:batch"])
def test_a_doc_id_survives_its_address(client: Asks, server: Scripted, doc_id: str) -> None:
    client.put(Document(doc_id, "x"), if_match="1.7")
    client.retract(doc_id, sequence=3, if_match='"1.7"')
    put, delete = server.asked
    assert put.method == "PUT"
    assert unquote(put.path) == f"/v1/documents/{doc_id}"
    assert put.body == b'{"text":"x"}'
    assert put.headers["if-match"] == delete.headers["if-match"] == '"1.7"'
    address, _, query = delete.path.partition("?")
    assert (delete.method, unquote(address), query, delete.body) == (
        "DELETE",
        f"/v1/documents/{doc_id}",
        "sequence=3",
        b"",
    )


def test_only_if_there_is_no_such_document_yet(client: Asks, server: Scripted) -> None:
    client.put(Document("a", "x"), if_absent=True)
    assert server.asked[0].headers["if-none-match"] == "*"
    with pytest.raises(errors.ValidationError):
        client.put(Document("a", "x"), if_absent=True, if_match="1.7")


def test_a_document_that_is_not_there_is_none(client: Asks, server: Scripted) -> None:
    server.script(problem("VALIDATION.not_found"))
    assert client.get("a") is None
    assert client.snippets("a") == []


def test_a_document_is_read(client: Asks, server: Scripted) -> None:
    server.script(said(STORED | {"a field of tomorrow": 1}), said(STORED | {"snippets": [SNIPPET | {"new": 1}]}))
    found = client.get("a")
    assert (found.etag, found.metadata, found.snippet_ids) == ("1.7", {"team": "people"}, ["sn_1"])
    (snippet,) = client.snippets("a")
    assert (snippet.text, snippet.start, snippet.end) == ("some text", 0, 9)
    assert [asked.path for asked in server.asked] == ["/v1/documents/a", "/v1/documents/a?snippets=true"]
    assert all("idempotency-key" not in asked.headers for asked in server.asked)


def test_indexes_are_built_named_and_searched(client: Asks, server: Scripted) -> None:
    server.script(
        said(BUILD),
        said(BUILD),
        said({"items": [BUILD]}),
        said(ALIAS),
        said(ALIAS),
        said(ALIAS),
        said(ALIAS),
        said({"items": [ALIAS]}),
        said({"items": [{"change": "swap"}]}),
        said({"alias": "docs", "hits": [HIT]}),
    )
    assert client.build().index_hash == HASH
    assert client.build(IndexSpec(metric="dot", index="hnsw", parameters={"m": 8})).rows == 7
    assert client.builds()[0]["rows"] == 7
    assert client.swap("docs", HASH).generation == 4
    assert client.swap("docs", HASH, expect=None, force=True, reason="why").changed
    assert client.rollback("docs", to=HASH, expect=HASH).index_hash == HASH
    assert client.resolve("docs").index_hash == HASH
    assert client.aliases() == [ALIAS]
    assert client.history("docs", limit=3) == [{"change": "swap"}]
    (hit,) = client.search("docs", "how many days & nights?", k=3)
    assert (hit.doc_id, hit.score, hit.index_hash) == ("a", 0.5, HASH)
    sent = [(asked.method, asked.path, asked.body) for asked in server.asked]
    spec = b'{"backend":"lance","embedder":"wordllama","index":"hnsw","metric":"dot","parameters":{"m":8}}'
    assert sent[:2] == [("POST", "/v1/builds", b"{}"), ("POST", "/v1/builds", spec)]
    assert sent[3] == ("POST", "/v1/aliases/docs:swap", f'{{"index_hash":"{HASH}"}}'.encode())
    assert sent[4][2] == f'{{"expect":null,"force":true,"index_hash":"{HASH}","reason":"why"}}'.encode()
    assert sent[5][1:] == ("/v1/aliases/docs:rollback", f'{{"expect":"{HASH}","to":"{HASH}"}}'.encode())
    assert [path for _, path, _ in sent[6:9]] == ["/v1/aliases/docs", "/v1/aliases", "/v1/aliases/docs/history?limit=3"]
    assert dict(parse_qsl(urlsplit(sent[9][1]).query)) == {"alias": "docs", "q": "how many days & nights?", "k": "3"}


def test_an_embedder_that_the_server_cannot_have_is_refused(client: Asks) -> None:
    own = FunctionEmbedder(lambda texts: [[1.0] for _ in texts], name="own", revision="1", dimension=1)
    with pytest.raises(errors.Unsupported):
        client.build(IndexSpec(embedder=own))


def test_pages_are_followed_to_the_last(client: Asks, server: Scripted) -> None:
    server.script(
        said({"items": [{"n": 1}, {"n": 2}], "next_cursor": "c2"}),
        said({"items": [{"n": 3}], "next_cursor": None}),
        said({"items": [{"key": KEY}], "next_cursor": None}),
    )
    assert [row["n"] for row in client.decisions(since="24h", decision="new", page=2)] == [1, 2, 3]
    assert client.keys(state="held") == [{"key": KEY}]
    queries = [dict(parse_qsl(urlsplit(asked.path).query)) for asked in server.asked]
    assert queries == [
        {"since": "24h", "decision": "new", "limit": "2"},
        {"since": "24h", "decision": "new", "limit": "2", "cursor": "c2"},
        {"state": "held", "limit": "100"},
    ]


def test_what_administrators_do(client: Asks, server: Scripted) -> None:
    server.script(
        said({"key": KEY, "released": True}),
        said({"doc_id": "a", "found": True, "report": {}}),
        said({"records": 3, "commits": 2, "after": "x"}),
        said({"records": 0, "commits": 0, "after": ""}),
    )
    assert client.release(KEY) is True
    assert client.purge("a").found
    assert client.purge_expired(10).after == "x"
    assert client.purge_expired(10, after="x").after == ""
    assert [(asked.path, asked.body) for asked in server.asked] == [
        (f"/v1/admin/keys/{KEY}:release", b"{}"),
        ("/v1/admin/purge", b'{"doc_id":"a"}'),
        ("/v1/admin/purge-expired", b'{"limit":10}'),
        ("/v1/admin/purge-expired", b'{"after":"x","limit":10}'),
    ]
    assert len({asked.key for asked in server.asked}) == 4


@pytest.mark.parametrize("body", [b"", b"[]", b"<html>", b'{"key":1}', b'{"decision":"unheard of"}'])
def test_an_answer_that_is_none_of_ragfence_says_so(client: Asks, server: Scripted, body: bytes) -> None:
    server.script(Said(200, body))
    with pytest.raises(ApiRefused, match="address of a ragfence server"):
        client.ingest(Document("a", "x"))
    with pytest.raises(ApiRefused):
        client.resolve("docs")
    with pytest.raises(ApiRefused):
        client.aliases()
    with pytest.raises(ApiRefused):
        client.decisions()


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_of_the_library_comes_out_as_itself(kind: type[errors.RagfenceError]) -> None:
    made = problem(kind("what happened", hint="what to do", key="k"))
    error = error_in(Reply(made.status, made.headers, made.body))
    assert type(error) is kind
    assert (error.message, error.hint, error.key) == ("what happened", "what to do", "k")


@pytest.mark.parametrize("code", REFUSALS)
def test_every_error_that_only_http_knows_has_its_code(code: str) -> None:
    made = problem(code)
    error = error_in(Reply(made.status, made.headers, made.body))
    assert isinstance(error, ApiError)
    assert (error.code, error.retryable, error.status) == (code, REFUSALS[code].retryable, made.status)
    assert isinstance(error, errors.TransientError if error.retryable else errors.TerminalError)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes
    assert (again.code, again.status, again.retryable, str(again)) == (code, made.status, error.retryable, str(error))


def test_a_code_of_tomorrow_is_still_an_error(client: Asks, server: Scripted) -> None:
    server.script(said({"code": "MOON.full", "detail": "come back", "hint": "wait", "retryable": True}, 409))
    with pytest.raises(ApiError, match="come back") as unknown:
        client.stats()
    assert (unknown.value.code, unknown.value.hint, unknown.value.retryable) == ("MOON.full", "wait", True)  # type: ignore[attr-defined]
    assert len(server.asked) == 1


def test_a_conflict_shows_what_differs(client: Asks, server: Scripted) -> None:
    diff = [{"op": "replace", "path": "/text", "value": "b"}]
    server.script(problem(errors.Conflict("other payload", diff=diff)))
    with pytest.raises(errors.Conflict) as conflict:
        client.ingest(Document("a", "x"))
    assert conflict.value.diff == diff


@pytest.mark.parametrize("code", ["AUTH.missing", "AUTH.invalid", "AUTH.expired", "AUTH.revoked"])
def test_a_key_that_lets_nobody_in_is_an_error_of_its_own(client: Asks, server: Scripted, code: str) -> None:
    server.script(said(refusal(code).body(), 401))
    with pytest.raises(ApiUnauthorized) as refused:
        client.stats()
    assert (refused.value.code, refused.value.status, len(server.asked)) == (code, 401, 1)


def test_a_missing_scope_is_named(client: Asks, server: Scripted) -> None:
    problem_ = missing_scope(frozenset({KeyScope.SEARCH}), frozenset({KeyScope.SWAP, KeyScope.AUDIT}))
    assert problem_ is not None
    server.script(said(problem_.body(), 403))
    with pytest.raises(ApiForbidden, match="needs the scope swap or audit; the API key has search") as refused:
        client.stats()
    assert refused.value.needed_scopes == ["swap", "audit"]
    assert (refused.value.code, refused.value.scopes) == ("AUTH.forbidden", ["search"])


def test_hints_are_calls_of_this_client_not_requests() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RagfenceError)
    ]
    hints = [problem_of(kind("what happened")).hint for kind in kinds] + [row.hint for row in REFUSALS.values()]
    assert any("/v1/" in hint for hint in hints)
    for hint in hints:
        spoken = in_python(hint)
        assert not any(word in spoken for word in ("/v1/", "Idempotency-Key", "Authorization", "POST ", "GET ")), spoken


def test_a_closed_client_says_so(client: Asks, server: Scripted) -> None:
    client.ingest(Document("a", "x"))
    client.close()
    with pytest.raises(errors.ValidationError, match="client was closed"):
        client.ingest(Document("a", "x"))


def test_no_message_shows_the_api_key(client: Asks, server: Scripted) -> None:
    secret = "rf_secret"
    server.script(
        said({"code": "AUTH.invalid", "detail": f"unknown key {secret}", "hint": f"not {secret}"}, 401),
        Said(401, f"your header was Bearer {secret}".encode()),
    )
    for _ in range(2):
        with pytest.raises(ApiRefused) as refused:
            client.stats()
        assert secret not in str(refused.value)
        assert secret not in repr(refused.value)
        assert "***" in str(refused.value)
    assert secret not in repr(client.client)
    assert secret not in repr(client.client._core)
    assert secret not in repr(client.client._http.headers)


def test_url_and_key_come_from_the_environment(
    opened: Opening, server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGFENCE_URL", server.url + "/v1/")
    monkeypatch.setenv("RAGFENCE_API_KEY", "rf_env\n")
    opened().ingest(Document("a", "x"))
    opened(api_key="").ingest(Document("a", "x"))
    first, second = server.asked
    assert (first.path, first.headers["authorization"]) == ("/v1/documents", "Bearer rf_env")
    assert "authorization" not in second.headers


def test_a_server_may_live_below_a_prefix(opened: Opening, server: Scripted) -> None:
    opened(server.url + "/ingest/").ingest(Document("a", "x"))
    assert server.asked[0].path == "/ingest/v1/documents"


@pytest.mark.parametrize(
    "url", ["", "ftp://x", "x", "http://", "http://u:p@host", "http://h?q", "http://h:0", "http://[x"]
)
def test_an_address_that_is_none_is_refused(opened: Opening, url: str) -> None:
    with pytest.raises(errors.ValidationError):
        opened(url)


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"api_key": "a b"}, {"api_key": "ü"}, {"run": ""}])
def test_settings_that_cannot_be_are_refused(opened: Opening, options: dict[str, Any]) -> None:
    with pytest.raises(errors.ValidationError):
        opened("http://localhost:1", **options)


def test_both_clients_have_the_same_methods_with_the_same_arguments() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        named = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(call).parameters) for name, call in named if not name.startswith("_")}

    assert methods(Client) == methods(AsyncClient)
    assert all(getattr(Client, name).__doc__ for name in methods(Client) if name not in ("builds", "aliases", "close"))


def test_httpx_is_loaded_when_a_client_is_made_and_missed_with_a_way_out() -> None:
    code = (
        "import sys, ragfence, ragfence.client\n"
        "from ragfence.client import Client, AsyncClient\n"
        "assert not {'httpx', 'fastapi', 'starlette', 'pyarrow', 'lancedb'} & set(sys.modules), sys.modules.keys()\n"
        "sys.modules['httpx'] = None\n"
        "try:\n"
        "    Client('http://localhost:1')\n"
        "except ragfence.errors.Unsupported as missing:\n"
        "    assert missing.hint == \"pip install 'ragfence[client]'\", missing.hint\n"
        "else:\n"
        "    raise AssertionError('no error')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_receipt_is_a_receipt_of_the_library(client: Asks) -> None:
    receipt = client.ingest(Document("a", "x"))
    assert receipt.key == RECEIPT["key"]
    assert receipt.is_new
    assert not receipt.failed
    assert receipt == receipt._replace(fence="9.9")


@pytest.mark.parametrize("url", ["http://ingest.example", "http://10.0.0.7:8080", "http://localhost.example"])
def test_an_api_key_is_not_sent_over_plain_http_to_other_hosts(
    opened: Opening, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    with pytest.raises(errors.InsecureUrl, match="over plain HTTP") as refused:
        opened(url, "rf_secret")
    assert "allow_http" in refused.value.hint
    assert "rf_secret" not in str(refused.value)
    opened(url, "")
    opened(url.replace("http:", "https:"), "rf_secret")
    opened(url, "rf_secret", allow_http=True)
    monkeypatch.setenv("RAGFENCE_ALLOW_HTTP", "1")
    opened(url, "rf_secret")
    with pytest.raises(errors.InsecureUrl):
        opened(url, "rf_secret", allow_http=False)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"])
def test_an_api_key_may_be_sent_over_plain_http_on_this_machine(opened: Opening, url: str) -> None:
    opened(url, "rf_secret")
