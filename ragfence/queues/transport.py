"""What a queue has to do for ragfence: one small protocol, and the values that travel through it.

A transport delivers at least once. It may deliver a message again at any time, also after it was acknowledged by a
consumer that came too late; the fence of the consumer makes the effect happen once.

`ragfence.testing.TransportContract` is the executable form of this protocol.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from ragfence.errors import ValidationError

MAX_BODY_BYTES = 256 << 10
"""The largest body that every transport carries."""


TEXT_FIELDS: Final = ("event_id", "source_id", "revision", "index_hash", "dedupe_key", "tenant", "route", "group")
"""The fields of an envelope beside its body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A message to be sent.

    Every field but `body` may be empty. They travel with the message, and appear in decision rows, logs and traces.
    """

    body: Any
    """A JSON value."""
    event_id: str = ""
    """Identifies the event, also when it is sent again. Made by `send` if it is empty."""
    source_id: str = ""
    """What the event is about: a document, an order."""
    revision: str = ""
    index_hash: str = ""
    dedupe_key: str = ""
    """The sender's own idempotency key, if it has one."""
    tenant: str = ""
    """The lane: a transport serves the tenants of a queue in turn."""
    route: str = ""
    group: str = ""
    """Messages of one group are delivered in the order they were sent, where the transport can do that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(Envelope):
    """A message as it was delivered this time."""

    message_id: str
    """The transport's id: the same in every delivery of the message."""
    handle: str
    """This delivery. `ack`, `retry`, `extend` and `dead` need it, and it is worth nothing after the next delivery."""
    attempt: int = 1
    """How often the message was delivered and counted, this time included."""
    sent_ms: int | None = None
    """When it was sent, by the clock of the transport, if that is known."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Other attributes that the sender or the transport attached."""


@dataclass(frozen=True, slots=True)
class Depth:
    """How many messages a queue holds. Some services only estimate them."""

    visible: int
    """Waiting to be delivered, delayed ones included."""
    in_flight: int
    """Delivered and not yet acknowledged."""
    dead: int
    oldest_age_s: float | None
    """Age of the oldest message that is not acknowledged. None if there is no such message, or if it is unknown."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that was given up."""

    message: Message
    reason: str
    died_ms: int | None = None


class Transport(Protocol):
    """A queue. Methods may be called from several threads."""

    @property
    def url(self) -> str:
        """Where it is, for people. Never contains credentials."""
        ...

    @property
    def name(self) -> str:
        """Name of the queue, as in metrics."""
        ...

    @property
    def visibility_s(self) -> float:
        """How long a delivered message is hidden from other consumers, unless it is extended."""
        ...

    def send(self, envelopes: Sequence[Envelope], *, delay_s: float = 0.0) -> list[str]:
        """Sends messages and returns their message ids. When it returns, they are durable.

        Raises:
            QueueFull: the queue is above its high-water mark; nothing was sent.
            TransportUnavailable: some may have been sent. Sending them again with the same `event_id` is safe.
        """
        ...

    def receive(self, limit: int, wait_s: float) -> list[Message]:
        """Returns up to `limit` messages, after waiting up to `wait_s` for the first."""
        ...

    def ack(self, messages: Sequence[Message]) -> list[bool]:
        """Removes messages. False: the delivery had expired, so the message may be delivered again."""
        ...

    def retry(self, message: Message, delay_s: float, *, counted: bool = True) -> bool:
        """Gives a message back, to be delivered after a delay.

        Args:
            counted: whether this delivery counts as an attempt. A message whose key is in flight elsewhere is not
                to blame.

        Returns:
            False if the delivery had expired.
        """
        ...

    def extend(self, messages: Sequence[Message], visibility_s: float | None = None) -> list[bool]:
        """Hides messages for another `visibility_s` from now. False: the delivery had expired."""
        ...

    def dead(self, message: Message, reason: str) -> bool:
        """Moves a message to the dead letters. False: the delivery had expired."""
        ...

    def depth(self) -> Depth: ...

    def dead_letters(self, limit: int = 100, after: str = "") -> list[DeadLetter]:
        """Dead letters in a stable order, from behind the message id `after`."""
        ...

    def replay_dead(self, message_ids: Sequence[str]) -> int:
        """Puts dead letters back into the queue, with no attempt counted. Returns how many there were."""
        ...

    def drop_dead(self, message_ids: Sequence[str]) -> int:
        """Deletes dead letters. Returns how many there were."""
        ...

    def close(self) -> None: ...


def check_texts(envelope: Envelope, *, longest: Mapping[str, int] | None = None) -> None:
    """Raises `ValidationError` for text that a queue cannot hold: sending it again would not help.

    Args:
        longest: How many characters of a field the queue holds, where that is bounded.
    """
    for name in TEXT_FIELDS:
        text: str = getattr(envelope, name)
        if "\0" in text or any("\ud800" <= each <= "\udfff" for each in text):
            raise ValidationError(f"{name} of a message holds NUL or a lone surrogate")
        if longest and len(text) > longest.get(name, len(text)):
            raise ValidationError(f"{name} of a message has {len(text)} characters, more than {longest[name]}")


def encode_body(body: object) -> str:
    """A body as JSON text, of bounded size."""
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise ValidationError(f"the body of a message is not JSON: {error}") from error
    if size > MAX_BODY_BYTES:
        raise ValidationError(
            f"the body of a message has {size} bytes, more than {MAX_BODY_BYTES}",
            hint="send a reference, such as the URL of an object, instead of the content",
        )
    return text


def decode_body(text: str) -> Any:
    """The JSON value of a body. Text that is not JSON is the body itself: other programs may have sent it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # what is nested too deep must not keep the others from being received
        return text
