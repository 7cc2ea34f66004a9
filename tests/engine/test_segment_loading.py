"""What a list of segments amounts to when a fence store is filled from it."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from ragfence.core.layout import source_with
from ragfence.core.operations import FenceNumber
from ragfence.core.records import SourceRecord
from ragfence.engine.segment_log import LogRow, PlainCodec, SegmentLoader
from ragfence.stores.fences import LoadedReceipt, LoadedSource
from ragfence.stores.local import LocalObjects

SHARD, SOURCE = b"\x05", b"s" * 20


def row(content: bytes, counter: int, *, live: bool = True) -> LogRow:
    result = content if live else b""
    return LogRow(SHARD + content * 32, SOURCE, FenceNumber(1, counter), b"f" * 16, live, None, b"m" * 16, "", result)


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_the_newest_row_of_a_source_is_its_head_and_that_of_another_key_its_receipt(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    """A, B, A again, C: names of segments are random, so they may be read in any order."""
    objects, moves = LocalObjects(tmp_path), [row(b"A", 1), row(b"B", 2), row(b"A", 3), row(b"C", 4)]
    for place, number in enumerate(order):
        objects.put_new(f"t/segments/{place}", PlainCodec().encode([moves[number]]))
    source, *receipts = SegmentLoader(objects, PlainCodec()).load(f"t/segments/{place}" for place in range(4))
    assert isinstance(source, LoadedSource)
    assert (source.shard, source.source) == (5, SOURCE)
    head = SourceRecord.decode(source_with(9, source.head)).head
    assert head is not None
    assert (head.digest, head.live, head.record) == (b"C" * 32, True, moves[3].record())
    assert {each.key: each.record for each in receipts if isinstance(each, LoadedReceipt)} == {
        moves[2].key: moves[2].record(),
        moves[1].key: moves[1].record(),
    }


def test_what_was_retracted_has_a_receipt_and_a_head_that_is_not_live(tmp_path: Path) -> None:
    objects, moves = LocalObjects(tmp_path), [row(b"R", 2, live=False), row(b"A", 1)]
    objects.put_new("t/segments/1", PlainCodec().encode(moves))
    source, receipt = SegmentLoader(objects, PlainCodec()).load(["t/segments/1"])
    assert isinstance(source, LoadedSource)
    head = SourceRecord.decode(source_with(9, source.head)).head
    assert head is not None
    assert not head.live
    assert receipt == LoadedReceipt(moves[1].key, moves[1].record())
