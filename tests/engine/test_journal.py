"""`on_store_error: open`: effects run while the store is down, are journaled, and are settled once it is back."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from ragfence import Decision, Fence, Operation
from ragfence.engine.journal import JournalReconciled
from ragfence.errors import (
    Conflict,
    FormatCorrupt,
    FormatTooNew,
    Quarantined,
    RagfenceError,
    StoreAuth,
    StoreUnavailable,
)
from ragfence.testing.crash_points import at_point
from ragfence.testing.memory import FaultyObjects
from tests.engine.jobs import COMMITS, JOB, OPEN, Job, assert_settled, reached, record_of, unreliable
from tests.engine.worlds import Crash, Process, World, Wrapped, abandon, elsewhere


class Down(Wrapped):
    """A fence store that does not answer while `down` is set."""

    def __init__(self, inner: Any, down: threading.Event, error: RagfenceError | None = None) -> None:
        super().__init__(inner)
        self._down = down
        self._error = error or StoreUnavailable("the store is down")

    def __getattr__(self, name: str) -> Any:
        if self._down.is_set() and name in ("claim", "seal", "release", "renew", "read", "markers", "record"):
            raise self._error
        return super().__getattr__(name)


@pytest.fixture
def down() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def opened_while_down(world: World, down: threading.Event, **policy: Any) -> Fence:
    return world.open(fences=lambda store: Down(store, down), **policy)


def test_a_store_that_is_down_is_an_error_and_nothing_runs(world: World, job: Job, down: threading.Event) -> None:
    with pytest.raises(StoreUnavailable, match="is down") as unavailable:
        job.on(opened_while_down(world, down))()
    assert "reachable" in unavailable.value.hint
    assert job.done == 0


def test_an_effect_that_fails_open_runs_and_is_answered_from_the_journal(
    world: World, job: Job, down: threading.Event
) -> None:
    run = job.on(opened_while_down(world, down, **OPEN))
    first, second = run(), run()
    assert first == second
    assert (first.decision, second.decision) == (Decision.NEW, Decision.DUPLICATE)
    assert first.flags.journaled
    assert second.flags.journaled
    assert job.done == 1


def test_what_the_objects_know_is_not_performed_again_while_the_store_is_down(
    backed: World, job: Job, down: threading.Event
) -> None:
    down.clear()
    fence = opened_while_down(backed, down, **OPEN)
    run = job.on(fence)
    first = run()
    down.set()
    again = run()
    assert again == first
    assert (again.decision, again.flags.healed, again.flags.journaled) == (Decision.DUPLICATE, True, False)

    async def effect() -> str:
        return job.effect()

    assert asyncio.run(fence.once(kind="job", key=lambda: "j1")(effect)()) == first
    with pytest.raises(Conflict):
        fence.once(kind="job", key=lambda: "j1", payload=lambda: "another")(job.effect)()
    assert job.done == 1
    assert fence.reconcile_journal() == JournalReconciled((), (), ())


def test_where_the_objects_are_away_too_it_is_performed(backed: World, job: Job, down: threading.Event) -> None:
    down.clear()
    assert backed.objects is not None
    objects = FaultyObjects(backed.objects)
    run = job.on(backed.open(fences=lambda store: Down(store, down), objects=objects, **OPEN))
    run()
    down.set()
    objects.on("get", match=COMMITS).fail_before()
    assert run().flags.journaled
    assert job.done == 2


def test_one_function_may_fail_open_where_the_policy_fails_closed(
    memory: World, job: Job, down: threading.Event
) -> None:
    fence = opened_while_down(memory, down)
    assert job.on(fence, on_store_error="open")().flags.journaled
    with pytest.raises(StoreUnavailable):
        job.on(fence, on_store_error="closed")()


def test_an_async_function_may_fail_open_too(memory: World, job: Job, down: threading.Event) -> None:
    fence = opened_while_down(memory, down, **OPEN)

    @fence.once(kind="job", key=lambda: "j1")
    async def run() -> str:
        return job.effect()

    assert asyncio.run(run()) == asyncio.run(run())
    assert job.done == 1


def test_the_journal_outlives_its_process(memory: World, job: Job, down: threading.Event) -> None:
    first = job.on(opened_while_down(memory, down, **OPEN))()
    assert job.on(opened_while_down(memory, down, **OPEN))() == first
    assert job.done == 1


def test_a_journaled_key_with_another_payload_is_a_conflict(memory: World, down: threading.Event) -> None:
    run = opened_while_down(memory, down, **OPEN).once(kind="job", key=lambda n: "j1")(lambda n: n)
    run(1)
    with pytest.raises(Conflict, match="journal"):
        run(2)
    down.clear()
    with pytest.raises(Conflict):
        run(2)


def test_an_effect_that_fails_while_the_store_is_down_is_not_journaled(
    memory: World, job: Job, down: threading.Event
) -> None:
    def fail() -> None:
        raise RuntimeError("x")

    job.during = [fail]
    run = job.on(opened_while_down(memory, down, **OPEN))
    with pytest.raises(RuntimeError):
        run()
    assert run().result == "effect 2"


def test_an_effect_that_could_not_be_journaled_does_not_run(memory: World, job: Job, down: threading.Event) -> None:
    (memory.folder / "journal").write_text("a file where the folder should be")
    with pytest.raises(StoreUnavailable, match="journal") as refused:
        job.on(opened_while_down(memory, down, **OPEN))()
    assert "folder" in refused.value.hint
    assert job.done == 0


def test_what_was_journaled_is_sealed_once_the_store_is_back(world: World, job: Job, down: threading.Event) -> None:
    fence = opened_while_down(world, down, **OPEN)
    first = job.on(fence, effect_id=lambda result: "e1")()
    assert fence.reconcile_journal() == JournalReconciled((), (), (JOB.key.hex(),))
    down.clear()
    assert fence.reconcile_journal() == JournalReconciled((JOB.key.hex(),), (), ())
    assert fence.reconcile_journal() == JournalReconciled((), (), ())
    assert first.effect_id == "e1"
    assert_settled(world, first, job, done=1)
    sealed = [row for row in fence.audit.decisions().to_pylist() if row["sealed_at"] and row["decision"] == "new"]
    assert [row["flags"] for row in sealed] == [["journaled"]]


def test_an_effect_that_happened_elsewhere_too_is_reported_as_double(
    world: World, job: Job, down: threading.Event
) -> None:
    fence = opened_while_down(world, down, **OPEN)
    job.on(fence)()
    elsewhere_done = job.on(world.open())()
    down.clear()
    assert fence.reconcile_journal() == JournalReconciled((), (JOB.key.hex(),), ())
    assert_settled(world, elsewhere_done, job, done=2)


def test_two_journal_entries_of_a_key_are_one_seal_and_one_double(
    memory: World, job: Job, down: threading.Event
) -> None:
    fence = opened_while_down(memory, down, **OPEN)
    job.during = [lambda: elsewhere(job.on(fence))]  # both looked into the journal before either wrote to it
    job.on(fence)()
    down.clear()
    key = JOB.key.hex()
    assert fence.reconcile_journal() == JournalReconciled((key,), (key,), ())
    assert job.done == 2


@reached("after_claim", "after_commit", "before_seal", "after_seal")
def test_a_reconciliation_may_die_anywhere_and_the_next_one_finishes(
    world: World, job: Job, down: threading.Event, point: str
) -> None:
    first = job.on(opened_while_down(world, down, **OPEN))()
    process = Process(world, **OPEN)
    with at_point(point, process.die), pytest.raises(Crash):
        process.fence.reconcile_journal()
    world.let_leases_run_out()
    assert world.open(**OPEN).reconcile_journal() == JournalReconciled((JOB.key.hex(),), (), ())
    assert_settled(world, first, job, done=1)


@pytest.mark.parametrize("sent", ["before", "after"])
def test_a_commit_that_fails_during_a_reconciliation_is_left_for_the_next(
    memory: World, job: Job, down: threading.Event, sent: str
) -> None:
    first = job.on(opened_while_down(memory, down, **OPEN))()
    objects = FaultyObjects(memory.objects)  # type: ignore[arg-type]
    orders = objects.on("put_new", COMMITS)
    orders.fail_before() if sent == "before" else orders.fail_after()
    fence = memory.open(objects=objects, **OPEN)
    key = JOB.key.hex()
    assert fence.reconcile_journal() == JournalReconciled((), (), (key,))
    assert not record_of(memory).held_at(memory.clock())
    assert fence.reconcile_journal() == JournalReconciled((key,), (), ())
    assert_settled(memory, first, job, done=1)


def test_a_login_that_is_refused_drops_nothing_from_the_journal(memory: World, job: Job, down: threading.Event) -> None:
    job.on(opened_while_down(memory, down, **OPEN))()
    refused = memory.open(fences=lambda store: Down(store, down, StoreAuth("password")), **OPEN)
    key = JOB.key.hex()
    assert refused.reconcile_journal() == JournalReconciled((), (), (key,))
    assert memory.open(**OPEN).reconcile_journal() == JournalReconciled((key,), (), ())


def test_a_journaled_effect_of_a_quarantined_key_is_left_until_it_is_released(
    memory: World, job: Job, down: threading.Event
) -> None:
    policy = {"lease": {"max_attempts": 1}, **OPEN}
    first = job.on(opened_while_down(memory, down, **policy))()
    fence, key = memory.open(**policy), JOB.key.hex()
    with fence.claim(JOB, payload={}):
        pass
    with pytest.raises(Quarantined), fence.claim(JOB, payload={}):
        pass
    assert fence.reconcile_journal() == JournalReconciled((), (), (key,))
    fence.release(JOB)
    assert fence.reconcile_journal() == JournalReconciled((key,), (), ())
    assert_settled(memory, first, job, done=1)


def test_an_older_sequence_than_the_one_applied_meanwhile_is_reported_as_double(
    memory: World, job: Job, down: threading.Event
) -> None:
    fence = opened_while_down(memory, down, **OPEN)
    job.on(fence, sequence=1)()
    with memory.open().claim(Operation(kind="job", source_id="j1", sequence=2)) as op:
        op.seal()
    down.clear()
    assert len(fence.reconcile_journal().doubled) == 1


def journal_of(world: World) -> Path:
    return world.folder / "journal" / "default.jsonl"


def test_a_journal_line_that_was_cut_off_is_passed_over_and_written_over(
    memory: World, job: Job, down: threading.Event
) -> None:
    run = job.on(opened_while_down(memory, down, **OPEN))
    run()
    whole = journal_of(memory).read_bytes()
    journal_of(memory).write_bytes(whole[:-7])
    second = run()
    assert second.result == "effect 2", "nobody was answered with the one that was cut off"
    assert len(journal_of(memory).read_bytes().splitlines()) == 1
    down.clear()
    assert memory.open(**OPEN).reconcile_journal().sealed == (JOB.key.hex(),)
    assert_settled(memory, second, job, done=2)


def test_a_journal_line_that_is_no_entry_is_named_and_nothing_is_dropped(
    memory: World, job: Job, down: threading.Event
) -> None:
    fence = opened_while_down(memory, down, **OPEN)
    job.on(fence)()
    with journal_of(memory).open("a") as file:
        file.write("not an entry\n")
    before = journal_of(memory).read_bytes()
    with pytest.raises(FormatCorrupt, match="line 2 of the journal"):
        fence.reconcile_journal()
    assert journal_of(memory).read_bytes() == before


def test_a_journal_of_a_newer_ragfence_is_refused(memory: World, job: Job, down: threading.Event) -> None:
    fence = opened_while_down(memory, down, **OPEN)
    job.on(fence)()
    text = journal_of(memory).read_text()
    journal_of(memory).write_text(text.replace('"version":1', '"version":2'))
    with pytest.raises(FormatTooNew, match="format 2"):
        fence.reconcile_journal()


def test_a_crash_while_settled_entries_are_dropped_loses_none_of_the_others(
    memory: World, job: Job, down: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = opened_while_down(memory, down, **OPEN)
    job.on(fence)()
    job.on(fence, sequence=1)()
    held = abandon(memory.open(), JOB, {})  # so that one entry stays
    before = journal_of(memory).read_bytes()

    def crash(*args: Any) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash)
        patch.setattr("os.ftruncate", crash)
        down.clear()
        with pytest.raises(Crash):
            fence.reconcile_journal()
    assert journal_of(memory).read_bytes() == before
    again = fence.reconcile_journal()
    assert (len(again.sealed), again.doubled, again.left) == (1, (), (JOB.key.hex(),))
    assert len(journal_of(memory).read_bytes().splitlines()) == 1
    held.__exit__(None, None, None)
    assert fence.reconcile_journal().sealed == (JOB.key.hex(),)


def test_a_seal_that_fails_open_is_answered_by_its_commit_and_not_journaled(backed: World, job: Job) -> None:
    fence = unreliable(backed, "seal", 1, after=False, **OPEN)
    receipt = job.on(fence)()
    assert receipt.result == "effect 1"
    assert fence.reconcile_journal() == JournalReconciled((), (), ())
    backed.let_leases_run_out()
    assert_settled(backed, receipt, job, done=1)


@pytest.mark.parametrize("after", [False, True])
def test_a_seal_that_fails_open_without_objects_is_journaled_and_is_no_double(
    solo: World, job: Job, after: bool
) -> None:
    fence = unreliable(solo, "seal", 1, after=after, **OPEN)
    receipt = job.on(fence)()
    assert receipt.flags.journaled
    assert fence.reconcile_journal() == JournalReconciled((JOB.key.hex(),), (), ())
    assert_settled(solo, receipt, job, done=1)
