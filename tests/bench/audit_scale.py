"""How much of the audit is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditScale:
    rows: int
    """in the ledger that is asked"""
    rounds: int
    documents: int
    """known ones, in a round"""
    batches: int
    """bulk calls in a round"""
    days: int = 30
    batch: int = 500
    """documents, or keys, in a call"""

    @property
    def is_full(self) -> bool:
        return self.rows >= 10_000_000 and self.rounds >= 45


# Rounds are short and many: on a machine that is busy with other things, neighbours are disturbed alike.
FULL = AuditScale(rows=10_000_000, rounds=45, documents=2_000, batches=8)
QUICK = AuditScale(rows=500_000, days=5, rounds=9, documents=2_000, batches=8)
