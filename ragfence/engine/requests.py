"""A request: an operation with everything the stores need to know of it, and the calls it turns into."""

from __future__ import annotations

from typing import NamedTuple

from ragfence.core.canonical import canonical_payload
from ragfence.core.decisions import DOCUMENT, KEYED, NOBODY, SEQUENCED, Claim, Granted, LeaseRef, Mode, Seal
from ragfence.core.hashing import digest
from ragfence.core.operations import Operation, key_to_text
from ragfence.core.policy import KindRules
from ragfence.core.records import FINGERPRINT_BYTES
from ragfence.stores.fences import SOURCE_BYTES, Lookup

MAX_KEPT_PAYLOAD = 16 * 1024


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
    """False: the row of a conflict is written by the caller, who has more to look at (a diff, the object store)"""
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
        if is_document(operation):
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
        return Claim(
            key=self.key,
            fingerprint=self.fingerprint,
            token=token,
            mode=self.mode,
            source=self.source,
            sequence=self.operation.sequence,
            lease_ms=self.rules.lease_ms,
            max_attempts=self.rules.max_attempts,
            pending_ttl_ms=self.rules.pending_ttl_ms,
            source_ttl_ms=self.rules.source_ttl_ms,
            kind=self.operation.kind,
            owner=self.owner,
            payload=self.kept_payload,
            position=position,
            waited_ms=waited_ms,
            context=self.context,
            row_on_conflict=self.store_tells_conflicts,
        )

    def lease_ref(self, token: bytes, *, epoch: int) -> LeaseRef:
        return LeaseRef(
            key=self.key,
            token=token,
            mode=self.mode,
            source=self.source,
            lease_ms=self.rules.lease_ms,
            pending_ttl_ms=self.rules.pending_ttl_ms,
            source_ttl_ms=self.rules.source_ttl_ms,
            epoch=epoch,
            context=self.context,
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
        winner: bytes = NOBODY,
    ) -> Seal:
        return Seal(
            key=self.key,
            token=granted.record.token,
            fence=granted.record.fence,
            mode=self.mode,
            source=self.source,
            failed=failed,
            effect_id=effect_id,
            result=result,
            error=error,
            sequence=self.operation.sequence,
            ttl_ms=self.rules.ttl_ms,
            source_ttl_ms=self.rules.source_ttl_ms,
            flags=flags,
            waited_ms=waited_ms,
            context=self.context,
            duplicate=winner != NOBODY,
            winner=winner,
        )


DOCUMENT_ACTIONS = frozenset({"ingest", "retract", "purge"})


def is_document(operation: Operation) -> bool:
    """Whether it is one of `fence.documents`, whose record is that of its source."""
    return operation.kind == "document" and operation.action in DOCUMENT_ACTIONS


def document_slot(tenant: str, doc_id: str) -> bytes:
    """Where the fence store keeps a document: `documents.identity` computes the same for many in a row."""
    return digest("ragfence/document-source/1", tenant.encode(), doc_id.encode())[:SOURCE_BYTES]


def slot_of(kind: str, source: str) -> bytes:
    """Where the fence store keeps a source with sequences."""
    # The kind too: sequences of different kinds of effect on one source do not order each other.
    return digest("ragfence/slot/1", kind.encode(), bytes.fromhex(source))[:SOURCE_BYTES]


_BYTES = (bytes, bytearray, memoryview)
_OF_NOTHING = digest("ragfence/payload/none/1")[:FINGERPRINT_BYTES]


def fingerprint_of(payload: object) -> tuple[bytes, bytes]:
    """The fingerprint of a payload, and its canonical JSON where it has one (bytes are taken as they are)."""
    if payload is None:
        return _OF_NOTHING, b""
    if isinstance(payload, _BYTES):
        return digest("ragfence/payload/bytes/1", bytes(payload))[:FINGERPRINT_BYTES], b""
    text = canonical_payload(payload)
    return digest("ragfence/payload/json/1", text)[:FINGERPRINT_BYTES], text
