"""The keys of the fence store: all of them, the one that a person named, and the current state of one."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ragfence.audit.timeline import EventType, Timeline, build_timelines
from ragfence.cli import output
from ragfence.core.decision_rows import Row
from ragfence.core.layout import State
from ragfence.core.operations import KEY_BYTES, Operation
from ragfence.core.records import KeyRecord
from ragfence.engine.commits import Commit
from ragfence.errors import ValidationError
from ragfence.fence import Fence
from ragfence.stores.fences import FenceStore, Scanner, all_of

LEAST_DIGITS = 8
SHARDS = 64
_HEX = re.compile(rf"[0-9a-f]{{{LEAST_DIGITS},{2 * KEY_BYTES}}}")


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A record of the fence store, without its result, which may be large."""

    key: bytes
    state: State
    kind: str
    attempt: int
    owner: str
    error: str
    fence: str
    effect_id: str
    first_seen_ms: int
    when_ms: int
    """The end of the lease while the key is held, afterwards the time at which it was released or sealed."""
    expires_ms: int | None
    source_id: str = ""
    """Set only if it was looked up in the decision rows."""

    @classmethod
    def of(cls, key: bytes, record: KeyRecord, expires_ms: int | None, source_id: str = "") -> StoredKey:
        return cls(
            key,
            record.state,
            record.kind,
            record.attempt,
            record.owner,
            record.error,
            str(record.fence),
            record.effect_id,
            record.first_seen_ms,
            record.when_ms,
            expires_ms,
            source_id,
        )

    @property
    def holds(self) -> bool:
        """It has a lease, which may have expired."""
        return self.state in (State.HELD, State.LOCKED)

    @property
    def pending(self) -> bool:
        return self.state in (State.HELD, State.RELEASED)


def scan_keys(fences: Scanner, shard: int | None = None) -> Iterator[StoredKey]:
    """Yields every record once. A server may return a key twice while it resizes its hash table."""
    seen: set[bytes] = set()
    for found in all_of(fences, shard):
        if found.key not in seen:
            seen.add(found.key)
            yield StoredKey.of(found.key, found.record, found.expires_ms)


class SourceFilter:
    """Selects the rows of a source by its source_id, as callers write it."""

    def __init__(self, source_id: str) -> None:
        self.source_id = unicodedata.normalize("NFC", source_id)
        self._json = json.dumps(self.source_id, ensure_ascii=False).encode(errors="replace")

    def matches(self, row: Row) -> bool:
        # The bytes are searched first, because parsing every context would take most of the time.
        return self._json in row.context and json.loads(row.context).get("source_id") == self.source_id


@dataclass(frozen=True, slots=True)
class CurrentState:
    """The current state of a key."""

    record: KeyRecord | None
    expires_ms: int | None
    commit: Commit | None
    result_bytes: int | None
    """None if the result is in an object that does not exist."""
    ready: bool
    """False if the shard must be hydrated first, so that its records are unknown."""


def find_timelines(fence: Fence, text: str, *, every: bool = False) -> list[Timeline]:
    """The timelines of a key, of a unique prefix of one, or of all keys of a source_id.

    If the text is both a source_id and a prefix of a key, the source_id wins.

    Raises:
        ValidationError: If there is no such key or source.
    """
    prefix = _as_prefix(text)
    of_source, of_prefix = _rows_about(fence, text, prefix)
    if prefix is not None and len(prefix) == 2 * KEY_BYTES:
        return [_timeline(bytes.fromhex(prefix), of_prefix, every)]
    if of_source:
        return build_timelines(of_source, every=every)
    if prefix is not None:
        key = _only(prefix, {row.key for row in of_prefix} | _stored_keys(fence.inspector.fences, prefix))
        return [_timeline(key, [row for row in of_prefix if row.key == key], every)]
    raise ValidationError(
        f"there is no key and no source_id {text!r}",
        hint="give a whole source_id, a key, or at least "
        f"{LEAST_DIGITS} hex digits of a key; `ragfence keys` lists them. Rows of long ago may have expired",
    )


def find_key(fence: Fence, text: str) -> bytes:
    """The key for a text. Nothing is guessed, because what is done to the key cannot be undone."""
    prefix = _as_prefix(text)
    if prefix is None:
        raise ValidationError(
            f"{text!r} is not a key or the beginning of one",
            hint=f"give a key or at least {LEAST_DIGITS} hex digits of it; `ragfence explain SOURCE_ID` shows the keys",
        )
    if len(prefix) == 2 * KEY_BYTES:
        return bytes.fromhex(prefix)
    in_rows = {row.key for row in output.track(fence.audit.rows(), "reading rows") if row.key.hex().startswith(prefix)}
    return _only(prefix, in_rows | _stored_keys(fence.inspector.fences, prefix))


def operation_of(fence: Fence, timeline: Timeline) -> Operation | None:
    """The operation of a timeline, or None if its rows do not contain enough of it."""
    if not timeline.source_id or not timeline.kind:
        return None
    operation = Operation(
        kind=timeline.kind,
        source_type=timeline.source_type,
        source_id=timeline.source_id,
        revision=timeline.revision,
        index_hash=timeline.index_hash,
        action=timeline.action,
        sequence=int(timeline.sequence) if timeline.sequence else None,
        tenant=fence.tenant,
    )
    return operation if operation.key.hex() == timeline.key else None


def current_state(fence: Fence, timeline: Timeline) -> CurrentState:
    """Reads the record and the commit of a key."""
    key, operation = bytes.fromhex(timeline.key), operation_of(fence, timeline)
    now = fence.inspector.key_state(key, operation)
    outcome = now.record if now.record is not None and now.record.ended else now.commit
    return CurrentState(
        now.record,
        _expiry(fence.inspector.fences, timeline, key, now.record) if now.own else None,
        now.commit,
        fence.inspector.result_size(outcome.result) if outcome else None,
        ready=now.ready,
    )


def _as_prefix(text: str) -> str | None:
    lowered = text.strip().lower()
    return lowered if _HEX.fullmatch(lowered) and int(lowered[:2], 16) < SHARDS else None


def _rows_about(fence: Fence, text: str, prefix: str | None) -> tuple[list[Row], list[Row]]:
    """The rows of the source, and those of keys with the prefix, in one pass over all rows."""
    source = SourceFilter(text)
    of_source: list[Row] = []
    of_prefix: list[Row] = []
    for row in output.track(fence.audit.rows(), "reading rows"):
        if prefix is not None and row.key.hex().startswith(prefix):
            of_prefix.append(row)
        if source.matches(row):
            of_source.append(row)
    return of_source, of_prefix


def _timeline(key: bytes, rows: Sequence[Row], every: bool) -> Timeline:
    timelines = build_timelines(rows, every=every)
    return timelines[0] if timelines else Timeline(key.hex())


def _stored_keys(fences: Scanner, prefix: str) -> set[bytes]:
    """Keys with a record. Their rows may have expired before it."""
    found = output.track(fences.scan(int(prefix[:2], 16)), "reading records")
    return {stored.key for stored in found if stored.key.hex().startswith(prefix)}


def _only(prefix: str, keys: Iterable[bytes]) -> bytes:
    found = sorted(keys)
    if not found:
        raise ValidationError(f"no key begins with {prefix}", hint="`ragfence keys` lists the keys")
    if len(found) > 1:
        shown = "".join(f"\n  {key.hex()}" for key in found[:10])
        raise ValidationError(f"{len(found)} keys begin with {prefix}:{shown}", hint="give more of its digits")
    return found[0]


def _expiry(fences: FenceStore, timeline: Timeline, key: bytes, record: KeyRecord | None) -> int | None:
    """When the record expires. The row of its seal contains this; otherwise the store is searched."""
    if record is None:
        return None
    for event in timeline.events:
        sealed = event.what in (EventType.SEALED, EventType.FAILED, EventType.HEALED) and event.expires_ms
        if sealed and record.ended and event.ts_ms == record.when_ms:
            return event.expires_ms
    for found in output.track(fences.scan(key[0]), "reading records"):
        if found.key == key:
            return found.expires_ms
    return None
