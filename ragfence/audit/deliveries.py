"""The inbox as the decision rows show it: each event that was received, once, with what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from ragfence.audit.ledger import RowQuery
from ragfence.audit.row_reader import RowReader
from ragfence.core.decision_rows import Phase

KINDS: Final = ("webhook", "queue")
"""Kinds of operations that stand for a received event."""
_ORDERED: Final = ("document", "webhook.order")
"""Kinds that decide about the order of events."""
_NAMES: Final = (
    *("ts", "idempotency_key", "source_type", "source_id", "payload_hash", "decision", "phase", "attempt"),
    *("first_seen", "sealed_at", "error_code", "event_id"),
)

InboxResult = Literal["ok", "failed", "stale", "conflict", "pending"]


@dataclass(slots=True)
class InboxEvent:
    """An event that was received: by a webhook, or from a queue."""

    event_id: str
    source: str
    """The provider, or the name of the queue."""
    key: str
    payload_hash: str
    received_ms: int
    """When it was first claimed. An event of an inbox may have waited in its queue before."""
    processed_ms: int | None = None
    """When its outcome was sealed. None: not yet."""
    attempts: int = 0
    duplicates: int = 0
    """Deliveries that were answered with the first receipt."""
    conflicts: int = 0
    """Deliveries with another payload, which were not applied."""
    result: InboxResult = "pending"
    """`ok`; `failed` for good; `stale` or `conflict`: received, and not applied; `pending`: no outcome yet."""


def inbox(rows: RowReader, query: RowQuery, kinds: Sequence[str] = KINDS) -> list[InboxEvent]:
    """Returns the events with a row in the time of the query, in the order in which they were received."""
    events: dict[str, InboxEvent] = {}
    for kind in kinds:
        for row in rows.table(query._replace(values=(*query.values, ("kind", kind))), _NAMES).to_pylist():
            _add(events, row)
    _mark_unapplied(rows, query, events)
    return sorted(events.values(), key=lambda event: (event.received_ms, event.key))


def _add(events: dict[str, InboxEvent], row: dict[str, Any]) -> None:
    seen_ms = _ms(row["first_seen"]) or _ms(row["ts"]) or 0
    event = events.get(row["idempotency_key"])
    if event is None:
        event = events[row["idempotency_key"]] = InboxEvent(
            event_id=row["event_id"] or row["source_id"] or "",
            source=row["source_type"] or "",
            key=row["idempotency_key"],
            payload_hash=row["payload_hash"] or "",
            received_ms=seen_ms,
        )
    event.received_ms = min(event.received_ms, seen_ms)
    if row["phase"] == Phase.CONFLICT:
        event.conflicts += 1
        return
    event.payload_hash = row["payload_hash"] or event.payload_hash
    event.attempts = max(event.attempts, row["attempt"] or 0)
    if row["phase"] == Phase.REPLAY:
        event.duplicates += 1
    if row["sealed_at"] is not None:
        event.processed_ms = _ms(row["sealed_at"])
        if row["phase"] == Phase.SEAL:
            event.result = "failed" if row["error_code"] else "ok"
        elif event.result == "pending":  # sealed before the time of the query
            event.result = "ok"


def _mark_unapplied(rows: RowReader, query: RowQuery, events: dict[str, InboxEvent]) -> None:
    """Events whose object had moved on: their outcome is sealed, and nothing was applied."""
    by_id = {event.event_id: event for event in events.values() if event.result == "ok"}
    for kind in _ORDERED if by_id else ():
        for decision in ("stale", "conflict"):
            wanted = query._replace(values=(*query.values, ("kind", kind), ("decision", decision)))
            for row in rows.table(wanted, ["event_id"]).to_pylist():
                if (event := by_id.get(row["event_id"] or "")) is not None:
                    event.result = "stale" if decision == "stale" else "conflict"


def _ms(moment: Any) -> int | None:
    return None if moment is None else int(moment.timestamp() * 1000)
