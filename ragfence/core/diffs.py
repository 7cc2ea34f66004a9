"""What differs between the payload of the first call and a conflicting one, as an RFC 6902 patch of bounded size.

Both payloads are redacted before they come here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ragfence.core.canonical import JsonValue, canonical_json, parse_json

MAX_INPUT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Diff:
    """The operations that turn the first payload into the other, as many as fit."""

    patch: tuple[dict[str, Any], ...]
    size: int
    """bytes of the whole patch, whether it fits or not"""
    truncated: bool


def payload_diff(old: JsonValue, new: JsonValue, *, max_bytes: int) -> Diff:
    """The patch from `old` to `new`; above `max_bytes` only its first operations.

    >>> payload_diff({"amount": 10}, {"amount": 12}, max_bytes=16384).patch
    ({'op': 'replace', 'path': '/amount', 'value': 12},)
    """
    operations = _operations(canonical_json(old), canonical_json(new))
    kept, size = 0, len("[]")
    for operation in operations:
        size += len(canonical_json(operation)) + (1 if size > len("[]") else 0)
        kept += size <= max_bytes
    return Diff(patch=tuple(operations[:kept]), size=size, truncated=kept < len(operations))


def _operations(old: bytes, new: bytes) -> list[dict[str, Any]]:
    if old == new:
        return []
    if max(len(old), len(new)) > MAX_INPUT_BYTES:
        # Comparing takes more than linear time, and the outcome would be unreadable. This is a valid patch too.
        return [{"op": "replace", "path": "", "value": parse_json(new)}]
    import jsonpatch

    # Read back from the canonical form, so that a difference is one the fingerprint sees: 1 and 1.0 are equal.
    patch: list[dict[str, Any]] = jsonpatch.make_patch(parse_json(old), parse_json(new)).patch
    return patch
