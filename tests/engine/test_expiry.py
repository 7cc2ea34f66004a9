"""`fence.purge_expired()`: what has outlived its lifetime goes, what is still needed stays, every call is bounded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ragfence
from ragfence import Decision, Fence, Operation, Policy, Recovered
from ragfence.engine.commits import Commits
from ragfence.engine.expiry import Purged
from ragfence.errors import Conflict, EffectFailed, TerminalError, ValidationError
from ragfence.stores.objects import ObjectEntry
from ragfence.testing.memory import FaultyObjects, MemoryFences, MemoryObjects
from tests.engine.ages import (
    DAY_MS,
    HOUR_MS,
    SOURCE_TTL_MS,
    TTL_MS,
    aging_world,
    assert_audited,
    grow_old,
    names,
    pending,
    perform,
    purge_all,
    ticket,
)
from tests.engine.worlds import World, Wrapped, rows_of


def test_a_key_that_was_purged_is_new_again(old: World) -> None:
    fence = old.open()
    perform(fence, ticket(), result="first")
    grow_old(old)
    assert fence.purge_expired() == Purged(records=1, objects=1, scanned=1, after="")
    assert names(old) == []
    assert pending(old) == []
    again = perform(fence, ticket(), result="second")
    assert (again.result, again.decision, again.flags.attempt) == ("second", Decision.NEW, 1)
    assert perform(old.open(), ticket()) == again
    assert_audited(fence)


def test_before_its_time_nothing_goes(old: World) -> None:
    fence = old.open()
    receipt = perform(fence, ticket(), result="first")
    old.clock.advance(TTL_MS - 60_000)
    assert fence.purge_expired() == Purged(records=0, objects=0, scanned=1, after="")
    assert perform(fence, ticket()) == receipt


def test_what_nobody_purged_still_answers_after_its_time(old: World) -> None:
    fence = old.open()
    receipt = perform(fence, ticket(), result="first")
    grow_old(old)
    healed = perform(fence, ticket(), result="second")
    assert healed == receipt
    assert healed.flags.healed


def test_a_record_of_the_fence_store_protects_its_object(old: World) -> None:
    fence = old.open()
    perform(fence, ticket(), result="first")
    grow_old(old)
    perform(fence, ticket())  # healed: from now on it answers for another lifetime
    rows = len(rows_of(fence))
    assert fence.purge_expired().objects == 0
    assert len(rows_of(fence)) == rows, "nobody was asked, so nobody is told"
    assert len(names(old)) == 1
    grow_old(old)
    assert fence.purge_expired().objects == 1
    assert perform(fence, ticket(), result="second").result == "second"
    assert_audited(fence)


def test_the_life_that_ends_takes_its_payload_and_its_attempts_along(old: World) -> None:
    """A pending record would refuse another payload, count attempts on, and ask `recover`."""
    fence, asked = old.open(), []
    perform(fence, ticket(), payload={"v": 1})
    grow_old(old)
    fence.purge_expired()
    old.clock.advance(1)

    @fence.once(
        kind="ticket", key=lambda v: "a", payload=lambda v: {"v": v}, recover=lambda v: asked.append(v) or Recovered(0)
    )
    def effect(v: int) -> int:
        return v

    receipt = effect(2)
    assert (receipt.result, receipt.flags.attempt, asked) == (2, 1, [])
    with pytest.raises(Conflict):
        effect(1)


def test_a_failure_expires_like_a_success(old: World) -> None:
    fence = old.open()
    with pytest.raises(TerminalError), fence.claim(ticket()):
        raise TerminalError("never")
    with pytest.raises(EffectFailed):
        perform(fence, ticket())
    grow_old(old)
    assert fence.purge_expired().objects == 1
    assert perform(fence, ticket()).is_new
    assert_audited(fence)


def test_the_rows_say_who_ended_a_life_and_why(old: World) -> None:
    fence = old.open(owner="janitor")
    perform(fence, ticket())
    grow_old(old)
    fence.purge_expired()
    purge = [row for row in rows_of(fence) if row["action"] == "purge"]
    assert sorted(row["decision"] for row in purge) == ["ended", "new", "new"]
    assert {(row["kind"], row["owner"]) for row in purge} == {("ticket", "janitor")}
    (ended,) = rows_of(fence, decision="ended")
    (sealed,) = [row for row in rows_of(fence, decision="new") if row["sealed_at"]]
    assert (ended["winner"], ended["error_code"]) == (sealed["winner"], "EXPIRED")
    assert ended["payload_hash"] == sealed["payload_hash"]


def test_without_an_object_store_only_records_are_purged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with aging_world("solo", tmp_path, monkeypatch) as solo:
        fence = solo.open()
        for number in range(5):
            perform(fence, ticket(str(number)))
        grow_old(solo)
        perform(fence, ticket("young"))
        assert fence.purge_expired(3) == Purged(records=3, objects=0, scanned=0, after="")
        assert fence.purge_expired(3) == Purged(records=2, objects=0, scanned=0, after="")
        assert not perform(fence, ticket("young")).is_new


def test_every_kind_has_its_own_lifetime(old: World) -> None:
    fence, kinds = old.open(kinds={"own": {"ttl_hours": 24}}), ("own", "ticket", "document", "webhook.push")
    for kind in kinds:
        perform(fence, Operation(kind=kind, source_id="a"))
    left = []
    for hours in (24, 24, 24, 11 * 24):
        grow_old(old, hours * HOUR_MS)
        fence.purge_expired()
        left.append(tuple(kind for kind in kinds if any(f"/{kind}/" in name for name in names(old))))
    assert left == [kinds[1:], kinds[2:], kinds[3:], ()]


def test_the_lifetimes_are_those_of_who_purges(old: World) -> None:
    perform(old.open(), ticket())
    grow_old(old)
    assert old.open(stores={"ttl": {"api_hours": 96}}).purge_expired().objects == 0
    assert old.open().purge_expired().objects == 1


@pytest.mark.parametrize("kind", ["a/b", ".hidden", "50%", "~x", "größe", "a@b"])
def test_a_kind_is_read_back_from_any_name(old_memory: World, kind: str) -> None:
    fence = old_memory.open(kinds={kind: {"ttl_hours": 96}})
    perform(fence, Operation(kind=kind, source_id="a"))
    grow_old(old_memory)
    assert fence.purge_expired().objects == 0
    grow_old(old_memory)
    assert fence.purge_expired().objects == 1
    (row,) = rows_of(fence, decision="ended")
    assert row["kind"] == kind


def test_other_tenants_and_other_objects_are_left_alone(old_memory: World) -> None:
    fence = old_memory.open(results={"inline_max_bytes": 10})
    other = _of_tenant(old_memory, "default2")
    perform(other, ticket())
    perform(fence, ticket(), result="more than ten bytes")
    before = set(names(old_memory, ""))
    grow_old(old_memory)
    assert fence.purge_expired().objects == 1
    gone = before - set(names(old_memory, ""))
    assert [name.split("/")[:2] for name in gone] == [["default", "sealed"]]
    assert any(name.startswith("default/results/") for name in names(old_memory, ""))


def _of_tenant(world: World, tenant: str) -> Fence:
    store = MemoryFences(tenant, clock=world.clock)
    fence = ragfence.open(store, objects=world.objects, tenant=tenant, policy=Policy(), journal=world.folder / tenant)
    world.opened.append(fence)
    return fence


def test_what_the_object_store_dates_to_a_short_while_ago_is_not_even_read(old_memory: World) -> None:
    objects = FaultyObjects(MemoryObjects(old_memory.clock))
    fence = old_memory.open(objects=objects)
    for number in range(20):
        perform(fence, ticket(str(number)))
    grow_old(old_memory)
    perform(fence, ticket("young"))
    objects.calls.clear()
    assert fence.purge_expired().objects == 20
    assert objects.calls["get"] == 40, "each that goes is read twice, the young one never"


def test_an_object_store_whose_clock_is_behind_ends_no_life_early(old_memory: World) -> None:
    objects = MemoryObjects(lambda: old_memory.clock() - 30 * DAY_MS)
    fence = old_memory.open(objects=objects)
    receipt = perform(fence, ticket(), result="first")
    old_memory.store.flush()  # so that nothing but the commit's own time protects it
    assert fence.purge_expired().objects == 0
    assert perform(fence, ticket()) == receipt


def test_a_store_that_forgot_is_hydrated_before_anything_is_purged(old_memory: World) -> None:
    """Its records are still there, and protect; it only may not show them."""
    fence = old_memory.open()
    perform(fence, ticket("protected"), result="first")
    perform(fence, ticket("over"))
    grow_old(old_memory)
    perform(fence, ticket("protected"))
    old_memory.store.restart()
    assert fence.purge_expired().objects == 1
    old_memory.store.flush()
    assert perform(fence, ticket("protected")).result == "first"
    assert perform(fence, ticket("over")).is_new
    assert_audited(fence)


@pytest.mark.parametrize("garbage", [b"", b"{}", b"\x00", b'{"version": 999}'])
def test_what_nobody_can_read_is_left_alone_and_stops_nobody(old_memory: World, garbage: bytes) -> None:
    fence = old_memory.open()
    perform(fence, ticket("a"))
    (name,) = names(old_memory)
    old_memory.objects.delete([name])  # type: ignore[union-attr]
    old_memory.objects.put_new(name, garbage)  # type: ignore[union-attr]
    old_memory.objects.put_new("default/sealed/ticket/stranger", b"?")  # type: ignore[union-attr]
    perform(fence, ticket("b"))
    grow_old(old_memory)
    assert fence.purge_expired() == Purged(records=2, objects=1, scanned=3, after="")
    assert names(old_memory) == sorted([name, "default/sealed/ticket/stranger"])


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_must_be_positive(old_memory: World, limit: int) -> None:
    with pytest.raises(ValidationError, match="at least 1"):
        old_memory.open().purge_expired(limit)


@pytest.mark.parametrize("after", ["x", "other/sealed/ticket", "default/segments/1"])
def test_a_cursor_from_elsewhere_is_refused(old_memory: World, after: str) -> None:
    with pytest.raises(ValidationError, match="not a place among the commits") as refused:
        old_memory.open().purge_expired(after=after)
    assert "`after`" in refused.value.hint


class Counting(Wrapped):
    """Counts requests, and the objects that a listing showed."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.shown = self.lists = self.gets = self.deletes = 0

    def list(self, *args: Any, **kwargs: Any) -> Iterator[ObjectEntry]:
        self.lists += 1
        for entry in self.inner.list(*args, **kwargs):
            self.shown += 1
            yield entry

    def get(self, name: str) -> bytes | None:
        self.gets += 1
        return self.inner.get(name)  # type: ignore[no-any-return]

    def delete(self, names: Any) -> None:
        self.deletes += 1
        self.inner.delete(names)


@pytest.mark.parametrize("sequenced", [False, True])
@pytest.mark.parametrize("limit", [1, 10, 100])
def test_a_call_does_bounded_work_however_much_there_is(old_memory: World, limit: int, sequenced: bool) -> None:
    fence = old_memory.open()
    for number in range(60):
        perform(fence, ticket("a", number) if sequenced else ticket(str(number)))
    grow_old(old_memory, SOURCE_TTL_MS)
    fence.hydrate()
    objects = Counting(old_memory.objects)
    purger = old_memory.open(objects=objects)  # type: ignore[arg-type]
    purged = purger.purge_expired(limit)
    assert purged.scanned == min(limit, 60)
    assert 0 < purged.objects <= limit or (sequenced and limit == 1)
    assert purged.records <= limit
    looked_at = objects.shown - 64  # hydration looks for newer epochs, whatever the limit
    assert objects.gets <= 2 * purged.scanned + 2
    assert objects.deletes <= purged.scanned
    assert objects.lists <= 6
    assert looked_at <= purged.scanned + 6


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_the_cursor_walks_through_everything_once_while_others_come_and_go(old_memory: World, limit: int) -> None:
    fence = old_memory.open()
    for number in range(20):
        perform(fence, ticket(str(number)))
        perform(fence, ticket("sequenced", number, revision=str(number % 3)))  # some of them leave marks
    there, seen = set(names(old_memory)), []
    commits = Commits("default", old_memory.objects)  # type: ignore[arg-type]
    after, coming = "", itertools.count(1000)
    scanned = 0
    while True:
        page = commits.page(after, limit)
        scanned += page.scanned
        seen += [entry.name for kept in page.kept for entry in kept.entries]
        assert page.scanned <= limit
        perform(fence, ticket(str(next(coming))))
        if not page.after:
            break
        assert page.after > after
        after = page.after
    assert scanned == len(seen) == len(set(seen))
    assert there <= set(seen)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_a_walk_purges_everything_that_was_over_when_it_began(old: World, limit: int) -> None:
    fence = old.open()
    for number in range(12):
        perform(fence, ticket(str(number)))
    grow_old(old)
    first = fence.purge_expired(limit)
    purged, young = first.objects, 0
    while first.after:
        perform(fence, ticket(f"young {young}"))
        young += 1
        first = fence.purge_expired(limit, after=first.after)
        purged += first.objects
    assert purged == 12
    assert len(names(old)) == young
    assert purge_all(fence, limit).objects == 0
    assert_audited(fence)
