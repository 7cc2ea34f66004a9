"""Queues that deliver at least once, and consumers whose effects happen once.

Consumer            handles the messages of a queue, each key once
DocumentConsumer    ingests the documents of a queue, in batches
open_transport      opens the queue that a URL names
Envelope, Message   what is sent, and what is received
Transport           what a queue has to do
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

if TYPE_CHECKING:
    from ragfence.queues.consumer import Consumer as Consumer
    from ragfence.queues.document_consumer import DocumentConsumer as DocumentConsumer
    from ragfence.queues.transport import Envelope as Envelope
    from ragfence.queues.transport import Message as Message
    from ragfence.queues.transport import Transport as Transport

_WHERE = {
    "Consumer": "ragfence.queues.consumer",
    "DocumentConsumer": "ragfence.queues.document_consumer",
    "Envelope": "ragfence.queues.transport",
    "Message": "ragfence.queues.transport",
    "Transport": "ragfence.queues.transport",
}

__all__ = ["Consumer", "DocumentConsumer", "Envelope", "Message", "Transport", "open_transport"]


def open_transport(url: str, **options: Any) -> Transport:
    """Opens the queue that a URL names.

    The parameter `queue` of the URL is the name of the queue; it may be given as an option instead.

    Args:
        url: `sqlite:///queue.db?queue=orders`, `postgresql://host/database?queue=orders`,
            `redis://host:6379/0?queue=orders` (also `rediss://`, `unix://`, `redis+sentinel://`, `redis+cluster://`).
        options: Passed to the transport, for example `visibility_s`.

    Raises:
        ValidationError: the URL names no kind of queue that is known.

    >>> queue = open_transport("redis://localhost:6379/0?queue=orders", visibility_s=30)  # doctest: +SKIP
    """
    from ragfence.core.urls import show_url
    from ragfence.errors import ValidationError

    scheme = url.partition("://")[0]
    place, question, query = url.partition("?")
    parameters = parse_qsl(query, keep_blank_values=True)
    names = [value for name, value in parameters if name == "queue"]
    if names:
        rest = urlencode([(name, value) for name, value in parameters if name != "queue"])
        url = f"{place}{question}{rest}" if rest else place
        options = {"queue": names[-1], **options}
    if scheme.partition("+")[0] in ("sqlite", "postgresql"):
        from ragfence.queues.sql import SqlTransport

        return SqlTransport(url, **options)
    if scheme.partition("+")[0] in ("redis", "rediss", "unix"):
        from ragfence.queues.streams import RedisStreamTransport

        return RedisStreamTransport(url, **options)
    raise ValidationError(
        f"{show_url(url)} is not the URL of a queue",
        hint="sqlite:///queue.db, postgresql://host/database or redis://host:6379/0, each with ?queue=NAME",
    )


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ragfence.queues' has no attribute {name!r}")
