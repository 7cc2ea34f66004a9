"""Locks under contention: how often a process has to wait, how long, and that there is one holder.

    shuffled   each process takes every lock once, in an order of its own: what sharded work looks like
    lockstep   all take them in the same order, beginning at the same moment: the worst case
    jitter     the same, but each process begins at a random moment

Holders are counted outside ragfence: each makes a file that must not exist, and removes it before it lets go.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ragfence
from ragfence.errors import InFlight
from tests.acceptance.flood import percentile
from tests.acceptance.forks import fork, wait_ended
from tests.acceptance.ground import Ground, policy
from tests.acceptance.promise import Promise, aimed, kept, shown
from tests.chaos.crew import until

PROCESSES = 8
HOLD_S = 0.002
JITTER_S = 1.0
AT_MOST_SHARE, AT_MOST_MS = 0.03, 100


@dataclass(frozen=True, slots=True)
class LockJob:
    store: str
    objects: str
    folder: str
    name: str
    order: tuple[int, ...]
    jitter_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class Contest:
    acquired: int
    waits_ms: list[int]
    """of those that had to wait"""
    collisions: int
    """moments with two holders"""

    @property
    def share(self) -> float:
        return len(self.waits_ms) / max(1, self.acquired)

    def __str__(self) -> str:
        waited = f", p95 of their wait {percentile(self.waits_ms, 0.95):,.0f} ms" if self.waits_ms else ""
        return f"{100 * self.share:.1f} % had to wait{waited}"


def take_all(job: LockJob) -> None:
    """The life of a process. Writes a line for each lock: what it waited, and whether somebody else held it too."""
    dice = random.Random(job.seed)
    with (
        ragfence.open(job.store, objects=job.objects, policy=policy()) as fence,
        open(f"{job.folder}/{job.name}-{os.getpid()}.waits", "w") as notes,
    ):
        with fence.lock(f"{job.name}:ready:{os.getpid()}"):  # connected
            pass
        Path(job.folder, f"{job.name}-{os.getpid()}.ready").touch()
        go = Path(job.folder, f"{job.name}.go")
        while not go.exists():
            time.sleep(0.005)
        time.sleep(dice.uniform(0.0, job.jitter_s))
        for number in job.order:
            name, mark = f"{job.name}:{number}", Path(job.folder, f"{job.name}-{number}.held")
            began, waited = time.monotonic(), False
            while True:
                try:
                    with fence.lock(name, wait_s=30.0 if waited else 0.0):
                        waited_ms = int(1000 * (time.monotonic() - began)) if waited else -1
                        collided = _hold(mark)
                    break
                except InFlight:
                    waited = True
            notes.write(f"{waited_ms} {int(collided)}\n")


def _hold(mark: Path) -> bool:
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return True
    time.sleep(HOLD_S)
    mark.unlink()
    return False


def contest(ground: Ground, name: str, seed: int, *, locks: int, shuffled: bool, jitter_s: float = 0.0) -> Contest:
    folder = ground.folder / "locks"
    folder.mkdir(exist_ok=True)
    members = []
    for number in range(PROCESSES):
        order = list(range(locks))
        if shuffled:
            random.Random(seed * 1000 + number).shuffle(order)
        job = LockJob(
            ground.fences.url,
            ground.objects,
            str(folder),
            name,
            tuple(order),
            jitter_s,
            seed * 1000 + number,
        )
        members.append(fork(take_all, job))
    until(lambda: len(list(folder.glob(f"{name}-*.ready"))) == PROCESSES, "all processes are ready")
    (folder / f"{name}.go").touch()
    codes = [wait_ended(member) for member in members]
    if any(codes):
        raise RuntimeError(f"the processes of {name} ended with {codes}")
    lines = [line.split() for path in folder.glob(f"{name}-*.waits") for line in path.read_text().splitlines()]
    waits = [int(waited) for waited, _ in lines if waited != "-1"]
    return Contest(len(lines), waits, sum(int(collided) for _, collided in lines))


def run(ground: Ground, seed: int, *, locks: int) -> Iterator[Promise]:
    shuffled = contest(ground, "shuffled", seed, locks=locks, shuffled=True)
    lockstep = contest(ground, "lockstep", seed, locks=locks, shuffled=False)
    jitter = contest(ground, "jitter", seed, locks=locks, shuffled=False, jitter_s=JITTER_S)
    workload = f"{PROCESSES} processes take {locks:,} locks each, held for {1000 * HOLD_S:.0f} ms"
    collisions = shuffled.collisions + lockstep.collisions + jitter.collisions
    acquired = shuffled.acquired + lockstep.acquired + jitter.acquired
    everything = acquired == 3 * PROCESSES * locks
    yield kept(
        "locks with two holders", f"{workload}; all three orders", "0", str(collisions), collisions == 0 and everything
    )
    yield aimed(
        "lock contention, shuffled",
        f"{workload}, in an order of its own",
        f"at most {100 * AT_MOST_SHARE:.0f} %",
        f"{100 * shuffled.share:.1f} %",
        shuffled.share <= AT_MOST_SHARE,
    )
    p95 = percentile(shuffled.waits_ms, 0.95) if shuffled.waits_ms else 0.0
    yield aimed(
        "wait for a lock, shuffled",
        f"the {len(shuffled.waits_ms):,} that had to wait",
        f"p95 at most {AT_MOST_MS} ms",
        f"p95 {p95:,.0f} ms",
        p95 <= AT_MOST_MS,
    )
    yield shown("locks in lockstep", f"{workload}, all in the same order, from the same moment", str(lockstep))
    yield shown("locks in lockstep with jitter", f"the same, each after a pause of 0 to {JITTER_S:g} s", str(jitter))
