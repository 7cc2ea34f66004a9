"""Comparison of two ways to make keys, before one replaces the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ragfence.core.canonical import canonical_json, to_jsonable
from ragfence.core.hashing import digest
from ragfence.errors import ValidationError


@dataclass(frozen=True, slots=True)
class KeyComparison:
    """How two ways to make keys treat the same payloads. The examples are the positions of payloads, at most ten."""

    payloads: int
    operations: tuple[int, int]
    """how many operations they are by the first and by the second strategy"""
    conflicts: tuple[int, int]
    """payloads that differ from the first one of their operation, and so would be refused"""
    only_first: tuple[tuple[int, int], ...]
    """pairs that only the first strategy takes for the same operation"""
    only_second: tuple[tuple[int, int], ...]
    """pairs that only the second strategy takes for the same operation"""
    unusable: tuple[int, ...]
    """payloads from which one of the strategies can make no key"""

    @property
    def equal(self) -> bool:
        """Whether both strategies recognise the same duplicates."""
        return not (self.only_first or self.only_second or self.unusable)


_EXAMPLES = 10


def compare_keys(
    payloads: Iterable[object], first: Callable[[Any], object], second: Callable[[Any], object]
) -> KeyComparison:
    """Compares two ways to make keys on payloads that were seen, before one replaces the other. Nothing is stored.

    Args:
        payloads: For example those of a day. Memory grows with their number, not with their size.
        first: A key strategy, or a function from a payload to its key.
        second: As `first`.

    >>> orders = [{"id": "e1", "order": 7}, {"id": "e2", "order": 7}, {"id": "e2", "order": 7}]
    >>> compare_keys(orders, by_id("id"), by_fields("order")).only_second
    ((0, 1),)
    """
    positions: tuple[dict[bytes, int], dict[bytes, int]] = ({}, {})
    firsts: dict[int, tuple[bytes, bytes, bytes]] = {}
    """of the first payload of each operation: both keys, and the digest of the payload"""
    conflicts, unusable = [0, 0], []
    pairs: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    count = 0
    for at, payload in enumerate(payloads):
        count += 1
        try:
            parts = (first(payload), second(payload), payload)
            one, other, content = (digest("ragfence/compared/1", canonical_json(to_jsonable(part))) for part in parts)
        except (ValidationError, LookupError, TypeError):
            unusable.append(at)
            continue
        found = (one, other, content)
        for which in (0, 1):
            start = positions[which].setdefault(found[which], at)
            before = firsts.setdefault(start, found)
            conflicts[which] += before[2] != content
            if before[1 - which] != found[1 - which] and len(pairs[which]) < _EXAMPLES:
                pairs[which].append((start, at))
    return KeyComparison(
        count,
        (len(positions[0]), len(positions[1])),
        (conflicts[0], conflicts[1]),
        tuple(pairs[0]),
        tuple(pairs[1]),
        tuple(unusable[:_EXAMPLES]),
    )
