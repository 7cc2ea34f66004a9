"""How much of everything is measured in part 3."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexesScale:
    rounds: int
    few: int = 1_000
    """documents behind the index that is built already"""
    many: int = 100_000
    """and in the large store"""
    calls: int = 5
    """of `build()` whose round trips are counted, in a new process and in one that is warm"""
    rows: int = 10_000
    """documents, of one snippet each, that are written into LanceDB"""
    qdrant_rows: int = 2_000
    """and into Qdrant, whose local mode syncs every point"""
    documents: int = 10_000
    """of which one in a hundred changes"""

    @property
    def changed(self) -> int:
        return max(1, self.documents // 100)

    @property
    def is_full(self) -> bool:
        return self.many >= 100_000 and self.rows >= 10_000 and self.documents >= 10_000 and self.rounds >= 5


FULL = IndexesScale(rounds=5)
QUICK = IndexesScale(rounds=3, many=10_000, calls=3, rows=2_000, qdrant_rows=300, documents=2_000)
