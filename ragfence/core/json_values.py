"""What Python values mean in JSON, and the error for a value without a meaning there.

Used for payloads and results alike: models, dataclasses and named tuples become objects, dates and ids become
text. What has no one meaning (bytes, sets, objects of unknown classes) raises `NotJson` and names the place.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import Any, NoReturn, TypeAlias, cast
from uuid import UUID

from ragfence.errors import NotJson

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
Path: TypeAlias = "list[str | int]"

MAX_DEPTH = 100

_ATOMS = frozenset({str, int, float, bool, type(None)})
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PAYLOAD_HINT = "pass payload=lambda ...: {...} with the fields that matter"


def to_jsonable(value: object) -> JsonValue:
    """What a payload or result means in JSON: models, dataclasses and named tuples become objects.

    >>> to_jsonable({"id": UUID(int=1), "day": date(2024, 2, 29)})
    {'id': '00000000-0000-0000-0000-000000000001', 'day': '2024-02-29'}
    """
    return _jsonable(value, [])


def path_text(path: list[str | int]) -> str:
    """`["items", 3, "unit price"]` as people write it: `$.items[3]["unit price"]`."""
    text = "$"
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _IDENTIFIER.fullmatch(part):
            text += f".{_short(part)}"
        else:
            text += f"[{json.dumps(_short(part))}]"
    return text


def _short(name: str) -> str:
    return name if len(name) <= 64 else name[:61] + "..."


def refuse(path: Path, problem: str, hint: str) -> NoReturn:
    where = path_text(path)
    raise NotJson(f"{where}: {problem}", hint=hint, path=where)


def enter(path: Path) -> None:
    # A value that contains itself ends here as well.
    if len(path) >= MAX_DEPTH:
        refuse(path[:3], f"nested deeper than {MAX_DEPTH} levels, or inside itself", "flatten it")


def refuse_key(path: Path, name: object) -> NoReturn:
    refuse(path, f"a key of type {type(name).__name__}; JSON keys are strings", "use str keys")


def refuse_duplicate(path: Path, name: str) -> NoReturn:
    refuse(path, f"the key {json.dumps(_short(name))} twice (compared after NFC)", "send every key once")


def refuse_type(path: Path, value: object) -> NoReturn:
    name = type(value).__name__
    if isinstance(value, bytes | bytearray | memoryview):
        refuse(path, f"{name} is not JSON", "hash it, or encode it as base64 text")
    if isinstance(value, set | frozenset):
        refuse(path, f"a {name} has no order", "pass sorted(...) of it")
    refuse(path, f"{name} is not JSON", _PAYLOAD_HINT)


def _jsonable(value: Any, path: Path) -> JsonValue:
    if type(value) in _ATOMS:
        return cast("JsonValue", value)
    if isinstance(value, Enum):
        return _jsonable(value.value, path)
    # Subclasses lose what they add: a str that prints differently is still the text it holds.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, UUID | Decimal):
        return str(value)
    if hasattr(type(value), "model_dump"):
        return _jsonable(_dumped_model(value, path), path)
    members = _members(value)
    if members is None and not isinstance(value, list | tuple):
        refuse_type(path, value)
    enter(path)
    if members is None:
        return [_below(index, item, path) for index, item in enumerate(value)]
    result: dict[str, JsonValue] = {}
    for name, item in members.items():
        text = name.value if isinstance(name, Enum) else name
        if not isinstance(text, str):
            refuse_key(path, text)
        text = str.__str__(text)
        if text in result:
            refuse_duplicate(path, text)
        result[text] = _below(text, item, path)
    return result


def _below(name: str | int, item: object, path: Path) -> JsonValue:
    path.append(name)
    result = _jsonable(item, path)
    path.pop()
    return result


def _dumped_model(model: Any, path: Path) -> object:
    """A pydantic model's own idea of its JSON; known by its method, so that pydantic need not be imported."""
    try:
        dumped = model.model_dump(mode="json")
    except (TypeError, ValueError) as broken:
        refuse(path, f"{type(model).__name__} cannot be dumped as JSON: {broken}", _PAYLOAD_HINT)
    if hasattr(type(dumped), "model_dump"):
        refuse_type(path, dumped)
    return dumped


def _members(value: object) -> Mapping[Any, object] | None:
    """The named parts of an object, or None for what has none."""
    if isinstance(value, dict | Mapping):  # dict first: asking an abstract class is slow
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    return None
