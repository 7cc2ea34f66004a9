"""Origins: the source that owns a document, so that two sources with one doc_id do not replace each other's content.

An origin is the name of a source that brings documents through `sync`. Documents ingested in any other way (`ingest`,
HTTP, queues) have none: they never own and never conflict. The record of a document holds a short digest of its owner's
name, and so does its row in the log; the name itself is written once:

    <tenant>/origins/<16 hex digits>    JSON: {"version": 1, "name": "folder:/srv/handbook"}

Owners are compared under the lease of a move, with the head that the claim returned: see `next_owner`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from ragfence.core.decisions import Claim, Granted
from ragfence.core.hashing import digest
from ragfence.core.layout import OWNER_BYTES
from ragfence.core.operations import checked_text, encoded
from ragfence.core.records import KeyRecord
from ragfence.documents.log import NO_OWNER, StoredResult
from ragfence.engine.batch_commit import Declined
from ragfence.errors import FormatCorrupt, FormatTooNew, OriginConflict, ValidationError
from ragfence.stores.objects import ObjectStore

VERSION = 1


def origin_digest(name: str) -> bytes:
    """The digest of an origin in records and rows."""
    return digest("ragfence/origin/1", name.encode())[:OWNER_BYTES]


class Origin(NamedTuple):
    """The source that a document comes from in this call."""

    name: str
    digest: bytes
    take_over: bool
    """whether it may replace the content of documents that another origin owns"""
    name_of: Callable[[bytes], str]
    """the name of another origin, by its digest"""


class ContentUnchanged(Declined):
    """The content is live and belongs to another origin, as do its metadata: nothing is moved."""

    def __init__(self, record: KeyRecord) -> None:
        super().__init__("the content is live, and belongs to another origin")
        self.record = record


def next_owner(
    doc_id: str, claim: Claim, origin: Origin | None, grant: Granted, replaced: StoredResult | None
) -> bytes:
    """Returns the owner of a document after a granted move. `replaced` is the result in the record of its live head.

    Raises:
        OriginConflict: The move would replace the content of another origin.
        ContentUnchanged: The move would only replace the metadata of another origin.
    """
    owner = replaced.owner if replaced else NO_OWNER
    if origin is None:
        return owner
    if replaced is None or owner == origin.digest or origin.take_over:
        return origin.digest
    head = grant.head
    assert head is not None  # it is live
    assert head.record is not None
    if head.record.fingerprint == claim.fingerprint:  # equal content changes no owner
        moves_order = claim.sequence is not None and claim.sequence != head.sequence
        if owner != NO_OWNER and head.digest == claim.digest and not moves_order and not grant.takeover:
            raise ContentUnchanged(head.record)
        return owner
    if owner == NO_OWNER:
        return origin.digest
    theirs = origin.name_of(owner)
    raise OriginConflict(
        f"document {doc_id!r} of {origin.name} has other content than that of {theirs}, which owns the doc_id",
        key=claim.key.hex(),
        doc_id=doc_id,
        origin=origin.name,
        owner=theirs,
    )


class Origins:
    """The names of a tenant's origins."""

    def __init__(self, tenant: str, objects: ObjectStore) -> None:
        self._root = f"{encoded(tenant)}/origins"
        self._objects = objects
        self._names: dict[bytes, str] = {}
        self._settled: set[str] = set()

    def origin(self, name: str, *, take_over: bool) -> Origin:
        checked = checked_text("origin", name)
        return Origin(checked, origin_digest(checked), take_over, self.name_of)

    def settle(self, origin: Origin) -> None:
        """Makes the name durable. Called before the first document of the origin; later calls cost nothing."""
        if origin.name in self._settled:
            return
        data = json.dumps({"version": VERSION, "name": origin.name}, ensure_ascii=False).encode()
        put = self._objects.put_new(self._place(origin.digest), data)
        if not put.won and (known := self._read(put.existing or b"", origin.digest)) != origin.name:
            raise ValidationError(
                f"the origins {origin.name!r} and {known!r} have the same digest", hint="give one of them another name"
            )
        self._settled.add(origin.name)
        self._names[origin.digest] = origin.name

    def name_of(self, owner: bytes) -> str:
        """Returns the name of an origin, or its digest in hex if the name was lost."""
        if owner not in self._names:
            data = self._objects.get(self._place(owner))
            if data is None:
                return f"an origin without a name ({owner.hex()})"
            self._names[owner] = self._read(data, owner)
        return self._names[owner]

    def _place(self, owner: bytes) -> str:
        return f"{self._root}/{owner.hex()}"

    def _read(self, data: bytes, owner: bytes) -> str:
        place = self._place(owner)
        try:
            values = json.loads(data)
            version, name = values["version"], str(values["name"])
        except (ValueError, KeyError, TypeError) as broken:
            raise FormatCorrupt(f"{place} does not hold the name of an origin: {broken!r}") from broken
        if version > VERSION:
            raise FormatTooNew(f"{place} has format {version}; this ragfence knows {VERSION}")
        return name
