"""Many processes move one alias, gc takes away what they want, and whoever is killed leaves nothing half done.

The numbers here are those of `make test`; RAGFENCE_ALIAS_ROUNDS and RAGFENCE_ALIAS_SEARCHES raise them.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ragfence.errors import BuildRetired
from ragfence.indexes.alias_checks import alias_findings
from ragfence.indexes.aliases import AFTER_AUDIT, AFTER_CATALOG, AFTER_POINT
from ragfence.indexes.gc import AFTER_RETIRE, AFTER_RETIRED
from tests import servers
from tests.indexes import alias_racers as racers
from tests.indexes.alias_racers import Place, Track, in_folder
from tests.indexes.alias_world import AliasWorld

PROCESSES = 16
ROUNDS = int(os.environ.get("RAGFENCE_ALIAS_ROUNDS", "200"))
SEARCHES = int(os.environ.get("RAGFENCE_ALIAS_SEARCHES", "5000"))

pytestmark = pytest.mark.xdist_group("many processes")


def tagged(name: str) -> list[str]:
    return [f"{name} text number {number}" for number in range(6)]


def race(place: Place, rounds: int, searches: int) -> tuple[AliasWorld, list[tuple[int, int]], list[Any]]:
    """What was won, as (round, generation), and what the readers saw."""
    world = place.opened()
    hashes = [world.build(name, tagged(name)) for name in ("one", "two", "three", "four", "five")]
    world.aliases.swap("docs", hashes[0])
    world.close()  # before others are born: connections must not be shared
    track = Track(PROCESSES)
    tasks = [(racers.swap_in_rounds, (place, number, hashes, rounds)) for number in range(PROCESSES)]
    readers = [(racers.search_all_the_while, (place, searches // 2))] * 2
    won: list[tuple[int, int]] = []
    with track.running(*tasks, *readers):
        for _ in range(PROCESSES):
            kind, told = track.report()
            assert kind == "swapper"
            won += told
        track.over.set()
        seen = [track.report() for _ in readers]
    return place.opened(), sorted(won), seen


def check_race(world: AliasWorld, won: list[tuple[int, int]], rounds: int) -> None:
    assert [turn for turn, _ in won] == list(range(rounds)), "one winner each round"
    assert [generation for _, generation in won] == list(range(2, rounds + 2)), "no gap, no double"
    assert [entry.number for entry in world.catalog.entries()] == list(range(rounds + 1, 0, -1))
    assert [str(finding) for finding in alias_findings(world.catalog, world.builds)] == []
    target = world.aliases.resolve("docs")
    assert world.backend.pointer("docs@default") == (target.physical, rounds + 1)
    report = world.fence.audit.check()
    assert report.ok, str(report)


def test_of_sixteen_processes_that_swap_one_wins_each_round_while_readers_search(tmp_path: Path) -> None:
    world, won, seen = race(in_folder(tmp_path), ROUNDS, SEARCHES)
    check_race(world, won, ROUNDS)
    assert sum(searches for _, searches, _ in seen) >= SEARCHES
    assert max(builds for _, _, builds in seen) > 1, "readers saw it move"
    assert world.aliases.reconcile().failed == ()
    world.close()


@pytest.mark.slow
def test_of_sixteen_processes_that_swap_on_seaweedfs_one_wins_each_round(
    tmp_path: Path, seaweed_server: servers.S3Server, s3_env: None
) -> None:
    objects = f"s3://{seaweed_server.bucket}/{tmp_path.name}?endpoint_url={seaweed_server.url}"
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    place = Place(tmp_path, str(tmp_path / "fence.db"), objects, environment)
    world, won, _ = race(place, rounds=10, searches=20)
    check_race(world, won, rounds=10)
    world.close()


def test_gc_and_swaps_to_what_it_retires_exclude_each_other(tmp_path: Path) -> None:
    place = in_folder(tmp_path)
    world = place.opened()
    world.build("wanted", tagged("wanted"))
    world.close()
    track = Track(4)
    tasks = [
        (racers.judge_in_rounds, (place, "wanted", ROUNDS)),
        (racers.swap_to_what_is_collected, (place, "wanted", ROUNDS)),
        (racers.collect_in_rounds, (place, ROUNDS)),
        (racers.collect_in_rounds, (place, ROUNDS)),
    ]
    told: dict[str, Counter[str]] = {}
    with track.running(*tasks):  # type: ignore[arg-type]
        for _ in tasks:
            kind, counts = track.report()
            told[kind] = told.get(kind, Counter()) + counts
    world = place.opened()
    assert told["judge"].total() == ROUNDS
    assert told["judge"]["used"] == told["swapper"]["swapped"], "whoever was told so has swapped"
    assert told["judge"]["used"] > 0
    assert told["judge"]["collected"] > 0
    assert [str(finding) for finding in alias_findings(world.catalog, world.builds)] == []
    dropped = set(world.backend.drops())
    assert not dropped & set(world.backend.physicals())
    world.close()


def die(place: Place, point: str, action: str, argument: str = "") -> None:
    """A process comes to the point and no further. It is our own child: only a parent can tell how one ended."""
    track = Track(1, start="spawn")
    with track.running((racers.killed_at, (place, point, action, argument))) as (worker,):
        worker.join(60)
        assert worker.exitcode == -signal.SIGKILL, track.reports.get(timeout=10)


@pytest.mark.parametrize("repair", ["reconcile", "the next swap"])
@pytest.mark.parametrize("point", [AFTER_CATALOG, AFTER_AUDIT, AFTER_POINT])
def test_a_swap_that_is_killed_after_its_entry_is_repaired(point: str, repair: str, tmp_path: Path) -> None:
    place = in_folder(tmp_path)
    world = place.opened()
    one, two, three = (world.build(name) for name in ("one", "two", "three"))
    world.aliases.swap("docs", one)
    world.close()
    die(place, point, "swap", two)
    world = place.opened()
    assert world.aliases.resolve("docs").index_hash == two
    if repair == "the next swap":
        world.aliases.swap("docs", three, expect=two)
    done = world.aliases.reconcile()
    assert done.failed == ()
    assert done.audited == (("docs@2",) if point == AFTER_CATALOG else ())
    assert done.pointed == (("docs",) if repair == "reconcile" and point != AFTER_POINT else ())
    target = world.aliases.resolve("docs")
    assert world.backend.pointer("docs@default") == (target.physical, target.generation)
    assert world.aliases.reconcile().audited == ()
    assert [str(finding) for finding in alias_findings(world.catalog, world.builds)] == []
    world.close()


@pytest.mark.parametrize("point", [AFTER_RETIRE, AFTER_RETIRED])
def test_a_gc_that_is_killed_is_completed_by_the_next(point: str, tmp_path: Path) -> None:
    place = in_folder(tmp_path)
    world = place.opened()
    live, other = world.build("live"), world.build("other")
    world.aliases.swap("docs", live)
    physical = world.physical(other)
    world.close()
    die(place, point, "gc")
    world = place.opened()
    assert world.backend.exists(physical)
    with pytest.raises(BuildRetired):
        world.aliases.swap("docs", other)
    if point == AFTER_RETIRE:
        assert world.collecting.restore(other).number == 2
        assert world.aliases.swap("docs", other).target.physical == physical  # type: ignore[union-attr]
        assert world.collecting.gc(dry_run=False).dropped == []
    else:
        assert world.collecting.gc(dry_run=False).dropped == [physical]
        assert world.build("other") == other
        assert world.aliases.swap("docs", other).changed
    assert world.backend.exists(world.physical(other))
    assert [str(finding) for finding in alias_findings(world.catalog, world.builds)] == []
    world.close()
