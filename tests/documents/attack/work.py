"""What a process of the attack is told to do, and what it writes down. Read by both sides, so it imports little."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.chaos.work import Strike
from tests.documents.attack.corpus import Part

BEFORE_EPOCH_CHECK, MID_SEAL = "before_epoch_check", "mid_seal"
"""Where a worker can be struck besides the points of the protocol: see `tests.documents.attack.strikes`."""

READY, DONE = "ready", "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentJob:
    store: str
    objects: str
    tenant: str
    parts: tuple[Part, ...]
    trace: str
    """a folder: its chunker appends a line here for each chunking"""
    answers: str
    """this worker's own file"""
    go: str
    """it begins when this file exists"""
    lease_s: float
    lock_ms: int
    patience_s: float = 90.0
    rounds: int = 1
    """how often it sends all parts"""
    strike: Strike | None = None
    """`task` is the part in which it is struck; None, anywhere"""
    guard: str = "documents"

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> DocumentJob:
        values: dict[str, Any] = json.loads(path.read_text())
        values["parts"] = tuple(Part(**part) for part in values["parts"])
        values["strike"] = Strike(**values["strike"]) if values["strike"] else None
        return cls(**values)
