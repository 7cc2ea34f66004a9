"""How much of everything is measured in part 2."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentsScale:
    rounds: int
    documents: int = 10_000
    """known ones, ingested again in every round, and as many new ones"""
    batch: int = 1_000
    """documents per batch of ragfence where it is timed; the peers have the same"""
    raced: int = 1_000
    """documents that two processes ingest at the same time"""
    races: int = 3
    few: int = 10_000
    """known documents around the changed one"""
    many: int = 100_000
    """and in the large store, which is also what is hydrated"""
    changes: int = 40
    """changed documents per round, one by one"""
    hydrations: int = 3
    streamed: int = 1_000_000
    weighed: int = 20_000
    """documents over which the server's memory is compared"""
    requested: int = 1_000
    """documents whose requests to S3 are counted"""

    @property
    def is_full(self) -> bool:
        return self.streamed >= 1_000_000 and self.documents >= 10_000 and self.rounds >= 5


FULL = DocumentsScale(rounds=5)
QUICK = DocumentsScale(
    rounds=3,
    documents=1_000,
    races=1,
    few=1_000,
    many=10_000,
    changes=10,
    hydrations=2,
    streamed=100_000,
    weighed=5_000,
)
