"""Sequences never go back: in order, against it, at the same moment, taken over, and after a FLUSHALL."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest

from ragfence import Document, Receipt
from ragfence.core.receipts import Decision
from ragfence.errors import Conflict, InFlight, Stale
from tests.documents.attack.places import Place
from tests.documents.attack.strikes import STRIKES

Step = tuple[int, str]
ONE_TWO_THREE: tuple[Step, ...] = ((1, "A"), (3, "C"), (2, "B"))
UP_AND_BACK: tuple[Step, ...] = ((3, "A"), (5, "A"), (4, "B"))
STORIES = pytest.mark.parametrize("steps", [ONE_TWO_THREE, UP_AND_BACK], ids=["1,3,2", "3:A,5:A,4:B"])


def revision(step: Step) -> Document:
    sequence, content = step
    return Document("one", f"What {content} says.\n\nAnd what all say.", {"as": content}, sequence=sequence)


def send(place: Place, step: Step) -> str:
    """What became of it: a decision, also if that is an error."""
    try:
        return place.writer().documents.ingest(revision(step)).decision
    except Stale:
        return Decision.STALE
    except Conflict:
        return Decision.CONFLICT
    except InFlight:
        return Decision.IN_FLIGHT


def state(place: Place) -> Step:
    described = place.writer().documents.get("one")
    assert described is not None
    assert described.sequence is not None
    return described.sequence, described.metadata["as"]


@STORIES
@pytest.mark.parametrize("flush_before", [None, 1, 2, 3])
def test_the_last_of_the_three_is_stale(place: Place, steps: tuple[Step, ...], flush_before: int | None) -> None:
    decisions = []
    for number, step in enumerate(steps):
        if number == flush_before:
            place.forget()
        decisions.append(send(place, step))
    if flush_before == 3:
        place.forget()
    second = "new" if steps is ONE_TWO_THREE else "duplicate"
    assert decisions == ["new", second, "stale"]
    assert state(place) == steps[1]
    place.forget()
    assert state(place) == steps[1]
    assert send(place, steps[2]) == "stale"


@STORIES
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=lambda order: "".join(map(str, order)))
def test_in_whatever_order_they_come_the_highest_is_live(
    place: Place, steps: tuple[Step, ...], order: tuple[int, ...]
) -> None:
    top = 0
    for number, at in enumerate(order):
        sequence = steps[at][0]
        assert (send(place, steps[at]) == "stale") == (sequence < top)
        top = max(top, sequence)
        if number == 1:
            place.forget()
    assert state(place) == max(steps)


@STORIES
def test_sent_at_the_same_moment_the_highest_is_live_and_the_others_are_stale_from_then_on(
    place: Place, steps: tuple[Step, ...]
) -> None:
    for number in range(5):  # as many races, each for a document of its own
        together(
            [
                lambda step=step, number=number: patient(place, revision(step)._replace(doc_id=f"raced-{number}"))
                for step in steps
            ]
        )
        described = place.writer().documents.get(f"raced-{number}")
        assert described is not None
        assert (described.sequence, described.metadata["as"]) == max(steps)
    place.forget()
    for number in range(5):
        for step in sorted(steps)[:-1]:
            (receipt,) = place.writer().documents.ingest_many([revision(step)._replace(doc_id=f"raced-{number}")])
            assert receipt.decision == "stale"


def patient(place: Place, document: Document) -> Receipt:
    """Waits for whoever is at it, as a process of its own would."""
    (receipt,) = place.writer(wait={"deadline_s": 60.0}).documents.ingest_many([document])
    assert receipt.decision in ("new", "duplicate", "stale"), receipt
    return receipt


def together(calls: list[Callable[[], object]]) -> None:
    barrier = threading.Barrier(len(calls))
    failures: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        barrier.wait()
        try:
            call()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize(("frozen", "taker"), [((2, "B"), (3, "C")), ((3, "C"), (2, "B"))], ids=["2-by-3", "3-by-2"])
@pytest.mark.parametrize("point", STRIKES)
def test_a_frozen_writer_whose_lease_ran_out_takes_no_sequence_back(
    place: Place, point: str, frozen: Step, taker: Step, flushed: bool
) -> None:
    """1 is live. One writer stands still at the point until the other one is done; the higher sequence wins."""
    assert send(place, (1, "A")) == "new"
    writer = place.writer()
    taken: list[str] = []

    def meanwhile() -> None:
        place.let_leases_run_out()
        if flushed:
            place.forget()
        taken.append(send(place, taker))

    with writer.at(point, meanwhile):
        (receipt,) = writer.documents.ingest_many([revision(frozen)])
    assert taken, f"nobody came by {point}"
    assert state(place) == max(frozen, taker)
    # Who was told "done" and is not live now, is not live because of a higher sequence.
    assert {receipt.decision, taken[0]} <= {"new", "duplicate", "stale"}
    if frozen > taker:
        assert receipt.decision in ("new", "duplicate")
    else:
        assert taken[0] in ("new", "duplicate")
    place.forget()
    assert state(place) == max(frozen, taker)
    assert send(place, min(frozen, taker)) == "stale"


def test_a_move_without_a_sequence_keeps_the_head_s_also_after_a_flush(place: Place) -> None:
    documents = place.writer().documents
    documents.ingest(revision((5, "A")))
    documents.ingest(revision((5, "B"))._replace(sequence=None))
    assert state(place) == (5, "B")
    place.forget()
    assert state(place) == (5, "B")
    assert send(place, (4, "C")) == "stale"
    assert send(place, (5, "A")) == "conflict"


def test_a_retraction_keeps_the_sequence_so_that_an_older_revision_does_not_come_back(place: Place) -> None:
    documents = place.writer().documents
    documents.ingest(revision((3, "A")))
    documents.retract("one", sequence=5)
    place.forget()
    assert send(place, (4, "B")) == "stale"
    assert place.writer().documents.get("one") is None
    assert send(place, (6, "A")) == "duplicate"
    assert state(place) == (6, "A")
