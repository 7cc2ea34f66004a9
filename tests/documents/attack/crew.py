"""The processes of one attack on documents, as seen by the one who commands them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.chaos.crew import Nursery, Worker, until
from tests.chaos.sites import Site
from tests.chaos.work import Strike, lines
from tests.documents.attack.corpus import Part
from tests.documents.attack.work import READY, DocumentJob


class DocumentCrew:
    """Starts processes that ingest on a site, and ends them all at the end."""

    def __init__(self, nursery: Nursery, site: Site, *, lease_s: float = 30.0, lock_ms: int = 1000) -> None:
        self._nursery, self._site = nursery, site
        self.lease_s, self.lock_ms = lease_s, lock_ms
        self.trace = site.folder / "chunked"
        self.trace.mkdir()
        self.workers: list[Worker] = []
        assert site.objects is not None
        self._objects = site.objects

    def __enter__(self) -> DocumentCrew:
        return self

    def __exit__(self, *_: object) -> None:
        alive = [worker for worker in self.workers if worker.status is None]
        for worker in alive:
            worker.kill()
        until(lambda: all(worker.status is not None for worker in alive), "they are dead", within_s=30.0)

    def start(self, *works: Sequence[Part], strike: Strike | None = None, **more: Any) -> list[Worker]:
        """A process for each; they begin at the same moment, when all of them stand ready."""
        go = self._site.folder / f"go-{len(self.workers):02d}"
        started = []
        for work in works:
            number = len(self.workers)
            job = DocumentJob(
                store=self._site.store,
                objects=self._objects,
                tenant=self._site.tenant,
                parts=tuple(work),
                trace=str(self.trace),
                answers=str(self._site.folder / f"ingester-{number:02d}.answers"),
                go=str(go),
                lease_s=self.lease_s,
                lock_ms=self.lock_ms,
                strike=strike,
                **more,
            )
            worker = Worker(self._nursery, job, self._site.folder / f"ingester-{number:02d}.json")
            self.workers.append(worker)
            started.append(worker)
        until(lambda: all(ready(worker) or worker.status is not None for worker in started), f"{started} stand ready")
        go.touch()
        return started

    def wait(self, workers: Sequence[Worker]) -> None:
        until(lambda: all(worker.status is not None for worker in workers), f"the end of {workers}")

    def wait_struck(self, workers: Sequence[Worker]) -> None:
        until(lambda: all(worker.struck for worker in workers), f"{workers} come to {workers[0].job.strike}")

    def run(self, *works: Sequence[Part], **more: Any) -> list[Worker]:
        workers = self.start(*works, **more)
        self.wait(workers)
        return workers


def ready(worker: Worker) -> bool:
    return any(line["event"] == READY for line in lines(worker.job.answers))
