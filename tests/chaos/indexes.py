"""The attack on index builds, at length: builders killed, frozen and raced, on every store, while others search.

The processes and the verdict are those of `tests.indexes.attack`, which has the short form.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain

from tests.chaos.attacks import Stage
from tests.chaos.crew import Worker
from tests.chaos.crew import storm as crew_storm
from tests.chaos.evidence import Evidence
from tests.chaos.scenario import Judged, Scenario
from tests.chaos.sites import REDIS62_FOLDER, SQLITE, VALKEY_FOLDER, VALKEY_S3
from tests.chaos.work import Strike
from tests.indexes.attack import races, strikes
from tests.indexes.attack.corpus import PARAGRAPHS, groups, prepared
from tests.indexes.attack.crew import IndexCrew
from tests.indexes.attack.judge import ALIAS, Verdict, judge, opened, swept
from tests.indexes.attack.work import build, ingest, publish

# Servers are started, and so forked off, by who has LanceDB already.
warnings.filterwarnings("ignore", message="lancedb fork")

AT_ONCE = {"index": {"lease_ttl_s": 0.05, "max_runtime_s": 0.05}}
"""whoever began an attempt has long gone; only the clock of gc does not know"""
LONG_S = 30.0
"""a lease that nobody loses"""


def planned() -> Iterator[Scenario]:
    for backend in (SQLITE, VALKEY_FOLDER, VALKEY_S3):
        for action, signal in (("kill", "SIGKILL"), ("freeze", "SIGSTOP")):
            for point in strikes.STRIKES:
                short = backend == VALKEY_S3 and (action, point) in SHORT
                yield Scenario(f"builds: {signal} {point}", backend, strike(action, point), short)
    for backend in (SQLITE, VALKEY_FOLDER, VALKEY_S3, REDIS62_FOLDER):
        yield Scenario("builds: storm of kills and stops", backend, storm(), backend == SQLITE)
        yield Scenario("builds: 8 processes, one build", backend, same(8), lease_s=LONG_S)
        yield Scenario("builds: two specs, one embedder", backend, same(4, metrics=("cosine", "l2")), lease_s=LONG_S)
        yield Scenario("builds: ingest meanwhile", backend, edited(), lease_s=LONG_S)
    for backend in (SQLITE, VALKEY_FOLDER):
        for seed in range(10):
            yield Scenario(f"builds: purge meanwhile, {seed}", backend, purged(seed), lease_s=LONG_S)
    for backend in (SQLITE, VALKEY_FOLDER, VALKEY_S3):
        yield Scenario("purge against builds", backend, contended(), backend == VALKEY_FOLDER, lease_s=LONG_S)
        yield Scenario("gc to a fixed point", backend, collected(), backend == VALKEY_S3, lease_s=LONG_S)
    yield Scenario("builds: 100,000 searches meanwhile", VALKEY_FOLDER, searched(100_000, rounds=20), lease_s=LONG_S)
    yield Scenario("builds: 4,000 searches meanwhile", VALKEY_S3, searched(4_000, rounds=4), lease_s=LONG_S)


SHORT = {("kill", "after_embedded"), ("kill", "mid_write"), ("freeze", "before_sealing")}


def strike(action: str, point: str) -> Judged:
    """One builder stops at the point; two others must finish, and it wakes up if it can."""
    return lambda stage: _evidence(strikes.strike(stage.site, _crew(stage), action, point))


def same(processes: int, *, metrics: tuple[str, ...] = ("cosine",), count: int = 300) -> Judged:
    """All build at the same moment, of one or more specs. Nobody's lease runs out: each snippet is embedded once."""

    def attack(stage: Stage) -> Evidence:
        crew, segments = _crew(stage), 10
        prepared(stage.site, groups(segments, count // segments))
        works = [[build(metric=metrics[at % len(metrics)])] for at in range(processes)]
        crew.run(*works, patience_s=140.0)
        found = judge(stage.site, crew)
        if found.embeds.total() != count * PARAGRAPHS or len(found.hashes) != len(metrics):
            found.problems.append(f"{len(found.hashes)} builds, and {found.embeds.total()} texts were embedded")
        return _evidence(found)

    return attack


def edited() -> Judged:
    def attack(stage: Stage) -> Evidence:
        found = races.ingested_meanwhile(stage.site, _crew(stage), edits=80, builds=20)
        if found.twice:
            found.problems.append(f"{len(found.twice)} texts were embedded twice")
        return _evidence(found)

    return attack


def purged(seed: int) -> Judged:
    return lambda stage: _evidence(races.purged_meanwhile(stage.site, _crew(stage), seed))


def contended() -> Judged:
    """Builders against purgers. Every builder ends, and purges make nobody embed again what was put down.

    What a builder has in its hands when the log is rewritten, one segment, another may embed as well.
    """

    def attack(stage: Stage) -> Evidence:
        found = races.purged_again_and_again(stage.site, _crew(stage))
        again = found.embeds.total() - len(found.embeds)
        if again > races.IN_HAND:
            found.problems.append(f"{again} texts were embedded again, e.g. {sorted(found.twice)[:3]}")
        return _evidence(found)

    return attack


def collected(*, rounds: int = 4) -> Judged:
    """Edited, built and swapped, with a builder killed in between; gc, and what comes after it changes nothing."""

    def attack(stage: Stage) -> Evidence:
        crew, names = _crew(stage), groups(3, 3)
        prepared(stage.site, names)
        for edition in range(1, rounds + 1):
            crew.run([ingest([names[0][0]], edition=edition), publish(ALIAS)])
        victims = crew.start(
            [ingest([names[1][0]], edition=1), build()], strike=Strike("kill", "mid_write", task=1), embed_workers=1
        )
        stage.crew.wait_struck(*victims)
        crew.run([build()])
        found = judge(stage.site, crew)
        with opened(stage.site, kinds=AT_ONCE, indexes={"keep_targets": 1}) as fence:
            first = fence.indexes.gc(dry_run=False, min_age_s=0)
        if len(first.retired) < rounds - 2 or first.failed:
            found.problems.append(f"the first gc: {first}")
        before = _objects_of(stage)
        for _ in range(2):
            with opened(stage.site, kinds=AT_ONCE, indexes={"keep_targets": 1}) as fence:
                report = fence.indexes.gc(dry_run=False, min_age_s=0)
                if done := [*report.retired, *report.dropped, *report.failed, *report.unknown, *report.missing]:
                    found.problems.append(f"gc did not come to an end: {done}")
                audited = fence.audit.check()
                found.problems += [f"the auditor, after the last gc: {finding}" for finding in audited.findings]
            if (after := _objects_of(stage)) != before:
                found.problems.append(f"gc changed objects though nothing was left to do: {sorted(after ^ before)[:3]}")
        return _evidence(found)

    return attack


def _objects_of(stage: Stage) -> set[tuple[str, int]]:
    """Names and sizes of all objects that builds and the catalog have; audits drain rows into the ledger meanwhile."""
    objects = stage.site._objects()
    assert objects is not None
    listed = {(entry.name, entry.size) for entry in objects.list(f"{stage.site.tenant}/")}
    return {(name, size) for name, size in listed if not name.startswith(f"{stage.site.tenant}/ledger/")}


def searched(searches: int, *, rounds: int) -> Judged:
    def attack(stage: Stage) -> Evidence:
        found = races.searched_meanwhile(stage.site, _crew(stage), searches=searches, swaps=10, rounds=rounds)
        return _evidence(found)

    return attack


def storm(*, times: int = 10) -> Judged:
    """Two builders at a time, each of an edited corpus, killed or frozen somewhere; the frozen are woken much later."""

    def attack(stage: Stage) -> Evidence:
        crew, names = _crew(stage), groups(4, 3)
        prepared(stage.site, names)
        flat = list(chain.from_iterable(names))

        def start(left: int) -> list[Worker]:
            action, point = stage.dice.choice(["kill", "freeze"]), stage.dice.choice(strikes.STRIKES)
            steps = [ingest([stage.dice.choice(flat)], edition=left), build()]
            return crew.start(steps, strike=Strike(action, point, task=1), embed_workers=1)

        crew_storm(start, times, at_once=2, asleep_s=1.5 * stage.crew.lease_s)
        crew.run([build()])
        found = judge(stage.site, crew)
        again = found.embeds.total() - len(found.embeds)
        if again > times * PARAGRAPHS * len(names[0]):
            found.problems.append(f"{again} texts were embedded again, and there were {times} strikes")
        swept(stage.site, found)
        return _evidence(found)

    return attack


def _crew(stage: Stage) -> IndexCrew:
    return IndexCrew(stage.crew, stage.site)


def _evidence(found: Verdict) -> Evidence:
    return Evidence(
        tasks=len(found.embeds),
        executions=found.embeds.total(),
        commits=len(found.sealed),
        receipts=len(found.receipts),
        answers=found.answers + found.searches,
        redone=found.embeds.total() - len(found.embeds),
        errors=found.errors,
        flags=found.flags,
        problems=found.problems,
    )
