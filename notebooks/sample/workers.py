"""The processes of the sample. Each executes the jobs that it receives over a pipe, until it is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, ClassVar

import ragfence
from notebooks.sample import POLICY
from ragfence.errors import RagfenceError
from ragfence.indexes.spec import IndexSpec
from ragfence.stores.sqlite import SqliteFences
from ragfence.testing import freeze_at, kill_at

# The parent has one thread and has not loaded LanceDB, so it can fork. Spawning takes half a second per process.
FORK = multiprocessing.get_context("fork")


class Clock:
    """The clock of the machine, moved ahead. All processes share it."""

    def __init__(self) -> None:
        self._ahead_ms = FORK.RawValue("q", 0)

    def __call__(self) -> int:
        return time.time_ns() // 1_000_000 + int(self._ahead_ms.value)

    def move_to(self, at_ms: int) -> None:
        if at_ms > self():  # the clock never goes back
            self._ahead_ms.value = at_ms - time.time_ns() // 1_000_000


class Worker:
    """A process with its own fence."""

    ends: ClassVar[list[Connection]] = []
    """The pipe ends that a forked process inherits and must close: a pipe ends when all copies are closed."""

    def __init__(self, name: str, home: Path, clock: Clock) -> None:
        self.name = name
        self._pipe, theirs = FORK.Pipe()
        self.ends.append(self._pipe)
        self._process: ForkProcess = FORK.Process(target=_work, args=(theirs, name, home, clock), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, what: str, *arguments: Any, **options: Any) -> Worker:
        self._pipe.send((what, arguments, options))
        return self

    def end(self) -> Any:
        done: Any = self._pipe.recv()
        if isinstance(done, BaseException):
            raise done
        return done

    def do(self, what: str, *arguments: Any, **options: Any) -> Any:
        return self.begin(what, *arguments, **options).end()

    def wait_until_killed(self) -> None:
        self._process.join(30)
        assert self._process.exitcode == -signal.SIGKILL, f"{self.name} exited with {self._process.exitcode}"

    def wait_until_frozen(self) -> None:
        os.waitid(os.P_PID, self._pid, os.WSTOPPED)

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def stop(self) -> None:
        if self._process.is_alive():
            with contextlib.suppress(BrokenPipeError):
                self._pipe.send(None)
            self._process.join(30)

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid


def _work(pipe: Connection, name: str, home: Path, clock: Clock) -> None:
    for end in Worker.ends:
        end.close()
    fences = SqliteFences(home / "fences.db", clock=clock)
    journal = home / "journal"
    fence = ragfence.open(
        fences, objects=home / "objects", policy=POLICY, owner=name, run_id="sample", journal=journal, observe=()
    )
    with fence:
        jobs = Jobs(fence)
        while job := _next(pipe):
            what, arguments, options = job
            try:
                pipe.send(getattr(jobs, what)(*arguments, **options))
            except Exception as failed:  # noqa: BLE001  # raised in the process that waits
                pipe.send(failed)


def _next(pipe: Connection) -> Any:
    """The next job, or None if there are no more or the parent is gone."""
    with contextlib.suppress(EOFError):
        return pipe.recv()


class Jobs:
    def __init__(self, fence: ragfence.Fence) -> None:
        self._fence = fence

    def tickets(self, requests: Sequence[dict[str, Any]], *, kill: str = "", freeze: str = "") -> None:
        """`kill` and `freeze` name the crash point at which this process is killed or frozen."""

        @self._fence.once(kind="ticket", key=lambda request: request["id"])
        def create(request: dict[str, Any]) -> str:
            time.sleep(request.get("takes_ms", 0) / 1000)
            if request.get("broken"):
                raise ConnectionError("the help desk does not answer")
            return f"{request['id']} is with {request.get('team', 'support')}"

        with _hit(kill, freeze):
            for request in requests:
                # Conflicts, quarantined keys and failures are what the notebooks show.
                with contextlib.suppress(RagfenceError, ConnectionError):
                    create(request)

    def webhooks(self, orders: Sequence[str]) -> None:
        for order in orders:
            event = ragfence.Operation(kind="webhook", source_type="shop", source_id=order)
            with self._fence.claim(event, payload={"order": order}, verdict=True) as claimed:
                if claimed.is_new:
                    time.sleep(0.002)
                    claimed.seal(effect_id=f"shipped-{order}")

    def prices(self, numbers: Sequence[int]) -> None:
        """Ingests revisions that their source numbers: a late, older one changes nothing."""
        for number in numbers:
            page = ragfence.Document("prices", f"The price list, edition {number}.", sequence=number)
            with contextlib.suppress(RagfenceError):
                self._fence.documents.ingest(page)

    def sync(self, folder: Path) -> None:
        self._fence.documents.sync(folder, prune="scoped")

    def ingest(self, folder: Path, *, kill: str = "") -> None:
        """Sends all pages, as a crawler does."""
        pages = [
            ragfence.Document(path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8"))
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        ]
        with _hit(kill, ""):
            self._fence.documents.ingest_many(pages)

    def build(self, *, metric: str = "cosine", kill: str = "") -> str:
        with _hit(kill, ""):
            return self._fence.indexes.build(IndexSpec(metric=metric)).index_hash  # type: ignore[arg-type]

    def swap(self, alias: str, index_hash: str, reason: str) -> None:
        self._fence.aliases.swap(alias, index_hash, reason=reason)

    def rollback(self, alias: str, reason: str) -> None:
        self._fence.aliases.rollback(alias, reason=reason)

    def purge(self) -> None:
        purged = self._fence.purge_expired()
        while purged.after:
            purged = self._fence.purge_expired(after=purged.after)

    def drain(self, *, kill: str = "") -> None:
        with _hit(kill, ""):
            self._fence.audit.drain()

    def check(self) -> str:
        return str(self._fence.audit.check())


@contextlib.contextmanager
def _hit(kill: str, freeze: str) -> Any:
    with kill_at(kill) if kill else contextlib.nullcontext(), freeze_at(freeze) if freeze else contextlib.nullcontext():
        yield
