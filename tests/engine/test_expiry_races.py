"""Callers who meet a purger at any of its steps, purgers that die, freeze or are cut off, and what the auditor says."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ragfence import Fence
from ragfence.core.decision_rows import Row
from ragfence.core.decisions import HeldRecords
from ragfence.core.layout import END_POSITION, HEALED, SEAL_POSITION, TOKEN_BYTES, RowKind
from ragfence.engine.commits import Commit
from ragfence.engine.leases import Lease
from ragfence.errors import Conflict, EffectFailed, InFlight, Stale, StoreUnavailable, TerminalError
from ragfence.stores.fences import Lookup
from ragfence.testing.crash_points import at_point
from ragfence.testing.faults import FaultyFences
from ragfence.testing.memory import FaultyObjects
from tests.engine.ages import (
    SOURCE_TTL_MS,
    Meeting,
    assert_audited,
    grow_old,
    names,
    pending,
    perform,
    purge_all,
    ticket,
)
from tests.engine.test_decisions import A, B, invariants, replay, row, sealed
from tests.engine.worlds import Crash, Process, World, Wrapped, rows_of


def expired(world: World, sequence: int | None = None) -> Fence:
    """A fence on whose store one key has outlived its time."""
    fence = world.open()
    perform(fence, ticket(sequence=sequence), result="first")
    grow_old(world, SOURCE_TTL_MS)
    return fence


def purger_that_meets(world: World, meeting: Meeting, *, fences: bool) -> Fence:
    if fences:
        return world.open(fences=meeting.on)
    return world.open(objects=meeting.on(world.objects))


STEPS = {
    "after the listing": ("list", 1, True, False),
    "after the first look at the commit": ("get", 1, True, False),
    "after the look at the record": ("read", 1, True, True),
    "before the claim": ("claim", 1, False, True),
    "after the claim": ("claim", 1, True, True),
    "after the second look at the commit": ("get", 2, True, False),
    "before the ended row": ("record", 1, False, True),
    "after the ended row": ("record", 1, True, True),
    "before the delete": ("delete", 1, False, False),
    "after the delete": ("delete", 1, True, False),
    "before the release": ("release", 1, False, True),
    "after the release": ("release", 1, True, True),
}
"""(method, which call of it, after it, of the fence store)"""
CLAIMED = list(STEPS)[4:11]
BEFORE = list(STEPS)[:4]


@pytest.mark.parametrize("sequence", [None, 3])
@pytest.mark.parametrize("step", STEPS)
def test_a_caller_may_come_at_any_step(old: World, step: str, sequence: int | None) -> None:
    """Before the claim it heals what is there, during it nobody gets in, and afterwards the key is new."""
    fence = expired(old, sequence)
    method, nth, after, of_fences = STEPS[step]

    def call() -> Any:
        old.clock.advance(1)
        try:
            return perform(fence, ticket(sequence=sequence), result="second").result
        except InFlight:
            return "in flight"

    meeting = Meeting(method, call, after=after, nth=nth)
    purged = purger_that_meets(old, meeting, fences=of_fences).purge_expired()
    assert meeting.happened
    assert meeting.met == ("first" if step in BEFORE else "in flight" if step in CLAIMED else "second")
    assert purged.objects == (0 if step in BEFORE else 1)
    assert pending(old, ticket(sequence=sequence)) == []
    lasting = perform(fence, ticket(sequence=sequence), result="third").result
    assert lasting == {"first": "first", "in flight": "third", "second": "second"}[meeting.met]
    assert len(names(old)) == 1, "whatever answers is committed"
    assert_audited(fence)


class Blind(Wrapped):
    """Shows nothing of what the fence store holds, as to somebody who looked too early."""

    def read(self, lookups: Sequence[Lookup]) -> list[HeldRecords]:
        return [HeldRecords() for _ in lookups]


@pytest.mark.parametrize("sequence", [None, 3])
def test_the_claim_alone_keeps_a_purger_from_deleting_under_a_caller(old: World, sequence: int | None) -> None:
    """The caller has won and is about to look for the commit; the purger's look at the record was before that."""
    fence = expired(old, sequence)
    purger, purged = old.open(fences=Blind), []
    with at_point("after_claim", lambda: purged.append(purger.purge_expired().objects)):
        healed = perform(fence, ticket(sequence=sequence), result="second")
    assert (healed.result, healed.flags.healed, purged) == ("first", True, [0])
    assert len(names(old)) == 1
    assert_audited(fence)


@pytest.mark.parametrize("hydrated", [False, True])
@pytest.mark.parametrize("sequence", [None, 3])
def test_the_claim_alone_keeps_a_purger_from_a_key_that_was_healed(
    old: World, sequence: int | None, hydrated: bool
) -> None:
    """`hydrated`: the head of the source is void since then, so a claim with a sequence would be granted."""
    fence = expired(old, sequence)
    perform(fence, ticket(sequence=sequence))
    if hydrated:
        fence.hydrate()
    assert old.open(fences=Blind).purge_expired().objects == 0
    assert len(names(old)) == 1


@pytest.mark.parametrize("sequence", [None, 3])
def test_a_purger_that_comes_too_late_for_its_claim_leaves_the_next_life_alone(
    old_memory: World, sequence: int | None
) -> None:
    """Between its first look at the commit and its claim the key was purged by another, and lived again."""
    fence = expired(old_memory, sequence)

    def live_again() -> Any:
        old_memory.open().purge_expired()
        old_memory.clock.advance(1)
        receipt = perform(fence, ticket(sequence=sequence), result="second")
        old_memory.store.flush()  # not even the fence store protects it
        return receipt

    meeting = Meeting("claim", live_again)
    assert old_memory.open(fences=meeting.on).purge_expired().objects == 0
    assert perform(fence, ticket(sequence=sequence)).result == "second"
    assert len(names(old_memory)) == 1


def test_two_purgers_at_once_remove_everything_once(old: World) -> None:
    fence = old.open()
    for number in range(6):
        perform(fence, ticket(str(number)))
        perform(fence, ticket("sequenced", number))
    grow_old(old, SOURCE_TTL_MS)
    other = old.open()
    meeting = Meeting("claim", lambda: other.purge_expired(), after=True, nth=2)
    purged = old.open(fences=meeting.on).purge_expired()
    assert names(old) == []
    assert purged.objects + meeting.met.objects == 12
    old.clock.advance(1)
    assert perform(fence, ticket("0")).is_new
    assert_audited(fence)


def test_callers_with_another_payload_are_refused_until_the_key_is_new(old: World) -> None:
    fence = expired(old)

    def call() -> Any:
        with pytest.raises(Conflict):
            perform(fence, ticket(), payload="another")
        return "refused"

    meeting = Meeting("delete", call)
    purger_that_meets(old, meeting, fences=False).purge_expired()
    assert meeting.met == "refused"
    old.clock.advance(1)
    assert perform(fence, ticket(), payload="another").is_new
    assert_audited(fence)


@pytest.mark.parametrize("sequence", [None, 3])
@pytest.mark.parametrize("step", CLAIMED)
def test_a_purger_may_die_at_any_step(old: World, step: str, sequence: int | None) -> None:
    """Its lease runs out and leaves nothing behind; the commit is whole, or the key is new."""
    fence = expired(old, sequence)
    method, nth, after, of_fences = STEPS[step]
    process = Process(old)
    meeting = Meeting(method, process.die, after=after, nth=nth)
    engine = process.fence._engine
    if of_fences:
        engine.fences = meeting.on(engine.fences)
    else:
        assert engine.backing is not None
        engine.backing.commits._objects = meeting.on(engine.backing.commits._objects)
    with pytest.raises(Crash):
        process.fence.purge_expired()
    deleted = step in ("after the delete", "before the release")
    assert len(names(old)) == (0 if deleted else 1)
    with pytest.raises(InFlight):
        perform(fence, ticket(sequence=sequence))
    old.let_leases_run_out()
    assert pending(old, ticket(sequence=sequence)) == []
    receipt = perform(fence, ticket(sequence=sequence), result="second")
    assert (receipt.result, receipt.flags.attempt) == ("second" if deleted else "first", 1)
    assert_audited(fence)


@pytest.mark.parametrize("sequence", [None, 3])
@pytest.mark.parametrize("successor", ["heals", "lives again"])
def test_a_purger_that_freezes_before_its_delete_puts_back_what_it_deleted(
    old_memory: World, successor: str, sequence: int | None
) -> None:
    """It wakes up after its lease ran out, and its DELETE hits what a successor relies on."""
    fence = expired(old_memory, sequence)

    def frozen() -> Any:
        old_memory.let_leases_run_out()
        if successor == "lives again":
            assert old_memory.open().purge_expired().objects == 1
            old_memory.clock.advance(1)
        return perform(old_memory.open(), ticket(sequence=sequence), result="second")

    meeting = Meeting("delete", frozen)
    purged = purger_that_meets(old_memory, meeting, fences=False).purge_expired()
    assert meeting.met.result == ("first" if successor == "heals" else "second")
    assert purged.objects == 0
    old_memory.store.flush()
    for _ in range(2):
        if sequence is not None:
            with pytest.raises(Stale):
                perform(fence, ticket(sequence=sequence - 1))
        assert perform(fence, ticket(sequence=sequence)) == meeting.met
        old_memory.store.flush()
    assert_audited(fence)
    grow_old(old_memory, SOURCE_TTL_MS)
    assert fence.purge_expired().objects == 1
    assert perform(fence, ticket(sequence=sequence), result="last").result == "last"
    assert_audited(fence)


def test_what_is_put_back_is_the_commit_that_was_deleted(old_memory: World) -> None:
    fence = old_memory.open()
    with pytest.raises(TerminalError), fence.claim(ticket(), payload={"v": 1}):
        raise TerminalError("never")
    (name,) = names(old_memory)
    first = Commit.decode(name, old_memory.objects.get(name) or b"")  # type: ignore[union-attr]
    grow_old(old_memory)

    def frozen() -> None:
        old_memory.let_leases_run_out()
        with pytest.raises(EffectFailed, match="never"):
            perform(old_memory.open(), ticket(), payload={"v": 1})

    purger_that_meets(old_memory, Meeting("delete", frozen), fences=False).purge_expired()
    (again,) = names(old_memory)
    second = Commit.decode(again, old_memory.objects.get(again) or b"")  # type: ignore[union-attr]
    assert again == name
    same = ("key", "fingerprint", "token", "failed", "error", "effect_id", "result", "sequence")
    assert [getattr(second, field) for field in same] == [getattr(first, field) for field in same]
    old_memory.store.flush()
    with pytest.raises(EffectFailed, match="never"):
        perform(fence, ticket(), payload={"v": 1})
    with pytest.raises(Conflict):
        perform(fence, ticket(), payload={"v": 2})


def test_a_purger_whose_lease_ran_out_before_its_last_look_deletes_nothing(
    old_memory: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = expired(old_memory)
    meeting = Meeting("record", lambda: monkeypatch.setattr(Lease, "lost", True), after=True)
    assert old_memory.open(fences=meeting.on).purge_expired().objects == 0
    monkeypatch.undo()
    assert len(names(old_memory)) == 1
    old_memory.clock.advance(1)
    assert perform(fence, ticket()).result == "first"
    assert_audited(fence)


def test_the_lease_is_renewed_while_the_object_store_is_slow(old_memory: World) -> None:
    """With a lease this short, a purge that was never renewed would have lost it at the first look."""
    fence = expired(old_memory)
    renewed = threading.Event()

    class Renewing(Wrapped):
        def renew(self, leases: Any) -> Any:
            kept = self.inner.renew(leases)
            if all(kept):
                renewed.set()
            return kept

    def wait_for_a_beat() -> bool:
        renewed.clear()
        return renewed.wait(20) and renewed.is_set()

    meeting = Meeting("get", wait_for_a_beat, nth=2)
    purger = old_memory.open(
        fences=Renewing, objects=meeting.on(old_memory.objects), lease={"ttl_s": 0.3, "max_runtime_s": 60}
    )
    assert purger.purge_expired().objects == 1
    assert meeting.met
    assert perform(fence, ticket(), result="second").result in ("second",)


@pytest.mark.parametrize("sequence", [None, 3])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("method", ["list", "get", "delete"])
def test_an_object_store_that_fails_is_told_and_the_next_call_finishes(
    old_memory: World, method: Any, after: bool, sequence: int | None
) -> None:
    fence = expired(old_memory, sequence)
    objects = FaultyObjects(old_memory.objects)  # type: ignore[arg-type]
    purger = old_memory.open(objects=objects)
    order = objects.on(method, "default/sealed/*")
    order.fail_after() if after else order.fail_before()
    with pytest.raises(StoreUnavailable):
        purger.purge_expired()
    if method == "delete":
        with pytest.raises(InFlight):  # it may arrive late: nobody commits before the lease has run out
            perform(fence, ticket(sequence=sequence))
    old_memory.let_leases_run_out()
    assert purger.purge_expired().objects == (0 if method == "delete" and after else 1)
    assert names(old_memory) == []
    assert pending(old_memory, ticket(sequence=sequence)) == []
    assert perform(fence, ticket(sequence=sequence), result="second").result == "second"
    assert_audited(fence)


@pytest.mark.parametrize("sequence", [None, 3])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("method", ["purge_expired", "now_ms", "read", "claim", "record", "release"])
def test_a_fence_store_that_fails_is_told_and_the_next_call_finishes(
    old_memory: World, method: Any, after: bool, sequence: int | None
) -> None:
    fence = expired(old_memory, sequence)
    fence.hydrate()
    fences = FaultyFences(old_memory.store)
    purger = old_memory.open(fences=lambda _: fences)
    order = fences.on(method)
    order.fail_after() if after else order.fail_before()
    with pytest.raises(StoreUnavailable):
        purger.purge_expired()
    old_memory.let_leases_run_out()
    purger.purge_expired()
    assert names(old_memory) == []
    assert pending(old_memory, ticket(sequence=sequence)) == []
    assert perform(fence, ticket(sequence=sequence), result="second").result == "second"
    assert_audited(fence)


def test_a_key_is_given_back_at_once_when_its_purge_fails_before_the_delete(old_memory: World) -> None:
    fence = expired(old_memory)
    objects = FaultyObjects(old_memory.objects)  # type: ignore[arg-type]
    purger = old_memory.open(objects=objects)
    meeting = Meeting("claim", lambda: objects.on("get", "default/sealed/*").fail_before(), after=True)
    purger._engine.fences = meeting.on(old_memory.store)
    with pytest.raises(StoreUnavailable):
        purger.purge_expired()
    old_memory.clock.advance(1)
    assert perform(fence, ticket()).result == "first"


@pytest.mark.parametrize("step", CLAIMED)
def test_the_fence_store_may_forget_everything_at_any_step(old_memory: World, step: str) -> None:
    fence = expired(old_memory)
    method, nth, after, of_fences = STEPS[step]
    meeting = Meeting(method, old_memory.store.flush, after=after, nth=nth)
    purger_that_meets(old_memory, meeting, fences=of_fences).purge_expired()
    assert meeting.happened
    purge_all(fence)
    assert names(old_memory) == []
    old_memory.clock.advance(1)
    assert perform(fence, ticket(), result="second").result == "second"
    assert_audited(fence)


def test_a_store_that_is_not_ready_for_the_claim_is_hydrated(old_memory: World) -> None:
    fence = expired(old_memory)
    meeting = Meeting("claim", old_memory.store.restart)
    assert old_memory.open(fences=meeting.on).purge_expired().objects == 1
    old_memory.clock.advance(1)
    assert perform(fence, ticket(), result="second").result == "second"
    assert_audited(fence)


@pytest.mark.parametrize("after", [False, True])
def test_a_replay_of_a_released_failure_before_its_removal_breaks_no_promise(old: World, after: bool) -> None:
    """The ended row comes first; whoever asks before the object and the record are gone is answered as before."""
    fence = old.open()
    with pytest.raises(TerminalError), fence.claim(ticket()):
        raise TerminalError("never")

    def ask() -> str:
        old.clock.advance(1)
        with pytest.raises(EffectFailed):
            perform(fence, ticket())
        old.clock.advance(1)
        return "replayed"

    meeting = Meeting("record", ask, after=True) if not after else Meeting("forget", ask)
    old.open(fences=meeting.on).release(ticket())
    assert meeting.met == "replayed"
    assert perform(fence, ticket(), result="second").is_new
    assert [row["decision"] for row in rows_of(fence) if row["sealed_at"]] == ["new", "duplicate", "new"]
    assert_audited(fence)


def ended(ts_ms: int, winner: bytes, **more: Any) -> Row:
    return row(ts_ms, b"e" * TOKEN_BYTES, RowKind.ENDED, **{"position": END_POSITION, "winner": winner, **more})


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(
            [sealed(1, A), ended(5, A), replay(6, b"c" * TOKEN_BYTES, A), sealed(9, B, fence=(1, 2))],
            id="told once more before it was removed",
        ),
        pytest.param(
            [
                sealed(1, A, expires_ms=4),
                ended(5, A),
                replay(6, b"c" * TOKEN_BYTES, A, position=SEAL_POSITION, fence=(1, 2), flags=HEALED),
                sealed(9, B, fence=(1, 3)),
                replay(10, b"d" * TOKEN_BYTES, B),
            ],
            id="healed although its end was written",
        ),
        pytest.param(
            [
                sealed(1, A),
                ended(5, A),
                replay(6, b"c" * TOKEN_BYTES, A),
                replace(ended(7, A), token=b"f" * TOKEN_BYTES),
                sealed(9, B, fence=(1, 2)),
            ],
            id="ended twice",
        ),
    ],
)
def test_the_auditor_accepts_that_an_end_takes_a_moment(rows: list[Row]) -> None:
    assert invariants(*rows) == []
    assert invariants(*reversed(rows)) == []


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        pytest.param(
            [sealed(1, A), ended(5, A), sealed(9, B, fence=(1, 2)), replay(10, b"c" * TOKEN_BYTES, A)],
            ["equal_receipts"],
            id="the old life after the new one began",
        ),
        pytest.param(
            [sealed(1, A), ended(5, A), replay(6, b"c" * TOKEN_BYTES, A, effect_id="other")],
            ["equal_receipts"],
            id="another effect of the same attempt",
        ),
        pytest.param(
            [sealed(1, A), ended(5, A), sealed(8, B, fence=(1, 2)), sealed(9, b"c" * TOKEN_BYTES, fence=(1, 3))],
            ["equal_receipts", "one_seal"],
            id="two new lives",
        ),
    ],
)
def test_an_end_hides_no_broken_promise(rows: list[Row], found: list[str]) -> None:
    assert invariants(*rows) == found
