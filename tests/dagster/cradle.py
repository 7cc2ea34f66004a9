"""Forks workers off one process that has imported everything: `python -m tests.dagster.cradle HOME`.

    stdin    start JOB.json | 15 JOB.json (a signal)
    files    JOB.status, with how it ended

Imports and a new DAGSTER_HOME take ten seconds of a process that then works for one. A home is made once, and copied.
The cradle is the parent of its workers, so a signal of its can never reach a stranger; when its stdin ends, so do they.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
from pathlib import Path

import dagster as dg
import lancedb  # noqa: F401  (takes seconds)

from tests.dagster.work import RunJob
from tests.dagster.worker import main


class Cradle:
    def __init__(self, home: Path) -> None:
        self._home = home
        self._pids: dict[str, int] = {}
        os.environ["DAGSTER_HOME"] = str(home)
        with dg.DagsterInstance.get() as instance:
            instance.get_runs(limit=1)  # so that its tables are there

    def rock(self) -> None:
        waiting = b""
        while True:
            if select.select([0], [], [], 0.01)[0]:
                if not (data := os.read(0, 65536)):
                    break
                *lines, waiting = (waiting + data).split(b"\n")
                for line in lines:
                    command, _, path = line.decode().partition(" ")
                    if command == "start":
                        self._start(path)
                    elif path in self._pids:
                        os.kill(self._pids[path], int(command))
            self._look()
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)

    def _start(self, path: str) -> None:
        job = RunJob.load(Path(path))
        if not Path(job.home).exists():
            shutil.copytree(self._home, job.home)
        pid = os.fork()
        if pid:
            self._pids[path] = pid
            return
        code = 3
        try:
            errors = os.open(Path(path).with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for target, source in ((0, nothing), (1, errors), (2, errors)):
                os.dup2(source, target)
            code = main(job)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _look(self) -> None:
        for path, pid in list(self._pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._pids[path]
                told = Path(path).with_suffix(".status")
                told.with_suffix(".part").write_text(str(os.waitstatus_to_exitcode(status)))
                told.with_suffix(".part").rename(told)


if __name__ == "__main__":
    Cradle(Path(sys.argv[1])).rock()
