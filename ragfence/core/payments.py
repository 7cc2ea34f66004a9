"""Key strategies of payments, which a provider and a customer repeat.

by_payment_confirmation("momo", transaction="id")   a payment that was confirmed: once per transaction
by_payment_request("momo", order=..., ...)          a payment that is requested: once per order, amount and phone
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from ragfence.core.hashing import digest
from ragfence.core.key_strategies import check_fields, field_id, find_field
from ragfence.errors import ValidationError


@dataclass(frozen=True, slots=True)
class PaymentStrategy:
    """Where the key of a payment stands in its payload. Made by `by_payment_confirmation` and `by_payment_request`."""

    provider: str
    transaction: str = ""
    order: str = ""
    amount: str = ""
    phone: str = ""

    def __call__(self, payload: object) -> tuple[str, str]:
        """`(source_id, revision)`. A phone number is only in there as a digest."""
        if self.transaction:
            transaction = field_id(self.transaction, find_field(payload, self.transaction))
            return f"provider:{self.provider}:tx:{transaction}", ""
        order = field_id(self.order, find_field(payload, self.order))
        amount, phone = find_field(payload, self.amount), find_field(payload, self.phone)
        source_id = f"provider:{self.provider}:order:{order}:amount:{amount_text(amount)}"
        return source_id, phone_digest(field_id(self.phone, phone))


def by_payment_confirmation(provider: str, *, transaction: str) -> PaymentStrategy:
    """A payment, or a refund, that the provider reports: once per transaction, however many events report it.

    >>> by_payment_confirmation("momo", transaction="tx.id")({"tx": {"id": "4711"}})
    ('provider:momo:tx:4711', '')
    """
    return PaymentStrategy(_named(provider), transaction=check_fields((transaction,))[0])


def by_payment_request(provider: str, *, order: str, amount: str, phone: str) -> PaymentStrategy:
    """A payment that is requested from a customer: once per order, amount and phone number.

    >>> by_payment_request("momo", order="order", amount="amount", phone="phone")(
    ...     {"order": "o1", "amount": "1000.00", "phone": "+256 700 000 001"}
    ... )[0]
    'provider:momo:order:o1:amount:1000'
    """
    order, amount, phone = (check_fields((field,))[0] for field in (order, amount, phone))
    return PaymentStrategy(_named(provider), order=order, amount=amount, phone=phone)


def amount_text(amount: object) -> str:
    """An amount as it is written in a key: 1000, "1000.0" and Decimal("1000.00") are the same amount.

    Raises:
        ValidationError: It is not an amount. Floats are refused: 0.1 + 0.2 is not 0.3.
    """
    if isinstance(amount, bool | float) or not isinstance(amount, str | int | Decimal):
        raise ValidationError(f"an amount is text, an integer or a Decimal, not a {type(amount).__name__}")
    try:
        number = Decimal(amount)
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite() or number < 0 or number.adjusted() > 30 or int(number.as_tuple().exponent) < -30:
        raise ValidationError("the amount is not a number that money can have", hint='for example "1000" or "9.99"')
    text = f"{number:f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) or "0"


def phone_digest(phone: str) -> str:
    """A phone number as it is written in a key: its digest, however the number is spaced.

    Raises:
        ValidationError: It has no digits.
    """
    number = re.sub(r"[^\d+]", "", phone, flags=re.ASCII)
    if not number.strip("+"):
        raise ValidationError("the phone number has no digits")
    return "phone:" + digest("ragfence/phone/1", number.encode()).hex()[:32]


def _named(provider: str) -> str:
    if not provider or ":" in provider:
        raise ValidationError(
            f"{provider[:40]!r} is not a valid name of a provider", hint="a name without a colon: momo"
        )
    return provider
