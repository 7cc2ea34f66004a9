"""API keys: who may ask, for which tenant, and for what.

    <tenant>/apikeys/<key_id>/made      role or scopes, principal and the digest of the secret; never the secret
    <tenant>/apikeys/<key_id>/revoked   it answers no more
    <tenant>/apikeys/<key_id>/used/...  when it was last used, see `key_log`

The first two are create-only, so a key never changes and a revoked one never comes back. The token is shown once:

    rf_<tenant>_<key_id>_<secret><checksum>

each part in lower-case base32 (RFC 4648, no padding), which has no `_`. The tenant in it finds the key without a
registry; the checksum (CRC-32 of all before it) lets a scanner tell a leaked token from a look-alike, and refuses what
was mistyped before any store is asked.

`ApiKeys` asks the object store every time. `CachedKeys` stands before it in a server: it knows no key for longer than
`fresh_s` without asking again, so a revoked or expired key is refused at the latest then. It never stretches that
while the store is away: who cannot be checked is not let in. That a key does not exist is believed for `absent_s`, so
a key that is created meanwhile works at the latest then.
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
from collections.abc import Callable, Iterable
from enum import Enum, StrEnum
from hashlib import sha256
from typing import Any, Final, Literal, NamedTuple

from cachetools import LRUCache

from ragfence.core.hashing import digest
from ragfence.core.operations import checked_text, encoded
from ragfence.errors import FormatCorrupt, FormatTooNew, StoreUnavailable, ValidationError
from ragfence.server.key_log import FOLDER as FOLDER
from ragfence.server.key_log import last_uses, record_event
from ragfence.server.scopes import KeyScope, Role, scopes_named
from ragfence.stores.objects import ObjectStore, is_name

VERSION = 2
DOMAIN = "ragfence/apikey/1"
SECRET_BYTES = 32
KEY_ID_BYTES = 10
MAX_NOTE_BYTES = 200
MAX_PRINCIPAL_BYTES = 128
FRESH_S = 10.0
"""for so long a server believes what it knows of a key"""
ABSENT_S = 2.0
"""for so long a server believes that a key does not exist"""

MAX_TOKEN_CHARACTERS = 512
"""a tenant of 255 bytes, the longest that can be part of an object name, makes 487"""
_TOKEN = re.compile(r"(rf_([a-z2-7]{2,408})_([a-z2-7]{16})_([a-z2-7]{52}))([a-z2-7]{7})")
_KEY_ID = re.compile(r"[a-z2-7]{16}")


class ApiCaller(NamedTuple):
    """Whom a token stands for. `principal` is the scope of Idempotency-Keys, and outlives a rotated key."""

    tenant: str
    principal: str
    scopes: frozenset[KeyScope]
    key_id: str


class Denial(StrEnum):
    """Why a token lets nobody in. The last two are said only to who holds the right secret."""

    INVALID = "invalid"
    EXPIRED = "expired"
    REVOKED = "revoked"


class ApiKey(NamedTuple):
    """A key as it is stored: nothing in it lets anybody in."""

    key_id: str
    scopes: frozenset[KeyScope]
    role: Role | None
    """None for a key that was given scopes"""
    principal: str
    note: str
    digest: bytes
    created_ms: int
    expires_ms: int | None = None
    revoked_ms: int | None = None
    used_ms: int | None = None
    """when it was last used, to ten minutes; known to `list` only"""

    def state(self, now_ms: int) -> Literal["live", "expired", "revoked"]:
        if self.revoked_ms is not None:
            return "revoked"
        return "expired" if self.expires_ms is not None and self.expires_ms <= now_ms else "live"

    def grants(self) -> str:
        """Its role, or its scopes, for people."""
        return self.role.value if self.role is not None else " ".join(_sorted(self.scopes))

    def encode(self) -> bytes:
        values = self._asdict() | {"digest": self.digest.hex()}
        del values["key_id"], values["revoked_ms"], values["used_ms"]
        if self.role is not None:
            # As every version of ragfence reads it; what a role stands for is not stored.
            del values["scopes"]
            values["version"] = 1
        else:
            del values["role"]
            values |= {"version": 2, "scopes": _sorted(self.scopes)}
        return json.dumps(values, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def decode(cls, name: str, key_id: str, data: bytes) -> ApiKey:
        values = _read(name, data)
        try:
            stored = bytes.fromhex(values.pop("digest"))
            role = Role(values.pop("role")) if "role" in values else None
            scopes = role.scopes if role is not None else frozenset(map(KeyScope, values.pop("scopes")))
            return cls(key_id, scopes, role, digest=stored, **values)
        except (ValueError, KeyError, TypeError) as broken:
            raise FormatCorrupt(f"{name} is no API key: {broken!r}", hint="revoke it and create another") from broken


class CreatedKey(NamedTuple):
    """A new key. `token` is nowhere else, and cannot be had again."""

    token: str
    key_id: str
    tenant: str
    scopes: frozenset[KeyScope]
    role: Role | None
    principal: str
    expires_ms: int | None

    def __repr__(self) -> str:  # in a log or a traceback it would be there for good
        return f"Made(token=<hidden>, key_id={self.key_id!r}, tenant={self.tenant!r}, scopes={_sorted(self.scopes)})"


class TokenParts(NamedTuple):
    """What a token says of itself; whether that is true, the stored digest tells."""

    tenant: str
    key_id: str
    secret: bytes


def parsed(token: str) -> TokenParts | None:
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
    return TokenParts(tenant, found[3], secret) if is_name(f"{encoded(tenant)}/x") else None


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
        role: Role | str | None = None,
        *,
        scopes: Iterable[KeyScope | str] | None = None,
        principal: str = "",
        note: str = "",
        ttl_s: float | None = None,
        by: str = "",
    ) -> CreatedKey:
        """A new key, with a role (`write` unless said otherwise) or with scopes.

        Name the `principal` to let the next key take over this one's Idempotency-Keys. `by` is told in the decision
        row: a token is handed out only once that is written.
        """
        tenant = checked_text("tenant", tenant)
        if not tenant or not is_name(f"{encoded(tenant)}/x"):
            raise ValidationError(f"no object can be of tenant {tenant[:80]!r}", hint="use a shorter name, not empty")
        if role is not None and scopes is not None:
            raise ValidationError("a key has a role or scopes, not both", hint="give one of them")
        if role is not None and role not in tuple(Role):
            raise ValidationError(f"{role!r} is not a valid role", hint=f"one of {', '.join(Role)}")
        bundle = Role(role or Role.WRITE) if scopes is None else None
        granted = bundle.scopes if bundle is not None else scopes_named(scopes or ())
        if ttl_s is not None and not 0 < ttl_s < 10**10:
            raise ValidationError(f"a key cannot expire after {ttl_s} s", hint="leave it out for a key without an end")
        key_id, secret = _packed(secrets.token_bytes(KEY_ID_BYTES)), secrets.token_bytes(SECRET_BYTES)
        now_ms = self._now_ms()
        key = ApiKey(
            key_id,
            granted,
            bundle,
            checked_text("principal", principal, MAX_PRINCIPAL_BYTES) or key_id,
            checked_text("note", note, MAX_NOTE_BYTES),
            _digest(tenant, key_id, secret),
            now_ms,
            None if ttl_s is None else now_ms + round(ttl_s * 1000),
        )
        if not self._objects.put_new(_name(tenant, key_id, "made"), key.encode()).won:
            raise StoreUnavailable(f"the key id {key_id} is taken, which 80 random bits should not allow")
        record_event(self._objects, tenant, key_id, "create", at_ms=now_ms, by=by)
        return CreatedKey(
            _token(tenant, key_id, secret), key_id, tenant, granted, bundle, key.principal, key.expires_ms
        )

    def revoke(self, tenant: str, key_id: str, *, by: str = "") -> bool:
        """It answers no more, from now on for ever. False: somebody had revoked it already."""
        if not _KEY_ID.fullmatch(key_id) or self._objects.get(_name(tenant, key_id, "made")) is None:
            raise ValidationError(
                f"tenant {tenant!r} has no API key {key_id[:40]!r}",
                hint="`ragfence apikeys list` names those there are",
            )
        name, now_ms = _name(tenant, key_id, "revoked"), self._now_ms()
        data = json.dumps({"version": 1, "revoked_ms": now_ms}, separators=(",", ":")).encode()
        won = self._objects.put_new(name, data).won
        if not won and (stored := self._objects.get(name)) is not None:
            # Whoever revoked it may have been cut off before its row.
            now_ms = int(_read(name, stored).get("revoked_ms", now_ms))
        record_event(self._objects, tenant, key_id, "revoke", at_ms=now_ms, by=by)
        return won

    def list(self, tenant: str) -> builtins.list[ApiKey]:
        """Every key a tenant ever had, also those that were revoked, the oldest first."""
        root = f"{encoded(tenant)}/{FOLDER}/"
        names = [entry.name for entry in self._objects.list(root)]
        used = last_uses(names, root)
        found = [
            # A use is known by the start of its period, which may be before there was the key.
            key._replace(used_ms=max(used[key_id], key.created_ms) if key_id in used else None)
            for key_id in sorted({name[len(root) :].partition("/")[0] for name in names})
            if (key := self.read(tenant, key_id)) is not None
        ]
        return sorted(found, key=lambda key: (key.created_ms, key.key_id))

    def check(self, token: str) -> ApiCaller | None:
        """Whom the token stands for; None for whatever lets nobody in. Raises only when a store does not answer."""
        parts = parsed(token)
        found = Denial.INVALID if parts is None else self.judge(parts, self.read(parts.tenant, parts.key_id))
        return found if isinstance(found, ApiCaller) else None

    def judge(self, parts: TokenParts, key: ApiKey | None) -> ApiCaller | Denial:
        """Without I/O. An unknown key id takes the way of a known one, to the same comparison: the time tells nothing
        of the digest. That a key has ended is said only to who has its secret.
        """
        same = hmac.compare_digest(_digest(*parts), key.digest if key is not None else _NO_DIGEST)
        if key is None or not same:
            return Denial.INVALID
        state = key.state(self._now_ms())
        return ApiCaller(parts.tenant, key.principal, key.scopes, key.key_id) if state == "live" else Denial(state)

    def read(self, tenant: str, key_id: str) -> ApiKey | None:
        """As it is stored, with its revocation. Always two requests, also where there is no such key."""
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
    """What a server knows of keys without asking. Tokens themselves are not kept: the sha256 of those let in is.

    Keys that exist and ids that do not are kept apart, in as many places each: however many wrong tokens come, they
    push out nobody who was let in. A wrong secret for a known id, and an id that was just looked up in vain, are
    refused without asking the store.
    """

    def __init__(
        self,
        keys: ApiKeys,
        *,
        fresh_s: float = FRESH_S,
        absent_s: float = ABSENT_S,
        max_entries: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._fresh_s = fresh_s
        self._absent_s = absent_s
        self._clock = clock
        self._lock = threading.Lock()
        self._let_in: LRUCache[bytes, tuple[float, ApiCaller]] = LRUCache(max_entries)
        self._found: LRUCache[tuple[str, str], tuple[float, ApiKey]] = LRUCache(max_entries)
        self._absent: LRUCache[tuple[str, str], float] = LRUCache(max_entries)

    def known(self, token: str) -> ApiCaller | Denial | Literal[Unknown.UNKNOWN]:
        """Without I/O: whom it stands for, why it is refused, or UNKNOWN if `check` has to be asked."""
        if len(token) > MAX_TOKEN_CHARACTERS:
            return Denial.INVALID  # not even hashed
        name, now = _cache_name(token), self._clock()
        with self._lock:
            if (held := self._let_in.get(name)) is not None and now < held[0]:
                self._found.get((held[1].tenant, held[1].key_id))  # it is in use: not the next to be pushed out
                return held[1]
        parts = parsed(token)
        if parts is None:
            return Denial.INVALID
        place = (parts.tenant, parts.key_id)
        with self._lock:
            found, absent_until = self._found.get(place), self._absent.get(place)
        if found is not None and now < found[0]:
            return self._judged(name, parts, *found)
        return Denial.INVALID if absent_until is not None and now < absent_until else UNKNOWN

    def let_in_before(self, token: str) -> bool:
        """Whether it let somebody in once, be it too long ago to count now."""
        with self._lock:
            return len(token) <= MAX_TOKEN_CHARACTERS and _cache_name(token) in self._let_in

    def check(self, token: str) -> ApiCaller | Denial:
        """Asks the store, unless it is known. Blocks; `StoreUnavailable` if nobody can say."""
        if (known := self.known(token)) is not UNKNOWN:
            return known
        parts = parsed(token)
        if parts is None:
            return Denial.INVALID
        # Fresh from here, not from when the answer came: it may have been overtaken on its way.
        asked = self._clock()
        place = (parts.tenant, parts.key_id)
        key = self._keys.read(*place)
        with self._lock:
            self._found.pop(place, None)
            self._absent.pop(place, None)
            if key is not None:
                self._found[place] = (asked + self._fresh_s, key)
            else:
                self._absent[place] = asked + self._absent_s
        return self._judged(_cache_name(token), parts, asked + self._fresh_s, key)

    def _judged(self, name: bytes, parts: TokenParts, until: float, key: ApiKey | None) -> ApiCaller | Denial:
        judged = self._keys.judge(parts, key)
        with self._lock:
            self._let_in.pop(name, None)
            if isinstance(judged, ApiCaller):
                self._let_in[name] = (until, judged)
        return judged


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


def _sorted(scopes: Iterable[KeyScope]) -> list[str]:
    return [scope.value for scope in KeyScope if scope in scopes]
