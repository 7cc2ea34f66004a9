"""New attempts for many keys at once: a query selects them, and each call releases a bounded number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from ragfence.core.decisions import HeldRecords, LeaseRef, Mode
from ragfence.core.layout import NO_TOKEN, State
from ragfence.core.policy import Policy
from ragfence.core.records import KeyRecord
from ragfence.errors import ValidationError
from ragfence.stores.fences import FenceStore, Lookup, Scanned, all_of

STATES = {"quarantined": State.QUARANTINED, "released": State.RELEASED}
BATCH = 500
"""keys in one round trip"""


class ReleasedKey(NamedTuple):
    """A key, and its state before it was released."""

    key: str
    kind: str
    attempt: int
    error_code: str


@dataclass(frozen=True, slots=True)
class Released:
    keys: tuple[ReleasedKey, ...]
    more: bool
    """the limit was reached, and more keys match"""


@dataclass(frozen=True, slots=True)
class ReleaseQuery:
    """Selects pending keys. `error` is a shell pattern for the code of the last error."""

    state: str = "quarantined"
    error: str = "*"
    kind: str | None = None

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValidationError(
                f"{self.state!r} is not a state that a query can release", hint=f"use one of: {', '.join(STATES)}"
            )

    def matches(self, record: KeyRecord) -> bool:
        return (
            record.state is STATES[self.state]
            and record.attempt > 0  # else it has all its attempts
            and (self.kind is None or record.kind == self.kind)
            and fnmatchcase(record.error, self.error)
        )


def release_matching(
    fences: FenceStore, policy: Policy, query: ReleaseQuery, *, limit: int, dry_run: bool = False
) -> Released:
    """Allows new attempts for up to `limit` keys. A dry run only returns them."""
    if limit < 1:
        raise ValidationError(f"limit must be at least 1, not {limit}")
    found: dict[bytes, Scanned] = {}
    more = False
    for scanned in all_of(fences):
        if query.matches(scanned.record) and scanned.key not in found:
            if len(found) == limit:
                more = True
                break
            found[scanned.key] = scanned
    chosen = list(found.values())
    if not dry_run:
        chosen = [each for part in _parts(chosen) for each in _released(fences, policy, query, part)]
    return Released(tuple(_released_key(each) for each in chosen), more)


def _released(fences: FenceStore, policy: Policy, query: ReleaseQuery, part: Sequence[Scanned]) -> list[Scanned]:
    refs = [_ref(policy, each) for each in part]
    # Read again: a key that was released meanwhile may be in progress, and must not lose its lease.
    held = fences.read([Lookup(ref.key, ref.mode, ref.source) for ref in refs])
    still = [(each, ref) for each, ref, now in zip(part, refs, held, strict=True) if _matches(query, each, now)]
    done = fences.reset_attempts([ref for _, ref in still]) if still else []
    return [each for (each, _), released in zip(still, done, strict=True) if released]


def _matches(query: ReleaseQuery, each: Scanned, now: HeldRecords) -> bool:
    lease = now.source.lease if now.source else None
    record = now.record if not each.source else (lease.record if lease and lease.digest == each.key[1:] else None)
    return record is not None and query.matches(record)


def _ref(policy: Policy, each: Scanned) -> LeaseRef:
    mode, rules = Mode.KEYED, policy.for_kind(each.record.kind)
    if each.source:
        mode = Mode.DOCUMENT if each.record.kind == "document" else Mode.SEQUENCED
    if mode is Mode.DOCUMENT:  # kept for ever
        return LeaseRef(each.key, NO_TOKEN, mode, each.source)
    return LeaseRef(each.key, NO_TOKEN, mode, each.source, rules.lease_ms, rules.pending_ttl_ms, rules.source_ttl_ms)


def _released_key(each: Scanned) -> ReleasedKey:
    return ReleasedKey(each.key.hex(), each.record.kind, each.record.attempt, each.record.error)


def _parts(chosen: Sequence[Scanned]) -> Iterator[Sequence[Scanned]]:
    return (chosen[at : at + BATCH] for at in range(0, len(chosen), BATCH))
