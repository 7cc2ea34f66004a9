"""Rows move from the fence store into the ledger: all of them, each once, whoever fails on the way."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import ragfence
from ragfence import Operation
from ragfence.audit import drain as draining
from ragfence.audit.audit import Audit
from ragfence.core.decision_rows import decode_rows
from ragfence.core.layout import SEAL_POSITION
from ragfence.errors import CommitUncertain, ObjectsRequired, StoreUnavailable
from ragfence.testing.clock import START_MS
from ragfence.testing.faults import FaultyFences
from ragfence.testing.memory import FaultyObjects, MemoryFences
from tests.audit.conftest import Place
from tests.audit.made import DAY_MS, HOUR_MS, row


def test_rows_leave_the_store_and_stand_in_the_ledger(place: Place) -> None:
    rows = [row(n) for n in range(120)]
    place.write(rows)
    done = place.audit().drain()
    assert (done.rows, done.objects, done.busy) == (120, 1, False)
    assert place.undrained() == set()
    assert sorted(place.in_ledger()) == sorted(each.row_id for each in rows)
    assert list(place.audit().rows()) == rows
    assert place.audit().drain().rows == 0


def test_what_a_real_history_leaves_is_told_the_same_before_and_after(place: Place) -> None:
    fence = place.open()
    for n in range(6):
        for _ in range(2):
            with fence.claim(Operation(kind="ticket", source_id=f"s{n % 4}", revision=str(n)), payload={"n": n}) as op:
                if op.is_new:
                    op.seal(effect_id=f"eff-{n}" if n % 2 else None)
        place.clock.advance(7)
    before, rows = fence.audit.decisions(), list(fence.audit.rows())
    report, story = fence.audit.check(), fence.audit.explain(op.receipt.key)
    assert fence.audit.drain().rows == 18
    assert fence.audit.decisions() == before
    assert list(fence.audit.rows()) == rows
    assert fence.audit.check() == report
    assert fence.audit.explain(op.receipt.key) == story
    assert len(story.events) == 3
    operation = fence.audit.operation_of(bytes.fromhex(op.receipt.key))
    assert (operation.source_id, operation.revision) == ("s1", "5")


def test_a_drained_key_can_be_released(memory_place: Place) -> None:
    fence = memory_place.open()
    wanted = Operation(kind="ticket", source_id="bad", tenant="default")
    with pytest.raises(ragfence.errors.TerminalError), fence.claim(wanted):
        raise ragfence.errors.TerminalError("no")
    fence.audit.drain()
    assert memory_place.undrained() == set()
    assert fence.release(wanted.key.hex())
    with fence.claim(wanted) as op:
        assert op.is_new
        op.seal()


def test_rows_go_into_the_partition_of_their_day(place: Place) -> None:
    rows = [row(n, ts_ms=START_MS + n * 8 * HOUR_MS) for n in range(9)]
    place.write(rows)
    place.clock.advance(3 * DAY_MS)
    done = place.audit().drain()
    days = [part.day for part in place.parts()]
    assert days == sorted(set(days))
    assert done.objects == len(days) in (3, 4)
    for part in place.parts():
        assert f"/ledger/date={part.day}/" in part.name
    assert list(place.audit().rows()) == rows


def test_batches_are_bounded_and_all_are_drained(place: Place) -> None:
    rows = [row(n) for n in range(50)]
    for each in rows:
        place.write([each])
    assert place.audit(drain_batch_rows=7).drain().rows == 50
    assert place.undrained() == set()
    assert sorted(place.in_ledger()) == sorted(each.row_id for each in rows)


def test_what_is_written_while_it_drains_is_not_lost(place: Place) -> None:
    class Writing:
        def __init__(self, inner: Any) -> None:
            self.inner, self.n = inner, 1000

        def __getattr__(self, name: str) -> Any:
            if name in ("row_entries", "drop_rows"):
                self.n += 1
                later_ms = START_MS + self.n
                self.inner.record([row(self.n, ts_ms=later_ms), row(self.n + 9000, ts_ms=later_ms, shard=0)])
            return getattr(self.inner, name)

    place.write([row(n) for n in range(20)])
    audit = place.audit(fences=Writing(place.fences), drain_batch_rows=5)
    audit.drain()
    ids = {each.row_id for each in audit.rows()}
    assert len(ids) >= 20
    place.audit().drain()
    assert place.undrained() == set()
    assert set(place.in_ledger()) >= ids


@pytest.mark.parametrize("point", ["row_entries", "put_new", "put_new after", "drop_rows", "drop_rows after", "lock"])
def test_a_store_that_fails_loses_and_doubles_nothing(place: Place, point: str) -> None:
    rows = [row(n) for n in range(40)]
    place.write(rows)
    fences, objects = FaultyFences(place.fences), FaultyObjects(place.objects)
    method, _, after = point.partition(" ")
    orders: Any = objects.on("put_new", match="*/ledger/*") if method == "put_new" else fences.on(method)  # type: ignore[arg-type]
    (orders.fail_after if after else orders.fail_before)()
    audit = place.audit(fences=fences, objects=objects, drain_batch_rows=15)
    with pytest.raises((StoreUnavailable, CommitUncertain)):
        audit.drain()
    assert list(audit.rows()) == rows
    assert audit.check().rows == 40
    audit.drain()
    assert place.undrained() == set()
    assert set(place.in_ledger()) == {each.row_id for each in rows}
    assert list(audit.rows()) == rows
    assert audit.decisions().num_rows == 40


def test_a_put_that_lands_late_doubles_nothing(memory_place: Place) -> None:
    rows = [row(n) for n in range(10)]
    memory_place.write(rows)
    objects = FaultyObjects(memory_place.objects)
    held = objects.on("put_new", match="*/ledger/*").hold()
    audit = memory_place.audit(objects=objects)
    with pytest.raises(CommitUncertain):
        audit.drain()
    assert memory_place.undrained() == {each.row_id for each in rows}
    memory_place.write([row(99)])
    audit.drain()
    held.land()
    assert list(audit.rows()) == [*rows, row(99)]


def test_many_drainers_at_once_lose_and_double_nothing(place: Place) -> None:
    """Without the lock, which is for liveness alone."""

    class Unlocked:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def lock(self, *_: Any) -> bool:
            return True

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    rows = [row(n, ts_ms=START_MS + n) for n in range(200)]
    for start in range(0, 200, 20):
        place.write(rows[start : start + 20])
    place.clock.advance(3 * DAY_MS)
    audits = [place.audit(fences=Unlocked(place.fences), drain_batch_rows=13, min_files=2) for _ in range(4)]
    failed: list[BaseException] = []

    def drain(audit: Audit) -> None:
        try:
            for _ in range(3):
                audit.drain()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=drain, args=(audit,)) for audit in audits]
    for thread in threads:
        thread.start()
    seen = [{each.row_id for each in place.audit().rows()} for _ in range(5)]
    for thread in threads:
        thread.join()
    assert not failed
    everything = {each.row_id for each in rows}
    assert all(ids == everything for ids in seen)
    assert place.undrained() == set()
    assert list(place.audit().rows()) == rows
    place.audit().drain()
    assert sorted(place.in_ledger()) == sorted(everything)


def test_somebody_else_who_drains_is_left_alone(place: Place) -> None:
    place.write([row(1)])
    audit = place.audit()
    assert place.fences.lock(draining.LOCK, "somebody", 1000)
    assert audit.drain() == draining.DrainReport(busy=True)
    assert len(place.undrained()) == 1
    place.fences.unlock(draining.LOCK, "somebody")
    assert audit.drain().rows == 1


def test_a_row_that_a_retry_wrote_again_is_told_as_it_was_first(place: Place) -> None:
    """A seal whose reply was lost is repeated, after midnight, and so is its row; in between they were drained."""
    first, again = row(1), row(1, ts_ms=START_MS + DAY_MS, sealed_at_ms=START_MS)
    audit = place.audit()
    for each in (first, again):
        place.write([each])
        audit.drain()
    assert list(audit.rows()) == [first]
    assert audit.decisions().num_rows == 1
    assert len(place.in_ledger()) == 2


def test_without_an_object_store_there_is_no_ledger(tmp_path: Any) -> None:
    with ragfence.open(MemoryFences(solo=True), journal=tmp_path / "j") as fence:
        with fence.claim(Operation(kind="t", source_id="a")) as op:
            op.seal()
        with pytest.raises(ObjectsRequired):
            fence.audit.drain()
        assert fence.audit.decisions().num_rows == 2


def test_lag_is_the_age_of_the_oldest_row(place: Place) -> None:
    place.write([row(1), row(2, ts_ms=START_MS + 500)])
    place.clock.advance(2000)
    assert place.audit().drain().lag_ms == 2000


def test_only_the_days_that_are_asked_for_are_listed_and_read(memory_place: Place) -> None:
    for day in range(10):
        memory_place.write([row(day, ts_ms=START_MS + day * DAY_MS)])
        memory_place.audit().drain()
    memory_place.clock.advance(10 * DAY_MS)
    objects = FaultyObjects(memory_place.objects)
    audit = memory_place.audit(objects=objects)
    before = objects.calls["get"]
    from datetime import UTC, datetime, timedelta

    start = datetime.fromtimestamp(START_MS / 1000, UTC)
    table = audit.decisions(since=start + timedelta(days=3), until=start + timedelta(days=5))
    assert table.column("source_id").to_pylist() == ["s3", "s4"]
    assert objects.calls["get"] - before == 2


def test_entries_that_hold_many_rows_are_drained_whole(place: Place) -> None:
    place.write([row(n, shard=3) for n in range(30)])
    assert {each.position for entry in place.fences.row_entries() for each in decode_rows(entry.data)} == {
        SEAL_POSITION
    }
    assert place.audit(drain_batch_rows=1).drain().rows == 30
