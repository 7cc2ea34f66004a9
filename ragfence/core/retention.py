"""How long a key must be remembered: longer than its sender repeats it.

A record that is forgotten while its sender still retries lets the effect happen twice, so every class of
operations has a shortest TTL, and every known sender needs twice the time for which it retries.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

RetentionClass: TypeAlias = Literal["webhook", "api", "batch", "queue", "outbox", "step"]

SHORTEST_HOURS: Final[Mapping[RetentionClass, float]] = MappingProxyType(
    {
        "webhook": 7 * 24,
        "api": 24,
        "batch": 24,
        "queue": 4 * 24,  # how long SQS keeps a message by default
        "outbox": 7 * 24,
        "step": 1,
    }
)

# From the senders' documentation. Where editions differ, the longer: a TTL that is too long costs memory, one
# that is too short costs a second effect.
WEBHOOK_HORIZONS_HOURS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "stripe": 72,
        "paypal": 72,
        "square": 72,
        "slack": 24,  # minutes by default, a day with delayed events
        "shopify": 4,
        "github": 0,  # repeats only on request
    }
)


class Need(NamedTuple):
    hours: float
    reason: str


_CLASS_OF_KIND: Final[Mapping[str, RetentionClass]] = MappingProxyType(
    {
        "document": "batch",
        "index": "batch",
        "outbox": "outbox",
        "payment_confirmation": "webhook",
        "payment_request": "webhook",
        "queue": "queue",
        "step": "step",
    }
)


def usual_class(kind: str) -> RetentionClass:
    """The class of a kind that the policy does not name."""
    if kind.startswith("webhook"):
        return "webhook"
    return _CLASS_OF_KIND.get(kind, "api")


def shortest_ttl(retention: RetentionClass, horizons_hours: Mapping[str, float]) -> Need:
    """The least a class may be remembered, given for how long each of its senders retries."""
    need = Need(SHORTEST_HOURS[retention], f"what class {retention} needs to outlast the retries of its senders")
    for sender, horizon in horizons_hours.items():
        if 2 * horizon > need.hours:
            need = Need(2 * horizon, f"twice the {horizon:g} hours for which {sender} retries")
    return need
