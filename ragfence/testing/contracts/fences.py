"""What every `FenceStore` must do, as tests. A store of your own proves itself with a few lines:

    class TestMyFences(FenceStoreContract):
        @pytest.fixture
        def fences(self, tmp_path):
            return MyFencesUnderTest(tmp_path)          # see `FencesUnderTest`; of its own for each test

Call `pytest.register_assert_rewrite("ragfence.testing")` in your conftest for readable failures.

The rules are pure functions in `core/decisions.py`. Here each behaviour is a test of its own, through a real store.
This module has claims, attempts, seals, sources and documents; the modules beside it have epochs, batches, replays,
rows, lifetimes, scans and handles.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from ragfence.core.decisions import (
    Claim,
    ConflictVerdict,
    Fenced,
    Granted,
    HeldRecords,
    InFlightVerdict,
    Mode,
    Replay,
    Sealed,
    StaleVerdict,
)
from ragfence.core.layout import NO_METADATA, TOKEN_BYTES, State
from ragfence.stores.fences import Lookup
from ragfence.testing.contracts.batches import BatchContract
from ragfence.testing.contracts.counts import CountContract
from ragfence.testing.contracts.epochs import EpochContract, LockContract, SoloContract
from ragfence.testing.contracts.fence_calls import (
    ALL_MODES,
    DAY_MS,
    LEASE_MS,
    WITH_A_SOURCE,
    FencesUnderTest,
    claim,
    granted,
    lease,
    read,
    seal,
    sealed,
    verdict,
)
from ragfence.testing.contracts.handles import ClosingContract, FormatContract, HandleContract
from ragfence.testing.contracts.lifetimes import DeletionContract, ExpiryContract
from ragfence.testing.contracts.locks import HeldLockContract
from ragfence.testing.contracts.replays import ReplayContract
from ragfence.testing.contracts.row_drain import DrainContract
from ragfence.testing.contracts.rows import RowContract
from ragfence.testing.contracts.scans import ScanContract

__all__ = ["FenceStoreContract", "FencesUnderTest"]

STATES = pytest.mark.parametrize("state", ["held", "expired", "released", "quarantined", "sealed", "failed"])
SEQUENCES = (-(2**63), -1, 0, 1, 2**53, 2**53 + 1, 2**53 + 2, 2**63 - 1)


class ClaimContract:
    """The answer to a claim, for each state its key can be in."""

    @pytest.fixture
    def fences(self) -> FencesUnderTest:
        raise NotImplementedError("override the fixture `fences` in the subclass")

    @ALL_MODES
    def test_a_key_nobody_knows_is_new(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one", owner="host:1", payload=b'{"a":1}')
        answer = granted(fences.store, asked)
        record = answer.record
        assert (record.state, record.attempt, record.token) == (State.HELD, 1, asked.token)
        assert (record.kind, record.owner, record.payload) == ("ticket", "host:1", b'{"a":1}')
        assert (record.first_seen_ms, record.when_ms) == (fences.clock(), fences.clock() + LEASE_MS)
        assert (answer.takeover, answer.prior, answer.head) == (False, None, None)

    @ALL_MODES
    def test_a_sealed_key_is_a_duplicate_with_the_receipt_of_the_first(
        self, fences: FencesUnderTest, mode: Mode
    ) -> None:
        first = sealed(fences.store, claim(mode, by="one"), effect_id="ef_1", result=b"j41")
        fences.clock.advance(DAY_MS)
        for by in ("two", "three"):
            assert verdict(fences.store, claim(mode, by=by)) == Replay(first)
        assert (first.effect_id, first.result, first.state) == ("ef_1", b"j41", State.SEALED)

    @ALL_MODES
    def test_a_sealed_failure_is_a_duplicate_too(self, fences: FencesUnderTest, mode: Mode) -> None:
        sealed(fences.store, claim(mode, by="one"), failed=True, error="CARD.declined", result=b"f{}")
        answer = verdict(fences.store, claim(mode, by="two"))
        assert isinstance(answer, Replay)
        assert answer.record is not None
        assert (answer.record.state, answer.record.error) == (State.FAILED, "CARD.declined")
        assert answer.record.result == b"f{}"

    @ALL_MODES
    @STATES
    def test_another_payload_is_a_conflict_whatever_became_of_the_first(
        self, fences: FencesUnderTest, mode: Mode, state: str
    ) -> None:
        first = claim(mode, by="one", payload=b"first", max_attempts=1)
        _bring_into(fences, first, state)
        before = read(fences.store, first)
        answer = verdict(fences.store, claim(mode, by="other", content="other", max_attempts=9))
        assert isinstance(answer, ConflictVerdict)
        assert answer.record is not None
        assert (answer.record.fingerprint, answer.record.payload) == (first.fingerprint, b"first")
        assert read(fences.store, first) == before

    @ALL_MODES
    def test_a_live_lease_is_in_flight_until_its_last_millisecond(self, fences: FencesUnderTest, mode: Mode) -> None:
        first = granted(fences.store, claim(mode, by="one", owner="host:1"))
        for _ in range(2):
            assert verdict(fences.store, claim(mode, by="two")) == InFlightVerdict(first.record.when_ms, first.record)
            fences.clock.advance(LEASE_MS - 1 - (fences.clock() - first.record.first_seen_ms))
        fences.clock.advance(1)
        assert isinstance(verdict(fences.store, claim(mode, by="two")), Granted)

    @ALL_MODES
    def test_an_expired_lease_is_taken_over(self, fences: FencesUnderTest, mode: Mode) -> None:
        first = granted(fences.store, claim(mode, by="one"))
        fences.clock.advance(LEASE_MS)
        second = granted(fences.store, claim(mode, by="two"))
        assert second.takeover
        assert second.record.attempt == 2
        assert second.record.token == claim(mode, by="two").token
        assert second.record.fence > first.record.fence
        assert second.record.first_seen_ms == first.record.first_seen_ms
        assert second.record.when_ms == fences.clock() + LEASE_MS

    @ALL_MODES
    def test_a_pending_record_outlives_its_lease(self, fences: FencesUnderTest, mode: Mode) -> None:
        first = granted(fences.store, claim(mode, by="one"))
        fences.clock.advance(1000 * DAY_MS)
        second = granted(fences.store, claim(mode, by="two"))
        assert (second.record.attempt, second.record.first_seen_ms) == (2, first.record.first_seen_ms)

    @ALL_MODES
    def test_a_claim_repeated_with_its_token_is_granted_again(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one")
        first = granted(fences.store, asked)
        assert granted(fences.store, asked).record == first.record
        fences.clock.advance(LEASE_MS)  # nobody else came meanwhile
        assert granted(fences.store, asked).record == first.record

    @ALL_MODES
    def test_a_token_whose_lease_was_taken_over_is_not_granted_again(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one")
        granted(fences.store, asked)
        fences.clock.advance(LEASE_MS)
        second = granted(fences.store, claim(mode, by="two"))
        assert verdict(fences.store, asked) == InFlightVerdict(second.record.when_ms, second.record)

    @ALL_MODES
    def test_a_second_handle_sees_what_the_first_one_wrote(self, fences: FencesUnderTest, mode: Mode) -> None:
        other = fences.reopen()
        first = granted(fences.store, claim(mode, by="one"))
        assert verdict(other, claim(mode, by="two")) == InFlightVerdict(first.record.when_ms, first.record)

    @ALL_MODES
    def test_texts_that_are_too_long_are_cut_between_characters(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one", owner="é" * 300)
        first = granted(fences.store, asked)
        assert granted(fences.store, asked).record.owner == "é" * 127
        assert fences.store.release([lease(asked, first)], "é" * 300) == [True]
        assert granted(fences.store, claim(mode, by="two")).record.error == "é" * 127


class AttemptContract:
    """Releases, expiries, quarantine and pardon: what is remembered of attempts that came to nothing."""

    @ALL_MODES
    def test_a_released_key_is_free_at_once_and_remembers_the_attempt(
        self, fences: FencesUnderTest, mode: Mode
    ) -> None:
        asked = claim(mode, by="one")
        first = granted(fences.store, asked)
        assert fences.store.release([lease(asked, first)], "TIMEOUT") == [True]
        second = granted(fences.store, claim(mode, by="two"))
        assert (second.record.attempt, second.record.error) == (2, "TIMEOUT")
        assert second.record.first_seen_ms == first.record.first_seen_ms
        assert second.record.fence > first.record.fence
        assert not second.takeover

    @ALL_MODES
    def test_a_lease_ended_after_its_commit_was_sent_is_taken_over_instead(
        self, fences: FencesUnderTest, mode: Mode
    ) -> None:
        asked = claim(mode, by="one")
        first = granted(fences.store, asked)
        assert fences.store.release([lease(asked, first)], "TIMEOUT", expire=True) == [True]
        second = granted(fences.store, claim(mode, by="two"))
        assert (second.record.attempt, second.record.error) == (2, "TIMEOUT")
        assert second.takeover

    @ALL_MODES
    def test_a_released_token_is_an_attempt_of_its_own_when_it_claims_again(
        self, fences: FencesUnderTest, mode: Mode
    ) -> None:
        asked = claim(mode, by="one")
        fences.store.release([lease(asked, granted(fences.store, asked))])
        assert granted(fences.store, asked).record.attempt == 2

    @ALL_MODES
    @pytest.mark.parametrize("expire", [False, True], ids=["released", "expired"])
    def test_a_refunded_attempt_does_not_count(self, fences: FencesUnderTest, mode: Mode, expire: bool) -> None:
        for by in "123456":
            asked = claim(mode, by=by, max_attempts=2)
            answer = granted(fences.store, asked)
            assert answer.record.attempt == 1
            ref = lease(asked, answer)
            assert fences.store.release([ref], "STORE.unavailable", expire=expire, refund=True) == [True]
            assert answer.takeover == (expire and by != "1")
        asked = claim(mode, by="7", max_attempts=2)
        answer = granted(fences.store, asked)
        assert (answer.record.attempt, answer.record.error) == (1, "STORE.unavailable")
        fences.store.release([lease(asked, answer)], "TIMEOUT")
        assert granted(fences.store, claim(mode, by="8", max_attempts=2)).record.attempt == 2

    @ALL_MODES
    def test_a_refund_gives_back_one_attempt_and_no_more(self, fences: FencesUnderTest, mode: Mode) -> None:
        for attempt in (1, 2):
            asked = claim(mode, by=f"{attempt}")
            fences.store.release([lease(asked, granted(fences.store, asked))], "TIMEOUT")
        asked = claim(mode, by="three")
        ref = lease(asked, granted(fences.store, asked))
        assert fences.store.release([ref], "STORE.unavailable", refund=True) == [True]
        assert fences.store.release([ref], "STORE.unavailable", refund=True) == [False]
        assert granted(fences.store, claim(mode, by="four")).record.attempt == 3

    @ALL_MODES
    def test_only_the_current_token_is_refunded(self, fences: FencesUnderTest, mode: Mode) -> None:
        late = claim(mode, by="one")
        ref = lease(late, granted(fences.store, late))
        fences.clock.advance(LEASE_MS)
        second = granted(fences.store, claim(mode, by="two"))
        assert fences.store.release([ref], "STORE.unavailable", refund=True) == [False]
        fences.clock.advance(LEASE_MS)
        assert second.record.attempt == 2
        assert granted(fences.store, claim(mode, by="three")).record.attempt == 3

    @ALL_MODES
    def test_the_row_of_a_refunded_attempt_tells_which_one_it_was(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one")
        ref = lease(asked, granted(fences.store, asked))
        fences.store.release([ref], "STORE.unavailable", refund=True)
        (row,) = [row for row in fences.store.rows() if row.error_code]
        assert (row.attempt, row.error_code) == (1, "STORE.unavailable")

    @ALL_MODES
    @pytest.mark.parametrize("how", ["release", "expire"])
    def test_too_many_attempts_are_quarantined(self, fences: FencesUnderTest, mode: Mode, how: str) -> None:
        for attempt in (1, 2, 3):
            asked = claim(mode, by=f"{attempt}", max_attempts=3)
            answer = granted(fences.store, asked)
            assert answer.record.attempt == attempt
            if how == "release":
                fences.store.release([lease(asked, answer)], "TIMEOUT")
            else:
                fences.clock.advance(LEASE_MS)
        for by in ("four", "five"):
            fences.clock.advance(DAY_MS)
            refused = verdict(fences.store, claim(mode, by=by, max_attempts=3))
            assert isinstance(refused, InFlightVerdict)
            assert refused.quarantined
            assert (refused.record.state, refused.record.attempt) == (State.QUARANTINED, 3)

    @ALL_MODES
    def test_the_owner_of_a_quarantined_attempt_cannot_seal_it(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one", max_attempts=1)
        first = granted(fences.store, asked)
        fences.clock.advance(LEASE_MS)
        verdict(fences.store, claim(mode, by="two", max_attempts=1))
        assert isinstance(fences.store.seal([seal(asked, first)])[0], Fenced)

    @ALL_MODES
    def test_a_pardon_gives_new_attempts(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one", max_attempts=1)
        _bring_into(fences, asked, "quarantined")
        assert fences.store.reset_attempts([lease(asked)]) == [True]
        assert granted(fences.store, claim(mode, by="three", max_attempts=1)).record.attempt == 1

    @ALL_MODES
    def test_a_pardon_frees_a_key_from_an_owner_that_hangs(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one")
        first = granted(fences.store, asked)
        assert fences.store.reset_attempts([lease(asked)]) == [True]
        assert fences.store.renew([lease(asked, first)]) == [False], "it hangs, but its heart beats"
        second = granted(fences.store, claim(mode, by="two"))
        assert second.record.fence > first.record.fence
        assert isinstance(fences.store.seal([seal(asked, first)])[0], Fenced)

    @ALL_MODES
    def test_only_what_is_pending_can_be_pardoned(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one")
        assert fences.store.reset_attempts([lease(asked)]) == [False]
        receipt = sealed(fences.store, asked)
        assert fences.store.reset_attempts([lease(asked)]) == [False]
        assert verdict(fences.store, claim(mode, by="two")) == Replay(receipt)


class SealContract:
    """Compare the token, then act; sealed is terminal."""

    @ALL_MODES
    def test_a_seal_ends_the_lease_with_the_receipt(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one", owner="host:1", payload=b"{}")
        first = granted(fences.store, asked)
        fences.clock.advance(5)
        (outcome,) = fences.store.seal([seal(asked, first, effect_id="ef_9", result=b"j9")])
        assert isinstance(outcome, Sealed)
        record = outcome.record
        assert (record.state, record.effect_id, record.result) == (State.SEALED, "ef_9", b"j9")
        assert (record.when_ms, record.first_seen_ms) == (fences.clock(), fences.clock() - 5)
        assert (record.token, record.fence, record.attempt) == (asked.token, first.record.fence, 1)
        assert (record.owner, record.payload) == ("", b"{}")

    @ALL_MODES
    def test_a_seal_repeated_by_its_token_succeeds_and_changes_nothing(
        self, fences: FencesUnderTest, mode: Mode
    ) -> None:
        asked = claim(mode, by="one")
        first = granted(fences.store, asked)
        receipt = fences.store.seal([seal(asked, first, result=b"j1")])
        fences.clock.advance(DAY_MS)
        assert fences.store.seal([seal(asked, first, result=b"j2", failed=True)]) == receipt
        assert [Replay(outcome.record) for outcome in receipt if isinstance(outcome, Sealed)] == [
            verdict(fences.store, claim(mode, by="two"))
        ]

    @ALL_MODES
    def test_a_seal_never_creates_an_absent_record(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one")
        elsewhere = granted(fences.store, claim(mode, "elsewhere", by="one", source="elsewhere"))
        assert fences.store.seal([seal(asked, elsewhere)]) == [Fenced(None)]
        assert read(fences.store, asked) == HeldRecords()
        assert granted(fences.store, claim(mode, by="two")).record.attempt == 1

    @ALL_MODES
    def test_an_expired_lease_that_nobody_took_over_can_still_be_sealed(
        self, fences: FencesUnderTest, mode: Mode
    ) -> None:
        asked = claim(mode, by="one")
        first = granted(fences.store, asked)
        fences.clock.advance(LEASE_MS)
        assert isinstance(fences.store.seal([seal(asked, first)])[0], Sealed)

    @ALL_MODES
    def test_a_stale_owner_cannot_seal_after_a_takeover(self, fences: FencesUnderTest, mode: Mode) -> None:
        stale, current = claim(mode, by="one"), claim(mode, by="two")
        first = granted(fences.store, stale)
        fences.clock.advance(LEASE_MS)
        second = granted(fences.store, current)
        before = read(fences.store, current)
        assert isinstance(fences.store.seal([seal(stale, first)])[0], Fenced)
        assert read(fences.store, current) == before
        assert isinstance(fences.store.seal([seal(current, second)])[0], Sealed)

    @ALL_MODES
    def test_a_stale_owner_is_shown_the_receipt_of_the_winner(self, fences: FencesUnderTest, mode: Mode) -> None:
        stale = claim(mode, by="one")
        first = granted(fences.store, stale)
        fences.clock.advance(LEASE_MS)
        receipt = sealed(fences.store, claim(mode, by="two"), result=b"winner")
        assert fences.store.seal([seal(stale, first, result=b"loser")]) == [Fenced(receipt)]
        assert verdict(fences.store, claim(mode, by="three")) == Replay(receipt)

    @ALL_MODES
    def test_a_released_lease_cannot_be_sealed(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one")
        first = granted(fences.store, asked)
        fences.store.release([lease(asked, first)])
        assert isinstance(fences.store.seal([seal(asked, first)])[0], Fenced)
        assert granted(fences.store, claim(mode, by="two")).record.attempt == 2

    @ALL_MODES
    def test_a_healer_seals_with_the_token_of_the_effect_it_found(self, fences: FencesUnderTest, mode: Mode) -> None:
        dead, healer = claim(mode, by="one"), claim(mode, by="two")
        first = granted(fences.store, dead)
        fences.clock.advance(LEASE_MS)
        found = sealed(fences.store, healer, winner=dead.token)
        assert found.token == dead.token
        # Whom everybody took for dead comes back to seal what it committed: that is its own receipt.
        assert fences.store.seal([seal(dead, first)]) == [Sealed(found)]

    @ALL_MODES
    def test_a_renewal_lengthens_the_lease(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one")
        first = granted(fences.store, asked)
        for _ in range(3):
            fences.clock.advance(LEASE_MS - 1)
            assert fences.store.renew([lease(asked, first)]) == [True]
        answer = verdict(fences.store, claim(mode, by="two"))
        assert isinstance(answer, InFlightVerdict)
        assert answer.until_ms == fences.clock() + LEASE_MS

    @ALL_MODES
    def test_an_expired_lease_that_nobody_took_over_can_still_be_renewed(
        self, fences: FencesUnderTest, mode: Mode
    ) -> None:
        asked = claim(mode, by="one")
        first = granted(fences.store, asked)
        fences.clock.advance(LEASE_MS)
        assert fences.store.renew([lease(asked, first)]) == [True]
        assert isinstance(verdict(fences.store, claim(mode, by="two")), InFlightVerdict)

    @ALL_MODES
    def test_a_stale_owner_can_neither_renew_nor_release(self, fences: FencesUnderTest, mode: Mode) -> None:
        stale, current = claim(mode, by="one"), claim(mode, by="two")
        first = granted(fences.store, stale)
        fences.clock.advance(LEASE_MS)
        granted(fences.store, current)
        before = read(fences.store, current)
        assert fences.store.renew([lease(stale, first)]) == [False]
        assert fences.store.release([lease(stale, first)], "LATE") == [False]
        assert fences.store.release([lease(stale, first)], "LATE", expire=True) == [False]
        assert read(fences.store, current) == before

    @ALL_MODES
    def test_what_is_sealed_can_neither_be_renewed_nor_released(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked = claim(mode, by="one")
        first = granted(fences.store, asked)
        fences.store.seal([seal(asked, first)])
        before = read(fences.store, asked)
        assert fences.store.renew([lease(asked, first)]) == [False]
        assert fences.store.release([lease(asked, first)]) == [False]
        assert fences.store.release([lease(asked, first)], expire=True) == [False]
        assert read(fences.store, asked) == before

    @ALL_MODES
    def test_what_was_never_leased_can_neither_be_renewed_nor_released(
        self, fences: FencesUnderTest, mode: Mode
    ) -> None:
        asked = claim(mode, by="one")
        assert fences.store.renew([lease(asked, epoch=1)]) == [False]
        assert fences.store.release([lease(asked, epoch=1)]) == [False]
        assert read(fences.store, asked) == HeldRecords()


class SourceContract:
    """Sequences, and one writer per source."""

    @WITH_A_SOURCE
    def test_an_older_sequence_is_stale(self, fences: FencesUnderTest, mode: Mode) -> None:
        sealed(fences.store, claim(mode, "A", sequence=5))
        assert verdict(fences.store, claim(mode, "B", by="two", sequence=4)) == StaleVerdict(5)

    @WITH_A_SOURCE
    def test_stale_is_decided_before_duplicate_and_conflict(self, fences: FencesUnderTest, mode: Mode) -> None:
        sealed(fences.store, claim(mode, "A", sequence=3))
        sealed(fences.store, claim(mode, "B", sequence=5))
        assert verdict(fences.store, claim(mode, "A", by="two", sequence=3)) == StaleVerdict(5)
        assert verdict(fences.store, claim(mode, "B", by="two", sequence=4)) == StaleVerdict(5)
        assert verdict(fences.store, claim(mode, "B", by="two", sequence=4, content="other")) == StaleVerdict(5)

    @WITH_A_SOURCE
    def test_stale_is_decided_before_in_flight_and_quarantine(self, fences: FencesUnderTest, mode: Mode) -> None:
        sealed(fences.store, claim(mode, "A", sequence=5))
        asked = claim(mode, "B", by="one", sequence=6, max_attempts=1)
        granted(fences.store, asked)
        assert verdict(fences.store, claim(mode, "C", by="two", sequence=4)) == StaleVerdict(5)
        fences.clock.advance(LEASE_MS)
        assert verdict(fences.store, claim(mode, "C", by="two", sequence=4)) == StaleVerdict(5)
        verdict(fences.store, claim(mode, "B", by="two", sequence=6, max_attempts=1))
        assert verdict(fences.store, claim(mode, "B", by="two", sequence=4, max_attempts=1)) == StaleVerdict(5)

    @WITH_A_SOURCE
    def test_an_equal_sequence_with_other_content_is_a_conflict(self, fences: FencesUnderTest, mode: Mode) -> None:
        sealed(fences.store, claim(mode, "A", sequence=5))
        assert verdict(fences.store, claim(mode, "B", by="two", sequence=5)) == ConflictVerdict(None)

    @WITH_A_SOURCE
    def test_an_equal_sequence_with_the_same_content_is_a_duplicate(self, fences: FencesUnderTest, mode: Mode) -> None:
        receipt = sealed(fences.store, claim(mode, "A", sequence=5))
        assert verdict(fences.store, claim(mode, "A", by="two", sequence=5)) == Replay(receipt)

    @WITH_A_SOURCE
    def test_the_same_content_with_a_higher_sequence_moves_the_head(self, fences: FencesUnderTest, mode: Mode) -> None:
        """3:A, 5:A, 4:B must not go back to B."""
        first = sealed(fences.store, claim(mode, "A", sequence=3), result=b"jA")
        again = claim(mode, "A", by="two", sequence=5)
        move = granted(fences.store, again)
        assert move.prior == first
        (outcome,) = fences.store.seal([seal(again, move, result=b"jA", winner=first.token)])
        assert isinstance(outcome, Sealed)
        assert (outcome.record.result, outcome.record.token) == (b"jA", first.token)
        assert verdict(fences.store, claim(mode, "B", by="three", sequence=4)) == StaleVerdict(5)
        assert verdict(fences.store, claim(mode, "A", by="three", sequence=5)) == Replay(outcome.record)

    def test_an_operation_keeps_its_first_receipt_when_its_sequence_rises(self, fences: FencesUnderTest) -> None:
        first = sealed(fences.store, claim(Mode.SEQUENCED, "A", sequence=3), result=b"first")
        again = claim(Mode.SEQUENCED, "A", by="two", sequence=5)
        move = granted(fences.store, again)
        fences.clock.advance(1)
        assert fences.store.seal([seal(again, move, result=b"second")]) == [Sealed(first)]
        assert verdict(fences.store, claim(Mode.SEQUENCED, "A", by="three", sequence=5)) == Replay(first)

    @WITH_A_SOURCE
    def test_sequences_are_compared_as_whole_64_bit_numbers(self, fences: FencesUnderTest, mode: Mode) -> None:
        for low, high in pairwise(SEQUENCES):
            source = f"{low}"
            sealed(fences.store, claim(mode, "A", source=source, sequence=low))
            sealed(fences.store, claim(mode, "B", source=source, sequence=high))
            assert verdict(fences.store, claim(mode, "C", by="two", source=source, sequence=low)) == StaleVerdict(high)
            assert verdict(fences.store, claim(mode, "C", by="two", source=source, sequence=high)) == ConflictVerdict(
                None
            )

    @WITH_A_SOURCE
    def test_without_a_sequence_the_last_claim_wins_and_the_top_stays(
        self, fences: FencesUnderTest, mode: Mode
    ) -> None:
        sealed(fences.store, claim(mode, "A", sequence=5))
        sealed(fences.store, claim(mode, "B", sequence=None))
        assert verdict(fences.store, claim(mode, "C", by="two", sequence=4)) == StaleVerdict(5)
        assert isinstance(verdict(fences.store, claim(mode, "C", by="two", sequence=6)), Granted)

    @WITH_A_SOURCE
    def test_a_source_has_one_writer_at_a_time(self, fences: FencesUnderTest, mode: Mode) -> None:
        asked, other = claim(mode, "A", by="one", sequence=1), claim(mode, "B", by="two", sequence=2)
        first = granted(fences.store, asked)
        assert verdict(fences.store, other) == InFlightVerdict(first.record.when_ms, first.record)
        fences.store.seal([seal(asked, first)])
        second = granted(fences.store, other)
        assert (second.record.attempt, second.takeover) == (1, False)

    @WITH_A_SOURCE
    def test_a_revision_takes_the_source_over_from_another_whose_lease_expired(
        self, fences: FencesUnderTest, mode: Mode
    ) -> None:
        first = granted(fences.store, claim(mode, "A", by="one", sequence=1))
        fences.clock.advance(LEASE_MS)
        second = granted(fences.store, claim(mode, "B", by="two", sequence=2))
        assert (second.record.attempt, second.takeover) == (1, True)
        assert second.record.fence > first.record.fence

    @WITH_A_SOURCE
    def test_a_zombie_cannot_seal_through_the_key_of_its_own_revision(
        self, fences: FencesUnderTest, mode: Mode
    ) -> None:
        zombie = claim(mode, "A", by="one", sequence=1)
        first = granted(fences.store, zombie)
        fences.clock.advance(LEASE_MS)
        asked = claim(mode, "B", by="two", sequence=2)
        second = granted(fences.store, asked)
        assert isinstance(fences.store.seal([seal(zombie, first)])[0], Fenced)
        assert fences.store.renew([lease(zombie, first)]) == [False]
        receipt = fences.store.seal([seal(asked, second)])
        assert isinstance(fences.store.seal([seal(zombie, first)])[0], Fenced)
        assert fences.store.seal([seal(asked, second)]) == receipt
        head = read(fences.store, asked).source
        assert head is not None
        assert head.head is not None
        assert head.head.digest == asked.digest

    def test_revisions_without_a_sequence_do_not_exclude_each_other(self, fences: FencesUnderTest) -> None:
        granted(fences.store, claim(Mode.KEYED, "A", by="one"))
        assert not granted(fences.store, claim(Mode.KEYED, "B", by="two")).takeover

    @WITH_A_SOURCE
    def test_sources_do_not_exclude_each_other(self, fences: FencesUnderTest, mode: Mode) -> None:
        granted(fences.store, claim(mode, "A", by="one", source="s"))
        assert not granted(fences.store, claim(mode, "A", by="two", source="t")).takeover

    def test_an_operation_that_lost_its_place_keeps_its_payload_and_attempts(self, fences: FencesUnderTest) -> None:
        granted(fences.store, claim(Mode.SEQUENCED, "B", by="one", sequence=2))
        fences.clock.advance(LEASE_MS)
        sealed(fences.store, claim(Mode.SEQUENCED, "A", by="two", sequence=1))
        other = claim(Mode.SEQUENCED, "B", by="three", sequence=2, content="other")
        assert isinstance(verdict(fences.store, other), ConflictVerdict)
        second = granted(fences.store, claim(Mode.SEQUENCED, "B", by="three", sequence=2))
        assert (second.record.attempt, second.takeover) == (2, False)

    def test_a_sealed_operation_is_a_duplicate_while_a_later_one_is_in_flight(self, fences: FencesUnderTest) -> None:
        receipt = sealed(fences.store, claim(Mode.SEQUENCED, "A", sequence=1))
        granted(fences.store, claim(Mode.SEQUENCED, "B", by="one", sequence=2))
        assert verdict(fences.store, claim(Mode.SEQUENCED, "A", by="two", sequence=1)) == Replay(receipt)


class DocumentContract:
    """Whatever moves the head of a document does so under a lease."""

    def test_a_claim_is_shown_the_head_it_would_follow(self, fences: FencesUnderTest) -> None:
        receipt = sealed(fences.store, _document("A", sequence=3, metadata_hash=b"m" * 16))
        head = granted(fences.store, _document("B")).head
        assert head is not None
        assert (head.live, head.sequence, head.metadata_hash, head.record) == (True, 3, b"m" * 16, receipt)

    @pytest.mark.parametrize("how", ["expired", "ended after a commit was sent", "quarantined"])
    def test_an_unsettled_document_gives_a_lease_even_to_its_current_head(
        self, fences: FencesUnderTest, how: str
    ) -> None:
        """The lost lease may hide a committed row that nobody sealed."""
        receipt = sealed(fences.store, _document("A"))
        lost = _document("B", by="lost", max_attempts=1)
        answer = granted(fences.store, lost)
        if how == "ended after a commit was sent":
            fences.store.release([lease(lost, answer)], expire=True)
        else:
            fences.clock.advance(LEASE_MS)
        if how == "quarantined":
            verdict(fences.store, _document("B", by="next", max_attempts=1))
        move = granted(fences.store, _document("A", by="two"))
        assert move.takeover
        assert move.prior == receipt

    @pytest.mark.parametrize("expire", [False, True], ids=["released", "expired"])
    @pytest.mark.parametrize("revision", ["A", "B", "C"])
    def test_a_document_that_was_taken_over_and_given_back_stays_unsettled(
        self, fences: FencesUnderTest, revision: str, expire: bool
    ) -> None:
        """The row that the first lease may have committed is still there: only a seal settles it."""
        receipt = sealed(fences.store, _document("A"))
        granted(fences.store, _document("B", by="lost"))
        fences.clock.advance(LEASE_MS)
        for by in ("two", "three"):
            taker = _document(revision, by=by)
            ref = lease(taker, granted(fences.store, taker))
            assert fences.store.renew([ref._replace(epoch=1)]) == [True]
            assert fences.store.release([ref], "STORE.unavailable", expire=expire, refund=True) == [True]
        move = granted(fences.store, _document("A", by="four"))
        assert move.takeover
        assert move.prior == receipt

    def test_of_an_attempt_that_is_withdrawn_nothing_stays(self, fences: FencesUnderTest) -> None:
        receipt = sealed(fences.store, _document("A"))
        for by in ("one", "two"):
            asked = _document("B", by=by)
            answer = granted(fences.store, asked)
            assert (answer.record.attempt, answer.takeover) == (1, False)
            assert fences.store.stats().pending.count == 1
            ref = lease(asked, answer)
            assert fences.store.release([ref], "CONFLICT.origin", withdraw=True) == [True]
            assert fences.store.release([ref], "CONFLICT.origin", withdraw=True) == [False]
            (held,) = fences.store.read([Lookup(asked.key, asked.mode, asked.source)])
            assert held.source
            assert held.source.lease is None
            assert held.source.head
            assert held.source.head.record == receipt
            assert fences.store.stats().pending.count == 0
            assert list(fences.store.leases()) == []
        rows = [row.error_code for row in fences.store.rows() if row.error_code]
        assert rows == ["CONFLICT.origin"] * 2

    def test_withdrawn_without_a_head_or_after_a_failure_it_is_a_refund(self, fences: FencesUnderTest) -> None:
        asked = _document("A", by="one")
        fences.store.release([lease(asked, granted(fences.store, asked))], "CONFLICT.origin", withdraw=True)
        asked = _document("A", by="two")
        answer = granted(fences.store, asked)
        assert (answer.record.attempt, answer.record.error) == (1, "CONFLICT.origin")
        fences.store.release([lease(asked, answer)], "TIMEOUT")
        sealed(fences.store, _document("A", by="three"))
        asked = _document("B", by="one")
        fences.store.release([lease(asked, granted(fences.store, asked))], "TIMEOUT")
        for by in ("two", "three"):
            asked = _document("B", by=by)
            answer = granted(fences.store, asked)
            assert answer.record.attempt == 2
            fences.store.release([lease(asked, answer)], "CONFLICT.origin", withdraw=True)

    def test_a_withdrawn_attempt_leaves_a_source_unsettled(self, fences: FencesUnderTest) -> None:
        sealed(fences.store, _document("A"))
        granted(fences.store, _document("B", by="lost"))
        fences.clock.advance(LEASE_MS)
        asked = _document("C", by="two")
        fences.store.release([lease(asked, granted(fences.store, asked))], "CONFLICT.origin", withdraw=True)
        assert granted(fences.store, _document("A", by="three")).takeover

    def test_a_pardoned_document_stays_unsettled(self, fences: FencesUnderTest) -> None:
        sealed(fences.store, _document("A"))
        lost = _document("B", by="lost", max_attempts=1)
        _bring_into(fences, lost, "quarantined")
        fences.store.reset_attempts([lease(lost)])
        assert granted(fences.store, _document("A", by="two")).takeover

    def test_a_document_released_before_its_commit_is_settled(self, fences: FencesUnderTest) -> None:
        receipt = sealed(fences.store, _document("A"))
        given_up = _document("B", by="one")
        fences.store.release([lease(given_up, granted(fences.store, given_up))])
        assert verdict(fences.store, _document("A", by="two")) == Replay(receipt)

    def test_a_document_that_is_settled_again_answers_with_duplicates(self, fences: FencesUnderTest) -> None:
        sealed(fences.store, _document("A"))
        granted(fences.store, _document("B", by="lost"))
        fences.clock.advance(LEASE_MS)
        receipt = sealed(fences.store, _document("A", by="two"))
        assert verdict(fences.store, _document("A", by="three")) == Replay(receipt)

    def test_the_head_is_in_flight_while_another_revision_is_written(self, fences: FencesUnderTest) -> None:
        sealed(fences.store, _document("A"))
        writer = granted(fences.store, _document("B", by="one"))
        answer = verdict(fences.store, _document("A", by="two"))
        assert answer == InFlightVerdict(writer.record.when_ms, writer.record)

    def test_going_back_to_earlier_content_is_given_its_receipt(self, fences: FencesUnderTest) -> None:
        """A, B, A, B: a lease each time, because the head moves, but nothing has to be done again."""
        receipts = {
            "A": sealed(fences.store, _document("A"), result=b"jA"),
            "B": sealed(fences.store, _document("B"), result=b"jB"),
        }
        for revision in ("A", "B", "A"):
            asked = _document(revision, by=f"{revision} again {fences.clock()}")
            move = granted(fences.store, asked)
            assert move.prior == receipts[revision]
            fences.store.seal([seal(asked, move, result=receipts[revision].result)])
            answer = verdict(fences.store, _document(revision, by="two"))
            assert isinstance(answer, Replay)
            assert answer.record is not None
            assert answer.record.result == receipts[revision].result
            receipts[revision] = answer.record
            fences.clock.advance(1)

    def test_a_lost_grant_of_earlier_content_still_brings_its_receipt(self, fences: FencesUnderTest) -> None:
        receipt = sealed(fences.store, _document("A"))
        sealed(fences.store, _document("B"))
        first = granted(fences.store, _document("A", by="two"))
        assert granted(fences.store, _document("A", by="two")) == first
        assert first.prior == receipt

    def test_retracting_what_is_not_there_is_a_duplicate_of_nothing(self, fences: FencesUnderTest) -> None:
        assert verdict(fences.store, _retraction()) == Replay(None)
        assert read(fences.store, _retraction()) == HeldRecords()

    def test_a_retraction_moves_the_head_to_none(self, fences: FencesUnderTest) -> None:
        sealed(fences.store, _document("A", sequence=3))
        receipt = sealed(fences.store, _retraction())
        found = read(fences.store, _retraction()).source
        assert found is not None
        assert found.head is not None
        assert (found.head.live, found.head.sequence) == (False, 3)
        assert verdict(fences.store, _retraction(by="two")) == Replay(receipt)

    def test_the_same_content_after_a_retraction_revives_it(self, fences: FencesUnderTest) -> None:
        receipt = sealed(fences.store, _document("A"))
        sealed(fences.store, _retraction())
        assert granted(fences.store, _document("A", by="two")).prior == receipt

    def test_a_document_can_be_retracted_again_after_its_revival(self, fences: FencesUnderTest) -> None:
        sealed(fences.store, _document("A"))
        sealed(fences.store, _retraction())
        sealed(fences.store, _document("A", by="two"))
        assert granted(fences.store, _retraction(by="three")).prior is None

    def test_an_older_retraction_is_stale(self, fences: FencesUnderTest) -> None:
        sealed(fences.store, _document("A", sequence=5))
        assert verdict(fences.store, _retraction(sequence=4)) == StaleVerdict(5)

    def test_a_change_of_metadata_alone_is_a_move_that_keeps_the_receipt(self, fences: FencesUnderTest) -> None:
        receipt = sealed(fences.store, _document("A"), result=b"jA")
        asked = _document("A", by="two", metadata_hash=b"m" * 16)
        move = granted(fences.store, asked)
        assert move.prior == receipt
        assert move.head is not None
        assert move.head.metadata_hash == NO_METADATA
        fences.store.seal([seal(asked, move, result=b"jA")])
        assert isinstance(verdict(fences.store, _document("A", by="three", metadata_hash=b"m" * 16)), Replay)
        assert isinstance(verdict(fences.store, _document("A", by="three")), Granted)


class FenceStoreContract(
    ClaimContract,
    AttemptContract,
    SealContract,
    SourceContract,
    DocumentContract,
    EpochContract,
    SoloContract,
    LockContract,
    HeldLockContract,
    BatchContract,
    ReplayContract,
    RowContract,
    DrainContract,
    CountContract,
    ExpiryContract,
    DeletionContract,
    ScanContract,
    HandleContract,
    FormatContract,
    ClosingContract,
):
    """Subclass it and provide the fixture `fences`: a `FencesUnderTest` for each test, its store ready at epoch 1."""


def _document(revision: str, **fields: Any) -> Claim:
    return claim(Mode.DOCUMENT, revision, **fields)


def _retraction(**fields: Any) -> Claim:
    return claim(Mode.DOCUMENT, "retract", retract=True, **fields)


def _bring_into(fences: FencesUnderTest, asked: Claim, state: str) -> None:
    answer = granted(fences.store, asked)
    match state:
        case "expired":
            fences.clock.advance(asked.lease_ms)
        case "released":
            fences.store.release([lease(asked, answer)], "TIMEOUT")
        case "quarantined":
            fences.clock.advance(asked.lease_ms)
            refused = verdict(fences.store, asked._replace(token=b"quarantined by me"[:TOKEN_BYTES], max_attempts=1))
            assert isinstance(refused, InFlightVerdict)
            assert refused.quarantined
        case "sealed" | "failed":
            assert isinstance(fences.store.seal([seal(asked, answer, failed=state == "failed")])[0], Sealed)
