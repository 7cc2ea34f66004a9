"""The workers of one scenario, as seen by the one who commands them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from tests.chaos.sites import Site
from tests.chaos.work import OPENING, SETTLING, Job, Strike, Task, lines
from tests.servers import S3_ACCESS_KEY, S3_REGION, S3_SECRET_KEY

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 150.0

stopping = threading.Event()
"""set when the whole run shall end now; whoever waits for something raises `Stopped`"""


class Stopped(Exception):
    pass


class Overdue(Exception):
    """Something that had to happen did not, within a time that is long enough for anything."""


def until(condition: Callable[[], Any], what: str, *, within_s: float = WITHIN_S) -> Any:
    give_up_at = time.monotonic() + within_s
    while not (found := condition()):
        if stopping.is_set():
            raise Stopped
        if time.monotonic() >= give_up_at:
            raise Overdue(f"not within {within_s:.0f} s: {what}")
        time.sleep(0.01)
    return found


def storm(start: Callable[[int], Iterable[Worker]], strikes: int, *, at_once: int, asleep_s: float) -> None:
    """Keeps `at_once` workers going, each struck somewhere, as often as `strikes`; frozen ones are woken much later.

    `start` starts the next, given how many strikes are left.
    """
    working: list[Worker] = []
    frozen_at: dict[Worker, float] = {}
    left = strikes

    def tend() -> bool:
        nonlocal left
        for worker in list(working):
            if worker.status is not None:
                working.remove(worker)
            elif worker.frozen and time.monotonic() - frozen_at.setdefault(worker, time.monotonic()) > asleep_s:
                worker.wake()
        while left and sum(not worker.frozen for worker in working) < at_once:
            working.extend(start(left))
            left -= 1
        return not left and not working

    until(tend, "the end of the storm")


class Nursery:
    """The process that forks the workers; see `tests.chaos.nursery`. May be shared between threads."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._lock = threading.Lock()
        self.pids: dict[str, int] = {}
        self.frozen: set[str] = set()
        self.statuses: dict[str, int] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def say(self, command: str, job: Path) -> None:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(f"{command} {job}\n".encode())
            self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event, job, *rest = line.decode().split()
            if event == "born":
                self.pids[job] = int(rest[0])
            elif event == "frozen":
                self.frozen.add(job)
            elif event == "awake":
                self.frozen.discard(job)
            else:
                self.statuses[job] = int(rest[0])


def environment(**more: str) -> dict[str, str]:
    """The credentials of our own servers, and nothing of the machine's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RAGFENCE_"))}
    return kept | {
        "AWS_ACCESS_KEY_ID": S3_ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": S3_SECRET_KEY,
        "AWS_REGION": S3_REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_CONFIG_FILE": os.devnull,
        "PYTHONPATH": str(ROOT),
        **more,
    }


@functools.cache
def _pycache() -> str:
    """Bytecode of all nurseries of this process: each would compile everything anew, which takes half a minute."""
    folder = tempfile.mkdtemp(prefix="ragfence-pycache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextlib.contextmanager
def nursery(folder: Path, module: str = "tests.chaos.nursery") -> Iterator[Nursery]:
    """`module`: who forks; what its workers do is its own affair."""
    env = environment(PYTHONPYCACHEPREFIX=_pycache())
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        cwd=folder,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the one who commands; he tells everybody else
    )
    made = Nursery(process)
    try:
        yield made
    finally:
        made.close()


class Worker:
    def __init__(self, nursery: Nursery, job: Any, path: Path) -> None:
        """`job`: a `Job`, or a `DocumentJob`; the nursery knows which worker does it."""
        self._nursery, self.job, self.path = nursery, job, path
        job.save(path)
        nursery.say("start", path)
        self._known = str(path)
        until(lambda: self._known in nursery.pids, "the worker is born", within_s=120.0)

    def __repr__(self) -> str:
        return f"{self.path.stem} (pid {self._nursery.pids[self._known]})"

    @property
    def status(self) -> int | None:
        return self._nursery.statuses.get(self._known)

    @property
    def frozen(self) -> bool:
        return self._known in self._nursery.frozen and self.status is None

    @property
    def struck(self) -> bool:
        """It reached the point at which it was told to kill or to freeze itself."""
        if self.status not in (None, -signal.SIGKILL):
            raise Overdue(f"{self} ended with {self.status} and never came to {self.job.strike}")
        return self.frozen or self.status is not None

    def freeze(self) -> None:
        self._nursery.say("freeze", self.path)
        until(lambda: self._known in self._nursery.frozen or self.status is not None, f"{self} is frozen")

    def wake(self) -> None:
        self._nursery.say("wake", self.path)

    def kill(self) -> None:
        self._nursery.say("kill", self.path)


class Crew:
    """Starts workers on a site, and ends them all when the scenario ends."""

    def __init__(self, nursery: Nursery, site: Site, *, lease_s: float, lock_ms: int = 1000) -> None:
        self.nursery, self._site = nursery, site
        self.lease_s, self.lock_ms = lease_s, lock_ms
        self.effects = site.folder / "effects.jsonl"
        self.effects.touch()
        self._counted = [0, 0]
        self.workers: list[Worker] = []

    def start(self, tasks: Sequence[Task], strike: Strike | None = None, **more: Any) -> Worker:
        number = len(self.workers)
        job = Job(
            store=self._site.store,
            objects=self._site.objects,
            s3_timeout_s=self._site.s3_timeout_s,
            tenant=self._site.tenant,
            tasks=tuple(tasks),
            effects=str(self.effects),
            answers=str(self._site.folder / f"worker-{number:02d}.answers"),
            lease_s=self.lease_s,
            lock_ms=self.lock_ms,
            strike=strike,
            **more,
        )
        worker = Worker(self.nursery, job, self._site.folder / f"worker-{number:02d}.json")
        self.workers.append(worker)
        return worker

    def wait(self, *workers: Worker) -> None:
        """Until these workers have ended, in whatever way; the evidence tells whether it was a good one."""
        until(lambda: all(worker.status is not None for worker in workers), f"the end of {workers}")

    def wait_struck(self, *workers: Worker) -> None:
        until(lambda: all(worker.struck for worker in workers), f"{workers} come to {workers[0].job.strike}")

    def on(self, site: Site) -> Crew:
        """The same crew with its eyes on another site; its workers count here too."""
        other = copy(self)
        other._site = site
        return other

    def performed(self) -> int:
        """How many effects were performed so far. Asked again and again, so only what is new is read."""
        with self.effects.open("rb") as file:
            file.seek(self._counted[0])
            new = file.read()
        self._counted[0] += len(new)
        self._counted[1] += new.count(b"\n")
        return self._counted[1]

    def asked(self) -> list[Task]:
        """Everything that any worker has asked for so far, answered or not, each once."""
        names: dict[str, None] = {}
        for path in (str(self.effects), *(worker.job.answers for worker in self.workers)):
            for line in lines(path):
                names[line["task"]] = None
        return [Task.named(name) for name in names if name not in (OPENING, SETTLING)]

    def end(self) -> None:
        alive = [worker for worker in self.workers if worker.status is None]
        for worker in alive:
            worker.kill()
        give_up_at = time.monotonic() + 10.0
        while any(worker.status is None for worker in alive) and time.monotonic() < give_up_at:
            time.sleep(0.01)
