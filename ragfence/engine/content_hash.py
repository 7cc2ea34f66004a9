"""The hash algorithm of a tenant's contents, and its key: fixed with the first content.

    <tenant>/documents/settings   {"version": 1, "content_hash": "xxh3" or "sha256"}
                                  {"version": 2, "content_hash": "hmac", "secret_check": 64 hex digits}

The secret of a tenant with `hmac` is passed in and never stored. Its check is a digest that only this secret produces,
so that another secret is refused before anything is written with it.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable

from ragfence.core.hashing import Algorithm, ContentKey
from ragfence.core.operations import encoded
from ragfence.errors import (
    ContentSecretError,
    FormatCorrupt,
    FormatTooNew,
    ObjectsRequired,
    PolicyError,
    TransientError,
)
from ragfence.stores.objects import ObjectStore

VERSION = 2

Secret = Callable[[], bytes]
"""Returns the secret of a tenant, from outside the stores. Raises `ContentSecretError`."""


class ContentHash:
    """The algorithm that a tenant's contents are hashed with, and its key if it takes one.

    Another algorithm would make all known documents new, so it is fixed with the first document, and not before: reads
    and dry runs leave the choice open. `hmac` is fixed with the first operation of any kind, because the payloads of
    all operations are compared by keyed digests.
    """

    def __init__(
        self, tenant: str, objects: ObjectStore | None, wanted: Algorithm, secret: Secret | None = None
    ) -> None:
        self._tenant = tenant
        self._objects = objects
        self.algorithm = wanted
        self._secret = secret
        self._name = f"{encoded(tenant)}/documents/settings"
        self._is_fixed = False
        self._key: ContentKey | None = None

    def key(self) -> ContentKey | None:
        """Returns the key; None if digests are not keyed. The first call fixes the secret, or raises like `check`."""
        if self.algorithm != "hmac" or self._is_fixed:
            return self._key
        self.check()
        if not self._is_fixed:
            self._refuse_used_tenant()
            self.settle()
        return self._key

    def check(self) -> None:
        """Raises `PolicyError` if another algorithm is fixed than the policy says."""
        known = self._store.get(self._name)
        if known is not None:
            self._compare(known)

    def check_keyed(self) -> None:
        """Checks, when a fence is opened, only whether digests are keyed.

        Operations without documents do not depend on the algorithm, but must not store plain digests where keyed ones
        are promised. If the store is down now, the next call that needs it fails.
        """
        if self.algorithm == "hmac" or self._objects is None:
            return
        try:
            known = self._objects.get(self._name)
            if known is not None and self._parsed(known)["content_hash"] == "hmac":
                self._compare(known)
        except (TransientError, FormatCorrupt):
            return

    def settle(self) -> None:
        """Fixes the algorithm, or raises like `check`. Called before each commit; only the first reads the store."""
        if self._is_fixed:
            return
        values: dict[str, object] = {"version": 1, "content_hash": self.algorithm}
        if self.algorithm == "hmac":
            values |= {"version": 2, "secret_check": self._derived().digest("ragfence/content-secret/1").hex()}
        data = json.dumps(values).encode()
        put = self._store.put_new(self._name, data)
        self._compare(data if put.won else put.existing or b"")

    @property
    def _store(self) -> ObjectStore:
        if self._objects is None:
            raise ObjectsRequired(
                f"content_hash: {self.algorithm} needs an object store, and this fence was opened without one"
            )
        return self._objects

    def _derived(self) -> ContentKey:
        if self._key is None:
            if self._secret is None:
                raise ContentSecretError(f"Tenant {self._tenant!r} has content_hash: hmac, and no secret was given")
            self._key = ContentKey(self._secret(), self._tenant)
        return self._key

    def _refuse_used_tenant(self) -> None:
        """Refuses a tenant with plain fingerprints: every retry of an earlier call would look like a conflict."""
        used = next(iter(self._store.list(f"{encoded(self._tenant)}/sealed/", limit=1)), None)
        if used is None:
            return
        self.check()  # another process may have fixed it a moment ago
        if not self._is_fixed:
            raise PolicyError(
                f"Tenant {self._tenant!r} was used before without content_hash: hmac, and the policy asks for it",
                hint="remove content_hash: hmac, or use another tenant: it is chosen before the first operation",
            )

    def _parsed(self, known: bytes) -> dict[str, object]:
        try:
            settings = json.loads(known)
            version = settings["version"]
            if version <= VERSION:
                settings["content_hash"]
        except (ValueError, KeyError, TypeError) as broken:
            raise FormatCorrupt(f"{self._name} does not hold valid settings: {broken!r}") from broken
        if version > VERSION:
            raise FormatTooNew(f"{self._name} has format {version}; this ragfence knows {VERSION}")
        assert isinstance(settings, dict)
        return settings

    def _compare(self, known: bytes) -> None:
        settings, wanted = self._parsed(known), self.algorithm
        fixed = settings["content_hash"]
        if fixed != wanted:
            raise PolicyError(
                f"the documents of tenant {self._tenant!r} are hashed with {fixed}, and the policy says {wanted}",
                hint=f"set content_hash: {fixed}, or use another tenant",
            )
        if wanted == "hmac":
            mine = self._derived().digest("ragfence/content-secret/1").hex()
            if not hmac.compare_digest(mine, str(settings.get("secret_check", ""))):
                self._key = None
                raise ContentSecretError(
                    f"The secret of tenant {self._tenant!r} is not the one that its contents are hashed with",
                    hint="give the secret that the tenant was first used with (content_secret in the policy); "
                    "it cannot be changed, and without it use another tenant and ingest again",
                )
        self._is_fixed = True
