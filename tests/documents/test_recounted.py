"""A fence store that forgot its counts: decisions are counted again, out of the ledger, and each of them once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from ragfence import Document, Fence
from ragfence.audit.statistics import Recount
from ragfence.core.tallies import DECISIONS, outcome_of
from ragfence.errors import Conflict, StoreUnavailable
from ragfence.server.key_log import record_event
from tests.documents.places import DAY_MS, Place

HOUR_MS = 3_600_000
PAPERS = [Document(f"d{number}", f"text {number}") for number in range(12)]


def forget(here: Place) -> None:
    """Also the counts, and the rows that were not drained. It takes a millisecond: the clock tells what came before."""
    here.clock.advance(1)
    here.flush()
    if here.name == "embedded":
        here._sql(
            *(f"DELETE FROM {table}" for table in ("tallies", "documents", "decision_rows", "row_counts", "sources"))
        )


def work(here: Place) -> Fence:
    """Answers of every kind, at several hours."""
    fence = here.open()

    @fence.once(kind="job", key=lambda number: str(number), payload=lambda number: number)
    def job(number: int) -> int:
        return number

    for _ in range(3):
        fence.documents.ingest_many(PAPERS)
        fence.documents.ingest(Document("d0", "text 0", {"at": here.clock()}))
        job(here.clock())
        job(here.clock())
        here.clock.advance(HOUR_MS)
    fence.documents.ingest(Document("s", "one", sequence=1))
    with pytest.raises(Conflict):
        fence.documents.ingest(Document("s", "two", sequence=1))
    return fence


def in_the_ledger(fence: Fence) -> dict[str, int]:
    found: Counter[str] = Counter()
    for row in fence.audit.counts(by=("decision",)).to_pylist():
        found[row["decision"]] += row["count"]
    return dict(found)


def test_decisions_are_those_of_all_rows_after_every_loss(here: Place) -> None:
    fence = work(here)
    before = fence.stats()
    assert before.decisions == in_the_ledger(fence)
    for _ in range(2):
        fence.audit.drain()
        told = fence.stats()
        forget(here)
        fence = here.open()
        fence.documents.ingest_many(PAPERS)
        stats = here.open().stats()
        assert stats.decisions == {**told.decisions, "duplicate": told.decisions["duplicate"] + len(PAPERS)}
        assert stats.decisions == in_the_ledger(fence)
        assert {each.kind for each in stats.endpoints} == {"document", "job"}
        assert stats.counted_since_ms is None
        fence.audit.drain()
        assert here.open().stats().decisions == stats.decisions, "drained since: the store has counted them"
        here.clock.advance(60)


def test_only_the_hours_that_are_asked_for_are_counted(here: Place) -> None:
    fence = work(here)
    fence.audit.drain()
    record_event(here.kept, "default", "rf_1", "create", at_ms=here.clock())  # never in the store, so never counted
    told = {since: fence.stats(since).decisions for since in ("1h", "2h", "24h")}
    assert len({str(each) for each in told.values()}) == 3
    forget(here)
    fence = here.open()
    fence.hydrate()
    assert {since: fence.stats(since).decisions for since in told} == told
    here.clock.advance(2 * DAY_MS)
    assert fence.stats("24h").decisions == {}
    assert fence.stats("3d").decisions == told["24h"]


def test_each_shard_is_counted_up_to_its_own_loss(near: Place) -> None:
    began_ms = near.clock()
    fence = work(near)
    fence.audit.drain()
    begun = {shard: near.clock() + 1 if shard % 2 else began_ms + HOUR_MS for shard in range(64)}
    expected: Counter[str] = Counter()
    for row in fence.audit.rows():
        if row.ts_ms < begun[row.key[0]] and (outcome := outcome_of(row)):
            expected[DECISIONS[outcome]] += 1
    found: Counter[str] = Counter()
    for (decision, _, _), count in Recount("default", near.kept).count_before(begun, began_ms, near.clock()).items():
        found[decision] += count
    assert found == expected
    assert sum(found.values()) < sum(fence.stats().decisions.values())


def away(*args: Any, **kwargs: Any) -> Any:
    raise StoreUnavailable("away")


def test_a_store_that_was_not_lost_reads_no_ledger(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = work(here)
    fence.audit.drain()
    here.clock.advance(DAY_MS)
    monkeypatch.setattr("ragfence.audit.ledger.Ledger.parts", away)
    assert here.open().stats("12h").counted_since_ms is None


def test_counts_that_cannot_be_made_whole_say_since_when_they_count(
    near: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = work(near)
    fence.audit.drain()
    told = fence.stats().decisions
    forget(near)
    near.open().documents.ingest_many(PAPERS)
    began_ms = near.clock()
    with monkeypatch.context() as broken:
        broken.setattr("ragfence.audit.ledger.Ledger.parts", away)
        stats = near.open().stats()
    assert (stats.decisions, stats.counted_since_ms) == ({"duplicate": len(PAPERS)}, began_ms)
    assert near.open().stats().decisions == {**told, "duplicate": told["duplicate"] + len(PAPERS)}
