"""The columns of the ledger tell everything a row does."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragfence.audit import columns
from ragfence.core.policy import ROW_FIELDS
from ragfence.core.rows import FENCED_OUT, Row, RowKind, decode_rows
from ragfence.documents.preparing import Caller
from ragfence.errors import FormatCorrupt, FormatTooNew
from ragfence.testing.clock import START_MS
from tests.audit.made import ANY_ROW, row


@settings(max_examples=40, deadline=None)
@given(st.lists(ANY_ROW, max_size=12))
def test_a_row_that_became_columns_and_parquet_is_the_very_row_again(rows: list[Row]) -> None:
    """For whatever a fence store may hold: rows_in(table_of(rows)) == rows, also through Parquet."""
    stored = [next(decode_rows(each.encode())) for each in rows]
    table = columns.table_of(stored, "default")
    assert list(columns.rows_in(table)) == stored
    assert list(columns.rows_in(columns.opened("x", columns.encode(table)).read())) == stored


def test_ordinary_rows_need_no_raw_copy() -> None:
    context = Caller("owner", "run").context("a.md", "xxh3:1", "recipe", 7, 120)
    ordinary = [row(1), row(2, context=context, kind=RowKind.DUPLICATE), row(3, effect_id="eff")]
    assert columns.table_of(ordinary, "default").column("raw").null_count == 3


def test_a_duplicate_of_a_document_says_how_many_characters_were_saved() -> None:
    context = Caller("owner", "run").context("a.md", "xxh3:1", "recipe", None, 120)
    rows = [
        row(1, context=context, kind=RowKind.NEW),
        row(2, context=context, kind=RowKind.DUPLICATE),
        row(3, context=context, kind=RowKind.DUPLICATE, flags=FENCED_OUT),
        row(4, kind=RowKind.DUPLICATE),
    ]
    table = columns.table_of(rows, "default")
    assert table.column("saved").to_pylist() == [None, 120, None, None]
    assert table.column("characters").to_pylist() == [120, 120, 120, None]


def test_what_decisions_show_comes_first() -> None:
    assert set(columns.decision_names()) == ROW_FIELDS


def test_an_empty_table_has_every_column() -> None:
    assert columns.table_of([], "default").schema == columns.schema()
    assert list(columns.rows_in(columns.table_of([], "default"))) == []


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ({}, FormatCorrupt),
        ({b"ragfence": b"rows", b"ragfence.version": b"1"}, FormatCorrupt),
        ({b"ragfence": b"ragfence.ledger", b"ragfence.version": b"x"}, FormatCorrupt),
        ({b"ragfence": b"ragfence.ledger", b"ragfence.version": b"2"}, FormatTooNew),
    ],
)
def test_what_is_no_ledger_or_a_newer_one_is_refused(told: dict[bytes, bytes], error: type[Exception]) -> None:
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(columns.table_of([row(1, ts_ms=START_MS)], "t").replace_schema_metadata(told), sink)
    with pytest.raises(error):
        columns.opened("x", bytes(sink.getvalue()))
    with pytest.raises(FormatCorrupt):
        columns.opened("x", b"no parquet")
