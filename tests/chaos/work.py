"""What a worker is told to do. Imported by the workers, so it imports next to nothing itself."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

KEYED, SEQUENCED = "chaos", "chaos-moves"
OPENING, SETTLING = "open", "journal"
"""what a worker writes down besides its tasks"""


@dataclass(frozen=True, slots=True)
class Task:
    """One operation that must take effect once. With a sequence it is a revision of its source."""

    source: str
    sequence: int | None = None

    @property
    def name(self) -> str:
        return self.source if self.sequence is None else f"{self.source}:{self.sequence}"

    @classmethod
    def named(cls, name: str) -> Task:
        source, _, sequence = name.partition(":")
        return cls(source, int(sequence) if sequence else None)

    @property
    def kind(self) -> str:
        return KEYED if self.sequence is None else SEQUENCED

    @property
    def payload(self) -> dict[str, object]:
        return {"source": self.source, "sequence": self.sequence}


def tasks(*, keyed: int, sources: int = 0, revisions: int = 1) -> list[Task]:
    singles = [Task(f"k{at:04d}") for at in range(keyed)]
    moves = [Task(f"s{at:03d}", revision) for at in range(sources) for revision in range(1, revisions + 1)]
    return singles + moves


def shuffled(given: Sequence[Task], dice: random.Random) -> list[Task]:
    """In random order, but the revisions of each source stay in theirs, as a sender would send them."""
    order = list(given)
    dice.shuffle(order)
    revisions: dict[str, list[Task]] = {}
    for task in sorted(order, key=lambda task: task.sequence or 0, reverse=True):
        revisions.setdefault(task.source, []).append(task)
    return [revisions[task.source].pop() for task in order]


@dataclass(frozen=True, slots=True)
class Load:
    """An endless stream instead of a list, for as long as `until` names no file.

    Everybody goes through the same blocks of tasks, in an order of their own within each, so that there is always
    somebody to race with; then asks again for some of what was asked before, which must be answered as it was then.
    """

    seed: str
    until: str
    pause_s: float = 0.02
    """between two calls, on average"""
    moves: bool = True
    """revisions of sources, too, and not only plain tasks"""
    shards: tuple[int, ...] | None = None
    """only tasks of these, as a consumer of some partitions has them"""

    def tasks(self) -> Iterator[Task]:
        dice = random.Random(self.seed)
        for number in itertools.count():
            yield from shuffled(self._block(number), dice)
            for _ in range(8 if number else 0):
                yield dice.choice(self._block(dice.randrange(number)))

    def _block(self, number: int) -> list[Task]:
        singles = [Task(f"k{number:04d}-{at:02d}") for at in range(24)]
        moves = [Task(f"s{number:04d}-{at:02d}", revision) for at in range(3) for revision in (1, 2, 3)]
        return singles + moves if self.moves else singles


@dataclass(frozen=True, slots=True)
class Strike:
    """The worker kills or freezes itself the first time it reaches the point, in its n-th task or anywhere."""

    action: str
    point: str
    task: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    store: str
    objects: str | None
    tenant: str
    tasks: tuple[Task, ...]
    effects: str
    """every worker appends a line here each time it performs an effect"""
    answers: str
    """this worker's own file: what it was answered"""
    lease_s: float
    lock_ms: int
    effect_s: float = 0.0
    patience_s: float = 90.0
    s3_timeout_s: float | None = None
    strike: Strike | None = None
    stream: Load | None = None
    """instead of `tasks`; patience is then that of each call"""
    recovers: bool = False
    """effects are those of a foreign system, which can be asked whether they happened"""
    policy: dict[str, Any] = field(default_factory=dict)
    """beside what every worker's policy says"""
    journal: str | None = None
    """this worker's own folder: effects that ran while the store was down are settled from there when it is back"""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Job:
        values = json.loads(path.read_text())
        values["tasks"] = tuple(Task(**task) for task in values["tasks"])
        values["strike"] = Strike(**values["strike"]) if values["strike"] else None
        if stream := values["stream"]:
            values["stream"] = Load(**stream | {"shards": stream["shards"] and tuple(stream["shards"])})
        return cls(**values)


def lines(path: str) -> list[dict[str, Any]]:
    """What workers wrote down; one that never got so far has no file, and one that was killed may leave half a line."""
    try:
        with open(path) as file:
            return [json.loads(line) for line in file if line.endswith("\n")]
    except FileNotFoundError:
        return []
