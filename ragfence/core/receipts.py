"""What a caller gets: a receipt that is the same for every call with the key, and how this call came by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ragfence.core.hashing import digest


class Decision(StrEnum):
    NEW = "new"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    IN_FLIGHT = "in_flight"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Flags:
    """How this one call came by its answer."""

    attempt: int = 1
    takeover: bool = False
    """an earlier owner's lease had run out"""
    healed: bool = False
    """an earlier owner had committed and died before its seal; the effect was found, not repeated"""
    revived: bool = False
    metadata_updated: bool = False
    fenced_out: bool = False
    """this call performed the effect too, but another attempt had committed first"""
    journaled: bool = False
    """the store was down; the effect ran and waits in the local journal to be sealed"""
    waited_ms: int = 0


@dataclass(frozen=True, slots=True)
class Receipt:
    """The outcome of a key. Two receipts are equal when key, effect_id, snippet_ids and result are."""

    key: str
    effect_id: str
    snippet_ids: tuple[str, ...] = ()
    result: Any = None
    failure: Mapping[str, Any] | None = None
    decision: Decision = field(default=Decision.NEW, compare=False)
    flags: Flags = field(default=Flags(), compare=False)
    fence: str = field(default="", compare=False)
    first_seen_ms: int | None = field(default=None, compare=False)
    sealed_at_ms: int | None = field(default=None, compare=False)

    # `result` may hold dicts and lists, so equality is by value and receipts are not hashable.
    __hash__ = None  # type: ignore[assignment]

    @property
    def is_new(self) -> bool:
        return self.decision is Decision.NEW

    @property
    def failed(self) -> bool:
        return self.failure is not None


def default_effect_id(key: bytes) -> str:
    """The effect_id of an effect that names none: a function of its key, so it needs no room in the stores."""
    return "ef_" + digest("ragfence/effect/1", key)[:16].hex()
