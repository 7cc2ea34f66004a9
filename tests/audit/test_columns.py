"""The columns of the ledger tell everything a row does."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragfence.audit import columns
from ragfence.audit.drain import LedgerCompaction
from ragfence.audit.ledger import day_of
from ragfence.core.decision_rows import Row, context_of, decode_rows
from ragfence.core.layout import (
    CONFLICT_POSITION,
    END_POSITION,
    FENCED_OUT,
    FENCED_POSITION,
    RELEASE_POSITION,
    SEAL_POSITION,
    RowKind,
)
from ragfence.core.operations import Operation
from ragfence.core.policy import ROW_FIELDS, AuditRules
from ragfence.documents.claims import Caller
from ragfence.errors import FormatCorrupt, FormatTooNew
from ragfence.testing.clock import START_MS
from tests.audit.conftest import Place
from tests.audit.made import ANY_ROW, DAY_MS, row


@settings(max_examples=40, deadline=None)
@given(st.lists(ANY_ROW, max_size=12))
def test_a_row_that_became_columns_and_parquet_is_the_very_row_again(rows: list[Row]) -> None:
    """For whatever a fence store may hold: rows_in(to_table(rows)) == rows, also through Parquet."""
    stored = [next(decode_rows(each.encode())) for each in rows]
    table = columns.to_table(stored, "default")
    assert list(columns.to_rows(table)) == stored
    assert list(columns.to_rows(columns.open_file("x", columns.encode(table)).read())) == stored


@pytest.mark.parametrize(
    ("kind", "position", "phase"),
    [
        (RowKind.NEW, 0, "claim"),
        (RowKind.NEW, SEAL_POSITION, "seal"),
        (RowKind.NEW, RELEASE_POSITION, "release"),
        (RowKind.DUPLICATE, 3, "replay"),
        (RowKind.DUPLICATE, CONFLICT_POSITION, "replay"),
        (RowKind.DUPLICATE, SEAL_POSITION, "seal"),
        (RowKind.DUPLICATE, FENCED_POSITION, "late_seal"),
        (RowKind.CONFLICT, CONFLICT_POSITION, "conflict"),
        (RowKind.CONFLICT, SEAL_POSITION, "conflict"),
        (RowKind.IN_FLIGHT, 1, "in_flight"),
        (RowKind.STALE, 0, "stale"),
        (RowKind.ENDED, END_POSITION, "end"),
    ],
)
def test_a_row_tells_its_phase(kind: RowKind, position: int, phase: str) -> None:
    made = row(1, kind=kind, position=position)
    assert (made.phase, made.columns()["phase"]) == (phase, phase)
    assert columns.to_table([made], "default").column("phase").to_pylist() == [phase]


@settings(max_examples=40, deadline=None)
@given(st.lists(ANY_ROW, max_size=12))
def test_the_phase_of_an_old_row_is_the_one_it_would_have_now(rows: list[Row]) -> None:
    """For whatever rows there are: what format 1 tells of them is enough to know their phase."""
    table = columns.to_table(rows, "default")
    assert columns.compute_phases(table.column("row_id"), table.column("decision")).to_pylist() == [
        row.phase for row in rows
    ]


def test_origin_and_api_key_are_columns_and_need_no_raw_copy() -> None:
    operation = Operation(kind="ticket", source_id="a", tenant="default")
    made = row(1, context=context_of(operation, owner="w", sequence="3", origin="docs", api_key="k-1"))
    document = Caller("owner", "run", "", "/v1").context("a.md", "xxh3:1", "recipe", 7, 120)
    of_document = row(2, context=document[:-1] + b',"origin":"docs","api_key":"k-1"}')
    table = columns.to_table([made, of_document], "default")
    assert table.column("origin").to_pylist() == ["docs"] * 2
    assert table.column("api_key").to_pylist() == ["k-1"] * 2
    assert table.column("raw").null_count == 2
    assert list(columns.to_rows(table)) == [made, of_document]
    assert (made.columns()["origin"], made.columns()["api_key"]) == ("docs", "k-1")
    assert row(3).columns()["origin"] is None


GOLDEN = Path(__file__).parents[1] / "golden"
TOLD_BY_FORMAT_1 = [
    ("ticket", "a", "new", "claim"),
    ("ticket", "a", "new", "seal"),
    ("ticket", "a", "duplicate", "replay"),
    ("ticket", "a", "conflict", "conflict"),
    ("ticket", "b", "new", "claim"),
    ("ticket", "b", "new", "release"),
    ("ticket", "c", "new", "claim"),
    ("ticket", "c", "new", "seal"),
    ("ticket", "c", "stale", "stale"),
    ("document", "a.md", "new", "claim"),
    ("document", "a.md", "new", "seal"),
    ("document", "a.md", "duplicate", "replay"),
    ("document", "a.md", "new", "claim"),
    ("document", "a.md", "new", "seal"),
    ("document", "a.md", "new", "claim"),
    ("document", "a.md", "duplicate", "seal"),
]


def test_a_file_of_format_1_is_read_and_compacted_as_if_it_told_phases(memory_place: Place) -> None:
    """Written by the code of format 1, which knew neither phase nor origin nor api_key."""
    old = (GOLDEN / "ledger-1.parquet").read_bytes()
    assert "phase" not in columns.open_file("x", old).schema_arrow.names
    table = columns.read_columns(columns.open_file("x", old), columns.schema().names)
    part = memory_place.ledger.write(day_of(_first_ms(table)), table, "drained")
    memory_place.objects.delete([part.name])
    memory_place.objects.put_new(part.name, old)
    told = ("kind", "source_id", "decision", "phase")
    audit = memory_place.audit()
    assert [tuple(line[name] for name in told) for line in audit.decisions().to_pylist()] == TOLD_BY_FORMAT_1
    assert set(audit.decisions().column("origin").to_pylist()) == {None}
    assert audit.decisions(phase="seal").num_rows == 5
    counts = {(each["kind"], each["decision"]): each["count"] for each in audit.counts().to_pylist()}
    assert counts["document", "new"] == 2
    memory_place.write([row(1, ts_ms=_first_ms(table) + 1)])
    audit.drain()
    mixed = audit.counts(by=("phase", "kind"))
    assert sum(mixed.column("count").to_pylist()) == len(TOLD_BY_FORMAT_1) + 1
    LedgerCompaction(memory_place.ledger, AuditRules()).run(_first_ms(table) + 10 * DAY_MS, every_day=True)
    (packed,) = memory_place.parts()
    data = memory_place.objects.get(packed.name)
    assert data is not None
    assert columns.open_file("x", data).schema_arrow.names == columns.schema().names
    assert audit.counts(by=("phase", "kind")) == mixed
    assert audit.check().ok


def _first_ms(table: pa.Table) -> int:
    return int(min(table.column("ts").cast(pa.int64()).to_pylist()))


def test_ordinary_rows_need_no_raw_copy() -> None:
    context = Caller("owner", "run").context("a.md", "xxh3:1", "recipe", 7, 120)
    ordinary = [row(1), row(2, context=context, kind=RowKind.DUPLICATE), row(3, effect_id="eff")]
    assert columns.to_table(ordinary, "default").column("raw").null_count == 3


def test_a_duplicate_of_a_document_says_how_many_characters_were_saved() -> None:
    context = Caller("owner", "run").context("a.md", "xxh3:1", "recipe", None, 120)
    rows = [
        row(1, context=context, kind=RowKind.NEW),
        row(2, context=context, kind=RowKind.DUPLICATE),
        row(3, context=context, kind=RowKind.DUPLICATE, flags=FENCED_OUT),
        row(4, kind=RowKind.DUPLICATE),
    ]
    table = columns.to_table(rows, "default")
    assert table.column("saved").to_pylist() == [None, 120, None, None]
    assert table.column("characters").to_pylist() == [120, 120, 120, None]


def test_what_decisions_show_comes_first() -> None:
    assert set(columns.decision_names()) == ROW_FIELDS


def test_an_empty_table_has_every_column() -> None:
    assert columns.to_table([], "default").schema == columns.schema()
    assert list(columns.to_rows(columns.to_table([], "default"))) == []


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ({}, FormatCorrupt),
        ({b"ragfence": b"rows", b"ragfence.version": b"1"}, FormatCorrupt),
        ({b"ragfence": b"ragfence.ledger", b"ragfence.version": b"x"}, FormatCorrupt),
        ({b"ragfence": b"ragfence.ledger", b"ragfence.version": b"3"}, FormatTooNew),
    ],
)
def test_what_is_no_ledger_or_a_newer_one_is_refused(told: dict[bytes, bytes], error: type[Exception]) -> None:
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(columns.to_table([row(1, ts_ms=START_MS)], "t").replace_schema_metadata(told), sink)
    with pytest.raises(error):
        columns.open_file("x", bytes(sink.getvalue()))
    with pytest.raises(FormatCorrupt):
        columns.open_file("x", b"no parquet")
