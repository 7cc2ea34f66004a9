"""Scans: heads, marks, records, versions and counts of a store."""

from __future__ import annotations

import pytest

from ragfence.core.decisions import (
    Mode,
)
from ragfence.core.layout import (
    State,
)
from ragfence.testing.contracts.fence_calls import (
    DAY_MS,
    HOUR_MS,
    SHARD,
    FencesUnderTest,
    claim,
    granted,
    lease,
    seal,
    sealed,
    source_of,
    start_epoch,
    verdict,
)


class ScanContract:
    """Heads, marks, records, versions and counts."""

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
