"""Head moves through `SegmentWriter`: ingest and retract, by workers that die, freeze and talk to the wrong server."""

from __future__ import annotations

from typing import Any

from ragfence.core.decisions import Claim, ConflictVerdict, Granted, Mode, Replay, StaleVerdict
from ragfence.core.hashing import digest
from ragfence.core.layout import NO_TOKEN
from ragfence.engine.batch_commit import BatchCommitter, FinishedEffect, Move, MovedHead, batch_tokens
from ragfence.engine.epochs import Epochs
from ragfence.engine.segment_log import Codec, PlainCodec, SegmentLoader
from ragfence.errors import StoreUnavailable
from ragfence.stores.fences import Lookup
from tests.machine.history import Event, linearizable
from tests.machine.lineages import Lineages
from tests.machine.observed import Observed, Watcher
from tests.machine.world import FOREVER_S, LEASE_MS, TENANT, Worker, World

SHARD = 7
SOURCE = b"s" * 20
RETRACT = "retract"


def key_of(value: str) -> bytes:
    return bytes((SHARD,)) + digest("test/value/1", value.encode())


NAME_OF = {key_of(value)[1:]: value for value in "ABCZ"}


def _ids_of(value: str | None, granted: Granted) -> FinishedEffect:
    return FinishedEffect(granted.prior.result if granted.prior else f"ids of {value}".encode())


class DocumentWorld(World):
    """One source, its head, and everybody who wants to move it."""

    spot = Lookup(key_of("A"), Mode.DOCUMENT, SOURCE)
    names = NAME_OF
    """by the digest of a key: which value it stands for"""
    codec: Codec = PlainCodec()

    def __init__(self, lineages: Lineages, *, sequenced: bool) -> None:
        super().__init__(lineages)
        self.sequenced = sequenced
        self.events: list[Event] = []
        self.watcher = Watcher()
        self.observe()

    def observe(self) -> None:
        primary = self.lineages.primary
        if not isinstance(primary.store, Observed):
            primary.store = Observed(primary.store, self.watcher)
        self.watcher.primary = primary.store

    def ingest(self, value: str | None, sequence: int | None) -> Worker:
        event = Event("write", value, sequence, self.now)
        self.events.append(event)

        def work(worker: Worker) -> None:
            writer = BatchCommitter(self.stores_of(worker), PlainCodec(), sleep=lambda _: self._breathe(worker))
            claim = Claim(
                key=key_of(value or RETRACT),
                fingerprint=(value or "none").encode().ljust(16, b"."),
                token=NO_TOKEN,
                mode=Mode.DOCUMENT,
                source=SOURCE,
                sequence=sequence,
                retract=value is None,
                lease_ms=LEASE_MS,
                max_attempts=10_000,
            )
            try:
                claim = claim._replace(token=next(batch_tokens()))
                (answer,) = writer.move([Move(claim, _ids_of, value)], wait_s=FOREVER_S)
            except StoreUnavailable:
                event.outcome = "error"
                return
            event.ended, event.outcome = self.now, outcome(answer)
            if isinstance(answer, MovedHead | Replay) and answer.record is not None and value is not None:
                assert answer.record.result == f"ids of {value}".encode(), "a key was answered with other ids"

        return self.spawn(work)

    def read_head(self) -> None:
        """A reader of the primary, at this moment."""
        store = self.lineages.primary.store
        marker = store.markers()[self.spot.key[0]]
        if not marker or not marker.usable or marker.epoch < Epochs(TENANT, self.objects).known().newest_begun:
            return
        self.now += 1
        (held,) = store.read([self.spot])
        self.events.append(Event("read", self._value(held.source), None, self.now, self.now))
        self.now += 1

    def check(self) -> None:
        """Quiet now: the log, the live head and what callers were told must be one story."""
        truth = self.truth()
        live = self.live_head()
        if live is not None:
            assert live == truth, f"hydration would turn the head from {live} into {truth}"
        self.land_late_writes()
        if live is not None:  # with a lease that may hide a commit, an unacknowledged write may still count
            assert self.truth() == truth, "a write that landed late changed the truth"
        truth = self.truth()
        if self.sequenced:
            self._check_sequences(truth)
        else:
            final = Event("read", truth[0], None, self.now + 1, self.now + 2)
            assert linearizable([*self.events, final]), f"no order explains {self.events} ending in {truth}"

    def _check_sequences(self, truth: tuple[str | None, int | None]) -> None:
        applied = [event for event in self.events if event.outcome in ("sealed", "duplicate")]
        for event in applied:
            assert event.ended is not None
            assert event.sequence is not None
            for later in applied:
                old_news = later.outcome == "duplicate" and self.lineages.split
                if later.began > event.ended and not old_news:
                    assert later.sequence >= event.sequence, f"{later} was applied after {event}"  # type: ignore[operator]
                if later.sequence == event.sequence:
                    assert later.value == event.value, f"one sequence, two contents: {event} and {later}"
        if applied:
            top = max(applied, key=lambda event: event.sequence or 0)
            assert truth[1] is not None
            assert truth[1] >= (top.sequence or 0), f"acknowledged {top}, but the truth is {truth}"
            if truth[1] == top.sequence:
                assert truth[0] == top.value

    def truth(self) -> tuple[str | None, int | None]:
        """What the next hydration would restore."""
        epochs = Epochs(TENANT, self.objects)
        loader = SegmentLoader(self.objects, self.codec)
        rows = [row for row in loader.rows(epochs.truth_below(10**18)) if row.source == self.spot.source]
        if not rows:
            return None, None
        newest = max(rows, key=lambda row: row.fence)
        return (self.names.get(newest.key[1:]) if newest.live else None), newest.sequence

    def land_late_writes(self) -> None:
        while self.late:
            self.late.pop()()

    def visible_head(self) -> tuple[str | None, int | None] | None:
        """What a reader would see, settled or not."""
        (held,) = self.lineages.primary.store.read([self.spot])
        return (self._value(held.source), held.source.head.sequence) if held.source and held.source.head else None

    def live_head(self) -> tuple[str | None, int | None] | None:
        """None: the primary may not answer, or a lease may hide a commit."""
        store = self.lineages.primary.store
        marker = store.markers()[self.spot.key[0]]
        if not marker or not marker.usable or marker.epoch < Epochs(TENANT, self.objects).known().newest_begun:
            return None
        (held,) = store.read([self.spot])
        if held.source and held.source.lease and held.source.lease.may_hide_a_commit:
            return None
        head = held.source.head if held.source else None
        return self._value(held.source), head.sequence if head else None

    def _value(self, source: Any) -> str | None:
        head = source.head if source else None
        return self.names.get(head.digest) if head and head.live else None


def outcome(answer: Any) -> str:
    match answer:
        case MovedHead():
            return "sealed"
        case Replay():
            return "duplicate"
        case StaleVerdict() | ConflictVerdict():
            return "stale"
    raise AssertionError(answer)
