"""Providers of webhooks: how their deliveries are verified, and which events a body holds.

A provider turns one verified body into events. Most bodies are one event; WhatsApp sends several messages in one, and
each of them is fenced by an id of its own.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final
from urllib.parse import parse_qs

from ragfence.core.canonical import canonical_payload, parse_json
from ragfence.core.hashing import digest
from ragfence.core.operations import Operation
from ragfence.core.payments import amount_text, phone_digest
from ragfence.core.webhook_format import PayloadPath
from ragfence.errors import RagfenceError, ValidationError, WebhookUnverified
from ragfence.webhooks.signatures import (
    Delivery,
    HmacSignature,
    Scheme,
    SignedDelivery,
    StandardSignature,
    StripeSignature,
)

MAX_EVENTS: Final = 1_000
"""The most events that one body may hold."""
KIND: Final = "webhook"


@dataclass(frozen=True, slots=True)
class WebhookEvent:
    """One event of a provider."""

    provider: str
    event_id: str
    """The provider's id, or a digest of the delivery where it has none."""
    type: str
    """What happened, as handlers name it: `page.updated`."""
    payload: Any
    """The JSON value of this event."""

    def __getitem__(self, name: str) -> Any:
        """A field of the payload: `event["page"]["id"]`."""
        return self.payload[name]

    @property
    def operation(self) -> Operation:
        """What happens once, however often the event is delivered."""
        return Operation(kind=KIND, source_type=self.provider, source_id=self.event_id)


class Provider:
    """A provider that signs with a scheme, and whose bodies are one JSON event each.

    Args:
        scheme: How deliveries are verified.
        event_id: Path of the id in the payload, such as `id` or `data.event.id`, if it is not in a signed header.
        type: Path of the type in the payload.

    >>> Provider(HmacSignature("secret", header="X-Sign"), event_id="event.id", type="event.name")  # doctest: +SKIP
    """

    def __init__(self, scheme: Scheme, *, event_id: str = "", type: str = "type") -> None:
        self._scheme = scheme
        self._event_id, self._type = event_id, type

    def verify(self, delivery: Delivery, now_s: float) -> SignedDelivery:
        return self._scheme.verify(delivery, now_s)

    def events(self, name: str, delivery: Delivery, verified: SignedDelivery) -> list[WebhookEvent]:
        """The events of a verified delivery.

        Raises:
            ValidationError: the body is not what the provider sends.
        """
        payload = parse_body(delivery)
        found = self._split(payload, delivery, verified)
        events: list[WebhookEvent] = []
        for event_id, kind, part in found:
            if len(events) == MAX_EVENTS:
                raise ValidationError(f"one body holds more than {MAX_EVENTS} events")
            events.append(WebhookEvent(name, event_id or fallback_id(verified, part), kind, part))
        return events

    def challenge(self, query: Mapping[str, str]) -> str:
        """The answer to the GET with which some providers check an address.

        Raises:
            WebhookUnverified: this provider sends no challenge, or its token is wrong.
        """
        raise WebhookUnverified("this provider sends no challenge")

    def _split(self, payload: Any, delivery: Delivery, verified: SignedDelivery) -> Iterator[tuple[str, str, Any]]:
        """Per event its id (empty: none), its type and its payload."""
        event_id = verified.event_id or (text_at(payload, self._event_id) if self._event_id else "")
        yield event_id, text_at(payload, self._type), payload


class StandardWebhooks(Provider):
    """Any provider that follows the Standard Webhooks specification."""

    def __init__(self, *secrets: str, type: str = "type", tolerance_s: float = 300.0) -> None:
        super().__init__(StandardSignature(*secrets, tolerance_s=tolerance_s), type=type)


class Stripe(Provider):
    """Stripe: events with an `id` and a `type`."""

    def __init__(self, *secrets: str, tolerance_s: float = 300.0) -> None:
        super().__init__(StripeSignature(*secrets, tolerance_s=tolerance_s), event_id="id")


class GitHub(Provider):
    """GitHub: the type is the event's name and, if there is one, its action: `issues.opened`.

    The id is `X-GitHub-Delivery`, which a redelivery repeats. GitHub signs the body alone, not that header.
    """

    def __init__(self, *secrets: str) -> None:
        super().__init__(
            HmacSignature(*secrets, header="X-Hub-Signature-256", prefix="sha256=", id_header="X-GitHub-Delivery")
        )

    def _split(self, payload: Any, delivery: Delivery, verified: SignedDelivery) -> Iterator[tuple[str, str, Any]]:
        name = delivery.header("x-github-event")
        action = text_at(payload, "action")
        yield verified.event_id, f"{name}.{action}" if action else name, payload


class Meta(Provider):
    """Meta's platforms, WhatsApp among them: several changes in one body, each with an id of its own.

    Events of WhatsApp are `message.<type>` (`message.text`) with the message as payload, and `status.<status>`
    (`status.delivered`); every other change is `change.<field>`. `payload["metadata"]` has the receiving number.

    Args:
        secrets: The app secret; several while it is rotated.
        verify_token: The token that Meta repeats in the GET challenge.
    """

    def __init__(self, *secrets: str, verify_token: str = "") -> None:
        super().__init__(HmacSignature(*secrets, header="X-Hub-Signature-256", prefix="sha256="))
        self._verify_token = verify_token

    def challenge(self, query: Mapping[str, str]) -> str:
        token = query.get("hub.verify_token", "")
        known = bool(self._verify_token) and hmac.compare_digest(token.encode(), self._verify_token.encode())
        if not known or query.get("hub.mode") != "subscribe":
            raise WebhookUnverified("the challenge does not carry the verify token")
        return query.get("hub.challenge", "")[:1024]

    def _split(self, payload: Any, delivery: Delivery, verified: SignedDelivery) -> Iterator[tuple[str, str, Any]]:
        for entry in _members(payload, "entry"):
            entry_id = text_at(entry, "id")
            for change in _members(entry, "changes"):
                value = change.get("value") if isinstance(change, Mapping) else None
                shared = {"entry_id": entry_id, "metadata": value.get("metadata")} if isinstance(value, Mapping) else {}
                messages, statuses = _members(value, "messages"), _members(value, "statuses")
                for message in messages:
                    yield text_at(message, "id"), f"message.{text_at(message, 'type')}", {**shared, "message": message}
                for status in statuses:
                    # A message has one id and several statuses, each of which happens once.
                    word, message_id = text_at(status, "status"), text_at(status, "id")
                    event_id = f"{message_id}:{word}" if message_id else ""
                    yield event_id, f"status.{word}", {**shared, "status": status}
                if not messages and not statuses:
                    yield "", f"change.{text_at(change, 'field')}", change


class MoMo(Provider):
    """Mobile-money notifications: fenced by the transaction id, or else by the reference of the request.

    Providers differ in their signatures, so the scheme is given.
    """

    TRANSACTION: Final = ("financialTransactionId", "transId", "transactionId", "transaction_id")
    REFERENCE: Final = ("referenceId", "externalId", "requestId", "orderId", "reference_id")

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(scheme)

    def _split(self, payload: Any, delivery: Delivery, verified: SignedDelivery) -> Iterator[tuple[str, str, Any]]:
        transaction = next(filter(None, (text_at(payload, name) for name in self.TRANSACTION)), "")
        reference = next(filter(None, (text_at(payload, name) for name in self.REFERENCE)), "")
        status = (text_at(payload, "status") or text_at(payload, "resultCode")).lower()
        # One transaction is reported as pending and later as successful: two events.
        kind = f"payment.{status}" if status else "payment"
        if transaction:
            yield f"tx:{transaction}:{status}", kind, payload
        elif reference:
            yield f"ref:{reference}:{status}", kind, payload
        else:
            yield "", kind, payload


def payment_confirmation(provider: str, transaction_id: str) -> Operation:
    """The operation of a payment that was confirmed: once per transaction.

    >>> payment_confirmation("momo", "4711").source_id
    'provider:momo:tx:4711'
    """
    return Operation(
        kind="payment_confirmation", source_type=provider, source_id=f"provider:{provider}:tx:{transaction_id}"
    )


def payment_request(provider: str, *, order_id: str, amount: str | int | Decimal, phone: str) -> Operation:
    """The operation of asking for a payment: once per order, amount and phone number.

    The phone number is part of the key, and only its digest is stored. See also the key strategies
    `by_payment_confirmation` and `by_payment_request`, for `fence.once`.
    """
    return Operation(
        kind="payment_request",
        source_type=provider,
        source_id=f"provider:{provider}:order:{order_id}:amount:{amount_text(amount)}",
        revision=phone_digest(phone),
    )


def parse_body(delivery: Delivery) -> Any:
    """The JSON value of a body; of a form, the value of its field `payload`, which GitHub can send."""
    kind = delivery.headers.get("content-type", "").partition(";")[0].strip().lower()
    data: bytes | str = delivery.body
    try:
        if kind == "application/x-www-form-urlencoded":
            # Nobody signs the content type: JSON whose text contains "&payload=" must not be read as a form.
            if not delivery.body.startswith(b"payload="):
                raise ValueError("the form does not begin with its payload")
            form = parse_qs(delivery.body.decode(), max_num_fields=64)
            data = form.get("payload", [""])[0]
        return parse_json(data)
    except (RagfenceError, ValueError) as error:
        raise ValidationError(
            "the body of the webhook is not JSON", hint="choose application/json where the provider lets you choose"
        ) from error


def fallback_id(verified: SignedDelivery, payload: Any) -> str:
    """The id of an event without one: a digest of signature, timestamp and payload."""
    parts = (verified.signature.encode(), verified.timestamp.encode(), canonical_payload(payload))
    return "sha256:" + digest("ragfence/webhook/1", *parts).hex()


def text_at(value: Any, path: str) -> str:
    """The text or integer at a path, such as `page.id` or `$.items[0].id`; empty if there is none."""
    if path.startswith("$"):
        value = PayloadPath.parse(path).find(value)
    else:
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, str | int):
        return ""
    return str(value)


def _members(value: Any, name: str) -> Sequence[Any]:
    found = value.get(name) if isinstance(value, Mapping) else None
    return found if isinstance(found, list) else ()
