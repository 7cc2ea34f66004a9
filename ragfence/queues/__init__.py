"""Queues that deliver at least once, and consumers whose effects happen once.

Consumer            handles the messages of a queue, each key once
DocumentConsumer    ingests the documents of a queue, in batches
open_transport      opens the queue that a URL names
s3_consumer         ingests the objects that S3 notifications name
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
    from ragfence.queues.s3_events import s3_consumer as s3_consumer
    from ragfence.queues.transport import Envelope as Envelope
    from ragfence.queues.transport import Message as Message
    from ragfence.queues.transport import Transport as Transport

_WHERE = {
    "Consumer": "ragfence.queues.consumer",
    "DocumentConsumer": "ragfence.queues.document_consumer",
    "Envelope": "ragfence.queues.transport",
    "Message": "ragfence.queues.transport",
    "Transport": "ragfence.queues.transport",
    "s3_consumer": "ragfence.queues.s3_events",
}

__all__ = ["Consumer", "DocumentConsumer", "Envelope", "Message", "Transport", "open_transport", "s3_consumer"]


def open_transport(url: str, **options: Any) -> Transport:
    """Opens the queue that a URL names.

    The parameter `queue` of the URL is the name of the queue; it may be given as an option instead.

    Args:
        url: `sqlite:///queue.db?queue=orders`, `postgresql://host/database?queue=orders`,
            `redis://host:6379/0?queue=orders` (also `rediss://`, `unix://`, `redis+sentinel://`, `redis+cluster://`;
            with `&wait_replicas=1`, `send` waits for a replica),
            `sqs://orders?region=eu-west-1` (also `sqs://ACCOUNT/orders`, or the https URL of a queue of SQS).
        options: Passed to the transport, for example `visibility_s`.

    Raises:
        ValidationError: the URL names no kind of queue that is known.

    >>> queue = open_transport("redis://localhost:6379/0?queue=orders", visibility_s=30)  # doctest: +SKIP
    """
    from ragfence.core.urls import show_url
    from ragfence.errors import ValidationError

    scheme = url.partition("://")[0]
    parameters = parse_qsl(url.partition("?")[2], keep_blank_values=True)
    names = [value for name, value in parameters if name == "queue"]
    if names:
        url, options = _without(url, "queue"), {"queue": names[-1], **options}
    if scheme.partition("+")[0] in ("sqlite", "postgresql"):
        from ragfence.queues.sql import SqlTransport

        return SqlTransport(url, **options)
    if scheme.partition("+")[0] in ("redis", "rediss", "unix"):
        waits = [value for name, value in parameters if name == "wait_replicas"]
        if waits:
            if not waits[-1].isdecimal():
                raise ValidationError(
                    f"wait_replicas={waits[-1]!r} is not a number", hint="for example wait_replicas=1"
                )
            url, options = _without(url, "wait_replicas"), {"wait_replicas": int(waits[-1]), **options}
        from ragfence.queues.streams import RedisStreamTransport

        return RedisStreamTransport(url, **options)
    if scheme in ("sqs", "http", "https"):
        from ragfence.queues.sqs import SqsTransport

        return SqsTransport(url, **options)
    raise ValidationError(
        f"{show_url(url)} is not the URL of a queue",
        hint="sqlite:///queue.db, postgresql://host/database or redis://host:6379/0, each with ?queue=NAME; or sqs://NAME",
    )


def _without(url: str, parameter: str) -> str:
    place, _, query = url.partition("?")
    rest = urlencode([pair for pair in parse_qsl(query, keep_blank_values=True) if pair[0] != parameter])
    return f"{place}?{rest}" if rest else place


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ragfence.queues' has no attribute {name!r}")
