"""Many small objects become few, rows in them once; old days go. Whoever reads meanwhile sees every row once."""

from __future__ import annotations

from typing import Any

import pytest

from ragfence.audit import columns, drain
from ragfence.audit.ledger import RowQuery, are_disjoint
from ragfence.core.hashing import SHARDS
from ragfence.errors import StoreUnavailable
from ragfence.testing.clock import START_MS
from ragfence.testing.memory import FaultyObjects
from tests.audit.conftest import Place
from tests.audit.made import DAY_MS, row


def drain_one_by_one(place: Place, numbers: Any, **rules: Any) -> None:
    for n in numbers:
        place.write([row(n, ts_ms=START_MS + n)])
        place.audit(**rules).drain()


def test_small_objects_of_a_day_that_goes_on_are_made_into_one(memory_place: Place) -> None:
    drain_one_by_one(memory_place, range(15))
    assert len(memory_place.parts()) == 15
    memory_place.write([row(15, ts_ms=START_MS + 15)])
    done = memory_place.audit().drain()
    assert (done.compacted, done.packed) == (16, 1)
    (part,) = memory_place.parts()
    assert (part.how, part.first_ms, part.last_ms) == ("packed", START_MS, START_MS + 15)
    assert list(memory_place.audit().rows()) == [row(n, ts_ms=START_MS + n) for n in range(16)]


def test_large_objects_of_a_day_that_goes_on_are_left_alone(memory_place: Place) -> None:
    drain_one_by_one(memory_place, range(6), min_files=2, compact_below_bytes=1)
    assert len(memory_place.parts()) == 6


def test_a_day_that_is_over_is_flat(memory_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "PACKED_BYTES", 3_000)
    drain_one_by_one(memory_place, range(14))
    memory_place.clock.advance(2 * DAY_MS)
    done = memory_place.audit().drain()
    parts = memory_place.parts()
    assert (done.compacted, done.packed) == (14, len(parts))
    assert are_disjoint(parts)
    assert 8 <= len(parts) <= SHARDS
    assert all(part.how == "packed" for part in parts)
    assert sorted(memory_place.in_ledger()) == [row(n).row_id for n in range(14)]
    assert memory_place.audit().drain().packed == 0, "once is enough"
    objects = FaultyObjects(memory_place.objects)
    audit = memory_place.audit(objects=objects)
    assert audit.decisions(source_id="s7").num_rows == 1
    assert objects.calls["get"] == 1, "the name tells which object has the source"


def test_a_row_that_comes_late_makes_its_day_flat_again(memory_place: Place) -> None:
    drain_one_by_one(memory_place, range(3))
    memory_place.clock.advance(2 * DAY_MS)
    memory_place.audit().drain()
    drain_one_by_one(memory_place, [7])
    assert len(memory_place.parts()) == 1
    assert len(memory_place.in_ledger()) == 4


def test_a_day_that_was_left_alone_for_long_is_compacted_when_every_day_is(memory_place: Place) -> None:
    drain_one_by_one(memory_place, range(3))
    memory_place.clock.advance(30 * DAY_MS)
    assert memory_place.audit().drain().packed == 0
    assert memory_place.audit().drain(every_day=True).packed == 1


def test_doubles_are_gone_after_a_compaction(memory_place: Place) -> None:
    objects = FaultyObjects(memory_place.objects)
    for n in range(4):
        memory_place.write([row(n, ts_ms=START_MS + n)])
        objects.on("delete").fail_before()
        try:
            memory_place.audit(objects=objects, min_files=2).drain()
        except StoreUnavailable:
            continue
    assert len(memory_place.in_ledger()) > 4
    assert memory_place.audit().decisions().num_rows == 4
    objects.heal()
    memory_place.clock.advance(2 * DAY_MS)
    memory_place.audit(objects=objects).drain()
    assert sorted(memory_place.in_ledger()) == [row(n).row_id for n in range(4)]


def test_what_equals_the_outcome_is_not_deleted_with_what_it_replaced(memory_place: Place) -> None:
    """Two packed objects with the same rows: the outcome of packing them has the name of one of them."""
    ledger = memory_place.ledger
    drain_one_by_one(memory_place, range(3))
    memory_place.clock.advance(2 * DAY_MS)
    memory_place.audit().drain()
    (part,) = memory_place.parts()
    table = ledger.read(part, RowQuery(), _every_column())
    assert table is not None
    ledger.write(part.day, table.take([0, 2]), "packed")
    memory_place.audit().drain()
    assert memory_place.parts() == [part]
    assert len(memory_place.in_ledger()) == 3


def test_a_reader_in_the_middle_of_a_compaction_sees_every_row_once(memory_place: Place) -> None:
    """Before each of its gets, everything is moved on: drained, packed, and what was packed is deleted."""
    drain_one_by_one(memory_place, range(6))
    for n in range(6, 9):
        memory_place.write([row(n, ts_ms=START_MS + n)])
    moves = [
        lambda: memory_place.audit(min_files=2).drain(),
        lambda: (memory_place.clock.advance(2 * DAY_MS), memory_place.audit().drain()),
    ]

    class Moving:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def get(self, name: str) -> bytes | None:
            if moves:
                moves.pop(0)()
            return self.inner.get(name)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    rows = list(memory_place.audit(objects=Moving(memory_place.objects)).rows())
    assert not moves
    assert [each.row_id for each in rows] == [row(n).row_id for n in range(9)]


def test_days_older_than_the_policy_keeps_go_whole(memory_place: Place) -> None:
    for day in range(6):
        memory_place.write([row(day, ts_ms=START_MS + day * DAY_MS)])
        memory_place.audit().drain()
    memory_place.clock.advance(6 * DAY_MS)
    done = memory_place.audit(keep_days=3).drain()
    assert done.expired == 3
    assert [each.row_id for each in memory_place.audit().rows()] == [row(n).row_id for n in (3, 4, 5)]


def test_files_of_others_are_left_alone(memory_place: Place) -> None:
    name = f"{memory_place.ledger.prefix}date=2020-01-01/notes.txt"
    memory_place.objects.put_new(name, b"hello")
    drain_one_by_one(memory_place, range(2))
    assert memory_place.audit(keep_days=1).drain().expired == 0
    assert memory_place.objects.get(name) == b"hello"
    assert memory_place.audit().decisions().num_rows == 2


def test_a_clock_that_ran_mad_keeps_nothing_from_being_stored(memory_place: Place) -> None:
    memory_place.write([row(1, ts_ms=2**47), row(2, ts_ms=0)])
    memory_place.audit(keep_days=36500).drain()
    assert memory_place.undrained() == set()
    assert len(list(memory_place.audit().rows())) == 2


def _every_column() -> list[str]:
    return list(columns.schema().names)
