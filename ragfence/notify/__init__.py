"""What ragfence did, announced to others: to a webhook, a queue or a function. At least once, in order per source.

Notifier         finds what was not announced yet, sends it, and remembers that
Announcement     one event: its id is the same whenever it is sent
WebhookReceiver  an address that gets events by HTTP, signed as in Standard Webhooks
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragfence.notify.announcements import Announcement as Announcement
    from ragfence.notify.notifier import Notifier as Notifier
    from ragfence.notify.receivers import WebhookReceiver as WebhookReceiver

_WHERE = {
    "Announcement": "ragfence.notify.announcements",
    "Notifier": "ragfence.notify.notifier",
    "WebhookReceiver": "ragfence.notify.receivers",
}

__all__ = ["Announcement", "Notifier", "WebhookReceiver"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ragfence.notify' has no attribute {name!r}")
