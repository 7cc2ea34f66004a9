"""What a fence store holds right now, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ragfence.audit.statistics import count_expired
from ragfence.core.decision_rows import decode_rows
from ragfence.core.records import State
from ragfence.stores.fences import FenceStore

_QUARANTINED = State.QUARANTINED.name.lower()
_ENTRIES = 200


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one tenant in one store, but for `bytes` and `memory_ratio`, which are of the store as a whole."""

    records: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(kind, state) -> how many"""
    documents: int = 0
    quarantined: int = 0
    oldest_pending_s: float = 0.0
    undrained_rows: int = 0
    lag_s: float = 0.0
    bytes: int | None = None
    expired: int | None = None
    """records that had their time and wait for `purge_expired`; None: nobody can be asked"""
    memory_ratio: float | None = None
    """of a Redis: the fullest of its servers"""


def figures_of(store: FenceStore) -> Figures:
    stats, now_ms = store.stats(), store.now_ms()
    infos = store.infos() if hasattr(store, "infos") else None
    oldest = stats.pending.oldest
    return Figures(
        records=stats.records,
        documents=stats.documents,
        quarantined=sum(count for (_, state), count in stats.records.items() if state == _QUARANTINED),
        oldest_pending_s=max(now_ms - oldest.record.first_seen_ms, 0) / 1000 if oldest else 0.0,
        undrained_rows=stats.rows,
        lag_s=_lag_ms(store, now_ms) / 1000 if stats.rows else 0.0,
        bytes=stats.bytes,
        expired=count_expired(store, now_ms),
        memory_ratio=max(map(_memory_ratio, infos)) if infos else None,
    )


def _lag_ms(store: FenceStore, now_ms: int) -> int:
    """How old the oldest row is that nobody drained.

    Exact for up to 200 entries. Of more, Redis shows those of the first shards, and there the oldest is hardly younger.
    """
    oldest_ms = min((next(decode_rows(entry.data)).ts_ms for entry in store.row_entries("", _ENTRIES)), default=now_ms)
    return max(now_ms - oldest_ms, 0)


def _memory_ratio(info: Mapping[str, Any]) -> float:
    """Of `maxmemory`; without one, of the memory of the machine."""
    most = int(info.get("maxmemory") or 0) or int(info.get("total_system_memory") or 0)
    return int(info.get("used_memory", 0)) / most if most else 0.0
