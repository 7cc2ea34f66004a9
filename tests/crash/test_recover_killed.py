"""A process is killed after a foreign effect and before its commit, and the fence store forgets: charged once."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import ragfence
from ragfence import Document
from tests import servers
from tests.chaos.crew import ROOT, environment

WORKER = textwrap.dedent("""
    import contextlib, sys
    from pathlib import Path
    import ragfence
    from ragfence.testing import kill_at

    store, objects, bank, sequence, point = sys.argv[1:]
    bank, sequence = Path(bank), int(sequence)
    policy = ragfence.Policy.from_mapping({"lease": {"ttl_s": 2.0}, "wait": {"deadline_s": 60.0}})
    fence = ragfence.open(store, objects=objects, policy=policy)

    def recover(order):
        with bank.open("a") as file:
            file.write(f"asked {order}\\n")
        return ragfence.Recovered("theirs") if f"charged {order}\\n" in bank.read_text() else None

    @fence.once(kind="charge", key=lambda order: (order, "", sequence if sequence else None), recover=recover)
    def charge(order):
        with bank.open("a") as file:
            file.write(f"charged {order}\\n")
        return "ours"

    with kill_at(point) if point else contextlib.nullcontext():
        print(charge("o-1").result)
    fence.close()
""")


@dataclass
class Place:
    store: str
    folder: Path
    server: servers.RedisServer | None = None

    @property
    def bank(self) -> Path:
        return self.folder / "bank"

    def run(self, sequence: int, point: str = "") -> subprocess.CompletedProcess[str]:
        self.bank.touch()
        arguments = (self.store, str(self.folder / "objects"), str(self.bank), str(sequence), point)
        return subprocess.run(
            [sys.executable, "-c", WORKER, *arguments],
            env=environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    def open(self) -> ragfence.Fence:
        return ragfence.open(self.store, objects=self.folder / "objects")

    def kept(self) -> Path:
        """The file that the server loads when it starts."""
        assert self.server is not None
        with self.server.client() as client:
            folder, name = client.config_get("dir")["dir"], client.config_get("dbfilename")["dbfilename"]
        return Path(folder) / name


@pytest.fixture
def sqlite(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "fences.db"), tmp_path)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Place]:
    with servers.valkey() as server:
        yield Place(server.url, tmp_path, server)


def flushed(place: Place, before: Path) -> None:
    assert place.server is not None
    with place.server.client() as client:
        client.flushall()


def empty(place: Place, before: Path) -> None:
    assert place.server is not None
    kept = place.kept()
    place.server.kill()
    kept.unlink(missing_ok=True)
    place.server.start()


def old_rdb(place: Place, before: Path) -> None:
    assert place.server is not None
    kept = place.kept()
    place.server.kill()
    shutil.copy(before, kept)
    place.server.start()


def deleted(place: Place, before: Path) -> None:
    for end in ("", "-wal", "-shm"):
        Path(place.store + end).unlink(missing_ok=True)


def hydrated(place: Place, before: Path) -> None:
    with place.open() as fence:
        fence.hydrate()


def purged(place: Place, before: Path) -> None:
    with place.open() as fence:
        fence.documents.purge("d")


EPOCHS = ("a hydration", "a purge of a document")
"""what voids the leases of operations with a sequence, and of no others"""
LOSSES: dict[str, tuple[str, Callable[[Place, Path], None]]] = {
    "FLUSHALL": ("valkey", flushed),
    "an empty restart": ("valkey", empty),
    "an old RDB": ("valkey", old_rdb),
    "a deleted file": ("sqlite", deleted),
    "a hydration": ("sqlite", hydrated),
    "a purge of a document": ("valkey", purged),
}


@pytest.mark.parametrize(
    ("loss", "sequence"),
    [(loss, 0) for loss in LOSSES if loss not in EPOCHS] + [(loss, 5) for loss in ("FLUSHALL", *EPOCHS)],
)
def test_a_foreign_system_is_charged_once(request: pytest.FixtureRequest, loss: str, sequence: int) -> None:
    where, lose = LOSSES[loss]
    place: Place = request.getfixturevalue(where)
    before = place.folder / "before.rdb"
    with place.open() as fence:
        fence.documents.ingest(Document("d", "somebody else's document"))
    if place.server is not None:
        with place.server.client() as client:
            client.save()
        shutil.copy(place.kept(), before)
    killed = place.run(sequence, "after_effect")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert place.bank.read_text() == "charged o-1\n"
    lose(place, before)
    done = place.run(sequence)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "theirs\n"
    assert place.bank.read_text() == "charged o-1\nasked o-1\n"
    with place.open() as fence:
        report = fence.audit.check()
        assert report.ok, str(report)
