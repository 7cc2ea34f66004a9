"""`ragfence tenants`: which there are, a copy of one that can be opened, and an end that leaves nothing behind."""

from __future__ import annotations

import json
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq
import pytest

import ragfence
from ragfence import Document, Fence, Operation
from ragfence.core.operations import encoded
from ragfence.errors import ObjectsRequired, StoreUnavailable, ValidationError
from ragfence.indexes.build_log import Attempt, BuildLog
from ragfence.indexes.spec import IndexSpec
from ragfence.server.apikeys import ApiKeys
from ragfence.server.tenants.export import TenantExport
from ragfence.server.tenants.removal import TenantDropped, TenantRemoval
from ragfence.server.tenants.stores import _TABLES, parts_of, standing, tenants
from ragfence.stores.local import LocalObjects
from ragfence.stores.objects import ObjectStore
from ragfence.stores.s3 import S3Objects
from ragfence.stores.sqlite import SqliteFences
from ragfence.testing.memory import FaultyObjects, MemoryObjects
from tests.cli.conftest import run
from tests.indexes.building import CountingEmbedder
from tests.servers import RedisCluster, RedisServer, S3Server

TEXT = "# Leases\n\nA lease expires on the clock of the store, says the unmistakable {}."
ODD = "größe /7"


class Killed(BaseException):
    """As if the process had ended here."""


@dataclass
class Town:
    """Two stores with several tenants in them."""

    store: str | Path
    objects: ObjectStore | Path
    folder: Path

    @contextmanager
    def open(self, tenant: str) -> Iterator[Fence]:
        fence = ragfence.open(self.store, objects=self.objects, tenant=tenant)
        try:
            yield fence
        finally:
            fence.close()

    def fill(self, tenant: str, documents: int = 3) -> None:
        with self.open(tenant) as fence:
            for number in range(documents):
                assert not fence.documents.ingest(document(number)).failed
            with fence.claim(Operation(kind="ticket", source_id="t")) as op:
                op.seal(result={"secret": "unmistakable"})
            ApiKeys(self.kept).create(tenant)

    @property
    def kept(self) -> ObjectStore:
        return LocalObjects(self.objects) if isinstance(self.objects, Path) else self.objects

    def names(self, tenant: str) -> list[str]:
        return [entry.name for entry in self.kept.list(f"{encoded(tenant)}/")]

    def held(self, tenant: str) -> int:
        with standing(self.store) as fences:
            return fences.count(tenant)

    def drop(self, tenant: str, **more: Any) -> TenantDropped:
        told = more.pop("told", lambda done: None)
        with self.open(tenant) as fence, standing(self.store) as fences:
            return TenantRemoval(fence, fences, **{"sleep": lambda seconds: None, **more}).run(told)

    def export(self, tenant: str, to: Path, **more: Any) -> Any:
        told = more.pop("told", lambda done: None)
        with self.open(tenant) as fence:
            return TenantExport(fence, to, **more).run(told)


def document(number: int) -> Document:
    return Document(f"doc-{number}", TEXT.format(f"no. {number}"))


@pytest.fixture
def embedded_town(tmp_path: Path) -> Town:
    return Town(tmp_path / "fences.db", tmp_path / "objects", tmp_path)


@pytest.fixture(params=["embedded", "valkey and s3"])
def town(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Town]:
    if request.param == "embedded":
        yield Town(tmp_path / "fences.db", tmp_path / "objects", tmp_path)
        return
    valkey: RedisServer = request.getfixturevalue("valkey_server")
    s3: S3Server = request.getfixturevalue("moto_server")
    request.getfixturevalue("s3_env")
    with closing(valkey.client()) as client:
        client.flushall()
    # Fences hang up when they close; it connects again by itself.
    with closing(S3Objects(s3.bucket, secrets.token_hex(8), endpoint_url=s3.url)) as objects:
        yield Town(valkey.url, objects, tmp_path)


def test_every_tenant_of_either_store_is_listed(town: Town) -> None:
    for tenant, documents in (("acme", 2), (ODD, 3), ("acme-2", 1)):
        town.fill(tenant, documents)
    ApiKeys(town.kept).create("only-keys")
    with town.open("only-fences") as fence:
        fence.inspector.fences.begin_epoch(1)
    with standing(town.store) as fences:
        found = {each.name: each for each in tenants(fences, town.kept)}
        sized = {each.name: each for each in tenants(fences, town.kept, sizes=True)}
    assert set(found) == {"acme", ODD, "acme-2", "only-keys", "only-fences"}
    assert {name: each.held and each.held.sources for name, each in found.items()} == {
        "acme": 2,
        ODD: 3,
        "acme-2": 1,
        "only-keys": None,
        "only-fences": 0,
    }
    assert (found["acme"].apikeys, found["only-fences"].apikeys, found["acme"].objects) == (1, 0, None)
    assert {"apikeys", "epochs", "segments", "snippets", "sealed"} <= set(found["acme"].folders)
    assert sized["acme"].objects == len(town.names("acme"))
    assert sized["acme"].bytes == sum(entry.size for entry in town.kept.list("acme/"))


def test_tenants_are_found_without_reading_all_names() -> None:
    """One request per tenant, however many objects each has; and names that sort around the slash are no trap."""
    objects = FaultyObjects(MemoryObjects())
    names = ["a", "a-b", "a.b", "a0", "a%2Fb", "b", ".lance", ".probe", "z~z", "ü"]
    for name in names:
        for number in range(50):
            objects.inner.put_new(f"{name if name.startswith('.') else encoded(name)}/x/{number}", b"")
    objects.inner.put_new("a/~/last", b"")
    objects.inner.put_new("not%2ftenant/x", b"")
    assert {unquote(part) for part in parts_of(objects, "")} == {*names, "not/tenant"}
    assert objects.calls["list"] == len(names) + 2  # one more finds the end
    with standing(Path("nowhere")) as fences:
        found = [each.name for each in tenants(fences, objects)]
    assert found == sorted(name for name in names if not name.startswith("."))


def test_looking_makes_no_store(tmp_path: Path) -> None:
    done = run("tenants", "list")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "there is neither" in done.stderr
    assert run("tenants", "drop", "acme", "--yes-drop", "acme").exit_code == 1
    assert run("tenants", "export", "acme", "--to", "copy").exit_code == 1
    assert not list(tmp_path.iterdir())


def test_every_table_of_the_fence_file_that_has_tenants_is_known_to_the_drop(tmp_path: Path) -> None:
    SqliteFences(tmp_path / "fences.db").close()
    with closing(sqlite3.connect(tmp_path / "fences.db")) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        tenanted = {
            table for table in tables if "tenant" in {row[1] for row in db.execute(f"PRAGMA table_info({table})")}
        }
    assert tenanted == set(_TABLES)


def test_a_copy_can_be_opened_and_answers_as_the_tenant_did(town: Town, tmp_path: Path) -> None:
    town.fill(ODD)
    town.fill("other")
    with town.open(ODD) as fence:
        first = fence.documents.ingest(document(1))
    report = town.export(ODD, tmp_path / "copy")
    assert report.passes == 1
    assert report.copied == report.objects == len(town.names(ODD)) - 1
    with ragfence.open(tmp_path / "new", objects=tmp_path / "copy", tenant=ODD) as fence:
        fence.hydrate()
        again = fence.documents.ingest(document(1))
        assert (again.decision, again.snippet_ids) == ("duplicate", first.snippet_ids)
        with fence.claim(Operation(kind="ticket", source_id="t")) as op:
            assert not op.is_new
        assert op.receipt.result == {"secret": "unmistakable"}
        assert fence.documents.verify().ok
    rows = pq.read_table(tmp_path / "copy" / "exports" / f"{encoded(ODD)}.decisions.parquet")
    assert rows.num_rows == report.rows > 4
    assert set(rows["tenant"].to_pylist()) == {ODD}
    assert list(parts_of(LocalObjects(tmp_path / "copy"), "")) == [encoded(ODD)]


@pytest.mark.parametrize("length", [25, 26, 28], ids="{} letters".format)
def test_a_tenant_with_a_long_name_can_be_copied(embedded_town: Town, tmp_path: Path, length: int) -> None:
    """A letter may take nine bytes of a file's name, which has at most 255."""
    tenant, exports = "部" * length, tmp_path / "copy" / "exports"
    embedded_town.fill(tenant)

    def killed(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedded_town.export(tenant, tmp_path / "copy", told=killed)
    report = embedded_town.export(tenant, tmp_path / "copy")  # it finds what it had noted
    name = encoded(tenant) if length == 25 else f"~{sha256(tenant.encode()).hexdigest()}"
    assert sorted(file.name for file in exports.iterdir()) == [f"{name}.decisions.parquet", f"{name}.json"]
    assert json.loads((exports / f"{name}.json").read_bytes())["tenant"] == tenant
    with ragfence.open(tmp_path / "new", objects=tmp_path / "copy", tenant=tenant) as fence:
        assert fence.documents.ingest(document(1)).decision == "duplicate"
    assert report.rows > 4


def test_keys_are_copied_only_if_somebody_asks_for_them(embedded_town: Town, tmp_path: Path) -> None:
    embedded_town.fill("acme")
    made = ApiKeys(embedded_town.kept).create("acme")
    for number, wanted in enumerate((False, True)):
        embedded_town.export("acme", tmp_path / f"copy-{number}", with_apikeys=wanted)
        let_in = ApiKeys(LocalObjects(tmp_path / f"copy-{number}")).check(made.token)
        assert (let_in is not None) == wanted


def test_an_export_that_was_cut_off_goes_on_where_it_was(embedded_town: Town, tmp_path: Path) -> None:
    embedded_town.fill("acme", 12)
    counted = FaultyObjects(LocalObjects(tmp_path / "objects"))
    town = Town(embedded_town.store, counted, tmp_path)

    def killed(done: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        town.export("acme", tmp_path / "copy", told=killed)
    assert json.loads((tmp_path / "copy" / "exports" / "acme.json").read_bytes())["complete"] is False
    there = len(list(LocalObjects(tmp_path / "copy").list("acme/")))
    assert there > 0
    counted.calls.clear()
    report = town.export("acme", tmp_path / "copy")
    assert report.copied == report.objects - there
    assert json.loads((tmp_path / "copy" / "exports" / "acme.json").read_bytes())["complete"] is True


def test_what_was_purged_between_two_runs_is_not_in_the_copy(embedded_town: Town, tmp_path: Path) -> None:
    embedded_town.fill("acme")
    root = f"{encoded('acme')}/"
    LocalObjects(tmp_path / "copy")
    (tmp_path / "copy" / "exports").mkdir()
    known = {"version": 1, "complete": False, "from": LocalObjects(tmp_path / "objects").url}
    (tmp_path / "copy" / "exports" / "acme.json").write_text(json.dumps(known))
    shutil.copytree(tmp_path / "objects" / "objects", tmp_path / "copy" / "objects", dirs_exist_ok=True)
    short = next(iter(LocalObjects(tmp_path / "copy").list(f"{root}snippets/")))
    (tmp_path / "copy" / "objects" / short.name).write_bytes(b"cut off")
    with embedded_town.open("acme") as fence:
        fence.documents.purge("doc-1")
    report = embedded_town.export("acme", tmp_path / "copy")
    copied = {entry.name: entry.size for entry in LocalObjects(tmp_path / "copy").list(root)}
    assert copied == {
        entry.name: entry.size for entry in embedded_town.kept.list(root) if "/apikeys/" not in entry.name
    } | {name: size for name, size in copied.items() if "/apikeys/" in name}
    assert report.objects == sum("/apikeys/" not in name for name in copied)


def test_a_compaction_in_the_middle_makes_another_pass(embedded_town: Town, tmp_path: Path) -> None:
    """Its list of segments was copied before; without the new one the copy would name what is not in it."""
    embedded_town.fill("acme", 6)
    calls: list[int] = []

    def compact(done: int) -> None:
        if not calls:
            calls.append(done)
            with embedded_town.open("acme") as other:
                other.hydrate()
                assert other.documents.compact().epoch

    report = embedded_town.export("acme", tmp_path / "copy", told=compact)
    assert report.passes == 2
    with ragfence.open(tmp_path / "new", objects=tmp_path / "copy", tenant="acme") as fence:
        assert fence.documents.ingest(document(5)).decision == "duplicate"
        assert fence.documents.verify().ok


def test_an_export_that_never_finds_rest_says_so(embedded_town: Town, tmp_path: Path) -> None:
    embedded_town.fill("acme")

    def hydrate(done: int) -> None:
        with embedded_town.open("acme") as other:
            other.hydrate()

    with pytest.raises(StoreUnavailable, match="in each of 5 passes"):
        embedded_town.export("acme", tmp_path / "copy", told=hydrate)


def test_no_store_that_somebody_uses_is_written_into(embedded_town: Town, tmp_path: Path) -> None:
    embedded_town.fill("acme")
    with pytest.raises(ValidationError, match="not as an export"):
        embedded_town.export("acme", tmp_path / "objects")
    embedded_town.export("acme", tmp_path / "copy")
    with pytest.raises(ValidationError, match="is complete"):
        embedded_town.export("acme", tmp_path / "copy")
    embedded_town.fill("other")
    embedded_town.export("other", tmp_path / "copy")  # of another tenant, beside it
    elsewhere = Town(tmp_path / "x.db", tmp_path / "x", tmp_path)
    elsewhere.fill("third")
    (tmp_path / "copy" / "exports" / "third.json").write_text('{"from": "s3://elsewhere"}')
    with pytest.raises(ValidationError, match="of s3://elsewhere"):
        elsewhere.export("third", tmp_path / "copy")


def test_a_tenant_that_is_not_there_is_not_exported(embedded_town: Town, tmp_path: Path) -> None:
    embedded_town.fill("acme")
    with pytest.raises(ValidationError, match="has no objects of tenant 'acmee'"):
        embedded_town.export("acmee", tmp_path / "copy")
    assert not (tmp_path / "copy" / "exports").exists()


def test_without_an_object_store_there_is_nothing_to_export(valkey_server: RedisServer, tmp_path: Path) -> None:
    with (
        ragfence.open(valkey_server.url, tenant=f"t-{secrets.token_hex(4)}") as fence,
        pytest.raises(ObjectsRequired),
    ):
        TenantExport(fence, tmp_path / "copy")


def test_a_drop_leaves_nothing_of_a_tenant_and_everything_of_the_others(town: Town) -> None:
    for tenant in ("acme", "acme-2", "other"):
        town.fill(tenant)
    others = {tenant: (town.names(tenant), town.held(tenant)) for tenant in ("acme-2", "other")}
    with town.open("acme") as fence, standing(town.store) as fences:
        fence.inspector.fences.lock("some", "token", 60_000)
        would = TenantRemoval(fence, fences).look()
    assert (would.dry_run, would.objects, would.fences) == (True, len(town.names("acme")), town.held("acme"))
    done = town.drop("acme")
    assert (done.apikeys, done.objects, done.bytes) == (1, would.objects, would.bytes)
    assert done.fences == would.fences
    assert (town.names("acme"), town.held("acme"), done.late) == ([], 0, 0)
    assert {tenant: (town.names(tenant), town.held(tenant)) for tenant in others} == others
    with standing(town.store) as fences:
        assert {each.name for each in tenants(fences, town.kept)} == set(others)
    assert town.drop("acme").nothing
    with town.open("other") as fence:
        assert fence.documents.ingest(document(0)).decision == "duplicate"
    with town.open("acme") as fence:  # a tenant of this name may come again
        assert fence.documents.ingest(document(0)).decision == "new"


def test_no_byte_of_a_dropped_tenant_is_left_on_the_disk(embedded_town: Town, tmp_path: Path) -> None:
    embedded_town.fill("acme")

    def found() -> bool:
        return any(b"unmistakable" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())

    assert found()
    embedded_town.drop("acme")
    assert not found()


def test_servers_are_given_the_time_to_notice_that_the_keys_are_gone(embedded_town: Town) -> None:
    embedded_town.fill("acme")
    seen: list[tuple[float, bool, bool]] = []

    def wait(seconds: float) -> None:
        keys = [name for name in embedded_town.names("acme") if "/apikeys/" in name]
        seen.append((seconds, bool(keys), embedded_town.held("acme") > 0))

    embedded_town.drop("acme", sleep=wait, servers_notice_s=7.0)
    assert seen == [(7.0, False, True)]
    embedded_town.drop("acme", sleep=wait)
    assert len(seen) == 1  # no keys, nothing to notice


def test_a_revoked_key_is_not_alive_for_a_moment_while_it_is_dropped(embedded_town: Town) -> None:
    made = ApiKeys(embedded_town.kept).create("acme")
    ApiKeys(embedded_town.kept).revoke("acme", made.key_id)

    class Watching(FaultyObjects):
        def delete(self, names: Any) -> None:
            for name in names:  # one by one, as a store may
                self.inner.delete([name])
                assert ApiKeys(self.inner).check(made.token) is None

    assert isinstance(embedded_town.objects, Path)
    Town(embedded_town.store, Watching(LocalObjects(embedded_town.objects)), embedded_town.folder).drop("acme")
    assert not embedded_town.names("acme")


def test_a_drop_that_was_killed_anywhere_answers_for_nothing_that_is_lost(tmp_path: Path) -> None:
    """Killed before or after any request to the object store: whoever comes then finds all of a document or nothing of
    it, or is refused; and the next drop ends what was begun."""
    full = tmp_path / "full"
    Town(full / "fences.db", full / "objects", full).fill("acme")

    class Fragile(FaultyObjects):
        left = 0

        def delete(self, names: Any) -> None:
            for name in names:
                if not self.left:
                    raise Killed
                self.left -= 1
                self.inner.delete([name])

    ended, number = False, 0
    while not ended:
        place = tmp_path / str(number)
        shutil.copytree(full, place)
        plain = Town(place / "fences.db", place / "objects", place)
        fragile = Fragile(LocalObjects(place / "objects"))
        fragile.left, number = number, number + 1
        try:
            Town(place / "fences.db", fragile, place).drop("acme")
            ended = True
        except Killed:
            with plain.open("acme") as fence:
                try:
                    receipt = fence.documents.ingest(document(1))
                except StoreUnavailable:
                    pass  # refused: its log names what is gone
                else:
                    found = fence.documents.snippets("doc-1")
                    assert [snippet.snippet_id for snippet in found] == list(receipt.snippet_ids)
        plain.drop("acme")
        assert (plain.names("acme"), plain.held("acme")) == ([], 0)
    assert number > 12


def test_what_is_written_while_a_tenant_is_dropped_is_told(embedded_town: Town) -> None:
    embedded_town.fill("acme")
    assert isinstance(embedded_town.objects, Path)
    late = iter([True])

    class Busy(FaultyObjects):
        def delete(self, names: Any) -> None:
            self.inner.delete(names)
            if any("/snippets/" in name for name in names) and next(late, False):
                with embedded_town.open("acme") as fence:
                    assert fence.documents.ingest(document(7)).decision == "new"

    report = Town(embedded_town.store, Busy(LocalObjects(embedded_town.objects)), embedded_town.folder).drop("acme")
    assert report.late > 0
    assert (embedded_town.names("acme"), embedded_town.held("acme")) == ([], 0)


def test_a_hydration_between_the_fences_and_the_epochs_does_not_survive(embedded_town: Town) -> None:
    """Somebody claims just after the fence store was emptied, and fills it again from objects that are about to go."""
    embedded_town.fill("acme")
    assert isinstance(embedded_town.objects, Path)
    seen: list[int] = []
    claims = iter([True])

    class Busy(FaultyObjects):
        def delete(self, names: Any) -> None:
            if any("/epochs/" in name for name in names) and next(claims, False):
                with embedded_town.open("acme") as fence:
                    assert fence.documents.ingest(document(1)).decision == "duplicate"
            if any("/segments/" in name for name in names):
                seen.append(embedded_town.held("acme"))
                assert not any("/epochs/" in name for name in embedded_town.names("acme"))
            self.inner.delete(names)

    report = Town(embedded_town.store, Busy(LocalObjects(embedded_town.objects)), embedded_town.folder).drop("acme")
    assert seen[0] == 0 < report.late


def test_the_physical_indexes_and_their_pointers_go_too(embedded_town: Town, tmp_path: Path) -> None:
    for tenant in ("acme", "other"):
        embedded_town.fill(tenant)
        with embedded_town.open(tenant) as fence:
            fence.aliases.swap("docs", fence.indexes.build(IndexSpec(embedder=CountingEmbedder())).index_hash)
    with embedded_town.open("acme") as fence, standing(embedded_town.store) as fences:
        backend = fence.indexes.backend("lance")
        (would,) = TenantRemoval(fence, fences).look().indexes
        assert len(backend.physicals()) == 2
        assert TenantRemoval(fence, fences, sleep=lambda seconds: None).run().indexes == [would]
        assert would not in backend.physicals()
        assert len(backend.physicals()) == 1
        assert backend.pointer("docs@acme") is None
        assert backend.pointer("docs@other") is not None


def test_a_backend_that_cannot_be_opened_keeps_the_objects_that_name_its_indexes(embedded_town: Town) -> None:
    embedded_town.fill("acme")
    away = Attempt("ab" * 32, "t", "rf-x", "elsewhere", 1, 1, "me")
    BuildLog("acme", embedded_town.kept).begin(away)
    with pytest.raises(StoreUnavailable, match="cannot be dropped") as told:
        embedded_town.drop("acme")
    assert "--leave-indexes" in told.value.hint
    assert embedded_town.held("acme") == 0
    assert any("/attempts/" in name for name in embedded_town.names("acme"))
    embedded_town.drop("acme", leave_indexes=True)
    assert embedded_town.names("acme") == []


@pytest.mark.slow
def test_a_tenant_of_a_cluster_is_listed_and_dropped(valkey_cluster_server: RedisCluster, tmp_path: Path) -> None:
    town = Town(valkey_cluster_server.url, tmp_path / "objects", tmp_path)
    one, other = f"t-{secrets.token_hex(4)}", f"u-{secrets.token_hex(4)}"
    town.fill(one, 20)
    town.fill(other, 2)
    with standing(town.store) as fences:
        found = fences.tenants()
    assert (found[one].sources, found[other].sources) == (20, 2)
    town.drop(one)
    assert town.held(one) == 0 < town.held(other)


@pytest.fixture
def here(tmp_path: Path) -> Town:
    """What the commands find without options."""
    made = Town(tmp_path / ".ragfence" / "fences.db", tmp_path / ".ragfence" / "objects", tmp_path)
    made.fill("acme")
    made.fill("other", 1)
    return made


def test_the_list_is_a_table_and_a_document(here: Town) -> None:
    done = run("tenants", "list")
    assert (done.exit_code, done.stderr) == (0, "")
    assert {line.split()[0]: line.split()[1:4] for line in done.stdout.splitlines()[1:]} == {
        "acme": ["3", "1", "1"],
        "other": ["1", "1", "1"],
    }
    told = json.loads(run("tenants", "list", "--sizes", "--json").stdout)["tenants"]
    assert [each["tenant"] for each in told] == ["acme", "other"]
    assert told[0]["objects"] == len(here.names("acme"))
    assert "segments" in told[0]["has"]


def test_an_export_is_told_and_can_be_hydrated_by_the_command_it_names(here: Town, tmp_path: Path) -> None:
    done = run("tenants", "export", "acme", "--to", "copy")
    assert (done.exit_code, done.stderr) == (0, "")
    assert f"acme: {len(here.names('acme')) - 1:,} objects (" in done.stdout
    assert "ragfence hydrate --tenant acme --store NEW" in done.stdout
    hydrated = run("hydrate", "--tenant", "acme", "--store", "new", "--objects", "copy", "--json")
    assert json.loads(hydrated.stdout)["loaded"] == 3
    again = run("tenants", "export", "acme", "--to", "copy", "--json")
    assert again.exit_code == 1
    assert "is complete" in json.loads(again.stdout)["error"]["message"]


def test_a_drop_is_dry_until_the_name_is_said_twice(here: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    before = here.names("acme"), here.held("acme")
    done = run("tenants", "drop", "acme")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "would be deleted" in done.stdout
    assert "`ragfence tenants drop acme --yes-drop acme`" in done.stdout
    refused = run("tenants", "drop", "acme", "--yes-drop", "other")
    assert refused.exit_code == 2
    assert "nothing was dropped" in refused.stderr
    assert (here.names("acme"), here.held("acme")) == before
    done = run("tenants", "drop", "acme", "--yes-drop", "acme")
    assert done.exit_code == 0
    assert "waiting 10 s" in done.stderr
    assert (here.names("acme"), here.held("acme")) == ([], 0)
    assert here.names("other")
    nothing = run("tenants", "drop", "acme", "--json")
    assert (nothing.exit_code, json.loads(nothing.stdout)["objects"]) == (1, 0)
    assert "there is no such tenant" in run("tenants", "drop", "acme").stdout


def test_a_redis_alone_is_dropped_too(valkey_server: RedisServer, tmp_path: Path) -> None:
    tenant = f"solo-{secrets.token_hex(4)}"
    with (
        ragfence.open(valkey_server.url, tenant=tenant) as fence,
        fence.claim(Operation(kind="k", source_id="a")) as op,
    ):
        op.seal()
    told = json.loads(run("tenants", "list", "--store", valkey_server.url, "--json").stdout)["tenants"]
    assert tenant in {each["tenant"] for each in told}
    done = run("tenants", "drop", tenant, "--yes-drop", tenant, "--store", valkey_server.url, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    assert json.loads(done.stdout)["fences"] > 0
    with standing(valkey_server.url) as fences:
        assert tenant not in fences.tenants()
