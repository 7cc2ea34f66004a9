"""The attack on the ingestion API, at length: sequences with kills, a long load with kills, and Redis that is away.

The servers, the clients and the verdict are those of `tests.server.killed`, which has the short form of the sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from tests.chaos.attacks import Stage
from tests.chaos.evidence import Evidence
from tests.chaos.scenario import Judged, Scenario
from tests.chaos.sites import SQLITE, VALKEY_FOLDER, VALKEY_S3
from tests.server.killed.judge import Verdict
from tests.server.killed.places import LEASE_S, Place, cradle
from tests.server.killed.running import run
from tests.server.killed.sequences import Plan
from tests.server.killed.storming import killed_often, redis_away, tell


def planned() -> Iterator[Scenario]:
    planned = partial(Scenario, lease_s=LEASE_S)
    yield planned("api: 3 sequences with kills", SQLITE, sequences(3), True)
    yield planned("api: 2 sequences with kills", VALKEY_S3, sequences(2), True)
    yield planned("api: 1,000 requests, 2 kills", VALKEY_FOLDER, load(1_000, kills=2), True, lease_s=2.0)
    yield planned("api: Redis away for 2 s, twice", VALKEY_FOLDER, away(2.0), True, lease_s=1.0)
    for number in range(13):
        yield planned(f"api: 10 sequences with kills, {number}", SQLITE, sequences(10))
    for number in range(4):
        yield planned(f"api: 10 sequences with kills, {number}", VALKEY_S3, sequences(10))
    for number in range(2):
        yield planned(f"api: 10 sequences with kills, {number}", VALKEY_FOLDER, sequences(10))
    yield planned("api: 5 sequences with builds and kills", SQLITE, sequences(5, builds=2))
    yield planned("api: 100,000 requests, 20 kills", VALKEY_FOLDER, load(100_000, kills=20), lease_s=2.0)
    yield planned("api: Redis away for 10 s, twice", VALKEY_FOLDER, away(10.0), lease_s=1.0)


def sequences(count: int, *, builds: int = 0) -> Judged:
    """Each as a tenant of its own. Those with builds end with them, after fewer steps."""

    def attack(stage: Stage) -> Evidence:
        found = Verdict()
        with cradle(stage.site.folder) as nursery:
            for number in range(count):
                seed = stage.dice.randrange(1 << 32)
                plan = Plan(seed, steps=3 if builds else 7, builds=builds)
                lines: list[str] = []
                folder = stage.site.folder / f"sequence-{number}"
                folder.mkdir()
                place = Place(replace(stage.site, tenant=f"api-{number}"), folder, lease_s=stage.crew.lease_s)
                made = run(plan, place, nursery, told=lines.append)
                if made.problems:
                    made.problems.append("\n".join(lines))
                found += made
        return _evidence(found)

    return attack


def load(requests: int, *, kills: int) -> Judged:
    def attack(stage: Stage) -> Evidence:
        place = Place(stage.site, lease_s=stage.crew.lease_s)
        found, took_s = killed_often(place, seed=stage.dice.randrange(1 << 32), requests=requests, kills=kills)
        print(tell(found, took_s))
        return _evidence(found)

    return attack


def away(seconds: float) -> Judged:
    def attack(stage: Stage) -> Evidence:
        place = Place(stage.site, lease_s=stage.crew.lease_s)
        return _evidence(redis_away(place, seed=stage.dice.randrange(1 << 32), seconds=seconds))

    return attack


def _evidence(found: Verdict) -> Evidence:
    return Evidence(
        tasks=found.moves,
        executions=found.rows,
        commits=found.moves,
        receipts=found.commits,
        answers=found.answers,
        double=found.double,
        lost=found.lost,
        redone=found.rows - found.moves,
        errors=found.met,
        problems=found.problems,
    )
