"""The second half of the contract of fence stores: how a store keeps, forgets and accounts for what it was told."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ragfence.core.decision_rows import Row
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
    FENCED_OUT,
    FENCED_POSITION,
    HEALED,
    MAX_EPOCH,
    NO_TOKEN,
    RELEASE_POSITION,
    SEAL_POSITION,
    TAKEOVER,
    TOKEN_BYTES,
    RowKind,
    State,
)
from ragfence.core.operations import FenceNumber
from ragfence.core.records import Head, KeyRecord, SourceLease, SourceRecord, decode_record, park
from ragfence.errors import FormatTooNew, StoreClosed, StoreUnsafe
from ragfence.stores.fences import FenceStore, Loaded, LoadedReceipt, LoadedSource, Lookup, Marker, RowEntry
from ragfence.testing.contracts.counts import CountContract
from ragfence.testing.contracts.fence_calls import (
    ALL_MODES,
    DAY_MS,
    HOUR_MS,
    LEASE_MS,
    SHARD,
    WITH_A_SOURCE,
    FencesUnderTest,
    ask,
    claim,
    granted,
    lease,
    read,
    rows_of,
    seal,
    sealed,
    source_of,
    start_epoch,
    verdict,
)
from ragfence.testing.contracts.row_drain import DrainContract

FROM_THE_LOG = KeyRecord(
    State.SEALED, b"f" * 16, NO_TOKEN, FenceNumber(1, 9), 1, 0, 0, effect_id="ef_log", result=b"j1"
)


AFTER_CLOSING: dict[str, Callable[[FenceStore, Claim, list[RowEntry]], object]] = {
    "claim": lambda store, held, _: store.claim([held]),
    "claim of many": lambda store, held, _: store.claim([held, claim(Mode.KEYED, "B")]),
    "renew": lambda store, held, _: store.renew([lease(held)]),
    "release": lambda store, held, _: store.release([lease(held)]),
    "read": lambda store, held, _: store.read([Lookup(held.key)]),
    "heads": lambda store, held, _: list(store.heads(SHARD)),
    "scan": lambda store, held, _: list(store.scan()),
    "rows": lambda store, held, _: list(store.rows()),
    "record": lambda store, held, _: store.record(
        [Row(b"t" * TOKEN_BYTES, 0, 1, RowKind.NEW, held.key, held.fingerprint)]
    ),
    "drop_rows": lambda store, held, entries: store.drop_rows(entries),
    "stats": lambda store, held, _: store.stats(),
    "markers": lambda store, held, _: store.markers(),
    "begin_epoch": lambda store, held, _: store.begin_epoch(9),
    "lock": lambda store, held, _: store.lock("name", "token", 1000),
    "unlock": lambda store, held, _: store.unlock("name", "token"),
}


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


class BatchContract:
    """Every call takes a sequence; what is answered does not depend on how it was cut into batches."""

    def test_a_batch_is_answered_as_if_its_claims_came_one_by_one(self, fences: FencesUnderTest) -> None:
        twin = fences.reopen("twin")
        start_epoch(twin, 1)
        for store in (fences.store, twin):
            _furnish(store)
        cases: list[tuple[str, dict[str, Any]]] = [
            ("sealed", {}),
            ("nothing", {}),
            ("held", {}),
            ("released", {"max_attempts": 5}),
            ("sealed", {"content": "other"}),
            ("quarantined", {}),
            ("failed", {}),
        ]
        batch = [
            claim(
                mode,
                name,
                by=f"{number} {mode} {shard}",
                source=f"{name} {mode}",
                shard=shard,
                **{"max_attempts": 1, **fields},
            )
            for number, (name, fields) in enumerate(cases)
            for shard in (SHARD, 0, 63)
            for mode in Mode
        ]
        one_by_one = [verdict(twin, each) for each in batch]
        assert fences.store.claim(batch) == one_by_one
        assert {type(answer).__name__ for answer in one_by_one} == {
            "Granted",
            "InFlightVerdict",
            "ConflictVerdict",
            "Replay",
        }
        assert sorted(rows_of(fences.store), key=_row_id) == sorted(rows_of(twin), key=_row_id)

    @ALL_MODES
    def test_batches_count_on_from_each_other(self, fences: FencesUnderTest, mode: Mode) -> None:
        """However a store counts: no fence number is given twice, and later ones are higher."""
        given = []
        for batch in ("ABC", "DE", "F", "GH"):
            asked = [claim(mode, name, by=name, source=name) for name in batch]
            answers = fences.store.claim(asked)
            given += [answer.record.fence.counter for answer in answers if isinstance(answer, Granted)]
        assert given == list(range(given[0], given[0] + 8))

    @ALL_MODES
    def test_sealed_keys_of_a_shard_that_is_not_ready_are_not_answered(
        self, fences: FencesUnderTest, mode: Mode
    ) -> None:
        names = "ABC"
        for name in names:
            sealed(fences.store, claim(mode, name, by=name, source=name))
        fences.restart()
        again = [claim(mode, name, by=f"{name} again", source=name) for name in names]
        assert fences.store.claim(again) == [NotReadyVerdict()] * 3
        assert fences.store.claim(again[:1]) == [NotReadyVerdict()]

    def test_the_same_document_twice_in_a_batch_is_answered_in_order(self, fences: FencesUnderTest) -> None:
        receipt = sealed(fences.store, claim(Mode.DOCUMENT, "A"))
        batch = [
            claim(Mode.DOCUMENT, "A", by="1"),
            claim(Mode.DOCUMENT, "B", by="2"),
            claim(Mode.DOCUMENT, "A", by="3"),
        ]
        first, second, third = fences.store.claim(batch)
        assert first == Replay(receipt)
        assert isinstance(second, Granted)
        assert third == InFlightVerdict(second.record.when_ms, second.record)

    @ALL_MODES
    def test_the_same_key_twice_in_a_batch_is_granted_once(self, fences: FencesUnderTest, mode: Mode) -> None:
        first, second = fences.store.claim([claim(mode, by="1"), claim(mode, by="2")])
        assert isinstance(first, Granted)
        assert second == InFlightVerdict(first.record.when_ms, first.record)

    @ALL_MODES
    def test_answers_stand_in_the_order_of_the_calls_whatever_the_shards(
        self, fences: FencesUnderTest, mode: Mode
    ) -> None:
        store = fences.store
        batch = [claim(mode, by=f"{n}", source=f"{n}", shard=(n * 37) % 5) for n in range(20)]
        answers = store.claim(batch)
        assert [answer.record.token for answer in answers if isinstance(answer, Granted)] == [
            each.token for each in batch
        ]
        held = store.read([Lookup(each.key, each.mode, each.source) for each in batch])
        assert [_pending(each).token for each in held] == [each.token for each in batch]
        pairs = list(zip(batch, answers, strict=True))
        # Every third has lost its lease.
        refs = [
            lease(each, answer) if n % 3 else lease(each, epoch=1, token=b"somebody else..!")
            for n, (each, answer) in enumerate(pairs)
            if isinstance(answer, Granted)
        ]
        expected = [bool(n % 3) for n in range(20)]
        assert store.renew(refs) == expected
        outcomes = store.seal([seal(each, answer, result=each.token) for each, answer in pairs[:10]])
        assert [outcome.record.result for outcome in outcomes if isinstance(outcome, Sealed)] == [
            each.token for each in batch[:10]
        ]
        assert store.release(refs[10:]) == expected[10:]
        assert store.reset_attempts([lease(each) for each in batch]) == [False] * 10 + [True] * 10

    def test_an_empty_batch_is_answered_with_nothing(self, fences: FencesUnderTest) -> None:
        store = fences.store
        assert (store.claim([]), store.seal([]), store.read([])) == ([], [], [])
        assert (store.renew([]), store.release([]), store.reset_attempts([])) == ([], [], [])
        store.record([])
        store.forget([])
        assert rows_of(store) == []


class RowContract:
    """Exactly one decision row per answer, in the store before the answer is."""

    @ALL_MODES
    def test_every_answer_to_a_claim_leaves_one_row(self, fences: FencesUnderTest, mode: Mode) -> None:
        receipt = sealed(fences.store, claim(mode, "sealed", source="sealed"), effect_id="ef_1")
        held = granted(fences.store, claim(mode, "held", source="held"))
        fences.clock.advance(7)
        for name, content, kind, winner, sealed_at in (
            ("new", "", RowKind.NEW, b"", 0),
            ("sealed", "", RowKind.DUPLICATE, receipt.token, receipt.when_ms),
            ("sealed", "other", RowKind.CONFLICT, NO_TOKEN, receipt.when_ms),
            ("held", "", RowKind.IN_FLIGHT, held.record.token, 0),
        ):
            before = rows_of(fences.store)
            asked = claim(mode, name, by=f"{kind}", source=name, content=content, position=3, waited_ms=12)
            verdict(fences.store, asked)
            (row,) = [row for row in rows_of(fences.reopen()) if row not in before]
            assert (row.kind, row.key, row.fingerprint) == (kind, asked.key, asked.fingerprint)
            assert (row.token, row.position, row.row_id) == (asked.token, 3, f"{asked.token.hex()}03")
            assert (row.ts_ms, row.waited_ms, row.context) == (fences.clock(), 12, asked.context)
            assert (row.winner, row.sealed_at_ms) == (winner or asked.token, sealed_at)
            assert row.effect_id == ("ef_1" if name == "sealed" else "")

    @WITH_A_SOURCE
    def test_a_stale_answer_leaves_one_row(self, fences: FencesUnderTest, mode: Mode) -> None:
        sealed(fences.store, claim(mode, "A", sequence=5))
        asked = claim(mode, "B", by="two", sequence=4)
        verdict(fences.store, asked)
        (row,) = [row for row in rows_of(fences.store) if row.token == asked.token]
        assert (row.kind, row.winner) == (RowKind.STALE, NO_TOKEN)

    @ALL_MODES
    def test_a_row_tells_of_takeover_and_quarantine(self, fences: FencesUnderTest, mode: Mode) -> None:
        for by in ("one", "two", "three"):
            verdict(fences.store, claim(mode, by=by, max_attempts=2))
            fences.clock.advance(LEASE_MS)
        told = [(row.kind, row.attempt, row.flags, row.error_code) for row in rows_of(fences.store)]
        assert told == [
            (RowKind.NEW, 1, 0, ""),
            (RowKind.NEW, 2, TAKEOVER, ""),
            (RowKind.IN_FLIGHT, 2, 0, "QUARANTINED"),
        ]

    @ALL_MODES
    def test_a_conflict_whose_caller_writes_the_row_leaves_none(self, fences: FencesUnderTest, mode: Mode) -> None:
        sealed(fences.store, claim(mode, by="one"))
        before = rows_of(fences.store)
        verdict(fences.store, claim(mode, by="two", content="other", row_on_conflict=False))
        assert rows_of(fences.store) == before

    @ALL_MODES
    def test_a_batch_leaves_one_row_per_claim(self, fences: FencesUnderTest, mode: Mode) -> None:
        sealed(fences.store, claim(mode, "A", source="0", shard=0))
        before = {row.row_id for row in rows_of(fences.store)}
        batch = [claim(mode, "A", by=f"{n}", source=f"{n}", shard=n % 3) for n in range(9)]
        fences.store.claim(batch)
        written = {row.row_id: row.kind for row in rows_of(fences.reopen()) if row.row_id not in before}
        kinds = [RowKind.DUPLICATE] + [RowKind.NEW] * 8
        assert written == {f"{each.token.hex()}00": kind for each, kind in zip(batch, kinds, strict=True)}

    @ALL_MODES
    def test_a_call_sent_again_is_the_same_row(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one")
        first = granted(fences.store, asked)
        fences.clock.advance(3)
        granted(fences.store, asked)
        for _ in range(2):
            fences.store.seal([seal(asked, first)])
        assert [(row.position, row.ts_ms) for row in rows_of(fences.store)] == [
            (0, fences.clock() - 3),
            (SEAL_POSITION, fences.clock()),
        ]

    @ALL_MODES
    def test_a_seal_leaves_the_row_of_the_outcome(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one")
        first = granted(fences.store, asked)
        fences.clock.advance(5)
        fences.store.seal([seal(asked, first, effect_id="ef_1", ttl_ms=DAY_MS, flags=HEALED, waited_ms=4)])
        (row,) = [row for row in rows_of(fences.store) if row.position == SEAL_POSITION]
        assert (row.kind, row.key, row.token, row.winner) == (RowKind.NEW, asked.key, asked.token, asked.token)
        assert (row.effect_id, row.flags, row.waited_ms) == ("ef_1", HEALED, 4)
        assert (row.fence, row.attempt, row.error_code) == (first.record.fence, 1, "")
        assert (row.first_seen_ms, row.sealed_at_ms) == (fences.clock() - 5, fences.clock())
        assert row.expires_ms == fences.clock() + DAY_MS

    @ALL_MODES
    def test_a_sealed_failure_leaves_its_error_in_the_row(self, fences: FencesUnderTest, mode: Mode) -> None:
        sealed(fences.store, claim(mode), failed=True, error="CARD.declined")
        (row,) = [row for row in rows_of(fences.store) if row.position == SEAL_POSITION]
        assert (row.kind, row.error_code, row.expires_ms) == (RowKind.NEW, "CARD.declined", 0)

    @ALL_MODES
    def test_a_seal_of_an_effect_that_was_found_leaves_a_duplicate(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one")
        sealed(fences.store, asked, duplicate=True, winner=b"w" * TOKEN_BYTES)
        (row,) = [row for row in rows_of(fences.store) if row.position == SEAL_POSITION]
        assert (row.kind, row.token, row.winner) == (RowKind.DUPLICATE, asked.token, b"w" * TOKEN_BYTES)

    @ALL_MODES
    def test_a_stale_owner_that_seals_leaves_a_row_that_says_so(self, fences: FencesUnderTest, mode: Mode) -> None:
        stale = claim(mode, by="one")
        first = granted(fences.store, stale)
        fences.clock.advance(LEASE_MS)
        winner = sealed(fences.store, claim(mode, by="two"))
        fences.store.seal([seal(stale, first)])
        (row,) = [row for row in rows_of(fences.store) if row.token == stale.token and row.position]
        assert row.position == FENCED_POSITION, "a seal that counts has the other, whoever writes its row"
        assert (row.kind, row.flags, row.error_code) == (RowKind.DUPLICATE, FENCED_OUT, "LEASE.fenced_out")
        assert (row.winner, row.fence, row.sealed_at_ms) == (winner.token, winner.fence, winner.when_ms)

    @ALL_MODES
    def test_a_seal_that_came_too_late_leaves_no_row_where_a_commit_may_still_count(
        self, fences: FencesUnderTest, mode: Mode
    ) -> None:
        """Behind this store stands an object store: the successor finds the commit, and performs nothing."""
        stale = claim(mode, by="one")
        first = granted(fences.store, stale)
        fences.clock.advance(LEASE_MS)
        granted(fences.store, claim(mode, by="two"))
        assert isinstance(fences.store.seal([seal(stale, first)])[0], Fenced)
        assert [row.position for row in rows_of(fences.store)] == [0, 0]

    @ALL_MODES
    def test_what_two_have_healed_was_performed_once(self, fences: FencesUnderTest, mode: Mode) -> None:
        slow, found = claim(mode, by="one"), b"w" * TOKEN_BYTES
        first = granted(fences.store, slow)
        fences.clock.advance(LEASE_MS)
        sealed(fences.store, claim(mode, by="two"), duplicate=True, flags=HEALED, winner=found)
        late = seal(slow, first, duplicate=True, flags=HEALED, winner=found)
        assert isinstance(fences.store.seal([late])[0], Fenced)
        assert [row for row in rows_of(fences.store) if row.flags & FENCED_OUT] == []

    @ALL_MODES
    @pytest.mark.parametrize("expire", [False, True])
    def test_a_release_leaves_a_row_with_its_error(self, fences: FencesUnderTest, mode: Mode, expire: bool) -> None:
        for error, code in (("TIMEOUT", "TIMEOUT"), ("", "RELEASED")):
            asked = claim(mode, by=code)
            fences.store.release([lease(asked, granted(fences.store, asked))], error, expire=expire)
            (row,) = [row for row in rows_of(fences.store) if row.row_id == f"{asked.token.hex()}{RELEASE_POSITION:x}"]
            assert (row.kind, row.error_code, row.sealed_at_ms) == (RowKind.NEW, code, 0)

    def test_rows_can_be_written_by_the_caller(self, fences: FencesUnderTest) -> None:
        rows = [
            Row(
                bytes((n,)) * TOKEN_BYTES,
                n,
                fences.clock(),
                RowKind.ENDED,
                bytes((n,)) + b"k" * 32,
                b"f" * 16,
                error_code="why",
            )
            for n in (1, 2, 3)
        ]
        for _ in range(2):
            fences.store.record(rows)
        assert sorted(rows_of(fences.store), key=_row_id) == rows

    def test_rows_can_be_read_from_a_moment_on(self, fences: FencesUnderTest) -> None:
        asked = [claim(Mode.KEYED, f"{n}", by=f"{n}", shard=n) for n in range(3)]
        for each in asked:
            fences.clock.advance(10)
            verdict(fences.store, each)
        assert {row.token for row in fences.store.rows(fences.clock() - 10)} == {each.token for each in asked[1:]}
        assert list(fences.store.rows(fences.clock() + 1)) == []

    def test_rows_of_one_shard_can_be_read_alone(self, fences: FencesUnderTest) -> None:
        asked = [claim(Mode.KEYED, f"{n}", by=f"{n}", shard=n) for n in (0, 1, 63)]
        for each in asked:
            verdict(fences.store, each)
        for each in asked:
            assert {row.token for row in fences.store.rows(shard=each.key[0])} == {each.token}
        assert list(fences.store.rows(shard=2)) == []


class ExpiryContract:
    """What has a TTL is forgotten in time, and not before."""

    def test_a_sealed_key_is_new_again_after_its_ttl(self, fences: FencesUnderTest) -> None:
        asked = claim(Mode.KEYED, by="one", pending_ttl_ms=DAY_MS)
        first = granted(fences.store, asked)
        fences.clock.advance(LEASE_MS)
        (outcome,) = fences.store.seal([seal(asked, first, ttl_ms=HOUR_MS)])
        assert isinstance(outcome, Sealed)
        fences.clock.advance(HOUR_MS - LEASE_MS)  # counted from the seal, not from the claim
        assert verdict(fences.store, claim(Mode.KEYED, by="two")) == Replay(outcome.record)
        fences.clock.advance(LEASE_MS)  # ... nor from the last duplicate
        again = granted(fences.store, claim(Mode.KEYED, by="two"))
        assert (again.record.attempt, again.takeover) == (1, False)
        assert again.record.first_seen_ms == fences.clock()
        assert again.record.fence > first.record.fence

    def test_a_pending_key_is_forgotten_after_its_ttl(self, fences: FencesUnderTest) -> None:
        granted(fences.store, claim(Mode.KEYED, by="one", pending_ttl_ms=HOUR_MS))
        fences.clock.advance(HOUR_MS - LEASE_MS)
        second = claim(Mode.KEYED, by="two", pending_ttl_ms=HOUR_MS)
        answer = granted(fences.store, second)
        assert answer.record.attempt == 2
        fences.clock.advance(HOUR_MS - LEASE_MS)  # every attempt counts anew
        assert fences.store.renew([lease(second, answer)]) == [True]
        fences.clock.advance(HOUR_MS - LEASE_MS)
        assert granted(fences.store, claim(Mode.KEYED, by="three", pending_ttl_ms=HOUR_MS)).record.attempt == 3
        fences.clock.advance(HOUR_MS)
        assert granted(fences.store, claim(Mode.KEYED, by="four")).record.attempt == 1

    def test_a_seal_after_the_pending_record_expired_is_fenced_out(self, fences: FencesUnderTest) -> None:
        asked = claim(Mode.KEYED, by="one", pending_ttl_ms=HOUR_MS)
        first = granted(fences.store, asked)
        fences.clock.advance(HOUR_MS)
        assert fences.store.seal([seal(asked, first)]) == [Fenced(None)]

    def test_the_sequence_of_a_source_is_forgotten_after_its_ttl(self, fences: FencesUnderTest) -> None:
        asked = claim(Mode.SEQUENCED, "A", sequence=5, pending_ttl_ms=HOUR_MS, source_ttl_ms=DAY_MS)
        sealed(fences.store, asked, ttl_ms=HOUR_MS, source_ttl_ms=DAY_MS)
        fences.clock.advance(DAY_MS - HOUR_MS)
        assert verdict(fences.store, claim(Mode.SEQUENCED, "B", by="two", sequence=4)) == StaleVerdict(5)
        fences.clock.advance(HOUR_MS)
        assert list(fences.store.heads(SHARD)) == []
        assert isinstance(verdict(fences.store, claim(Mode.SEQUENCED, "B", by="two", sequence=4)), Granted)

    @ALL_MODES
    def test_without_a_ttl_nothing_is_forgotten(self, fences: FencesUnderTest, mode: Mode) -> None:
        receipt = sealed(fences.store, claim(mode))
        fences.clock.advance(100 * 365 * DAY_MS)
        assert fences.store.purge_expired() == 0
        assert verdict(fences.store, claim(mode, by="two")) == Replay(receipt)

    def test_a_purge_takes_away_what_expired_and_nothing_else(self, fences: FencesUnderTest) -> None:
        for number in range(4):
            sealed(fences.store, claim(Mode.KEYED, f"{number}", by=f"{number}"), ttl_ms=number * HOUR_MS)
        fences.clock.advance(2 * HOUR_MS)
        while fences.store.purge_expired(limit=1):
            pass
        kept = {claim(Mode.KEYED, "0").key, claim(Mode.KEYED, "3").key}
        assert {found.key for found in fences.store.scan()} == kept
        assert fences.store.stats().records == {("ticket", "sealed"): 2}


class UpkeepContract:
    """Looking around and tidying up."""

    def test_heads_are_listed_by_shard(self, fences: FencesUnderTest) -> None:
        for number in range(6):
            shard = 1 + number % 2
            asked = claim(Mode.DOCUMENT, "A", by="one", source=f"{number}", shard=shard, sequence=number)
            sealed(fences.store, asked)
        granted(fences.store, claim(Mode.DOCUMENT, "A", by="two", source="pending", shard=1))
        found = dict(fences.store.heads(1))
        assert {source: head.sequence for source, head in found.items()} == {
            source_of("0"): 0,
            source_of("2"): 2,
            source_of("4"): 4,
        }
        assert list(fences.store.heads(3)) == []

    def test_the_head_of_an_operation_with_a_sequence_is_no_document(self, fences: FencesUnderTest) -> None:
        """Else a webhook would change the corpus digest, and be a row of an index."""
        sealed(fences.store, claim(Mode.DOCUMENT, "A", by="one", source="document"))
        sealed(fences.store, claim(Mode.SEQUENCED, "A", by="two", source="webhook", sequence=3))
        (head,) = fences.store.heads(SHARD)
        assert head[0] == source_of("document")
        assert [(shard, source) for shard, source, _ in fences.store.all_heads()] == [(SHARD, head[0])]
        mark = (SHARD, head[0] + head[1].digest + head[1].metadata_hash)
        assert set(fences.store.marks()) == set(fences.store.marks(SHARD)) == {mark}
        assert fences.store.stats().documents == 1

    def test_a_scan_shows_every_record_once(self, fences: FencesUnderTest) -> None:
        """Also those with bytes in their keys that mean something to the store."""
        keys = [bytes((shard,)) + mark * 16 for shard in (0, 42, 63) for mark in (b"}k", b"*?", b"\x00\xff", b"[]")]
        for key in keys:
            sealed(fences.store, claim(Mode.KEYED, by=key.hex(), key=key), result=key)
        sealed(fences.store, claim(Mode.DOCUMENT, by="one")._replace(source=b"}k" * 10))  # only a head: no record
        found = {each.key: each for each in fences.store.scan()}
        assert sorted(found) == sorted(keys)
        assert all(each.record.result == key for key, each in found.items())
        assert len(list(fences.store.scan())) == len(keys)
        assert sorted(each.key for each in fences.store.scan(42)) == sorted(key for key in keys if key[0] == 42)

    def test_a_scan_shows_when_a_record_expires(self, fences: FencesUnderTest) -> None:
        sealed(fences.store, claim(Mode.KEYED, "A"), ttl_ms=DAY_MS)
        sealed(fences.store, claim(Mode.KEYED, "B"))
        found = {each.key: each.expires_ms for each in fences.store.scan()}
        assert found[claim(Mode.KEYED, "B").key] is None
        expires_ms = found[claim(Mode.KEYED, "A").key]
        assert expires_ms is not None
        assert fences.clock() + DAY_MS - HOUR_MS < expires_ms <= fences.clock() + DAY_MS

    def test_a_live_document_is_answered_without_a_claim_and_leaves_the_same_row(self, fences: FencesUnderTest) -> None:
        asked = claim(Mode.DOCUMENT, "A", metadata_hash=b"m" * 16, context=b'{"kind":"document"}')
        record = sealed(fences.store, asked, result=b"d" + b"i" * 32)
        (found,) = fences.store.replays([ask(asked)]).settled()
        assert found is not None
        assert decode_record(found) == record
        claimed = asked._replace(token=b"2" * TOKEN_BYTES)
        assert verdict(fences.store, claimed) == Replay(record)
        rows = {row.token: row for row in rows_of(fences.store)}
        told, by_claim = rows[ask(asked).token], rows[claimed.token]
        assert dataclasses.replace(told, token=claimed.token, ts_ms=by_claim.ts_ms) == by_claim

    @pytest.mark.parametrize(
        "other",
        [
            {"fingerprint": b"x" * 16},
            {"metadata_hash": b"x" * 16},
            {"sequence": 4},
            {"key": claim(Mode.DOCUMENT, "B").key},
            {"source": source_of("another")},
        ],
        ids=lambda other: next(iter(other)),
    )
    def test_whatever_differs_is_asked_by_a_claim(self, fences: FencesUnderTest, other: dict[str, Any]) -> None:
        asked = claim(Mode.DOCUMENT, "A", metadata_hash=b"m" * 16)
        sealed(fences.store, asked, result=b"d")
        before = rows_of(fences.store)
        assert fences.store.replays([ask(asked)._replace(**other)]).settled() == [None]
        assert rows_of(fences.store) == before

    def test_a_document_with_a_sequence_is_answered_for_just_that_sequence(self, fences: FencesUnderTest) -> None:
        asked = claim(Mode.DOCUMENT, "A", sequence=-3)
        sealed(fences.store, asked, result=b"d")
        answers = fences.store.replays(
            [ask(asked), ask(asked)._replace(sequence=None, token=b"3" * TOKEN_BYTES)]
        ).settled()
        assert [answer is not None for answer in answers] == [True, True]
        for sequence in (-4, -2):
            assert fences.store.replays([ask(asked)._replace(sequence=sequence)]).settled() == [None]

    def test_a_document_that_is_claimed_retracted_or_of_another_epoch_is_asked_by_a_claim(
        self, fences: FencesUnderTest
    ) -> None:
        asked = claim(Mode.DOCUMENT, "A")
        assert fences.store.replays([ask(asked)]).settled() == [None]
        sealed(fences.store, asked, result=b"d")
        granted(fences.store, claim(Mode.DOCUMENT, "B", by="two"))
        assert fences.store.replays([ask(asked)]).settled() == [None]
        other = claim(Mode.DOCUMENT, "A", source="other")
        sealed(fences.store, other, result=b"d")
        sealed(fences.store, claim(Mode.DOCUMENT, "", source="other", retract=True, by="three"))
        assert fences.store.replays([ask(other)]).settled() == [None]
        third = claim(Mode.DOCUMENT, "A", source="third")
        sealed(fences.store, third, result=b"d")
        fences.restart()
        assert fences.store.replays([ask(third)]).settled() == [None]
        start_epoch(fences.store, 77)
        assert fences.store.replays([ask(third)]).settled() == [None]

    def test_nothing_of_a_source_is_answered_after_what_may_move_it(self, fences: FencesUnderTest) -> None:
        first = claim(Mode.DOCUMENT, "A")
        sealed(fences.store, first, result=b"d")
        moving = ask(claim(Mode.DOCUMENT, "B"))
        found = fences.store.replays([ask(first), moving, ask(first)._replace(token=b"4" * TOKEN_BYTES)]).settled()
        assert [record is not None for record in found] == [True, False, False]

    def test_no_asks_no_answers(self, fences: FencesUnderTest) -> None:
        assert fences.store.replays([]).settled() == []

    def test_the_version_of_a_shard_changes_with_every_head_move_and_with_nothing_else(
        self, fences: FencesUnderTest
    ) -> None:
        first = fences.store.versions()
        assert first[SHARD] is not None
        move = granted(fences.store, asked := claim(Mode.DOCUMENT, "A"))
        sealed(fences.store, claim(Mode.KEYED, "an operation"))
        assert fences.store.versions() == first
        fences.store.seal([seal(asked, move)])
        second = fences.store.versions()
        assert second[SHARD] != first[SHARD]
        assert [version for shard, version in enumerate(second) if shard != SHARD] == [
            version for shard, version in enumerate(first) if shard != SHARD
        ]
        verdict(fences.store, claim(Mode.DOCUMENT, "A", by="two"))  # a replay
        assert fences.store.versions() == second
        sealed(fences.store, claim(Mode.DOCUMENT, "", retract=True, by="three"))
        assert fences.store.versions()[SHARD] not in (first[SHARD], second[SHARD])

    def test_a_shard_that_may_not_answer_has_no_version(self, fences: FencesUnderTest) -> None:
        before = fences.store.versions()[SHARD]
        fences.restart()
        assert fences.store.versions()[SHARD] is None
        start_epoch(fences.store, 77)
        after = fences.store.versions()[SHARD]
        assert after is not None
        assert after[0] == 77
        assert after != before

    def test_all_heads_are_those_of_the_shards(self, fences: FencesUnderTest) -> None:
        sealed(fences.store, claim(Mode.DOCUMENT, "A"))
        sealed(fences.store, claim(Mode.DOCUMENT, "B", source="another", by="two"))
        found = {(shard, source, head) for shard, source, head in fences.store.all_heads()}
        assert found == {(SHARD, source, head) for source, head in fences.store.heads(SHARD)}
        assert len(found) == 2

    def test_the_marks_are_those_of_the_live_heads(self, fences: FencesUnderTest) -> None:
        sealed(fences.store, claim(Mode.DOCUMENT, "A", metadata_hash=b"m" * 16))
        sealed(fences.store, claim(Mode.DOCUMENT, "B", source="another", by="two"))
        sealed(fences.store, claim(Mode.DOCUMENT, "C", source="gone", by="three"))
        sealed(fences.store, claim(Mode.DOCUMENT, "", source="gone", retract=True, by="four"))
        granted(fences.store, claim(Mode.DOCUMENT, "D", source="another", by="five"))
        live = {
            (SHARD, source + head.digest + head.metadata_hash)
            for source, head in fences.store.heads(SHARD)
            if head.live
        }
        assert len(live) == 2
        assert set(fences.store.marks()) == set(fences.store.marks(SHARD)) == live
        assert set(fences.store.marks(SHARD + 1)) == set()

    def test_a_shard_that_may_not_answer_shows_no_marks(self, fences: FencesUnderTest) -> None:
        sealed(fences.store, claim(Mode.DOCUMENT, "A"))
        fences.restart()
        assert list(fences.store.heads(SHARD)) == []
        assert list(fences.store.marks(SHARD)) == []

    def test_a_scan_shows_superseded_documents(self, fences: FencesUnderTest) -> None:
        receipt = sealed(fences.store, claim(Mode.DOCUMENT, "A"), result=b"jA")
        sealed(fences.store, claim(Mode.DOCUMENT, "B"))
        (found,) = fences.store.scan(SHARD)
        assert (found.key, found.record) == (claim(Mode.DOCUMENT, "A").key, receipt)

    @pytest.mark.parametrize("mode", [Mode.SEQUENCED, Mode.DOCUMENT])
    def test_attempts_that_stand_with_their_source_are_shown_and_counted(
        self, fences: FencesUnderTest, mode: Mode
    ) -> None:
        stuck, held = claim(mode, "A", source="stuck", by="one", max_attempts=1), claim(mode, "B", source="held")
        fences.store.release([lease(stuck, granted(fences.store, stuck))], "TIMEOUT")
        fences.store.claim([claim(mode, "A", source="stuck", by="two", max_attempts=1)])
        first = granted(fences.store, held)
        found = {each.key: each.record for each in fences.store.leases(SHARD)}
        assert found.keys() == {held.key, stuck.key}
        assert (found[held.key], found[stuck.key].state) == (first.record, State.QUARANTINED)
        assert {each.key for each in fences.store.leases()} == found.keys()
        assert fences.store.stats().records == {("ticket", "held"): 1, ("ticket", "quarantined"): 1}
        sealed(fences.store, held)
        assert [each.key for each in fences.store.leases(SHARD)] == [stuck.key]

    def test_stats_count_records_by_kind_and_state(self, fences: FencesUnderTest) -> None:
        assert fences.store.stats().rows == 0
        for number in range(3):
            sealed(fences.store, claim(Mode.KEYED, f"sealed {number}", by=f"{number}"))
        sealed(fences.store, claim(Mode.KEYED, "failed", kind="webhook"), failed=True)
        granted(fences.store, claim(Mode.KEYED, "held", kind="webhook"))
        sealed(fences.store, claim(Mode.DOCUMENT, "A"))
        stats = fences.store.stats()
        assert stats.records == {("ticket", "sealed"): 3, ("webhook", "failed"): 1, ("webhook", "held"): 1}
        assert stats.documents == 1
        assert stats.rows > 0
        assert stats.bytes is None or stats.bytes > 0

    def test_what_ended_can_be_forgotten_and_is_new_again(self, fences: FencesUnderTest) -> None:
        for name, failed in (("A", False), ("B", True)):
            asked = claim(Mode.KEYED, name, by="one")
            sealed(fences.store, asked, failed=failed)
            fences.store.forget([asked.key])
            assert granted(fences.store, claim(Mode.KEYED, name, by="two")).record.attempt == 1

    def test_what_is_pending_absent_or_superseded_is_not_forgotten(self, fences: FencesUnderTest) -> None:
        pending = claim(Mode.KEYED, "pending", by="one")
        first = granted(fences.store, pending)
        receipt = sealed(fences.store, claim(Mode.DOCUMENT, "A"))
        sealed(fences.store, claim(Mode.DOCUMENT, "B"))
        superseded = claim(Mode.DOCUMENT, "A", by="two")
        fences.store.forget([claim(Mode.KEYED, "absent").key, pending.key, superseded.key])
        assert fences.store.renew([lease(pending, first)]) == [True]
        assert granted(fences.store, superseded).prior == receipt

    def test_pending_records_that_nobody_holds_can_be_forgotten(self, fences: FencesUnderTest) -> None:
        """With what is kept of their payloads; the one whose lease is live stays."""
        held, over, given_back = (claim(Mode.KEYED, name, by="one") for name in ("held", "over", "given back"))
        granted(fences.store, over)
        fences.clock.advance(LEASE_MS + 1)
        fences.store.release([lease(given_back, granted(fences.store, given_back))], "STORE.unavailable")
        first = granted(fences.store, held)
        keys = [each.key for each in (held, over, given_back)]
        fences.store.forget(keys)
        assert len(list(fences.store.scan())) == 3
        fences.store.forget(keys, pending=True)
        assert {found.key for found in fences.store.scan()} == {held.key}
        assert fences.store.renew([lease(held, first)]) == [True]
        for each in (over, given_back):
            assert granted(fences.store, each._replace(fingerprint=b"f" * 16)).record.attempt == 1

    def test_receipts_of_superseded_documents_are_forgotten_once_their_epoch_is_over(
        self, fences: FencesUnderTest
    ) -> None:
        """What a purge leaves behind in the store answers nobody, and still tells."""
        receipt = sealed(fences.store, claim(Mode.DOCUMENT, "A"))
        sealed(fences.store, claim(Mode.DOCUMENT, "B"))
        superseded = claim(Mode.DOCUMENT, "A", by="two")
        epoch = receipt.fence.epoch
        fences.store.forget([superseded.key], below=epoch)
        assert fences.store.read([Lookup(superseded.key, Mode.DOCUMENT, superseded.source)])[0].record == receipt
        fences.store.forget([superseded.key], below=epoch + 1)
        assert granted(fences.store, superseded).prior is None

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

    def test_the_clock_of_the_store_is_what_it_tells(self, fences: FencesUnderTest) -> None:
        before = fences.store.now_ms()
        fences.clock.advance(1234)
        assert fences.store.now_ms() == before + 1234 == fences.clock()

    def test_the_url_is_for_people(self, fences: FencesUnderTest) -> None:
        assert "://" in fences.store.url
        assert "@" not in fences.store.url


class FormatContract:
    """Stored by a newer ragfence: refused, never guessed at, never touched."""

    @pytest.mark.parametrize("where", ["record", "source", "head", "lease", "parked", "record of a sequence"])
    def test_a_newer_format_is_refused_and_nothing_is_changed(self, fences: FencesUnderTest, where: str) -> None:
        mode = {"record": Mode.KEYED, "record of a sequence": Mode.SEQUENCED}.get(where, Mode.DOCUMENT)
        asked = claim(mode, by="one")
        store = fences.store
        stranger = granted(store, claim(mode, "stranger", source="stranger"))
        before = rows_of(store)
        _plant_newer(fences, asked, where)
        for _ in range(2):
            _refuses(lambda: store.claim([asked]))
            _refuses(lambda: store.seal([seal(asked, stranger)]))
            _refuses(lambda: store.renew([lease(asked, stranger)]))
            _refuses(lambda: store.release([lease(asked, stranger)]))
            _refuses(lambda: store.reset_attempts([lease(asked)]))
            _refuses(lambda: read(store, asked))
            if where in ("source", "head"):
                _refuses(lambda: list(store.heads(SHARD)))
                _refuses(lambda: list(store.marks(SHARD)))
        assert rows_of(store) == before

    @ALL_MODES
    def test_a_batch_with_a_newer_format_in_it_grants_nothing(self, fences: FencesUnderTest, mode: Mode) -> None:
        newer, fine = claim(mode, "A", source="newer"), claim(mode, "A", source="fine", by="one")
        _plant_newer(fences, newer, "record" if mode is Mode.KEYED else "source")
        _refuses(lambda: fences.store.claim([fine, newer]))
        assert read(fences.store, fine) == HeldRecords()
        assert rows_of(fences.store) == []


class ClosingContract:
    """A handle that was closed answers nobody. Others on the same data are not concerned."""

    @pytest.mark.parametrize("call", list(AFTER_CLOSING))
    def test_a_closed_store_refuses_every_call(self, fences: FencesUnderTest, call: str) -> None:
        store = fences.reopen()
        held = claim(Mode.KEYED, by="held")
        granted(store, held)
        entries = store.row_entries()
        store.close()
        store.close()
        with pytest.raises(StoreClosed, match="was closed here"):
            AFTER_CLOSING[call](store, held, entries)
        assert verdict(fences.store, claim(Mode.KEYED, "B")).record.attempt == 1  # type: ignore[union-attr]

    def test_calls_under_way_while_a_store_is_closed_end_or_are_refused(self, fences: FencesUnderTest) -> None:
        """Each is answered as ever, or told that the store is closed; nobody meets an error of what is beneath."""
        for turn in range(5):
            store = fences.reopen()
            told: list[object] = []
            started = threading.Barrier(5)

            def work(caller: int, store: FenceStore = store, turn: int = turn, told: list[object] = told) -> None:
                started.wait()  # noqa: B023
                for number in range(200):
                    try:
                        granted(store, claim(Mode.KEYED, f"{turn} {caller} {number}", by=f"{turn} {caller} {number}"))
                    except StoreClosed:
                        told.append("closed")
                        return
                    except BaseException as error:  # noqa: BLE001  # whatever it is, it fails the test
                        told.append(error)
                        return
                told.append("done")

            threads = [threading.Thread(target=work, args=(caller,)) for caller in range(4)]
            for thread in threads:
                thread.start()
            started.wait()
            time.sleep(0.003 * turn)
            store.close()
            for thread in threads:
                thread.join()
            assert set(told) <= {"closed", "done"}
            assert len(told) == len(threads)


class RetentionContract(
    EpochContract,
    SoloContract,
    BatchContract,
    RowContract,
    DrainContract,
    CountContract,
    ExpiryContract,
    UpkeepContract,
    FormatContract,
    ClosingContract,
):
    """Everything that is not about the answer to one claim."""


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


def _furnish(store: FenceStore) -> None:
    """A source in every state, of every mode, in three shards."""
    for shard in (SHARD, 0, 63):
        for mode in Mode:
            for state in ("sealed", "failed", "held", "released", "quarantined"):
                asked = claim(mode, state, source=f"{state} {mode}", shard=shard, max_attempts=1)
                answer = granted(store, asked)
                if state in ("sealed", "failed"):
                    store.seal([seal(asked, answer, failed=state == "failed")])
                elif state != "held":
                    store.release([lease(asked, answer)], "TIMEOUT")
                if state == "quarantined":
                    verdict(store, asked)


def _pending(held: HeldRecords) -> KeyRecord:
    found = held.source.lease.record if held.source and held.source.lease else held.record
    assert found is not None
    return found


def _plant_newer(fences: FencesUnderTest, asked: Claim, where: str) -> None:
    record = KeyRecord(State.SEALED, asked.fingerprint, asked.token, FenceNumber(1, 1), 1, 0, 0)
    newer = b"\x09" + record.encode()[1:]
    match where:
        case "record" | "record of a sequence":
            fences.plant_record(asked.key, newer)
        case "parked":
            fences.plant_record(asked.key, park(1, record).replace(record.encode(), newer))
        case "source":
            fences.plant_source(asked.key[0], asked.source, b"\x09" + SourceRecord(1).encode()[1:])
        case "head":
            data = SourceRecord(1, Head(asked.digest, True, None, record=record)).encode()
            fences.plant_source(asked.key[0], asked.source, data.replace(record.encode(), newer))
        case "lease":
            data = SourceRecord(1, None, SourceLease(asked.digest, record)).encode()
            fences.plant_source(asked.key[0], asked.source, data.replace(record.encode(), newer))


def _refuses(call: Callable[[], object]) -> None:
    with pytest.raises(FormatTooNew):
        call()


def _row_id(row: Row) -> str:
    return row.row_id
