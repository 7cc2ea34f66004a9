"""The protocol, as pure functions over values. Every store must agree with them.

    apply_claim    who may perform an operation, and what everyone else is told
    apply_seal     the end of a lease: compare the token, then act; sealed is terminal
    apply_renewal    a longer lease for its owner
    apply_release  the end of a lease without an outcome
    apply_attempt_reset   somebody decided that a stuck or quarantined key gets new attempts

Each takes what the store holds and returns the answer with the `Change` to write, or None when nothing changes.
`SqliteFences` calls them inside a transaction; `lua/*.lua` is the same in Lua, held to it by a property test.

Three modes of operations share them. KEYED: one record per key. SEQUENCED: a record per key, and one per source with
the top sequence and one lease. DOCUMENT: one record per source with head and lease; superseded receipts are parked.
The fourth is no operation. LOCK: a record for as long as somebody holds it; nothing is sealed, no attempts are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

from ragfence.core.layout import LOCKED, NO_METADATA, NO_TOKEN, State
from ragfence.core.operations import FenceNumber
from ragfence.core.records import Head, KeyRecord, SourceLease, SourceRecord

QUARANTINED = "QUARANTINED"


class Mode(IntEnum):
    KEYED = 0
    SEQUENCED = 1
    DOCUMENT = 2
    LOCK = 3


KEYED, SEQUENCED, DOCUMENT, LOCK = Mode
"""As plain names: in Python 3.11, reading a member of an enum costs a function call for every record of a batch."""


class Claim(NamedTuple):
    """An attempt to become the owner of the operation."""

    key: bytes
    fingerprint: bytes
    token: bytes
    mode: Mode = Mode.KEYED
    source: bytes = b""
    sequence: int | None = None
    metadata_hash: bytes = NO_METADATA
    retract: bool = False
    """a move to "no live revision"; `key` is then the key of the retraction"""
    lease_ms: int = 30_000
    max_attempts: int = 5
    pending_ttl_ms: int = 0
    """how long a pending record is kept; 0: permanently, as for documents"""
    source_ttl_ms: int = 0
    kind: str = ""
    owner: str = ""
    payload: bytes = b""
    position: int = 0
    """which call of this token it is: with the token it names the decision row"""
    waited_ms: int = 0
    context: bytes = b""
    """the part of the decision row that only the caller knows"""
    row_on_conflict: bool = True

    @property
    def digest(self) -> bytes:
        return self.key[1:]


class HeadQuery(NamedTuple):
    """Whether this is the live head of its document: the question of a claim, without becoming the owner."""

    key: bytes
    source: bytes
    fingerprint: bytes
    metadata_hash: bytes
    sequence: int | None
    token: bytes
    context: bytes


@dataclass(frozen=True, slots=True)
class HeldRecords:
    """What is stored for a claim, without void records of an earlier epoch."""

    record: KeyRecord | None = None
    source: SourceRecord | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """What a store must write, all or nothing."""

    record: KeyRecord | None = None
    drop_record: bool = False
    source: SourceRecord | None = None
    set_aside: tuple[bytes, KeyRecord] | None = None
    """a pending record that lost its place in the source, written under its own key unless one is there"""
    park: tuple[bytes, KeyRecord] | None = None
    """the receipt of the document revision that was superseded"""


class Granted(NamedTuple):
    record: KeyRecord
    takeover: bool = False
    prior: KeyRecord | None = None
    """the key was sealed before: its receipt is the answer, only the head has to move"""
    head: Head | None = None
    """the head that this move would follow"""


class Replay(NamedTuple):
    record: KeyRecord | None
    """None: there was nothing to retract"""


@dataclass(frozen=True, slots=True)
class ConflictVerdict:
    record: KeyRecord | None
    """None: the sequence is taken by another revision"""


@dataclass(frozen=True, slots=True)
class InFlightVerdict:
    until_ms: int
    record: KeyRecord
    quarantined: bool = False


@dataclass(frozen=True, slots=True)
class StaleVerdict:
    newest: int


@dataclass(frozen=True, slots=True)
class NotReadyVerdict:
    """The store is empty, restored or restarted: it must be hydrated before it may answer."""


Verdict = Granted | Replay | ConflictVerdict | InFlightVerdict | StaleVerdict | NotReadyVerdict


@dataclass(frozen=True, slots=True)
class _Grant:
    attempt: int
    first_seen_ms: int
    takeover: bool
    prior: KeyRecord | None
    error: str


@dataclass(frozen=True, slots=True)
class _Quarantine:
    record: KeyRecord
    unsettled: bool


def decide(held: HeldRecords, claim: Claim, now_ms: int) -> Verdict | _Grant | _Quarantine:
    """What a claim gets, given what the store holds."""
    if claim.mode is LOCK:
        return _decide_lock(held.record, claim, now_ms)
    head = held.source.head if held.source else None
    lease = held.source.lease if held.source else None
    if _older(claim.sequence, head):
        assert head is not None
        assert head.sequence is not None
        return StaleVerdict(head.sequence)
    if head and head.digest == claim.digest and head.record:
        known: KeyRecord | None = head.record
    elif lease and lease.digest == claim.digest and not (held.record and held.record.ended):
        known = lease.record
    else:
        known = held.record
    if known and known.state is LOCKED:
        return ConflictVerdict(known)
    mine = lease.record if lease and lease.digest == claim.digest else None
    if (known and known.fingerprint != claim.fingerprint) or (mine and mine.fingerprint != claim.fingerprint):
        return ConflictVerdict(known if known and known.fingerprint != claim.fingerprint else mine)
    if head and claim.sequence is not None and claim.sequence == head.sequence and head.digest != claim.digest:
        return ConflictVerdict(None)
    match claim.mode:
        case Mode.KEYED:
            return _decide_keyed(known, claim, now_ms)
        case Mode.SEQUENCED:
            return _decide_sequenced(head, lease, known, claim, now_ms)
        case Mode.DOCUMENT:
            return _decide_document(head, lease, held.record, claim, now_ms)
    raise ValueError(f"{claim.mode!r} is not a mode that this ragfence knows")


def _decide_lock(known: KeyRecord | None, claim: Claim, now_ms: int) -> Verdict | _Grant:
    """Nobody holds it, or its lease has expired: the next one gets it, however often that happened before."""
    if known is None:
        return _Grant(1, now_ms, False, None, "")
    if known.state is not LOCKED:
        return ConflictVerdict(known)
    if known.token == claim.token:  # our own claim; its reply was lost
        return Granted(known)
    if known.held_at(now_ms):
        return InFlightVerdict(known.when_ms, known)
    return _Grant(1, now_ms, True, None, "")


def _decide_keyed(known: KeyRecord | None, claim: Claim, now_ms: int) -> Verdict | _Grant | _Quarantine:
    if known is None:
        return _Grant(1, now_ms, False, None, "")
    if known.ended:
        return Replay(known)
    if known.state is State.HELD and known.token == claim.token:  # our own claim; its reply was lost
        return Granted(known)
    if known.held_at(now_ms):
        return InFlightVerdict(known.when_ms, known)
    return _next_attempt(known, claim, takeover=known.state is State.HELD, prior=None)


def _decide_sequenced(
    head: Head | None, lease: SourceLease | None, known: KeyRecord | None, claim: Claim, now_ms: int
) -> Verdict | _Grant | _Quarantine:
    sealed = known if known and known.ended else None
    if sealed and not _raises(claim.sequence, head):
        return Replay(sealed)
    if lease and lease.record.state is State.HELD:
        if lease.record.token == claim.token:
            return Granted(lease.record, prior=sealed, head=head)
        if lease.record.held_at(now_ms):  # one writer per source, whatever the revision
            return InFlightVerdict(lease.record.when_ms, lease.record)
    takeover = lease is not None and lease.record.state is State.HELD
    mine = lease.record if lease and lease.digest == claim.digest else known
    if mine is None or mine.ended:
        return _Grant(1, now_ms, takeover, sealed, "")
    return _next_attempt(mine, claim, takeover=takeover, prior=sealed)


def _decide_document(
    head: Head | None, lease: SourceLease | None, parked: KeyRecord | None, claim: Claim, now_ms: int
) -> Verdict | _Grant | _Quarantine:
    if lease and lease.record.state is State.HELD:
        if lease.record.token == claim.token:
            return Granted(lease.record, prior=_prior(head, parked, claim), head=head)
        if lease.record.held_at(now_ms):
            return InFlightVerdict(lease.record.when_ms, lease.record)
    # An expired lease may hide a committed row that was not sealed: even the current head must write a row then.
    unsettled = lease is not None and lease.may_hide_a_commit
    same = head.digest == claim.digest if head else claim.retract
    if same and not unsettled and not _raises(claim.sequence, head):
        if head is None:
            return Replay(None)
        if head.metadata_hash == claim.metadata_hash:
            return Replay(head.record)
    prior = _prior(head, parked, claim)
    if lease and lease.digest == claim.digest:
        return _next_attempt(lease.record, claim, takeover=unsettled, prior=prior)
    return _Grant(1, now_ms, unsettled, prior, "")


def _prior(head: Head | None, parked: KeyRecord | None, claim: Claim) -> KeyRecord | None:
    return head.record if head and head.digest == claim.digest else parked


def _next_attempt(
    before: KeyRecord, claim: Claim, *, takeover: bool, prior: KeyRecord | None
) -> InFlightVerdict | _Grant | _Quarantine:
    if before.state is State.QUARANTINED:
        return InFlightVerdict(0, before, quarantined=True)
    if before.attempt >= claim.max_attempts:
        return _Quarantine(before._replace(state=State.QUARANTINED), takeover)
    return _Grant(before.attempt + 1, before.first_seen_ms, takeover, prior, before.error)


def _older(sequence: int | None, head: Head | None) -> bool:
    return sequence is not None and head is not None and head.sequence is not None and sequence < head.sequence


def _raises(sequence: int | None, head: Head | None) -> bool:
    """A replay with a higher sequence must move the head: else 3:A, 5:A, 4:B would go back."""
    if sequence is None:
        return False
    return head is None or head.sequence is None or sequence > head.sequence


def apply_claim(
    held: HeldRecords, claim: Claim, now_ms: int, *, stamp: int, next_fence: Callable[[], FenceNumber]
) -> tuple[Verdict, Change | None]:
    answer = decide(held, claim, now_ms)
    if isinstance(answer, _Quarantine):
        verdict = InFlightVerdict(0, answer.record, quarantined=True)
        return verdict, _place(held, claim, answer.record, stamp, unsettled=answer.unsettled)
    if not isinstance(answer, _Grant):
        return answer, None
    record = KeyRecord(
        state=State.LOCKED if claim.mode is LOCK else State.HELD,
        fingerprint=claim.fingerprint,
        token=claim.token,
        fence=next_fence(),
        attempt=answer.attempt,
        first_seen_ms=answer.first_seen_ms,
        when_ms=now_ms + claim.lease_ms,
        kind=claim.kind,
        owner=claim.owner,
        error=answer.error,
        payload=claim.payload,
    )
    head = held.source.head if held.source else None
    # Only a seal settles a document. Taking it over and releasing it leaves it as unsettled as it was.
    unsettled = answer.takeover and claim.mode is Mode.DOCUMENT
    change = _place(held, claim, record, stamp, unsettled=unsettled)
    return Granted(record, answer.takeover, answer.prior, head), change


def _place(held: HeldRecords, claim: Claim, record: KeyRecord, stamp: int, *, unsettled: bool = False) -> Change:
    """Where a pending record belongs: under its key, or in the one lease of its source."""
    if claim.mode is KEYED or claim.mode is LOCK:
        return Change(record=record)
    head = held.source.head if held.source else None
    before = held.source.lease if held.source else None
    source = SourceRecord(stamp, head, SourceLease(claim.digest, record, unsettled))
    if claim.mode is Mode.DOCUMENT:
        return Change(source=source)
    # The fingerprint and the attempts of a revision that loses its place stay known under its own key.
    aside = (before.digest, before.record) if before and before.digest != claim.digest else None
    pending_copy = held.record is not None and not held.record.ended
    return Change(source=source, set_aside=aside, drop_record=pending_copy)


class Seal(NamedTuple):
    """The end of a lease with an outcome: it stores the receipt permanently."""

    key: bytes
    token: bytes
    fence: FenceNumber
    mode: Mode = Mode.KEYED
    source: bytes = b""
    failed: bool = False
    effect_id: str = ""
    result: bytes = b""
    error: str = ""
    sequence: int | None = None
    metadata_hash: bytes = NO_METADATA
    live: bool = True
    ttl_ms: int = 0
    source_ttl_ms: int = 0
    flags: int = 0
    waited_ms: int = 0
    context: bytes = b""
    duplicate: bool = False
    """the decision row says `duplicate`: the effect was found or had been done before"""
    winner: bytes = NO_TOKEN
    """the token of the attempt whose effect this is, when it is not the sealing one"""

    @property
    def digest(self) -> bytes:
        return self.key[1:]


class Sealed(NamedTuple):
    record: KeyRecord


@dataclass(frozen=True, slots=True)
class Fenced:
    """The token is not the current one. `record` is what is stored under the key, if anything."""

    record: KeyRecord | None


SealOutcome = Sealed | Fenced | NotReadyVerdict


def apply_seal(held: HeldRecords, seal: Seal, now_ms: int, *, epoch: int) -> tuple[SealOutcome, Change | None]:
    if seal.mode is LOCK:
        return Fenced(held.record), None
    if seal.fence.epoch != epoch:
        return Fenced(_standing(held, seal)), None
    if seal.mode is Mode.KEYED:
        return _seal_keyed(held.record, seal, now_ms)
    lease = held.source.lease if held.source else None
    owner = lease is not None and lease.digest == seal.digest and _holds(lease.record, seal.token)
    if not owner:
        standing = _standing(held, seal)
        repeated = standing is not None and standing.ended and standing.token == seal.token
        return (Sealed(standing) if repeated and standing else Fenced(standing)), None
    assert held.source is not None
    assert lease is not None
    record, head = _ended(lease.record, seal, now_ms), held.source.head
    # A move without a sequence keeps that of the head.
    sequence = seal.sequence if seal.sequence is not None else (head.sequence if head else None)
    if seal.mode is Mode.SEQUENCED:
        kept = held.record if held.record and held.record.ended else None
        moved = Head(seal.digest, True, sequence)
        source = SourceRecord(epoch, moved, None)
        return Sealed(kept or record), Change(record=None if kept else record, source=source)
    moved = Head(seal.digest, seal.live, sequence, seal.metadata_hash, record)
    superseded = head is not None and head.live and head.digest != seal.digest and head.record is not None
    return Sealed(record), Change(
        source=SourceRecord(epoch, moved, None),
        drop_record=held.record is not None,
        park=(head.digest, head.record) if superseded and head and head.record else None,
    )


def _seal_keyed(record: KeyRecord | None, seal: Seal, now_ms: int) -> tuple[SealOutcome, Change | None]:
    if record is None:  # a seal never creates a record: the one it belonged to was lost with its history
        return Fenced(None), None
    if record.ended:
        return (Sealed(record) if record.token == seal.token else Fenced(record)), None
    if not _holds(record, seal.token):
        return Fenced(record), None
    ended = _ended(record, seal, now_ms)
    return Sealed(ended), Change(record=ended)


def _standing(held: HeldRecords, seal: Seal) -> KeyRecord | None:
    head = held.source.head if held.source else None
    if head and head.digest == seal.digest and head.record:
        return head.record
    return held.record


def _holds(record: KeyRecord, token: bytes) -> bool:
    """The token decides, not the clock: an expired lease that was not taken over can still be sealed."""
    return record.state is State.HELD and record.token == token


def _ended(record: KeyRecord, seal: Seal, now_ms: int) -> KeyRecord:
    return record._replace(
        state=State.FAILED if seal.failed else State.SEALED,
        # The owner that committed it may still seal it: keep the token of the effect, not that of its healer.
        token=record.token if seal.winner == NO_TOKEN else seal.winner,
        when_ms=now_ms,
        owner="",
        error=seal.error,
        effect_id=seal.effect_id,
        result=seal.result,
    )


class LeaseRef(NamedTuple):
    """The lease that is renewed or released."""

    key: bytes
    token: bytes
    mode: Mode = Mode.KEYED
    source: bytes = b""
    lease_ms: int = 30_000
    pending_ttl_ms: int = 0
    source_ttl_ms: int = 0
    epoch: int = 0
    position: int = 0
    context: bytes = b""

    @property
    def digest(self) -> bytes:
        return self.key[1:]


def apply_renewal(held: HeldRecords, lease: LeaseRef, now_ms: int, *, epoch: int) -> tuple[bool, Change | None]:
    record = _held_by(held, lease)
    if record is None or lease.epoch != epoch:
        return False, None
    return True, _replaced(held, lease, record._replace(when_ms=now_ms + lease.lease_ms))


def apply_release(
    held: HeldRecords,
    lease: LeaseRef,
    now_ms: int,
    *,
    error: str,
    expire: bool,
    refund: bool = False,
    withdraw: bool = False,
) -> tuple[KeyRecord | None, Change | None]:
    """The record as the attempt held it, for its row; None when the token no longer holds it.

    Of a lock nothing stays but the counter of its shard, from which the next holder gets a higher fence number.
    `expire`: a commit was sent, so the source stays unsettled and the next owner looks for it.
    `refund`: the attempt does not count, because its effect was not entered or can be repeated without harm.
    `withdraw`: as `refund`, and of a first attempt for a document that has a head nothing stays, unless the source is
    unsettled: its guard declined it, so nobody waits for anything.
    An attempt that ends without a release always counts: its effect may be what killed the process.
    """
    record = _held_by(held, lease)
    if record is None:
        return None, None
    if lease.mode is LOCK:
        return record, Change(drop_record=True)
    refund = refund or withdraw
    if withdraw and lease.mode is Mode.DOCUMENT and record.attempt == 1:
        source = held.source
        if source and source.head and source.lease and not source.lease.unsettled:
            return record, Change(source=replace(source, lease=None))
    after = record._replace(
        state=State.HELD if expire else State.RELEASED,
        attempt=max(record.attempt - 1, 0) if refund else record.attempt,
        when_ms=now_ms,
        error=error,
    )
    return record, _replaced(held, lease, after)


def apply_attempt_reset(held: HeldRecords, lease: LeaseRef, now_ms: int) -> tuple[KeyRecord | None, Change | None]:
    """New attempts for a pending key, whoever holds it: its token is gone, so that nobody renews it by that.

    What may hide a commit stays unsettled. A lock is taken from its holder: the next claim gets it.
    """
    if lease.mode is LOCK:
        taken = held.record if held.record and held.record.state is LOCKED else None
        return taken, Change(drop_record=True) if taken else None
    place = held.source.lease if held.source else None
    if lease.mode is not KEYED and place and place.digest == lease.digest:
        after = place.record._replace(
            state=State.HELD if place.may_hide_a_commit else State.RELEASED,
            token=NO_TOKEN,
            when_ms=now_ms,
            attempt=0,
        )
        return after, _replaced(held, lease, after)
    if held.record is None or held.record.ended or held.record.state is LOCKED:
        return None, None
    after = held.record._replace(state=State.RELEASED, token=NO_TOKEN, when_ms=now_ms, attempt=0)
    return after, Change(record=after)


def _held_by(held: HeldRecords, lease: LeaseRef) -> KeyRecord | None:
    if lease.mode is LOCK:
        record = held.record
        return record if record and record.state is LOCKED and record.token == lease.token else None
    if lease.mode is KEYED:
        record = held.record
    else:
        place = held.source.lease if held.source else None
        record = place.record if place and place.digest == lease.digest else None
    return record if record and _holds(record, lease.token) else None


def _replaced(held: HeldRecords, lease: LeaseRef, record: KeyRecord) -> Change:
    if lease.mode is KEYED or lease.mode is LOCK:
        return Change(record=record)
    assert held.source is not None
    assert held.source.lease is not None
    return Change(source=replace(held.source, lease=replace(held.source.lease, record=record)))
