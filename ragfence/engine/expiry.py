"""Expiry: removes data past its TTL, from the fence store and from the object store.

A key is remembered for the `ttl` of its kind, counted from its first seal, and longer where that is cheaper to prove
safe. A call reads a bounded number of objects, and returns where the next one continues. Per key:

    read the commit -> claim the key -> read it again -> `ended` row -> still ours? -> DELETE -> release the key

The claim is an ordinary one, so no other caller heals or runs the key meanwhile. Anything that the fence store still
holds of the key (a record, a lease, the head of its source) protects its objects. A purger that is killed leaves a
lease that expires together with its record, and either the whole commit, which the next caller heals, or none: the key
is new.

**Sequences.** The highest sequence of a source makes older events `stale`, so it is removed last:

- A lower key decides nothing any more: a claim with its sequence is `stale`, with or without its commit. It is removed
  once it has expired. It is not claimed: the claim would take the one lease of a source that is in use, and could be
  ended only by a pending record that stays, or by moving the head.
- The highest is removed when it is the last object of its source, under a claim that holds the whole source.
- `<key>@<sequence>` is removed after its commit, or earlier, once there is a higher one. A mark has no time of its own:
  the object store's clock counts. A commit and its mark must fit the limit of a call, so the limit is 2 or more.

**A purger that freezes** between its last check of the lease and its DELETE deletes what is stored when it wakes up:
possibly the commit that a successor has healed (past its promised time), or even that of a new life. So a purger that
finds its lease gone after the DELETE restores what the fence store has sealed. If it dies before that, the record still
answers; only the loss of the fence store during that life would let the effect happen again.

Results that are objects of their own are kept: they are named by their content, so a commit in progress may be about to
refer to the same object.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ragfence.core.decision_rows import Row
from ragfence.core.decisions import Claim, Granted, HeldRecords, LeaseRef, Mode, NotReadyVerdict, Verdict
from ragfence.core.layout import END_POSITION, TOKEN_BYTES, RowKind
from ragfence.core.operations import FenceNumber
from ragfence.core.policy import KindRules, Policy
from ragfence.core.records import KeyRecord
from ragfence.engine.commits import Commit, CommitPage, KeyCommits
from ragfence.engine.leases import Lease, heartbeat
from ragfence.engine.notes import NotePlace
from ragfence.engine.requests import slot_of
from ragfence.engine.runner import RunnerStores
from ragfence.errors import FormatCorrupt, FormatTooNew, LeaseLost, TransientError
from ragfence.stores.fences import FenceStore, Lookup

EXPIRED = "EXPIRED"

PERFORMED_MS = 60_000
"""The least age of a note that is purged: the effect of a younger one may be running, and removes it itself."""

AT_ONCE_MS = 1
"""How long a key that a purger releases is remembered: its record holds the payload of the life that has ended."""


@dataclass(frozen=True, slots=True)
class Purged:
    records: int
    """of the fence store; Redis expires its own automatically"""
    objects: int
    scanned: int
    after: str
    """where the next call continues; empty at the end"""


@dataclass(frozen=True, slots=True)
class _Aged:
    """A key that has expired, as far as the object store shows."""

    kept: KeyCommits
    commit: Commit | None
    """None: there are only marks, because a purger was cut off after the commit, or the page begins after it"""
    rules: KindRules

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.kept.key)

    @property
    def top(self) -> tuple[int, str] | None:
        """The highest sequence of the key; the key itself makes the order total. None: it has no sequence."""
        known = [mark.sequence for mark in self.kept.marks]
        if self.commit is not None and self.commit.sequence is not None:
            known.append(self.commit.sequence)
        return (max(known), self.kept.key) if known else None

    @property
    def lookup(self) -> Lookup:
        if self.top is None:
            return Lookup(self.key)
        return Lookup(self.key, Mode.SEQUENCED, slot_of(self.kept.kind, self.kept.source))


class Expiry:
    """Removes the expired commits and notes of one tenant."""

    def __init__(self, fences: FenceStore, backing: RunnerStores, policy: Policy, *, owner: str, run_id: str) -> None:
        self._fences = fences
        self._commits = backing.commits
        self._notes = backing.notes
        self._hydrator = backing.hydrator
        self._policy = policy
        self._owner = owner
        self._run_id = run_id

    def purge_next(self, records: int, limit: int, after: str) -> Purged:
        """Purges among the next `limit` objects after `after`: commits first, then notes."""
        removed = scanned = 0
        if not after.startswith(self._notes.root):
            page, removed = self.purge(limit, after)
            scanned, after = page.scanned, page.after
            if after:
                return Purged(records, removed, scanned, after)
            if scanned >= limit:
                return Purged(records, removed, scanned, self._notes.root)
        notes = self._notes.page("" if after == self._notes.root else after, limit - scanned)
        removed += self._purge_notes(notes.notes)
        return Purged(records, removed, scanned + notes.scanned, notes.after)

    def _purge_notes(self, notes: Sequence[NotePlace]) -> int:
        """Removes notes that a commit made obsolete, and those of keys without a retry during the TTL of their kind."""
        now_ms = self._fences.now_ms()
        notes = [note for note in notes if note.entry.modified_ms + PERFORMED_MS <= now_ms]
        if not notes:
            return 0
        over = [note for note in notes if self._commits.exists(note.kind, note.source, note.key)]
        if left := [note for note in notes if note not in over and self._is_note_over(note, now_ms)]:
            self._hydrator.ensure_ready()
            lookups = [
                Lookup(bytes.fromhex(note.key), Mode.SEQUENCED, slot_of(note.kind, note.source)) for note in left
            ]
            held = self._fences.read(lookups)
            over += [note for note, found in zip(left, held, strict=True) if not _holds_key(note.key, found)]
        self._notes.remove(over)
        return len(over)

    def _is_note_over(self, note: NotePlace, now_ms: int) -> bool:
        rules = self._policy.for_kind(note.kind)
        kept_ms = max(rules.ttl_ms, rules.pending_ttl_ms)
        return rules.ttl_ms > 0 and note.entry.modified_ms + kept_ms <= now_ms

    def _note_of(self, aged: _Aged) -> str:
        return self._notes.name_of(aged.kept.kind, aged.kept.source, aged.kept.key)

    def purge(self, limit: int, after: str) -> tuple[CommitPage, int]:
        """Purges a page of commits. Returns the page, and how many of its objects were removed."""
        page, now_ms = self._commits.page(after, limit), self._fences.now_ms()
        removed, aged = 0, []
        for shown in page.kept:
            kept = self._without_outdone_marks(shown, now_ms)
            removed += len(shown.entries) - len(kept.entries)
            if found := self._aged(kept, now_ms):
                aged.append(found)
        if aged:
            self._hydrator.ensure_ready()  # a store that is not ready does not show what it protects
            held = self._fences.read([key.lookup for key in aged])
            by_source = groupby(zip(aged, held, strict=True), lambda pair: (pair[0].kept.kind, pair[0].kept.source))
            removed += sum(self._purge_source(list(members)) for _, members in by_source)
            # Until the released keys are forgotten: the next caller may come with any payload.
            time.sleep(2 * AT_ONCE_MS / 1000)
        return page, removed

    def _without_outdone_marks(self, kept: KeyCommits, now_ms: int) -> KeyCommits:
        """Removes the marks of a key except the highest, which alone counts."""
        lower = kept.marks if kept.goes_on else kept.marks[:-1]
        outdone = [mark for mark in lower if self._is_over(kept.kind, mark.entry.modified_ms, now_ms)]
        self._commits.remove([mark.entry for mark in outdone])
        return replace(kept, marks=tuple(mark for mark in kept.marks if mark not in outdone))

    def _aged(self, kept: KeyCommits, now_ms: int) -> _Aged | None:
        # An object that the object store dates as recent is not worth reading, whatever its clock.
        if kept.goes_on or not all(self._is_over(kept.kind, entry.modified_ms, now_ms) for entry in kept.entries):
            return None
        try:
            commit = self._commits.of(kept)
        except (FormatCorrupt, FormatTooNew):
            return None  # what cannot be read is not deleted; a claim of the key raises
        gone = kept.commit is not None and commit is None
        if gone or (commit is not None and not self._is_over(kept.kind, commit.sealed_at_ms, now_ms)):
            return None
        return _Aged(kept, commit, self._policy.for_kind(kept.kind))

    def _purge_source(self, members: list[tuple[_Aged, HeldRecords]]) -> int:
        removed = 0
        tops = [aged.top for aged, _ in members if aged.top is not None]
        for aged, held in members:
            if _known(aged, held):
                continue
            if aged.top is None:
                removed += self._end(aged)
            elif aged.top != max(tops):
                removed += self._drop(aged)
        for aged, held in members:  # once the others are gone
            if aged.top is not None and aged.top == max(tops) and not _known(aged, held):
                removed += self._purge_highest(aged, aged.top, held)
        return removed

    def _purge_highest(self, aged: _Aged, top: tuple[int, str], held: HeldRecords) -> int:
        """Purges the highest key of its source on this page. A younger key, or another page, may have a higher one."""
        try:
            other = self._commits.find_other(aged.kept)
        except (FormatCorrupt, FormatTooNew):
            return 0
        if other is None:
            return self._end(aged) if held.source is None else 0
        sequence, key = other
        return self._drop(aged) if sequence is not None and (sequence, key) > top else 0

    def _drop(self, aged: _Aged) -> int:
        """Removes a key without a claim: a higher sequence stays, so this one answers no caller unless it is raised."""
        (held,) = self._fences.read([aged.lookup])
        if _known(aged, held):
            return 0
        self._write_end(aged)
        self._commits.remove(aged.kept.entries, self._note_of(aged))
        return 0 if self._restore(aged) else len(aged.kept.entries)

    def _end(self, aged: _Aged) -> int:
        """Removes a key under a claim, so that no other caller heals or runs it meanwhile."""
        if aged.commit is None:
            return self._drop(aged)  # marks alone name no payload to claim with
        asked_at = time.monotonic()
        claim = self._claim_of(aged, aged.commit)
        granted = self._claim(claim)
        if not isinstance(granted, Granted):
            return 0
        lease = self._lease_of(claim, granted, aged.rules, asked_at)
        heartbeat.add(self._fences, lease)
        sent = False
        try:
            if self._is_unchanged(aged):
                self._write_end(aged, granted.record.fence)
                lease.check()
                sent = True
                self._commits.remove(aged.kept.entries, self._note_of(aged))
        except LeaseLost:
            pass  # another owner has the key by now
        except BaseException:
            # A DELETE without an answer may arrive late. No commit may come before it: the lease expires.
            if not sent:
                with contextlib.suppress(TransientError):
                    self._release(claim, granted, aged.rules)
            raise
        finally:
            heartbeat.remove(lease)
        ours_to_the_end = self._release(claim, granted, aged.rules)
        if not sent or (not ours_to_the_end and self._restore(aged)):
            return 0
        return len(aged.kept.entries)

    def _is_unchanged(self, aged: _Aged) -> bool:
        if self._commits.of(aged.kept) != aged.commit:
            return False
        return aged.top is None or self._commits.find_other(aged.kept) is None

    def _restore(self, aged: _Aged) -> bool:
        """Restores the commit of an owner that sealed the key while it was deleted. Returns whether there is one."""
        (held,) = self._fences.read([aged.lookup])
        if held.record is None or not held.record.ended:
            return False
        sequence = aged.top[0] if aged.top else None
        if held.source and held.source.head and held.source.head.digest == aged.key[1:]:
            sequence = held.source.head.sequence
        self._commits.restore(aged.kept, Commit.of(aged.kept.key, held.record, sequence))
        return True

    def _write_end(self, aged: _Aged, fence: FenceNumber | None = None) -> None:
        if aged.commit is not None:
            ended, now_ms = aged.commit.record(), self._fences.now_ms()
            row = row_for_end(aged.key, ended, why=EXPIRED, now_ms=now_ms, context=self._context(aged), fence=fence)
            self._fences.record([row])

    def _claim_of(self, aged: _Aged, commit: Commit) -> Claim:
        """Makes an ordinary claim, but without a sequence: it must neither be `stale` nor move the head."""
        where = aged.lookup
        return Claim(
            key=where.key,
            mode=where.mode,
            source=where.source,
            fingerprint=bytes.fromhex(commit.fingerprint),
            token=os.urandom(TOKEN_BYTES),
            lease_ms=aged.rules.lease_ms,
            max_attempts=aged.rules.max_attempts,
            # No longer than the lease: the record of a killed purger must not outlive it. In a source it is stored with
            # the source, and the other TTL is that of a revision it replaces.
            pending_ttl_ms=aged.rules.lease_ms if where.mode is Mode.KEYED else aged.rules.pending_ttl_ms,
            source_ttl_ms=aged.rules.lease_ms,
            kind=aged.kept.kind,
            owner=self._owner,
            context=self._context(aged),
            row_on_conflict=False,
        )

    def _claim(self, claim: Claim) -> Verdict:
        while True:
            (verdict,) = self._fences.claim([claim])
            if not isinstance(verdict, NotReadyVerdict):
                return verdict
            self._hydrator.ensure_ready()

    def _lease_of(self, claim: Claim, granted: Granted, rules: KindRules, asked_at: float) -> Lease:
        return Lease(
            _ref(claim, granted, claim.pending_ttl_ms, claim.source_ttl_ms),
            fence=granted.record.fence,
            attempt=granted.record.attempt,
            takeover=granted.takeover,
            granted_at=asked_at,
            store_ms=granted.record.when_ms - claim.lease_ms,
            max_runtime_ms=rules.max_runtime_ms,
        )

    def _release(self, claim: Claim, granted: Granted, rules: KindRules) -> bool:
        """Releases the key. Returns False if another owner may have held it since the claim."""
        # A head that appeared in the meantime stays: a newer revision was sealed.
        source_ttl_ms = AT_ONCE_MS if granted.head is None else max(rules.ttl_ms, rules.pending_ttl_ms)
        (released,) = self._fences.release([_ref(claim, granted, AT_ONCE_MS, source_ttl_ms)], EXPIRED, refund=True)
        return released

    def _context(self, aged: _Aged) -> bytes:
        """Returns the caller's part of the rows. The source's id is unknown: object names hold only its digest."""
        values = {"kind": aged.kept.kind, "action": "purge", "owner": self._owner, "run_id": self._run_id}
        return json.dumps({name: text for name, text in values.items() if text}, ensure_ascii=False).encode()

    def _is_over(self, kind: str, since_ms: int, now_ms: int) -> bool:
        ttl_ms = self._policy.for_kind(kind).ttl_ms
        return ttl_ms > 0 and since_ms + ttl_ms <= now_ms


def _known(aged: _Aged, held: HeldRecords) -> bool:
    return _holds_key(aged.kept.key, held)


def _holds_key(key: str, held: HeldRecords) -> bool:
    """Whether the fence store still holds anything of this key."""
    if held.record is not None:
        return True
    places = (held.source.head, held.source.lease) if held.source else ()
    return any(place is not None and place.digest == bytes.fromhex(key)[1:] for place in places)


def _ref(claim: Claim, granted: Granted, pending_ttl_ms: int, source_ttl_ms: int) -> LeaseRef:
    return LeaseRef(
        key=claim.key,
        token=claim.token,
        mode=claim.mode,
        source=claim.source,
        lease_ms=claim.lease_ms,
        pending_ttl_ms=pending_ttl_ms,
        source_ttl_ms=source_ttl_ms,
        epoch=granted.record.fence.epoch,
        context=claim.context,
    )


def row_for_end(
    key: bytes, ended: KeyRecord, *, why: str, now_ms: int, context: bytes, fence: FenceNumber | None = None
) -> Row:
    """Returns the row that ends a life. It is written before anything is removed, so a crash leaves one life."""
    return Row(
        token=os.urandom(TOKEN_BYTES),
        position=END_POSITION,
        ts_ms=now_ms,
        kind=RowKind.ENDED,
        key=key,
        fingerprint=ended.fingerprint,
        attempt=ended.attempt,
        # That of the life that ends, unless a later one is known: it orders rows of the same millisecond.
        fence=fence or ended.fence,
        first_seen_ms=ended.first_seen_ms,
        winner=ended.token,
        error_code=why,
        context=context,
    )
