"""Segment mode: many head moves committed by one object, for effects that are deterministic.

    claim -> effect -> put_new segments/<epoch>/<token> -> look for a newer epoch -> seal

The segment is the commit point of the whole batch. Because its name carries the epoch of the leases, a later
hydration either lists it or voids it for ever; the look between commit and seal makes sure that nobody is told
"done" for a segment that was voided. See docs/protocol.md for what each step protects against.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragfence.core.decisions import (
    Claim,
    Conflict,
    Granted,
    InFlight,
    LeaseRef,
    Mode,
    NotReady,
    Replay,
    Seal,
    Sealed,
    Stale,
    Verdict,
)
from ragfence.core.records import TOKEN_BYTES, KeyRecord, State
from ragfence.core.rows import REVIVED
from ragfence.engine import points
from ragfence.engine.epochs import Epochs
from ragfence.engine.hydration import Hydrator
from ragfence.engine.leases import Lease, heartbeat
from ragfence.engine.segment_log import Codec, LogRow
from ragfence.stores.fences import FenceStore
from ragfence.stores.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class Move:
    """A head move that somebody wants, and the deterministic effect behind it."""

    claim: Claim
    effect: Callable[[Granted], bytes]
    """makes the result; not called when the key was sealed before"""


@dataclass(frozen=True, slots=True)
class Moved:
    """The head was moved by this call. `record` is what everybody will be answered with."""

    record: KeyRecord
    again: bool
    """the key had been sealed before, so nothing was performed: it was revived, re-described or re-ordered"""


Answer = Moved | Replay | Conflict | Stale | InFlight


@dataclass(slots=True)
class _Wanted:
    move: Move
    segments: list[tuple[str, int, Moved]]
    """(name, epoch) of what this call committed without being sure that it counts"""
    unsure: bool = False

    @property
    def open_question(self) -> bool:
        """Did a segment of ours count after all? Without a sequence we must know before we move the head again."""
        return bool(self.segments) and self.move.claim.sequence is None


class SegmentWriter:
    """Performs head moves in batches. Safe to be killed, frozen or cut off anywhere."""

    def __init__(
        self,
        fences: FenceStore,
        objects: ObjectStore,
        epochs: Epochs,
        hydrator: Hydrator,
        codec: Codec,
        *,
        max_runtime_ms: int = 3_600_000,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._max_runtime_ms = max_runtime_ms
        self._fences = fences
        self._objects = objects
        self._epochs = epochs
        self._hydrator = hydrator
        self._codec = codec
        self._sleep = sleep

    def move(self, moves: Sequence[Move], *, wait_s: float = 60.0) -> list[Answer]:
        """Answers in the order of the moves. A source must not stand twice in one call."""
        answers: dict[int, Answer] = {}
        wanted = {at: _Wanted(move, []) for at, move in enumerate(moves)}
        give_up_at = time.monotonic() + wait_s
        pause_s = 0.005
        while wanted:
            asked = self._answer_from_own_segments(wanted, answers)
            if asked is None:
                continue
            if not wanted:
                break
            asked_at = time.monotonic()
            verdicts = self._claim(wanted)
            granted: dict[int, Granted] = {}
            for at, verdict in verdicts.items():
                match verdict:
                    case Granted(record) if wanted[at].open_question and record.fence.epoch != asked:
                        # An epoch was completed since we asked: it may list our segment. Ask again first.
                        self._fences.release([self._ref(wanted[at].move, verdict)], "LEASE.superseded")
                    case Granted():
                        granted[at] = verdict
                    case NotReady():
                        pass
                    case InFlight(_, _, quarantined):
                        if quarantined or time.monotonic() >= give_up_at:
                            answers[at] = verdict
                            del wanted[at]
                    case _:
                        answers[at] = verdict
                        del wanted[at]
            # Whatever was won is sealed or given back before anything is waited for: no hold-and-wait.
            if granted:
                self._perform(granted, wanted, answers, asked_at)
            if any(isinstance(verdict, NotReady) for verdict in verdicts.values()):
                self._hydrator.ensure_ready()
            elif wanted and not granted:
                self._sleep(pause_s * random.uniform(0.5, 1.5))
                pause_s = min(pause_s * 1.5, 0.25)
        return [answers[at] for at in range(len(moves))]

    def _claim(self, wanted: dict[int, _Wanted]) -> dict[int, Verdict]:
        # A new token per attempt: with the position it also names the decision row.
        claims = [want.move.claim._replace(token=os.urandom(TOKEN_BYTES)) for want in wanted.values()]
        return dict(zip(wanted, self._fences.claim(claims), strict=True))

    def _perform(
        self, granted: dict[int, Granted], wanted: dict[int, _Wanted], answers: dict[int, Answer], asked_at: float
    ) -> None:
        points.reach(points.AFTER_CLAIM)
        by_epoch: dict[int, list[int]] = {}
        for at, grant in granted.items():
            by_epoch.setdefault(grant.record.fence.epoch, []).append(at)
        for epoch, members in by_epoch.items():
            self._perform_in(epoch, {at: granted[at] for at in members}, wanted, answers, asked_at)

    def _perform_in(
        self,
        epoch: int,
        granted: dict[int, Granted],
        wanted: dict[int, _Wanted],
        answers: dict[int, Answer],
        asked_at: float,
    ) -> None:
        sent = False
        leases = [self._lease(wanted[at].move, grant, asked_at) for at, grant in granted.items()]
        for lease in leases:
            heartbeat.add(self._fences, lease)
        try:
            results = {
                at: grant.prior.result if grant.prior else wanted[at].move.effect(grant)
                for at, grant in granted.items()
            }
            points.reach(points.AFTER_EFFECT)
            seals = {at: self._seal(wanted[at].move, grant, results[at]) for at, grant in granted.items()}
            rows = [self._row(seals[at], grant) for at, grant in granted.items()]
            name = self._epochs.segment_name(epoch, os.urandom(16).hex())
            for at, grant in granted.items():
                record = grant.record._replace(state=State.SEALED, result=results[at])
                wanted[at].segments.append((name, epoch, Moved(record, grant.prior is not None)))
                wanted[at].unsure = False
            sent = True
            self._objects.put_new(name, self._codec.encode(rows))
            points.reach(points.AFTER_COMMIT)
        except BaseException:
            refs = [self._ref(wanted[at].move, grant) for at, grant in granted.items()]
            self._fences.release(refs, "EFFECT.failed", expire=sent)
            raise
        finally:
            for lease in leases:
                heartbeat.remove(lease)
        if self._epochs.newer_than(epoch):
            for at in granted:
                wanted[at].unsure = True
            self._hydrator.ensure_ready()
            return
        points.reach(points.BEFORE_SEAL)
        outcomes = dict(zip(seals, self._fences.seal(list(seals.values())), strict=True))
        points.reach(points.AFTER_SEAL)
        for at, outcome in outcomes.items():
            if isinstance(outcome, Sealed):
                answers[at] = Moved(outcome.record, granted[at].prior is not None)
                del wanted[at]
            else:
                wanted[at].unsure = isinstance(outcome, NotReady)

    def _answer_from_own_segments(self, wanted: dict[int, _Wanted], answers: dict[int, Answer]) -> int | None:
        """A segment of ours that the newest epoch lists counts, though we could not seal it.

        Only without a sequence: with one, a newer revision may have been sealed since, and the claim tells.
        Returns the epoch the answers are of, 0 when there was nothing to ask, None when it is too early to tell.
        """
        if not any(want.open_question for want in wanted.values()):
            return 0
        known = self._epochs.known()
        if known.settled:
            listed = set(self._epochs.listed(known.newest_complete))
            for at, want in list(wanted.items()):
                counted = [
                    moved for name, epoch, moved in want.segments if epoch < known.newest_complete and name in listed
                ]
                if counted and want.open_question:
                    answers[at] = counted[-1]
                    del wanted[at]
                    continue
                want.segments = [entry for entry in want.segments if entry[1] >= known.newest_complete]
        if not known.settled or any(want.open_question and want.unsure for want in wanted.values()):
            # What became of it is decided by the next complete epoch; to claim before would forget the question.
            self._hydrator.ensure_ready()
            return None
        return known.newest_complete

    def _seal(self, move: Move, grant: Granted, result: bytes) -> Seal:
        claim = move.claim
        return Seal(
            key=claim.key,
            token=grant.record.token,
            fence=grant.record.fence,
            mode=Mode.DOCUMENT,
            source=claim.source,
            effect_id=grant.prior.effect_id if grant.prior else "",
            result=result,
            sequence=claim.sequence,
            metadata_hash=claim.metadata_hash,
            live=not claim.retract,
            flags=REVIVED if grant.prior else 0,
            duplicate=grant.prior is not None,
            context=claim.context,
        )

    def _row(self, seal: Seal, grant: Granted) -> LogRow:
        kept = grant.head.sequence if grant.head else None
        return LogRow(
            key=seal.key,
            source=seal.source,
            fence=seal.fence,
            fingerprint=grant.record.fingerprint,
            live=seal.live,
            sequence=seal.sequence if seal.sequence is not None else kept,
            metadata_hash=seal.metadata_hash,
            effect_id=seal.effect_id,
            result=seal.result,
        )

    def _lease(self, move: Move, grant: Granted, asked_at: float) -> Lease:
        return Lease(
            self._ref(move, grant),
            fence=grant.record.fence,
            attempt=grant.record.attempt,
            takeover=grant.takeover,
            granted_at=asked_at,
            store_ms=grant.record.when_ms - move.claim.lease_ms,
            max_runtime_ms=self._max_runtime_ms,
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
