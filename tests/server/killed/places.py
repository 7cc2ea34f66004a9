"""Servers on a site: started, killed, started again on the same port and the same stores."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ragfence
from ragfence.server.apikeys import ApiKeys
from ragfence.server.scopes import Role
from tests.chaos.crew import Nursery, Worker, environment, nursery, until
from tests.chaos.sites import Site
from tests.servers import free_ports

LEASE_S = 0.5


def cradle(folder: Path) -> AbstractContextManager[Nursery]:
    return nursery(folder, "tests.server.killed.cradle")


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


@dataclass(frozen=True, slots=True)
class ServerJob:
    argv: tuple[str, ...]
    trap: str

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"argv": self.argv, "trap": self.trap}))


class Place:
    """A site, a policy and an API key: what a server needs."""

    def __init__(self, site: Site, folder: Path | None = None, *, lease_s: float = LEASE_S, **policy: Any) -> None:
        """`folder`: for the files of its servers and clients; that of the site, unless there are several places."""
        self.site = site
        self.folder = folder or site.folder
        self.port = free_ports(1)[0]
        # Strangers' contents are compared by sha256, and whoever opens the stores must say the same.
        rules: Mapping[str, Any] = {
            "content_hash": "sha256",
            "lease": {"ttl_s": lease_s, "max_attempts": 1000},
            "documents": {"chunk_size": 200},
            # A random document may become much shorter, and its index smaller than the gate allows.
            "indexes": {"max_shrinkage": 1.0},
            **policy,
        }
        self.policy = ragfence.Policy.from_mapping(rules)
        self._file = self.folder / "ragfence.yml"
        self._file.write_text(json.dumps(rules))  # JSON is YAML
        with self.opened() as (_, objects):
            self.token = ApiKeys(objects).create(site.tenant, Role.ADMIN).token

    @property
    def argv(self) -> tuple[str, ...]:
        stores = ("--store", self.site.store, "--objects", str(self.site.objects), "--policy", str(self._file))
        return ("serve", "--port", str(self.port), "--json", *stores)

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[ragfence.Fence, Any]]:
        """The stores as the judge sees them: past the server."""
        objects = self.site._objects()
        assert objects is not None
        with ragfence.open(self.site.store, objects=objects, tenant=self.site.tenant, policy=self.policy) as fence:
            yield fence, objects


class Forked:
    """A server out of the cradle, with traps at the points of the protocol."""

    def __init__(self, nursery: Nursery, place: Place) -> None:
        self._nursery, self._place = nursery, place
        self.port, self.token = place.port, place.token
        self._trap = place.folder / "trap"
        self._numbers = itertools.count()
        self._worker: Worker | None = None
        self.starts = 0

    def start(self) -> None:
        path = self._place.folder / f"server-{self.starts:03d}.json"
        self._worker = Worker(self._nursery, ServerJob(self._place.argv, str(self._trap)), path)
        self.starts += 1

    def kill(self) -> None:
        assert self._worker is not None
        self._worker.kill()
        until(lambda: self.status is not None, "the server is dead", within_s=30.0)

    def wait_listening(self) -> None:
        """Or until it is dead again."""
        until(lambda: self.status is not None or is_listening(self.port), "the server listens", within_s=60.0)

    @property
    def status(self) -> int | None:
        return self._worker.status if self._worker else None

    @property
    def said(self) -> str:
        assert self._worker is not None
        return self._worker.path.with_suffix(".err").read_text(errors="replace")[-3000:]

    def set_trap(self, point: str, times: int) -> None:
        # Numbered, so that the same trap set again counts from the start; in one step, so that nobody reads half of it.
        part = self._trap.with_suffix(".part")
        part.write_text(f"{point} {times} {next(self._numbers)}")
        part.rename(self._trap)

    def spring_trap(self) -> None:
        self._trap.unlink(missing_ok=True)

    def end(self) -> None:
        if self._worker is not None and self.status is None:
            self.kill()


class Launched:
    """`python -m ragfence serve`, as anybody would start it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.port, self.token = place.port, place.token
        self._process: subprocess.Popen[bytes] | None = None
        self._log = place.folder / "server.log"
        self.starts = 0

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ragfence", *self._place.argv, "--workers", "1"],
                cwd=self._place.folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.starts += 1

    def wait_listening(self) -> None:
        until(lambda: self.status is not None or is_listening(self.port), "the server listens", within_s=60.0)

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    @property
    def status(self) -> int | None:
        return self._process.poll() if self._process else None

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def end(self) -> None:
        if self._process is not None and self.status is None:
            self.kill()
