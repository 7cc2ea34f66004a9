"""Operations and their keys: what a caller wants done once, and the name under which it is done once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple, NewType
from urllib.parse import quote

from ragfence.core.hashing import SHARDS, digest, framed, shard_framed, sized
from ragfence.core.normalization import nfc
from ragfence.errors import Hint, ValidationError

Key = NewType("Key", bytes)
"""One byte of shard, then 32 bytes of digest: a key alone finds its shard."""

KEY_BYTES = 33
MAX_ID_BYTES = 1024
MAX_KIND_BYTES = 64
SEQUENCE_MIN, SEQUENCE_MAX = -(2**63), 2**63 - 1

# C0, DEL, C1, and lone surrogates: none of them survives a log line or a URL.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


_SHARDS = [bytes((shard,)) for shard in range(SHARDS)]
_TEXTS = ("kind", "source_id", "revision", "source_type", "index_hash", "action", "tenant")


class FenceNumber(NamedTuple):
    """A number that only grows for a source: later owners always hold a higher one than earlier owners."""

    epoch: int
    counter: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.counter}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What shall happen once. Equal operations have equal keys.

    `sequence` orders the revisions of a source and is never part of the key; `revision` defaults to it.

    >>> Operation(kind="webhook", source_id="evt_1", sequence=3).revision
    '3'
    """

    kind: str
    source_id: str
    revision: str = ""
    source_type: str = ""
    index_hash: str = ""
    action: str = ""
    sequence: int | None = None
    tenant: str = ""

    def __post_init__(self) -> None:
        if self.sequence is not None:
            if isinstance(self.sequence, bool) or not isinstance(self.sequence, int):
                raise ValidationError(f"sequence must be an integer, got {type(self.sequence).__name__}")
            if not SEQUENCE_MIN <= self.sequence <= SEQUENCE_MAX:
                raise ValidationError(f"sequence {self.sequence} does not fit into 64 bits")
            if self.revision == "":
                object.__setattr__(self, "revision", str(self.sequence))
        if not self._is_plain():
            for field in _TEXTS:
                given = getattr(self, field)
                if (text := checked_text(field, given)) is not given:
                    object.__setattr__(self, field, text)
        if not self.kind:
            raise ValidationError("an operation needs a kind", hint='for example kind="ticket"')
        if 4 * len(self.kind) > MAX_KIND_BYTES and len(self.kind.encode()) > MAX_KIND_BYTES:
            raise ValidationError(f"kind is longer than {MAX_KIND_BYTES} bytes: {self.kind[:40]!r}...")
        if not self.source_id:
            raise ValidationError(
                f"an operation of kind {self.kind!r} needs a source_id",
                hint="the id of the document, event or request that must take effect once",
            )

    def _is_plain(self) -> bool:
        """Whether all texts are as they are stored, which nearly all are: looked at as one, and not one by one."""
        texts = (self.kind, self.source_id, self.revision, self.source_type, self.index_hash, self.action, self.tenant)
        try:
            text = "".join(texts)
        except TypeError:
            return False
        return len(text) <= MAX_ID_BYTES and text.isascii() and text.isprintable()

    def in_tenant(self, tenant: str) -> Operation:
        if self.tenant == tenant:
            return self
        if self.tenant:
            raise ValidationError(f"the operation belongs to tenant {self.tenant!r}, the fence to {tenant!r}")
        # Not `replace`: every other field is checked already, and this runs on every call.
        copied = object.__new__(Operation)
        for field in self.__slots__:
            object.__setattr__(copied, field, getattr(self, field))
        object.__setattr__(copied, "tenant", checked_text("tenant", tenant))
        return copied

    @property
    def key(self) -> Key:
        frame = _frame(self.tenant, self.kind, self.source_type, self.index_hash, self.action)
        source_id = sized(self.source_id.encode())
        body = sha256(b"%b%b%b%b" % (frame.before, source_id, sized(self.revision.encode()), frame.behind)).digest()
        return Key(_SHARDS[shard_framed(frame.shard + source_id)] + body)

    @property
    def source(self) -> str:
        """The hex digest that stands for the source in object names; kind and tenant are next to it there."""
        return digest("ragfence/source/1", self.source_type.encode(), self.source_id.encode()).hex()


class _Frame(NamedTuple):
    """What goes into the keys of all operations that differ in source_id and revision only."""

    before: bytes
    behind: bytes
    shard: bytes


@lru_cache(maxsize=1024)
def _frame(tenant: str, kind: str, source_type: str, index_hash: str, action: str) -> _Frame:
    named = tenant.encode()
    return _Frame(
        framed("ragfence/operation/1", (named, kind.encode(), source_type.encode())),
        sized(index_hash.encode()) + sized(action.encode()),
        framed("ragfence/shard/1", (named,)),
    )


def checked_text(field: str, value: object, max_bytes: int = MAX_ID_BYTES) -> str:
    """An id or a name as it is stored: NFC, of bounded size, without control characters."""
    if not isinstance(value, str):
        raise ValidationError(
            f"{field} must be text, got {type(value).__name__}",
            hint=Hint(f"pass str({field})", cli=f"write {field} as text, in quotes"),
        )
    if value.isascii() and value.isprintable():
        if len(value) <= max_bytes:
            return value
        text = value
    else:
        if found := _CONTROL.search(value):
            raise ValidationError(f"{field} holds the control character {found.group()!r}: {value[:60]!r}")
        text = nfc(value)
    if len(text) > max_bytes or len(text.encode()) > max_bytes:
        raise ValidationError(
            f"{field} is longer than {max_bytes} bytes: {text[:40]!r}...",
            hint="use a digest of it instead",
        )
    return text


def key_to_text(key: bytes) -> str:
    """Keys are raw bytes in stores and hex to people."""
    return key.hex()


def key_from_text(text: str) -> Key:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValidationError(
            f"{text[:80]!r} is not a key", hint=f"a key is {2 * KEY_BYTES} hex digits, as in receipt.key"
        )
    return Key(key)


def encoded(name: str) -> str:
    """A tenant or kind as one safe part of an object name or Redis key; different names stay different."""
    safe = quote(name, safe="")
    safe = safe.replace("~", "%7E")
    return "%2E" + safe[1:] if safe.startswith(".") else safe
