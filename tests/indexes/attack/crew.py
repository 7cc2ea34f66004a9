"""The processes of one attack on builds, as seen by the one who commands them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.crew import Crew, Worker, until
from tests.chaos.sites import Site
from tests.chaos.work import Strike
from tests.documents.attack.crew import ready
from tests.indexes.attack.work import IndexJob, Step


class IndexCrew:
    """Starts processes on a site. They are the crew's, who ends them all."""

    def __init__(self, crew: Crew, site: Site) -> None:
        self.crew, self._site = crew, site
        self.trace = site.folder / "embedded"
        self.trace.touch()

    @property
    def workers(self) -> list[Worker]:
        return self.crew.workers

    def start(self, *works: Sequence[Step], strike: Strike | None = None, **more: Any) -> list[Worker]:
        """A process for each; they begin at the same moment, when all of them stand ready."""
        folder, first = self._site.folder, len(self.workers)
        go = folder / f"go-{first:03d}"
        assert self._site.objects is not None
        for number, steps in enumerate(works, first):
            job = IndexJob(
                store=self._site.store,
                objects=self._site.objects,
                tenant=self._site.tenant,
                parts=(),
                steps=tuple(steps),
                trace=str(self.trace),
                answers=str(folder / f"builder-{number:03d}.answers"),
                go=str(go),
                lease_s=self.crew.lease_s,
                lock_ms=self.crew.lock_ms,
                strike=strike,
                **more,
            )
            self.workers.append(Worker(self.crew.nursery, job, folder / f"builder-{number:03d}.json"))
        started = self.workers[first:]
        until(lambda: all(ready(worker) or worker.status is not None for worker in started), f"{started} stand ready")
        go.touch()
        return started

    def run(self, *works: Sequence[Step], **more: Any) -> list[Worker]:
        workers = self.start(*works, **more)
        self.crew.wait(*workers)
        return workers

    def wake(self, workers: Sequence[Worker]) -> None:
        """Those who are frozen; then until all have ended."""
        for worker in workers:
            if worker.frozen:
                worker.wake()
        self.crew.wait(*workers)

    def embeds(self) -> Counter[str]:
        """How often each text was embedded, over all processes; what was searched for is none of it."""
        return Counter(line for line in _lines(self.trace) if not line.startswith("where is "))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
