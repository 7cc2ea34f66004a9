"""Forks workers off one process that has imported everything, and tells what becomes of them.

    stdin    start JOB.json | kill JOB.json | freeze JOB.json | wake JOB.json
    stdout   born JOB.json PID | frozen JOB.json | awake JOB.json | dead JOB.json STATUS

A fresh interpreter needs a second to import redis and boto3, a fork some milliseconds. The nursery is the parent of
its workers, so a signal that it sends can never reach a stranger with a reused pid; when its stdin ends, so do they.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import importlib
import json
import os
import select
import signal
import sys
from pathlib import Path

from tests.chaos.work import Job
from tests.chaos.worker import Worker
from tests.documents.attack.work import DocumentJob
from tests.documents.attack.worker import DocumentWorker

_PR_SET_PDEATHSIG = 1
_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "wake": signal.SIGCONT}


class Nursery:
    def __init__(self) -> None:
        self._jobs: dict[int, str] = {}
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def run(self) -> None:
        waiting = b""
        while True:
            if select.select([0], [], [], 0.005)[0]:
                data = os.read(0, 65536)
                if not data:
                    return self._end()
                *commands, waiting = (waiting + data).split(b"\n")
                for command in commands:
                    self._obey(*command.decode().split(" ", 1))
            self._look()

    def _obey(self, command: str, job: str) -> None:
        if command == "start":
            self._start(job)
            return
        for pid, known in self._jobs.items():
            if known == job:
                os.kill(pid, _SIGNALS[command])

    def _start(self, job: str) -> None:
        if _guard(Path(job)) == "indexes":
            import tests.indexes.attack.worker  # noqa: F401  (LanceDB takes seconds, and few need it)
        pid = os.fork()
        if pid == 0:
            self._be_a_worker(job)
        self._jobs[pid] = job
        _say(f"born {job} {pid}")

    def _be_a_worker(self, job: str) -> None:
        code = 3
        try:
            if self._libc is not None:
                self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            errors = os.open(Path(job).with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            nothing = os.open(os.devnull, os.O_RDWR)
            for target, source in ((0, nothing), (1, errors), (2, errors)):
                os.dup2(source, target)
            faulthandler.enable()
            code = self._play(Path(job))
        finally:
            os._exit(code)

    def _play(self, job: Path) -> int:
        """The life of the forked process; its exit status."""
        return _worker(job).run()

    def _look(self) -> None:
        while self._jobs:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                _say(f"frozen {self._jobs[pid]}")
            elif os.WIFCONTINUED(status):
                _say(f"awake {self._jobs[pid]}")
            else:
                _say(f"dead {self._jobs.pop(pid)} {os.waitstatus_to_exitcode(status)}")

    def _end(self) -> None:
        for pid in self._jobs:
            os.kill(pid, signal.SIGKILL)
        for pid in self._jobs:
            os.waitpid(pid, 0)


def _worker(job: Path) -> Worker | DocumentWorker:
    guard = _guard(job)
    if guard == "indexes":
        from tests.indexes.attack.work import IndexJob
        from tests.indexes.attack.worker import IndexWorker

        return IndexWorker(IndexJob.load(job))
    return DocumentWorker(DocumentJob.load(job)) if guard == "documents" else Worker(Job.load(job))


def _guard(job: Path) -> str | None:
    guard: str | None = json.loads(job.read_text()).get("guard")
    return guard


def _say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def preload(*modules: str) -> None:
    """Everything a worker imports, and botocore's megabytes of JSON parsed once for all of them."""
    import botocore.loaders
    import botocore.session
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401
    from boto3.session import Session

    botocore.session.create_loader = functools.cache(botocore.loaders.create_loader)
    Session().client("s3", region_name="us-east-1", aws_access_key_id="none", aws_secret_access_key="none").close()
    for name in modules:
        importlib.import_module(name)


if __name__ == "__main__":
    preload()
    Nursery().run()
