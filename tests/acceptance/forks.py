"""Processes forked off one that has imported everything: a fresh interpreter needs seconds on a busy machine."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.chaos.crew import until

PRELOADED = [
    "redis",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite",
    "tests.acceptance.locks",
    "tests.acceptance.worker",
    "tests.outbox.crash_worker",
    "tests.queues.crash_worker",
]
_PR_SET_PDEATHSIG = 1


def fork(life: Callable[..., None], *args: Any) -> BaseProcess:
    """Starts `life(*args)`, a function of a module, in a process of its own. It dies with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    made = context.Process(target=_live, args=(life, *args), daemon=True)
    made.start()
    return made


def wait_frozen(process: BaseProcess) -> None:
    stat = Path(f"/proc/{process.pid}/stat")

    def frozen() -> bool:
        if process.exitcode is not None:
            raise RuntimeError(f"the process ended with {process.exitcode} and was never frozen")
        return stat.read_text().rpartition(")")[2].split()[0] == "T"

    until(frozen, "the process is frozen")


def wake(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)


def wait_ended(process: BaseProcess) -> int:
    """The exit status."""
    until(lambda: process.exitcode is not None, "the end of the process")
    assert process.exitcode is not None
    return process.exitcode


def end(*processes: BaseProcess) -> None:
    """Whatever is left of them, frozen or not."""
    for process in processes:
        process.kill()
        process.join()


def _live(life: Callable[..., None], *args: Any) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    life(*args)
