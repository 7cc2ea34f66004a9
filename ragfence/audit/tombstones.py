"""Tombstones: what a purge leaves of the decision rows of a document, and of the HTTP requests that sent it.

A row of a purged document stays: that something happened, when, what was decided, and by which owner. What was derived
from the content is removed: the content hash, the fingerprint, the size, and the key and effect_id that follow from it.
The key is replaced by one that cannot be computed, the same for all rows of the key, so that the auditor still sees one
life per key; the revision becomes `purged`.

Of an HTTP request that sent the document, the stored response, the compared payload and its digests are removed. Its
key stays used, so that a late retry cannot bring the document back. A refused request has no stored response; its
record is removed, so the same request is a new one if it is sent again.

    <tenant>/purges/<source>    the purge in progress: its doc_id, and the secret that makes the new keys

This object is written first and deleted last. A purge that was interrupted is completed by the next purge of the same
document, with the same secret. Only objects of the ledger that hold such rows are rewritten: the new object is stored
before the old one is deleted, under the drainers' lock, repeatedly until none is found.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from ragfence.audit import columns
from ragfence.audit.drain import LOCK, LOCK_MS, Drainer
from ragfence.audit.ledger import PACKED, Ledger, Part, RowQuery
from ragfence.core.decision_rows import Row
from ragfence.core.hashing import digest
from ragfence.core.layout import FINGERPRINT_BYTES, RowKind
from ragfence.core.operations import Operation, encoded, key_from_text
from ragfence.core.policy import AuditRules
from ragfence.core.secret_patterns import REDACTED
from ragfence.engine.commits import Commit, Commits
from ragfence.engine.crash_points import reach
from ragfence.errors import FormatCorrupt, StoreUnavailable, TransientError
from ragfence.stores.fences import FenceStore
from ragfence.stores.objects import ObjectStore

PURGED: Final = "purged"
"""the revision of a row that is a tombstone"""
DOCUMENT, HTTP = "document", "http"
NO_FINGERPRINT: Final = "00" * FINGERPRINT_BYTES
NOT_KEPT: Final = b'j{"v":1,"status":200,"headers":[],"too_long":true}'
"""the result that replaces a removed response"""

TOMBS_BEGUN, TOMBS_REQUEST_OPEN, TOMBS_REQUESTS, TOMBS_WRITTEN, TOMBS_DELETED = (
    "tombstones_begun",
    "tombstones_request_open",
    "tombstones_requests",
    "tombstones_written",
    "tombstones_deleted",
)
TOMBSTONE_POINTS = (TOMBS_BEGUN, TOMBS_REQUEST_OPEN, TOMBS_REQUESTS, TOMBS_WRITTEN, TOMBS_DELETED)
PASSES = 20
LOCK_WAIT_S = 1.5 * LOCK_MS / 1000
"""longer than a drainer that was killed holds the lock"""


class _Purge(NamedTuple):
    """A purge in progress."""

    name: str
    doc_id: str
    secret: bytes


class Tombstones:
    """Replaces the decision rows of purged documents of one tenant."""

    def __init__(
        self,
        fences: FenceStore,
        objects: ObjectStore,
        rules: AuditRules,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._fences = fences
        self._objects = objects
        self._ledger = Ledger(fences.tenant, objects)
        self._drainer = Drainer(fences, self._ledger, rules)
        self._commits = Commits(fences.tenant, objects)
        self._sleep = sleep

    def bury(self, doc_id: str) -> None:
        """Replaces the rows of a document. Calling it again for the same document changes nothing."""
        shard, plain_keys = self._place(doc_id)
        purge = self._start(doc_id)
        reach(TOMBS_BEGUN)
        requests = self._refused_requests(doc_id)
        for _ in range(PASSES):
            self._drain()
            requests |= self._requests_of(doc_id, shard)
            for key in sorted(requests):
                self._close_request(key)
            reach(TOMBS_REQUESTS)
            if not self._rewrite(purge, shard, plain_keys, requests) and not self._has_undrained_rows(
                doc_id, shard, plain_keys, requests
            ):
                break
        self._fences.scrub()
        self._objects.delete([purge.name])
        reach(TOMBS_DELETED)

    def _place(self, doc_id: str) -> tuple[int, frozenset[str]]:
        """The shard of the document, and those of its keys that do not depend on its content."""
        plain = [
            Operation(kind=DOCUMENT, source_id=doc_id, action=action, tenant=self._fences.tenant).key
            for action in ("retract", "purge")
        ]
        return plain[0][0], frozenset(key.hex() for key in plain)

    def _start(self, doc_id: str) -> _Purge:
        source = digest("ragfence/source/1", b"", doc_id.encode()).hex()
        name = f"{encoded(self._fences.tenant)}/purges/{source}"
        data = json.dumps({"version": 1, "doc_id": doc_id, "secret": secrets.token_hex(32)}).encode()
        put = self._objects.put_new(name, data)
        try:
            held = json.loads(data if put.won else put.existing or b"")
            return _Purge(name, doc_id, bytes.fromhex(held["secret"]))
        except (ValueError, KeyError, TypeError) as broken:
            raise FormatCorrupt(f"{name} is not a purge: {broken!r}", hint="delete it, and purge again") from broken

    def _drain(self) -> None:
        """Moves the rows in the fence store into the ledger."""
        waited = 0.0
        while self._drainer.drain().busy:
            if waited >= LOCK_WAIT_S:
                raise StoreUnavailable("other processes keep draining decision rows", hint="purge again later")
            self._sleep(0.1)
            waited += 0.1

    def _requests_of(self, doc_id: str, shard: int) -> set[str]:
        """The keys of the HTTP requests that sent the document; each of its rows names one."""
        query = RowQuery(shards=range(shard, shard + 1), values=(("source_id", doc_id), ("kind", DOCUMENT)))
        found: set[str] = set()
        for part in self._ledger.parts(query):
            table = self._ledger.read(part, query, ["event_id"])
            for event_id in table.column("event_id").unique().to_pylist() if table is not None else ():
                if event_id and _is_key(event_id):
                    found.add(event_id)
        return found

    def _refused_requests(self, doc_id: str) -> set[str]:
        """The keys of requests without a response that named the document. They left no row of it.

        A request whose doc_id was redacted may be about the document, and is included: it only loses its attempts.
        """
        found = set()
        for each in self._fences.scan():
            if each.record.kind == HTTP and not each.record.ended and each.record.payload:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    named = json.loads(each.record.payload)["body"]["doc_id"]
                    if named == doc_id or REDACTED in named:
                        found.add(each.key.hex())
        return found

    def _close_request(self, key: str) -> None:
        """Removes the response of a request and the payload it is compared by. The key stays used."""
        query = RowQuery(shards=_shards_of(key), values=(("idempotency_key", key), ("kind", HTTP)))
        sealed: Row | None = None
        is_request = False
        for part in self._ledger.parts(query):
            table = self._ledger.read(part, query, columns.schema().names)
            for row in columns.to_rows(table) if table is not None else ():
                is_request = True
                if row.sealed_at_ms and row.kind is RowKind.NEW:
                    sealed = row
        if not is_request:
            return  # an event id of the caller's
        if sealed is None:  # refused, or interrupted
            self._fences.forget([key_from_text(key)], pending=True)
            return
        context = sealed.columns()
        operation = Operation(
            kind=HTTP,
            source_type=context["source_type"] or "",
            source_id=context["source_id"] or "",
            action=context["action"] or "",
            tenant=self._fences.tenant,
        )
        if operation.key.hex() != key:
            return
        held = self._commits.find(operation)
        if held is None or held.result != NOT_KEPT:
            tombstone = Commit(
                key=key,
                fingerprint=secrets.token_hex(FINGERPRINT_BYTES),
                token=sealed.winner.hex(),
                fence=str(sealed.fence),
                attempt=sealed.attempt,
                first_seen_ms=sealed.first_seen_ms,
                sealed_at_ms=sealed.sealed_at_ms,
                sequence=None,
                failed=False,
                error="",
                effect_id="",
                result=NOT_KEPT,
            )
            if held is not None and held.result[:1] == b"r":
                self._objects.delete([f"{encoded(self._fences.tenant)}/results/{held.result[1:].hex()}"])
            self._commits.delete(operation)
            reach(TOMBS_REQUEST_OPEN)
            self._commits.put(operation, tombstone)
        self._fences.forget([key_from_text(key)])

    def _rewrite(self, purge: _Purge, shard: int, plain_keys: frozenset[str], requests: set[str]) -> bool:
        """Returns False if no object of the ledger held anything to remove."""
        shards = sorted({shard, *(key_from_text(key)[0] for key in requests)})
        token = secrets.token_hex(8)
        waited = 0.0
        while not self._fences.lock(LOCK, token, LOCK_MS):
            if waited >= LOCK_WAIT_S:
                raise StoreUnavailable("other processes keep draining decision rows", hint="purge again later")
            self._sleep(0.1)
            waited += 0.1
        try:
            found = False
            names = [part for part in self._ledger.parts() if any(s in _range(part) for s in shards)]
            for part in names:
                self._fences.lock(LOCK, token, LOCK_MS)
                found |= self._rewrite_part(part, purge, plain_keys, requests, shard)
            return found
        finally:
            with contextlib.suppress(TransientError):  # the lock expires
                self._fences.unlock(LOCK, token)

    def _rewrite_part(
        self, part: Part, purge: _Purge, plain_keys: frozenset[str], requests: set[str], shard: int
    ) -> bool:
        if not self._holds(part, purge.doc_id, plain_keys, requests, shard):
            return False
        table = self._ledger.read(part, RowQuery(), columns.schema().names)
        if table is None:
            return True  # replaced meanwhile: the next pass reads its replacement
        rows = [_tombstone(row, purge, plain_keys, requests) for row in columns.to_rows(table)]
        salt = hmac.digest(purge.secret, part.name.encode(), "sha256")
        self._ledger.write(part.day, columns.to_table(rows, self._fences.tenant), PACKED, salt=salt)
        reach(TOMBS_WRITTEN)
        self._ledger.delete([part.name])
        return True

    def _holds(self, part: Part, doc_id: str, plain_keys: frozenset[str], requests: set[str], shard: int) -> bool:
        """Whether a part holds rows to replace. Reads few columns, and of most objects only the statistics."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if shard in _range(part):
            query = RowQuery(shards=range(shard, shard + 1), values=(("source_id", doc_id), ("kind", DOCUMENT)))
            table = self._ledger.read(part, query, ["idempotency_key", "revision"])
            if table is not None and table.num_rows:
                fresh = pc.not_equal(pc.fill_null(table.column("revision"), ""), PURGED)
                plain = pc.is_in(table.column("idempotency_key"), pa.array(sorted(plain_keys), pa.string()))
                if pc.any(pc.and_(fresh, pc.invert(plain))).as_py():
                    return True
        for key in requests:
            if key_from_text(key)[0] in _range(part):
                table = self._ledger.read(
                    part, RowQuery(shards=_shards_of(key), values=(("idempotency_key", key),)), ["payload_hash"]
                )
                if table is not None and pc.any(pc.not_equal(table.column("payload_hash"), NO_FINGERPRINT)).as_py():
                    return True
        return False

    def _has_undrained_rows(self, doc_id: str, shard: int, plain_keys: frozenset[str], requests: set[str]) -> bool:
        """Whether rows were written meanwhile that have to be replaced, too."""
        for each in sorted({shard, *(key_from_text(key)[0] for key in requests)}):
            for row in self._fences.rows(0, each):
                if _is_about(row, doc_id, plain_keys, requests):
                    return True
        return False


def _is_about(row: Row, doc_id: str, plain_keys: frozenset[str], requests: set[str]) -> bool:
    key = row.key.hex()
    if key in requests:
        return row.fingerprint != bytes(FINGERPRINT_BYTES)
    context = json.loads(row.context)
    return (
        context.get("kind") == DOCUMENT
        and context.get("source_id") == doc_id
        and context.get("revision") != PURGED
        and key not in plain_keys
    )


def _tombstone(row: Row, purge: _Purge, plain_keys: frozenset[str], requests: set[str]) -> Row:
    if not _is_about(row, purge.doc_id, plain_keys, requests):
        return row
    context = json.loads(row.context)
    key = row.key
    if key.hex() in requests:
        for name in ("diff", "diff_size"):
            context.pop(name, None)
        effect_id = row.effect_id
    else:
        for name in ("characters", "saved", "diff", "diff_size"):
            context.pop(name, None)
        context["revision"] = PURGED
        key = key[:1] + hmac.digest(purge.secret, key, "sha256")
        effect_id = ""
    context = json.dumps(context, ensure_ascii=False, separators=(",", ":")).encode()
    return replace(row, key=key, fingerprint=bytes(FINGERPRINT_BYTES), effect_id=effect_id, context=context)


def _is_key(text: str) -> bool:
    try:
        return len(key_from_text(text)) == 33
    except Exception:  # noqa: BLE001  # an event id of the caller's, not a key
        return False


def _shards_of(key: str) -> range:
    shard = key_from_text(key)[0]
    return range(shard, shard + 1)


def _range(part: Part) -> Sequence[int]:
    return range(part.first_shard, part.last_shard + 1)
