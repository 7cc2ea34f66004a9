"""Key strategies: how a payload names the operation it stands for.

    by_fields("order_id", "amount")                     content: the same fields are the same operation
    by_id("event.id")                                   the sender's own id
    by_id_and_fields(id="doc.id", fields=["body"])      both: one source, a new revision with other fields

Each is a function from a payload (mapping, model, dataclass or named tuple) to `(source_id, revision)`, ready
for `@fence.once(kind=..., key=by_id("event.id"))`.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
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
        return field_id(self.id, find_field(payload, self.id)), fields

    def _digest(self, payload: object) -> str:
        values = [find_field(payload, field) for field in self.fields]
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
    return KeyStrategy(fields=check_fields(fields), name=name)


def by_id(field: str) -> KeyStrategy:
    """The operation has its own id, made once by the sender.

    >>> by_id("event.id")({"event": {"id": "evt_1"}})
    ('evt_1', '')
    """
    return KeyStrategy(id=check_fields((field,))[0])


def by_id_and_fields(*, id: str, fields: Sequence[str], name: str = "") -> KeyStrategy:
    """The id names the source, the fields its revision: other fields are another operation on the same source."""
    return KeyStrategy(id=check_fields((id,))[0], fields=check_fields(fields), name=name)


def check_fields(fields: Sequence[str]) -> tuple[str, ...]:
    """Returns the names in an order of their own. Raises `ValidationError` for what cannot name a field."""
    if isinstance(fields, str):
        raise ValidationError(f"fields must be a list of names, got the text {fields!r}", hint=f"[{fields!r}]")
    for field in fields:
        if type(field) is not str or not all(field.split(".")):
            raise ValidationError(f"{field!r} is not a field", hint="a name, or a path with dots: event.id")
    if not fields or len(set(fields)) < len(fields):
        raise ValidationError(f"key fields must be named, each once: {list(fields)}")
    # Their order in the source code must not matter: reordering arguments would perform every effect again.
    return tuple(sorted(fields))


def find_field(payload: object, field: str) -> Any:
    """Returns the value of a name, or of a path with dots. Raises `ValidationError` if it is missing."""
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


def field_id(field: str, value: Any) -> str:
    """Returns an id as text. Raises `ValidationError` if the value cannot be one."""
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
