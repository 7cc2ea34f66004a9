"""Events that are written with the business rows they are about, and relayed afterwards.

Outbox   adds an event in the transaction of the business rows
Relay    sends the events of the table to a queue or a function, in order per key
Inbox    remembers, in the transaction of the consumer's rows, which events were applied
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragfence.outbox.inbox import Inbox as Inbox
    from ragfence.outbox.outbox import Outbox as Outbox
    from ragfence.outbox.relay import Relay as Relay

_WHERE = {
    "Inbox": "ragfence.outbox.inbox",
    "Outbox": "ragfence.outbox.outbox",
    "Relay": "ragfence.outbox.relay",
}

__all__ = ["Inbox", "Outbox", "Relay"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ragfence.outbox' has no attribute {name!r}")
