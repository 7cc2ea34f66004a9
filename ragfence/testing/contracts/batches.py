"""Batches: the answers of many claims in one call, in their order."""

from __future__ import annotations

from typing import Any

from ragfence.core.decisions import (
    Granted,
    HeldRecords,
    InFlightVerdict,
    Mode,
    NotReadyVerdict,
    Replay,
    Sealed,
)
from ragfence.core.records import KeyRecord
from ragfence.stores.fences import FenceStore, Lookup
from ragfence.testing.contracts.fence_calls import (
    ALL_MODES,
    SHARD,
    FencesUnderTest,
    claim,
    granted,
    lease,
    row_id,
    rows_of,
    seal,
    sealed,
    start_epoch,
    verdict,
)


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
        assert sorted(rows_of(fences.store), key=row_id) == sorted(rows_of(twin), key=row_id)

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
