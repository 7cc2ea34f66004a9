"""Expiry of sources with a sequence: the highest one, which makes older events stale, is the last to go."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from ragfence import Decision, Operation
from ragfence.core.operations import SEQUENCE_MAX, SEQUENCE_MIN
from ragfence.engine.commits import Commit
from ragfence.engine.requests import slot_of
from ragfence.errors import Conflict, Stale
from ragfence.testing.crash_points import at_point
from ragfence.testing.memory import MemoryObjects
from tests.engine.ages import (
    SOURCE_TTL_MS,
    TTL_MS,
    Meeting,
    assert_audited,
    grow_old,
    names,
    pending,
    perform,
    purge_all,
    ticket,
)
from tests.engine.worlds import World, Wrapped, abandon, rows_of


def sequences(objects: Any) -> list[int]:
    """Of everything that the object store keeps."""
    found = []
    for entry in objects.list("default/sealed/"):
        _, mark, number = entry.name.partition("@")
        if mark:
            found.append(int(number) + SEQUENCE_MIN)
        else:
            commit = Commit.decode(entry.name, objects.get(entry.name) or b"")
            assert commit.sequence is not None
            found.append(commit.sequence)
    return sorted(found)


def forget(world: World) -> None:
    """The fence store loses everything but its rows; only the objects know."""
    world.store.flush()


def test_what_a_higher_sequence_outlives_goes_and_nothing_goes_back(old_memory: World) -> None:
    fence = old_memory.open()
    for sequence in (1, 2, 3):
        perform(fence, ticket(sequence=sequence))
    old_memory.clock.advance(TTL_MS // 2)
    perform(fence, ticket(sequence=4), result="fourth")
    grow_old(old_memory, TTL_MS // 2)
    assert fence.purge_expired().objects == 3
    assert sequences(old_memory.objects) == [4]
    for _ in range(2):
        for sequence in (1, 2, 3):
            with pytest.raises(Stale):
                perform(fence, ticket(sequence=sequence))
        assert perform(fence, ticket(sequence=4)).result == "fourth"
        forget(old_memory)
    assert_audited(fence)


def test_a_source_that_is_over_is_forgotten_as_a_whole(old: World) -> None:
    fence = old.open()
    for sequence in (1, 2, 3):
        perform(fence, ticket(sequence=sequence))
    grow_old(old)
    assert fence.purge_expired().objects == 2
    assert sequences(old.objects) == [3], "the fence store remembers the head for longer than its record"
    with pytest.raises(Stale):
        perform(fence, ticket(sequence=2))
    grow_old(old, SOURCE_TTL_MS)
    assert fence.purge_expired().objects == 1
    assert names(old) == []
    assert pending(old, ticket(sequence=3)) == []
    again = perform(fence, ticket(sequence=2), payload="another", result="second life")
    assert (again.decision, again.flags.attempt, again.flags.takeover) == (Decision.NEW, 1, False)
    assert_audited(fence)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 1000])
def test_the_highest_sequence_never_goes_before_a_lower_one(old_memory: World, limit: int) -> None:
    """After every single DELETE: the highest that is left is the highest that ever was, or nothing is left.

    The source is larger than a page, and its keys stand in the order of their digests.
    """
    dice = random.Random(limit)
    fence = old_memory.open()
    numbers = sorted(dice.sample(range(-50, 50), 12))
    for number in numbers:
        perform(fence, ticket(sequence=number, revision=f"r{dice.randrange(8)}" if dice.random() < 0.7 else ""))
    grow_old(old_memory, SOURCE_TTL_MS)
    highest = max(sequences(old_memory.objects))
    tops: list[int | None] = []

    class Watched(Wrapped):
        def delete(self, names: Sequence[str]) -> None:
            for name in names:
                self.inner.delete([name])
                tops.append(max(sequences(self.inner), default=None))

    purger = old_memory.open(objects=Watched(old_memory.objects))  # type: ignore[arg-type]
    for _ in range(40):
        purge_all(purger, limit)
        if not names(old_memory):
            break
    if limit > 1:  # a key and its mark do not fit a page of one
        assert names(old_memory) == []
        assert tops.pop() is None
    assert tops
    assert set(tops) == {highest}
    assert_audited(fence)


def test_a_purger_that_sees_one_object_at_a_time_gets_through_a_source(old_memory: World) -> None:
    fence = old_memory.open()
    for sequence in range(8):
        perform(fence, ticket(sequence=sequence))
    grow_old(old_memory, SOURCE_TTL_MS)
    walks = 0
    while names(old_memory):
        left = len(names(old_memory))
        purge_all(fence, limit=1)
        assert len(names(old_memory)) < left, "every walk gets on"
        walks += 1
    assert walks <= 8


def test_a_mark_goes_with_its_commit_and_after_it(old_memory: World) -> None:
    fence = old_memory.open()
    perform(fence, ticket(sequence=1, revision="A"), result="first")
    perform(fence, ticket(sequence=5, revision="A"))
    assert sequences(old_memory.objects) == [1, 5]
    grow_old(old_memory, SOURCE_TTL_MS)
    gone: list[str] = []

    class Watched(Wrapped):
        def delete(self, names: Sequence[str]) -> None:
            gone.extend(names)
            self.inner.delete(names)

    assert old_memory.open(objects=Watched(old_memory.objects)).purge_expired().objects == 2  # type: ignore[arg-type]
    assert ["@" in name for name in gone if "/sealed/" in name] == [False, True]
    again = perform(fence, ticket(sequence=2, revision="A"), result="second")
    assert (again.result, again.is_new) == ("second", True)
    assert_audited(fence)


def test_a_young_mark_protects_its_commit_and_the_sequence(old_memory: World) -> None:
    objects = MemoryObjects(old_memory.clock)
    fence = old_memory.open(objects=objects)
    perform(fence, ticket(sequence=1, revision="A"), result="first")
    old_memory.clock.advance(TTL_MS // 2)
    perform(fence, ticket(sequence=5, revision="A"))
    grow_old(old_memory, TTL_MS // 2)
    forget(old_memory)
    assert fence.purge_expired().objects == 0
    with pytest.raises(Stale):
        perform(fence, ticket(sequence=4, revision="B"))
    assert perform(fence, ticket(sequence=5, revision="A")).result == "first"


@pytest.mark.parametrize("limit", [2, 3, 100])
def test_of_the_marks_of_a_key_only_the_highest_is_kept(old_memory: World, limit: int) -> None:
    """A key that is asked for again and again, of a source in use: its fence store's head protects the rest."""
    fence = old_memory.open()
    for sequence in range(10):
        perform(fence, ticket(sequence=sequence, revision="A"))
    perform(fence, ticket("other"))
    grow_old(old_memory)
    assert purge_all(fence, limit).objects == 9
    assert sequences_of(old_memory, "@") == [9]
    forget(old_memory)
    with pytest.raises(Stale):
        perform(fence, ticket(sequence=8, revision="B"))
    assert_audited(fence)


def sequences_of(world: World, part: str) -> list[int]:
    return [int(name.partition("@")[2]) + SEQUENCE_MIN for name in names(world) if part in name]


@pytest.mark.parametrize("beside", [False, True])
def test_marks_whose_commit_is_gone_go_too(old_memory: World, beside: bool) -> None:
    fence = old_memory.open()
    perform(fence, ticket(sequence=1, revision="A"))
    perform(fence, ticket(sequence=5, revision="A"))
    old_memory.objects.delete([name for name in names(old_memory) if "@" not in name])  # type: ignore[union-attr]
    if beside:
        perform(fence, ticket(sequence=9, revision="B"))
    grow_old(old_memory, SOURCE_TTL_MS)
    purge_all(fence)
    assert names(old_memory) == []
    assert_audited(fence)


def test_the_extremes_of_sequences_are_read_back_from_their_marks(old_memory: World) -> None:
    fence = old_memory.open()
    for sequence in (SEQUENCE_MIN, SEQUENCE_MIN + 1, 0, SEQUENCE_MAX):
        perform(fence, ticket(sequence=sequence, revision="A"))
    grow_old(old_memory)
    assert fence.purge_expired().objects == 2
    assert sequences_of(old_memory, "@") == [SEQUENCE_MAX]


def test_a_source_in_use_keeps_its_last_commit(old_memory: World) -> None:
    """Somebody is at work on a newer revision when the only one that is committed has become old."""
    fence = old_memory.open()
    perform(fence, ticket(sequence=1), result="first")
    grow_old(old_memory, SOURCE_TTL_MS)
    abandon(old_memory.open(), ticket(sequence=2))
    rows = len(rows_of(fence))
    assert fence.purge_expired().objects == 0
    assert sequences(old_memory.objects) == [1]
    assert len(rows_of(fence)) == rows, "it is seen without asking for the lease"


def test_keys_without_a_sequence_are_purged_on_their_own(old_memory: World) -> None:
    fence = old_memory.open()
    perform(fence, ticket(revision="plain"))
    perform(fence, ticket(revision="plain too"))
    perform(fence, ticket(sequence=1))
    perform(fence, ticket(sequence=2))
    grow_old(old_memory)
    assert fence.purge_expired().objects == 3
    assert sequences(old_memory.objects) == [2]


def test_of_two_keys_with_the_same_sequence_one_is_kept_until_the_end(old_memory: World) -> None:
    """No fence grants this, but a store that was split in two may leave it behind."""
    fence = old_memory.open()
    perform(fence, ticket(sequence=7, revision="A"))
    (name,) = names(old_memory)
    other = Operation(kind="ticket", source_id="a", revision="B", tenant="default").key.hex()
    commit = Commit.decode(name, old_memory.objects.get(name) or b"")  # type: ignore[union-attr]
    twin = name.rpartition("/")[0] + "/" + other
    old_memory.objects.put_new(twin, commit.encode().replace(commit.key.encode(), other.encode()))  # type: ignore[union-attr]
    grow_old(old_memory, SOURCE_TTL_MS)
    assert fence.purge_expired().objects == 2
    assert names(old_memory) == []


def test_a_commit_that_cannot_be_read_keeps_the_highest_of_its_source(old_memory: World) -> None:
    fence = old_memory.open()
    for sequence in (1, 2):
        perform(fence, ticket(sequence=sequence))
    lower = next(name for name in names(old_memory) if _sequence_at(old_memory, name) == 1)
    old_memory.objects.delete([lower])  # type: ignore[union-attr]
    old_memory.objects.put_new(lower, b"?")  # type: ignore[union-attr]
    grow_old(old_memory, SOURCE_TTL_MS)
    assert fence.purge_expired().objects == 0
    assert len(names(old_memory)) == 2


def _sequence_at(world: World, name: str) -> int | None:
    return Commit.decode(name, world.objects.get(name) or b"").sequence  # type: ignore[union-attr]


RAISED = ticket(sequence=9, revision="A")


@pytest.mark.parametrize(
    ("method", "nth", "after"),
    [
        pytest.param("read", 1, True, id="after the page was checked"),
        pytest.param("record", 1, False, id="after the key was checked"),
        pytest.param("record", 1, True, id="after the ended row"),
    ],
)
def test_a_key_that_is_raised_while_it_is_removed_keeps_its_receipt(
    old_memory: World, method: str, nth: int, after: bool
) -> None:
    """It was below the highest and over; then somebody asks for it with a sequence above all others."""
    fence = old_memory.open()
    perform(fence, ticket(sequence=1, revision="A"), result="first")
    perform(fence, ticket(sequence=5, revision="B"))
    grow_old(old_memory)
    caller = old_memory.open()
    meeting = Meeting(method, lambda: perform(caller, RAISED, result="second"), after=after, nth=nth)
    old_memory.open(fences=meeting.on).purge_expired()
    assert meeting.met.result == "first"
    assert bool(rows_of(fence, decision="ended")) == (method == "record"), "it looks again before it ends a life"
    assert max(sequences(old_memory.objects)) == 9
    for _ in range(2):
        assert perform(fence, RAISED).result == "first"
        with pytest.raises(Stale):
            perform(fence, ticket(sequence=6, revision="C"))
        forget(old_memory)
    assert_audited(fence)


def test_a_key_that_was_raised_and_outdone_meanwhile_is_put_back_with_its_sequence(old_memory: World) -> None:
    fence = old_memory.open()
    perform(fence, ticket(sequence=1, revision="A"), result="first")
    perform(fence, ticket(sequence=5, revision="B"))
    grow_old(old_memory)

    def raise_and_outdo() -> None:
        perform(old_memory.open(), RAISED)
        perform(old_memory.open(), ticket(sequence=10, revision="C"))

    old_memory.open(fences=Meeting("record", raise_and_outdo, after=True).on).purge_expired()
    assert sequences(old_memory.objects) == [1, 5, 9, 10]
    forget(old_memory)
    assert perform(fence, ticket(sequence=11, revision="A"), result="second").result == "first"
    assert_audited(fence)


@pytest.mark.parametrize("late", [False, True])
def test_a_key_that_is_raised_after_it_was_removed_is_a_new_life(old_memory: World, late: bool) -> None:
    """`late`: the purger's DELETE was on its way for so long that it hits the commit of the new life."""
    fence = old_memory.open()
    perform(fence, ticket(sequence=1, revision="A"), result="first")
    perform(fence, ticket(sequence=5, revision="B"))
    grow_old(old_memory)

    def live_again() -> Any:
        if late:
            old_memory.open().purge_expired()
        return perform(old_memory.open(), RAISED, result="second")

    meeting = Meeting("delete", live_again, after=not late)
    old_memory.open(objects=meeting.on(old_memory.objects)).purge_expired()
    assert meeting.met.result == "second"
    forget(old_memory)
    with pytest.raises(Stale):
        perform(fence, ticket(sequence=6, revision="C"))
    assert perform(fence, RAISED).result == "second"
    assert_audited(fence)


def test_a_key_that_is_being_raised_is_not_removed_under_its_caller(old_memory: World) -> None:
    """He has won the source, and is about to look for the commit."""
    fence = old_memory.open()
    perform(fence, ticket(sequence=1, revision="A"), result="first")
    perform(fence, ticket(sequence=5, revision="B"))
    grow_old(old_memory)
    purger, purged = old_memory.open(), []
    with at_point("after_claim", lambda: purged.append(purger.purge_expired().objects)):
        assert perform(fence, RAISED, result="second").result == "first"
    assert purged == [0]
    assert_audited(fence)


def test_a_store_that_restarted_protects_keys_below_the_highest_too(old_memory: World) -> None:
    """It may not show its records before it is hydrated, and such keys are not claimed."""
    fence = old_memory.open()
    perform(fence, ticket(sequence=1, revision="A"), result="first")
    grow_old(old_memory)
    perform(fence, ticket(sequence=2, revision="A"))  # healed: its record answers for another lifetime
    perform(fence, ticket(sequence=5, revision="B"))
    old_memory.store.restart()
    assert fence.purge_expired().objects == 0
    forget(old_memory)
    assert perform(fence, RAISED, result="second").result == "first"
    assert_audited(fence)


@pytest.mark.parametrize(("method", "after"), [("claim", False), ("read", True)])
def test_a_mark_that_came_while_the_store_forgot_keeps_its_commit(old_memory: World, method: str, after: bool) -> None:
    """Nobody but the object store knows of it, and it was put after the listing."""
    fence = old_memory.open()
    perform(fence, ticket(sequence=1, revision="A"), result="first")
    grow_old(old_memory, SOURCE_TTL_MS)

    def raise_and_forget() -> None:
        perform(old_memory.open(), RAISED, result="second")
        forget(old_memory)

    meeting = Meeting(method, raise_and_forget, after=after)
    assert old_memory.open(fences=meeting.on).purge_expired().objects == 0
    old_memory.clock.advance(1)
    assert perform(fence, RAISED, result="third").result == "first"


@pytest.mark.parametrize("first", [None, 1])
@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_a_young_mark_on_the_next_page_protects_its_commit(old_memory: World, limit: int, first: int | None) -> None:
    """Wherever the pages end: several sources, each a commit and two marks, of which the last is young."""
    fence = old_memory.open(objects=MemoryObjects(old_memory.clock))
    sources = [f"s{number}" for number in range(6)]
    for source in sources:
        perform(fence, ticket(source, first, "A"), result="first")
        perform(fence, ticket(source, 2, "A"))
    old_memory.clock.advance(TTL_MS // 2)
    for source in sources:
        perform(fence, ticket(source, 3, "A"))
    grow_old(old_memory, TTL_MS // 2)
    forget(old_memory)
    purge_all(fence, limit)
    for source in sources:
        assert perform(fence, ticket(source, 3, "A"), result="second").result == "first"
        with pytest.raises(Stale):
            perform(fence, ticket(source, 2, "B"))


def test_a_writer_of_the_source_waits_while_its_last_commit_is_removed(old_memory: World) -> None:
    fence, answers = old_memory.open(), []
    perform(fence, ticket(sequence=1), result="first")
    grow_old(old_memory, SOURCE_TTL_MS)

    def write() -> None:
        with old_memory.open().claim(ticket(sequence=2), wait_s=0, verdict=True) as op:
            answers.append(op.decision)

    meeting = Meeting("delete", write)
    assert old_memory.open(objects=meeting.on(old_memory.objects)).purge_expired().objects == 1
    assert answers == [Decision.IN_FLIGHT]
    old_memory.clock.advance(1)
    assert perform(fence, ticket(sequence=2), result="second").flags.attempt == 1
    assert_audited(fence)


def test_a_newer_revision_that_came_just_before_the_claim_keeps_its_head(old_memory: World) -> None:
    fence = old_memory.open()
    perform(fence, ticket(sequence=1), result="first")
    grow_old(old_memory, SOURCE_TTL_MS)
    caller = old_memory.open()
    meeting = Meeting("claim", lambda: perform(caller, ticket(sequence=5), result="fifth"))
    assert old_memory.open(fences=meeting.on).purge_expired().objects == 0
    old_memory.clock.advance(1)
    (held,) = old_memory.store.read([_lookup(ticket(sequence=5))])
    assert held.source.head.sequence == 5
    with pytest.raises(Stale):
        perform(fence, ticket(sequence=4))
    assert perform(fence, ticket(sequence=5)).result == "fifth"
    with pytest.raises(Conflict):
        perform(fence, ticket(sequence=5, revision="other"))
    assert_audited(fence)


def _lookup(operation: Operation) -> Any:
    from ragfence.core.decisions import Mode
    from ragfence.stores.fences import Lookup

    known = operation.in_tenant("default")
    return Lookup(known.key, Mode.SEQUENCED, slot_of(known.kind, known.source))


def test_every_key_that_ended_has_its_row(old_memory: World) -> None:
    fence = old_memory.open()
    keys = {perform(fence, ticket(sequence=sequence)).key for sequence in range(5)}
    grow_old(old_memory, SOURCE_TTL_MS)
    purge_all(fence)
    ended = rows_of(fence, decision="ended")
    assert {row["idempotency_key"] for row in ended} == keys
    assert len(ended) == 5
