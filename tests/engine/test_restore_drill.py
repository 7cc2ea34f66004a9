"""The drill of docs/operations.md: the fence store is lost, or an old copy comes back, and is rebuilt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ragfence
from ragfence.cli.app import app
from tests import servers


class Site:
    def __init__(self, store: str, objects: Path) -> None:
        self.store, self.objects = store, objects
        self.performed: list[int] = []

    def perform(self, *numbers: int) -> list[ragfence.Receipt]:
        with ragfence.open(self.store, objects=self.objects) as fence:

            @fence.once(kind="ticket", key=lambda number: str(number))
            def effect(number: int) -> str:
                self.performed.append(number)
                return f"T-{number}"

            return [effect(number) for number in numbers]

    def ragfence(self, *words: str) -> Any:
        where = ["--store", self.store, "--objects", str(self.objects), "--json"]
        done = CliRunner().invoke(app, [*words, *where])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)


def _drill(site: Site, lose: Callable[[], None]) -> None:
    # Rows of every shard are in the ledger; those that come later are lost with the store.
    _ingest(site, range(200))
    site.ragfence("drain")
    _ingest(site, range(200, 300))
    before = site.perform(1, 2)
    story = site.ragfence("explain", before[0].key)
    lose()
    site.ragfence("hydrate")
    site.ragfence("doctor")
    site.ragfence("audit", "check")
    # Nothing but duplicates: the new epoch grants nothing, and the seals of what is answered are lost.
    assert set(_ingest(site, range(300))) == {"duplicate"}
    assert site.perform(1, 2) == before
    assert site.ragfence("audit", "check")["ok"]
    site.ragfence("drain")
    assert site.ragfence("audit", "check")["ok"]
    assert site.perform(1, 2, 3) == [*before, *site.perform(3)]
    assert site.performed == [1, 2, 3]
    again = site.ragfence("explain", before[0].key)
    assert again["keys"][0]["now"]["effect_id"] == story["keys"][0]["now"]["effect_id"]


def _ingest(site: Site, numbers: range) -> list[str]:
    with ragfence.open(site.store, objects=site.objects) as fence:
        documents = [ragfence.Document(f"d{number}", f"It rains in town {number}.") for number in numbers]
        return [str(receipt.decision) for receipt in fence.documents.ingest_many(documents)]


def test_a_sqlite_file_that_was_deleted(tmp_path: Path) -> None:
    site = Site(str(tmp_path / "fences.db"), tmp_path / "objects")
    _drill(site, lambda: [file.unlink() for file in tmp_path.glob("fences.db*")] and None)  # type: ignore[arg-type]


def test_a_sqlite_file_of_which_an_old_copy_was_put_back(tmp_path: Path) -> None:
    file = tmp_path / "fences.db"
    site = Site(str(file), tmp_path / "objects")
    site.perform(0)
    site.performed.clear()
    shutil.copy(file, tmp_path / "backup")

    def restore() -> None:
        for rest in tmp_path.glob("fences.db-*"):
            rest.unlink()
        file.write_bytes((tmp_path / "backup").read_bytes())  # in place: the same inode, so nobody can notice

    _drill(site, restore)


@pytest.mark.parametrize("kind", ["valkey_server", "redis62_server", "valkey_cluster_server"])
def test_a_redis_that_was_flushed(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    server = request.getfixturevalue(kind)
    with server.client() as admin:
        admin.flushall()
        _drill(Site(server.url, tmp_path / "objects"), admin.flushall)


def test_a_redis_that_an_old_snapshot_was_loaded_into(tmp_path: Path) -> None:
    data = tmp_path / "redis"
    with servers.valkey(data_dir=data, args=("--dbfilename", "old.rdb")) as server:
        site = Site(server.url, tmp_path / "objects")
        site.perform(0)
        site.performed.clear()
        with server.client() as admin:
            admin.save()

        def restore() -> None:
            server.kill()
            server.start()  # with what was saved then

        _drill(site, restore)
