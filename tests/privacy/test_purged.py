"""After a purge nothing that is stored tells what the text was: neither the text nor anything that is made from it."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import redis

import ragfence
from ragfence import Document, Policy
from ragfence.audit.drain import DRAIN_POINTS
from ragfence.audit.tombstones import TOMBSTONE_POINTS
from ragfence.documents.claims import Recipes
from ragfence.documents.identity import Identity
from ragfence.documents.rewrite import REWRITING_POINTS
from tests import servers
from tests.privacy.test_planted_secrets import _files, _server
from tests.server.processes import Served, served

TEXT = "Her salary is 71250 a year, and nobody may guess it."
OTHER = "Her salary is 80000 a year, from May on."
REFUSED = {name: f"Her salary was {name}." for name in ("stale", "in conflict", "moved on")}
"""each in a request of its own that was answered with 409 or 412"""
POLICY: dict[str, Any] = {"content_hash": "sha256", "on_conflict": {"include_diff": True}}


def derived(doc_id: str, text: str, fence: ragfence.Fence) -> dict[str, bytes]:
    """Whatever somebody who guesses the text could compute, and look for."""
    identity = Identity(fence.tenant, "sha256")
    recipe = Recipes(None, fence.policy.documents).of("")
    content = identity.content(text.encode())
    place = identity.place(doc_id.encode())
    key = identity.key(place.shard, doc_id.encode(), content.hash, recipe.key_tail)
    return {
        "text": text.encode(),
        "sha256": sha256(text.encode()).digest(),
        "fingerprint": identity.fingerprint(content),
        "key": key[1:],
    }


def spellings(found: dict[str, bytes], ids: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    for name, raw in found.items():
        yield name, raw
        if name != "text":
            yield f"{name} in hex", raw.hex().encode()
            yield f"{name} in hex, its beginning", raw.hex()[:24].encode()
            yield f"{name} in base64", base64.b64encode(raw).rstrip(b"=")
    for each in ids:
        yield "snippet id", bytes.fromhex(each)
        yield "snippet id in hex", each.encode()


@contextlib.contextmanager
def world(kind: str, request: pytest.FixtureRequest) -> Iterator[tuple[Path, Any, Callable[[], bytes]]]:
    with TemporaryDirectory() as folder:
        place = Path(folder)
        if kind == "embedded":
            yield place, place / "fence", lambda: _files(place)
            return
        server: servers.RedisServer = request.getfixturevalue("valkey_server")
        client = redis.Redis.from_url(server.url)
        client.flushall()
        try:
            yield place, server.url, lambda: _files(place) + _server(client)
        finally:
            client.close()


@pytest.mark.parametrize("kind", ["embedded", "valkey"])
@pytest.mark.parametrize(("drained", "derived_guard"), [(False, False), (True, False), (False, True)])
def test_nothing_stored_tells_what_a_purged_document_said(
    kind: str, drained: bool, derived_guard: bool, request: pytest.FixtureRequest
) -> None:
    with world(kind, request) as (place, store, stored):
        policy = Policy.from_mapping(POLICY)
        with ragfence.open(store, objects=place / "objects", tenant="acme", policy=policy) as fence:
            documents, ids = fence.documents.using() if derived_guard else fence.documents, set()
            documents.ingest(Document("b", "Another document, which stays."))
            for text in (TEXT, OTHER, TEXT):
                ids |= set(documents.ingest(Document("a", text)).snippet_ids)
                documents.ingest(Document("a", text))
            documents.ingest_many([Document("a", TEXT), Document("a", OTHER)])
            if drained:
                fence.audit.drain()
            hidden = list(spellings(derived("a", TEXT, fence), tuple(ids)))
            hidden += spellings(derived("a", OTHER, fence), ())
            assert [name for name, data in hidden if data in stored()]  # they were there
            before = fence.audit.decisions(source_id="a")
            assert documents.purge("a").known
            after = fence.audit.decisions(source_id="a")
            assert fence.audit.check().ok, fence.audit.check().findings
            # Every row still stands there, with when it was and what was decided.
            kept = {(row["row_id"], row["ts"], row["decision"], row["phase"]) for row in after.to_pylist()}
            assert kept >= {(row["row_id"], row["ts"], row["decision"], row["phase"]) for row in before.to_pylist()}
            fence.documents.verify()
            assert documents.ingest(Document("b", "Another document, which stays.")).decision == "duplicate"
        held = stored()
        assert sorted({name for name, data in hidden if data in held}) == []


@pytest.mark.parametrize("kind", ["embedded", "valkey"])
def test_nothing_that_was_kept_of_http_requests_tells_it_either(kind: str, request: pytest.FixtureRequest) -> None:
    with world(kind, request) as (place, store, stored):  # noqa: SIM117  # it takes all three names
        with served(place, store, **POLICY) as api:
            _requests(api)
            with ragfence.open(store, objects=place / "objects", tenant="acme", policy=Policy(**POLICY)) as fence:
                document = api.caller().get("/v1/documents/a", params={"snippets": True}).json()
                ids = tuple(each["snippet_id"] for each in document["snippets"])
                hidden = list(spellings(derived("a", TEXT, fence), ids))
            body = TEXT.encode()
            hidden += [("digest of the text", f"sha256:{sha256(body).hexdigest()}".encode())]
            for name, text in REFUSED.items():
                hidden += [(f"digest of what was {name}", f"sha256:{sha256(text.encode()).hexdigest()}".encode())]
            assert {name for name, _ in hidden if name.startswith("digest")} <= {
                name for name, data in hidden if data in stored()
            }
            assert [name for name, data in hidden if data in stored()]
            admin = api.caller(principal="p")
            assert admin.post("/v1/admin/purge", {"doc_id": "a"}).json()["found"] is True
            held = stored()
            assert sorted({name for name, data in hidden if data in held}) == []
            # A retry of what was purged brings nothing back.
            again = admin.post("/v1/documents", {"doc_id": "a", "text": TEXT}, key="one")
            assert (again.status_code, again.json()["retryable"]) == (409, False)
            assert admin.get("/v1/documents/a").status_code == 404
            assert admin.post("/v1/documents", {"doc_id": "b", "text": "stays"}, key="b").status_code == 201


def _requests(api: Served) -> None:
    caller = api.caller(principal="p")
    assert caller.post("/v1/documents", {"doc_id": "b", "text": "stays"}, key="b").status_code == 201
    for _ in range(2):
        assert caller.post("/v1/documents", {"doc_id": "a", "text": TEXT}, key="one").status_code == 201
    assert caller.put("/v1/documents/a", {"text": TEXT}, key="two").status_code == 200
    assert caller.put("/v1/documents/a", {"text": OTHER}, key="two").status_code == 409
    assert caller.put("/v1/documents/a", {"text": TEXT, "sequence": 5}, key="ordered").status_code == 200
    for name, text in REFUSED.items():
        more = {"stale": {"sequence": 1}, "in conflict": {"sequence": 5}}.get(name, {})
        headers = {"If-Match": '"9.9"'} if name == "moved on" else {}
        refused = caller.put("/v1/documents/a", {"text": text, **more}, key=f"{name}-1", headers=headers)
        assert refused.status_code == (412 if headers else 409)
    line = json.dumps({"doc_id": "a", "text": TEXT}) + "\n"
    headers = {"Content-Type": "application/x-ndjson"}
    assert caller.ask("POST", "/v1/documents:batch", "batch", content=line, headers=headers).status_code == 200


@pytest.mark.parametrize("point", [*TOMBSTONE_POINTS, *DRAIN_POINTS[:3], *REWRITING_POINTS])
def test_a_purge_that_was_killed_anywhere_is_completed_by_the_next(point: str, tmp_path: Path) -> None:
    policy = Policy.from_mapping(POLICY)
    with served(tmp_path, tmp_path / "fence", **POLICY) as api:
        _requests(api)
    with ragfence.open(tmp_path / "fence", objects=tmp_path / "objects", tenant="acme", policy=policy) as fence:
        hidden = list(spellings(derived("a", TEXT, fence), fence.documents.ingest(Document("a", TEXT)).snippet_ids))
    words = [sys.executable, "-W", "error", "-c", KILLED, str(tmp_path), point]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with closing(sqlite3.connect(tmp_path / "fence" / "fences.db")) as db, db:
        db.execute("DELETE FROM locks")  # what it held runs out after a minute
    with ragfence.open(tmp_path / "fence", objects=tmp_path / "objects", tenant="acme", policy=policy) as fence:
        fence.documents.purge("a")
        assert fence.documents.get("a") is None
        fence.audit.drain()
        assert fence.audit.check().ok, fence.audit.check().findings
        decisions = fence.audit.decisions(source_id="a").column("revision").to_pylist()
        assert "purged" in decisions
    held = _files(tmp_path)
    assert sorted({name for name, data in hidden if data in held}) == []
    assert not list((tmp_path / "objects").rglob("purges/*"))


def test_rows_of_one_key_stay_rows_of_one_key_by_the_same_secret_after_a_kill(tmp_path: Path) -> None:
    """Some rows were rewritten before the kill, the others after it: the auditor must see one life."""
    policy = Policy.from_mapping(POLICY)
    with ragfence.open(tmp_path / "fence", objects=tmp_path / "objects", tenant="acme", policy=policy) as fence:
        for _ in range(3):  # an object of the ledger each
            fence.documents.ingest(Document("a", TEXT))
            fence.audit.drain()
    words = [sys.executable, "-W", "error", "-c", KILLED, str(tmp_path), "tombstones_written"]
    assert subprocess.run(words, capture_output=True, timeout=120, check=False).returncode == -signal.SIGKILL
    with closing(sqlite3.connect(tmp_path / "fence" / "fences.db")) as db, db:
        db.execute("DELETE FROM locks")
    with ragfence.open(tmp_path / "fence", objects=tmp_path / "objects", tenant="acme", policy=policy) as fence:
        fence.documents.purge("a")
        rows = [row for row in fence.audit.decisions(source_id="a").to_pylist() if row["revision"] == "purged"]
        assert len(rows) >= 5
        assert len({row["idempotency_key"] for row in rows}) == 1
        assert fence.audit.check().ok


KILLED = """
import sys
import ragfence
from ragfence import Policy
from ragfence.testing.crash_points import kill_at

place, point = sys.argv[1:]
policy = Policy.from_mapping({"content_hash": "sha256", "on_conflict": {"include_diff": True}})
with ragfence.open(f"{place}/fence", objects=f"{place}/objects", tenant="acme", policy=policy) as fence, kill_at(point):
    fence.documents.purge("a")
"""
