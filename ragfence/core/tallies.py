"""Hourly counts of answers, kept by the fence stores as they answer. Pure; the Lua scripts make the same labels.

    label   outcome:1, then the lifetime in whole hours (`0`: for ever, `-`: no key is left), NUL, kind, NUL, route

A count stands under the hour in which the answer was given. Granted claims and releases are not counted: what comes of
an attempt is. An answer that is sent again because its reply was lost is counted again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from ragfence.core.decision_rows import Row
from ragfence.core.decisions import QUARANTINED
from ragfence.core.layout import FENCED_OUT, SEAL_POSITION, RowKind

HOUR_MS = 3_600_000
KEPT_DAYS = 35
"""how long counts are kept"""
MAX_LABELS = 4_000
"""of a day in a store; beyond them, kinds and routes are not told apart"""
MAX_ROUTE_BYTES = 80
BEGUN = b"b-\0\0"
"""not a label of answers: under it stands, as if it were a count, since when a store counts, in milliseconds"""
NO_KEY = "-"
"""instead of a lifetime: no key of its own is left behind"""
_ROUTE = b',"route":"'
_KIND = b'{"kind":"'


class TallyOutcome(StrEnum):
    """The letters stand in stores."""

    NEW = "n"
    FAILED = "f"
    """sealed as a failure"""
    DUPLICATE = "d"
    HEALED = "h"
    """sealed with an effect that had been done before: healed, revived, or moved"""
    FENCED_OUT = "o"
    CONFLICT = "c"
    IN_FLIGHT = "i"
    QUARANTINED = "q"
    STALE = "s"
    ENDED = "e"
    FORGOTTEN = "x"
    """not an answer: a key that was dropped before its time, under the hour of its seal"""


DECISIONS = {
    TallyOutcome.NEW: "new",
    TallyOutcome.FAILED: "new",
    TallyOutcome.DUPLICATE: "duplicate",
    TallyOutcome.HEALED: "duplicate",
    TallyOutcome.FENCED_OUT: "fenced_out",
    TallyOutcome.CONFLICT: "conflict",
    TallyOutcome.IN_FLIGHT: "in_flight",
    TallyOutcome.QUARANTINED: "in_flight",
    TallyOutcome.STALE: "stale",
    TallyOutcome.ENDED: "ended",
}
_LIVE = {TallyOutcome.NEW: "sealed", TallyOutcome.FAILED: "failed", TallyOutcome.HEALED: "sealed"}
_SIMPLE = {
    RowKind.DUPLICATE: TallyOutcome.DUPLICATE,
    RowKind.CONFLICT: TallyOutcome.CONFLICT,
    RowKind.STALE: TallyOutcome.STALE,
    RowKind.ENDED: TallyOutcome.ENDED,
}


@dataclass(frozen=True, slots=True)
class Label:
    outcome: TallyOutcome
    lifetime: str
    kind: str
    route: str

    @classmethod
    def decode(cls, data: bytes) -> Label | None:
        """None: a label that this ragfence does not know."""
        return _decoded(bytes(data))

    @property
    def lifetime_hours(self) -> int | None:
        """None: it left no key behind; 0: for ever."""
        return None if self.lifetime == NO_KEY else int(self.lifetime)


@lru_cache(maxsize=4096)
def _decoded(data: bytes) -> Label | None:
    head, _, rest = data.partition(b"\0")
    kind, _, route = rest.partition(b"\0")
    try:
        outcome, lifetime = TallyOutcome(head[:1].decode()), head[1:].decode()
        if lifetime != NO_KEY:
            int(lifetime)
    except ValueError:
        return None
    return Label(outcome, lifetime, kind.decode(errors="replace"), route.decode(errors="replace"))


def outcome_of(row: Row) -> TallyOutcome | None:
    """None: a row of an attempt, not of an answer."""
    if row.kind is RowKind.NEW:
        if row.position != SEAL_POSITION:
            return None
        return TallyOutcome.FAILED if row.error_code else TallyOutcome.NEW
    if row.kind is RowKind.DUPLICATE and row.flags & FENCED_OUT:
        return TallyOutcome.FENCED_OUT
    if row.kind is RowKind.DUPLICATE and row.position == SEAL_POSITION:
        return TallyOutcome.HEALED
    if row.kind is RowKind.IN_FLIGHT:
        return TallyOutcome.QUARANTINED if row.error_code == QUARANTINED else TallyOutcome.IN_FLIGHT
    return _SIMPLE[row.kind]


def make_label(outcome: str, lifetime: str, kind: bytes, context: bytes) -> bytes:
    """`context`: of the row. It is not parsed: JSON escapes quotation marks inside a string, so none of them match."""
    at = context.find(_ROUTE)
    if at < 0:
        return b"%b%b\0%b\0" % (outcome.encode(), lifetime.encode(), kind)
    start = at + len(_ROUTE)
    end = min(context.find(b'"', start), start + MAX_ROUTE_BYTES)
    return b"%b%b\0%b\0%b" % (outcome.encode(), lifetime.encode(), kind, context[start:end])


def kind_in(context: bytes) -> bytes:
    """The kind that the context of a row begins with."""
    if not context.startswith(_KIND):
        return b""
    return context[len(_KIND) : context.find(b'"', len(_KIND))]


def label_of_row(row: Row) -> bytes | None:
    """Of a row alone. Only a seal leaves a key behind, and says until when; without an end it may be a document's."""
    outcome = outcome_of(row)
    if outcome is None:
        return None
    sealed = outcome in _LIVE
    lifetime = hours_of(row.expires_ms - row.ts_ms) if sealed and row.expires_ms else NO_KEY if sealed else "0"
    return make_label(outcome, lifetime, kind_in(row.context), row.context)


def without_names(label: bytes) -> bytes:
    return label[: label.index(b"\0")] + b"\0\0"


def hours_of(ttl_ms: int) -> str:
    """A lifetime, rounded up to whole hours."""
    return str(-(-ttl_ms // HOUR_MS))


@dataclass(frozen=True, slots=True)
class Tallies:
    """Counts by (hour since 1970, label)."""

    counts: Mapping[tuple[int, bytes], int]
    begun: Mapping[int, int] = field(default_factory=dict)
    """by shard: the moment since which the store counts, where it lies in the hours asked for. What was answered before
    was forgotten together with its counts"""

    @classmethod
    def of(cls, counts: Mapping[tuple[int, bytes], int], shards: Iterable[int]) -> Tallies:
        """Of a store that counts these shards together."""
        begun = [count for (_, label), count in counts.items() if label == BEGUN]
        kept = {where: count for where, count in counts.items() if where[1] != BEGUN}
        return cls(kept, dict.fromkeys(shards, min(begun)) if begun else {})

    def decisions(self, since_ms: int = 0) -> Counter[tuple[str, str, str]]:
        """(decision, route, kind) -> how many answers, since the beginning of the hour of a moment."""
        first, found = since_ms // HOUR_MS, Counter[tuple[str, str, str]]()
        for (hour, data), count in self.counts.items():
            label = Label.decode(data)
            if hour >= first and label is not None and label.outcome in DECISIONS:
                found[DECISIONS[label.outcome], label.route, label.kind] += count
        return found

    def live_keys(self, now_ms: int) -> tuple[Counter[tuple[str, str]], float | None]:
        """(kind, state) -> how many ended keys are still held, about; and their average remaining lifetime in seconds.

        The lifetimes are counted in hours, so a key may be counted for up to an hour more or less; one that lives
        longer than counts are kept is not counted to its end. Documents are not among them.
        """
        now, live, dropped = now_ms // HOUR_MS, Counter[tuple[str, str]](), Counter[str]()
        left_hours = expiring = 0
        for (hour, data), count in self.counts.items():
            label = Label.decode(data)
            if label is None or (lifetime := label.lifetime_hours) is None or (lifetime and hour + lifetime <= now):
                continue
            if label.outcome is TallyOutcome.FORGOTTEN:
                dropped[label.kind] += count
            elif (state := _LIVE.get(label.outcome)) is not None:
                live[label.kind, state] += count
                if lifetime:
                    expiring += count
                    left_hours += count * (hour + lifetime - now)
        for kind, count in dropped.items():
            for state in ("failed", "sealed"):
                taken = min(count, live[kind, state])
                live[kind, state] -= taken
                count -= taken
        return +live, 3600 * left_hours / expiring if expiring else None


def joined(parts: Iterable[tuple[tuple[int, bytes], int]]) -> Tallies:
    counts: Counter[tuple[int, bytes]] = Counter()
    for where, count in parts:
        counts[where] += count
    return Tallies(counts)
