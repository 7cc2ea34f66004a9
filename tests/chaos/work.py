"""What a worker is told to do. Imported by the workers, so it imports next to nothing itself."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

KEYED, SEQUENCED = "chaos", "chaos-moves"


@dataclass(frozen=True, slots=True)
class Task:
    """One operation that must take effect once. With a sequence it is a revision of its source."""

    source: str
    sequence: int | None = None

    @property
    def name(self) -> str:
        return self.source if self.sequence is None else f"{self.source}:{self.sequence}"

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

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Job:
        values = json.loads(path.read_text())
        values["tasks"] = tuple(Task(**task) for task in values["tasks"])
        values["strike"] = Strike(**values["strike"]) if values["strike"] else None
        return cls(**values)
