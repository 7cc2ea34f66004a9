"""What a process of the attack is told to do, and what it writes down. Read by both sides, so it imports little."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.work import Strike
from tests.documents.attack.work import DocumentJob

OF_THE_BUILD = "build's "
"""before a point of the engine: when the build is sealed by it, and not one of the objects of vectors before"""

Step = dict[str, Any]
"""`do` names what is done, the rest says how: see the functions below"""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexJob(DocumentJob):
    """`trace` is a file here: its embedder appends a line for each text."""

    steps: tuple[Step, ...] = ()
    """`strike.task` counts them"""
    embed_workers: int = 2
    guard: str = "indexes"

    @classmethod
    def load(cls, path: Path) -> IndexJob:
        values: dict[str, Any] = json.loads(path.read_text())
        values["parts"], values["steps"] = (), tuple(values["steps"])
        values["strike"] = Strike(**values["strike"]) if values["strike"] else None
        return cls(**values)


def build(times: int = 1, *, pause_s: float = 0.0, seed: int = 0, **spec: Any) -> Step:
    """Builds, `times` times, each after a pause of up to so long."""
    return {"do": "build", "times": times, "pause_s": pause_s, "seed": seed, "spec": spec}


def ingest(names: list[str], edition: int = 0) -> Step:
    return {"do": "ingest", "names": names, "edition": edition}


def purge(name: str, *, pause_s: float = 0.0, seed: int = 0) -> Step:
    return {"do": "purge", "name": name, "pause_s": pause_s, "seed": seed}


def publish(alias: str) -> Step:
    """Builds, and points the alias there."""
    return {"do": "publish", "alias": alias}


def tell(file: Path) -> Step:
    return {"do": "tell", "file": str(file)}


def search(alias: str, words: list[str], *, times: int, threads: int, until: Path) -> Step:
    """Each thread searches, so often at least, and on until the file exists."""
    return {"do": "search", "alias": alias, "words": words, "times": times, "threads": threads, "until": str(until)}
