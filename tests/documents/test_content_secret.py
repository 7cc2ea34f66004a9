"""`content_hash: hmac`: where its secret comes from, and what is refused before anything is written."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence import Document, Operation, Policy
from ragfence.core.hashing import ContentKey
from ragfence.core.settings import CONTENT_SECRET
from ragfence.errors import ContentSecretError, FormatTooNew, ObjectsRequired, PolicyError, RagfenceError
from ragfence.fence import Fence
from ragfence.server.tenants.export import TenantExport
from tests.indexes.building import CountingEmbedder, spec_in

SECRET = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
HMAC: dict[str, Any] = {"content_hash": "hmac"}


def opened(place: Path, policy: dict[str, Any] = HMAC, tenant: str = "acme") -> Fence:
    return ragfence.open(place / "f", objects=place / "o", tenant=tenant, policy=Policy.from_mapping(policy))


def once(fence: Fence, payload: object = "secret words") -> bool:
    with fence.claim(Operation(kind="ticket", source_id="1"), payload=payload) as op:
        if op.is_new:
            op.seal(effect_id="t")
        return op.is_new


def objects_in(place: Path) -> set[str]:
    return {str(file.relative_to(place / "o")) for file in (place / "o").rglob("*") if file.is_file()}


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONTENT_SECRET, SECRET)


def test_documents_are_known_again_and_survive_a_lost_fence_store(tmp_path: Path) -> None:
    with opened(tmp_path) as fence:
        first = fence.documents.ingest(Document("a", "some text", {"x": 1}))
        assert fence.documents.get("a").content_hash.startswith("hmac:")  # type: ignore[union-attr]
        assert once(fence)
    for file in (tmp_path / "f").glob("fences.db*"):
        file.unlink()
    with opened(tmp_path) as fence:
        again = fence.documents.ingest(Document("a", "some text", {"x": 1}))
        assert (again.decision, again.snippet_ids) == ("duplicate", first.snippet_ids)
        assert not once(fence)
        fence.hydrate()
        fence.documents.ingest(Document("a", "another text"))
        back = fence.documents.ingest(Document("a", "some text", {"x": 1}))
        assert (back.flags.revived, back.snippet_ids) == (True, first.snippet_ids)
        fence.documents.compact()
        assert fence.documents.verify(repair=True).ok
        fence.audit.drain()
        assert fence.audit.check().ok


@pytest.mark.parametrize(
    ("secret", "says"),
    [
        (None, f"the environment variable {CONTENT_SECRET} is not set"),
        ("  \n", "is not set"),
        ("short", "has 5 bytes; it takes 32 to 4096"),
        (31 * "x", "has 31 bytes"),
        (5000 * "x", "has more than 4096 bytes"),
    ],
)
def test_a_missing_or_short_secret_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str | None, says: str
) -> None:
    monkeypatch.delenv(CONTENT_SECRET) if secret is None else monkeypatch.setenv(CONTENT_SECRET, secret)
    with opened(tmp_path) as fence:
        for use in (
            lambda: fence.documents.ingest(Document("a", "text")),
            lambda: fence.documents.get("a"),
            lambda: once(fence),
            lambda: fence.documents.ingest(Document("a", "text"), dry_run=True),
        ):
            with pytest.raises(ContentSecretError) as refused:
                use()
            assert says in refused.value.message
            assert refused.value.code == "VALIDATION.content_secret"
            assert "openssl rand -hex 32" in refused.value.hint
            assert 5 * "x" not in refused.value.message
        assert fence.audit.decisions().num_rows == 0
    assert objects_in(tmp_path) == set()


def test_another_secret_is_refused_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as fence:
        fence.documents.ingest(Document("a", "text"))
        assert once(fence)
        before, rows = objects_in(tmp_path), fence.audit.decisions().num_rows
    monkeypatch.setenv(CONTENT_SECRET, OTHER)
    with opened(tmp_path) as fence:
        for use in (
            lambda: fence.documents.ingest(Document("b", "text")),
            lambda: fence.documents.ingest_many([Document("a", "text")]),
            lambda: fence.documents.snippets("a"),
            lambda: once(fence),
            lambda: once(fence),
        ):
            with pytest.raises(ContentSecretError, match="is not the one") as refused:
                use()
            assert "it cannot be changed" in refused.value.hint
            assert SECRET not in str(refused.value)
            assert OTHER not in str(refused.value)
        assert fence.audit.decisions().num_rows == rows  # who only looks at decisions needs no secret
    assert objects_in(tmp_path) == before
    monkeypatch.setenv(CONTENT_SECRET, SECRET)
    with opened(tmp_path) as fence:
        assert not once(fence)


def test_what_works_without_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as fence:
        fence.documents.ingest(Document("a", "leases expire"))
        build = fence.indexes.build(spec_in(tmp_path / "i", CountingEmbedder()))
        fence.aliases.swap("docs", build.index_hash)
    monkeypatch.delenv(CONTENT_SECRET)
    with opened(tmp_path) as fence:
        fence.indexes.use(CountingEmbedder())
        assert [hit.doc_id for hit in fence.search("docs", "leases")] == ["a"]
        assert fence.stats().processed
        fence.hydrate()
        fence.audit.drain()
        assert fence.audit.check().ok
        assert TenantExport(fence, tmp_path / "copy").run().objects
        with pytest.raises(ContentSecretError):
            fence.documents.purge("a")
    monkeypatch.setenv(CONTENT_SECRET, SECRET)
    copy = ragfence.open(tmp_path / "g", objects=tmp_path / "copy", tenant="acme", policy=Policy.from_mapping(HMAC))
    with copy as fence:
        assert fence.documents.ingest(Document("a", "leases expire")).decision == "duplicate"


def test_the_setting_cannot_be_changed_later(tmp_path: Path) -> None:
    with opened(tmp_path / "keyed") as fence:
        once(fence)  # the first operation of any kind fixes it
    for plain in ({}, {"content_hash": "sha256"}):
        with pytest.raises(PolicyError, match="hashed with hmac") as refused:
            opened(tmp_path / "keyed", plain)
        assert "content_hash: hmac" in refused.value.hint
    with opened(tmp_path / "plain", {"content_hash": "sha256"}) as fence:
        fence.documents.ingest(Document("a", "text"))
    with opened(tmp_path / "plain") as fence:
        for use in (lambda: fence.documents.ingest(Document("a", "text")), lambda: once(fence)):
            with pytest.raises(PolicyError, match="hashed with sha256, and the policy says hmac"):
                use()


def test_a_tenant_with_plain_fingerprints_stays_plain(tmp_path: Path) -> None:
    """Every retry of what it has sealed would otherwise be called a conflict."""
    with opened(tmp_path, {}) as fence:
        assert once(fence)
    before = objects_in(tmp_path)
    with opened(tmp_path) as fence, pytest.raises(PolicyError, match="was used before without") as refused:
        once(fence)
    assert "another tenant" in refused.value.hint
    assert objects_in(tmp_path) == before
    with opened(tmp_path, {}) as fence:
        assert not once(fence)


def test_a_fence_that_was_only_looked_at_may_still_be_keyed(tmp_path: Path) -> None:
    with opened(tmp_path, {}) as fence:
        assert fence.documents.get("a") is None
        fence.hydrate()
        fence.audit.decisions()
    with opened(tmp_path) as fence:
        assert fence.documents.ingest(Document("a", "text")).is_new


def test_a_secret_in_a_file_has_no_white_space_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONTENT_SECRET)
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    with opened(tmp_path, HMAC | {"content_secret": {"file": str(file)}}) as fence:
        receipt = fence.documents.ingest(Document("a", "text"))
    monkeypatch.setenv("ELSEWHERE", SECRET)
    with opened(tmp_path, HMAC | {"content_secret": {"env": "ELSEWHERE"}}) as fence:
        assert fence.documents.ingest(Document("a", "text")).snippet_ids == receipt.snippet_ids
    os.mkfifo(tmp_path / "pipe")
    for wrong in (tmp_path, tmp_path / "nothing", tmp_path / "pipe", "/dev/zero"):
        with (
            opened(tmp_path, HMAC | {"content_secret": {"file": str(wrong)}}) as fence,
            pytest.raises(ContentSecretError, match="cannot be read") as refused,
        ):
            fence.documents.get("a")
        assert "content_secret.file" in refused.value.hint


def test_each_tenant_may_have_a_file_of_its_own_and_none_leads_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir()
    (tmp_path / "outside").write_text(SECRET)
    (folder / "acme").write_text(SECRET)
    (folder / "other").write_text(OTHER)
    policy = HMAC | {"content_secret": {"file": f"{folder}/{{tenant}}"}}
    ids = set()
    for tenant in ("acme", "other"):
        with opened(tmp_path, policy, tenant) as fence:
            ids.add(fence.documents.ingest(Document("a", "text")).snippet_ids)
    assert len(ids) == 2
    with opened(tmp_path, policy, "../outside") as fence, pytest.raises(ContentSecretError, match="cannot be read"):
        fence.documents.ingest(Document("a", "text"))


def test_two_tenants_with_one_secret_have_nothing_in_common(tmp_path: Path) -> None:
    seen = []
    for tenant in ("acme", "other"):
        with opened(tmp_path, tenant=tenant) as fence:
            fence.documents.ingest(Document("a", "text"))
            once(fence)
            found = fence.documents.get("a")
            assert found is not None
            hashes = fence.audit.decisions().column("payload_hash").to_pylist()
            seen.append({found.content_hash, *hashes, *(each.snippet_id for each in fence.documents.snippets("a"))})
    assert seen[0] & seen[1] <= {""}


def test_of_two_secrets_that_come_at_once_one_is_fixed(tmp_path: Path) -> None:
    keys = {"A": SECRET, "B": OTHER}

    def use(number: int) -> str:
        name = "AB"[number % 2]
        with opened(tmp_path, HMAC | {"content_secret": {"env": f"SECRET_{name}"}}) as fence:
            try:
                fence.documents.ingest(Document(f"d{number}", "text"))
            except ContentSecretError:
                return ""
            return name

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(8) as pool:
        for name, secret in keys.items():
            patch.setenv(f"SECRET_{name}", secret)
        won = [name for name in pool.map(use, range(8)) if name]
        assert len(won) == 4
        assert len(set(won)) == 1


def test_without_an_object_store_nothing_can_be_fixed(valkey_server: Any) -> None:
    with (
        ragfence.open(valkey_server.url, tenant="keyed-solo", policy=Policy.from_mapping(HMAC)) as fence,
        pytest.raises(ObjectsRequired, match="content_hash: hmac needs an object store"),
    ):
        once(fence)


def test_settings_of_a_newer_ragfence_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path, {}) as fence:
        fence.inspector.objects.put_new("acme/documents/settings", b'{"version": 3}')  # type: ignore[union-attr]
        with pytest.raises(FormatTooNew, match="format 3; this ragfence knows 2"):
            fence.documents.ingest(Document("a", "text"))
    with pytest.raises(FormatTooNew):
        opened(tmp_path, {})


def test_nobody_gets_to_see_the_key() -> None:
    key = ContentKey(SECRET.encode(), "acme")
    assert repr(key) == "ContentKey(...)"
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(key)
    with pytest.raises(RagfenceError) as refused:
        Policy.from_mapping({"content_hash": "hmac", "content_secret": SECRET})
    assert SECRET not in str(refused.value)
