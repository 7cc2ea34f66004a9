"""How much of everything is measured in part 8."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeScale:
    rounds: int
    documents: int
    """in the large store; the other one is empty"""
    rows: int
    """of the indexes that are searched, exactly and approximately"""
    calls: int = 20
    """in a round, of what is asked of a server or a fence that is warm"""

    @property
    def is_full(self) -> bool:
        return self.rounds >= 7 and self.documents >= 1_000_000 and self.rows >= 500_000


FULL = SizeScale(rounds=7, documents=1_000_000, rows=500_000)
QUICK = SizeScale(rounds=3, documents=20_000, rows=20_000)
