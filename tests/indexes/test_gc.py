"""gc: what no alias can reach is retired, then dropped; what may still be sealed or used is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ragfence.engine import crash_points
from ragfence.errors import BuildRetired, NotSealed
from ragfence.indexes.alias_checks import alias_findings
from ragfence.indexes.build_log import next_purged
from ragfence.indexes.gc import AFTER_RETIRE, AFTER_RETIRED, GC_POINTS, BuildCollector, GcReport
from tests.indexes.alias_world import AliasWorld, hash_of

HOUR_MS = 3_600_000


@pytest.fixture
def world(tmp_path: Path) -> Iterator[AliasWorld]:
    made = AliasWorld(tmp_path)
    yield made
    crash_points.visitor = None
    made.close()


def at(point: str, act: Callable[[], None]) -> None:
    """Acts the first time that somebody comes by the point."""

    def visit(reached: str) -> None:
        if reached == point:
            crash_points.visitor = None
            act()

    crash_points.visitor = visit


def stop() -> None:
    raise KeyboardInterrupt


def gc(world: AliasWorld, **more: Any) -> GcReport:
    report = world.collecting.gc(dry_run=False, **more)
    assert list(alias_findings(world.catalog, world.builds)) == []
    return report


def five_builds(world: AliasWorld) -> list[str]:
    """An alias had all of them, one after the other."""
    hashes = [world.build(f"build {number}") for number in range(5)]
    for index_hash in hashes:
        world.aliases.swap("docs", index_hash)
    return hashes


def test_a_dry_run_tells_and_does_nothing(world: AliasWorld) -> None:
    hashes = five_builds(world)
    world.begin("unfinished", at_ms=0)
    head, held = world.catalog.head(), world.backend.physicals()
    report = world.collecting.gc()
    assert (report.dry_run, report.retired, sorted(report.kept)) == (True, [hashes[0]], sorted(hashes[1:]))
    assert report.dropped == [world.physical(hashes[0])]
    assert (world.catalog.head(), world.backend.physicals(), world.backend.drops()) == (head, held, [])
    assert world.builds.attempts()


def test_what_no_alias_can_reach_is_retired_and_dropped(world: AliasWorld) -> None:
    first, *rest = five_builds(world)
    physical = world.physical(first)
    report = gc(world)
    assert (report.retired, report.dropped, sorted(report.kept)) == ([first], [physical], sorted(rest))
    assert not world.backend.exists(physical)
    assert all(world.backend.exists(world.physical(each)) for each in rest)
    assert world.builds.newest(first).kind == "retired"  # type: ignore[union-attr]
    assert world.catalog.head().change == "retire"
    with pytest.raises(BuildRetired):
        world.aliases.swap("docs", first)
    again = gc(world)
    assert (again.retired, again.dropped, again.failed) == ([], [], [])
    assert world.backend.drops() == [physical]


def test_the_policy_says_how_many_targets_are_kept(tmp_path: Path) -> None:
    world = AliasWorld(tmp_path, policy={"indexes": {"keep_targets": 1}})
    hashes = five_builds(world)
    assert sorted(gc(world).retired) == sorted(hashes[:3])
    assert world.aliases.rollback("docs").index_hash == hashes[3]
    world.close()


def test_a_removed_alias_keeps_nothing(world: AliasWorld) -> None:
    hashes = five_builds(world)
    world.aliases.swap("staging", hashes[2])
    world.aliases.remove("docs", "nobody reads it")
    report = gc(world)
    assert report.kept == [hashes[2]]
    assert len(report.retired) == 4


def test_a_build_that_was_retired_can_be_built_again(world: AliasWorld) -> None:
    first = five_builds(world)[0]
    old = world.physical(first)
    gc(world)
    assert world.build("build 0") == first
    assert world.physical(first) != old
    assert world.aliases.swap("docs", first).target.seal == 3  # type: ignore[union-attr]
    report = gc(world)
    assert first in report.kept
    assert world.backend.exists(world.physical(first))


def test_builds_sealed_lately_are_spared_where_it_is_asked_for(world: AliasWorld) -> None:
    one = world.build("one")
    assert gc(world, min_age_s=60).young == [one]
    assert gc(world).retired == [one]


@pytest.mark.parametrize("point", GC_POINTS)
def test_whoever_stops_in_between_is_completed_by_the_next(world: AliasWorld, point: str) -> None:
    first = five_builds(world)[0]
    physical = world.physical(first)
    at(point, stop)
    with pytest.raises(KeyboardInterrupt):
        world.collecting.gc(dry_run=False)
    assert world.catalog.head().state.retiring == {first: 1}
    assert world.backend.exists(physical)
    with pytest.raises(BuildRetired):
        world.aliases.swap("docs", first)
    assert world.collecting.gc().dropped == [physical]
    report = gc(world, min_age_s=3600 if point == AFTER_RETIRE else 0)
    assert (report.retired, report.dropped) == ([first] if point == AFTER_RETIRE else [], [physical])
    assert not world.backend.exists(physical)
    retires = [entry for entry in world.catalog.entries() if entry.change == "retire"]
    assert len(retires) == 1
    world.build("build 0")
    world.aliases.swap("docs", first)
    assert world.catalog.head().state.retiring == {}


def test_what_was_left_of_a_build_that_was_built_again_is_dropped_too(world: AliasWorld) -> None:
    first = five_builds(world)[0]
    physical = world.physical(first)
    at(AFTER_RETIRED, stop)
    with pytest.raises(KeyboardInterrupt):
        world.collecting.gc(dry_run=False)
    world.build("build 0")
    world.aliases.swap("docs", first)
    report = gc(world)
    assert physical in report.dropped
    assert world.backend.exists(world.physical(first))
    assert world.physical(first) != physical


def test_what_is_listed_but_cannot_be_opened_costs_no_entry_of_the_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that lists what it dropped, or a drop that was cut off: nobody can serve it, so nobody is fenced."""
    world = AliasWorld(tmp_path, policy={"indexes": {"keep_targets": 1}})
    left = [world.physical(index_hash) for index_hash in five_builds(world)[:3]]
    gc(world)
    listed = world.backend.physicals
    monkeypatch.setattr(world.backend, "physicals", lambda: sorted([*listed(), *left]))
    head, drops = world.catalog.head(), len(world.backend.drops())
    for _ in range(3):
        gc(world)
    assert world.catalog.head() == head
    assert sorted(world.backend.drops()[drops:]) == sorted(left * 3), "whatever is left of them is deleted"
    world.close()


def built_again(world: AliasWorld, name: str) -> None:
    """A document of the build was purged, then came back: the same INDEX_HASH, in another physical index."""
    newest = world.builds.newest(hash_of(name))
    assert newest is not None
    after = next_purged(newest, rows=4, documents=4, content_digest="x", at_ms=newest.at_ms, owner="me")
    assert world.builds.append(hash_of(name), after)
    world.build(name)


def test_a_physical_index_that_an_alias_serves_is_kept_when_its_build_was_made_again(world: AliasWorld) -> None:
    one = world.build("one")
    world.aliases.swap("docs", one)
    served = world.physical(one)
    built_again(world, "one")
    assert world.collecting.gc().dropped == []
    head = world.catalog.head()
    report = gc(world)
    assert (report.kept, report.dropped) == ([one], [])
    assert world.aliases.resolve("docs").physical == served
    assert world.backend.exists(served)
    assert world.catalog.head() == head
    world.aliases.swap("docs", one)
    assert world.aliases.resolve("docs").physical == world.physical(one) != served
    assert gc(world).dropped == [served]
    assert world.backend.physicals() == [world.physical(one)]
    assert gc(world).dropped == []


def test_a_swap_that_chose_a_build_before_it_was_made_again_never_serves_what_gc_drops(
    world: AliasWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world.build("one")
    before = world.physical(one)
    append = world.aliases.catalog.append

    def late(entry: Any) -> bool:
        monkeypatch.setattr(world.aliases.catalog, "append", append)
        built_again(world, "one")
        assert gc(world, min_age_s=60).dropped == [before]
        return append(entry)

    monkeypatch.setattr(world.aliases.catalog, "append", late)
    world.aliases.swap("docs", one)
    assert world.aliases.resolve("docs").physical == world.physical(one) != before
    assert gc(world).missing == []


def test_gc_of_what_was_built_again_leaves_what_is_swapped_to_meanwhile(
    world: AliasWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, before = world.build("one"), world.physical(hash_of("one"))
    swapping, collecting = world.aliases.catalog.append, world.collecting._catalog.append

    def collected(entry: Any) -> bool:
        """The swap is at its entry, and gets the number that gc wants."""
        monkeypatch.setattr(world.aliases.catalog, "append", swapping)
        monkeypatch.setattr(world.collecting._catalog, "append", lambda late: swapping(entry) and collecting(late))
        built_again(world, "one")
        report = gc(world, min_age_s=60)
        assert (report.dropped, report.failed) == ([], [])
        return True

    monkeypatch.setattr(world.aliases.catalog, "append", collected)
    world.aliases.swap("docs", one)
    assert world.aliases.resolve("docs").physical == before
    assert world.backend.exists(before)


def test_a_build_that_is_swapped_to_before_it_is_retired_is_left_alone(
    world: AliasWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = five_builds(world)[0]
    append = world.collecting._catalog.append

    def late(entry: Any) -> bool:
        monkeypatch.setattr(world.collecting._catalog, "append", append)
        world.aliases.swap("staging", first)
        return append(entry)

    monkeypatch.setattr(world.collecting._catalog, "append", late)
    report = gc(world)
    assert (report.revived, report.retired, report.dropped) == ([first], [], [])
    assert world.aliases.resolve("staging").index_hash == first
    assert world.backend.exists(world.physical(first))


def test_a_build_that_is_restored_in_time_is_left_alone(world: AliasWorld) -> None:
    first = five_builds(world)[0]
    physical = world.physical(first)
    at(AFTER_RETIRE, lambda: world.collecting.restore(first) and None)  # type: ignore[arg-type]
    report = gc(world)
    assert (report.revived, report.retired, report.dropped) == ([first], [], [])
    newest = world.builds.newest(first)
    assert newest is not None
    assert (newest.number, newest.kind, newest.reason) == (2, "sealed", "restored")
    assert [entry.change for entry in world.catalog.entries()][:2] == ["restore", "retire"]
    assert world.catalog.head().state.retiring == {}
    assert world.aliases.swap("docs", first).target.physical == physical  # type: ignore[union-attr]


def test_a_build_that_is_purged_meanwhile_is_left_alone(world: AliasWorld) -> None:
    first = five_builds(world)[0]

    def purge() -> None:
        newest = world.builds.newest(first)
        assert newest is not None
        assert world.builds.append(
            first, next_purged(newest, rows=5, documents=5, content_digest="x", at_ms=newest.at_ms, owner="me")
        )

    at(AFTER_RETIRE, purge)
    assert gc(world).revived == [first]
    assert world.catalog.head().state.retiring == {first: 1}
    assert world.aliases.swap("docs", first).target.seal == 2, "its newer seal is not being retired"  # type: ignore[union-attr]
    assert world.catalog.head().state.retiring == {}


def test_a_build_that_lacks_a_purged_document_is_restored_as_such(world: AliasWorld) -> None:
    """As `sealed` it would answer whoever has the document again, and builds."""
    first = five_builds(world)[0]
    sealed = world.builds.newest(first)
    assert sealed is not None
    lacking = next_purged(sealed, rows=4, documents=4, content_digest="x", at_ms=sealed.at_ms, owner="me")
    assert world.builds.append(first, lacking)
    at(AFTER_RETIRE, lambda: world.collecting.restore(first) and None)  # type: ignore[arg-type]
    assert gc(world).revived == [first]
    newest = world.builds.newest(first)
    assert newest is not None
    assert (newest.number, newest.kind, newest.reason) == (3, "purged", "restored")


def test_restoring(world: AliasWorld) -> None:
    first = five_builds(world)[0]
    assert world.collecting.restore(first) == world.builds.newest(first), "nothing to do"
    assert world.catalog.head().number == 5
    with pytest.raises(NotSealed):
        world.collecting.restore(hash_of("never"))
    gc(world)
    with pytest.raises(BuildRetired):
        world.collecting.restore(first)


def test_gc_that_is_faster_than_a_restore_wins(world: AliasWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    first = five_builds(world)[0]
    at(AFTER_RETIRE, stop)
    with pytest.raises(KeyboardInterrupt):
        world.collecting.gc(dry_run=False)
    append = world.builds.append
    other = BuildCollector(world.engine, type(world.builds)("default", world.engine.objects), world.backend_of)  # type: ignore[arg-type]

    def late(index_hash: str, entry: Any) -> bool:
        other.gc(dry_run=False)
        return append(index_hash, entry)

    monkeypatch.setattr(world.builds, "append", late)
    with pytest.raises(BuildRetired):
        world.collecting.restore(first)
    assert not world.backend.physicals().count(world.builds.at(first, 1).seal.physical)  # type: ignore[union-attr]


def test_an_attempt_that_may_be_alive_is_left_alone(world: AliasWorld) -> None:
    attempt = world.begin("one")
    seal = world.write(attempt)
    report = gc(world)
    assert (report.pending, report.dropped, report.unknown) == ([attempt.physical], [], [])
    assert world.seal(attempt, seal)
    world.aliases.swap("docs", attempt.index_hash)
    assert gc(world).kept == [attempt.index_hash]
    assert world.builds.attempts() == [], "it is sealed: forgotten"


@pytest.mark.parametrize("known", ["by its age", "by its lease"])
def test_an_attempt_whose_builder_is_dead_loses_its_number_and_is_dropped(world: AliasWorld, known: str) -> None:
    now_ms = world.engine.fences.now_ms()
    attempt = world.begin("one", at_ms=now_ms - 24 * HOUR_MS - 31_000 if known == "by its age" else None)
    seal = world.write(attempt)
    if known == "by its lease":
        world.over.add(attempt.token)
    report = gc(world)
    assert report.dropped == [attempt.physical]
    assert world.builds.attempts() == []
    assert not world.seal(attempt, seal), "a slow builder must not seal what is gone"
    with pytest.raises(NotSealed) as refused:
        world.aliases.swap("docs", attempt.index_hash)
    assert type(refused.value) is NotSealed
    world.build("one")
    assert world.aliases.swap("docs", attempt.index_hash).changed


def test_a_builder_that_seals_before_gc_takes_its_number_keeps_it(
    world: AliasWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = world.begin("one", at_ms=0)
    seal = world.write(attempt)
    append = world.builds.append

    def late(index_hash: str, entry: Any) -> bool:
        monkeypatch.setattr(world.builds, "append", append)
        assert world.seal(attempt, seal)
        return append(index_hash, entry)

    monkeypatch.setattr(world.builds, "append", late)
    report = gc(world)
    assert (report.dropped, report.pending) == ([], [attempt.physical])
    assert world.aliases.swap("docs", attempt.index_hash).changed


def test_the_number_of_a_dead_attempt_is_not_taken_from_who_took_over(world: AliasWorld) -> None:
    dead, heir = world.begin("one", at_ms=0), world.begin("one")
    world.write(dead)
    seal = world.write(heir)
    assert sorted(gc(world).pending) == sorted([dead.physical, heir.physical])
    assert world.seal(heir, seal)
    report = gc(world)
    assert dead.physical in report.dropped
    assert not world.builds.attempts()


def test_an_attempt_that_lost_its_number_is_dropped_at_once_and_remembered_while_it_may_write(
    world: AliasWorld,
) -> None:
    zombie, winner = world.begin("one"), world.begin("one")
    world.write(zombie)
    assert world.seal(winner, world.write(winner))
    world.aliases.swap("docs", winner.index_hash)
    assert gc(world).dropped == [zombie.physical]
    world.write(zombie)  # it has not learnt of it yet
    assert gc(world).dropped == [zombie.physical]
    world.over.add(zombie.token)
    gc(world)
    assert world.builds.attempts() == []
    assert world.backend.physicals() == [winner.physical]


def test_a_killed_gc_of_attempts_is_completed(world: AliasWorld) -> None:
    attempt = world.begin("one", at_ms=0)
    world.write(attempt)
    at(AFTER_RETIRED, stop)
    with pytest.raises(KeyboardInterrupt):
        world.collecting.gc(dry_run=False)
    assert world.backend.exists(attempt.physical)
    assert gc(world).dropped == [attempt.physical]
    assert world.builds.attempts() == []


def test_what_nobody_knows_is_told_and_left(world: AliasWorld) -> None:
    one = world.build("one")
    world.aliases.swap("docs", one)
    stranger = world.begin("strange")
    world.write(stranger)
    world.builds.forget_attempt(stranger)
    report = gc(world)
    assert (report.unknown, report.dropped) == ([stranger.physical], [])
    assert world.backend.exists(stranger.physical)


def test_a_live_build_whose_rows_are_gone_is_told(world: AliasWorld) -> None:
    one = world.build("one")
    world.aliases.swap("docs", one)
    world.backend.drop(world.physical(one))
    assert gc(world).missing == [one]


def test_a_backend_that_is_away_keeps_only_its_own(world: AliasWorld) -> None:
    first = five_builds(world)[0]
    world.backend.away = True
    report = world.collecting.gc(dry_run=False)
    assert report.failed
    assert report.dropped == []
    world.backend.away = False
    physical = world.builds.at(first, 1).seal.physical  # type: ignore[union-attr]
    assert gc(world).dropped == [physical]


def test_one_log_that_cannot_be_read_does_not_keep_the_rest(world: AliasWorld) -> None:
    first = five_builds(world)[0]
    corrupt = world.build("corrupt")
    objects = world.engine.objects
    assert objects is not None
    (name,) = [entry.name for entry in objects.list(f"default/builds/{corrupt}/")]
    objects.delete([name])
    objects.put_new(name, b"nonsense")
    report = gc(world)
    assert report.retired == [first]
    assert any(corrupt in each for each in report.failed)
    assert len(world.backend.physicals()) == 5, "what the broken log may know of is left alone"
