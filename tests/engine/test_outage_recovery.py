"""What sees to itself: the journal after an outage, `/readyz` during one, and the purge of what expired."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

import ragfence
from ragfence.cli.app import app as cli
from ragfence.server import app as api
from ragfence.server.routes import health
from tests import servers
from tests.servers.daemons import wait_until


def _ticket(fence: ragfence.Fence, done: list[str]):
    @fence.once(kind="ticket", key=lambda name: name, on_store_error="open")
    def create(name: str) -> str:
        done.append(name)
        return name

    return create


def test_the_journal_is_reconciled_by_itself_when_the_store_is_back(tmp_path: Path) -> None:
    done: list[str] = []
    with servers.valkey() as server:
        fence = ragfence.open(server.url, objects=tmp_path / "objects", journal=tmp_path / "journal")
        with fence:
            create = _ticket(fence, done)
            create("before")
            server.stop()
            assert create("during").flags.journaled
            assert fence.inspector.journal.has_entries()
            server.start()
            assert create("after").decision.value == "new"
            wait_until(lambda: not fence.inspector.journal.has_entries(), "the journal is reconciled")
            receipt = create("during")
        assert (receipt.decision.value, receipt.flags.journaled, done) == (
            "duplicate",
            False,
            ["before", "during", "after"],
        )


def test_a_command_reconciles_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done: list[str] = []
    with servers.valkey() as server:
        options = ["--store", server.url, "--objects", str(tmp_path / "objects"), "--json"]
        with ragfence.open(server.url, objects=tmp_path / "objects") as fence:
            create = _ticket(fence, done)
            create("before")
            server.stop()
            key = create("during").key
            server.start()
        told = CliRunner().invoke(cli, ["journal", "reconcile", *options])
        assert json.loads(told.stdout) == {"sealed": [key], "doubled": [], "left": []}
        assert json.loads(CliRunner().invoke(cli, ["journal", "reconcile", *options]).stdout)["sealed"] == []


def test_readyz_asks_the_fence_store_and_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with servers.valkey() as server:
        served = api.create_app(server.url, objects=tmp_path / "objects", insecure_dev=True)
        with TestClient(served, base_url="http://localhost") as client:
            assert client.get("/readyz").status_code == 200
            with server.client() as admin:
                before = admin.info("commandstats").get("cmdstat_mget", {}).get("calls", 0)
                for _ in range(20):
                    assert client.get("/readyz").status_code == 200
                assert admin.info("commandstats")["cmdstat_mget"]["calls"] - before <= 5
            server.stop()
            time.sleep(health.KEPT_S)
            refused = client.get("/readyz")
            assert (refused.status_code, refused.json()["detail"]) == (503, "the fence store does not answer")
            server.start()
            wait_until(lambda: client.get("/readyz").status_code == 200, "the server is ready again")


def test_readyz_notices_that_the_folder_of_objects_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "KEPT_S", 0.0)
    served = api.create_app(tmp_path / "fences.db", objects=tmp_path / "objects", insecure_dev=True)
    with TestClient(served, base_url="http://localhost") as client:
        assert client.get("/readyz").status_code == 200
        (tmp_path / "objects").rename(tmp_path / "elsewhere")
        refused = client.get("/readyz")
        assert (refused.status_code, refused.json()["detail"]) == (503, "the object store does not answer")
        (tmp_path / "elsewhere").rename(tmp_path / "objects")
        assert client.get("/readyz").status_code == 200


def test_a_server_purges_what_expired_without_being_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "PURGE_EVERY_S", 0.05)
    served = api.create_app(tmp_path / "fences.db", objects=tmp_path / "objects", insecure_dev=True)
    with ragfence.open(tmp_path / "fences.db", objects=tmp_path / "objects") as fence:
        fence.once(kind="ticket", key=lambda name: name)(lambda name: name)("a")
        store = fence.inspector.fences
        with store._transaction() as shelf:  # type: ignore[attr-defined]
            shelf.db.execute("UPDATE records SET expires_ms = 1")
        with TestClient(served, base_url="http://localhost") as client:
            assert client.get("/v1/stats").status_code == 200  # opens the fence of its tenant
            wait_until(lambda: fence.stats().expired == 0, "the record is purged")


def test_one_process_purges_at_a_time(tmp_path: Path) -> None:
    with ragfence.open(tmp_path / "fences.db", objects=tmp_path / "objects") as fence:
        assert fence.inspector.fences.lock("purge-expired", "another", 60_000)
        assert not fence.purge_expired_once()
        fence.inspector.fences.unlock("purge-expired", "another")
        assert fence.purge_expired_once()
        assert fence.purge_expired_once()  # the lock was given back
