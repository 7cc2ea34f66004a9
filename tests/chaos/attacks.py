"""What is done to the workers and their stores. Each attack returns the tasks that must have taken effect once."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ragfence.engine.crash_points import AFTER_COMMIT, AFTER_EFFECT, OPERATION_POINTS
from tests.chaos.crew import Crew, Worker, until
from tests.chaos.crew import storm as crew_storm
from tests.chaos.sites import Site
from tests.chaos.work import Strike, Task, shuffled, tasks
from tests.faulty_http import Fault, FaultyProxy


@dataclass(frozen=True, slots=True)
class Outage:
    """Something was away, by the clock that the workers' answers go by."""

    what: str
    since_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Stage:
    site: Site
    crew: Crew
    dice: random.Random
    outages: list[Outage] = field(default_factory=list)

    @contextlib.contextmanager
    def away(self, what: str) -> Iterator[None]:
        since_s = time.monotonic()
        yield
        self.outages.append(Outage(what, since_s, time.monotonic()))


Attack = Callable[[Stage], list[Task]]


def strike(action: str, point: str) -> Attack:
    """Two workers stop at the point, one with a plain task and one with a revision; two others must go on."""

    def attack(stage: Stage) -> list[Task]:
        single, move = [Task("k-first"), Task("k-hit")], [Task("s-first", 1), Task("s-hit", 1)]
        rest = tasks(keyed=5, sources=2, revisions=2)
        stage.site.prepare()
        hit = Strike(action, point, task=1)
        victims = [stage.crew.start([*own, *shuffled(rest, stage.dice)], hit) for own in (single, move)]
        stage.crew.wait_struck(*victims)
        all_tasks = [*single, *move, *rest]
        _rescue(stage, all_tasks)
        _wake(stage, *victims)
        return all_tasks

    return attack


def strike_hydration(action: str, point: str) -> Attack:
    """The store forgets everything while effects are under way; whoever rebuilds it stops at the point."""

    def attack(stage: Stage) -> list[Task]:
        all_tasks = tasks(keyed=8, sources=3, revisions=2)
        singles, moves = all_tasks[:8], all_tasks[8:]
        before = stage.crew.start([*singles[:4], *moves[:2]])
        stage.crew.wait(before)
        sleepers = [
            stage.crew.start([singles[4]], Strike("freeze", AFTER_EFFECT, task=0)),
            stage.crew.start([moves[2]], Strike("freeze", AFTER_EFFECT, task=0)),
        ]
        stage.crew.wait_struck(*sleepers)
        stage.site.forget()
        victim = stage.crew.start(shuffled(all_tasks, stage.dice), Strike(action, point))
        stage.crew.wait_struck(victim)
        _rescue(stage, all_tasks)
        _wake(stage, victim, *sleepers)
        return all_tasks

    return attack


def disturb(what: str, *, times: int = 3, keyed: int = 40) -> Attack:
    """Workers under load; again and again the store is flushed, restarted or killed, and somebody new joins."""

    def attack(stage: Stage) -> list[Task]:
        all_tasks = tasks(keyed=keyed, sources=4, revisions=3)
        acts = {"flush": stage.site.forget, "restart": stage.site.restart, "crash": stage.site.crash}
        # Two go the same way, so that there is always somebody who waits for an effect under way.
        same, other = shuffled(all_tasks, stage.dice), shuffled(all_tasks, stage.dice)
        workers = [stage.crew.start(way, effect_s=0.06) for way in (same, same, other)]
        for enough in sorted(stage.dice.sample(range(1, len(all_tasks)), times)):
            until(lambda enough=enough: stage.crew.performed() >= enough or _ended(workers), f"{enough} effects")
            acts[what]()
            workers.append(stage.crew.start(same, effect_s=0.06))
        stage.crew.wait(*workers)
        return all_tasks

    return attack


def storm(*, strikes: int = 10) -> Attack:
    """Three workers at a time, each killed or frozen at a point of its own, and frozen ones woken much later."""

    def attack(stage: Stage) -> list[Task]:
        all_tasks = tasks(keyed=30, sources=4, revisions=3)
        points = [point for point in OPERATION_POINTS if not (stage.site.solo and point == AFTER_COMMIT)]

        def start(left: int) -> list[Worker]:
            action = stage.dice.choice(["kill", "freeze"])
            hit = Strike(action, stage.dice.choice(points), task=stage.dice.randrange(len(all_tasks) // 2))
            return [stage.crew.start(shuffled(all_tasks, stage.dice), hit)]

        crew_storm(start, strikes, at_once=3, asleep_s=1.5 * stage.crew.lease_s)
        return all_tasks

    return attack


ODDS = {
    "refused": {Fault.answer(status): 0.06 for status in (500, 503, 409, 412)},
    "done, but refused": {Fault.act_then_answer(status): 0.06 for status in (500, 503, 409, 412)},
    "timeouts": {Fault.hang(): 0.03, Fault.hang(forward=True): 0.03, Fault.delay(0.3): 0.1},
    "dropped": {Fault.drop_request(): 0.08, Fault.drop_reply(): 0.1, Fault.cut_reply(): 0.06},
}
ODDS["everything"] = {fault: odds / 4 for group in ODDS.values() for fault, odds in group.items()}


def faulty_s3(kind: str, *, keyed: int = 20) -> Attack:
    """Three workers whose object store lies, hangs and hangs up."""

    def attack(stage: Stage) -> list[Task]:
        all_tasks = tasks(keyed=keyed, sources=3, revisions=2)
        assert stage.site.s3 is not None
        with FaultyProxy(stage.site.s3.url) as proxy:
            proxy.chaos(ODDS[kind], seed=stage.dice.randrange(2**32))
            crew = stage.crew.on(stage.site.through(proxy.url, timeout_s=0.5))
            crew.wait(*[crew.start(shuffled(all_tasks, stage.dice)) for _ in range(3)])
        return all_tasks

    return attack


def many(*, processes: int = 8, keyed: int = 2000) -> Attack:
    """Everybody wants the same operations, in the same order."""

    def attack(stage: Stage) -> list[Task]:
        all_tasks = tasks(keyed=keyed)
        stage.crew.wait(*[stage.crew.start(all_tasks, patience_s=600.0) for _ in range(processes)])
        return all_tasks

    return attack


def _rescue(stage: Stage, all_tasks: list[Task]) -> None:
    stage.crew.wait(*[stage.crew.start(shuffled(all_tasks, stage.dice)) for _ in range(2)])


def _wake(stage: Stage, *workers: Worker) -> None:
    """Whoever was frozen finds that others finished its work; it must end with their receipts."""
    for worker in workers:
        if worker.frozen:
            worker.wake()
    stage.crew.wait(*workers)


def _ended(workers: list[Worker]) -> bool:
    return all(worker.status is not None for worker in workers)
