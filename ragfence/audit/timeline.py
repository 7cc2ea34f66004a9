"""The timeline of a key: its decision rows as events, in the order in which they happened. Pure.

    claimed      an attempt was granted the claim; an attempt above 1 retries what an earlier one gave up
    taken_over   the same, after the lease of another owner expired
    released     an attempt ended without an outcome; `error_code` says why
    sealed       the effect is done; `failed`: sealed as a failure, which is replayed from then on
    healed       an owner had committed and died before its seal; the effect was found, not repeated
    moved        the key was sealed before; only the highest sequence of its source increased
    fenced_out   an attempt sealed too late and was answered with the winner's outcome
    replayed     answered with the sealed outcome
    in_flight    answered that another owner is running it; `quarantined`: that there were too many attempts
    conflicted   refused: another payload under the same key
    stale        refused: a sequence below the one already applied
    ended        the life of the key ended (released, expired, purged); it may be new again

Equal answers in a row are one event with a `count`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import Any

from ragfence.core.decision_rows import FLAG_TEXT, Row
from ragfence.core.decisions import QUARANTINED
from ragfence.core.layout import (
    FENCED_OUT,
    FENCED_POSITION,
    HEALED,
    NO_TOKEN,
    RELEASE_POSITION,
    SEAL_POSITION,
    TAKEOVER,
    RowKind,
)
from ragfence.core.receipts import default_effect_id


class EventType(StrEnum):
    CLAIMED = "claimed"
    TAKEN_OVER = "taken_over"
    RELEASED = "released"
    SEALED = "sealed"
    FAILED = "failed"
    HEALED = "healed"
    MOVED = "moved"
    FENCED_OUT = "fenced_out"
    REPLAYED = "replayed"
    IN_FLIGHT = "in_flight"
    QUARANTINED = "quarantined"
    CONFLICTED = "conflicted"
    STALE = "stale"
    ENDED = "ended"


ANSWERS = frozenset(
    {EventType.REPLAYED, EventType.IN_FLIGHT, EventType.QUARANTINED, EventType.CONFLICTED, EventType.STALE},
)
"""events that only answered a call and changed nothing"""


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    what: EventType
    ts_ms: int
    owner: str = ""
    run_id: str = ""
    attempt: int = 0
    fence: str = ""
    error_code: str = ""
    waited_ms: int = 0
    effect_id: str = ""
    payload_hash: str = ""
    expires_ms: int = 0
    token: str = ""
    """of the attempt; all its events share it"""
    flags: tuple[str, ...] = ()
    route: str = ""
    event_id: str = ""
    correlation_id: str = ""
    count: int = 1
    last_ms: int = 0
    """time of the last of `count` answers"""


@dataclass(frozen=True, slots=True)
class Timeline:
    key: str
    kind: str = ""
    source_type: str = ""
    source_id: str = ""
    revision: str = ""
    index_hash: str = ""
    action: str = ""
    sequence: str = ""
    events: tuple[TimelineEvent, ...] = ()

    def count(self, *whats: EventType) -> int:
        return sum(event.count for event in self.events if event.what in whats)


def build_timelines(rows: Iterable[Row], *, every: bool = False) -> list[Timeline]:
    """Returns one timeline per key, ordered by its first event.

    Args:
        rows: In any order; duplicates do not matter.
        every: Keep every answer, instead of one event with a count for equal answers in a row.
    """
    unique = {row.row_id: row for row in rows}
    by_key: dict[bytes, list[Row]] = {}
    for row in sorted(unique.values(), key=_order):
        by_key.setdefault(row.key, []).append(row)
    return [_timeline(key, members, every) for key, members in by_key.items()]


def _timeline(key: bytes, rows: list[Row], every: bool) -> Timeline:
    columns: dict[str, Any] = {}
    for row in rows:  # a row without a context does not name the operation; all others name the same one
        columns = row.columns()
        if columns["source_id"]:
            break
    events = [_event(row) for row in rows]
    names = ("kind", "source_type", "source_id", "revision", "index_hash", "action", "sequence")
    return Timeline(
        key.hex(),
        **{name: str(columns.get(name) or "") for name in names},
        events=tuple(events if every else _collapse(events)),
    )


def _event(row: Row) -> TimelineEvent:
    values = row.columns()
    answered = row.sealed_at_ms > 0 and row.winner != NO_TOKEN
    return TimelineEvent(
        what=event_type(row),
        ts_ms=row.ts_ms,
        owner=values["owner"] or "",
        run_id=values["run_id"] or "",
        attempt=row.attempt,
        fence=values["fence"] or "",
        error_code=row.error_code,
        waited_ms=row.waited_ms,
        effect_id=row.effect_id or (default_effect_id(row.key) if answered else ""),
        payload_hash=values["payload_hash"],
        expires_ms=row.expires_ms,
        token=row.token.hex(),
        flags=tuple(text for bit, text in FLAG_TEXT.items() if row.flags & bit),
        route=values["route"] or "",
        event_id=values["event_id"] or "",
        correlation_id=values["correlation_id"] or "",
        last_ms=row.ts_ms,
    )


def event_type(row: Row) -> EventType:
    match row.kind:
        case RowKind.NEW if row.position == RELEASE_POSITION:
            return EventType.RELEASED
        case RowKind.NEW if row.position == SEAL_POSITION:
            return EventType.FAILED if row.error_code else EventType.SEALED
        case RowKind.NEW:
            return EventType.TAKEN_OVER if row.flags & TAKEOVER else EventType.CLAIMED
        case RowKind.DUPLICATE if row.flags & FENCED_OUT:
            return EventType.FENCED_OUT
        case RowKind.DUPLICATE if row.flags & HEALED:
            return EventType.HEALED
        case RowKind.DUPLICATE:
            return EventType.MOVED if row.position == SEAL_POSITION else EventType.REPLAYED
        case RowKind.CONFLICT:
            return EventType.CONFLICTED
        case RowKind.IN_FLIGHT:
            return EventType.QUARANTINED if row.error_code == QUARANTINED else EventType.IN_FLIGHT
        case RowKind.STALE:
            return EventType.STALE
        case RowKind.ENDED:
            return EventType.ENDED


def _order(row: Row) -> tuple[int, tuple[int, int], int, int, str]:
    """Within a millisecond, attempts are ordered by fence number, and rows of an attempt by their kind."""
    if row.kind is RowKind.ENDED:
        step = 4
    elif row.position in (FENCED_POSITION, SEAL_POSITION, RELEASE_POSITION):
        step = 2
    elif row.kind is RowKind.NEW:
        step = 0
    else:  # an answer during the attempt, or after it
        step = 3 if row.sealed_at_ms or row.error_code == QUARANTINED else 1
    return row.ts_ms, row.fence, step, row.position, row.row_id


def _collapse(events: Iterable[TimelineEvent]) -> Iterator[TimelineEvent]:
    for (what, *_), run in groupby(events, key=lambda event: (event.what, event.payload_hash)):
        if what not in ANSWERS:
            yield from run
            continue
        first, *rest = run
        if not rest:
            yield first
            continue
        yield replace(
            first,
            count=1 + len(rest),
            last_ms=rest[-1].ts_ms,
            # Named only if all callers have the same owner.
            owner=first.owner if len({event.owner for event in (first, *rest)}) == 1 else "",
            run_id=first.run_id if len({event.run_id for event in (first, *rest)}) == 1 else "",
            waited_ms=max(event.waited_ms for event in (first, *rest)),
        )
