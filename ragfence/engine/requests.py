"""A request: an operation with all that the stores need to know, and the calls made from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

from ragfence.core.canonical import canonical_payload
from ragfence.core.decisions import DOCUMENT, KEYED, LOCK, SEQUENCED, Claim, Granted, LeaseRef, Mode, Seal
from ragfence.core.hashing import ContentKey, digest, digest_payload
from ragfence.core.layout import FINGERPRINT_BYTES, NO_METADATA, NO_TOKEN
from ragfence.core.operations import Operation, key_to_text
from ragfence.core.policy import KindRules
from ragfence.stores.fences import SOURCE_BYTES, Lookup

acting_key: ContextVar[str] = ContextVar("ragfence_api_key", default="")
"""The id of the API key that the current work is done for; stored in the decision rows of that work."""
MAX_KEPT_PAYLOAD = 16 * 1024


@contextlib.contextmanager
def acting_as(api_key: str) -> Iterator[None]:
    """Sets the API key in a thread that works for another, whose context it lacks. Empty: keeps the current one."""
    if not api_key:
        yield
        return
    acting = acting_key.set(api_key)
    try:
        yield
    finally:
        acting_key.reset(acting)


class Request(NamedTuple):
    operation: Operation
    fingerprint: bytes
    rules: KindRules
    context: bytes = b"{}"
    owner: str = ""
    kept_payload: bytes = b""
    """the redacted payload, for the diff of a later conflict; empty unless the policy asks for diffs"""
    diff_wanted: bool = False
    store_tells_conflicts: bool = True
    """False: the caller writes the row of a conflict, as it has more to check (a diff, the object store)"""
    key: bytes = b""
    source: bytes = b""
    mode: Mode = KEYED

    @classmethod
    def of(
        cls,
        operation: Operation,
        fingerprint: bytes,
        rules: KindRules,
        *,
        context: bytes = b"{}",
        owner: str = "",
        kept_payload: bytes = b"",
        diff_wanted: bool = False,
        store_tells_conflicts: bool = True,
    ) -> Request:
        slot, mode = b"", KEYED
        if is_lock(operation):
            mode = LOCK
        elif is_document(operation):
            slot, mode = document_slot(operation.tenant, operation.source_id), DOCUMENT
        elif operation.sequence is not None:
            slot, mode = slot_of(operation.kind, operation.source), SEQUENCED
        key, tells = operation.key, store_tells_conflicts and not diff_wanted
        return cls(operation, fingerprint, rules, context, owner, kept_payload, diff_wanted, tells, key, slot, mode)

    @property
    def key_text(self) -> str:
        return key_to_text(self.key)

    @property
    def lookup(self) -> Lookup:
        return Lookup(self.key, self.mode, self.source)

    def claim(self, token: bytes, position: int, waited_ms: int) -> Claim:
        rules = self.rules
        # By position, here and below: each is made for every call, and names cost more.
        return Claim(
            self.key,
            self.fingerprint,
            token,
            self.mode,
            self.source,
            self.operation.sequence,
            NO_METADATA,
            False,  # retract
            rules.lease_ms,
            rules.max_attempts,
            rules.pending_ttl_ms,
            rules.source_ttl_ms,
            self.operation.kind,
            self.owner,
            self.kept_payload,
            position,
            waited_ms,
            self.context,
            self.store_tells_conflicts,
        )

    def lease_ref(self, token: bytes, *, epoch: int) -> LeaseRef:
        rules = self.rules
        return LeaseRef(
            self.key,
            token,
            self.mode,
            self.source,
            rules.lease_ms,
            rules.pending_ttl_ms,
            rules.source_ttl_ms,
            epoch,
            0,  # position
            self.context,
        )

    def seal(
        self,
        granted: Granted,
        *,
        effect_id: str,
        result: bytes,
        failed: bool,
        error: str,
        flags: int = 0,
        waited_ms: int = 0,
        winner: bytes = NO_TOKEN,
        duplicate: bool = False,
    ) -> Seal:
        record = granted.record
        return Seal(
            self.key,
            record.token,
            record.fence,
            self.mode,
            self.source,
            failed,
            effect_id,
            result,
            error,
            self.operation.sequence,
            NO_METADATA,
            True,  # live
            self.rules.ttl_ms,
            self.rules.source_ttl_ms,
            flags,
            waited_ms,
            self.context,
            duplicate or winner != NO_TOKEN,
            winner,
        )


DOCUMENT_ACTIONS = frozenset({"ingest", "retract", "purge"})


def is_document(operation: Operation) -> bool:
    """Whether the operation belongs to `fence.documents`, whose records are those of their sources."""
    return operation.kind == "document" and operation.action in DOCUMENT_ACTIONS


LOCK_KIND, LOCK_ACTION = "lock", "hold"


def is_lock(operation: Operation) -> bool:
    """Whether the operation stands for a lock of `fence.lock`, which is held and never sealed."""
    return operation.action == LOCK_ACTION and operation.kind == LOCK_KIND


def document_slot(tenant: str, doc_id: str) -> bytes:
    """Returns where the fence store keeps a document. `documents.identity` computes the same for many at once."""
    return digest("ragfence/document-source/1", tenant.encode(), doc_id.encode())[:SOURCE_BYTES]


def slot_of(kind: str, source: str) -> bytes:
    """Returns where the fence store keeps a source with sequences."""
    # The kind too: sequences of different kinds of effect on one source do not order each other.
    return digest("ragfence/slot/1", kind.encode(), bytes.fromhex(source))[:SOURCE_BYTES]


_BYTES = (bytes, bytearray, memoryview)
_OF_NOTHING = digest("ragfence/payload/none/1")[:FINGERPRINT_BYTES]


def fingerprint_of(payload: object, key: ContentKey | None = None) -> tuple[bytes, bytes]:
    """Returns the fingerprint of a payload, and its canonical JSON (none for bytes, which are digested as they are).

    `key` is that of a tenant whose digests are keyed.
    """
    if payload is None:
        return _OF_NOTHING, b""
    if isinstance(payload, _BYTES):
        return digest_payload("ragfence/payload/bytes/1", bytes(payload), key)[:FINGERPRINT_BYTES], b""
    text = canonical_payload(payload)
    return digest_payload("ragfence/payload/json/1", text, key)[:FINGERPRINT_BYTES], text
