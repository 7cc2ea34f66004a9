"""`Announcement`: an event about what ragfence did, with an id that is a function of what happened."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from ragfence.core.hashing import digest

EVENT_TYPES: Final = (
    "document.ingested",
    "document.retracted",
    "document.purged",
    "index.sealed",
    "alias.swapped",
    "gate.failed",
    "conflict.detected",
    "key.quarantined",
    "duplicate.detected",
    "abnormal_duplicate_rate",
)


@dataclass(frozen=True, slots=True)
class Announcement:
    """An event. It may be sent more than once, always with the same `event_id`."""

    event_id: str
    type: str
    source: str
    """What it is about: events of one source are sent in the order in which they happened."""
    at_ms: int
    tenant: str
    data: dict[str, Any]

    def payload(self) -> dict[str, Any]:
        """The body, as in Standard Webhooks: type, timestamp, data."""
        moment = datetime.fromtimestamp(self.at_ms / 1000, UTC).isoformat(timespec="milliseconds")
        return {
            "type": self.type,
            "timestamp": moment.replace("+00:00", "Z"),
            "id": self.event_id,
            "tenant": self.tenant,
            "source": self.source,
            "data": self.data,
        }


def announce(tenant: str, kind: str, source: str, at_ms: int, data: dict[str, Any], *identity: str) -> Announcement:
    """An announcement whose id is made of its type and of what identifies the event in its source."""
    parts = (tenant, kind, source, *identity)
    made = digest("ragfence/notify/1", *(part.encode("utf-8", "surrogatepass") for part in parts)).hex()
    return Announcement(f"evt_{made[:32]}", kind, source, at_ms, tenant, data)
