"""Stories that a dice would need long to tell: each shows what one rule of the protocol is for."""

from __future__ import annotations

import pytest

from tests.machine.documents import DocumentWorld
from tests.machine.lineages import MemoryLineages
from tests.machine.world import LEASE_MS, Worker


@pytest.fixture
def world() -> DocumentWorld:
    return DocumentWorld(MemoryLineages(), sequenced=False)


def run_until(world: DocumentWorld, worker: Worker, call: str, *, times: int = 1) -> None:
    """Until the worker is about to make this call, for the n-th time."""
    for _ in range(times):
        if worker.at == call:
            world.step(worker)
        for _ in range(2_000):
            if worker.at == call:
                break
            world.step(worker)
    assert worker.at == call, f"it never came to {call}"


def finish(world: DocumentWorld, worker: Worker) -> str:
    for _ in range(5_000):
        if worker.done:
            return world.events[worker.name - 1].outcome
        world.step(worker)
    raise AssertionError("stuck")


def test_a_move_that_a_hydration_made_visible_is_not_made_again_after_a_newer_one(world: DocumentWorld) -> None:
    """Readers saw A, then B was acknowledged: the slow writer of A must not bring it back."""
    slow = world.ingest("A", None)
    run_until(world, slow, "seal")
    world.lineages.flush()
    assert finish(world, world.ingest("B", None)) == "sealed"
    assert finish(world, slow) == "sealed"
    assert world.truth()[0] == "B"
    world.check()


def test_an_epoch_completed_between_asking_and_claiming_is_asked_about_too(world: DocumentWorld) -> None:
    slow = world.ingest("A", None)
    run_until(world, slow, "seal")
    world.lineages.clock.advance(LEASE_MS + 1)
    taker = world.ingest("C", None)
    run_until(world, taker, "put_new")
    world.kill(taker)
    world.late.clear()  # and its commit never arrives
    # The seal is refused (taken over), the newest epoch does not list the segment yet, and it is about to claim.
    run_until(world, slow, "claim")
    world.lineages.flush()
    assert finish(world, world.ingest("B", None)) == "sealed"
    assert finish(world, slow) == "sealed"
    assert world.truth()[0] == "B"
    world.check()


def test_a_late_write_cannot_undo_an_answer_given_after_its_lease_ran_out(world: DocumentWorld) -> None:
    """The head must be written again by whoever takes over, even when it is what they asked for."""
    assert finish(world, world.ingest("A", None)) == "sealed"
    dying = world.ingest("B", None)
    run_until(world, dying, "put_new")
    world.kill(dying)
    world.lineages.clock.advance(LEASE_MS + 1)
    assert finish(world, world.ingest("A", None)) == "sealed"
    world.land_late_writes()
    assert world.truth()[0] == "A"


def test_a_segment_of_an_abandoned_epoch_is_void_for_ever(world: DocumentWorld) -> None:
    """Committed after the next epoch's list was taken: nobody may be told that it counts."""
    slow = world.ingest("A", None)
    run_until(world, slow, "put_new", times=3)  # the first two begin and complete the first epoch
    world.lineages.flush()
    assert finish(world, world.ingest("B", None)) == "sealed"
    assert finish(world, slow) == "sealed"
    assert world.truth()[0] == "A", "the last claim wins"
    world.lineages.flush()
    assert finish(world, world.ingest("A", None)) == "duplicate"
    world.check()


def test_a_server_that_was_split_off_cannot_acknowledge_what_the_new_epoch_does_not_know(world: DocumentWorld) -> None:
    """The old primary still believes its markers and takes the seal: only the look for a newer epoch prevents it."""
    assert finish(world, world.ingest("B", None)) == "sealed"
    replica = world.lineages.snapshot()
    slow = world.ingest("A", None)
    run_until(world, slow, "put_new")
    world.lineages.fail_over(replica)
    world.observe()
    assert finish(world, world.ingest("C", None)) == "sealed"
    assert finish(world, slow) == "sealed"
    assert world.truth()[0] == "A", "acknowledged by the old primary, lost for ever"
    world.check()


def test_a_commit_whose_reply_was_lost_stays_a_question_until_somebody_answers_it(world: DocumentWorld) -> None:
    """Its writer gave up; if the lease were simply cleared, the old head would be confirmed and then lost."""
    assert finish(world, world.ingest("A", None)) == "sealed"
    unlucky = world.ingest("B", None)
    run_until(world, unlucky, "put_new")
    unlucky.drop_reply = True
    assert finish(world, unlucky) == "error"
    assert finish(world, world.ingest("A", None)) == "sealed"
    assert world.truth()[0] == "A"
    world.check()
