"""What the processes of the races do; a module of its own, so that it is imported once and they are forked off it.

Each opens the stores itself, does its part of every round between two barriers, and reports what it was told.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ragfence.engine import crash_points
from ragfence.errors import AliasMoved, BuildMissing, BuildRetired
from tests.indexes.alias_world import AliasWorld, hash_of

PATIENCE_S = 120
POLICY = {"wait": {"deadline_s": 60.0}}


class Place(NamedTuple):
    """Where a race takes place; crosses process boundaries."""

    folder: Path
    store: str
    objects: str
    environment: dict[str, str] = {}  # noqa: RUF012  # read only
    """the processes are forked off one that may be older than the test"""

    def opened(self) -> AliasWorld:
        os.environ.update(self.environment)
        return AliasWorld(self.folder, store=self.store, objects=self.objects, policy=POLICY)


def in_folder(folder: Path) -> Place:
    return Place(folder, str(folder / "fence.db"), str(folder / "objects"))


class Track:
    """What the racers share: a barrier, where to report, and when to end."""

    def __init__(self, racers: int, *, start: Literal["forkserver", "spawn"] = "forkserver") -> None:
        self.processes: Any = multiprocessing.get_context(start)
        if start == "forkserver":
            self.processes.set_forkserver_preload([__name__])
        self.together = self.processes.Barrier(racers)
        self.reports = self.processes.Queue()
        self.over = self.processes.Event()

    @contextmanager
    def running(self, *tasks: tuple[Callable[..., Any], tuple[Any, ...]]) -> Iterator[list[Any]]:
        shared = (self.together, self.reports, self.over)
        workers = [self.processes.Process(target=_run, args=(task, shared, args)) for task, args in tasks]
        for worker in workers:
            worker.start()
        try:
            yield workers
            self.over.set()
            for worker in workers:
                worker.join(PATIENCE_S)
        finally:
            for worker in workers:
                worker.kill()  # those that are still there
                worker.join()

    def report(self) -> Any:
        told = self.reports.get(timeout=PATIENCE_S)
        if isinstance(told, str):
            raise AssertionError(told)
        return told


def _run(task: Callable[..., Any], shared: tuple[Any, Any, Any], args: tuple[Any, ...]) -> None:
    together, reports, over = shared
    try:
        reports.put(task(together, over, *args))
    except BaseException:
        together.abort()
        reports.put(traceback.format_exc())


def swap_in_rounds(together: Any, over: Any, place: Place, racer: int, hashes: list[str], rounds: int) -> Any:
    """Everybody sees the same target, and wants another one of his own instead. Answers the generations it won."""
    world = place.opened()
    won = []
    for turn in range(rounds):
        current = world.aliases.resolve("docs").index_hash
        others = [each for each in hashes if each != current]
        together.wait(PATIENCE_S)
        try:
            swapped = world.aliases.swap("docs", others[(racer + turn) % len(others)], expect=current, actor=f"{racer}")
            assert swapped.changed
            assert swapped.audited
            won.append((turn, swapped.generation))
        except AliasMoved:
            pass  # somebody else has this round
        together.wait(PATIENCE_S)
    world.close()
    return "swapper", won


def search_all_the_while(together: Any, over: Any, place: Place, least: int) -> Any:
    """A reader resolves once, then asks the physical index. Each build's texts name it, so a mixture would show."""
    world = place.opened()
    searches = 0
    builds_seen: Counter[str] = Counter()
    vector = [1.0] * 64
    while not over.is_set() or searches < least:
        target = world.aliases.resolve("docs")
        found = world.backend.search(target.physical, vector, 5)
        told = {each.text.split()[0] for each in found}
        assert len(found) == 5
        assert {hash_of(each) for each in told} == {target.index_hash}
        builds_seen[target.index_hash] += 1
        searches += 1
    world.close()
    return "reader", searches, len(builds_seen)


def swap_to_what_is_collected(together: Any, over: Any, place: Place, name: str, rounds: int) -> Any:
    world = place.opened()
    told: Counter[str] = Counter()
    for turn in range(rounds):
        together.wait(PATIENCE_S)
        try:
            world.aliases.swap(f"alias-{turn % 7}", hash_of(name))
            told["swapped"] += 1
        except (BuildRetired, BuildMissing) as refused:
            told[type(refused).__name__] += 1
        together.wait(PATIENCE_S)
        together.wait(PATIENCE_S)
    world.close()
    return "swapper", told


def collect_in_rounds(together: Any, over: Any, place: Place, rounds: int) -> Any:
    world = place.opened()
    told: Counter[str] = Counter()
    for _ in range(rounds):
        together.wait(PATIENCE_S)
        report = world.collecting.gc(dry_run=False)
        assert report.failed == [], report.failed
        told["retired" if report.retired else "revived" if report.revived else "kept"] += 1
        together.wait(PATIENCE_S)
        together.wait(PATIENCE_S)
    world.close()
    return "collector", told


def judge_in_rounds(together: Any, over: Any, place: Place, name: str, rounds: int) -> Any:
    """Looks at what every round left, and prepares the next one: the build is there, and no alias knows it."""
    world = place.opened()
    index_hash, told = hash_of(name), Counter[str]()
    for turn in range(rounds):
        together.wait(PATIENCE_S)
        together.wait(PATIENCE_S)
        newest, head = world.builds.newest(index_hash), world.catalog.head()
        users = head.state.users(index_hash, 3)
        assert newest is not None
        if newest.seal is not None:
            assert world.backend.count(newest.seal.physical) == newest.seal.rows, "sealed without its data"
        for alias in head.state.aliases.values():
            assert world.backend.exists(alias.target.physical), "an alias points at a dropped build"
        if users:
            assert newest.usable, "an alias points at a retired build"
            told["used"] += 1
            world.aliases.remove(f"alias-{turn % 7}", "the next round")
        else:
            told["collected"] += 1
        if not newest.usable:
            assert world.build(name) == index_hash
        elif head.state.retires(newest, index_hash):
            world.collecting.restore(index_hash)
        together.wait(PATIENCE_S)
    world.close()
    return "judge", told


def killed_at(together: Any, over: Any, place: Place, point: str, action: str, argument: str) -> Any:
    """Kills itself at the point: nothing is released, flushed or said goodbye to."""
    world = place.opened()

    def kill(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)

    crash_points.visitor = kill
    if action == "swap":
        world.aliases.swap("docs", argument)
    else:
        world.collecting.gc(dry_run=False)
    return "it was not killed"
