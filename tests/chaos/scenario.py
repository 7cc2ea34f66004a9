"""An attack on a backend, by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.attacks import Attack, Stage
from tests.chaos.evidence import Evidence

Judged = Callable[[Stage], Evidence]
"""an attack that brings its own verdict; what came of the others is gathered from their tasks"""


@dataclass(frozen=True, slots=True)
class Scenario:
    title: str
    backend: str
    attack: Attack | Judged
    short: bool = False
    """part of the short form, too"""
    may_lose: bool = False
    """Redis without objects may lose what it acknowledged; it must say so, and then the effect happens again"""
    lease_s: float = 1.0
    performed_once: bool = False
    """not even an execution may be repeated: a foreign system was asked before"""

    @property
    def name(self) -> str:
        return f"{self.title} / {self.backend}"
