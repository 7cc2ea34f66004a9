"""API keys: who may ask, for which tenant, and how much.

    <tenant>/apikeys/<key_id>/made      role, principal and the digest of the secret; never the secret
    <tenant>/apikeys/<key_id>/revoked   it answers no more

Both are create-only, so a key never changes and a revoked one never comes back. The token is shown once:

    rf_<tenant>_<key_id>_<secret><checksum>

each part in lower-case base32 (RFC 4648, no padding), which has no `_`. The tenant in it finds the key without a
registry; the checksum (CRC-32 of all before it) lets a scanner tell a leaked token from a look-alike, and refuses what
was mistyped before any store is asked.

`ApiKeys` asks the object store every time. `CachedKeys` stands before it in a server: it knows no key for longer than
`fresh_s` without asking again, so a revoked or expired key is refused at the latest then. It never stretches that
while the store is away: who cannot be checked is not let in.
"""

from __future__ import annotations

import builtins
import hmac
import json
import re
import secrets
import threading
import time
import zlib
from base64 import b32decode, b32encode
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum, StrEnum
from hashlib import sha256
from typing import Any, Final, Literal, NamedTuple

from ragfence.core.hashing import digest
from ragfence.core.operations import checked_text, encoded
from ragfence.errors import FormatCorrupt, FormatTooNew, StoreUnavailable, ValidationError
from ragfence.stores.objects import ObjectStore, is_name

VERSION = 1
FOLDER = "apikeys"
DOMAIN = "ragfence/apikey/1"
SECRET_BYTES = 32
KEY_ID_BYTES = 10
MAX_NOTE_BYTES = 200
MAX_PRINCIPAL_BYTES = 128
FRESH_S = 10.0
"""for so long a server believes what it knows of a key"""

MAX_TOKEN_CHARACTERS = 512
"""a tenant of 255 bytes, the longest that can be part of an object name, makes 487"""
_TOKEN = re.compile(r"(rf_([a-z2-7]{2,408})_([a-z2-7]{16})_([a-z2-7]{52}))([a-z2-7]{7})")
_KEY_ID = re.compile(r"[a-z2-7]{16}")


class Role(StrEnum):
    """What a key may do; a higher one may do all that a lower one may.

    >>> Role.READ < Role.WRITE < Role.ADMIN
    True
    """

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"

    @property
    def _rank(self) -> int:
        return _RANKS[self]

    # All four: those of str would put "admin" below "read".
    def __lt__(self, other: str) -> bool:
        return self._rank < Role(other)._rank

    def __le__(self, other: str) -> bool:
        return self._rank <= Role(other)._rank

    def __gt__(self, other: str) -> bool:
        return self._rank > Role(other)._rank

    def __ge__(self, other: str) -> bool:
        return self._rank >= Role(other)._rank


_RANKS: Final = {role: rank for rank, role in enumerate(Role)}


class Asker(NamedTuple):
    """Whom a token stands for. `principal` is the scope of Idempotency-Keys, and outlives a rotated key."""

    tenant: str
    principal: str
    role: Role
    key_id: str


class ApiKey(NamedTuple):
    """A key as it is stored: nothing in it lets anybody in."""

    key_id: str
    role: Role
    principal: str
    note: str
    digest: bytes
    created_ms: int
    expires_ms: int | None = None
    revoked_ms: int | None = None

    def state(self, now_ms: int) -> Literal["live", "expired", "revoked"]:
        if self.revoked_ms is not None:
            return "revoked"
        return "expired" if self.expires_ms is not None and self.expires_ms <= now_ms else "live"

    def encode(self) -> bytes:
        values = self._asdict() | {"version": VERSION, "digest": self.digest.hex()}
        del values["key_id"], values["revoked_ms"]
        return json.dumps(values, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def decode(cls, name: str, key_id: str, data: bytes) -> ApiKey:
        values = _read(name, data)
        try:
            stored = bytes.fromhex(values.pop("digest"))
            return cls(key_id, Role(values.pop("role")), digest=stored, **values)
        except (ValueError, KeyError, TypeError) as broken:
            raise FormatCorrupt(f"{name} is no API key: {broken!r}", hint="revoke it and create another") from broken


class Made(NamedTuple):
    """A new key. `token` is nowhere else, and cannot be had again."""

    token: str
    key_id: str
    tenant: str
    role: Role
    principal: str
    expires_ms: int | None

    def __repr__(self) -> str:  # in a log or a traceback it would be there for good
        return f"Made(token=<hidden>, key_id={self.key_id!r}, tenant={self.tenant!r}, role={self.role.value!r})"


class Parts(NamedTuple):
    """What a token says of itself; whether that is true, the stored digest tells."""

    tenant: str
    key_id: str
    secret: bytes


def parsed(token: str) -> Parts | None:
    """None for whatever is no token. Every token has one spelling only."""
    found = _TOKEN.fullmatch(token) if len(token) <= MAX_TOKEN_CHARACTERS else None
    if found is None or not hmac.compare_digest(_checksum(found[1]), found[5]):
        return None
    try:
        tenant, secret = _unpacked(found[2]).decode(), _unpacked(found[4])
    except ValueError:  # no base32 or no UTF-8
        return None
    if _packed(tenant.encode()) != found[2] or _packed(secret) != found[4]:
        return None  # bits of the last character that stand for nothing
    return Parts(tenant, found[3], secret) if is_name(f"{encoded(tenant)}/x") else None


class ApiKeys:
    """The keys of all tenants, in the object store. Every call is I/O."""

    def __init__(
        self, objects: ObjectStore, *, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    ) -> None:
        self._objects = objects
        self._now_ms = now_ms

    def create(
        self,
        tenant: str,
        role: Role | str = Role.WRITE,
        *,
        principal: str = "",
        note: str = "",
        ttl_s: float | None = None,
    ) -> Made:
        """A new key. Name the `principal` to let the next key take over the scope of this one's Idempotency-Keys."""
        tenant = checked_text("tenant", tenant)
        if not tenant or not is_name(f"{encoded(tenant)}/x"):
            raise ValidationError(f"no object can be of tenant {tenant[:80]!r}", hint="use a shorter name, not empty")
        if role not in tuple(Role):
            raise ValidationError(f"{role!r} is no role", hint=f"one of {', '.join(Role)}")
        if ttl_s is not None and not 0 < ttl_s < 10**10:
            raise ValidationError(f"a key cannot expire after {ttl_s} s", hint="leave it out for a key without an end")
        key_id, secret = _packed(secrets.token_bytes(KEY_ID_BYTES)), secrets.token_bytes(SECRET_BYTES)
        now_ms = self._now_ms()
        key = ApiKey(
            key_id,
            Role(role),
            checked_text("principal", principal, MAX_PRINCIPAL_BYTES) or key_id,
            checked_text("note", note, MAX_NOTE_BYTES),
            _digest(tenant, key_id, secret),
            now_ms,
            None if ttl_s is None else now_ms + round(ttl_s * 1000),
        )
        if not self._objects.put_new(_name(tenant, key_id, "made"), key.encode()).won:
            raise StoreUnavailable(f"the key id {key_id} is taken, which 80 random bits should not allow")
        return Made(_token(tenant, key_id, secret), key_id, tenant, key.role, key.principal, key.expires_ms)

    def revoke(self, tenant: str, key_id: str) -> bool:
        """It answers no more, from now on for ever. False: somebody had revoked it already."""
        if not _KEY_ID.fullmatch(key_id) or self._objects.get(_name(tenant, key_id, "made")) is None:
            raise ValidationError(
                f"tenant {tenant!r} has no API key {key_id[:40]!r}",
                hint="`ragfence apikeys list` names those there are",
            )
        data = json.dumps({"version": VERSION, "revoked_ms": self._now_ms()}, separators=(",", ":")).encode()
        return self._objects.put_new(_name(tenant, key_id, "revoked"), data).won

    def list(self, tenant: str) -> builtins.list[ApiKey]:
        """Every key a tenant ever had, also those that were revoked, the oldest first."""
        root = f"{encoded(tenant)}/{FOLDER}/"
        ids = {entry.name[len(root) :].partition("/")[0] for entry in self._objects.list(root)}
        found = [key for key_id in sorted(ids) if (key := self._stored(tenant, key_id)) is not None]
        return sorted(found, key=lambda key: (key.created_ms, key.key_id))

    def check(self, token: str) -> Asker | None:
        """Whom the token stands for; None for whatever lets nobody in. Raises only when a store does not answer.

        An unknown key id takes the way of a known one, to the same comparison: the time tells nothing of the digest.
        """
        parts = parsed(token)
        if parts is None:
            return None
        key = self._stored(parts.tenant, parts.key_id)
        given = _digest(*parts)
        same = hmac.compare_digest(given, key.digest if key is not None else _NO_DIGEST)
        if key is None or not same or key.state(self._now_ms()) != "live":
            return None
        return Asker(parts.tenant, key.principal, key.role, key.key_id)

    def _stored(self, tenant: str, key_id: str) -> ApiKey | None:
        made, revoked = _name(tenant, key_id, "made"), _name(tenant, key_id, "revoked")
        data = self._objects.get(made)
        # Asked last, so that whoever finds nothing knows that the key was still good then; and for unknown keys, too.
        ended = self._objects.get(revoked)
        if data is None:
            return None
        key = ApiKey.decode(made, key_id, data)
        return key if ended is None else key._replace(revoked_ms=int(_read(revoked, ended).get("revoked_ms", 0)))


class Unknown(Enum):
    """Neither yes nor no: nobody has asked lately."""

    UNKNOWN = "unknown"


UNKNOWN: Final = Unknown.UNKNOWN


class CachedKeys:
    """What a server knows of tokens without asking. Tokens themselves are not kept: their sha256 is.

    Refusals are kept apart, in as many places of their own: however many wrong tokens come, they push out nobody who
    was let in.
    """

    def __init__(
        self,
        keys: ApiKeys,
        *,
        fresh_s: float = FRESH_S,
        max_entries: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._fresh_s = fresh_s
        self._max = max_entries
        self._clock = clock
        self._lock = threading.Lock()
        self._let_in: OrderedDict[bytes, tuple[float, Asker]] = OrderedDict()
        self._refused: OrderedDict[bytes, float] = OrderedDict()

    def known(self, token: str) -> Asker | Literal[Unknown.UNKNOWN] | None:
        """Without I/O: whom it stands for, None if it is refused, UNKNOWN if `check` has to be asked."""
        if len(token) > MAX_TOKEN_CHARACTERS:
            return None  # not even hashed
        name, now = _cache_name(token), self._clock()
        with self._lock:
            if (held := self._let_in.get(name)) is not None and now < held[0]:
                self._let_in.move_to_end(name)
                return held[1]
            until = self._refused.get(name)
        return None if until is not None and now < until else UNKNOWN

    def check(self, token: str) -> Asker | None:
        """Asks the store, unless it is known. Blocks; `StoreUnavailable` if nobody can say."""
        if (known := self.known(token)) is not UNKNOWN:
            return known
        # Fresh from here, not from when the answer came: it may have been overtaken on its way.
        until = self._clock() + self._fresh_s
        asker = self._keys.check(token)
        name = _cache_name(token)
        with self._lock:
            self._let_in.pop(name, None)
            self._refused.pop(name, None)
            if asker is not None:
                self._let_in[name] = (until, asker)
                _shorten(self._let_in, self._max)
            else:
                self._refused[name] = until
                _shorten(self._refused, self._max)
        return asker


# A slow hash protects what people choose. These are 256 random bits: nobody can try them all at any speed, and a
# server has to check them at every request. The tenant and the id are in it, so a stored key that is copied to another
# name lets nobody in there.
def _digest(tenant: str, key_id: str, secret: bytes) -> bytes:
    return digest(DOMAIN, tenant.encode(), key_id.encode(), secret)


_NO_DIGEST = secrets.token_bytes(32)


def _token(tenant: str, key_id: str, secret: bytes) -> str:
    body = f"rf_{_packed(tenant.encode())}_{key_id}_{_packed(secret)}"
    return body + _checksum(body)


def _checksum(body: str) -> str:
    return _packed(zlib.crc32(body.encode()).to_bytes(4, "big"))


def _packed(data: bytes) -> str:
    return b32encode(data).decode().rstrip("=").lower()


def _unpacked(text: str) -> bytes:
    return b32decode(text.upper() + "=" * (-len(text) % 8))


def _name(tenant: str, key_id: str, what: str) -> str:
    return f"{encoded(tenant)}/{FOLDER}/{key_id}/{what}"


def _read(name: str, data: bytes) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(data)
        version = values.pop("version")
        too_new = version > VERSION
    except (ValueError, KeyError, TypeError, AttributeError) as broken:
        raise FormatCorrupt(f"{name} is no API key: {broken!r}", hint="revoke it and create another") from broken
    if too_new:
        raise FormatTooNew(f"{name} has format {version}; this ragfence knows {VERSION}")
    return values


def _cache_name(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogatepass")).digest()


def _shorten(entries: OrderedDict[bytes, Any], most: int) -> None:
    while len(entries) > most:
        entries.popitem(last=False)
