"""Drives a world by dice: who steps next, who dies, what is lost. The same seed gives the same story."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.machine.documents import DocumentWorld
from tests.machine.guarded import GuardWorld
from tests.machine.lineages import Factory
from tests.machine.locks import LockWorld
from tests.machine.operations import OperationWorld
from tests.machine.world import LEASE_MS, World

MOST_AT_ONCE = 3
MOST_TICKS = 6_000


def drive_guard(make_lineages: Factory, seed: int) -> None:
    """As `drive_documents`, with documents that are cut and stored."""
    drive_documents(make_lineages, seed, GuardWorld)


def drive_documents(make_lineages: Factory, seed: int, make_world: type[DocumentWorld] = DocumentWorld) -> None:
    dice = random.Random(seed)
    lineages = make_lineages()
    try:
        sequenced = dice.random() < 0.5
        world = make_world(lineages, sequenced=sequenced)
        wanted: list[Callable[[], Any]] = []
        for _ in range(dice.randint(3, 6)):
            if sequenced:
                value, sequence = dice.choice("ABC"), dice.randint(1, 5)
                wanted.append(lambda value=value, sequence=sequence: world.ingest(value, sequence))
            else:
                value = dice.choice(["A", "A", "B", "B", None])  # type: ignore[assignment]
                wanted.append(lambda value=value: world.ingest(value, None))
        _drive(world, dice, wanted, read=None if sequenced else world.read_head)
        _ask_again(world)
        world.check()
    except AssertionError as broken:
        raise AssertionError(f"documents, seed {seed}: {broken}") from broken
    finally:
        lineages.close()


def _ask_again(world: DocumentWorld) -> None:
    """A fresh worker, alone and when all is quiet, asks for what is live: whatever lands late, that must stay."""
    world.lineages.clock.advance(LEASE_MS + 1)
    head = world.visible_head()
    value, sequence = head if head and head[0] else ("Z", 99 if world.sequenced else None)
    worker = world.ingest(value, sequence)
    assert world.settle(), "a fresh worker is stuck"
    assert worker.done
    if world.events[-1].outcome in ("sealed", "duplicate"):
        world.land_late_writes()
        assert world.truth()[0] == value, f"{value} was acknowledged in quiet, but the truth is {world.truth()}"


def drive_operations(make_lineages: Factory, seed: int) -> None:
    dice = random.Random(seed)
    lineages = make_lineages()
    try:
        world = OperationWorld(lineages)
        wanted: list[Callable[[], Any]] = []
        for _ in range(dice.randint(3, 6)):
            if dice.random() < 0.4:
                source, revision, sequence = "plain", dice.choice("AAB"), None
            else:
                source, revision, sequence = "ordered", dice.choice("AB"), dice.randint(3, 5)
            payload = "p" if dice.random() < 0.85 else "other"
            wanted.append(
                lambda source=source, revision=revision, sequence=sequence, payload=payload: world.perform(
                    source, revision, sequence, payload
                )
            )
        _drive(world, dice, wanted)
        world.check()
        for _ in range(2):
            lineages.clock.advance(LEASE_MS + 1)
            world.perform("plain", "A", None, "p")
            assert world.settle(), "a fresh worker is stuck"
            world.check()
            lineages.flush()
    except AssertionError as broken:
        raise AssertionError(f"operations, seed {seed}: {broken}") from broken
    finally:
        lineages.close()


def drive_locks(make_lineages: Factory, seed: int) -> None:
    dice = random.Random(seed)
    lineages = make_lineages()
    try:
        world = LockWorld(lineages)
        wanted: list[Callable[[], Any]] = []
        for _ in range(dice.randint(3, 7)):
            name = dice.choice(["a", "a", "b"])
            wanted.append(lambda name=name: world.hold(name))
        _drive(world, dice, wanted)
        world.check()
        for name in "ab":  # whatever was left behind, the next one gets in after a ttl
            lineages.clock.advance(LEASE_MS + 1)
            worker = world.hold(name)
            assert world.settle(), "a fresh worker is stuck"
            assert worker.done
    except AssertionError as broken:
        raise AssertionError(f"locks, seed {seed}: {broken}") from broken
    finally:
        lineages.close()


def _drive(
    world: World, dice: random.Random, wanted: list[Callable[[], Any]], read: Callable[[], None] | None = None
) -> None:
    faults = dice.randint(1, 5)
    snapshot: Any = None
    # Some stories are calm and some are wild: the same odds everywhere would miss what needs either.
    expiry, restless = dice.choice([0.003, 0.015, 0.04]), dice.choice([0.02, 0.06])
    freeze = dice.choice([0.0, 0.1, 0.3])
    for tick in range(MOST_TICKS):
        active = world.active()
        if not active and not wanted:
            return
        if wanted and len(active) < MOST_AT_ONCE and (not active or dice.random() < restless):
            wanted.pop(0)()
            continue
        if read and dice.random() < 0.05:
            read()
        if world.late and dice.random() < 0.03:
            world.late.pop(dice.randrange(len(world.late)))()
        if dice.random() < 0.03:
            snapshot = world.lineages.snapshot()
        if dice.random() < 0.02:
            world.watch()
        if dice.random() < expiry:
            world.lineages.clock.advance(LEASE_MS + 1)
        if not active:
            continue
        if dice.random() < 0.02:
            world.renew(dice.choice(active))
        if dice.random() < 0.1:
            dice.choice(active).lineage = world.lineages.primary
        # Whoever is about to commit or to seal is worth a fault more than anybody else.
        exposed = [worker for worker in active if worker.at in ("put_new", "seal")]
        if faults and dice.random() < (0.1 if exposed else 0.03):
            faults -= 1
            _fault(world, dice, snapshot, exposed or active)
            continue
        awake = [worker for worker in active if worker.frozen_until <= tick]
        if not awake:
            continue
        worker = dice.choice(awake)
        if worker in exposed and dice.random() < freeze:
            worker.frozen_until = tick + dice.randint(20, 200)
            continue
        # Mostly a few steps of the same worker, so that stories get somewhere.
        for _ in range(dice.choice([1, 1, 2, 4])):
            world.step(worker)
    raise AssertionError("somebody is stuck")


def _fault(world: World, dice: random.Random, snapshot: Any, victims: list[Any]) -> None:
    match dice.choice(["flush", "restart", "fail over", "fail over", "kill", "kill", "lose a reply"]):
        case "flush":
            world.lineages.flush()
        case "restart":
            world.lineages.restart()
        case "fail over" if snapshot is not None:
            world.lineages.fail_over(snapshot)
        case "kill":
            world.kill(dice.choice(victims))
        case "lose a reply":
            dice.choice(victims).drop_reply = True
    world.observe()
