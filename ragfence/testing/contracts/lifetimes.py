"""Lifetimes of records: they expire, are purged, or are deleted."""

from __future__ import annotations

from ragfence.core.decisions import (
    Fenced,
    Granted,
    Mode,
    Replay,
    Sealed,
    StaleVerdict,
)
from ragfence.stores.fences import Lookup
from ragfence.testing.contracts.fence_calls import (
    ALL_MODES,
    DAY_MS,
    HOUR_MS,
    LEASE_MS,
    SHARD,
    FencesUnderTest,
    claim,
    granted,
    lease,
    seal,
    sealed,
    verdict,
)


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


class DeletionContract:
    """Records that are deleted before their time."""

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
