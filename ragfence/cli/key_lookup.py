"""From what a person typed to a key, and from a key to everything that is known of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ragfence.audit.timeline import EventType, Timeline, tell
from ragfence.cli import output
from ragfence.cli.records import NamedSource
from ragfence.core.decision_rows import Row
from ragfence.core.operations import KEY_BYTES, Operation
from ragfence.core.records import KeyRecord
from ragfence.engine.commits import Commit
from ragfence.errors import ValidationError
from ragfence.fence import Fence
from ragfence.stores.fences import FenceStore, Scanner

LEAST_DIGITS = 8
SHARDS = 64
_HEX = re.compile(rf"[0-9a-f]{{{LEAST_DIGITS},{2 * KEY_BYTES}}}")


@dataclass(frozen=True, slots=True)
class KeyPresent:
    """How a key stands now."""

    record: KeyRecord | None
    expires_ms: int | None
    commit: Commit | None
    result_bytes: int | None
    """None: the result is an object that is not there"""
    ready: bool
    """False: the shard does not answer before it is hydrated, so nothing can be said of its records"""


def find_stories(fence: Fence, text: str, *, every: bool = False) -> list[Timeline]:
    """Of a key, of a unique beginning of one, or of all keys of a source_id; a source_id that is meant literally wins.

    Raises when nothing is known by that name.
    """
    prefix = _as_prefix(text)
    of_source, of_prefix = _rows_about(fence, text, prefix)
    if prefix is not None and len(prefix) == 2 * KEY_BYTES:
        return [_told(bytes.fromhex(prefix), of_prefix, every)]
    if of_source:
        return tell(of_source, every=every)
    if prefix is not None:
        key = _only(prefix, {row.key for row in of_prefix} | _held_keys(fence.inspector.fences, prefix))
        return [_told(key, [row for row in of_prefix if row.key == key], every)]
    raise ValidationError(
        f"nothing is known of {text!r}",
        hint="give a source_id, a key, or at least "
        f"{LEAST_DIGITS} hex digits of one; `ragfence keys` lists them. Older rows may be gone",
    )


def find_key(fence: Fence, text: str) -> bytes:
    """The key that is meant; what is done to it cannot be undone, so nothing is guessed."""
    prefix = _as_prefix(text)
    if prefix is None:
        raise ValidationError(
            f"{text!r} is no key, and no beginning of one",
            hint=f"give a key or at least {LEAST_DIGITS} hex digits of it; `ragfence explain SOURCE_ID` tells the keys",
        )
    if len(prefix) == 2 * KEY_BYTES:
        return bytes.fromhex(prefix)
    named = {row.key for row in output.counted(fence.audit.rows(), "reading rows") if row.key.hex().startswith(prefix)}
    return _only(prefix, named | _held_keys(fence.inspector.fences, prefix))


def operation_of(fence: Fence, story: Timeline) -> Operation | None:
    """The operation behind a story; None when no row told enough of it."""
    if not story.source_id or not story.kind:
        return None
    operation = Operation(
        kind=story.kind,
        source_type=story.source_type,
        source_id=story.source_id,
        revision=story.revision,
        index_hash=story.index_hash,
        action=story.action,
        sequence=int(story.sequence) if story.sequence else None,
        tenant=fence.tenant,
    )
    return operation if operation.key.hex() == story.key else None


def present(fence: Fence, story: Timeline) -> KeyPresent:
    key, operation = bytes.fromhex(story.key), operation_of(fence, story)
    now = fence.inspector.key_state(key, operation)
    outcome = now.record if now.record is not None and now.record.ended else now.commit
    return KeyPresent(
        now.record,
        _expiry(fence.inspector.fences, story, key, now.record) if now.own else None,
        now.commit,
        fence.inspector.result_size(outcome.result) if outcome else None,
        ready=now.ready,
    )


def _as_prefix(text: str) -> str | None:
    lowered = text.strip().lower()
    return lowered if _HEX.fullmatch(lowered) and int(lowered[:2], 16) < SHARDS else None


def _rows_about(fence: Fence, text: str, prefix: str | None) -> tuple[list[Row], list[Row]]:
    """One pass over the rows: those of the source, and those of keys that begin like this."""
    named = NamedSource(text)
    of_source: list[Row] = []
    of_prefix: list[Row] = []
    for row in output.counted(fence.audit.rows(), "reading rows"):
        if prefix is not None and row.key.hex().startswith(prefix):
            of_prefix.append(row)
        if named.has(row):
            of_source.append(row)
    return of_source, of_prefix


def _told(key: bytes, rows: Sequence[Row], every: bool) -> Timeline:
    stories = tell(rows, every=every)
    return stories[0] if stories else Timeline(key.hex())


def _held_keys(fences: Scanner, prefix: str) -> set[bytes]:
    """Keys with a record but without a row: rows may be gone earlier."""
    found = output.counted(fences.scan(int(prefix[:2], 16)), "reading records")
    return {held.key for held in found if held.key.hex().startswith(prefix)}


def _only(prefix: str, keys: Iterable[bytes]) -> bytes:
    found = sorted(keys)
    if not found:
        raise ValidationError(f"no key begins with {prefix}", hint="`ragfence keys` lists those that are held")
    if len(found) > 1:
        shown = "".join(f"\n  {key.hex()}" for key in found[:10])
        raise ValidationError(f"{len(found)} keys begin with {prefix}:{shown}", hint="give more of its digits")
    return found[0]


def _expiry(fences: FenceStore, story: Timeline, key: bytes, record: KeyRecord | None) -> int | None:
    """When the record goes. The row of its seal knows; for others the store has to be searched."""
    if record is None:
        return None
    for event in story.events:
        sealed = event.what in (EventType.SEALED, EventType.FAILED, EventType.HEALED) and event.expires_ms
        if sealed and record.ended and event.ts_ms == record.when_ms:
            return event.expires_ms
    for found in output.counted(fences.scan(key[0]), "reading records"):
        if found.key == key:
            return found.expires_ms
    return None
