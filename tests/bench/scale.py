"""How much of everything is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    rounds: int
    replays: int
    """calls per round that find their key sealed, one by one"""
    news: int
    """calls per round with a key of their own, one by one"""
    batches: int
    """bulk calls per round"""
    batch: int = 500
    """keys per bulk call"""
    few: int = 1_000
    """sealed records in the small store"""
    many: int = 1_000_000
    """and in the large one"""
    records: int = 20_000
    """records over which the server's memory is compared"""
    processes: int = 8
    keys: int = 1_000
    """operations that all processes contend for"""
    contests: int = 3
    object_stores: tuple[str, ...] = ("local folder", "SeaweedFS")
    object_news: int = 20
    """new operations per round with an object store behind: some of them need 20 ms each"""

    @property
    def is_full(self) -> bool:
        return self.many >= 1_000_000 and self.rounds >= 15


FULL = Scale(rounds=15, replays=1_000, news=500, batches=8)
QUICK = Scale(rounds=5, replays=500, news=250, batches=4, many=100_000, contests=1)


def note_on(full: bool) -> str:
    """What a page says of a run that was shorter than it could be."""
    return "" if full else "\n**This was no full run: fewer rounds, or less in each.**"
