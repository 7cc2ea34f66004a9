"""Results as they are stored, and receipts made from stored records.

A result is JSON. A small one is stored in the fence record; a larger one becomes an object named by its digest, and
the record holds the digest. The caller that ran the effect gets its result the way every later caller does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, TypeVar

from ragfence.core.json_values import to_jsonable
from ragfence.core.layout import FAILED
from ragfence.core.operations import encoded
from ragfence.core.policy import Policy
from ragfence.core.receipts import Decision, Flags, Receipt, default_effect_id
from ragfence.core.records import KeyRecord
from ragfence.errors import FormatCorrupt, NotJson, ObjectsRequired, ResultTooBig, ValidationError
from ragfence.stores.objects import ObjectStore

Json = TypeVar("Json", bound="str | int | float | list[Any] | Mapping[str, Any] | None")
"""Results that are JSON already: a receipt holds them as they were returned."""

_TEXT, _INLINE, _REFERENCE, _FAILURE = b"t", b"j", b"r", b"f"
MAX_EFFECT_ID_BYTES = 255
_decode = json.JSONDecoder().decode


class Results:
    """Stores and loads results for one tenant."""

    def __init__(self, tenant: str, policy: Policy, objects: ObjectStore | None) -> None:
        self._folder = f"{encoded(tenant)}/results"
        self._limits = policy.results
        self._objects = objects

    def store(self, result: object, key: str) -> bytes:
        """Returns the bytes that represent the result in a record. Stores nothing if it raises."""
        if result is None:
            return b""
        if type(result) is str and 4 * len(result) <= self._limits.inline_max_bytes:
            return _TEXT + self._encoded(result, key)
        try:
            data = json.dumps(to_jsonable(result), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except NotJson as bad:
            raise NotJson(
                f"the result of {key} is not JSON: {bad.message}",
                hint="return dicts, lists, text, numbers, booleans or None; or return an id and keep the rest yourself",
                key=key,
            ) from bad
        except (ValueError, UnicodeEncodeError) as bad:
            raise NotJson(f"the result of {key} is not JSON: {bad}", key=key) from bad
        if len(data) <= self._limits.inline_max_bytes:
            return _TEXT + result.encode() if type(result) is str else _INLINE + data
        if len(data) > self._limits.max_bytes:
            raise ResultTooBig(
                f"the result of {key} has {len(data):,} bytes, the policy allows {self._limits.max_bytes:,}",
                hint="store it yourself and return its address, or raise results.max_bytes",
                key=key,
            )
        if self._objects is None:
            raise ResultTooBig(
                f"the result of {key} has {len(data):,} bytes; without an object store at most "
                f"{self._limits.inline_max_bytes:,} fit",
                hint="open the fence with objects='s3://...', or return an id instead",
                key=key,
            )
        digest = sha256(data).digest()
        self._objects.put_new(f"{self._folder}/{digest.hex()}", data)
        return _REFERENCE + digest

    def _encoded(self, text: str, key: str) -> bytes:
        try:
            return text.encode()
        except UnicodeEncodeError as bad:
            raise NotJson(f"the result of {key} is not JSON: {bad}", key=key) from bad

    def load(self, stored: bytes) -> Any:
        tag, data = stored[:1], stored[1:]
        if tag == b"":
            return None
        if tag == _TEXT:
            return data.decode()
        if tag in (_INLINE, _FAILURE):
            return _decode(data.decode())
        if tag != _REFERENCE:
            raise FormatCorrupt(f"a stored result starts with {tag!r}")
        if self._objects is None:
            raise ObjectsRequired(f"the result {data.hex()} is in an object store, and the fence was opened without")
        found = self._objects.get(f"{self._folder}/{data.hex()}")
        if found is None or sha256(found).digest() != data:
            raise FormatCorrupt(
                f"the result object {data.hex()} is {'missing' if found is None else 'not what it was'}"
            )
        return json.loads(found)

    def size(self, stored: bytes) -> int | None:
        """The bytes of a stored result. None: it is an object, and the object is missing."""
        if stored[:1] != _REFERENCE:
            return max(len(stored) - 1, 0)
        if self._objects is None:
            return None
        entry = next(iter(self._objects.list(f"{self._folder}/{stored[1:].hex()}", limit=1)), None)
        return entry.size if entry else None

    def is_inline(self, stored: bytes) -> bool:
        """Whether its receipt can be made without the object store."""
        return stored[:1] != _REFERENCE

    def receipt(self, key: bytes, record: KeyRecord, decision: Decision, flags: Flags) -> Receipt:
        state, _, _, fence, _, first_seen_ms, sealed_at_ms, _, _, _, effect_id, _, stored = record
        value: Any = stored[1:].decode() if stored[:1] == _TEXT else self.load(stored)
        failed = state is FAILED
        return Receipt(
            key.hex(),
            effect_id or default_effect_id(key),
            (),
            None if failed else value,
            value if failed else None,
            decision,
            flags,
            "%d.%d" % fence,  # noqa: UP031  # half the time of an f-string
            first_seen_ms,
            sealed_at_ms,
        )


def failure_bytes(kind: str, code: str, message: str) -> bytes:
    failure = {"type": kind, "code": code, "message": message[:2000]}
    return _FAILURE + json.dumps(failure, ensure_ascii=True, separators=(",", ":")).encode()


def checked_effect_id(effect_id: object) -> str:
    if effect_id is None:
        return ""
    text = str(effect_id)
    if not text or len(text.encode(errors="replace")) > MAX_EFFECT_ID_BYTES or not text.isprintable():
        raise ValidationError(f"effect_id must be 1 to {MAX_EFFECT_ID_BYTES} printable bytes, got {text[:60]!r}")
    return text
