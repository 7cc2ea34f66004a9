"""Notes in the object store: `recover=` is asked whatever the fence store has forgotten."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ragfence import Decision, Document, Receipt, Recovered
from ragfence.engine.notes import BATCH
from ragfence.errors import StoreUnavailable, TerminalError, ValidationError
from ragfence.testing import FaultyObjects, at_point
from tests.engine.ages import DAY_MS, TTL_MS, grow_old, purge_all
from tests.engine.test_journal import Down
from tests.engine.worlds import Crash, Process, World

NOTES = "default/notes/"


class Bank:
    """A foreign system: it charges whenever it is told to, and can be asked whether it did."""

    def __init__(self) -> None:
        self.charged: list[str] = []
        self.asked: list[str] = []
        self.then: list[BaseException] = []

    def charge(self, order: str) -> int:
        self.charged.append(order)
        if self.then:
            raise self.then.pop(0)
        return len(self.charged)

    def recover(self, order: str) -> Recovered | None:
        self.asked.append(order)
        return Recovered(self.charged.index(order) + 1) if order in self.charged else None

    def on(
        self, fence: Any, sequence: int | None = None, *, later: bool = False, **more: Any
    ) -> Callable[[str], Receipt]:
        options: dict[str, Any] = {
            **more,
            "kind": "ticket",
            "key": lambda order: order if sequence is None else (order, "r", sequence),
            "recover": self.recover,
        }
        if not later:
            once: Callable[[str], Receipt] = fence.once(**options)(self.charge)
            return once

        async def charge(order: str) -> int:
            return self.charge(order)

        def run(order: str) -> Receipt:
            receipt: Receipt = asyncio.run(fence.once(**options)(charge)(order))
            return receipt

        return run


@pytest.fixture
def bank() -> Bank:
    return Bank()


def notes(world: World) -> list[str]:
    assert world.objects is not None
    return [entry.name for entry in world.objects.list(NOTES)]


def forget(world: World) -> None:
    """The fence store is empty from now on."""
    if world.name == "memory":
        world.store.flush()
        return
    for fence in world.opened:
        fence.close()
    world.opened.clear()
    for file in world.folder.glob("fences.db*"):
        file.unlink()


@pytest.mark.parametrize("point", ["in_effect", "after_effect"])
@pytest.mark.parametrize("sequence", [None, 4])
@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_a_foreign_effect_is_found_though_the_fence_store_forgot_it(
    backed: World, bank: Bank, point: str, sequence: int | None, later: bool
) -> None:
    process = Process(backed)
    with at_point(point, process.die), pytest.raises(Crash):
        bank.on(process.fence, sequence, later=later)("o-1")
    forget(backed)
    receipt = bank.on(backed.open(), sequence, later=later)("o-1")
    assert receipt.decision is Decision.NEW
    assert receipt.flags.attempt == 1
    assert (bank.charged, bank.asked) == (["o-1"], ["o-1"])
    assert bank.on(backed.open(), sequence, later=later)("o-1") == receipt


@pytest.mark.parametrize("voided_by", ["hydrate", "purge"])
def test_a_lease_that_an_epoch_voided_is_not_taken_for_a_first_attempt(
    backed: World, bank: Bank, voided_by: str
) -> None:
    fence = backed.open()
    fence.documents.ingest(Document("d", "somebody else's"))
    process = Process(backed)
    with at_point("after_effect", process.die), pytest.raises(Crash):
        bank.on(process.fence, 7)("o-1")
    if voided_by == "hydrate":
        fence.hydrate()
    else:
        fence.documents.purge("d")
    receipt = bank.on(backed.open(), 7)("o-1")
    assert receipt.flags.attempt == 1  # the fence store knows nothing of the attempt before
    assert (bank.charged, bank.asked) == (["o-1"], ["o-1"])


@pytest.mark.parametrize("sequence", [None, 4])
def test_an_attempt_that_failed_is_asked_about_after_the_fence_store_forgot_it(
    backed: World, bank: Bank, sequence: int | None
) -> None:
    """It was released in good order, but what it did before it failed nobody knows."""
    bank.then.append(TimeoutError())
    with pytest.raises(TimeoutError):
        bank.on(backed.open(), sequence)("o-1")
    forget(backed)
    bank.on(backed.open(), sequence)("o-1")
    assert (bank.charged, bank.asked) == (["o-1"], ["o-1"])


@pytest.mark.parametrize("later", [False, True], ids=["def", "async def"])
def test_a_killed_attempt_is_asked_about_while_the_fence_store_is_away(backed: World, bank: Bank, later: bool) -> None:
    process = Process(backed)
    with at_point("after_effect", process.die), pytest.raises(Crash):
        bank.on(process.fence, later=later)("o-1")
    down = threading.Event()
    down.set()
    fence = backed.open(fences=lambda store: Down(store, down))
    run = bank.on(fence, later=later, on_store_error="open")
    receipt = run("o-1")
    assert (receipt.result, receipt.flags.journaled) == (1, True)
    assert (bank.charged, bank.asked) == (["o-1"], ["o-1"])
    down.clear()
    backed.let_leases_run_out()
    fence.reconcile_journal()
    assert run("o-1") == receipt
    assert (bank.charged, bank.asked) == (["o-1"], ["o-1"])
    assert fence.audit.check().ok


@pytest.mark.parametrize("later", [False, True], ids=["def", "async def"])
def test_an_effect_that_runs_without_the_fence_store_leaves_a_note(backed: World, bank: Bank, later: bool) -> None:
    down = threading.Event()
    down.set()
    run = bank.on(backed.open(fences=lambda store: Down(store, down)), later=later, on_store_error="open")
    first = run("o-1")
    assert (bank.asked, len(notes(backed))) == ([], 1)
    (backed.folder / "journal" / "default.jsonl").unlink()  # as on another machine
    assert run("o-1").result == first.result
    assert (bank.charged, bank.asked) == (["o-1"], ["o-1"])


def test_where_no_object_store_can_tell_recover_is_asked_while_the_fence_store_is_away(
    world: World, bank: Bank
) -> None:
    down = threading.Event()
    down.set()
    objects = None
    if world.objects is not None:
        objects = FaultyObjects(world.objects)
        objects.on("put_new", match=f"{NOTES}*").fail_before()
    bank.charge("o-1")
    fence = world.open(fences=lambda store: Down(store, down), objects=objects)
    assert bank.on(fence, on_store_error="open")("o-1").result == 1
    assert (bank.charged, bank.asked) == (["o-1"], ["o-1"])


def test_nobody_is_asked_about_what_was_never_entered(backed: World, bank: Bank) -> None:
    fence = backed.open()
    fence.hydrate()
    forget(backed)
    for number in range(3):
        bank.on(backed.open())(f"o-{number}")
    assert bank.asked == []


def test_a_new_effect_costs_one_put_more_and_a_replay_nothing(memory: World, bank: Bank) -> None:
    objects = FaultyObjects(memory.objects)  # type: ignore[arg-type]
    fence = memory.open(objects=objects)
    fence.hydrate()
    before = objects.calls.copy()
    for number in range(10):
        bank.on(fence)(f"o-{number}")
    assert {name: count for name, count in (objects.calls - before).items() if count} == {"put_new": 20, "get": 10}
    before = objects.calls.copy()
    for number in range(10):
        bank.on(fence)(f"o-{number}")
    assert not objects.calls - before


def test_effects_without_recover_and_stores_without_objects_leave_no_notes(world: World, bank: Bank) -> None:
    fence = world.open()
    fence.once(kind="ticket", key=lambda order: order)(bank.charge)("o-1")
    if world.objects is None:
        assert bank.on(fence)("o-2").decision is Decision.NEW
    else:
        assert notes(world) == []


def test_a_note_that_cannot_be_written_stops_the_effect_and_uses_up_no_attempt(backed: World, bank: Bank) -> None:
    objects = FaultyObjects(backed.objects)  # type: ignore[arg-type]
    fence = backed.open(objects=objects)
    objects.on("put_new", f"{NOTES}*").fail_before(times=None)
    for _ in range(10):
        with pytest.raises(StoreUnavailable):
            bank.on(fence)("o-1")
    assert (bank.charged, bank.asked) == ([], [])
    objects.heal()
    assert bank.on(fence)("o-1").flags.attempt == 1
    assert bank.charged == ["o-1"]


def test_what_was_found_is_committed_after_any_outage_and_uses_up_no_attempts(backed: World, bank: Bank) -> None:
    """Only the attempt that performed it counts: those that found it have entered no effect."""
    objects = FaultyObjects(backed.objects)  # type: ignore[arg-type]
    fence = backed.open(objects=objects)
    objects.on("put_new", "default/sealed/*").fail_before(times=None)
    for _ in range(10):
        with pytest.raises(StoreUnavailable):
            bank.on(fence)("o-1")
    objects.heal()
    assert bank.on(fence)("o-1").flags.attempt == 2
    assert bank.charged == ["o-1"]


class TestRemoval:
    """Notes do not grow for ever."""

    def test_notes_of_sealed_effects_are_removed_many_at_a_time(self, memory: World, bank: Bank) -> None:
        objects = FaultyObjects(memory.objects)  # type: ignore[arg-type]
        fence = memory.open(objects=objects)
        for number in range(2 * BATCH + 1):
            bank.on(fence)(f"o-{number}")
        assert len(notes(memory)) == 1
        assert objects.calls["delete"] == 2
        fence.close()
        assert notes(memory) == []

    def test_the_note_of_a_sealed_failure_goes_at_once(self, backed: World, bank: Bank) -> None:
        """Its key may be released, for a second life in which nothing has happened yet."""
        fence = backed.open()
        bank.then.append(TerminalError("declined"))
        with pytest.raises(TerminalError):
            bank.on(fence)("o-1")
        assert notes(backed) == []

    def test_a_released_failure_takes_a_note_along_that_was_left_behind(self, backed: World, bank: Bank) -> None:
        objects = FaultyObjects(backed.objects)  # type: ignore[arg-type]
        fence = backed.open(objects=objects)
        objects.on("delete", f"{NOTES}*").fail_before()
        bank.then.append(TerminalError("declined"))
        with pytest.raises(TerminalError) as failed:
            bank.on(fence)("o-1")
        assert len(notes(backed)) == 1
        (row,) = [row for row in fence.audit.decisions().to_pylist() if row["error_code"] == "TERMINAL"]
        assert fence.release(row["idempotency_key"])
        assert failed.value.code == "TERMINAL"
        assert notes(backed) == []
        bank.on(fence)("o-1")
        assert bank.asked == []

    def test_what_a_killed_process_left_beside_its_commit_is_purged(self, old: World, bank: Bank) -> None:
        process = Process(old)
        with at_point("after_commit", process.die), pytest.raises(Crash):
            bank.on(process.fence)("o-1")
        fence = old.open()
        old.let_leases_run_out()
        bank.on(fence)("o-1")
        assert len(notes(old)) == 1
        assert purge_all(fence).objects == 0  # it may be under way
        old.clock.advance(60_001)
        assert purge_all(fence).objects == 1
        assert notes(old) == []
        assert bank.on(fence)("o-1").decision is Decision.DUPLICATE

    @pytest.mark.parametrize("limit", [1, 2, 3, 1000])
    def test_notes_without_a_commit_are_kept_for_the_lifetime_of_their_kind(
        self, old: World, bank: Bank, limit: int
    ) -> None:
        for number in range(5):
            process = Process(old)
            with at_point("in_effect", process.die), pytest.raises(Crash):
                bank.on(process.fence)(f"o-{number}")
        forget(old)
        fence = old.open()
        fence.hydrate()
        old.clock.advance(TTL_MS - 120_000)
        assert purge_all(fence, limit).objects == 0
        assert len(notes(old)) == 5
        grow_old(old, 14 * TTL_MS)
        assert purge_all(fence, limit).objects == 5
        assert notes(old) == []

    @pytest.mark.parametrize("sequence", [None, 4])
    def test_a_note_is_kept_for_as_long_as_the_fence_store_knows_its_key(
        self, old: World, bank: Bank, sequence: int | None
    ) -> None:
        fence = old.open()
        for attempt in range(4):  # each keeps the record for another week
            bank.then.append(TimeoutError())
            with pytest.raises(TimeoutError):
                fence.once(
                    kind="ticket",
                    key=lambda order: order if sequence is None else (order, "r", sequence),
                    recover=lambda order: None,
                )(bank.charge)("o-1")
            assert len(bank.charged) == attempt + 1
            old.clock.advance(5 * DAY_MS)
            assert purge_all(fence).objects == 0
        assert len(notes(old)) == 1
        old.clock.advance(8 * DAY_MS)
        assert purge_all(fence).objects == 1

    def test_the_end_of_a_life_takes_the_note_along(self, old: World, bank: Bank) -> None:
        process = Process(old)
        with at_point("after_seal", process.die), pytest.raises(Crash):
            bank.on(process.fence)("o-1")
        assert len(notes(old)) == 1
        grow_old(old)
        fence = old.open()
        purge_all(fence)
        assert notes(old) == []
        old.clock.advance(5)  # until the store has forgotten the purger
        bank.on(fence)("o-1")
        assert (bank.charged, bank.asked) == (["o-1", "o-1"], [])

    def test_a_place_of_somewhere_else_is_refused(self, memory: World) -> None:
        fence = memory.open()
        with pytest.raises(ValidationError):
            fence.purge_expired(after="other/notes/x")
