"""The part of the contract of fence stores about locks, `Mode.LOCK`: held or not there, and never counted."""

from __future__ import annotations

import pytest

from ragfence.core.decisions import ConflictVerdict, Fenced, Granted, InFlightVerdict, Mode, NotReadyVerdict, Replay
from ragfence.core.layout import RELEASE_POSITION, TAKEOVER, RowKind, State
from ragfence.core.records import KeyRecord
from ragfence.errors import FormatTooNew
from ragfence.stores.fences import all_of
from ragfence.testing.contracts.fence_calls import (
    DAY_MS,
    LEASE_MS,
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

LOCK = Mode.LOCK
ROUNDS = 8
"""more than any `max_attempts` of these tests"""


class HeldLockContract:
    """One holder at a time, numbers that only grow, and nothing that is left behind."""

    def test_a_lock_that_nobody_holds_is_granted(self, fences: FencesUnderTest) -> None:
        asked = claim(LOCK, by="one", owner="host:1", pending_ttl_ms=DAY_MS)
        answer = granted(fences.store, asked)
        record = answer.record
        assert (record.state, record.attempt, record.token) == (State.LOCKED, 1, asked.token)
        assert (record.owner, record.when_ms) == ("host:1", fences.clock() + LEASE_MS)
        assert not answer.takeover
        assert read(fences.store, asked).record == record

    def test_a_held_lock_is_in_flight_until_its_last_millisecond(self, fences: FencesUnderTest) -> None:
        first = granted(fences.store, claim(LOCK, by="one"))
        assert verdict(fences.store, claim(LOCK, by="two")) == InFlightVerdict(first.record.when_ms, first.record)
        fences.clock.advance(LEASE_MS - 1)
        assert isinstance(verdict(fences.store, claim(LOCK, by="two")), InFlightVerdict)
        fences.clock.advance(1)
        second = granted(fences.store, claim(LOCK, by="two"))
        assert second.takeover
        assert second.record.attempt == 1
        assert second.record.fence > first.record.fence

    def test_a_lock_counts_no_attempts_however_often_it_is_held(self, fences: FencesUnderTest) -> None:
        store, numbers = fences.store, []
        for turn in range(ROUNDS):
            asked = claim(LOCK, by=f"{turn}", max_attempts=2)
            answer = granted(store, asked)
            numbers.append(answer.record.fence)
            assert answer.record.attempt == 1
            if turn % 2:
                assert store.release([lease(asked, answer)]) == [True]
            else:
                fences.clock.advance(LEASE_MS)  # its holder died
        assert sorted(set(numbers)) == numbers

    def test_a_released_lock_leaves_its_counter_alone(self, fences: FencesUnderTest) -> None:
        store, asked = fences.store, claim(LOCK, by="one", pending_ttl_ms=DAY_MS)
        first = granted(store, asked)
        assert store.stats().pending.count == 1
        assert store.release([lease(asked, first)]) == [True]
        assert read(store, asked).record is None
        assert list(all_of(store)) == []
        assert store.stats().pending.count == 0
        assert store.release([lease(asked, first)]) == [False]
        second = granted(store, claim(LOCK, by="two"))
        assert not second.takeover
        assert second.record.fence > first.record.fence

    @pytest.mark.parametrize("expire", [False, True])
    def test_only_its_holder_releases_and_renews_a_lock(self, fences: FencesUnderTest, expire: bool) -> None:
        store, asked = fences.store, claim(LOCK, by="one")
        first = granted(store, asked)
        stranger = lease(claim(LOCK, by="two"), first)
        assert store.release([stranger], expire=expire) == [False]
        assert store.renew([stranger]) == [False]
        assert isinstance(verdict(store, claim(LOCK, by="three")), InFlightVerdict)
        fences.clock.advance(LEASE_MS)
        second = granted(store, claim(LOCK, by="two"))
        assert store.release([lease(asked, first)], expire=expire) == [False], "the lock is somebody else's by now"
        assert store.renew([lease(asked, first)]) == [False]
        assert read(store, asked).record == second.record

    def test_a_renewed_lock_is_held_on(self, fences: FencesUnderTest) -> None:
        store, asked = fences.store, claim(LOCK, by="one")
        first = granted(store, asked)
        for _ in range(4):
            fences.clock.advance(LEASE_MS - 1)
            assert store.renew([lease(asked, first)]) == [True]
            assert isinstance(verdict(store, claim(LOCK, by="two")), InFlightVerdict)
        held = read(store, asked).record
        assert held == first.record._replace(when_ms=fences.clock() + LEASE_MS)

    def test_a_claim_that_is_sent_again_gets_the_lock_it_has(self, fences: FencesUnderTest) -> None:
        store, asked = fences.store, claim(LOCK, by="one")
        first = granted(store, asked)
        assert granted(store, asked._replace(position=1)).record == first.record

    def test_a_lock_is_not_sealed(self, fences: FencesUnderTest) -> None:
        store, asked = fences.store, claim(LOCK, by="one")
        answer = granted(store, asked)
        assert store.seal([seal(asked, answer)]) == [Fenced(answer.record)]
        assert store.seal([seal(asked, answer, mode=Mode.KEYED)]) == [Fenced(answer.record)]
        assert read(store, asked).record == answer.record

    def test_a_lock_and_an_operation_never_take_each_others_key(self, fences: FencesUnderTest) -> None:
        store = fences.store
        lock, operation = claim(LOCK, "lock", by="one"), claim(Mode.KEYED, "operation", by="two")
        held, first = granted(store, lock), granted(store, operation)
        as_operation = lock._replace(mode=Mode.KEYED, token=b"operation-01")
        as_lock = operation._replace(mode=LOCK, token=b"lock-0123456")
        assert verdict(store, as_operation) == ConflictVerdict(held.record)
        assert verdict(store, as_lock) == ConflictVerdict(first.record)
        for wrong, answer in ((as_operation, held), (as_lock, first)):
            ref = lease(wrong, answer, token=answer.record.token)
            assert (store.renew([ref]), store.release([ref])) == ([False], [False])
            assert store.reset_attempts([ref]) == [False]
        assert store.seal([seal(operation, first, mode=LOCK)]) == [Fenced(first.record)]
        (done,) = store.seal([seal(operation, first)])
        assert isinstance(verdict(store, operation._replace(token=b"operation-02")), Replay)
        assert isinstance(verdict(store, as_lock), ConflictVerdict), done
        fences.clock.advance(2 * LEASE_MS)
        assert verdict(store, as_operation) == ConflictVerdict(held.record), "not even when nobody holds it any more"

    def test_a_lock_can_be_taken_from_its_holder(self, fences: FencesUnderTest) -> None:
        store, asked = fences.store, claim(LOCK, by="one")
        first = granted(store, asked)
        assert store.reset_attempts([lease(claim(LOCK, by="nobody"))]) == [True]
        assert store.reset_attempts([lease(claim(LOCK, by="nobody"))]) == [False]
        assert store.renew([lease(asked, first)]) == [False]
        assert granted(store, claim(LOCK, by="two")).record.fence > first.record.fence

    def test_a_lock_leaves_a_row_when_it_is_taken_refused_and_released(self, fences: FencesUnderTest) -> None:
        store, one = fences.store, claim(LOCK, by="one", waited_ms=7)
        first = granted(store, one)
        assert store.renew([lease(one, first)]) == [True]
        verdict(store, claim(LOCK, by="two"))
        store.release([lease(one, first)])
        granted(store, claim(LOCK, by="three"))
        fences.clock.advance(LEASE_MS)
        fourth = granted(store, claim(LOCK, by="four"))
        rows = sorted(rows_of(store), key=lambda row: (row.fence, row.kind, row.position))
        assert [(row.kind, row.position, row.flags, row.waited_ms) for row in rows] == [
            (RowKind.NEW, 0, 0, 7),
            (RowKind.NEW, RELEASE_POSITION, 0, 0),
            (RowKind.IN_FLIGHT, 0, 0, 0),
            (RowKind.NEW, 0, 0, 0),
            (RowKind.NEW, 0, TAKEOVER, 0),
        ]
        assert rows[2].winner == one.token
        assert (rows[0].fence, rows[-1].fence) == (first.record.fence, fourth.record.fence)
        assert store.tallies().decisions() == {("in_flight", "", "ticket"): 1}

    def test_locks_and_operations_share_a_batch(self, fences: FencesUnderTest) -> None:
        store = fences.store
        batch = [
            claim(mode, f"{turn}", by=f"{mode}{turn}", source=f"{mode}{turn // 2}", content="same")
            for turn in range(4)
            for mode in (LOCK, Mode.KEYED)
        ]
        answers = store.claim(batch)
        assert all(isinstance(answer, Granted) for answer in answers)
        again = store.claim([each._replace(token=b"another-1234") for each in batch])
        assert all(isinstance(answer, InFlightVerdict) for answer in again)
        refs = [
            lease(asked, answer) for asked, answer in zip(batch, answers, strict=True) if isinstance(answer, Granted)
        ]
        assert store.renew(refs) == [True] * len(batch)
        assert store.release(refs) == [True] * len(batch)

    def test_a_lock_of_an_older_epoch_is_not_renewed_and_keeps_others_out(self, fences: FencesUnderTest) -> None:
        store, asked = fences.store, claim(LOCK, by="one")
        first = granted(store, asked)
        start_epoch(store, 2)
        assert store.renew([lease(asked, first)]) == [False]
        assert isinstance(verdict(store, claim(LOCK, by="two")), InFlightVerdict), "its holder may not know it yet"
        fences.clock.advance(LEASE_MS)
        assert granted(store, claim(LOCK, by="two")).record.fence > first.record.fence

    def test_after_a_flush_the_next_holder_has_a_higher_number(self, fences: FencesUnderTest) -> None:
        store, asked = fences.store, claim(LOCK, by="one")
        for _ in range(3):
            first = granted(store, asked)
            store.release([lease(asked, first)])
        first = granted(store, asked)
        fences.flush()
        assert verdict(store, claim(LOCK, by="two")) == NotReadyVerdict()
        start_epoch(store, 2)
        second = granted(store, claim(LOCK, by="two"))
        assert second.record.fence > first.record.fence
        assert store.release([lease(asked, first)]) == [False]
        assert store.renew([lease(asked, first)]) == [False]

    def test_without_objects_a_flushed_store_numbers_on_as_well(self, fences: FencesUnderTest) -> None:
        solo = fences.reopen("alone", solo=True)
        first = granted(solo, claim(LOCK, by="one"))
        fences.flush()
        fences.clock.advance(1)
        second = granted(solo, claim(LOCK, by="two"))
        assert second.record.fence > first.record.fence
        assert solo.renew([lease(claim(LOCK, by="one"), first)]) == [False]

    def test_the_locks_of_tenants_are_apart(self, fences: FencesUnderTest) -> None:
        other = fences.reopen("other")
        start_epoch(other, 1)
        asked = claim(LOCK, by="one")
        first = granted(fences.store, asked)
        granted(other, claim(LOCK, by="two"))
        assert other.release([lease(asked, first)]) == [False]
        assert fences.store.release([lease(asked, first)]) == [True]

    def test_what_is_forgotten_is_never_a_lock_that_is_held(self, fences: FencesUnderTest) -> None:
        store, asked = fences.store, claim(LOCK, by="one")
        first = granted(store, asked)
        store.forget([asked.key], pending=True)
        assert read(store, asked).record == first.record
        fences.clock.advance(LEASE_MS)
        store.forget([asked.key], pending=True)
        assert read(store, asked).record is None

    def test_a_lock_whose_holder_died_is_not_kept_for_ever(self, fences: FencesUnderTest) -> None:
        store, asked = fences.store, claim(LOCK, by="one", pending_ttl_ms=DAY_MS)
        granted(store, asked)
        fences.clock.advance(DAY_MS // 2)
        assert read(store, asked).record is not None
        fences.clock.advance(DAY_MS)
        assert read(store, asked).record is None

    def test_a_record_in_an_unknown_state_is_refused(self, fences: FencesUnderTest) -> None:
        store, asked = fences.store, claim(LOCK, by="one")
        known = KeyRecord(
            State.LOCKED, asked.fingerprint, asked.token, sealed(store, claim(Mode.KEYED, "A")).fence, 1, 0, 0
        )
        data = bytearray(known.encode())
        data[1] = data[1] & 0xF0 | max(State) + 1
        fences.plant_record(asked.key, bytes(data))
        ref = lease(asked)
        for call in (
            lambda: store.claim([asked]),
            lambda: read(store, asked),
            lambda: store.renew([ref]),
            lambda: store.release([ref]),
            lambda: store.reset_attempts([ref]),
        ):
            with pytest.raises(FormatTooNew, match="state 7"):
                call()
