"""One tenant with `content_hash: hmac`, met by command line, Dagster, server and client: all of them agree."""

from __future__ import annotations

import json
from pathlib import Path

import dagster as dg
import pytest

import ragfence
from ragfence import Document
from ragfence.client import Client
from ragfence.core.settings import CONTENT_SECRET
from ragfence.dagster import FenceResource, build_alias_asset, build_index_asset, build_ingest_asset
from ragfence.errors import ContentSecretError
from tests.cli.conftest import run
from tests.client.real_server import real_server
from tests.indexes.building import CountingEmbedder, spec_in

SECRET = "0123456789abcdef" * 4
TEXT = "Leases expire on the clock of the store."


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ragfence.yml").write_text("content_hash: hmac\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text(TEXT)
    for name in ("STORE", "OBJECTS"):
        monkeypatch.delenv(f"RAGFENCE_{name}", raising=False)
    monkeypatch.setenv("RAGFENCE_TENANT", "acme")
    monkeypatch.setenv("RAGFENCE_POLICY", str(tmp_path / "ragfence.yml"))
    monkeypatch.setenv(CONTENT_SECRET, SECRET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_surfaces_agree_on_a_keyed_tenant(place: Path) -> None:
    assert run("ingest", "docs").exit_code == 0
    with ragfence.open() as fence:
        (head,) = fence.documents.heads()
        found = fence.documents.get(head.doc_id)
        assert found is not None
        assert found.content_hash.startswith("hmac:")
        ids = [each.snippet_id for each in fence.documents.snippets(head.doc_id)]
        assert fence.documents.ingest(Document(head.doc_id, TEXT)).snippet_ids == tuple(ids)

    assets = [
        build_ingest_asset(str(place / "docs")),
        build_index_asset(lambda: spec_in(place / "index", CountingEmbedder())),
        build_alias_asset("docs"),
    ]
    resource = FenceResource(store=str(place / ".ragfence"))
    with dg.DagsterInstance.ephemeral() as instance:
        made = dg.materialize(assets, instance=instance, resources={"fence": resource})
    assert made.success
    (row,) = made.output_for_node("documents").to_arrow().to_pylist()
    assert (row["content_hash"], row["decision"], row["snippet_ids"]) == (found.content_hash, "duplicate", ids)

    with real_server(place / ".ragfence") as server, Client(server.url, server.acme) as client:
        receipt = client.ingest(Document(head.doc_id, TEXT))
        assert (receipt.decision, list(receipt.snippet_ids)) == ("duplicate", ids)
        assert client.ingest(Document("new", "Another text.")).is_new

    for words in (("verify",), ("audit", "check"), ("status",), ("drain",), ("hydrate",)):
        done = run(*words)
        assert done.exit_code == 0, (words, done.output)
    rows = json.loads(run("decisions", "--json").stdout)
    assert rows
    assert run("purge", head.doc_id, "--yes").exit_code == 0
    assert run("verify").exit_code == 0


def test_a_server_with_another_secret_answers_with_a_problem_and_the_command_line_with_a_hint(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("ingest", "docs").exit_code == 0
    monkeypatch.setenv(CONTENT_SECRET, "another secret" * 4)
    done = run("ingest", "docs")
    assert done.exit_code != 0
    assert "is not the one that its contents are hashed with" in done.output
    assert "it cannot be changed" in done.output
    assert "another secret" not in done.output
    with real_server(place / ".ragfence") as server, Client(server.url, server.acme) as client:
        with pytest.raises(ContentSecretError) as refused:
            client.ingest(Document("b", "text"))
        assert str(place) not in str(refused.value)
    monkeypatch.setenv(CONTENT_SECRET, SECRET)
    with ragfence.open() as fence:
        assert len(list(fence.documents.heads())) == 1
