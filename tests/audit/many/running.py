"""One attack: workers and drainers at work, killed and started again, until every worker has done its turns."""

from __future__ import annotations

import itertools
import random
import signal
from contextlib import AbstractContextManager
from pathlib import Path

from ragfence.audit.drain import DRAIN_POINTS
from tests.audit.many.judge import Verdict, judge
from tests.audit.many.plan import DrainerJob, Plan, WorkerJob
from tests.chaos.crew import Nursery, Overdue, Worker, environment, nursery, until
from tests.chaos.sites import Site
from tests.chaos.work import lines
from tests.chaos.worker import ANSWERED
from tests.notebooks import cells as notebooks

DRAINERS = 2
WITHIN_S = 3600.0


def cradle(folder: Path) -> AbstractContextManager[Nursery]:
    return nursery(folder, "tests.audit.many.cradle")


def attack(site: Site, nursery: Nursery, plan: Plan, *, kills: int, lease_s: float, effect_s: float) -> Verdict:
    """`kills` of workers, and as many of drainers; then the verdict."""
    site.prepare()
    people = _People(site, nursery, plan, lease_s=lease_s, effect_s=effect_s)
    dice = random.Random(f"{plan.seed}/kills")
    turns = sum(map(len, plan.turns()))
    due = sorted(dice.sample(range(turns // 20, turns), kills))
    try:
        people.begin(dice)
        for enough in due:
            until(
                lambda enough=enough: people.tend(dice) >= enough or people.done,
                f"{enough} turns",
                within_s=WITHIN_S,
            )
            people.kill_one(dice)
        until(lambda: people.tend(dice) and people.done, "the end of all workers", within_s=WITHIN_S)
        people.kill_drainers()
    finally:
        people.end()
    return judge(site, people.files("worker"), people.files("drainer"), kills=people.kills)


def notebook_problems(site: Site) -> list[str]:
    """Of the ledger that an attack leaves: it is read by people, too."""
    theirs = environment(RAGFENCE_TENANT=site.tenant)
    return list(notebooks.problems(site.folder, site.store, site.objects, theirs))


class _People:
    """Eight workers and two drainers, whoever plays them at the moment."""

    def __init__(self, site: Site, nursery: Nursery, plan: Plan, *, lease_s: float, effect_s: float) -> None:
        assert site.objects is not None
        self._site, self._nursery, self._plan = site, nursery, plan
        self._objects: str = site.objects
        self._lease_s, self._effect_s = lease_s, effect_s
        self._workers: list[Worker] = []
        self._drainers: list[Worker] = []
        self._lives = itertools.count()
        self._sizes: dict[Path, int] = {}
        self._answered = 0
        self.kills = {"worker": 0, "drainer": 0}

    def begin(self, dice: random.Random) -> None:
        self._workers = [self._worker(number, 0) for number in range(self._plan.workers)]
        self._drainers = [self._drainer(dice) for _ in range(DRAINERS)]

    def tend(self, dice: random.Random) -> int:
        """Starts again whoever was killed; how many turns were answered so far."""
        for at, worker in enumerate(self._workers):
            if worker.status == -signal.SIGKILL:
                self._workers[at] = self._worker(at, self._reached(at))
            elif worker.status not in (None, ANSWERED):
                raise Overdue(f"{worker} ended with {worker.status}: {self._last_words(worker)}")
        for at, drainer in enumerate(self._drainers):
            if drainer.status == -signal.SIGKILL:
                self.kills["drainer"] += 1
                self._drainers[at] = self._drainer(dice)
            elif drainer.status is not None:
                raise Overdue(f"{drainer} ended with {drainer.status}: {self._last_words(drainer)}")
        return self._answers()

    @property
    def done(self) -> bool:
        return all(worker.status == ANSWERED for worker in self._workers)

    def kill_one(self, dice: random.Random) -> None:
        """A worker at work, and one of the drainers."""
        for who, people in (("worker", self._workers), ("drainer", self._drainers)):
            alive = [each for each in people if each.status is None]
            if alive:
                dice.choice(alive).kill()
                self.kills[who] += who == "worker"  # drainers kill themselves, too: counted when they are found dead

    def kill_drainers(self) -> None:
        for drainer in self._drainers:
            drainer.kill()
            self.kills["drainer"] += 1
        until(lambda: all(drainer.status is not None for drainer in self._drainers), "the end of the drainers")

    def end(self) -> None:
        for each in (*self._workers, *self._drainers):
            if each.status is None:
                each.kill()

    def files(self, who: str) -> list[Path]:
        return sorted(self._site.folder.glob(f"{who}-*.lines"))

    def _worker(self, number: int, first_turn: int) -> Worker:
        name = f"worker-{number}-{next(self._lives):04d}"
        job = WorkerJob(
            store=self._site.store,
            objects=self._objects,
            tenant=self._site.tenant,
            plan=self._plan,
            number=number,
            run_id=name,
            first_turn=first_turn,
            evidence=str(self._site.folder / f"{name}.lines"),
            lease_s=self._lease_s,
            effect_s=self._effect_s,
        )
        return Worker(self._nursery, job, self._site.folder / f"{name}.json")

    def _drainer(self, dice: random.Random) -> Worker:
        name = f"drainer-{next(self._lives):04d}"
        # Every other one dies at a step of its work: between two drains is where most of its time goes.
        point = dice.choice(["", dice.choice(DRAIN_POINTS)])
        job = DrainerJob(
            store=self._site.store,
            objects=self._objects,
            tenant=self._site.tenant,
            point=point,
            nth=dice.randrange(1, 40),
            evidence=str(self._site.folder / f"{name}.lines"),
        )
        return Worker(self._nursery, job, self._site.folder / f"{name}.json")

    def _reached(self, number: int) -> int:
        """The turn at which the dead worker was: asked again by its successor."""
        turns = [line["turn"] for file in self.files(f"worker-{number}") for line in lines(str(file)) if "turn" in line]
        return max(turns, default=0)

    def _answers(self) -> int:
        """Asked again and again, so only what is new is read."""
        for file in self.files("worker"):
            with file.open("rb") as found:
                found.seek(self._sizes.get(file, 0))
                new = found.read()
            self._sizes[file] = self._sizes.get(file, 0) + len(new)
            self._answered += new.count(b'"answers"')
        return self._answered

    def _last_words(self, who: Worker) -> str:
        told = lines(who.job.evidence)
        return str(told[-1]) if told else who.path.with_suffix(".err").read_text()
