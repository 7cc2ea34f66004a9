"""What ragfence keeps on a disk is for its owner, whatever the umask, or for the team that a folder was made for."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import ragfence
from ragfence.core.policy import Policy
from ragfence.server.streams import Spool
from ragfence.server.tenants.export import TenantExport
from ragfence.stores.file_modes import make_empty_file
from ragfence.stores.local import LocalObjects
from ragfence.stores.sqlite import SqliteFences
from ragfence.testing import MemoryFences, MemoryObjects
from tests.engine.test_journal import Down

TEAM = stat.S_ISGID | 0o770


@pytest.fixture(params=[0o000, 0o022, 0o027], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    assert os.umask(before) == request.param, "ragfence changed the umask of the process"


def modes(root: Path) -> set[tuple[str, str]]:
    """("folder", its mode) and ("file", its mode), of everything below and of the root itself."""
    found = {("folder", oct(stat.S_IMODE(root.stat().st_mode)))}
    for folder, folders, files in os.walk(root):
        for kind, names in (("folder", folders), ("file", files)):
            found |= {(kind, oct(stat.S_IMODE(os.lstat(Path(folder, name)).st_mode))) for name in names}
    return found


PRIVATE = {("folder", "0o700"), ("file", "0o600")}
SHARED = {("folder", "0o2770"), ("file", "0o660")}


def use(folder: Path) -> ragfence.Fence:
    fence = ragfence.open(folder)
    fence.documents.ingest_many([ragfence.Document(f"d{number}", "Thirty days of leave.") for number in range(3)])
    with fence.claim(ragfence.Operation(kind="ticket", source_id="1"), payload={"a": 1}) as op:
        if op.is_new:
            op.seal(result="x" * 100_000)  # an object of its own
    return fence


def test_an_embedded_store_is_private(umask: int, tmp_path: Path) -> None:
    root = tmp_path / "above" / ".ragfence"
    with use(root) as fence:
        assert {"fences.db", "fences.db-wal", "fences.db-shm"} < set(os.listdir(root))
        assert modes(tmp_path / "above") == PRIVATE
        fence.hydrate()
        fence.purge_expired()
        assert modes(tmp_path / "above") == PRIVATE


def test_an_index_lies_in_a_private_folder(umask: int, tmp_path: Path) -> None:
    """LanceDB makes its files as the umask says; nobody else gets as far as them."""
    with use(tmp_path / ".ragfence") as fence:
        build = fence.indexes.build()
        fence.aliases.swap("docs", build.index_hash)
    tables = [table.parent for table in (tmp_path / ".ragfence").rglob("*.lance") if table.is_dir()]
    assert tables
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in tables} == {0o700}


def test_a_qdrant_folder_is_private(umask: int, tmp_path: Path) -> None:
    local = pytest.importorskip("qdrant_client") and __import__(
        "ragfence.indexes.backends.qdrant", fromlist=["open_local"]
    )
    local.open_local(tmp_path / "vectors").close()
    assert stat.S_IMODE((tmp_path / "vectors").stat().st_mode) == 0o700


def test_a_journal_is_private(umask: int, tmp_path: Path) -> None:
    down = threading.Event()
    fence = ragfence.open(
        Down(MemoryFences(), down), objects=MemoryObjects(), policy=Policy(), journal=tmp_path / "kept" / "journal"
    )
    down.set()

    @fence.once(kind="ticket", key=str, on_store_error="open")
    def create(name: str) -> str:
        return name

    assert create("a").flags.journaled
    assert create("b").flags.journaled
    assert modes(tmp_path / "kept") == PRIVATE
    fence.inspector.journal.drop({entry.token for entry in fence.inspector.journal.entries()[:1]})  # written anew
    assert modes(tmp_path / "kept") == PRIVATE


def test_an_export_is_a_store_and_private(umask: int, tmp_path: Path) -> None:
    with use(tmp_path / ".ragfence") as fence:
        TenantExport(fence, tmp_path / "copy").run()
    assert modes(tmp_path / "copy") == PRIVATE


def test_a_spooled_batch_is_private(umask: int) -> None:
    spool = Spool(in_memory=10)
    spool.append(b"x" * 100)
    assert stat.S_IMODE(os.fstat(spool._file.fileno()).st_mode) == 0o600


def test_a_database_that_is_made_again_is_private(umask: int, tmp_path: Path) -> None:
    with use(tmp_path / ".ragfence") as fence:
        for file in (tmp_path / ".ragfence").glob("fences.db*"):
            file.unlink()
        assert fence.documents.get("d1").doc_id == "d1"
        assert modes(tmp_path / ".ragfence") == PRIVATE


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o770, 0o777, 0o2777, 0o2750])
def test_a_folder_that_somebody_made_keeps_its_mode_and_its_contents_are_private(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "made"
    (root / "objects").mkdir(parents=True)
    for folder in (root, root / "objects"):
        folder.chmod(mode)
    with use(root):
        pass
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (root, root / "objects")} == {mode}
    made = modes(root) - {("folder", oct(mode))}
    # A new folder inherits the setgid bit; it is of no use to a group that may not read.
    assert {(kind, oct(int(each, 8) & 0o777)) for kind, each in made} == PRIVATE


@pytest.mark.parametrize("mode", [TEAM, TEAM | 0o005])
def test_a_folder_with_setgid_that_its_group_may_write_is_for_the_group(umask: int, tmp_path: Path, mode: int) -> None:
    root = tmp_path / "team"
    root.mkdir()
    root.chmod(mode)
    with use(root) as fence:
        assert modes(root) - {("folder", oct(mode))} == SHARED - {("folder", oct(mode))}
        TenantExport(fence, root / "copy").run()
    with use(root):  # what is there is found, and left as it is
        pass
    assert modes(root) - {("folder", oct(mode))} <= SHARED


def test_a_file_of_sqlite_is_made_private_also_where_it_is_a_link_and_where_mknod_is_forbidden(
    umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fences.db").symlink_to(tmp_path / "elsewhere.db")
    SqliteFences(tmp_path / "fences.db").close()
    assert stat.S_IMODE((tmp_path / "elsewhere.db").stat().st_mode) == 0o600

    def forbidden(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "mknod", forbidden)
    make_empty_file(tmp_path / "other.db")
    assert stat.S_IMODE((tmp_path / "other.db").stat().st_mode) == 0o600
    (tmp_path / "other.db").write_text("kept")
    make_empty_file(tmp_path / "other.db")
    assert (tmp_path / "other.db").read_text() == "kept"


def test_an_object_of_a_private_folder_costs_no_request_for_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = LocalObjects(tmp_path / "o")

    def unexpected(*_: object) -> None:
        raise AssertionError("the mode is given when the file is made")

    monkeypatch.setattr(os, "chmod", unexpected)
    monkeypatch.setattr(os, "fchmod", unexpected)
    assert objects.put_new("a/b", b"x").won
