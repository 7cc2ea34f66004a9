"""The part of the contract of fence stores about rows that leave them: read, stored elsewhere, then dropped."""

from __future__ import annotations

from collections.abc import Iterable

from ragfence.core.decision_rows import Row, decode_rows
from ragfence.core.layout import TOKEN_BYTES, RowKind
from ragfence.stores.fences import FenceStore, RowEntry, RowStore
from ragfence.testing.contracts.fence_calls import FencesUnderTest, start_epoch


class DrainContract:
    """Rows leave the store entry by entry: those that were read and stored elsewhere, and no others."""

    def test_entries_hold_every_row_behind_each_other(self, fences: FencesUnderTest) -> None:
        _write_rows(fences.store, range(30))
        entries = _all_entries(fences.store, limit=4)
        assert {row.row_id for entry in entries for row in decode_rows(entry.data)} == _row_ids(fences.store)
        assert len({entry.place for entry in entries}) == len(entries)
        for entry in entries:
            assert entry.first_row_id == next(decode_rows(entry.data)).row_id
        assert len(fences.store.row_entries(limit=4)) == 4
        assert fences.store.row_entries(entries[-1].place) == []

    def test_what_was_read_can_be_dropped_and_nothing_else_goes(self, fences: FencesUnderTest) -> None:
        _write_rows(fences.store, range(10))
        read_ones = _all_entries(fences.store, limit=3)
        _write_rows(fences.store, range(10, 20))
        later = _row_ids(fences.store) - {row.row_id for each in read_ones for row in decode_rows(each.data)}
        assert len(later) == 10
        assert fences.store.drop_rows(read_ones) == len(read_ones)
        assert _row_ids(fences.store) == later
        assert fences.store.drop_rows(read_ones) == 0
        assert _row_ids(fences.store) == later
        assert fences.store.drop_rows([]) == 0

    def test_a_place_leads_on_when_its_entry_is_gone(self, fences: FencesUnderTest) -> None:
        _write_rows(fences.store, range(12))
        first, *rest = _all_entries(fences.store, limit=100)
        fences.store.drop_rows([first])
        assert fences.store.row_entries(first.place) == rest
        assert fences.store.row_entries(first.place, limit=2) == rest[:2]

    def test_a_row_written_again_after_it_was_dropped_is_an_entry_of_its_own(self, fences: FencesUnderTest) -> None:
        _write_rows(fences.store, [1])
        (before,) = fences.store.row_entries()
        fences.store.drop_rows([before])
        _write_rows(fences.store, [1])
        (again,) = fences.store.row_entries()
        assert (again.place != before.place, again.data) == (True, before.data)
        assert fences.store.drop_rows([before]) == 0
        assert fences.store.row_entries() == [again]

    def test_an_entry_that_is_another_by_now_stays(self, fences: FencesUnderTest) -> None:
        """As after a failover or a restore, when a place was given a second time."""
        _write_rows(fences.store, [1, 2])
        entries = fences.store.row_entries()
        swapped = [entry._replace(data=other.data) for entry, other in zip(entries, entries[::-1], strict=True)]
        assert fences.store.drop_rows(swapped) == 0
        assert fences.store.row_entries() == entries

    def test_rows_of_another_tenant_are_neither_shown_nor_dropped(self, fences: FencesUnderTest) -> None:
        other = fences.reopen("other")
        start_epoch(other, 1)
        _write_rows(other, [1])
        assert fences.store.row_entries() == []
        fences.store.drop_rows(other.row_entries())
        assert len(other.row_entries()) == 1


def _write_rows(store: FenceStore, numbers: Iterable[int]) -> None:
    """A call each, so that none of them shares its entry."""
    for n in numbers:
        token = n.to_bytes(TOKEN_BYTES, "big")
        store.record([Row(token, 0, store.now_ms(), RowKind.NEW, bytes((n % 5,)) + b"k" * 32, b"f" * 16)])


def _row_ids(store: RowStore) -> set[str]:
    return {row.row_id for row in store.rows()}


def _all_entries(store: RowStore, limit: int) -> list[RowEntry]:
    found: list[RowEntry] = []
    while page := store.row_entries(found[-1].place if found else "", limit):
        assert len(page) <= limit
        found += page
    return found
