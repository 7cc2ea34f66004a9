"""What is done to the servers while workers are at it. Each returns the tasks that were asked for meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ragfence.stores.redis.codec import Names
from tests.chaos.attacks import Attack, Stage
from tests.chaos.crew import Worker, until
from tests.chaos.sites import Site
from tests.chaos.work import Load, Task
from tests.servers import RedisServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Callers:
    """Who asks for what while servers come and go."""

    count: int = 4
    moves: bool = True
    policy: dict[str, Any] = field(default_factory=dict)
    journals: bool = False
    """each has a journal of its own"""


class Siege:
    """The workers under load, and whether they still are."""

    def __init__(self, stage: Stage, callers: Callers) -> None:
        self._stage, self._callers = stage, callers
        self._end = stage.site.folder / "end-of-load"
        self._workers: list[Worker] = []

    def add(self, shards: tuple[int, ...] | None = None, *, site: Site | None = None) -> Worker:
        """Starts another caller, on this site or on another one."""
        crew = self._stage.crew if site is None else self._stage.crew.on(site)
        number = len(self._workers)
        load = Load(f"{self._stage.dice.random()}", str(self._end), moves=self._callers.moves, shards=shards)
        journal = str(self._stage.site.folder / f"journal-{number}") if self._callers.journals else None
        worker = crew.start((), stream=load, policy=self._callers.policy, journal=journal, effect_s=0.01)
        self._workers.append(worker)
        return worker

    def some_more(self) -> None:
        """Until there were some more effects: how many is thrown, so that faults come at any moment of the load."""
        enough = self._stage.crew.performed() + self._stage.dice.randrange(40, 120)
        until(lambda: self._stage.crew.performed() >= enough or self._ended(), f"{enough} effects")

    def hold(self, seconds: float) -> None:
        over_at = time.monotonic() + seconds
        until(lambda: time.monotonic() >= over_at, f"{seconds} s are over", within_s=seconds + 60.0)

    def end(self) -> list[Task]:
        self._end.touch()
        self._stage.crew.wait(*self._workers)
        return self._stage.crew.asked()

    def _ended(self) -> bool:
        """One who ended before the end was told does not end well; the evidence will tell why."""
        return any(worker.status is not None for worker in self._workers)


@contextlib.contextmanager
def _siege(stage: Stage, callers: Callers) -> Iterator[Siege]:
    stage.site.prepare()
    siege = Siege(stage, callers)
    for _ in range(callers.count):
        siege.add()
    yield siege
    siege.some_more()


def primary_lost(times: int, *, action: str = "kill", callers: Callers | None = None) -> Attack:
    """The primary is killed, or frozen until after its replacement; each time it comes back as the replica.

    Every other time the replica was cut off for a moment before, so that it lacks what the primary took since then.
    """

    def attack(stage: Stage) -> list[Task]:
        pair = stage.site.pair
        assert pair is not None
        with _siege(stage, callers or Callers()) as siege:
            for number in range(times):
                siege.some_more()
                primary = pair.primary()
                behind = pair.cut_replication() if number % 2 else None
                if behind:
                    siege.hold(stage.dice.uniform(0.3, 0.6))
                with stage.away(f"{action} primary{', replica behind' if behind else ''}"):
                    _take_away(primary, action)
                    pair.wait_promoted(primary)
                if behind:
                    pair.mend_replication(behind)
                if action == "freeze":
                    siege.some_more()  # the new primary is at work when the old one wakes up and knows of nothing
                    primary.thaw()
                primary.start()
                pair.wait_replicating()
        return siege.end()

    return attack


def node_lost(*, kills: int, freezes: int, callers: Callers | None = None) -> Attack:
    """Nodes of a cluster die and come back, or stand still for longer than any lease; the others go on.

    Two callers ask for everything. As many as there are nodes have the shards of one node each, as consumers of
    partitions would: who asks for everything sooner or later waits for the node that is away.
    """

    def attack(stage: Stage) -> list[Task]:
        cluster = stage.site.cluster
        assert cluster is not None
        names = Names(stage.site.tenant)
        with _siege(stage, replace(callers or Callers(), count=2)) as siege:
            for node in cluster.nodes:
                siege.add(tuple(at for at, marker in enumerate(names.markers) if cluster.owner_of(marker) is node))
            actions = ["kill"] * kills + ["freeze"] * freezes
            stage.dice.shuffle(actions)
            for action in actions:
                siege.some_more()
                node = stage.dice.choice(cluster.nodes)
                with stage.away(f"{action} node"):
                    _take_away(node, action)
                    cluster.wait_missed(node)
                    siege.hold(stage.dice.uniform(2.0, 3.0) * stage.crew.lease_s)
                    node.thaw() if action == "freeze" else node.start()
                cluster.wait_whole()
        return siege.end()

    return attack


def _take_away(server: RedisServer, action: str) -> None:
    server.freeze() if action == "freeze" else server.kill()


def region_lost(times: int, *, callers: Callers | None = None) -> Attack:
    """Two regions, each with a Redis and callers of its own, and one object store. One stands still, then returns.

    The other takes over: its Redis knows nothing of what happened meanwhile, and learns it from the object store. The
    region that returns still has its old Redis, and callers in the middle of their effects. For a moment both work.
    """
    each = 3

    def attack(stage: Stage) -> list[Task]:
        near = stage.site
        regions = [near, near.far_region()]
        with _siege(stage, callers or Callers(count=0)) as siege:
            workers = [[siege.add(site=near) for _ in range(each)], []]
            here = 0
            for _ in range(times):
                siege.some_more()
                there = 1 - here
                lost, server = workers[here], regions[here].redis
                assert server is not None
                with stage.away("freeze region"):
                    for worker in lost:
                        worker.freeze()
                    server.freeze()
                    siege.hold(1.5 * stage.crew.lease_s)
                    if not workers[there]:
                        workers[there] = [siege.add(site=regions[there]) for _ in range(each)]
                    siege.some_more()
                server.thaw()
                for worker in lost:
                    worker.wake()
                siege.some_more()  # both are at work, and the one that returned knows nothing of the other
                here = there
        return siege.end()

    return attack


def server_down(seconds: float, *, times: int, callers: Callers | None = None) -> Attack:
    """The only server is killed and stays away; then it is started again on what it had written to its file."""

    def attack(stage: Stage) -> list[Task]:
        server = stage.site.redis
        assert server is not None
        with _siege(stage, callers or Callers()) as siege:
            for _ in range(times):
                siege.some_more()
                with stage.away("kill server"):
                    server.kill()
                    siege.hold(seconds)
                    server.start()
        return siege.end()

    return attack
