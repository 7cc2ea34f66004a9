"""What is fixed for the documents of a tenant when the first of them comes."""

from __future__ import annotations

import json

from ragfence.core.hashing import Algorithm
from ragfence.core.operations import encoded
from ragfence.errors import FormatCorrupt, FormatTooNew, PolicyError
from ragfence.stores.objects import ObjectStore

VERSION = 1


class ContentHash:
    """The algorithm that a tenant's documents are hashed with.

    Another one would make all known documents new, so it is fixed with the first one. Not before: whoever has only
    looked, or tried what would happen, may still choose.
    """

    def __init__(self, tenant: str, objects: ObjectStore, wanted: Algorithm) -> None:
        self._tenant = tenant
        self._objects = objects
        self._wanted = wanted
        self._name = f"{encoded(tenant)}/documents/settings"
        self._is_fixed = False

    def check(self) -> None:
        """Raises `PolicyError` if it is fixed, and is another than the policy says."""
        known = self._objects.get(self._name)
        if known is not None:
            self._compare(known)

    def settle(self) -> None:
        """Fixes it, or raises as `check` does. To be called before each commit; all but the first cost nothing."""
        if self._is_fixed:
            return
        data = json.dumps({"version": VERSION, "content_hash": self._wanted}).encode()
        put = self._objects.put_new(self._name, data)
        self._compare(data if put.won else put.existing or b"")

    def _compare(self, known: bytes) -> None:
        name, wanted = self._name, self._wanted
        try:
            settings = json.loads(known)
            version, fixed = settings["version"], settings["content_hash"]
        except (ValueError, KeyError, TypeError) as broken:
            raise FormatCorrupt(f"{name} holds no settings: {broken!r}") from broken
        if version > VERSION:
            raise FormatTooNew(f"{name} has format {version}; this ragfence knows {VERSION}")
        if fixed != wanted:
            raise PolicyError(
                f"the documents of tenant {self._tenant!r} are hashed with {fixed}, and the policy says {wanted}",
                hint=f"set content_hash: {fixed}, or use another tenant",
            )
        self._is_fixed = True
