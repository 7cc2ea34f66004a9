"""Epochs: what a shard may answer, how it is hydrated, and the lock that lets one process do it."""

from __future__ import annotations

import pytest

from ragfence.core.decisions import (
    Claim,
    Fenced,
    Granted,
    HeldRecords,
    InFlightVerdict,
    Mode,
    NotReadyVerdict,
    Replay,
    Sealed,
    StaleVerdict,
)
from ragfence.core.hashing import SHARDS
from ragfence.core.layout import (
    MAX_EPOCH,
    NO_TOKEN,
    SEAL_POSITION,
    State,
)
from ragfence.core.operations import FenceNumber
from ragfence.core.records import Head, KeyRecord
from ragfence.errors import StoreUnsafe
from ragfence.stores.fences import Loaded, LoadedReceipt, LoadedSource, Marker
from ragfence.testing.contracts.fence_calls import (
    ALL_MODES,
    HOUR_MS,
    LEASE_MS,
    SHARD,
    FencesUnderTest,
    claim,
    granted,
    lease,
    read,
    rows_of,
    seal,
    sealed,
    start_epoch,
    verdict,
)

FROM_THE_LOG = KeyRecord(
    State.SEALED, b"f" * 16, NO_TOKEN, FenceNumber(1, 9), 1, 0, 0, effect_id="ef_log", result=b"j1"
)


class EpochContract:
    """Markers, epochs and fence numbers: a store answers only while it is known to be whole."""

    @ALL_MODES
    def test_fence_numbers_ascend_within_a_shard(self, fences: FencesUnderTest, mode: Mode) -> None:
        other = fences.reopen()
        given = []
        for number in range(3):
            for store in (fences.store, other):
                asked = claim(mode, "A", by=f"{number} {id(store)}", source=f"{number} {id(store)}")
                given.append(granted(store, asked).record.fence)
        assert given == sorted(set(given))
        assert {fence.epoch for fence in given} == {1}

    @ALL_MODES
    def test_fence_numbers_ascend_over_epochs(self, fences: FencesUnderTest, mode: Mode) -> None:
        given = []
        for epoch in (1, 2, 5):
            if epoch > 1:
                start_epoch(fences.store, epoch)
            asked = claim(mode, by=f"{epoch}", source=f"{epoch}")
            given.append(granted(fences.store, asked).record.fence)
        assert given == sorted(set(given))
        assert [fence.epoch for fence in given] == [1, 2, 5]

    @ALL_MODES
    @pytest.mark.parametrize("why", ["absent", "hydrating", "another run"])
    def test_a_shard_that_is_not_ready_answers_nothing(self, fences: FencesUnderTest, mode: Mode, why: str) -> None:
        asked = claim(mode, by="one")
        first = granted(fences.store, asked)
        rows = rows_of(fences.store)
        _make_unready(fences, why)
        store = fences.store
        assert store.claim([asked, claim(mode, "B", by="two")]) == [NotReadyVerdict(), NotReadyVerdict()]
        assert verdict(store, claim(mode, by="two")) == NotReadyVerdict()
        assert store.seal([seal(asked, first)]) == [NotReadyVerdict()]
        assert store.renew([lease(asked, first)]) == [False]
        assert store.release([lease(asked, first)]) == [False]
        assert store.reset_attempts([lease(asked, first)]) == [False]
        assert read(store, asked) == HeldRecords()
        assert list(store.heads(SHARD)) == []
        assert rows_of(store) == rows

    def test_markers_tell_what_each_shard_is(self, fences: FencesUnderTest) -> None:
        assert fences.store.markers() == [Marker(1, ready=True, usable=True)] * SHARDS
        _make_unready(fences, "hydrating")
        assert fences.store.markers() == [Marker(2, ready=False, usable=False)] * SHARDS
        assert fences.store.finish_epoch(2)
        fences.restart()
        assert fences.store.markers() == [Marker(2, ready=True, usable=False)] * SHARDS
        fences.store.forget_markers(3)
        assert fences.store.markers() == [None] * SHARDS

    def test_only_ready_markers_of_older_epochs_are_forgotten(self, fences: FencesUnderTest) -> None:
        fences.store.forget_markers(1)
        assert fences.store.markers() == [Marker(1, ready=True, usable=True)] * SHARDS
        fences.store.begin_epoch(2)
        fences.store.forget_markers(9)
        assert fences.store.markers() == [Marker(2, ready=False, usable=False)] * SHARDS

    def test_an_epoch_begins_only_above_every_earlier_one(self, fences: FencesUnderTest) -> None:
        start_epoch(fences.store, 5)
        for refused in (1, 4, 5):
            assert not fences.store.begin_epoch(refused)
        assert fences.store.markers() == [Marker(5, ready=True, usable=True)] * SHARDS
        assert fences.store.begin_epoch(6)
        assert not fences.store.begin_epoch(6)
        assert fences.store.begin_epoch(7)

    @ALL_MODES
    def test_the_highest_epoch_is_told_apart_from_the_one_before(self, fences: FencesUnderTest, mode: Mode) -> None:
        """Seven bytes, and Lua's numbers, hold it exactly: else an owner of the epoch before could seal."""
        asked, other = claim(mode, owner="host:1"), claim(mode, by="two", source="other")
        start_epoch(fences.store, MAX_EPOCH - 1)
        before = granted(fences.store, other)
        start_epoch(fences.store, MAX_EPOCH)
        first = granted(fences.store, asked)
        assert (before.record.fence.epoch, first.record.fence.epoch) == (MAX_EPOCH - 1, MAX_EPOCH)
        assert fences.store.renew([lease(asked, first), lease(other, before)]) == [True, False]
        outcomes = fences.store.seal([seal(asked, first), seal(other, before)])
        assert isinstance(outcomes[0], Sealed)
        assert isinstance(outcomes[1], Fenced)
        assert outcomes[0].record.fence == first.record.fence
        (row,) = [row for row in rows_of(fences.store) if row.position == SEAL_POSITION and row.token == asked.token]
        assert row.fence == first.record.fence

    def test_an_epoch_that_records_cannot_hold_is_refused(self, fences: FencesUnderTest) -> None:
        for refused in (MAX_EPOCH + 1, 2**56, -1):
            with pytest.raises(StoreUnsafe, match=f"epoch {refused} is out of range"):
                fences.store.begin_epoch(refused)
        assert fences.store.markers() == [Marker(1, ready=True, usable=True)] * SHARDS

    @pytest.mark.parametrize("why", ["ready", "a lower epoch", "a higher epoch", "another run", "absent"])
    def test_hydration_writes_nothing_unless_its_own_epoch_is_hydrating(
        self, fences: FencesUnderTest, why: str
    ) -> None:
        asked = claim(Mode.DOCUMENT)
        epoch = {"ready": 1, "a lower epoch": 2, "a higher epoch": 4}.get(why, 3)
        if why != "ready":
            fences.store.begin_epoch(3)
        if why == "another run":
            fences.restart()
        if why == "absent":
            fences.flush()
        items: list[Loaded] = [_loaded_source(asked), LoadedReceipt(asked.key, FROM_THE_LOG)]
        assert not fences.store.load(epoch, items)
        assert not fences.store.finish_epoch(epoch)
        if why != "ready":
            start_epoch(fences.store, 9)
        assert isinstance(verdict(fences.store, asked), Granted)
        assert list(fences.store.scan()) == []

    def test_a_document_that_was_hydrated_answers_with_the_receipt_of_the_log(self, fences: FencesUnderTest) -> None:
        head, parked = claim(Mode.DOCUMENT, "B", content="f"), claim(Mode.DOCUMENT, "A", content="f")
        record = KeyRecord(State.SEALED, head.fingerprint, NO_TOKEN, FenceNumber(1, 9), 1, 0, 0, effect_id="ef_log")
        items: list[Loaded] = [_loaded_source(head, record, sequence=4), LoadedReceipt(parked.key, record)]
        assert fences.store.begin_epoch(2)
        assert fences.store.load(2, items)
        assert verdict(fences.store, head) == NotReadyVerdict()
        assert fences.store.finish_epoch(2)
        assert verdict(fences.store, head) == Replay(record)
        assert verdict(fences.store, claim(Mode.DOCUMENT, "C", sequence=3)) == StaleVerdict(4)
        assert granted(fences.store, parked).prior == record

    @ALL_MODES
    def test_a_lease_of_an_older_epoch_can_neither_seal_nor_renew(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one")
        first = granted(fences.store, asked)
        start_epoch(fences.store, 2)
        before = read(fences.store, asked)
        (outcome,) = fences.store.seal([seal(asked, first)])
        assert isinstance(outcome, Fenced)
        assert fences.store.renew([lease(asked, first)]) == [False]
        assert read(fences.store, asked) == before

    @ALL_MODES
    def test_a_seal_repeated_in_a_later_epoch_is_fenced_out(self, fences: FencesUnderTest, mode: Mode) -> None:
        """What was sealed in an older epoch counts only if the log brought it back."""
        asked = claim(mode, by="one")
        first = granted(fences.store, asked)
        fences.store.seal([seal(asked, first)])
        start_epoch(fences.store, 2)
        assert isinstance(fences.store.seal([seal(asked, first)])[0], Fenced)

    def test_keys_without_a_sequence_survive_a_new_epoch(self, fences: FencesUnderTest) -> None:
        receipt = sealed(fences.store, claim(Mode.KEYED, "A"))
        pending = granted(fences.store, claim(Mode.KEYED, "B", by="one"))
        start_epoch(fences.store, 2)
        assert verdict(fences.store, claim(Mode.KEYED, "A", by="two")) == Replay(receipt)
        answer = verdict(fences.store, claim(Mode.KEYED, "B", by="two"))
        assert answer == InFlightVerdict(pending.record.when_ms, pending.record)
        fences.clock.advance(LEASE_MS)
        assert granted(fences.store, claim(Mode.KEYED, "B", by="two")).record.attempt == 2

    def test_the_sequence_of_a_source_is_void_in_a_new_epoch_but_its_receipts_are_not(
        self, fences: FencesUnderTest
    ) -> None:
        receipt = sealed(fences.store, claim(Mode.SEQUENCED, "A", sequence=5))
        granted(fences.store, claim(Mode.SEQUENCED, "B", by="one", sequence=6))
        start_epoch(fences.store, 2)
        assert read(fences.store, claim(Mode.SEQUENCED, "A")) == HeldRecords(receipt, None)
        move = granted(fences.store, claim(Mode.SEQUENCED, "A", by="two", sequence=5))
        assert (move.prior, move.head, move.takeover) == (receipt, None, False)

    def test_documents_the_log_did_not_bring_back_are_void_in_a_new_epoch(self, fences: FencesUnderTest) -> None:
        sealed(fences.store, claim(Mode.DOCUMENT, "A"))
        sealed(fences.store, claim(Mode.DOCUMENT, "B"))
        granted(fences.store, claim(Mode.DOCUMENT, "C", by="one"))
        start_epoch(fences.store, 2)
        assert list(fences.store.heads(SHARD)) == []
        for revision in ("A", "B", "C"):
            assert read(fences.store, claim(Mode.DOCUMENT, revision)) == HeldRecords()
        move = granted(fences.store, claim(Mode.DOCUMENT, "A", by="two"))
        assert (move.prior, move.head, move.takeover, move.record.attempt) == (None, None, False, 1)

    @ALL_MODES
    def test_tenants_do_not_see_each_other(self, fences: FencesUnderTest, mode: Mode) -> None:
        other = fences.reopen("other")
        assert other.tenant == "other"
        assert verdict(other, claim(mode, by="two")) == NotReadyVerdict()
        start_epoch(other, 3)
        sealed(fences.store, claim(mode, by="one"))
        assert read(other, claim(mode)) == HeldRecords()
        assert granted(other, claim(mode, by="two")).record.fence == FenceNumber(3, 1)
        assert len(rows_of(other)) == 1
        assert len(rows_of(fences.store)) == 2


class SoloContract:
    """No object store stands behind it: what is lost cannot be brought back, but fence numbers never go back."""

    @ALL_MODES
    def test_a_solo_store_makes_itself_ready(self, fences: FencesUnderTest, mode: Mode) -> None:
        store = fences.reopen("solo", solo=True)
        assert store.markers() == [None] * SHARDS
        first = granted(store, claim(mode, by="one"))
        assert first.record.fence == FenceNumber(fences.clock() * 1000, 1)
        assert store.markers()[SHARD] == Marker(first.record.fence.epoch, ready=True, usable=True)
        fences.clock.advance(1)
        again = granted(fences.reopen("solo", solo=True), claim(mode, "A", by="two", source="other"))
        assert again.record.fence == FenceNumber(first.record.fence.epoch, 2)

    @ALL_MODES
    def test_a_solo_store_starts_a_new_epoch_with_every_run(self, fences: FencesUnderTest, mode: Mode) -> None:
        store = fences.reopen("solo", solo=True)
        receipt = sealed(store, claim(mode, "A"))
        asked = claim(mode, "A", by="one", source="other")
        first = granted(store, asked)
        fences.restart()
        store = fences.reopen("solo", solo=True)
        assert verdict(store, claim(mode, "A", by="two")) == Replay(receipt)
        assert isinstance(store.seal([seal(asked, first)])[0], Fenced)
        fences.clock.advance(LEASE_MS)
        second = granted(store, claim(mode, "A", by="two", source="other"))
        assert second.record.fence.epoch > first.record.fence.epoch
        assert second.record.attempt == 2

    def test_the_epoch_of_a_solo_store_grows_even_if_the_clock_stood_still(self, fences: FencesUnderTest) -> None:
        epochs = []
        for run in range(3):
            store = fences.reopen("solo", solo=True)
            epochs.append(granted(store, claim(Mode.KEYED, f"{run}")).record.fence.epoch)
            fences.restart()
        assert epochs == [epochs[0], epochs[0] + 1, epochs[0] + 2]

    @ALL_MODES
    def test_fence_numbers_of_a_solo_store_never_go_back_when_it_is_flushed(
        self, fences: FencesUnderTest, mode: Mode
    ) -> None:
        given = []
        for run in range(3):
            store = fences.reopen("solo", solo=True)
            given += [granted(store, claim(mode, by=f"{run}", source=f"{n}")).record.fence for n in range(2)]
            fences.clock.advance(1)
            fences.flush()
        assert given == sorted(set(given))

    def test_a_lease_from_before_a_flush_cannot_seal(self, fences: FencesUnderTest) -> None:
        store = fences.reopen("solo", solo=True)
        asked = claim(Mode.KEYED, by="one")
        first = granted(store, asked)
        fences.clock.advance(1)
        fences.flush()
        assert isinstance(fences.reopen("solo", solo=True).seal([seal(asked, first)])[0], Fenced)
        assert granted(fences.reopen("solo", solo=True), claim(Mode.KEYED, by="two")).record.attempt == 1


class LockContract:
    """The lock that lets one process do the work."""

    def test_a_lock_has_one_holder_until_it_is_unlocked(self, fences: FencesUnderTest) -> None:
        other = fences.reopen()
        assert fences.store.lock("hydration", "one", HOUR_MS)
        assert not other.lock("hydration", "two", HOUR_MS)
        assert other.lock("compaction", "two", HOUR_MS)
        other.unlock("hydration", "two")  # not its own
        assert not other.lock("hydration", "two", HOUR_MS)
        fences.store.unlock("hydration", "one")
        assert other.lock("hydration", "two", HOUR_MS)

    def test_a_lock_runs_out_unless_its_holder_takes_it_again(self, fences: FencesUnderTest) -> None:
        assert fences.store.lock("hydration", "one", HOUR_MS)
        fences.clock.advance(HOUR_MS - LEASE_MS)
        assert fences.store.lock("hydration", "one", HOUR_MS)
        fences.clock.advance(HOUR_MS - LEASE_MS)
        assert not fences.store.lock("hydration", "two", HOUR_MS)
        fences.clock.advance(HOUR_MS)
        assert fences.store.lock("hydration", "two", HOUR_MS)

    def test_a_lock_belongs_to_its_tenant(self, fences: FencesUnderTest) -> None:
        assert fences.store.lock("hydration", "one", HOUR_MS)
        assert fences.reopen("other").lock("hydration", "two", HOUR_MS)


def _make_unready(fences: FencesUnderTest, why: str) -> None:
    match why:
        case "absent":
            fences.store.forget_markers(2)
        case "hydrating":
            assert fences.store.begin_epoch(2)
        case "another run":
            fences.restart()


def _loaded_source(asked: Claim, record: KeyRecord = FROM_THE_LOG, sequence: int | None = None) -> LoadedSource:
    head = Head(asked.digest, True, sequence, asked.metadata_hash, record)
    return LoadedSource(asked.key[0], asked.source, head.encode())
