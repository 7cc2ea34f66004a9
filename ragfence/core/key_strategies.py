"""Key strategies: how a payload names the operation it stands for.

    by_fields("order_id", "amount")                     content: the same fields are the same operation
    by_id("event.id")                                   the sender's own id
    by_id_and_fields(id="doc.id", fields=["body"])      both: one source, a new revision with other fields
    by_payment_confirmation("momo", transaction="id")   a payment that was confirmed: once per transaction
    by_payment_request("momo", order=..., ...)          a payment that is requested: once per order, amount and phone

Each is a function from a payload (mapping, model, dataclass or named tuple) to `(source_id, revision)`, ready
for `@fence.once(kind=..., key=by_id("event.id"))`.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any
from uuid import UUID

from ragfence.core.canonical import canonical_json, to_jsonable
from ragfence.core.hashing import digest
from ragfence.errors import ValidationError

_TIMESTAMP = re.compile(
    r"\d{4}-?\d\d-?\d\d[T ]\d\d:?\d\d(?::?\d\d(?:[.,]\d{1,9})?)? ?(?:Z|[+-]\d\d(?::?\d\d)?)?",
    re.ASCII | re.IGNORECASE,
)
# Only the form with hyphens: one in 64 hashes of 32 hex digits has the marks of a uuid4 by chance.
_UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE)


class KeyWarning(UserWarning):
    """A key field that changes with every retry, so that nothing would ever be recognised as a duplicate."""


@dataclass(frozen=True, slots=True)
class KeyStrategy:
    """Where the key of an operation stands in its payload. Made by `by_fields`, `by_id`, `by_id_and_fields`."""

    id: str | None = None
    fields: tuple[str, ...] = ()
    name: str = ""

    def __call__(self, payload: object) -> tuple[str, str]:
        """`(source_id, revision)`; the revision is empty where the strategy has none."""
        fields = self._digest(payload) if self.fields else ""
        if self.id is None:
            return fields, ""
        return _id_text(self.id, _found(payload, self.id)), fields

    def _digest(self, payload: object) -> str:
        values = [_found(payload, field) for field in self.fields]
        if all(value is None for value in values):
            raise ValidationError(
                f"all key fields are null: {', '.join(self.fields)}",
                hint="every payload without them would be the same operation; name a field that is set",
            )
        parts = [self.name.encode()]
        for field, value in zip(self.fields, values, strict=True):
            _warn_if_volatile(field, value, random_is_volatile=True)
            parts += [field.encode(), canonical_json(to_jsonable(value))]
        return "f:" + digest("ragfence/key-fields/1", *parts).hex()


def by_fields(*fields: str, name: str = "") -> KeyStrategy:
    """The operation is what these fields say. `name` keeps equal values of different meaning apart.

    >>> by_fields("order_id", "amount")({"order_id": "o1", "amount": 5, "sent_at": "now"})[0][:10]
    'f:71e54c39'
    """
    return KeyStrategy(fields=_usable(fields), name=name)


def by_id(field: str) -> KeyStrategy:
    """The operation has its own id, made once by the sender.

    >>> by_id("event.id")({"event": {"id": "evt_1"}})
    ('evt_1', '')
    """
    return KeyStrategy(id=_usable((field,))[0])


def by_id_and_fields(*, id: str, fields: Sequence[str], name: str = "") -> KeyStrategy:
    """The id names the source, the fields its revision: other fields are another operation on the same source."""
    return KeyStrategy(id=_usable((id,))[0], fields=_usable(fields), name=name)


@dataclass(frozen=True, slots=True)
class KeyComparison:
    """How two ways to make keys treat the same payloads. The examples are the positions of payloads, at most ten."""

    payloads: int
    operations: tuple[int, int]
    """how many operations they are by the first and by the second strategy"""
    conflicts: tuple[int, int]
    """payloads that differ from the first one of their operation, and so would be refused"""
    only_first: tuple[tuple[int, int], ...]
    """pairs that only the first strategy takes for the same operation"""
    only_second: tuple[tuple[int, int], ...]
    """pairs that only the second strategy takes for the same operation"""
    unusable: tuple[int, ...]
    """payloads from which one of the strategies can make no key"""

    @property
    def equal(self) -> bool:
        """Whether both strategies recognise the same duplicates."""
        return not (self.only_first or self.only_second or self.unusable)


_EXAMPLES = 10


def compare_keys(
    payloads: Iterable[object], first: Callable[[Any], object], second: Callable[[Any], object]
) -> KeyComparison:
    """Compares two ways to make keys on payloads that were seen, before one replaces the other. Nothing is stored.

    Args:
        payloads: For example those of a day. Memory grows with their number, not with their size.
        first: A key strategy, or a function from a payload to its key.
        second: As `first`.

    >>> orders = [{"id": "e1", "order": 7}, {"id": "e2", "order": 7}, {"id": "e2", "order": 7}]
    >>> compare_keys(orders, by_id("id"), by_fields("order")).only_second
    ((0, 1),)
    """
    positions: tuple[dict[bytes, int], dict[bytes, int]] = ({}, {})
    firsts: dict[int, tuple[bytes, bytes, bytes]] = {}
    """of the first payload of each operation: both keys, and the digest of the payload"""
    conflicts, unusable = [0, 0], []
    pairs: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    count = 0
    for at, payload in enumerate(payloads):
        count += 1
        try:
            parts = (first(payload), second(payload), payload)
            one, other, content = (digest("ragfence/compared/1", canonical_json(to_jsonable(part))) for part in parts)
        except (ValidationError, LookupError, TypeError):
            unusable.append(at)
            continue
        found = (one, other, content)
        for which in (0, 1):
            start = positions[which].setdefault(found[which], at)
            before = firsts.setdefault(start, found)
            conflicts[which] += before[2] != content
            if before[1 - which] != found[1 - which] and len(pairs[which]) < _EXAMPLES:
                pairs[which].append((start, at))
    return KeyComparison(
        count,
        (len(positions[0]), len(positions[1])),
        (conflicts[0], conflicts[1]),
        tuple(pairs[0]),
        tuple(pairs[1]),
        tuple(unusable[:_EXAMPLES]),
    )


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
            transaction = _id_text(self.transaction, _found(payload, self.transaction))
            return f"provider:{self.provider}:tx:{transaction}", ""
        order = _id_text(self.order, _found(payload, self.order))
        amount, phone = _found(payload, self.amount), _found(payload, self.phone)
        source_id = f"provider:{self.provider}:order:{order}:amount:{amount_text(amount)}"
        return source_id, phone_digest(_id_text(self.phone, phone))


def by_payment_confirmation(provider: str, *, transaction: str) -> PaymentStrategy:
    """A payment, or a refund, that the provider reports: once per transaction, however many events report it.

    >>> by_payment_confirmation("momo", transaction="tx.id")({"tx": {"id": "4711"}})
    ('provider:momo:tx:4711', '')
    """
    return PaymentStrategy(_named(provider), transaction=_usable((transaction,))[0])


def by_payment_request(provider: str, *, order: str, amount: str, phone: str) -> PaymentStrategy:
    """A payment that is requested from a customer: once per order, amount and phone number.

    >>> by_payment_request("momo", order="order", amount="amount", phone="phone")(
    ...     {"order": "o1", "amount": "1000.00", "phone": "+256 700 000 001"}
    ... )[0]
    'provider:momo:order:o1:amount:1000'
    """
    order, amount, phone = (_usable((field,))[0] for field in (order, amount, phone))
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


def _usable(fields: Sequence[str]) -> tuple[str, ...]:
    if isinstance(fields, str):
        raise ValidationError(f"fields must be a list of names, got the text {fields!r}", hint=f"[{fields!r}]")
    for field in fields:
        if type(field) is not str or not all(field.split(".")):
            raise ValidationError(f"{field!r} is not a field", hint="a name, or a path with dots: event.id")
    if not fields or len(set(fields)) < len(fields):
        raise ValidationError(f"key fields must be named, each once: {list(fields)}")
    # Their order in the source code must not matter: reordering arguments would perform every effect again.
    return tuple(sorted(fields))


def _found(payload: object, field: str) -> Any:
    value: Any = payload
    walked: list[str] = []
    for part in field.split("."):
        members = _members(value)
        if part not in members:
            where = f" in {'.'.join(walked)}" if walked else ""
            shown = ", ".join(map(str, [*members][:20])) or f"nothing: it is a {type(value).__name__}"
            raise ValidationError(
                f"the key field {field!r} is missing: no {part!r}{where}",
                hint=f"there is {shown}",
                field=field,
            )
        value = members[part]
        walked.append(part)
    return value


def _members(value: Any) -> Mapping[str, Any]:
    """The named parts as they are, not as JSON: a datetime must still be known as one."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, type):
        return {}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple):
        return {str(index): item for index, item in enumerate(value)}
    if names := getattr(type(value), "model_fields", None):  # pydantic
        return {name: getattr(value, name) for name in names}
    return {}


def _id_text(field: str, value: Any) -> str:
    # Senders use uuid4 for ids: made once, sent again with every retry.
    _warn_if_volatile(field, value, random_is_volatile=False)
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, date | UUID):
        value = str(to_jsonable(value))
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        shown = "empty" if value == "" or value is None else f"a {type(value).__name__}"
        raise ValidationError(f"the id in {field!r} is {shown}", hint="an id is text or a whole number", field=field)
    return str.__str__(value) if isinstance(value, str) else str(int(value))


def _warn_if_volatile(field: str, value: Any, *, random_is_volatile: bool) -> None:
    for leaf in _leaves(value):
        if _is_time(leaf):
            what = "a point in time"
        elif random_is_volatile and _is_uuid4(leaf):
            what = "a random uuid4"
        else:
            continue
        # Without the value in it, the text is the same for every payload, and shown once.
        warnings.warn(
            f"the key field {field!r} holds {what}: if it is made anew with every retry, no retry is ever "
            "recognised as a duplicate; use an id or content that stays the same",
            KeyWarning,
            stacklevel=4,
        )
        return


def _leaves(value: Any) -> Iterator[Any]:
    stack = [value]
    for _ in range(1000):  # a key field is small; a value inside itself is refused later
        if not stack:
            return
        leaf = stack.pop()
        if isinstance(leaf, Mapping):
            stack.extend(leaf.values())
        elif isinstance(leaf, list | tuple):
            stack.extend(leaf)
        else:
            yield leaf


def _is_time(value: Any) -> bool:
    if isinstance(value, str):
        return _TIMESTAMP.fullmatch(value) is not None
    if isinstance(value, date) and not isinstance(value, datetime):
        return False  # the day a scheduled job is for stays the same with every retry
    return isinstance(value, datetime | time) or callable(getattr(value, "isoformat", None))


def _is_uuid4(value: Any) -> bool:
    if isinstance(value, UUID):
        return value.version == 4
    return isinstance(value, str) and _UUID4.fullmatch(value) is not None
