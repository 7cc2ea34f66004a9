"""Whose key it was: in decision rows, in metrics, in the list of keys; and keys themselves have rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

import ragfence
from ragfence import Policy
from ragfence.server.apikeys import ApiKeys, parse_token
from ragfence.server.key_log import PERIOD_S, LastUse
from ragfence.stores.local import LocalObjects
from ragfence.testing.memory import FaultyObjects, MemoryObjects
from tests.server.processes import Caller, served

DOCUMENT = {"doc_id": "a", "text": "Thirty days of leave a year."}


def rows_of(place: Path, **wanted: str) -> list[dict[str, Any]]:
    with ragfence.open(place / "fence", objects=place / "objects", tenant="acme", policy=policy()) as fence:
        found: list[dict[str, Any]] = fence.audit.decisions(since="1h", **wanted).to_pylist()  # type: ignore[arg-type]
        return found


def policy() -> Policy:
    return Policy.from_mapping({"content_hash": "sha256"})


def test_rows_tell_the_key_of_each_call_also_when_documents_are_grouped_retried_and_rotated(tmp_path: Path) -> None:
    with served(tmp_path) as api:
        made = [api.keys.create("acme", "admin", principal="loader") for _ in range(2)]
        old, new = (Caller(api.client, each.token) for each in made)
        assert old.post("/v1/documents", DOCUMENT, key="k").status_code == 201
        for _ in range(2):  # the second is known by its bytes
            assert new.post("/v1/documents", DOCUMENT, key="k").status_code == 201
        assert old.post("/v1/documents", DOCUMENT, key="k").status_code == 201
        assert new.delete("/v1/documents/a").status_code == 200
        lines = "\n".join(json.dumps({"doc_id": f"b{number}", "text": "one"}) for number in range(3))
        headers = {"Content-Type": "application/x-ndjson"}
        assert old.ask("POST", "/v1/documents:batch", content=lines, headers=headers).status_code == 200
    first, second = (each.key_id for each in made)
    told = [(row["kind"], row["decision"], row["source_id"], row["api_key"]) for row in rows_of(tmp_path)]
    by_key: dict[str | None, set[tuple[str, str, str]]] = {}
    for kind, decision, source_id, api_key in told:
        by_key.setdefault(api_key, set()).add((kind, decision, source_id))
    assert ("document", "new", "a") in by_key[first]
    assert ("document", "new", "a") in by_key[second]  # the retraction
    assert {("document", "new", f"b{number}") for number in range(3)} <= by_key[first]
    assert ("http", "new", "k") in by_key[first]
    replays = [row for row in told if row[:3] == ("http", "duplicate", "k")]
    assert sorted(row[3] for row in replays) == sorted([first, second, second])
    assert {kind for kind, _, _ in by_key[None]} == {"apikey"}


def test_the_rows_of_a_build_tell_the_key_those_of_its_vectors_too(tmp_path: Path) -> None:
    with served(tmp_path) as api:
        made = api.keys.create("acme", "admin", principal="loader")
        caller = Caller(api.client, made.token)
        for number in range(3):
            caller.post("/v1/documents", {"doc_id": f"a{number}", "text": f"leases expire after {number} seconds"})
        assert caller.post("/v1/builds", {}).status_code == 201
    for kind in ("vectors", "index"):
        rows = rows_of(tmp_path, kind=kind)
        assert rows, kind
        assert {row["api_key"] for row in rows} == {made.key_id}, kind


def test_two_callers_of_one_group_are_told_apart(tmp_path: Path) -> None:
    import asyncio

    from ragfence.core.document import Document
    from ragfence.engine.requests import acting_key
    from ragfence.server.group_commit import GroupCommit

    with ragfence.open(tmp_path / "fence", objects=tmp_path / "objects", tenant="acme", policy=policy()) as fence:

        async def send(grouping: GroupCommit, name: str) -> None:
            acting_key.set(f"key-of-{name}")
            await grouping.ingest(Document(name, "the same text"))

        async def all_of() -> None:
            grouping = GroupCommit(fence.documents)
            await asyncio.gather(*(send(grouping, name) for name in "abcd"))

        asyncio.run(all_of())
    told = {(row["source_id"], row["api_key"]) for row in rows_of(tmp_path, kind="document")}
    assert told == {(name, f"key-of-{name}") for name in "abcd"}


def test_requests_are_counted_by_key(tmp_path: Path) -> None:
    with served(tmp_path) as api:
        made = api.keys.create("counted", "read")
        for _ in range(3):
            assert Caller(api.client, made.token).get("/v1/aliases").status_code == 200
    labels = {"tenant": "counted", "api_key": made.key_id}
    assert REGISTRY.get_sample_value("ragfence_api_key_requests_total", labels) == 3


def test_creating_and_revoking_a_key_are_rows_without_secrets_and_the_audit_is_clean(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path / "objects")
    keys = ApiKeys(objects)
    made = keys.create("acme", by="ada@host")
    assert keys.revoke("acme", made.key_id, by="bob@host")
    assert not keys.revoke("acme", made.key_id, by="eve@host")  # the row is the first one's
    rows = sorted(rows_of(tmp_path, kind="apikey"), key=lambda row: row["action"])
    assert [(row["action"], row["owner"], row["source_id"]) for row in rows] == [
        ("create", "ada@host", made.key_id),
        ("revoke", "bob@host", made.key_id),
    ]
    parts = parse_token(made.token)
    assert parts is not None
    (stored,) = keys.list("acme")
    for name in (entry.name for entry in objects.list("acme/ledger/")):
        data = objects.get(name) or b""
        for secret in (parts.secret, made.token.encode(), stored.digest, stored.digest.hex().encode()):
            assert secret not in data
    with ragfence.open(tmp_path / "fence", objects=tmp_path / "objects", tenant="acme", policy=policy()) as fence:
        fence.documents.ingest(ragfence.Document("a", "x"))
        fence.audit.drain()
        assert fence.audit.check().ok


def test_a_revocation_that_was_cut_off_before_its_row_gets_it_the_next_time() -> None:
    objects = FaultyObjects(MemoryObjects())
    keys = ApiKeys(objects)
    made = keys.create("acme")
    before = len(list(objects.list("acme/ledger/")))
    objects.inner.put_new(f"acme/apikeys/{made.key_id}/revoked", b'{"version":1,"revoked_ms":1700000000000}')
    assert not keys.revoke("acme", made.key_id)
    names = [entry.name for entry in objects.list("acme/ledger/")]
    assert len(names) == before + 1
    assert any("date=2023-11-14/" in name for name in names)  # when it was revoked


def test_the_last_use_is_written_once_per_period_and_the_list_shows_it(tmp_path: Path) -> None:
    with served(tmp_path) as api:
        used, unused = api.keys.create("acme"), api.keys.create("acme")
        for _ in range(5):
            assert Caller(api.client, used.token).get("/v1/aliases").status_code == 200
    objects = LocalObjects(tmp_path / "objects")
    names = [entry.name for entry in objects.list(f"acme/apikeys/{used.key_id}/used/")]
    assert len(names) == 1
    listed = {key.key_id: key for key in ApiKeys(objects).list("acme")}
    assert listed[unused.key_id].used_ms is None
    used_ms = listed[used.key_id].used_ms
    assert used_ms is not None
    assert 0 <= used_ms - listed[used.key_id].created_ms <= 60_000  # never before there was the key
    assert ApiKeys(objects).check(used.token) is not None


def test_a_later_use_replaces_the_earlier_and_a_store_that_is_away_hurts_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [1_000_000_000.0]
    objects = FaultyObjects(MemoryObjects())
    first, second = (LastUse(objects, clock=lambda: now[0]) for _ in range(2))
    for server in (first, second):
        assert server.is_due("acme", "a" * 16)
        assert not server.is_due("acme", "a" * 16)
        server.write("acme", "a" * 16)
    assert len(list(objects.list("acme/"))) == 1
    now[0] += PERIOD_S
    assert first.is_due("acme", "a" * 16)
    first.write("acme", "a" * 16)
    (entry,) = objects.list("acme/")
    assert int(entry.name.rpartition("/")[2]) == int(now[0]) // PERIOD_S
    objects.on("put_new").fail_before(times=10)
    now[0] += PERIOD_S
    first.write("acme", "a" * 16)
    assert "could not be written" in caplog.text
    assert not first.is_due("acme", "")  # nobody's key


def test_memory_for_uses_is_bounded() -> None:
    use = LastUse(MemoryObjects(), max_keys=10)
    assert all(use.is_due("acme", f"{number:016d}") for number in range(100))
    assert len(use._written) == 10
