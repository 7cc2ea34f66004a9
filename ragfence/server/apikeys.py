"""API keys: who may send requests, for which tenant, with which scopes.

    <tenant>/apikeys/<key_id>/made      role or scopes, principal and the digest of the secret; never the secret
    <tenant>/apikeys/<key_id>/revoked   the key is not accepted any more
    <tenant>/apikeys/<key_id>/used/...  when the key was last used, see `key_log`

The first two are create-only, so a key never changes and a revoked key stays revoked. The token is shown once:

    rf_<tenant>_<key_id>_<secret><checksum>

each part in lower-case base32 (RFC 4648, no padding), which has no `_`. With the tenant in the token, a key is found
without a registry. With the checksum (CRC-32 of everything before it), a scanner can recognise a leaked token, and a
mistyped token is refused without reading a store.

`ApiKeys` reads the object store every time. `CachedKeys` is its cache in a server: it keeps a key for `fresh_s`, so a
revoked or expired key is refused at the latest then. That does not change while the store is unavailable: a key that
cannot be checked is refused. That a key does not exist is cached for `absent_s`, so a key that is created meanwhile is
accepted at the latest then.
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
"""How long a server keeps a key in its cache."""
ABSENT_S = 2.0
"""How long a server keeps in its cache that a key does not exist."""

MAX_TOKEN_CHARACTERS = 512
"""A tenant of 255 bytes, the longest that can be part of an object name, has tokens of 487 characters."""
_TOKEN = re.compile(r"(rf_([a-z2-7]{2,408})_([a-z2-7]{16})_([a-z2-7]{52}))([a-z2-7]{7})")
_KEY_ID = re.compile(r"[a-z2-7]{16}")


class ApiCaller(NamedTuple):
    """The caller that a token authenticates. `principal` is the scope of its Idempotency-Keys."""

    tenant: str
    principal: str
    scopes: frozenset[KeyScope]
    key_id: str


class Denial(StrEnum):
    """Why a token is refused. The last two are reported only for tokens with the right secret."""

    INVALID = "invalid"
    EXPIRED = "expired"
    REVOKED = "revoked"


class ApiKey(NamedTuple):
    """A key as it is stored. The token cannot be computed from it."""

    key_id: str
    scopes: frozenset[KeyScope]
    role: Role | None
    """None for a key with scopes of its own."""
    principal: str
    note: str
    digest: bytes
    created_ms: int
    expires_ms: int | None = None
    revoked_ms: int | None = None
    used_ms: int | None = None
    """When it was last used, to ten minutes; only from `list`."""

    def state(self, now_ms: int) -> Literal["live", "expired", "revoked"]:
        if self.revoked_ms is not None:
            return "revoked"
        return "expired" if self.expires_ms is not None and self.expires_ms <= now_ms else "live"

    def grants(self) -> str:
        """Returns its role, or its scopes, as text."""
        return self.role.value if self.role is not None else " ".join(_sorted(self.scopes))

    def encode(self) -> bytes:
        values = self._asdict() | {"digest": self.digest.hex()}
        del values["key_id"], values["revoked_ms"], values["used_ms"]
        if self.role is not None:
            # Every version of ragfence reads this. The scopes of a role are not stored.
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
            raise FormatCorrupt(
                f"{name} is not a valid API key: {broken!r}", hint="revoke it and create another"
            ) from broken


class CreatedKey(NamedTuple):
    """A new key. Only here is its `token`, which cannot be recovered."""

    token: str
    key_id: str
    tenant: str
    scopes: frozenset[KeyScope]
    role: Role | None
    principal: str
    expires_ms: int | None

    def __repr__(self) -> str:  # the token must not get into logs and tracebacks
        return (
            f"CreatedKey(token=<hidden>, key_id={self.key_id!r}, tenant={self.tenant!r}, scopes={_sorted(self.scopes)})"
        )


class TokenParts(NamedTuple):
    """The parts of a token, which are not checked against the stored digest yet."""

    tenant: str
    key_id: str
    secret: bytes


def parse_token(token: str) -> TokenParts | None:
    """Returns the parts of a token, or None if the text is not a token. A token has only one valid spelling."""
    found = _TOKEN.fullmatch(token) if len(token) <= MAX_TOKEN_CHARACTERS else None
    if found is None or not hmac.compare_digest(_checksum(found[1]), found[5]):
        return None
    try:
        tenant, secret = _unpacked(found[2]).decode(), _unpacked(found[4])
    except ValueError:  # not base32, or not UTF-8
        return None
    if _packed(tenant.encode()) != found[2] or _packed(secret) != found[4]:
        return None  # unused bits of the last character are set
    return TokenParts(tenant, found[3], secret) if is_name(f"{encoded(tenant)}/x") else None


class ApiKeys:
    """The keys of all tenants, in the object store. Every call does I/O."""

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
        """Creates a key, with a role (`write` by default) or with scopes.

        Args:
            tenant: The tenant of its requests.
            role: A role; excludes `scopes`.
            scopes: Scopes; excludes `role`.
            principal: The scope of Idempotency-Keys; a key that replaces this one needs the same. Default: the key id.
            note: A text for `list`.
            ttl_s: Seconds until the key expires. Default: it does not expire.
            by: Who creates it, for the decision row. The token is returned only after that is written.
        """
        tenant = checked_text("tenant", tenant)
        if not tenant or not is_name(f"{encoded(tenant)}/x"):
            raise ValidationError(f"{tenant[:80]!r} is not a valid tenant", hint="use a shorter name, not empty")
        if role is not None and scopes is not None:
            raise ValidationError("a key has a role or scopes, not both", hint="give one of them")
        if role is not None and role not in tuple(Role):
            raise ValidationError(f"{role!r} is not a valid role", hint=f"one of {', '.join(Role)}")
        bundle = Role(role or Role.WRITE) if scopes is None else None
        granted = bundle.scopes if bundle is not None else scopes_named(scopes or ())
        if ttl_s is not None and not 0 < ttl_s < 10**10:
            raise ValidationError(
                f"a key cannot expire after {ttl_s} s", hint="leave it out for a key that does not expire"
            )
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
        """Revokes a key permanently. Returns False if it was revoked already."""
        if not _KEY_ID.fullmatch(key_id) or self._objects.get(_name(tenant, key_id, "made")) is None:
            raise ValidationError(
                f"tenant {tenant!r} has no API key {key_id[:40]!r}",
                hint="`ragfence apikeys list` shows the keys of a tenant",
            )
        name, now_ms = _name(tenant, key_id, "revoked"), self._now_ms()
        data = json.dumps({"version": 1, "revoked_ms": now_ms}, separators=(",", ":")).encode()
        won = self._objects.put_new(name, data).won
        if not won and (stored := self._objects.get(name)) is not None:
            # The process that revoked it may have died before it wrote the row.
            now_ms = int(_read(name, stored).get("revoked_ms", now_ms))
        record_event(self._objects, tenant, key_id, "revoke", at_ms=now_ms, by=by)
        return won

    def list(self, tenant: str) -> builtins.list[ApiKey]:
        """Returns every key that a tenant ever had, also the revoked ones, the oldest first."""
        root = f"{encoded(tenant)}/{FOLDER}/"
        names = [entry.name for entry in self._objects.list(root)]
        used = last_uses(names, root)
        found = [
            # A use has the time at which its period began, which may be before the key was created.
            key._replace(used_ms=max(used[key_id], key.created_ms) if key_id in used else None)
            for key_id in sorted({name[len(root) :].partition("/")[0] for name in names})
            if (key := self.read(tenant, key_id)) is not None
        ]
        return sorted(found, key=lambda key: (key.created_ms, key.key_id))

    def check(self, token: str) -> ApiCaller | None:
        """Returns the caller of a token, or None if it is refused. Raises only if the store does not answer."""
        parts = parse_token(token)
        found = Denial.INVALID if parts is None else self.judge(parts, self.read(parts.tenant, parts.key_id))
        return found if isinstance(found, ApiCaller) else None

    def judge(self, parts: TokenParts, key: ApiKey | None) -> ApiCaller | Denial:
        """Returns the caller, or why the token is refused. Does no I/O.

        An unknown key id is compared like a known one, so the time says nothing about the digest. That a key has
        expired or was revoked is reported only for tokens with the right secret.
        """
        same = hmac.compare_digest(_digest(*parts), key.digest if key is not None else _NO_DIGEST)
        if key is None or not same:
            return Denial.INVALID
        state = key.state(self._now_ms())
        return ApiCaller(parts.tenant, key.principal, key.scopes, key.key_id) if state == "live" else Denial(state)

    def read(self, tenant: str, key_id: str) -> ApiKey | None:
        """Returns a key with its revocation. Always two requests, also if there is no such key."""
        made, revoked = _name(tenant, key_id, "made"), _name(tenant, key_id, "revoked")
        data = self._objects.get(made)
        # Read last: if there is no revocation, the key was valid at that time. Read for unknown keys, too.
        ended = self._objects.get(revoked)
        if data is None:
            return None
        key = ApiKey.decode(made, key_id, data)
        return key if ended is None else key._replace(revoked_ms=int(_read(revoked, ended).get("revoked_ms", 0)))


class Unknown(Enum):
    """The type of `UNKNOWN`: the cache has no answer."""

    UNKNOWN = "unknown"


UNKNOWN: Final = Unknown.UNKNOWN


class CachedKeys:
    """The cache of a server. It does not contain tokens, only the sha256 of those that were accepted.

    Keys that exist and ids that do not are in separate caches of the same size: wrong tokens, however many, evict no
    accepted one. A wrong secret for a known id, and an id that was just not found, are refused without reading the
    store.
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
        self._accepted: LRUCache[bytes, tuple[float, ApiCaller]] = LRUCache(max_entries)
        self._found: LRUCache[tuple[str, str], tuple[float, ApiKey]] = LRUCache(max_entries)
        self._absent: LRUCache[tuple[str, str], float] = LRUCache(max_entries)

    def known(self, token: str) -> ApiCaller | Denial | Literal[Unknown.UNKNOWN]:
        """Returns the caller, why the token is refused, or UNKNOWN if `check` has to be called. Does no I/O."""
        if len(token) > MAX_TOKEN_CHARACTERS:
            return Denial.INVALID  # not worth a hash
        name, now = _cache_name(token), self._clock()
        with self._lock:
            if (cached := self._accepted.get(name)) is not None and now < cached[0]:
                self._found.get((cached[1].tenant, cached[1].key_id))  # in use, so not the next to be evicted
                return cached[1]
        parts = parse_token(token)
        if parts is None:
            return Denial.INVALID
        place = (parts.tenant, parts.key_id)
        with self._lock:
            found, absent_until = self._found.get(place), self._absent.get(place)
        if found is not None and now < found[0]:
            return self._judge(name, parts, *found)
        return Denial.INVALID if absent_until is not None and now < absent_until else UNKNOWN

    def was_accepted(self, token: str) -> bool:
        """Returns whether the token was accepted once, even if that has expired."""
        with self._lock:
            return len(token) <= MAX_TOKEN_CHARACTERS and _cache_name(token) in self._accepted

    def check(self, token: str) -> ApiCaller | Denial:
        """Like `known`, but reads the store for an unknown token. Raises `StoreUnavailable` if it does not answer."""
        if (known := self.known(token)) is not UNKNOWN:
            return known
        parts = parse_token(token)
        if parts is None:
            return Denial.INVALID
        # Fresh from now, not from when the answer arrives: by then it may be outdated.
        sent_at = self._clock()
        place = (parts.tenant, parts.key_id)
        key = self._keys.read(*place)
        with self._lock:
            self._found.pop(place, None)
            self._absent.pop(place, None)
            if key is not None:
                self._found[place] = (sent_at + self._fresh_s, key)
            else:
                self._absent[place] = sent_at + self._absent_s
        return self._judge(_cache_name(token), parts, sent_at + self._fresh_s, key)

    def _judge(self, name: bytes, parts: TokenParts, until: float, key: ApiKey | None) -> ApiCaller | Denial:
        caller = self._keys.judge(parts, key)
        with self._lock:
            self._accepted.pop(name, None)
            if isinstance(caller, ApiCaller):
                self._accepted[name] = (until, caller)
        return caller


# A slow hash protects passwords. A secret has 256 random bits, which cannot be guessed at any speed, and a server has
# to check one at every request. The digest includes tenant and id, so a stored key that is copied to another name is
# not valid there.
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
        raise FormatCorrupt(
            f"{name} is not a valid API key: {broken!r}", hint="revoke it and create another"
        ) from broken
    if too_new:
        raise FormatTooNew(f"{name} has format {version}; this ragfence knows {VERSION}")
    return values


def _cache_name(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogatepass")).digest()


def _sorted(scopes: Iterable[KeyScope]) -> list[str]:
    return [scope.value for scope in KeyScope if scope in scopes]
