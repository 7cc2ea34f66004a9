"""Segment mode: many head moves committed by one object, for effects that are deterministic.

    claim -> effect -> put_new segments/<epoch>/<token> -> check for a newer epoch -> seal

The segment is the commit point of the whole batch. Because its name carries the epoch of the leases, a later
hydration either lists it or voids it permanently. The check between commit and seal ensures that no caller gets a
receipt for a voided segment. See docs/protocol.md for what each step protects against.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from ragfence.core.decisions import (
    Claim,
    ConflictVerdict,
    Granted,
    InFlightVerdict,
    LeaseRef,
    Mode,
    NotReadyVerdict,
    Replay,
    Seal,
    Sealed,
    StaleVerdict,
    Verdict,
)
from ragfence.core.layout import BATCH_BYTES, METADATA_UPDATED, NO_TOKEN, REVIVED, TOKEN_BYTES, State
from ragfence.core.records import KeyRecord
from ragfence.engine import crash_points
from ragfence.engine.hydration import TenantStores
from ragfence.engine.leases import BatchLease, heartbeat
from ragfence.engine.refusals import code_of, is_outage
from ragfence.engine.segment_log import Codec, LogRow
from ragfence.errors import CommitUncertain, DocumentMoved, OriginConflict, PolicyError, TransientError


class FinishedEffect(NamedTuple):
    """The outcome of an effect: the result that every caller gets, and what else the row stores."""

    result: bytes
    detail: Any = None


class Move(NamedTuple):
    """A requested head move, and its deterministic effect."""

    claim: Claim
    """its token starts with the name of the batch: see `batch_tokens`"""
    effect: Callable[[Any, Granted], FinishedEffect]
    """called with the subject once the move is granted, also if the key was sealed before (`Granted.prior`)"""
    subject: Any = None


class MovedHead(NamedTuple):
    """The head was moved by this call. `record` is what every caller is answered with."""

    record: KeyRecord
    again: bool
    """the key had been sealed before, so no effect ran: the move revived it, or changed its metadata or sequence"""
    flags: int = 0
    takeover: bool = False


class Failed(NamedTuple):
    """The effect of this move raised; nothing was committed for it."""

    error: Exception


class Declined(Exception):
    """Raised by an effect if the guard declines the move under the lease; it is not a failure."""


_DECLINING = (Declined, OriginConflict, DocumentMoved)

Answer = MovedHead | Replay | ConflictVerdict | StaleVerdict | InFlightVerdict | Failed


class CommitHooks(Protocol):
    """What a guard does around the commit of a batch. Both may be interrupted anywhere, and must be repeatable."""

    def before_commit(self, name: str, rows: Sequence[LogRow]) -> None: ...

    def after_seal(self, rows: Sequence[LogRow], sealed: Sequence[bool]) -> None: ...


class NoCommitHooks:
    def before_commit(self, name: str, rows: Sequence[LogRow]) -> None:
        pass

    def after_seal(self, rows: Sequence[LogRow], sealed: Sequence[bool]) -> None:
        pass


@dataclass(slots=True)
class _Wanted:
    move: Move
    segments: list[tuple[str, int, Granted, bytes]]
    """(name, epoch, grant, result) of commits of this call that may or may not count"""
    unsure: bool = False

    @property
    def open_question(self) -> bool:
        """Whether a segment of ours may have counted. Without a sequence, this must be known before another move."""
        return bool(self.segments) and self.move.claim.sequence is None


_T = TypeVar("_T")
_MANY = 100
"""Rows that take longer to encode than a thread takes to start."""


def batch_tokens() -> Iterator[bytes]:
    """Yields tokens for the moves of one batch: the token alone leads from a sealed record to its row in the log."""
    batch = os.urandom(BATCH_BYTES)
    return (batch + at.to_bytes(TOKEN_BYTES - BATCH_BYTES, "big") for at in itertools.count())


@contextlib.contextmanager
def _in_background(work: Callable[[], _T], *, worth_it: bool) -> Iterator[Callable[[], _T]]:
    """Runs `work` in a thread, if that is worth it. Yields a function that returns, or raises, what `work` does."""
    if not worth_it:
        yield work
        return
    with ThreadPoolExecutor(1, thread_name_prefix="ragfence-encode") as pool:
        yield pool.submit(work).result


def flags_of(grant: Granted, claim: Claim) -> int:
    """Returns the flags of a move whose key was sealed before."""
    head = grant.head
    if grant.prior is None:
        return 0
    if head is None or not head.live or head.digest != claim.digest:
        return REVIVED
    return METADATA_UPDATED if head.metadata_hash != claim.metadata_hash else 0


class BatchCommitter:
    """Commits head moves in batches. Safe to be killed, frozen or cut off anywhere."""

    def __init__(
        self,
        stores: TenantStores,
        codec: Codec,
        *,
        hooks: CommitHooks | None = None,
        max_runtime_ms: int = 3_600_000,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._max_runtime_ms = max_runtime_ms
        self._fences = stores.fences
        self._objects = stores.objects
        self._epochs = stores.epochs
        self._hydrator = stores.hydrator
        self._codec = codec
        self._hooks: CommitHooks = hooks or NoCommitHooks()
        self._sleep = sleep

    def move(self, moves: Sequence[Move], *, wait_s: float = 60.0) -> list[Answer]:
        """Returns the answers in the order of the moves. A source must not occur twice in one call."""
        answers: dict[int, Answer] = {}
        wanted: dict[int, _Wanted] = {}
        give_up_at = time.monotonic() + wait_s
        pause_s = 0.005
        asked_at = time.monotonic()
        verdicts: dict[int, Verdict] = {}
        # Most moves of most batches are replays, which end here.
        for at, verdict in enumerate(self._fences.claim([move.claim for move in moves])):
            if isinstance(verdict, Replay):
                answers[at] = verdict
            else:
                verdicts[at] = verdict
                wanted[at] = _Wanted(moves[at], [])
        asked = 0
        while wanted:
            granted: dict[int, Granted] = {}
            for at, verdict in verdicts.items():
                if type(verdict) is Granted and not wanted[at].segments:
                    granted[at] = verdict
                    continue
                match verdict:
                    case Granted(record) if wanted[at].open_question and record.fence.epoch != asked:
                        # An epoch was completed since the last check: it may list our segment. Check again first.
                        self._fences.release([self._ref(wanted[at].move, verdict)], "LEASE.superseded", refund=True)
                    case Granted():
                        granted[at] = verdict
                    case NotReadyVerdict():
                        pass
                    case InFlightVerdict(_, _, quarantined):
                        if quarantined or time.monotonic() >= give_up_at:
                            answers[at] = verdict
                            del wanted[at]
                    case _:
                        answers[at] = verdict
                        del wanted[at]
            # All that was won is sealed or released before any wait: no hold-and-wait.
            if granted:
                self._execute(granted, wanted, answers, asked_at)
            if any(isinstance(verdict, NotReadyVerdict) for verdict in verdicts.values()):
                self._hydrator.ensure_ready()
            elif wanted and not granted:
                self._sleep(pause_s * random.uniform(0.5, 1.5))
                pause_s = min(pause_s * 1.5, 0.25)
            verdicts = {}
            if wanted and (known := self._answer_from_own_segments(wanted, answers)) is not None and wanted:
                asked, asked_at = known, time.monotonic()
                verdicts = self._claim(wanted)
        return [answers[at] for at in range(len(moves))]

    def _claim(self, wanted: dict[int, _Wanted]) -> dict[int, Verdict]:
        # A new token per attempt: with the position it also names the decision row.
        tokens = batch_tokens()
        claims = [want.move.claim._replace(token=token) for want, token in zip(wanted.values(), tokens, strict=False)]
        return dict(zip(wanted, self._fences.claim(claims), strict=True))

    def _execute(
        self, granted: dict[int, Granted], wanted: dict[int, _Wanted], answers: dict[int, Answer], asked_at: float
    ) -> None:
        crash_points.reach(crash_points.AFTER_CLAIM)
        by_segment: dict[tuple[int, bytes], dict[int, Granted]] = {}
        for at, grant in granted.items():
            part = (grant.record.fence.epoch, grant.record.token[:BATCH_BYTES])
            by_segment.setdefault(part, {})[at] = grant
        while by_segment:
            epoch, batch = next(iter(by_segment))
            members = by_segment.pop((epoch, batch))
            try:
                self._execute_in(epoch, batch, members, wanted, answers, asked_at)
            except BaseException as failure:
                for others in by_segment.values():
                    self._release(others, wanted, failure, entered=False)
                raise

    def _execute_in(
        self,
        epoch: int,
        batch: bytes,
        granted: dict[int, Granted],
        wanted: dict[int, _Wanted],
        answers: dict[int, Answer],
        asked_at: float,
    ) -> None:
        sent = False
        moves = [(want.move, granted[at]) for at, want in wanted.items() if at in granted]
        lease = BatchLease(
            lambda: [self._ref(move, grant) for move, grant in moves],
            lease_ms=min(move.claim.lease_ms for move, _ in moves),
            granted_at=asked_at,
            max_runtime_ms=self._max_runtime_ms,
        )
        heartbeat.add(self._fences, lease)
        try:
            effects = self._effects(granted, wanted, answers)
            crash_points.reach(crash_points.AFTER_EFFECT)
            if not effects:
                return
            name = self._epochs.segment_name(epoch, batch.hex())
            seals: dict[int, Seal] = {}
            rows: list[LogRow] = []
            for at, effected in effects.items():
                grant = granted[at]
                seals[at] = self._seal(wanted[at].move, grant, effected.result)
                rows.append(self._row(seals[at], grant, effected.detail))
                wanted[at].segments.append((name, epoch, grant, effected.result))
                wanted[at].unsure = False
            with _in_background(lambda: self._codec.encode(rows), worth_it=len(rows) >= _MANY) as encoded:
                self._hooks.before_commit(name, rows)
                data = encoded()
            sent = True
            if not self._objects.put_new(name, data).won:
                raise CommitUncertain(f"the segment {name} was written by another process", hint="try again")
            crash_points.reach(crash_points.AFTER_COMMIT)
            superseded = self._epochs.newer_than(epoch)
            if not superseded:
                crash_points.reach(crash_points.BEFORE_SEAL)
                outcomes = dict(zip(seals, self._fences.seal(list(seals.values())), strict=True))
        except BaseException as failure:
            self._release(granted, wanted, failure, sent=sent)
            raise
        finally:
            heartbeat.remove(lease)
        if superseded:
            for at in effects:
                wanted[at].unsure = True
            self._hydrator.ensure_ready()
            self._hooks.after_seal(rows, [False] * len(rows))
            return
        crash_points.reach(crash_points.AFTER_SEAL)
        for at, outcome in outcomes.items():
            if isinstance(outcome, Sealed):
                answers[at] = MovedHead(
                    outcome.record, granted[at].prior is not None, seals[at].flags, granted[at].takeover
                )
                del wanted[at]
            else:
                wanted[at].unsure = isinstance(outcome, NotReadyVerdict)
        self._hooks.after_seal(rows, [isinstance(outcome, Sealed) for outcome in outcomes.values()])

    def _effects(
        self, granted: dict[int, Granted], wanted: dict[int, _Wanted], answers: dict[int, Answer]
    ) -> dict[int, FinishedEffect]:
        """Runs the effects. One that fails does not fail its batch: its lease is released, with the error."""
        effects: dict[int, FinishedEffect] = {}
        for at, grant in granted.items():
            move = wanted[at].move
            try:
                effects[at] = move.effect(move.subject, grant)
            except Exception as error:  # noqa: BLE001  # whatever a custom chunker raises
                # A move that its guard declines under the lease is not a failed attempt: it may be tried without
                # limit, and no caller waits for it.
                declined, ref = isinstance(error, _DECLINING), self._ref(move, grant)
                self._fences.release([ref], code_of(error), refund=is_outage(error), withdraw=declined)
                answers[at] = Failed(error)
                del wanted[at]
        return effects

    def _release(
        self,
        granted: dict[int, Granted],
        wanted: dict[int, _Wanted],
        failure: BaseException,
        *,
        sent: bool = False,
        entered: bool = True,
    ) -> None:
        """Releases what a batch had won. If the store cannot be reached, the leases expire.

        After an outage, an interruption or a refused policy the attempts do not count: none says anything about the
        documents, and their effects are repeatable.
        """
        refs = [self._ref(wanted[at].move, grant) for at, grant in granted.items() if at in wanted]
        blameless = is_outage(failure) or isinstance(failure, PolicyError) or not isinstance(failure, Exception)
        refund = not entered or blameless
        with contextlib.suppress(TransientError):
            self._fences.release(refs, code_of(failure), expire=sent, refund=refund)

    def _answer_from_own_segments(self, wanted: dict[int, _Wanted], answers: dict[int, Answer]) -> int | None:
        """Answers moves whose segment is listed by the newest epoch: it counts, though it could not be sealed.

        Only moves without a sequence: with one, a newer revision may have been sealed since, and a claim finds out.
        Returns the epoch of the answers, 0 if there was nothing to check, and None if it is too early to know.
        """
        if not any(want.open_question for want in wanted.values()):
            return 0
        known = self._epochs.known()
        if known.settled:
            # A segment that was compacted since then counted as well, under another name.
            since = min(epoch for want in wanted.values() for _, epoch, _, _ in want.segments)
            listed = set(self._epochs.listed(known.newest_complete, since=since))
            for at, want in list(wanted.items()):
                counted = [
                    (grant, result)
                    for name, epoch, grant, result in want.segments
                    if epoch < known.newest_complete and name in listed
                ]
                if counted and want.open_question:
                    grant, result = counted[-1]
                    record = grant.record._replace(state=State.SEALED, result=result)
                    flags = flags_of(grant, want.move.claim)
                    answers[at] = MovedHead(record, grant.prior is not None, flags, grant.takeover)
                    del wanted[at]
                    continue
                want.segments = [entry for entry in want.segments if entry[1] >= known.newest_complete]
        if not known.settled or any(want.open_question and want.unsure for want in wanted.values()):
            # The next complete epoch decides what counted; a claim before that would lose the question.
            self._hydrator.ensure_ready()
            return None
        return known.newest_complete

    def _seal(self, move: Move, grant: Granted, result: bytes) -> Seal:
        claim, prior = move.claim, grant.prior
        # By position, as the row below: one of each is made for every document, and names cost more.
        return Seal(
            claim.key,
            grant.record.token,
            grant.record.fence,
            Mode.DOCUMENT,
            claim.source,
            False,
            prior.effect_id if prior else "",
            result,
            "",
            claim.sequence,
            claim.metadata_hash,
            not claim.retract,
            0,
            0,
            flags_of(grant, claim) if prior else 0,
            0,
            claim.context,
            prior is not None,
            NO_TOKEN,
        )

    def _row(self, seal: Seal, grant: Granted, detail: Any) -> LogRow:
        kept = grant.head.sequence if grant.head else None
        return LogRow(
            seal.key,
            seal.source,
            seal.fence,
            grant.record.fingerprint,
            seal.live,
            seal.sequence if seal.sequence is not None else kept,
            seal.metadata_hash,
            seal.effect_id,
            seal.result,
            seal.token,
            detail,
            "",
            0,
        )

    def _ref(self, move: Move, grant: Granted) -> LeaseRef:
        return LeaseRef(
            key=move.claim.key,
            token=grant.record.token,
            mode=Mode.DOCUMENT,
            source=move.claim.source,
            epoch=grant.record.fence.epoch,
            lease_ms=move.claim.lease_ms,
            context=move.claim.context,
        )
