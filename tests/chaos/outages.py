"""An object store that is away for longer than all attempts last, and a fence store that forgets foreign effects."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ragfence.engine.crash_points import AFTER_EFFECT
from tests.chaos.attacks import Attack, Stage
from tests.chaos.crew import Crew, Worker, until
from tests.chaos.scenario import Scenario
from tests.chaos.sites import SQLITE, VALKEY_FOLDER, VALKEY_S3
from tests.chaos.work import Strike, Task, lines, shuffled, tasks
from tests.faulty_http import Fault, FaultyProxy

Away = Callable[[], contextlib.AbstractContextManager[None]]

ATTEMPTS = 3
FEW_ATTEMPTS: dict[str, Any] = {"lease": {"ttl_s": 30.0, "max_attempts": ATTEMPTS, "seal_retry_s": 5.0}}


def planned() -> Iterator[Scenario]:
    for backend in (SQLITE, VALKEY_FOLDER, VALKEY_S3):
        title = "object store away, more retries than attempts"
        yield Scenario(title, backend, objects_away(), short=backend != VALKEY_S3, lease_s=30.0, performed_once=True)
    for backend in (SQLITE, VALKEY_FOLDER, VALKEY_S3):
        title = "recover over a flush"
        yield Scenario(title, backend, flushed(), short=backend != VALKEY_S3, lease_s=30.0, performed_once=True)


def objects_away(*, keyed: int = 20, sources: int = 3) -> Attack:
    """Everybody retries as told, more often than a key has attempts; nothing is quarantined, or performed twice."""

    def attack(stage: Stage) -> list[Task]:
        all_tasks = tasks(keyed=keyed, sources=sources, revisions=2)
        stage.site.prepare()
        with _objects(stage) as (crew, away):
            workers = [
                crew.start(shuffled(all_tasks, stage.dice), recovers=True, policy=FEW_ATTEMPTS, effect_s=0.1)
                for _ in range(3)
            ]
            until(lambda: all(_told(worker, "key") for worker in workers), "everybody has opened the stores")
            with away():
                until(
                    lambda: all(_told(worker, "error") > 3 * ATTEMPTS for worker in workers),
                    "everybody has tried more often than there are attempts",
                )
            crew.wait(*workers)
        return all_tasks

    return attack


def flushed(*, victims: int = 4) -> Attack:
    """Workers are killed between a foreign effect and its commit, and the fence store forgets that they ever were."""

    def attack(stage: Stage) -> list[Task]:
        all_tasks = tasks(keyed=4 * victims, sources=victims, revisions=2)
        singles, moves = all_tasks[: 4 * victims], all_tasks[4 * victims :: 2]
        stage.site.prepare()
        for at in range(victims):
            own = [singles[at], moves[at]]
            for task in own:
                hit = Strike("kill", AFTER_EFFECT, task=0)
                stage.crew.wait_struck(stage.crew.start([task], hit, recovers=True))
            stage.site.forget()
            stage.crew.wait(stage.crew.start(shuffled(own, stage.dice), recovers=True))
        stage.crew.wait(*[stage.crew.start(shuffled(all_tasks, stage.dice), recovers=True) for _ in range(2)])
        return all_tasks

    return attack


@contextlib.contextmanager
def _objects(stage: Stage) -> Iterator[tuple[Crew, Away]]:
    """A crew, and how to take its object store away: a folder takes no writes, S3 answers nothing but 503."""
    if stage.site.s3 is None:
        yield stage.crew, lambda: _unwritable(stage)
        return
    with FaultyProxy(stage.site.s3.url) as proxy:
        yield stage.crew.on(stage.site.through(proxy.url, timeout_s=2.0)), lambda: _refusing(stage, proxy)


@contextlib.contextmanager
def _unwritable(stage: Stage) -> Iterator[None]:
    """A file stands where temporary files belong."""
    assert stage.site.objects is not None
    temp = Path(stage.site.objects) / ".tmp"
    aside = temp.with_name("aside")
    with stage.away("objects"):
        os.rename(temp, aside)
        temp.touch()
        try:
            yield
        finally:
            temp.unlink()
            os.rename(aside, temp)


@contextlib.contextmanager
def _refusing(stage: Stage, proxy: FaultyProxy) -> Iterator[None]:
    with stage.away("objects"):
        proxy.chaos({Fault.answer(503): 1.0}, seed=stage.dice.randrange(2**32))
        yield
        proxy.heal()


def _told(worker: Worker, what: str) -> int:
    """How often a worker was told this; one that has ended will not be told any more."""
    return sum(what in line for line in lines(worker.job.answers)) if worker.status is None else 1_000
