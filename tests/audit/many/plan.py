"""What the workers ask for, and what each process is told. Everything follows from the seed.

Four in ten operations have been asked for before, mostly a moment ago and by another worker, so that some meet an
effect under way; some of these bring another payload, some a sequence that may be old by then. Half of all operations
are documents, sent in batches.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

ONCE, CLAIM, MOVE, DOCUMENTS = "once", "claim", "move", "documents"
BATCH = 25
DUPLICATES = 0.4
CONFLICTS = 0.06
"""of the duplicates: the same key with something else in it"""
MOVES = 0.08
"""of the single operations: revisions of a few sources, which all workers move"""
SOURCES = 40
IMPATIENT = 0.3
"""of the claims: told `in_flight` rather than made to wait"""


class Ask(NamedTuple):
    source: str
    body: int
    """operations of one source with different bodies have different payloads; documents different texts"""


class Turn(NamedTuple):
    how: str
    asks: tuple[Ask, ...]
    sequence: int | None = None
    patient: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    operations: int
    workers: int = 8

    def turns(self) -> list[list[Turn]]:
        """Of each worker."""
        dice = random.Random(self.seed)
        made: list[list[Turn]] = [[] for _ in range(self.workers)]
        asked: dict[str, list[Ask]] = {how: [] for how in (ONCE, CLAIM, DOCUMENTS)}
        left, number = self.operations, 0
        while left > 0:
            turn = _turn(dice, asked, number, left)
            made[number % self.workers].append(turn)
            number += 1
            left -= len(turn.asks)
        return made


def _turn(dice: random.Random, asked: dict[str, list[Ask]], number: int, left: int) -> Turn:
    if dice.random() < 1 / BATCH:
        return Turn(DOCUMENTS, tuple(_ask(dice, asked[DOCUMENTS], "doc") for _ in range(min(BATCH, left))))
    if dice.random() < MOVES:
        # About as many calls later as a worker may be behind the others: some of these are stale when they come.
        return Turn(MOVE, (Ask(f"moved-{dice.randrange(SOURCES)}", 0),), sequence=max(0, number - dice.randrange(400)))
    how = dice.choice((ONCE, CLAIM))
    return Turn(how, (_ask(dice, asked[how], how),), patient=how == ONCE or dice.random() >= IMPATIENT)


def _ask(dice: random.Random, asked: list[Ask], word: str) -> Ask:
    if asked and dice.random() < DUPLICATES:
        # The last few are those that others are at this very moment.
        back = min(len(asked), 1 + int(dice.expovariate(1 / 4)))
        again = asked[-back] if dice.random() < 0.7 else dice.choice(asked)
        return again._replace(body=1) if dice.random() < CONFLICTS else again
    asked.append(Ask(f"{word}-{len(asked)}", 0))
    return asked[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    store: str
    objects: str
    tenant: str
    plan: Plan
    number: int
    run_id: str
    """of this life of the worker; its rows tell it"""
    first_turn: int
    evidence: str
    """the file of this life: what it asks, then what it is answered, one write a line, before it goes on"""
    lease_s: float
    effect_s: float
    """the longest; most take no time"""
    role: str = "worker"

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainerJob:
    store: str
    objects: str
    tenant: str
    point: str
    """where it kills itself, the `nth` time it comes by; empty: nowhere"""
    nth: int
    evidence: str
    role: str = "drainer"

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def loaded(path: Path) -> WorkerJob | DrainerJob:
    values: dict[str, Any] = json.loads(path.read_text())
    if values["role"] == "drainer":
        return DrainerJob(**values)
    values["plan"] = Plan(**values["plan"])
    return WorkerJob(**values)
