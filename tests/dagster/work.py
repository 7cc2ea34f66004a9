"""What a process of the attack is told to do. Read by both sides, so it imports little."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """One run of the job in a process of its own, which has a DAGSTER_HOME of its own."""

    store: str
    objects: str
    tenant: str
    policy: str
    sources: tuple[str, ...]
    """folders; each is an asset, and so a segment"""
    alias: str
    trace: str
    """the embedder appends a line to it for each text"""
    home: str
    ready: str
    go: str
    """it stands ready, and begins when that exists"""
    answer: str
    kill_at: str = ""
    retries: int = 0
    """of the step that builds"""
    fails: int = 0
    """in so many attempts of that step the embedder fails"""
    hold: str = ""
    """the embedder makes this file and waits until it is gone again"""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> RunJob:
        values = json.loads(path.read_text())
        values["sources"] = tuple(values["sources"])
        return cls(**values)
