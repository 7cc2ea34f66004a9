"""How much of everything is measured in part 9."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsScale:
    rounds: int
    messages: int
    """in a round, of a consumer with a handler"""
    documents: int
    """in a round, of a consumer of documents"""
    deliveries: int
    """in a round, of webhooks"""
    batch: int = 100
    """messages received at once"""
    document_batch: int = 500
    connections: int = 16
    """of webhooks, each with one delivery under way"""

    @property
    def is_full(self) -> bool:
        return self.rounds >= 15 and self.messages >= 2_000 and self.documents >= 5_000 and self.deliveries >= 2_000


FULL = EventsScale(rounds=15, messages=2_000, documents=5_000, deliveries=2_000)
QUICK = EventsScale(rounds=3, messages=400, documents=2_000, deliveries=400)
