"""Aliases: moved only to what was sealed, by one at a time, with the log as history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragfence.core.operations import Operation
from ragfence.engine import crash_points
from ragfence.errors import (
    AliasMoved,
    AliasUnknown,
    BuildMissing,
    BuildRetired,
    FormatCorrupt,
    GateFailed,
    InFlight,
    NotSealed,
    StoreUnavailable,
    ValidationError,
)
from ragfence.indexes import aliases as module
from ragfence.indexes.alias_checks import alias_findings
from ragfence.indexes.aliases import AFTER_CATALOG, AFTER_POINT
from ragfence.indexes.build_log import next_purged, next_retired
from ragfence.indexes.catalog import CatalogEntry
from ragfence.indexes.gates import Gates
from tests.indexes.alias_world import TEXTS, AliasWorld, hash_of


@pytest.fixture
def world(tmp_path: Path) -> Iterator[AliasWorld]:
    made = AliasWorld(tmp_path)
    yield made
    crash_points.visitor = None
    made.close()


def log(world: AliasWorld) -> list[tuple[int, str, str]]:
    return [(entry.number, entry.change, entry.alias) for entry in world.catalog.entries()]


def decisions(world: AliasWorld) -> Counter[tuple[str, str, str]]:
    """What the decision rows say of aliases that were moved: how often each was sealed."""
    rows = world.fence.audit.decisions().to_pylist()
    return Counter(
        (row["source_id"], row["revision"], row["action"])
        for row in rows
        if row["kind"] == "alias" and row["decision"] == "new" and row["sealed_at"]
    )


def test_an_alias_points_where_it_was_swapped_to(world: AliasWorld) -> None:
    one, two = world.build("one"), world.build("two")
    first = world.aliases.swap("docs", one, reason="the first", actor="ann")
    assert (first.changed, first.generation, first.previous, first.audited, first.applied) == (
        True,
        1,
        None,
        True,
        True,
    )
    second = world.aliases.swap("docs", two, expect=one)
    assert second.previous == first.target
    target = world.aliases.resolve("docs")
    assert (target.index_hash, target.physical, target.seal, target.generation) == (two, world.physical(two), 1, 2)
    assert world.new_aliases().resolve("docs") == target
    assert world.backend.pointer("docs@default") == (target.physical, 2)
    assert world.aliases.names() == ["docs"]
    assert [(entry.number, entry.actor, entry.reason) for entry in world.aliases.history("docs")][1] == (
        1,
        "ann",
        "the first",
    )
    assert decisions(world) == {("docs", "1", "swap"): 1, ("docs", "2", "swap"): 1}
    assert list(alias_findings(world.catalog, world.builds)) == []


def test_an_alias_that_was_never_swapped_is_unknown(world: AliasWorld) -> None:
    for ask in (world.aliases.resolve, world.aliases.rollback, world.aliases.remove, world.aliases.history):
        with pytest.raises(AliasUnknown, match="no alias 'docs'"):
            ask("docs")
    with pytest.raises(ValidationError, match="not a valid name for an alias"):
        world.aliases.resolve("Docs!")


@pytest.mark.parametrize("wrong", ["", "a/b", "../x", None, 5, "x" * 300])
def test_what_cannot_be_a_hash_is_refused(world: AliasWorld, wrong: Any) -> None:
    with pytest.raises(ValidationError, match="not a valid INDEX_HASH"):
        world.aliases.swap("docs", wrong)


def test_each_build_that_is_not_whole_is_refused_with_its_own_error(world: AliasWorld, tmp_path: Path) -> None:
    good = world.build("good")
    world.aliases.swap("docs", good)
    before = log(world)

    with pytest.raises(NotSealed, match="this tenant has no build") as unheard_of:
        world.aliases.swap("docs", hash_of("unheard of"))
    assert type(unheard_of.value) is NotSealed

    elsewhere = AliasWorld(tmp_path, tenant="somebody-else")
    theirs = elsewhere.build("theirs")
    elsewhere.close()
    with pytest.raises(NotSealed, match="this tenant has no build"):
        world.aliases.swap("docs", theirs)

    world.write(world.begin("unfinished"))
    with pytest.raises(NotSealed, match="builder began to build it, and has not finished or has failed"):
        world.aliases.swap("docs", hash_of("unfinished"))

    corrupt = world.build("corrupt")
    objects = world.engine.objects
    assert objects is not None
    (name,) = [entry.name for entry in objects.list(f"default/builds/{corrupt}/")]
    objects.delete([name])
    objects.put_new(name, b'{"version":1,"kind":"sealed"')
    with pytest.raises(FormatCorrupt, match="not a valid entry of a build"):
        world.aliases.swap("docs", corrupt)

    strange = world.build("strange")
    (name,) = [entry.name for entry in objects.list(f"default/builds/{strange}/")]
    data = objects.get(name)
    assert data is not None
    objects.delete([name])
    objects.put_new(name, data.replace(strange.encode(), good.encode()))
    with pytest.raises(FormatCorrupt, match="the seal of"):
        world.aliases.swap("docs", strange)

    dropped = world.build("dropped")
    world.backend.drop(world.physical(dropped))
    with pytest.raises(BuildMissing, match="is sealed, but rf-"):
        world.aliases.swap("docs", dropped)
    with pytest.raises(BuildMissing):
        world.aliases.swap("docs", dropped, force=True, reason="I want it")

    old = world.build("old")
    newest = world.builds.newest(old)
    world.builds.append(old, next_retired(newest, at_ms=1, owner="gc", reason="no alias can reach it"))
    with pytest.raises(BuildRetired, match="was retired"):
        world.aliases.swap("docs", old)

    given_up = world.begin("given up")
    world.builds.append(given_up.index_hash, next_retired(None, at_ms=1, owner="gc", reason="given up"))
    with pytest.raises(NotSealed) as never:
        world.aliases.swap("docs", given_up.index_hash)
    assert type(never.value) is NotSealed

    assert log(world) == before
    assert world.aliases.resolve("docs").index_hash == good


def test_a_build_that_is_being_retired_is_refused(world: AliasWorld) -> None:
    one, two = world.build("one"), world.build("two")
    world.aliases.swap("docs", one)
    at_retire = lambda point: (_ for _ in ()).throw(KeyboardInterrupt) if point == "after_retire" else None  # noqa: E731
    crash_points.visitor = at_retire
    with pytest.raises(KeyboardInterrupt):
        world.collecting.gc(dry_run=False)
    crash_points.visitor = None
    with pytest.raises(BuildRetired, match="being retired"):
        world.aliases.swap("docs", two)
    assert world.collecting.restore(two).number == 2
    assert world.aliases.swap("docs", two).target.seal == 2  # type: ignore[union-attr]


def test_an_alias_that_moved_is_not_overwritten(world: AliasWorld) -> None:
    one, two, three = (world.build(name) for name in ("one", "two", "three"))
    with pytest.raises(AliasMoved, match="does not exist") as missing:
        world.aliases.swap("docs", one, expect=two)
    assert (missing.value.current, missing.value.generation) == (None, None)
    world.aliases.swap("docs", one, expect=None)
    with pytest.raises(AliasMoved, match="expected not to exist"):
        world.aliases.swap("docs", two, expect=None)
    world.new_aliases().swap("docs", two)
    with pytest.raises(AliasMoved) as moved:
        world.aliases.swap("docs", three, expect=one)
    assert (moved.value.current, moved.value.generation) == (two, 2)
    with pytest.raises(AliasMoved):
        world.aliases.rollback("docs", expect=one)
    with pytest.raises(AliasMoved):
        world.aliases.remove("docs", expect=one)
    assert len(log(world)) == 2


def racing(world: AliasWorld, monkeypatch: pytest.MonkeyPatch, act: Any, times: int = 1) -> None:
    """Somebody else changes the catalog right before an append."""
    append, left = world.aliases.catalog.append, times

    def beaten(entry: CatalogEntry) -> bool:
        nonlocal left
        if left:
            left -= 1
            act()
        return append(entry)

    monkeypatch.setattr(world.aliases.catalog, "append", beaten)


def test_who_lost_the_number_tries_again_and_does_not_ask_the_gates_again(
    world: AliasWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = (world.build(name) for name in ("one", "two", "three"))
    world.aliases.swap("docs", one)
    racing(world, monkeypatch, lambda: world.new_aliases().swap("staging", three))
    gates = Gates(min_overlap=0.1)
    swapped = world.aliases.swap("docs", two, expect=one, gates=gates)
    assert swapped.generation == 3
    assert world.backend.searches == 2 * len(TEXTS), "asked once, of the new and of the live build"


def test_who_lost_to_another_swap_of_the_alias_is_told_where_it_is(
    world: AliasWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = (world.build(name) for name in ("one", "two", "three"))
    world.aliases.swap("docs", one)
    racing(world, monkeypatch, lambda: world.new_aliases().swap("docs", three))
    with pytest.raises(AliasMoved) as moved:
        world.aliases.swap("docs", two, expect=one)
    assert moved.value.current == three
    assert len(log(world)) == 2


def test_without_an_expectation_the_last_one_wins_and_the_gates_look_at_what_is_live_now(
    world: AliasWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, huge = (
        world.build("one"),
        world.build("two"),
        world.build("huge", [*TEXTS, *(f"t {n}" for n in range(50))]),
    )
    world.aliases.swap("docs", one)
    racing(world, monkeypatch, lambda: world.new_aliases().swap("docs", huge))
    with pytest.raises(GateFailed, match="shrinkage"):
        world.aliases.swap("docs", two)
    assert world.aliases.resolve("docs").index_hash == huge


def test_a_build_that_is_retired_while_the_gates_look_at_it_is_refused(
    world: AliasWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = world.build("one"), world.build("two")
    world.aliases.swap("docs", one)
    racing(world, monkeypatch, lambda: world.collecting.gc(dry_run=False))
    with pytest.raises(BuildRetired):
        world.aliases.swap("docs", two)
    assert world.aliases.resolve("docs").index_hash == one
    assert world.backend.drops() == [world_dropped(world, two)]


def test_a_build_that_was_retired_and_forgotten_by_the_catalog_meanwhile_is_refused(
    world: AliasWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gates were passed, and the new head does not say any more that it is retired: only its own log does."""
    one, two = world.build("one"), world.build("two")
    world.aliases.swap("docs", one)

    def collect() -> None:
        world.collecting.gc(dry_run=False)
        world.new_aliases().swap("staging", one)
        assert world.catalog.head().state.retiring == {}

    racing(world, monkeypatch, collect)
    with pytest.raises(BuildRetired):
        world.aliases.swap("docs", two)
    assert [change for _, change, _ in log(world)] == ["swap", "retire", "swap"]
    assert list(alias_findings(world.catalog, world.builds)) == []


def world_dropped(world: AliasWorld, index_hash: str) -> str:
    entry = world.builds.at(index_hash, 1)
    assert entry is not None
    assert entry.seal is not None
    return entry.seal.physical


def test_a_build_that_is_dropped_while_the_gates_look_at_it_is_said_to_be_retired(
    world: AliasWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = world.build("one"), world.build("two")
    world.aliases.swap("docs", one)
    exists = world.backend.exists

    def late(physical: str) -> bool:
        monkeypatch.setattr(world.backend, "exists", exists)
        world.collecting.gc(dry_run=False)
        return exists(physical)

    monkeypatch.setattr(world.backend, "exists", late)
    with pytest.raises(BuildRetired):
        world.aliases.swap("docs", two)


def test_a_catalog_that_never_stands_still_is_given_up(world: AliasWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    one = world.build("one")
    monkeypatch.setattr(world.aliases, "_sleep", lambda _: None)
    monkeypatch.setattr(world.aliases.catalog, "append", lambda entry: False)
    with pytest.raises(InFlight, match="other processes changed the catalog 64 times"):
        world.aliases.swap("docs", one)


def test_a_swap_to_where_it_points_already_adds_nothing(world: AliasWorld) -> None:
    one = world.build("one")
    first = world.aliases.swap("docs", one)
    again = world.aliases.swap("docs", one, expect=one)
    assert not again.changed
    assert (again.target, again.generation) == (first.target, 1)
    newest = world.builds.newest(one)
    assert newest is not None
    world.builds.append(one, next_purged(newest, rows=5, documents=5, content_digest="", at_ms=2, owner="me"))
    assert not world.aliases.swap("docs", one).changed, "the same physical index"
    assert len(log(world)) == 1


def test_a_hash_that_was_built_again_is_another_target(world: AliasWorld) -> None:
    one = world.build("one")
    world.aliases.swap("docs", one)
    newest = world.builds.newest(one)
    world.builds.append(one, next_retired(newest, at_ms=1, owner="somebody", reason="its rows were lost"))
    assert [finding.invariant for finding in alias_findings(world.catalog, world.builds)] == ["not_retired"]
    world.build("one")
    assert world.aliases.swap("docs", one).changed
    assert world.aliases.resolve("docs").seal == 3
    assert list(alias_findings(world.catalog, world.builds)) == []


def test_an_operation_of_two_swaps_that_was_cut_off_between_them_does_the_second(world: AliasWorld) -> None:
    canary, release = world.build("canary"), world.build("release")
    attempts = []

    @world.fence.once(kind="deploy", key=lambda name: (name, "1"))
    def deploy(name: str) -> list[str | None]:
        attempts.append(name)
        first = world.aliases.swap("docs", canary)
        if len(attempts) == 1:
            raise RuntimeError("cut off")
        second = world.aliases.swap("docs", release)
        if len(attempts) == 2:
            raise RuntimeError("cut off")
        return [first.index_hash, second.index_hash]

    for _ in range(2):
        with pytest.raises(RuntimeError):
            deploy("docs")
        assert world.aliases.resolve("docs").index_hash == (canary, release)[len(attempts) - 1]
    assert deploy("docs").result == [canary, release]
    assert [entry.target.index_hash for entry in world.aliases.history("docs") if entry.target] == [release, canary]


def test_a_rollback_goes_to_the_build_before_and_back(world: AliasWorld) -> None:
    one, two, three = (world.build(name) for name in ("one", "two", "three"))
    for each in (one, two, three):
        world.aliases.swap("docs", each)
    assert world.aliases.rollback("docs", reason="it is bad").index_hash == two
    assert world.aliases.rollback("docs").index_hash == three
    assert world.aliases.rollback("docs", to=one, expect=three).index_hash == one
    assert not world.aliases.rollback("docs", to=one).changed
    assert [change for _, change, _ in log(world)] == ["rollback"] * 3 + ["swap"] * 3
    assert world.catalog.at(4).reason == "it is bad"  # type: ignore[union-attr]
    with pytest.raises(ValidationError, match="is not among the recent builds of"):
        world.aliases.rollback("docs", to=hash_of("never"))
    assert decisions(world)["docs", "4", "rollback"] == 1


@pytest.mark.parametrize("released", [False, True], ids=["", "released"])
def test_a_swap_that_was_cut_off_is_not_made_again_after_another_one(world: AliasWorld, released: bool) -> None:
    one, two = world.build("one"), world.build("two")
    operation = Operation(kind="deploy", source_id="docs", revision="1")
    with world.fence.claim(operation):
        world.aliases.swap("docs", two)  # and no seal: its reply was lost
    world.aliases.swap("docs", one)
    if released:  # its attempts start again at 1
        assert world.fence.release(operation)
    with world.fence.claim(operation) as op:
        assert op.is_new
        assert op.lease.attempt == (1 if released else 2)
        assert world.aliases.swap("docs", two).generation == 1
        op.seal()
    assert world.aliases.resolve("docs").index_hash == one
    assert len(log(world)) == 2


def test_no_secret_of_a_reason_is_kept(world: AliasWorld, tmp_path: Path) -> None:
    one, two = world.build("one"), world.build("two")
    reason = "it has password=hunter2 in it".rjust(1000)  # the longest there may be
    world.aliases.swap("docs", one, reason=reason)
    world.aliases.swap("docs", two, reason=reason, force=True)
    world.aliases.rollback("docs", reason=reason)
    world.aliases.remove("docs", reason)
    assert ["[redacted]" in entry.reason for entry in world.aliases.history("docs")] == [True] * 4
    with pytest.raises(ValidationError, match="reason may have at most"):
        world.aliases.swap("docs", one, reason=f"{reason}!")
    world.fence.audit.drain()
    stored = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"hunter2" not in stored


def test_a_rollback_passes_over_what_was_retired(world: AliasWorld) -> None:
    one, two, three = (world.build(name) for name in ("one", "two", "three"))
    for each in (one, two, three):
        world.aliases.swap("docs", each)
    world.builds.append(two, next_retired(world.builds.newest(two), at_ms=1, owner="gc", reason=""))
    with pytest.raises(BuildRetired):
        world.aliases.rollback("docs", to=two)
    assert world.aliases.rollback("docs").index_hash == one
    world.builds.append(three, next_retired(world.builds.newest(three), at_ms=1, owner="gc", reason=""))
    with pytest.raises(NotSealed, match="no earlier build that is still sealed"):
        world.aliases.rollback("docs")


def test_an_alias_that_was_removed_can_be_made_again(world: AliasWorld) -> None:
    one = world.build("one")
    world.aliases.swap("docs", one)
    removed = world.aliases.remove("docs", "nobody reads it")
    assert (removed.target, removed.generation) == (None, 2)
    assert world.backend.pointer("docs@default") is None
    assert world.aliases.names() == []
    with pytest.raises(AliasUnknown):
        world.aliases.resolve("docs")
    assert world.aliases.swap("docs", one, expect=None).generation == 3
    assert [entry.change for entry in world.aliases.history("docs")] == ["swap", "remove", "swap"]
    assert decisions(world)["docs", "2", "remove"] == 1
    assert list(alias_findings(world.catalog, world.builds)) == []


def test_resolving_costs_one_request_as_long_as_nothing_changed(
    world: AliasWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = world.build("one"), world.build("two")
    world.aliases.swap("docs", one)
    reader = world.new_aliases()
    reader.resolve("docs")
    calls: Counter[str] = Counter()
    objects = world.engine.objects
    for name in ("get", "list"):
        asked = getattr(objects, name)
        monkeypatch.setattr(
            objects, name, lambda *a, asked=asked, name=name, **k: (calls.update([name]), asked(*a, **k))[1]
        )
    assert reader.resolve("docs").index_hash == one
    assert calls == {"get": 1}
    world.aliases.swap("docs", two)
    assert reader.resolve("docs").index_hash == two


def test_a_swap_happens_while_the_fence_store_is_away_and_is_audited_later(
    world: AliasWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = world.build("one"), world.build("two")
    world.aliases.swap("docs", one)

    def away(*_: object, **__: object) -> Any:
        raise StoreUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(world.engine.fences, "claim", away)
        patch.setattr(world.engine.fences, "now_ms", away)
        swapped = world.aliases.swap("docs", two)
        assert (swapped.audited, swapped.applied, swapped.changed) == (False, True, True)
        assert world.aliases.reconcile().failed
    assert world.aliases.resolve("docs").index_hash == two
    assert decisions(world) == {("docs", "1", "swap"): 1}
    assert world.aliases.reconcile().audited == ("docs@2",)
    assert world.aliases.reconcile().audited == ()
    assert decisions(world) == {("docs", "1", "swap"): 1, ("docs", "2", "swap"): 1}
    assert world.fence.audit.check().ok


def test_a_swap_too_old_to_be_known_is_not_audited_again(world: AliasWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.aliases.swap("docs", world.build("one"))
    now_ms = world.engine.fences.now_ms()
    monkeypatch.setattr(world.engine.fences, "now_ms", lambda: now_ms + 49 * 3_600_000)
    assert world.aliases.reconcile().audited == ()


def test_a_backend_that_is_away_is_behind_and_reconciled(world: AliasWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = world.build("one"), world.build("two")
    world.aliases.swap("docs", one)

    def broken(*_: object) -> None:
        raise RuntimeError("what a backend may raise")

    with monkeypatch.context() as patch:
        patch.setattr(world.backend, "point", broken)
        swapped = world.aliases.swap("docs", two)
        assert (swapped.applied, swapped.audited) == (False, True)
        assert world.aliases.reconcile().failed == ("docs: what a backend may raise",)
    assert world.backend.pointer("docs@default") == (world.physical(one), 1)
    assert world.aliases.resolve("docs").index_hash == two
    done = world.aliases.reconcile()
    assert (done.pointed, done.removed, done.failed, done.generation) == (("docs",), (), (), 2)
    assert world.backend.pointer("docs@default") == (world.physical(two), 2)
    assert world.aliases.reconcile().pointed == ()


def test_pointers_of_removed_aliases_are_removed(world: AliasWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.aliases.swap("docs", world.build("one"))
    with monkeypatch.context() as patch:
        patch.setattr(world.backend, "unpoint", lambda alias: (_ for _ in ()).throw(StoreUnavailable("away")))
        assert not world.aliases.remove("docs", "gone").applied
    assert world.backend.pointer("docs@default") is not None
    assert world.aliases.reconcile().removed == ("docs",)
    assert world.backend.pointer("docs@default") is None


def test_an_alias_that_moves_to_another_backend_leaves_the_first(world: AliasWorld) -> None:
    one = world.build("one")
    world.aliases.swap("docs", one)
    attempt = replace(world.begin("two"), backend="other")
    assert world.seal(attempt, world.write(attempt))
    world.aliases.swap("docs", attempt.index_hash)
    assert world.backend.pointer("docs@default") is None
    assert world.other.pointer("docs@default") == (attempt.physical, 2)
    world.backend.point("docs@default", world.physical(one), 1)  # a zombie
    assert world.aliases.reconcile().removed == ("docs",)
    assert world.backend.pointer("docs@default") is None
    assert world.other.pointer("docs@default") == (attempt.physical, 2)


def test_who_is_overtaken_between_log_and_backend_applies_what_is_newest(world: AliasWorld) -> None:
    """The slow one's backend has no generations: its late word would be the last."""
    one, two, three = (world.build(name) for name in ("one", "two", "three"))
    world.aliases.swap("docs", one)
    point = world.backend.point

    def without_fence(alias: str, physical: str, generation: int) -> None:
        world.backend.unpoint(alias)
        if physical == world.physical(two):
            world.backend.point = point  # type: ignore[method-assign]
            world.new_aliases().swap("docs", three)
            world.backend.unpoint(alias)
        point(alias, physical, generation)

    world.backend.point = without_fence  # type: ignore[method-assign]
    world.aliases.swap("docs", two)
    assert world.backend.pointer("docs@default") == (world.physical(three), 3)


@pytest.mark.parametrize("repair", ["reconcile", "again", "next"])
@pytest.mark.parametrize("point", module.ALIAS_POINTS)
def test_whoever_stops_anywhere_after_the_entry_has_swapped(world: AliasWorld, point: str, repair: str) -> None:
    one, two, three = (world.build(name) for name in ("one", "two", "three"))
    world.aliases.swap("docs", one)

    def stop(reached: str) -> None:
        if reached == point:
            raise KeyboardInterrupt

    crash_points.visitor = stop
    with pytest.raises(KeyboardInterrupt):
        world.aliases.swap("docs", two)
    crash_points.visitor = None
    world.aliases = world.new_aliases()
    assert world.aliases.resolve("docs").index_hash == two
    assert (world.backend.pointer("docs@default") == (world.physical(two), 2)) == (point == AFTER_POINT)
    last = two
    if repair == "reconcile":
        done = world.aliases.reconcile()
        assert done.audited == (("docs@2",) if point == AFTER_CATALOG else ())
        assert done.pointed == (() if point == AFTER_POINT else ("docs",))
    elif repair == "again":
        assert not world.aliases.swap("docs", two).changed
    else:
        last = three
        world.aliases.swap("docs", three)
        world.aliases.reconcile()
    pointer = world.backend.pointer("docs@default")
    assert pointer is not None
    assert pointer.physical == world.physical(last)
    assert set(decisions(world).values()) == {1}
    assert len(decisions(world)) == len(log(world))
    assert list(alias_findings(world.catalog, world.builds)) == []
    assert world.fence.audit.check().ok
