"""Which attacks are made on which backends, and how one of them is run."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ragfence.engine.crash_points import AFTER_COMMIT, HYDRATION_POINTS, OPERATION_POINTS
from ragfence.errors import TransientError
from tests import servers
from tests.chaos import api, attacks, documents, indexes, ledger, outages
from tests.chaos.attacks import Outage, Stage
from tests.chaos.crew import Crew, Nursery, Stopped
from tests.chaos.evidence import Evidence, gather
from tests.chaos.scenario import Scenario
from tests.chaos.sites import REDIS62, REDIS62_FOLDER, SQLITE, VALKEY, VALKEY_FOLDER, VALKEY_S3, site
from tests.chaos.work import Task, shuffled
from tests.documents.attack.strikes import STRIKES


@dataclass(frozen=True, slots=True)
class Outcome:
    scenario: Scenario
    evidence: Evidence
    seconds: float
    outages: tuple[Outage, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.evidence.problems


def all_scenarios() -> list[Scenario]:
    plain = [*_kills(), *_freezes(), *_hydrations(), *_disturbances(), *_storms(), *_faults(), *_crowds()]
    return [*plain, *_documents(), *indexes.planned(), *api.planned(), *ledger.planned(), *outages.planned()]


def _kills() -> Iterator[Scenario]:
    short = {SQLITE: {"after_effect", "after_commit"}, VALKEY: {"before_seal"}, VALKEY_FOLDER: set(OPERATION_POINTS)}
    for backend in (SQLITE, VALKEY, VALKEY_FOLDER, VALKEY_S3, REDIS62_FOLDER):
        for point in OPERATION_POINTS:
            if not (backend == VALKEY and point == AFTER_COMMIT):
                title, in_short = f"SIGKILL {point}", point in short.get(backend, ())
                yield Scenario(title, backend, attacks.strike("kill", point), short=in_short)


def _freezes() -> Iterator[Scenario]:
    short = {
        SQLITE: {"before_seal"},
        VALKEY: {"in_effect"},
        VALKEY_FOLDER: {"after_effect", "after_commit"},
        VALKEY_S3: {"after_commit"},
    }
    for backend in (SQLITE, VALKEY, VALKEY_FOLDER, VALKEY_S3):
        for point in OPERATION_POINTS:
            if not (backend == VALKEY and point == AFTER_COMMIT):
                title, in_short = f"SIGSTOP {point}", point in short.get(backend, ())
                yield Scenario(title, backend, attacks.strike("freeze", point), short=in_short)


def _hydrations() -> Iterator[Scenario]:
    for backend in (SQLITE, VALKEY_FOLDER, VALKEY_S3):
        for point in HYDRATION_POINTS:
            in_short = backend == VALKEY_FOLDER and point in ("after_marked", "after_loaded")
            attack = attacks.strike_hydration("kill", point)
            yield Scenario(f"lost store, SIGKILL {point}", backend, attack, short=in_short)
    for backend in (VALKEY_FOLDER, VALKEY_S3):
        for point in HYDRATION_POINTS:
            attack = attacks.strike_hydration("freeze", point)
            in_short = backend == VALKEY_FOLDER and point == "after_marked"
            yield Scenario(f"lost store, SIGSTOP {point}", backend, attack, short=in_short)


def _disturbances() -> Iterator[Scenario]:
    short = {("flush", VALKEY), ("flush", VALKEY_FOLDER), ("restart", VALKEY), ("crash", VALKEY_FOLDER)}
    names = {"flush": "FLUSHALL under load", "restart": "SIGTERM Redis under load", "crash": "SIGKILL Redis under load"}
    for what, title in names.items():
        for backend in (VALKEY, VALKEY_FOLDER, VALKEY_S3, REDIS62, REDIS62_FOLDER):
            # Redis answers before the kernel has the log, so a crash may lose what a stop does not.
            in_short, may_lose = (what, backend) in short, what != "restart"
            yield Scenario(title, backend, attacks.disturb(what), short=in_short, may_lose=may_lose)
    yield Scenario("file deleted under load", SQLITE, attacks.disturb("flush"), short=True)


def _storms() -> Iterator[Scenario]:
    for backend in (SQLITE, VALKEY, VALKEY_FOLDER, VALKEY_S3):
        yield Scenario("storm of kills and stops", backend, attacks.storm(), short=backend in (SQLITE, VALKEY_FOLDER))


def _faults() -> Iterator[Scenario]:
    for kind in attacks.ODDS:
        yield Scenario(f"S3: {kind}", VALKEY_S3, attacks.faulty_s3(kind), short=kind == "everything")


def _crowds() -> Iterator[Scenario]:
    yield Scenario("8 processes, 2,000 operations", VALKEY_S3, attacks.many(), lease_s=30.0)


def _documents() -> Iterator[Scenario]:
    for backend in (VALKEY_S3, REDIS62_FOLDER):  # `make test` has it on SQLite and Valkey with a folder
        for action, signal in (("kill", "SIGKILL"), ("freeze", "SIGSTOP")):
            for point in STRIKES:
                in_short = backend == VALKEY_S3 and point in ("after_commit", "mid_seal")
                attack = documents.strike(action, point)
                yield Scenario(f"documents: {signal} {point}", backend, attack, short=in_short)
    for backend in (SQLITE, VALKEY_FOLDER):
        for point in STRIKES:
            attack = documents.strike("freeze", point, taker="v2")
            yield Scenario(f"documents: SIGSTOP {point}, another version", backend, attack)
    for backend in (VALKEY_FOLDER, VALKEY_S3):
        for action, signal in (("kill", "SIGKILL"), ("freeze", "SIGSTOP")):
            for point in HYDRATION_POINTS:
                attack = documents.strike_hydration(action, point)
                yield Scenario(f"documents: lost store, {signal} {point}", backend, attack)
    titles = {
        "flush": "FLUSHALL under load",
        "restart": "SIGTERM Redis under load",
        "crash": "SIGKILL Redis under load",
    }
    for what, title in titles.items():
        for backend in (VALKEY_FOLDER, VALKEY_S3, REDIS62_FOLDER):
            in_short = (what, backend) == ("flush", VALKEY_FOLDER)
            yield Scenario(f"documents: {title}", backend, documents.disturb(what), short=in_short)
    for backend in (SQLITE, VALKEY_FOLDER, VALKEY_S3, REDIS62_FOLDER):
        yield Scenario("documents: storm of kills and stops", backend, documents.storm(), short=backend == SQLITE)
        for processes in (2, 8):
            title = f"{processes} processes, the same documents"
            yield Scenario(f"documents: {title}", backend, documents.same(processes), lease_s=30.0)
        yield Scenario("documents: two versions raced", backend, documents.two_versions(), lease_s=30.0)


def run(
    scenario: Scenario, *, seed: int, nursery: Nursery, s3: servers.S3Server | None, keep: Path | None = None
) -> Outcome:
    """The attack, then one more worker who asks for everything again, then the verdict."""
    started = time.monotonic()
    dice = random.Random(f"{seed}/{scenario.name}")
    folder = Path(tempfile.mkdtemp(prefix="ragfence-chaos-", dir=_scratch()))
    try:
        with site(scenario.backend, folder, s3=s3) as place:
            crew = Crew(nursery, place, lease_s=scenario.lease_s)
            stage = Stage(place, crew, dice)
            try:
                made = scenario.attack(stage)
                evidence = made if isinstance(made, Evidence) else _judged(scenario, stage, made)
            except Stopped:
                raise
            except Exception:
                evidence = Evidence(problems=[traceback.format_exc()])
            finally:
                crew.end()
        if evidence.problems and keep is not None:
            shutil.copytree(folder, keep / folder.name, ignore=shutil.ignore_patterns("objects"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(scenario, evidence, time.monotonic() - started, tuple(stage.outages))


def _judged(scenario: Scenario, stage: Stage, tasks: list[Task], *, at_most: int = 4) -> Evidence:
    """Everything is asked for once more, then judged; both again if the store was rebuilt or away meanwhile.

    Sentinels may promote somebody at any time, also because the machine was busy. A rebuilt store knows the top of a
    source again when it is next asked for, not before.
    """
    for left in reversed(range(at_most)):
        try:
            before = stage.site.epochs()
            stage.crew.wait(stage.crew.start(shuffled(tasks, stage.dice), recovers=scenario.performed_once))
            found = gather(stage.site, stage.crew, tasks, may_lose=scenario.may_lose)
            if scenario.performed_once and found.redone:
                found.problems.append(f"{found.redone} effects were performed again, though they could be found")
            if not left or stage.site.epochs() == before:
                return found
        except TransientError:
            if not left:
                raise
            time.sleep(1.0)
    raise AssertionError("unreachable")


def _scratch() -> str | None:
    """In memory where there is room: processes die here, the power stays on, so waiting for a disk proves nothing."""
    memory = "/dev/shm"
    roomy = os.path.isdir(memory) and shutil.disk_usage(memory).free > 1 << 30
    return memory if roomy else None
