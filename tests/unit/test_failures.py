"""Whatever fails, between any two steps: one outcome per key, everybody gets it, and nobody is left holding a key."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ragfence import Decision, Fence, Operation, Receipt
from ragfence.core.decisions import Granted
from ragfence.core.records import State
from ragfence.engine.journal import Reconciled
from ragfence.errors import (
    CommitUncertain,
    Conflict,
    EffectFailed,
    FencedOut,
    FormatCorrupt,
    FormatTooNew,
    InFlight,
    Quarantined,
    RagfenceError,
    SealUncertain,
    Stale,
    StoreAuth,
    StoreUnavailable,
    TerminalError,
)
from ragfence.stores.fences import Lookup
from ragfence.testing.fences import MemoryFences
from ragfence.testing.objects import FaultyObjects
from ragfence.testing.points import HYDRATION_POINTS, OPERATION_POINTS, at_point
from tests.unit.worlds import BACKENDS, WITH_OBJECTS, Crash, Process, World, Wrapped, abandon, elsewhere, eventually
from tests.unit.worlds import world as make_world

JOB = Operation(kind="job", source_id="j1", tenant="default")
COMMITS = "default/sealed/*"
OPEN = {"on_store_error": "open"}


@pytest.fixture(params=BACKENDS)
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with make_world(request.param, tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture(params=WITH_OBJECTS)
def backed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with make_world(request.param, tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with make_world("memory", tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def solo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with make_world("solo", tmp_path, monkeypatch) as made:
        yield made


class Job:
    """An effect that counts itself; `during` runs inside of it, once."""

    def __init__(self) -> None:
        self.done = 0
        self.during: list[Callable[[], Any]] = []

    def effect(self) -> str:
        self.done += 1
        number = self.done
        if self.during:
            self.during.pop(0)()
        return f"effect {number}"

    def on(self, fence: Fence, sequence: int | None = None, **options: Any) -> Callable[[], Receipt]:
        def key() -> Any:
            return "j1" if sequence is None else ("j1", "r", sequence)

        return fence.once(kind="job", key=key, **options)(self.effect)


@pytest.fixture
def job() -> Job:
    return Job()


def record_of(world: World) -> Any:
    (held,) = world.store.read([Lookup(JOB.key)])
    return held.record


def assert_settled(world: World, receipt: Receipt, job: Job, done: int) -> None:
    """Everybody gets this receipt, the effect ran so often, nothing is held, and every promise was kept."""
    fence = world.open()
    again = job.on(fence, wait_s=0)()
    assert again == receipt
    assert again.decision is Decision.DUPLICATE
    assert job.done == done
    assert record_of(world) is None or record_of(world).ended
    report = fence.audit.check()
    assert report.ok, str(report)


# The object store fails


def test_a_commit_that_never_reached_the_store_is_performed_again(backed: World, job: Job) -> None:
    objects = FaultyObjects(backed.objects)  # type: ignore[arg-type]
    objects.on("put_new", COMMITS).fail_before()
    run = job.on(backed.open(objects=objects))
    with pytest.raises(StoreUnavailable):
        run()
    receipt = run()
    assert (receipt.result, receipt.flags.attempt) == ("effect 2", 2)
    assert_settled(backed, receipt, job, done=2)


def test_a_commit_whose_reply_was_lost_is_found_by_the_next_call(backed: World, job: Job) -> None:
    objects = FaultyObjects(backed.objects)  # type: ignore[arg-type]
    objects.on("put_new", COMMITS).fail_after()
    run = job.on(backed.open(objects=objects))
    with pytest.raises(CommitUncertain) as uncertain:
        run()
    assert "call again" in uncertain.value.hint
    receipt = run()
    assert (receipt.result, receipt.decision, receipt.flags.healed) == ("effect 1", Decision.DUPLICATE, True)
    assert_settled(backed, receipt, job, done=1)


def test_a_key_whose_commit_is_uncertain_is_free_at_once_but_not_forgotten(memory: World, job: Job) -> None:
    objects = FaultyObjects(memory.objects)  # type: ignore[arg-type]
    objects.on("put_new", COMMITS).fail_after()
    with pytest.raises(CommitUncertain):
        job.on(memory.open(objects=objects))()
    record = record_of(memory)
    assert (record.state, record.held_at(memory.clock())) == (State.HELD, False), "the next owner must look for it"


def test_a_write_that_lands_late_loses_against_the_commit_that_stands(memory: World, job: Job) -> None:
    objects = FaultyObjects(memory.objects)  # type: ignore[arg-type]
    late = objects.on("put_new", COMMITS).hold()
    run = job.on(memory.open(objects=objects))
    with pytest.raises(CommitUncertain):
        run()
    receipt = run()
    assert not late.land().won
    assert receipt.result == "effect 2"
    assert_settled(memory, receipt, job, done=2)


def test_whoever_loses_the_commit_gets_the_winners_receipt(memory: World, job: Job) -> None:
    objects = FaultyObjects(memory.objects)  # type: ignore[arg-type]
    late = objects.on("put_new", COMMITS).hold()
    run = job.on(memory.open(objects=objects))
    with pytest.raises(CommitUncertain):
        run()
    job.during = [late.land]
    receipt = run()
    assert (receipt.result, receipt.decision) == ("effect 1", Decision.DUPLICATE)
    assert receipt.flags.fenced_out
    assert_settled(memory, receipt, job, done=2)


def test_a_block_that_loses_the_commit_is_fenced_out_with_the_winners_receipt(memory: World, job: Job) -> None:
    objects = FaultyObjects(memory.objects)  # type: ignore[arg-type]
    late = objects.on("put_new", COMMITS).hold()
    fence = memory.open(objects=objects)
    with pytest.raises(CommitUncertain):
        job.on(fence)()
    with fence.claim(JOB, payload={}) as op:
        late.land()
        with pytest.raises(FencedOut, match="committed by another attempt") as lost:
            op.seal(result="mine")
    assert lost.value.receipt.result == op.receipt.result == "effect 1"
    assert_settled(memory, op.receipt, job, done=1)


@pytest.mark.parametrize("method", ["get", "list"])
def test_a_key_is_given_back_when_the_objects_cannot_be_read_after_its_claim(
    backed: World, job: Job, method: Any
) -> None:
    objects = FaultyObjects(backed.objects)  # type: ignore[arg-type]
    fence = backed.open(objects=objects)
    fence.hydrate()
    objects.on(method, "default/sealed/*").fail_before()
    run = job.on(fence, sequence=1 if method == "list" else None)
    with pytest.raises(StoreUnavailable):
        run()
    assert job.done == 0
    assert run().flags.attempt == 2


def test_a_failure_that_cannot_be_committed_is_raised_and_gives_the_key_back(memory: World, job: Job) -> None:
    def fail() -> None:
        raise TerminalError("never")

    objects = FaultyObjects(memory.objects)  # type: ignore[arg-type]
    objects.on("put_new", COMMITS).fail_before()
    run = job.on(memory.open(objects=objects))
    job.during = [fail]
    with pytest.raises(TerminalError, match="never"):
        run()
    assert not record_of(memory).held_at(memory.clock())
    assert run().result == "effect 2"


def test_a_failure_whose_commit_was_uncertain_is_replayed(memory: World, job: Job) -> None:
    def fail() -> None:
        raise TerminalError("never")

    objects = FaultyObjects(memory.objects)  # type: ignore[arg-type]
    objects.on("put_new", COMMITS).fail_after()
    run = job.on(memory.open(objects=objects))
    job.during = [fail]
    with pytest.raises(TerminalError, match="never"):
        run()
    with pytest.raises(EffectFailed, match="never"):
        run()
    assert job.done == 1


def test_a_committed_effect_is_found_even_when_no_attempt_is_left(backed: World, job: Job) -> None:
    process = Process(backed, lease={"max_attempts": 1})
    with at_point("after_commit", process.die), pytest.raises(Crash):
        job.on(process.fence)()
    backed.let_leases_run_out()
    receipt = job.on(backed.open(lease={"max_attempts": 1}))()
    assert (receipt.result, receipt.flags.healed) == ("effect 1", True)
    assert_settled(backed, receipt, job, done=1)


# The fence store fails


class Unreliable(Wrapped):
    """Fails the first `failures` calls of a method, before or after the store acted."""

    def __init__(self, inner: Any, method: str, failures: int, *, after: bool) -> None:
        super().__init__(inner)
        self.left = failures
        self._method, self._after = method, after

    def __getattr__(self, name: str) -> Any:
        if name != self._method or not self.left:
            return super().__getattr__(name)

        def fail(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self._after:
                getattr(self.inner, name)(*args, **kwargs)
            raise StoreUnavailable(f"{name} failed")

        return fail


def unreliable(world: World, method: str, failures: int, *, after: bool, **policy: Any) -> Fence:
    return world.open(fences=lambda store: Unreliable(store, method, failures, after=after), **policy)


@pytest.mark.parametrize("after", [False, True])
def test_a_seal_that_fails_is_tried_again(world: World, job: Job, after: bool) -> None:
    fence = unreliable(world, "seal", 3, after=after, lease={"seal_retry_s": 60})
    receipt = job.on(fence)()
    assert (receipt.result, receipt.decision) == ("effect 1", Decision.NEW)
    assert_settled(world, receipt, job, done=1)


@pytest.mark.parametrize("after", [False, True])
def test_a_seal_that_cannot_be_written_is_uncertain_and_carries_the_receipt(
    world: World, job: Job, after: bool
) -> None:
    fence = unreliable(world, "seal", 1, after=after)
    with pytest.raises(SealUncertain, match="happened") as uncertain:
        job.on(fence)()
    carried = uncertain.value.receipt
    assert carried.result == "effect 1"
    assert uncertain.value.committed == (world.objects is not None)
    world.let_leases_run_out()
    later = job.on(world.open())()
    if after or world.objects:
        assert later == carried
        assert_settled(world, later, job, done=1)
    else:  # nothing but the lost seal knew of it
        assert_settled(world, later, job, done=2)


def test_the_key_of_an_uncertain_seal_is_not_given_back(solo: World) -> None:
    fence = unreliable(solo, "seal", 1, after=False)
    with fence.claim(JOB) as op, pytest.raises(SealUncertain):
        op.seal(result=1)
    assert record_of(solo).state is State.HELD


def test_an_uncertain_seal_can_be_repeated_in_its_block(world: World) -> None:
    fence = unreliable(world, "seal", 1, after=True)
    with fence.claim(JOB) as op:
        with pytest.raises(SealUncertain):
            op.seal(result=1)
        assert op.seal(result=1).decision is Decision.NEW
    assert record_of(world).state is State.SEALED


def test_a_claim_sent_twice_because_its_reply_was_lost_is_granted_again(world: World, job: Job) -> None:
    granted: list[Granted] = []

    class Repeating(Wrapped):
        def claim(self, claims: Any) -> Any:
            verdicts = [self.inner.claim(claims)[0], self.inner.claim(claims)[0]]
            granted.extend(verdict for verdict in verdicts if isinstance(verdict, Granted))
            return verdicts[1:]

    receipt = job.on(world.open(fences=Repeating))()
    assert (receipt.decision, receipt.flags.attempt, receipt.flags.takeover) == (Decision.NEW, 1, False)
    assert len(granted) == 2
    assert granted[0].record == granted[1].record
    assert_settled(world, receipt, job, done=1)


def test_a_key_that_cannot_be_given_back_runs_out_by_itself(world: World, job: Job) -> None:
    def fail() -> None:
        raise RuntimeError("down")

    job.during = [fail]
    with pytest.raises(RuntimeError):
        job.on(unreliable(world, "release", 1, after=False))()
    with pytest.raises(InFlight):
        job.on(world.open(), wait_s=0)()
    world.let_leases_run_out()
    receipt = job.on(world.open())()
    assert receipt.flags.takeover
    assert_settled(world, receipt, job, done=2)


# A process dies

EXECUTIONS = {
    "after_claim": (1, 1),
    "in_effect": (1, 1),
    "after_effect": (2, 2),
    "after_commit": (1, 2),
    "before_seal": (1, 2),
    "after_seal": (1, 1),
}
"""point -> how often the effect ran in the end, with and without an object store"""


def reached(*points: str) -> pytest.MarkDecorator:
    """Each of these points on each backend that gets there: without objects there is no commit."""
    pairs = [(name, point) for name in BACKENDS for point in points if (name, point) != ("solo", "after_commit")]
    return pytest.mark.parametrize(("world", "point"), pairs, indirect=["world"])


@pytest.mark.parametrize("sequence", [None, 7])
@reached(*OPERATION_POINTS)
def test_a_process_may_die_anywhere_and_the_next_one_finishes(
    world: World, job: Job, point: str, sequence: int | None
) -> None:
    process = Process(world)
    with at_point(point, process.die), pytest.raises(Crash):
        job.on(process.fence, sequence)()
    run = job.on(world.open(), sequence, wait_s=0)
    if point != "after_seal":
        with pytest.raises(InFlight):
            run()
    world.let_leases_run_out()
    receipt = run()
    assert receipt.flags.takeover == (point != "after_seal")
    assert receipt.flags.healed == (bool(world.objects) and point in ("after_commit", "before_seal"))
    assert job.done == EXECUTIONS[point][0 if world.objects else 1]
    assert run() == receipt
    report = world.open().audit.check()
    assert report.ok, str(report)


@pytest.mark.parametrize("point", ["in_effect", "after_effect"])
def test_a_block_may_die_anywhere_and_the_next_one_finishes(world: World, job: Job, point: str) -> None:
    process = Process(world)

    def die_in_a_block() -> None:
        with process.fence.claim(JOB, payload={}) as op:
            op.seal(result="never")

    with at_point(point, process.die), pytest.raises(Crash):
        elsewhere(die_in_a_block)
    world.let_leases_run_out()
    assert_settled(world, job.on(world.open())(), job, done=1)


# A process is frozen, and wakes up too late


@reached("after_claim", "in_effect", "after_effect", "after_commit", "before_seal")
def test_an_owner_that_wakes_up_after_a_takeover_gets_the_receipt_of_whoever_won(
    world: World, job: Job, point: str
) -> None:
    successors: list[Receipt] = []

    def frozen() -> None:
        world.let_leases_run_out()
        successors.append(elsewhere(job.on(world.open())))

    with at_point(point, frozen):
        zombie = job.on(world.open())()
    assert zombie == successors[0]
    assert successors[0].flags.takeover
    assert_settled(world, zombie, job, done=job.done)
    commits = list(world.objects.list("default/sealed/")) if world.objects else [1]
    assert len(commits) == 1


def test_an_owner_that_wakes_up_while_its_successor_is_at_work_waits_for_it(solo: World, job: Job) -> None:
    taken, go_on = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:

        def work_slowly() -> None:
            taken.set()
            assert go_on.wait(20)

        def frozen() -> None:
            solo.let_leases_run_out()
            job.during = [work_slowly]
            successor.append(pool.submit(job.on(solo.open())))
            assert taken.wait(20)

        successor: list[Any] = []
        waiter = solo.open()
        with at_point("after_effect", frozen):
            zombie = ThreadPoolExecutor(1).submit(job.on(waiter))
            eventually(lambda: waiter.audit.decisions(decision="in_flight").num_rows)
            go_on.set()
            assert zombie.result(20) == successor[0].result(20)
    assert zombie.result().result == "effect 2"
    assert job.done == 2


def test_a_failure_that_comes_after_a_successors_success_counts_for_nothing(world: World, job: Job) -> None:
    def fail_late() -> None:
        world.let_leases_run_out()
        successors.append(elsewhere(job.on(world.open())))
        raise TerminalError("too late")

    successors: list[Receipt] = []
    job.during = [fail_late]
    zombie = job.on(world.open())()
    assert zombie == successors[0]
    assert_settled(world, zombie, job, done=2)


def test_a_frozen_block_is_fenced_out_by_a_successor_that_has_sealed(world: World, job: Job) -> None:
    slow = abandon(world.open(), JOB, {})
    world.let_leases_run_out()
    winner = job.on(world.open())()
    with pytest.raises(FencedOut) as late:
        slow.seal(result="zombie")
    assert late.value.receipt == winner
    slow.__exit__(None, None, None)
    assert_settled(world, winner, job, done=1)


def test_a_frozen_block_gives_nothing_back_that_a_successor_holds(world: World) -> None:
    slow = abandon(world.open(), JOB)
    world.let_leases_run_out()
    successor = abandon(world.open(), JOB)
    slow.__exit__(None, None, None)
    assert record_of(world).token == successor.lease.ref.token
    assert record_of(world).state is State.HELD


# The fence store forgets

FORGETTING: dict[str, Callable[[MemoryFences, Any], None]] = {
    "flush": lambda store, before: store.flush(),
    "restart": lambda store, before: store.restart(),
    "failover": lambda store, before: store.fail_over(before),
}


@pytest.mark.parametrize("sequence", [None, 7])
@pytest.mark.parametrize("how", FORGETTING)
@pytest.mark.parametrize("point", OPERATION_POINTS)
def test_the_store_may_forget_anything_between_any_two_steps(
    memory: World, job: Job, point: str, how: str, sequence: int | None
) -> None:
    fence = memory.open()
    fence.hydrate()
    before = memory.store.snapshot()
    with at_point(point, lambda: FORGETTING[how](memory.store, before)):
        receipt = job.on(fence, sequence)()
    assert (receipt.result, job.done) == ("effect 1", 1)
    assert job.on(memory.open(), sequence)() == receipt
    FORGETTING[how](memory.store, before)
    assert job.on(memory.open(), sequence)() == receipt
    assert job.done == 1
    report = fence.audit.check()
    assert report.ok, str(report)


@pytest.mark.parametrize("point", ["after_effect", "after_commit", "before_seal"])
def test_a_block_with_a_sequence_can_be_sealed_though_a_new_epoch_began(memory: World, point: str) -> None:
    """It has to claim again to learn what counts, from inside its own block."""
    fence = memory.open()
    operation = Operation(kind="job", source_id="j1", sequence=1)
    with at_point(point, lambda: memory.open().hydrate()), fence.claim(operation) as op:
        receipt = op.seal(result=1)
    assert receipt.result == 1
    with memory.open().claim(operation) as again:
        assert again.receipt == receipt


def test_a_revision_that_was_superseded_in_a_newer_epoch_is_told_so(memory: World) -> None:
    def supersede() -> None:
        memory.store.flush()
        newer = Operation(kind="job", source_id="j1", sequence=2)
        with memory.open().claim(newer) as op:
            op.seal(result="newer")

    older = Operation(kind="job", source_id="j1", sequence=1)
    fence = memory.open()
    with at_point("after_effect", lambda: elsewhere(supersede)), fence.claim(older) as op, pytest.raises(Stale):
        op.seal(result="older")
    assert fence.audit.check().ok


@pytest.mark.parametrize("point", HYDRATION_POINTS)
def test_a_hydration_may_die_anywhere_and_the_next_one_finishes(backed: World, job: Job, point: str) -> None:
    receipt = job.on(backed.open())()
    process = Process(backed)
    with at_point(point, process.die), pytest.raises(Crash):
        process.fence.hydrate()
    backed.clock.advance(15_001)  # its lock runs out
    assert_settled(backed, receipt, job, done=1)
    markers = backed.store.markers()
    assert all(marker and marker.usable for marker in markers)
    assert len({marker.epoch for marker in markers}) == 1


def test_a_store_that_was_split_off_stops_answering_once_a_newer_epoch_is_seen(memory: World, job: Job) -> None:
    fence = memory.open()
    job.on(fence)()
    watch = fence._engine.backing.watch  # type: ignore[union-attr]
    watch.look()
    assert all(marker and marker.usable for marker in memory.store.markers()), "its own epoch is the newest"
    old = memory.store
    promoted = MemoryFences(clock=memory.clock)
    memory.make_fences = lambda: promoted
    receipt = job.on(memory.open())()
    watch.look()
    assert old.markers() == [None] * 64
    assert job.on(fence)() == receipt
    newest = max(marker.epoch for marker in old.markers() if marker)
    assert newest > max(marker.epoch for marker in memory.store.markers() if marker)
    assert job.done == 1


def test_looking_for_newer_epochs_before_there_is_any_changes_nothing(memory: World) -> None:
    fence = memory.open()
    fence._engine.backing.watch.look()  # type: ignore[union-attr]
    assert memory.store.markers() == [None] * 64


# The store is down


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
    assert fence.reconcile_journal() == Reconciled((), (), (JOB.key.hex(),))
    down.clear()
    assert fence.reconcile_journal() == Reconciled((JOB.key.hex(),), (), ())
    assert fence.reconcile_journal() == Reconciled((), (), ())
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
    assert fence.reconcile_journal() == Reconciled((), (JOB.key.hex(),), ())
    assert_settled(world, elsewhere_done, job, done=2)


def test_two_journal_entries_of_a_key_are_one_seal_and_one_double(
    memory: World, job: Job, down: threading.Event
) -> None:
    fence = opened_while_down(memory, down, **OPEN)
    job.during = [lambda: elsewhere(job.on(fence))]  # both looked into the journal before either wrote to it
    job.on(fence)()
    down.clear()
    key = JOB.key.hex()
    assert fence.reconcile_journal() == Reconciled((key,), (key,), ())
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
    assert world.open(**OPEN).reconcile_journal() == Reconciled((JOB.key.hex(),), (), ())
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
    assert fence.reconcile_journal() == Reconciled((), (), (key,))
    assert not record_of(memory).held_at(memory.clock())
    assert fence.reconcile_journal() == Reconciled((key,), (), ())
    assert_settled(memory, first, job, done=1)


def test_a_login_that_is_refused_drops_nothing_from_the_journal(memory: World, job: Job, down: threading.Event) -> None:
    job.on(opened_while_down(memory, down, **OPEN))()
    refused = memory.open(fences=lambda store: Down(store, down, StoreAuth("password")), **OPEN)
    key = JOB.key.hex()
    assert refused.reconcile_journal() == Reconciled((), (), (key,))
    assert memory.open(**OPEN).reconcile_journal() == Reconciled((key,), (), ())


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
    assert fence.reconcile_journal() == Reconciled((), (), (key,))
    fence.release(JOB)
    assert fence.reconcile_journal() == Reconciled((key,), (), ())
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
    assert fence.reconcile_journal() == Reconciled((), (), ())
    backed.let_leases_run_out()
    assert_settled(backed, receipt, job, done=1)


@pytest.mark.parametrize("after", [False, True])
def test_a_seal_that_fails_open_without_objects_is_journaled_and_is_no_double(
    solo: World, job: Job, after: bool
) -> None:
    fence = unreliable(solo, "seal", 1, after=after, **OPEN)
    receipt = job.on(fence)()
    assert receipt.flags.journaled
    assert fence.reconcile_journal() == Reconciled((JOB.key.hex(),), (), ())
    assert_settled(solo, receipt, job, done=1)
