"""The attack on documents, at length: processes that ingest the same batches, killed, frozen, raced and forgotten.

The processes and the verdict are those of `tests.documents.attack`, which has the short form.
"""

from __future__ import annotations

from collections.abc import Collection

from tests.chaos.attacks import Stage
from tests.chaos.crew import Worker, until
from tests.chaos.crew import storm as crew_storm
from tests.chaos.evidence import Evidence
from tests.chaos.scenario import Judged
from tests.chaos.work import Strike
from tests.documents.attack.corpus import Expected, Part, chunkings, expected, parts
from tests.documents.attack.crew import DocumentCrew
from tests.documents.attack.judge import judge
from tests.documents.attack.strikes import STRIKES


def same(processes: int, *, count: int = 1000) -> Judged:
    """All send the same documents at the same moment. Nobody's lease runs out: each is chunked once."""

    def attack(stage: Stage) -> Evidence:
        sent = parts(count, batch=100)
        with _crew(stage) as crew:
            crew.run(*[sent] * processes, patience_s=140.0)
            found = _verdict(stage, crew, expected(sent))
        if found.executions != count:
            found.problems.append(f"{count} documents were chunked {found.executions} times")
        return found

    return attack


def two_versions(*, count: int = 1000) -> Judged:
    """One process sends v1 and another v2 of the same documents, again and again; then v2 is sent in quiet."""

    def attack(stage: Stage) -> Evidence:
        first, second = parts(count, batch=100, revision="v1"), parts(count, batch=100, revision="v2")
        wanted = expected([*first, *second])
        with _crew(stage) as crew:
            crew.run(first, second, rounds=3, patience_s=140.0)
            raced = _verdict(stage, crew, wanted, revisions=("v1", "v2"))
            crew.run(second)
            found = _verdict(stage, crew, wanted, revisions=("v2",))
        found.problems += raced.problems
        return found

    return attack


def strike(action: str, point: str, *, taker: str = "v1", count: int = 60, batch: int = 20) -> Judged:
    """One process stops at the point of its second batch; two others, with `taker`'s version, must go on."""

    def attack(stage: Stage) -> Evidence:
        sent, taken = parts(count, batch=batch), parts(count, batch=batch, revision=taker)
        wanted = expected([*sent, *taken])
        stage.site.prepare()
        with _crew(stage) as crew:
            victims = crew.start(sent, strike=Strike(action, point, task=1))
            crew.wait_struck(victims)
            crew.run(taken, taken)
            _wake(crew, victims)
            return _concluded(stage, crew, wanted, taken)

    return attack


def strike_hydration(action: str, point: str) -> Judged:
    """The store forgets everything while a batch is under way; whoever rebuilds it stops at the point."""

    def attack(stage: Stage) -> Evidence:
        sent = parts(60, batch=20)
        wanted = expected(sent)
        with _crew(stage) as crew:
            crew.run(sent[:1])
            sleepers = crew.start(sent[1:2], strike=Strike("freeze", "after_commit", task=0))
            crew.wait_struck(sleepers)
            stage.site.forget()
            victims = crew.start(sent, strike=Strike(action, point))
            crew.wait_struck(victims)
            crew.run(sent, sent)
            _wake(crew, [*victims, *sleepers])
            return _concluded(stage, crew, wanted, sent)

    return attack


def disturb(what: str, *, times: int = 4, count: int = 600) -> Judged:
    """Processes under load; again and again the store is flushed, restarted or killed, and somebody new joins."""

    def attack(stage: Stage) -> Evidence:
        sent = parts(count, batch=20)
        wanted = expected(sent)
        acts = {"flush": stage.site.forget, "restart": stage.site.restart, "crash": stage.site.crash}
        other = stage.dice.sample(sent, len(sent))
        with _crew(stage) as crew:
            workers = crew.start(sent, sent, other)
            for enough in sorted(stage.dice.sample(range(1, count), times)):
                _until_chunked(enough, crew, workers)
                acts[what]()
                workers += crew.start(stage.dice.sample(sent, len(sent)))
            crew.wait(workers)
            return _concluded(stage, crew, wanted, sent)

    return attack


def storm(*, strikes: int = 10) -> Judged:
    """Three processes at a time, each killed or frozen somewhere, and frozen ones woken much later."""

    def attack(stage: Stage) -> Evidence:
        sent = parts(80, batch=10)
        wanted = expected(sent)
        with _crew(stage) as crew:

            def start(left: int) -> list[Worker]:
                action = stage.dice.choice(["kill", "freeze"])
                hit = Strike(action, stage.dice.choice(STRIKES), task=stage.dice.randrange(len(sent)))
                return crew.start(stage.dice.sample(sent, len(sent)), strike=hit)

            crew_storm(start, strikes, at_once=3, asleep_s=1.5 * stage.crew.lease_s)
            return _concluded(stage, crew, wanted, sent)

    return attack


def _crew(stage: Stage) -> DocumentCrew:
    return DocumentCrew(stage.crew.nursery, stage.site, lease_s=stage.crew.lease_s, lock_ms=stage.crew.lock_ms)


def _wake(crew: DocumentCrew, workers: list[Worker]) -> None:
    for worker in workers:
        if worker.frozen:
            worker.wake()
    crew.wait(workers)


def _until_chunked(enough: int, crew: DocumentCrew, workers: list[Worker]) -> None:
    def chunked() -> bool:
        return len(chunkings(crew.trace)) >= enough or all(worker.status is not None for worker in workers)

    until(chunked, f"{enough} documents are chunked")


def _concluded(stage: Stage, crew: DocumentCrew, wanted: Expected, last: list[Part]) -> Evidence:
    """Sent once more in quiet, and judged; the store forgets, and it is sent again: nothing is chunked any more."""
    crew.run(last)
    revisions = {last[0].revision}
    quiet = _verdict(stage, crew, wanted, revisions=revisions)
    stage.site.forget()
    crew.run(last)
    found = _verdict(stage, crew, wanted, revisions=revisions)
    if found.executions != quiet.executions:
        found.problems.append(f"{found.executions - quiet.executions} documents were chunked after they were sealed")
    found.problems += quiet.problems
    return found


def _verdict(stage: Stage, crew: DocumentCrew, wanted: Expected, *, revisions: Collection[str] = ("v1",)) -> Evidence:
    found = judge(stage.site, crew, wanted, revisions=revisions)
    return Evidence(
        tasks=len({(name, revision) for name, revision in wanted.ids}),
        executions=found.chunkings.total(),
        commits=len(found.committed),
        receipts=len(found.receipts),
        answers=found.answers,
        pending=len(found.pending),
        redone=found.chunkings.total() - len(found.chunkings),
        errors=found.errors,
        flags=found.flags,
        problems=found.problems,
    )
