"""Forks workers and drainers off one process that has imported everything; as `tests.chaos.nursery`, which see."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
from pathlib import Path

from tests.audit.many.plan import DrainerJob, loaded
from tests.audit.many.worker import LedgerDrainer, LedgerWorker
from tests.chaos.nursery import _PR_SET_PDEATHSIG, Nursery, _preload

IMPORTED = ("ragfence.audit.draining", "ragfence.documents.guard", "ragfence.engine.once")


class Cradle(Nursery):
    def _be_a_worker(self, job: str) -> None:
        code = 3
        try:
            if self._libc is not None:
                self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            said = os.open(Path(job).with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, said), (2, said)):
                os.dup2(source, target)
            faulthandler.enable()
            told = loaded(Path(job))
            code = LedgerDrainer(told).run() if isinstance(told, DrainerJob) else LedgerWorker(told).run()
        finally:
            os._exit(code)


if __name__ == "__main__":
    _preload()
    for name in IMPORTED:
        importlib.import_module(name)
    Cradle().run()
