"""What is fixed for the documents of a tenant when the first of them comes."""

from __future__ import annotations

import json

from ragfence.core.hashing import Algorithm
from ragfence.core.operations import encoded
from ragfence.errors import FormatCorrupt, FormatTooNew, PolicyError
from ragfence.stores.objects import ObjectStore

VERSION = 1


def settle_content_hash(tenant: str, objects: ObjectStore, wanted: Algorithm) -> None:
    """Another algorithm would make all known documents new, so it is fixed with the first one."""
    name = f"{encoded(tenant)}/documents/settings"
    known = objects.get(name)
    if known is None:
        data = json.dumps({"version": VERSION, "content_hash": wanted}).encode()
        put = objects.put_new(name, data)
        known = data if put.won else put.existing
    try:
        settings = json.loads(known or b"")
        version, fixed = settings["version"], settings["content_hash"]
    except (ValueError, KeyError, TypeError) as broken:
        raise FormatCorrupt(f"{name} holds no settings: {broken!r}") from broken
    if version > VERSION:
        raise FormatTooNew(f"{name} has format {version}; this ragfence knows {VERSION}")
    if fixed != wanted:
        raise PolicyError(
            f"the documents of tenant {tenant!r} are hashed with {fixed}, and the policy says {wanted}",
            hint=f"set content_hash: {fixed}, or use another tenant",
        )
