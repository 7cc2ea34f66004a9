"""Forks workers and drainers off one process that has imported everything; as `tests.chaos.nursery`, which see."""

from __future__ import annotations

from pathlib import Path

from tests.audit.many.plan import DrainerJob, loaded
from tests.audit.many.worker import LedgerDrainer, LedgerWorker
from tests.chaos.nursery import Nursery, preload

IMPORTED = ("ragfence.audit.drain", "ragfence.documents.documents", "ragfence.engine.once")


class Cradle(Nursery):
    def _play(self, job: Path) -> int:
        told = loaded(job)
        return LedgerDrainer(told).run() if isinstance(told, DrainerJob) else LedgerWorker(told).run()


if __name__ == "__main__":
    preload(*IMPORTED)
    Cradle().run()
