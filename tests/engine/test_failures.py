"""Whatever fails, between any two steps: one outcome per key, everybody gets it, and nobody is left holding a key."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ragfence import Decision, Operation, Receipt
from ragfence.core.decisions import Granted
from ragfence.core.layout import FENCED_OUT, FENCED_POSITION, HEALED, RELEASE_POSITION, SEAL_POSITION, RowKind, State
from ragfence.errors import (
    CommitUncertain,
    Conflict,
    EffectFailed,
    FencedOut,
    InFlight,
    SealUncertain,
    Stale,
    StoreUnavailable,
    TerminalError,
)
from ragfence.testing.crash_points import HYDRATION_POINTS, OPERATION_POINTS, at_point
from ragfence.testing.memory import FaultyObjects, MemoryFences
from tests.engine.jobs import COMMITS, JOB, Job, assert_settled, reached, record_of, unreliable
from tests.engine.worlds import Crash, Process, World, Wrapped, abandon, elsewhere, eventually


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
    assert run().flags.attempt == 1  # the effect was not entered


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


EXECUTIONS = {
    "after_claim": (1, 1),
    "in_effect": (1, 1),
    "after_effect": (2, 2),
    "after_commit": (1, 2),
    "before_seal": (1, 2),
    "after_seal": (1, 1),
}
"""point -> how often the effect ran in the end, with and without an object store"""


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


def test_the_rows_of_a_frozen_block_say_what_it_was_told(world: World) -> None:
    """With an object store the commit that came first counts, whoever holds the record; without one, two perform."""
    slow = abandon(world.open(), JOB)
    world.let_leases_run_out()
    abandon(world.open(), JOB)
    if world.objects:
        slow.seal(result="first")
        assert slow.receipt.decision is Decision.NEW
    else:
        with pytest.raises(FencedOut):
            slow.seal(result="zombie")
    assert ends_of(world, slow.lease.ref.token) == (
        [(SEAL_POSITION, RowKind.NEW, 0)] if world.objects else [(FENCED_POSITION, RowKind.DUPLICATE, FENCED_OUT)]
    )


HEALING: dict[str, Callable[[World], None]] = {
    "hydrated": lambda world: world.open().hydrate(),
    "restarted": lambda world: world.store.restart(),
    "healed by another": lambda world: (world.let_leases_run_out(), elsewhere(Job().on(world.open())))[0],
}


@pytest.mark.parametrize("how", HEALING)
def test_a_healer_that_cannot_seal_is_answered_by_the_commit_and_holds_nobody_up(
    memory: World, job: Job, how: str
) -> None:
    process = Process(memory)
    with at_point("after_commit", process.die), pytest.raises(Crash):
        job.on(process.fence)()
    memory.let_leases_run_out()
    fence = memory.open()
    with at_point("after_claim", lambda: elsewhere(lambda: HEALING[how](memory))):
        receipt = job.on(fence)()
    assert (receipt.decision, receipt.flags.healed) == (Decision.DUPLICATE, True)
    ours = {row.token for row in fence.audit.rows() if row.columns()["decision"] == "new" and not row.position}
    told = [each for token in ours for each in ends_of(memory, token)]
    # Whoever else healed it has a row of its own.
    assert set(told) == {(SEAL_POSITION, RowKind.DUPLICATE, HEALED)}
    assert len(told) == (2 if how == "healed by another" else 1)
    assert fence.audit.anomalies() == []
    assert_settled(memory, receipt, job, done=1)


def test_a_payload_that_was_refused_meanwhile_does_not_hide_the_commit_of_another(memory: World) -> None:
    """Its owner committed and died, its pending record ran out: the commit answers, and the row says that it did."""
    process = Process(memory)
    with at_point("after_commit", process.die), pytest.raises(Crash), process.fence.claim(JOB, payload="x") as op:
        op.seal(result=1)
    memory.clock.advance(40 * 24 * 3600 * 1000)
    memory.store.purge_expired()
    fence = memory.open()
    with pytest.raises(Conflict), fence.claim(JOB, payload="y"):
        pass
    with fence.claim(JOB, payload="x") as again:
        assert (again.receipt.result, again.receipt.flags.healed) == (1, True)
    (row,) = [row for row in fence.audit.rows() if row.kind is RowKind.DUPLICATE]
    assert row.flags == HEALED
    report = fence.audit.check()
    assert report.ok, str(report)


def ends_of(world: World, token: bytes) -> list[tuple[int, RowKind, int]]:
    """The rows of an attempt, but for its grant and its release."""
    rows = [row for row in world.open().audit.rows() if row.token == token]
    return sorted((row.position, row.kind, row.flags) for row in rows if row.position not in (0, RELEASE_POSITION))


def test_a_frozen_block_gives_nothing_back_that_a_successor_holds(world: World) -> None:
    slow = abandon(world.open(), JOB)
    world.let_leases_run_out()
    successor = abandon(world.open(), JOB)
    slow.__exit__(None, None, None)
    assert record_of(world).token == successor.lease.ref.token
    assert record_of(world).state is State.HELD


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


def test_a_revision_that_was_superseded_on_another_server_is_told_so_by_the_one_left_behind(memory: World) -> None:
    """The old server still believes its markers: only the object store knows of the newer epoch."""
    fence, promoted = memory.open(), MemoryFences(clock=memory.clock)

    def supersede() -> None:
        memory.make_fences = lambda: promoted
        newer = Operation(kind="job", source_id="j1", sequence=2)
        with memory.open().claim(newer) as op:
            op.seal(result="newer")

    older = Operation(kind="job", source_id="j1", sequence=1)
    with at_point("after_effect", lambda: elsewhere(supersede)), fence.claim(older) as op, pytest.raises(Stale):
        op.seal(result="older")


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
