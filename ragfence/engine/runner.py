"""One operation from claim to receipt: claim -> effect -> commit -> seal, in object mode.

`acquire` returns the right to run the effect (`WonClaim`) or the receipt of an earlier attempt. `complete` commits and
seals. `release` ends a lease without an outcome. Nothing here knows what the effect is.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ragfence.core.decision_rows import NO_FENCE, row_for_answer
from ragfence.core.decisions import (
    LOCK,
    SEQUENCED,
    Claim,
    ConflictVerdict,
    Fenced,
    Granted,
    InFlightVerdict,
    NotReadyVerdict,
    Replay,
    Seal,
    Sealed,
    SealOutcome,
    StaleVerdict,
    Verdict,
)
from ragfence.core.layout import (
    CONFLICT_POSITION,
    FENCED_OUT,
    HEALED,
    JOURNALED,
    NO_TOKEN,
    SEAL_POSITION,
    TOKEN_BYTES,
    RowKind,
    State,
)
from ragfence.core.policy import Policy
from ragfence.core.receipts import DUPLICATE, NEW, Flags, Receipt, flags_of
from ragfence.core.records import KeyRecord
from ragfence.engine import crash_points
from ragfence.engine.commits import Commit, Commits, EarlierCommits
from ragfence.engine.epochs import Epochs
from ragfence.engine.hydration import EpochWatch, Hydrator
from ragfence.engine.leases import Lease, heartbeat
from ragfence.engine.notes import EffectNote, EffectNotes
from ragfence.engine.refusals import Refusals, code_of, refuse_nested, refuse_reserved
from ragfence.engine.requests import Request
from ragfence.engine.results import Results
from ragfence.errors import Conflict as ConflictError
from ragfence.errors import (
    FencedOut,
    LeaseLost,
    SealUncertain,
    StoreClosed,
    StoreUnavailable,
    TransientError,
)
from ragfence.stores.fences import FenceStore

LAST_CLAIM_POSITION = 240


class PendingClaim(NamedTuple):
    """A claim that was sent to the store, alone or in a batch; see `engine.aio`."""

    claim: Claim
    verdict: Verdict | None
    """None: unknown, so claim again with the same token"""
    asked_at: float


@dataclass(slots=True)
class WonClaim:
    """The right to run the effect, until the lease is lost."""

    request: Request
    granted: Granted
    lease: Lease
    waited_ms: int
    commit_sent: bool = False
    journaled: bool = False
    entered: bool = False
    """the caller's code has started, so the effect may have happened in this attempt"""
    noted: bool = False
    """a note in the object store says that the effect was started"""
    repeatable: bool = False
    """the effect may run again without harm, so an outage does not use up attempts"""


class EffectOutcome(NamedTuple):
    """The outcome of an effect, as it is stored."""

    effect_id: str = ""
    result: bytes = b""
    failed: bool = False
    error: str = ""
    duplicate: bool = False
    """the effect was done under another key: the decision row of this one says `duplicate`"""


@dataclass(frozen=True, slots=True)
class RunnerStores:
    """What a fence with an object store keeps there, and what rebuilds the fence store from it."""

    commits: Commits
    notes: EffectNotes
    epochs: Epochs
    hydrator: Hydrator
    watch: EpochWatch


class Runner:
    def __init__(
        self,
        fences: FenceStore,
        backing: RunnerStores | None,
        results: Results,
        policy: Policy,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.redact_text = policy.redactor.redact_text
        self.fences = fences
        self.backing = backing
        self.results = results
        self._policy = policy
        self._refusals = Refusals(fences, results, policy)
        self._earlier = EarlierCommits(fences, backing.commits, self._refusals) if backing else None
        self._sleep = sleep

    def acquire(
        self, request: Request, *, wait_ms: int | None = None, token: bytes | None = None
    ) -> WonClaim | Receipt:
        """Claims, waits, takes over and heals, until there is an answer.

        Raises `Conflict`, `Stale` or `Quarantined`, and `InFlight` at the end of the wait.
        """
        refuse(request)
        asked_at = time.monotonic()
        claim = request.claim(token or os.urandom(TOKEN_BYTES), 0, 0)
        verdict = self._claim(claim)
        if isinstance(verdict, Replay) and verdict.record is not None:  # the most frequent answer takes no more steps
            return self.replay(request, claim, verdict.record)
        return self.take_steps(
            self.acquire_steps(request, wait_ms=wait_ms, first=PendingClaim(claim, verdict, asked_at))
        )

    def take_steps(self, steps: Iterator[WonClaim | Receipt | float]) -> WonClaim | Receipt:
        """Sleeps where a step says so, and returns the last one."""
        for step in steps:
            if not isinstance(step, float):
                return step
            self._sleep(step)
        raise AssertionError("unreachable")

    def acquire_steps(
        self,
        request: Request,
        *,
        wait_ms: int | None = None,
        first: PendingClaim | None = None,
    ) -> Iterator[WonClaim | Receipt | float]:
        """Yields the seconds to sleep before each step of `acquire`, then the answer. Nothing is held meanwhile.

        `first` is a claim of this request that was sent already.
        """
        refuse(request)
        return self._steps(request, wait_ms, first)

    def lock_steps(self, request: Request, wait_ms: int) -> Iterator[WonClaim | Receipt | float]:
        """The same for a lock: the last step is a `WonClaim`."""
        return self._steps(request, wait_ms, None)

    def _steps(
        self, request: Request, wait_ms: int | None, first: PendingClaim | None
    ) -> Iterator[WonClaim | Receipt | float]:
        started = first.asked_at if first else time.monotonic()
        give_up_at = started + (request.rules.wait_ms if wait_ms is None else wait_ms) / 1000
        token, position = first.claim.token if first else os.urandom(TOKEN_BYTES), 0
        while True:
            if first is not None and first.verdict is not None:
                claim, verdict, asked_at = first.claim, first.verdict, first.asked_at
            else:
                asked_at = time.monotonic()
                claim = request.claim(token, position, int((asked_at - started) * 1000))
                verdict = self._claim(claim)
            first = None
            position += 1
            if position > LAST_CLAIM_POSITION:
                token, position = os.urandom(TOKEN_BYTES), 0
            match verdict:
                case Replay(record):
                    assert record is not None  # only documents have nothing to retract
                    yield self.replay(request, claim, record)
                    return
                case Granted():
                    answer = self._accept(request, verdict, asked_at, claim.waited_ms)
                    if answer is not None:
                        yield answer
                        return
                case ConflictVerdict(record):
                    plain = record is None or record.ended or request.mode is LOCK
                    if plain or (found := self._find_commit(request, claim)) is None:
                        raise self._refusals.conflict(request, claim, record)
                    yield self._answer_from(request, claim, found)
                    return
                case StaleVerdict(newest):
                    raise self._refusals.stale(request, newest)
                case InFlightVerdict(quarantined=True):
                    if self._find_commit(request, claim) is not None:
                        # Not a new attempt: the claim heals it.
                        self.fences.reset_attempts([request.lease_ref(NO_TOKEN, epoch=0)])
                        continue
                    raise self._refusals.quarantined(request, verdict)
                case InFlightVerdict():
                    if time.monotonic() >= give_up_at:
                        raise self._refusals.in_flight(request, verdict, claim.waited_ms)
                    yield from self._wait(request, verdict, started, give_up_at)

    def replay_without_io(self, pending: PendingClaim) -> KeyRecord | None:
        """Returns the record of a replay, if its receipt needs no store. None: go through `acquire_steps`."""
        verdict = pending.verdict
        if isinstance(verdict, Replay) and verdict.record is not None and self.results.is_inline(verdict.record.result):
            return verdict.record
        return None

    def announce(self, won: WonClaim) -> bool:
        """Notes in the object store that an effect on an external system is about to start.

        Returns True if an earlier attempt may have run it, so that `recover=` must be called first. The note of that
        attempt shows it, even if the fence store has lost the attempt, or an epoch has voided its lease.
        """
        if self.backing is None:
            return won.lease.may_have_happened
        record = won.granted.record
        note = EffectNote(
            won.request.key_text, record.token.hex(), str(record.fence), record.attempt, won.lease.store_now_ms()
        )
        first = self.backing.notes.put(won.request.operation, note)
        won.noted = True
        return not first or won.lease.may_have_happened

    def announce_without_lease(self, request: Request, token: bytes) -> bool:
        """Does the same as `announce` without a lease, while the fence store is down.

        Returns True also if the object store is down, because then nothing is known.
        """
        if self.backing is None:
            return True
        note = EffectNote(request.key_text, token.hex(), str(NO_FENCE), 0, time.time_ns() // 1_000_000)
        try:
            return not self.backing.notes.put(request.operation, note)
        except TransientError:
            return True  # down as well

    def complete(self, won: WonClaim, outcome: EffectOutcome) -> Receipt:
        """Commits and seals. The receipt has the flag `fenced_out` if another attempt committed first."""
        receipt = self._commit_and_seal(won, outcome)
        if won.noted and self.backing:
            self.backing.notes.discard(won.request.operation, now=receipt.failed)
        return receipt

    def _commit_and_seal(self, won: WonClaim, outcome: EffectOutcome) -> Receipt:
        if won.lease.inherited:
            raise LeaseLost(f"the lease on {won.lease.key} belongs to the parent process", key=won.lease.key)
        if self.backing:
            commit = self._commit_of(won, outcome)
            won.commit_sent = True
            winner = self.backing.commits.put(won.request.operation, commit)
            crash_points.reach(crash_points.AFTER_COMMIT)
            if winner is not None:
                return self._yield_to(won, winner)
            if won.request.mode is SEQUENCED and self.backing.epochs.newer_than(won.lease.fence.epoch):
                # A newer revision may have been sealed in an epoch that started after this lease: claim again.
                return self._claim_again(won)
        crash_points.reach(crash_points.BEFORE_SEAL)
        sealed = self._seal(won, outcome)
        crash_points.reach(crash_points.AFTER_SEAL)
        heartbeat.remove(won.lease)
        flags = self._flags(won)
        if isinstance(sealed, Sealed):
            return self.results.receipt(won.request.key, sealed.record, NEW, flags)
        if won.request.mode is SEQUENCED:
            return self._claim_again(won, fenced_out=self.backing is None)
        if self.backing is None:
            raise self._fenced_out_error(won, sealed)
        # The object is ours, so the outcome is ours permanently, whichever owner holds the record now.
        self._record_unsealed(won, sealed, commit.record(), RowKind.NEW)
        return self.results.receipt(won.request.key, commit.record(), NEW, flags)

    def win_without_io(self, request: Request, pending: PendingClaim) -> WonClaim | None:
        """What a granted claim has won, if no earlier effect has to be looked for. None: as `replay_without_io`."""
        if self.backing or not isinstance(pending.verdict, Granted) or pending.verdict.prior is not None:
            return None
        won = self._accept(request, pending.verdict, pending.asked_at, pending.claim.waited_ms)
        assert isinstance(won, WonClaim)  # without an object store there is nothing to look up
        return won

    def find_committed(self, request: Request) -> Receipt | None:
        """Returns the committed receipt of a key while the fence store is down. Writes no decision row."""
        try:
            found = self.backing.commits.find(request.operation) if self.backing else None
        except TransientError:
            return None  # down as well
        if found is None:
            return None
        if found.fingerprint != request.fingerprint.hex():
            raise ConflictError(
                f"{request.operation.kind} {request.operation.source_id!r} is known with another payload",
                key=request.key_text,
            )
        flags = Flags(attempt=found.attempt, healed=True)
        return self.results.receipt(request.key, found.record(), DUPLICATE, flags)

    def release(self, won: WonClaim, error: str, *, outage: bool = False) -> bool:
        """Ends the lease without an outcome. If the store cannot be reached, the lease expires.

        Returns False if the lease was not held any more.
        The attempt does not count if the effect was not started, or if it is repeatable and failed in an `outage`.
        """
        heartbeat.remove(won.lease)
        if won.lease.inherited:
            return False
        refund = not won.entered or (won.repeatable and outage)
        try:
            (held,) = self.fences.release([won.lease.ref], error, expire=won.commit_sent, refund=refund)
        except TransientError:
            lost = won.lease.lost
            won.lease.discard()
            return not lost
        return held

    def replay(self, request: Request, claim: Claim, record: KeyRecord) -> Receipt:
        flags = flags_of(record.attempt, claim.waited_ms)
        return self.results.receipt(request.key, record, DUPLICATE, flags)

    def _claim(self, claim: Claim) -> Verdict:
        while True:
            (verdict,) = self.fences.claim([claim])
            if not isinstance(verdict, NotReadyVerdict):
                return verdict
            assert self.backing is not None  # a store without an object store makes itself ready
            self.backing.hydrator.ensure_ready()

    def _accept(self, request: Request, granted: Granted, asked_at: float, waited_ms: int) -> WonClaim | Receipt | None:
        """The lease is ours. Heals the effect of an owner that committed and died. Returns None to claim again."""
        record = granted.record
        granted_ms = record.when_ms - request.rules.lease_ms
        lease = Lease(
            request.lease_ref(record.token, epoch=record.fence.epoch),
            fence=record.fence,
            attempt=record.attempt,
            takeover=granted.takeover,
            granted_at=asked_at,
            store_ms=granted_ms,
            max_runtime_ms=request.rules.max_runtime_ms,
            # The error shows it even if the clock of the store has not moved since.
            seen_before=record.first_seen_ms < granted_ms or record.error != "",
        )
        won = WonClaim(request, granted, lease, waited_ms)
        heartbeat.add(self.fences, lease)
        try:
            crash_points.reach(crash_points.AFTER_CLAIM)
            if self.backing and self._earlier:
                self.backing.watch.start()
            if self.backing and self._earlier and request.mode is not LOCK:
                found = self._earlier.find(request, granted.head, self._claim_for_rows(won, CONFLICT_POSITION))
                if found is not None and granted.prior is None:
                    return self._heal(won, found)
            if granted.prior is not None:
                return self._raise_top(won, granted.prior)
        except BaseException as failure:
            self.release(won, code_of(failure))
            raise
        return won

    def _find_commit(self, request: Request, claim: Claim) -> Commit | None:
        """Returns the commit of a key with a pending record, which may be newer than a loss of the store."""
        if self._earlier is None:
            return None
        (held,) = self.fences.read([request.lookup])
        head = held.source.head if held.source else None
        return self._earlier.find(request, head, claim._replace(position=CONFLICT_POSITION, row_on_conflict=True))

    def _answer_from(self, request: Request, claim: Claim, found: Commit) -> Receipt:
        """Answers from the commit: the pending record has another payload, which was refused; ours was committed."""
        self._raise_sequence(request, found)
        answered = claim._replace(position=CONFLICT_POSITION)
        row = row_for_answer(answered, RowKind.DUPLICATE, found.record(), self.fences.now_ms(), flags=HEALED)
        self.fences.record([row])
        flags = Flags(attempt=found.attempt, healed=True, waited_ms=claim.waited_ms)
        return self.results.receipt(request.key, found.record(), DUPLICATE, flags)

    def _raise_sequence(self, request: Request, found: Commit) -> None:
        sequence = request.operation.sequence
        if self.backing and sequence is not None and (found.sequence is None or found.sequence < sequence):
            self.backing.commits.raise_sequence(request.operation, sequence)

    def _heal(self, won: WonClaim, found: Commit) -> Receipt | None:
        """Seals what an owner committed before it died: the effect is found, not repeated."""
        self._raise_sequence(won.request, found)
        outcome = EffectOutcome(found.effect_id, found.result, found.failed, found.error)
        sealed = self._seal(won, outcome, flags=HEALED, winner=bytes.fromhex(found.token))
        heartbeat.remove(won.lease)
        if not isinstance(sealed, Sealed):
            if won.request.mode is SEQUENCED:
                return None
            self._record_unsealed(won, sealed, found.record(), RowKind.DUPLICATE, flags=HEALED)
        flags = replace(self._flags(won), healed=True)
        return self.results.receipt(won.request.key, found.record(), DUPLICATE, flags)

    def _raise_top(self, won: WonClaim, prior: KeyRecord) -> Receipt | None:
        """Raises the source's sequence: the key was sealed before with a lower one, and keeps its receipt."""
        sequence = won.request.operation.sequence
        if self.backing and sequence is not None:
            won.commit_sent = True
            self.backing.commits.raise_sequence(won.request.operation, sequence)
            crash_points.reach(crash_points.AFTER_COMMIT)
            if self.backing.epochs.newer_than(won.lease.fence.epoch):
                self.backing.hydrator.ensure_ready()
        outcome = EffectOutcome(prior.effect_id, prior.result, prior.state is State.FAILED, prior.error)
        sealed = self._seal(won, outcome, winner=prior.token)
        heartbeat.remove(won.lease)
        if not isinstance(sealed, Sealed):
            return None
        return self.results.receipt(won.request.key, prior, DUPLICATE, self._flags(won))

    def _yield_to(self, won: WonClaim, winner: Commit) -> Receipt:
        if winner.fingerprint != won.request.fingerprint.hex():
            self.release(won, ConflictError.code)
            raise self._refusals.conflict(won.request, self._claim_for_rows(won, CONFLICT_POSITION), winner.record())
        if won.request.mode is SEQUENCED:
            # The winner's sequence may be below ours: no caller may hear that ours is applied before the source has it.
            return self._claim_again(won, fenced_out=True)
        outcome = EffectOutcome(winner.effect_id, winner.result, winner.failed, winner.error)
        answered = HEALED | FENCED_OUT
        sealed = self._seal(won, outcome, flags=answered, winner=bytes.fromhex(winner.token))
        heartbeat.remove(won.lease)
        if not isinstance(sealed, Sealed):
            self._record_unsealed(won, sealed, winner.record(), RowKind.DUPLICATE, flags=answered)
        flags = replace(self._flags(won), fenced_out=True)
        return self.results.receipt(won.request.key, winner.record(), DUPLICATE, flags)

    def _record_unsealed(
        self, won: WonClaim, sealed: Fenced | NotReadyVerdict, record: KeyRecord, kind: RowKind, *, flags: int = 0
    ) -> None:
        """Writes the row of an outcome that is committed but not sealed: the commit decides."""
        claim = self._claim_for_rows(won, SEAL_POSITION)
        row = row_for_answer(claim, kind, record, self.fences.now_ms(), flags=flags)
        self.fences.record([replace(row, sealed_at_ms=record.when_ms)])
        if isinstance(sealed, NotReadyVerdict) and self.backing:
            # Our lease may outlive a restart of the store: the next caller would wait for it, for nothing.
            with contextlib.suppress(TransientError):
                self.backing.hydrator.ensure_ready()
        self.release(won, FencedOut.code)

    def _claim_again(self, won: WonClaim, *, fenced_out: bool = False) -> Receipt:
        """Claims again, as the lease may be gone. Finds the commit, ours or the winner's, or what superseded it."""
        self.release(won, FencedOut.code)
        answer = self.acquire(won.request)
        if isinstance(answer, Receipt):
            return answer._replace(flags=replace(answer.flags, fenced_out=fenced_out))
        self.release(answer, FencedOut.code)
        raise FencedOut(f"{won.lease.key} lost its lease and its commit cannot be found", key=won.lease.key)

    def _seal(self, won: WonClaim, outcome: EffectOutcome, *, flags: int = 0, winner: bytes = NO_TOKEN) -> SealOutcome:
        """Seals, with retries: the effect has happened, and other callers learn of it only by the seal."""
        seal = _seal_of(won, outcome, flags=flags, winner=winner)
        give_up_at = time.monotonic() + self._policy.lease.seal_retry_s
        pause_s = 0.02
        while True:
            try:
                return self.fences.seal([seal])[0]
            except StoreUnavailable as unavailable:
                if time.monotonic() >= give_up_at or isinstance(unavailable, StoreClosed):
                    heartbeat.remove(won.lease)
                    record = self._commit_of(won, outcome).record()
                    receipt = self.results.receipt(won.request.key, record, NEW, self._flags(won))
                    raise SealUncertain(
                        f"the effect of {won.lease.key} happened, but its seal could not be written",
                        key=won.lease.key,
                        receipt=receipt,
                        committed=won.commit_sent,
                    ) from unavailable
            self._sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(pause_s * 2, 1.0)

    def _commit_of(self, won: WonClaim, outcome: EffectOutcome) -> Commit:
        record = won.granted.record
        return Commit(
            key=won.request.key_text,
            fingerprint=record.fingerprint.hex(),
            token=record.token.hex(),
            fence=str(record.fence),
            attempt=record.attempt,
            first_seen_ms=record.first_seen_ms,
            sealed_at_ms=won.lease.store_now_ms(),
            sequence=won.request.operation.sequence,
            failed=outcome.failed,
            error=outcome.error,
            effect_id=outcome.effect_id,
            result=outcome.result,
        )

    def _fenced_out_error(self, won: WonClaim, outcome: Fenced | NotReadyVerdict) -> FencedOut:
        record = outcome.record if isinstance(outcome, Fenced) else None
        receipt = None
        if record is not None and record.ended and record.fingerprint == won.request.fingerprint:
            flags = replace(self._flags(won), fenced_out=True)
            receipt = self.results.receipt(won.request.key, record, DUPLICATE, flags)
        return FencedOut(f"{won.lease.key} was taken over before its seal", key=won.lease.key, receipt=receipt)

    def _wait(self, request: Request, verdict: InFlightVerdict, started: float, give_up_at: float) -> Iterator[float]:
        """Waits until the record changes, its lease expires or the deadline passes. Only reads: no rows."""
        token, until_ms = verdict.record.token, verdict.until_ms
        while True:
            now = time.monotonic()
            # Read every time: only the store's clock decides when a lease expires.
            if now >= give_up_at or self.fences.now_ms() >= until_ms:
                return
            pause_s = min(max((now - started) * 0.1, 0.005), 0.25) * random.uniform(0.5, 1.5)
            yield min(pause_s, max(give_up_at - now, 0.0))
            (held,) = self.fences.read([request.lookup])
            record = held.source.lease.record if held.source and held.source.lease else held.record
            if record is None or record.token != token or record.state not in (State.HELD, State.LOCKED):
                return
            until_ms = record.when_ms

    def _claim_for_rows(self, won: WonClaim, position: int) -> Claim:
        return won.request.claim(won.granted.record.token, position, won.waited_ms)._replace(row_on_conflict=True)

    def _flags(self, won: WonClaim) -> Flags:
        lease = won.lease
        return flags_of(lease.attempt, won.waited_ms, takeover=lease.takeover, journaled=won.journaled)


def _seal_of(won: WonClaim, outcome: EffectOutcome, *, flags: int = 0, winner: bytes = NO_TOKEN) -> Seal:
    return won.request.seal(
        won.granted,
        effect_id=outcome.effect_id,
        result=outcome.result,
        failed=outcome.failed,
        error=outcome.error,
        flags=flags | (JOURNALED if won.journaled else 0),
        waited_ms=won.waited_ms,
        winner=winner,
        duplicate=outcome.duplicate,
    )


def refuse(request: Request) -> None:
    """Refuses requests that must not be claimed at all."""
    refuse_nested(request)
    refuse_reserved(request)
