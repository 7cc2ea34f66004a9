"""How much of everything is measured in part 5."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiScale:
    rounds: int
    seconds: float
    """for which every subject is asked, in every round, with each number of connections"""
    connections: tuple[int, ...] = (1, 8, 64)
    twins: int = 8
    """requests with the same key at the same moment"""
    patience_s: float = 6.0
    """for which a client sends a request again"""

    @property
    def is_full(self) -> bool:
        return self.rounds >= 7 and self.seconds >= 1 and self.connections == (1, 8, 64)


FULL = ApiScale(rounds=7, seconds=1.0)
QUICK = ApiScale(rounds=3, seconds=0.4, patience_s=4.0)
