"""The content_digest: of all that is in the rows, of nothing else, and for ever the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ragfence.errors import BuildUnverified
from ragfence.indexes.backends.backend import PAYLOAD, Metric, Shape, row_schema
from ragfence.indexes.content_digest import ContentDigest

DIMENSION = 4
COUNT = 300


def rows(count: int = COUNT) -> pa.Table:
    at = range(count)
    vectors = (np.arange(count * DIMENSION, dtype=np.float32) - 7.5) / 3
    columns = [
        pa.array([f"{(each * 2654435761) % 2**32:08x}" * 4 for each in at]),
        pa.array([f"doc-{each // 2}" for each in at]),
        pa.array([("", "é:1")[each % 2] for each in at]),
        pa.array([each % 2 for each in at], pa.int32()),
        pa.array([10 * each for each in at], pa.int64()),
        pa.array([10 * each + 9 for each in at], pa.int64()),
        pa.array([3] * count, pa.int32()),
        pa.array([f"text {each}: ü" for each in at]),
        pa.array([""] * count),
        pa.array(["{}"] * count),
        pa.FixedSizeListArray.from_arrays(pa.array(vectors), DIMENSION),
    ]
    return pa.Table.from_arrays(columns, schema=row_schema(DIMENSION))


def contents(*tables: Any, metric: Metric = "cosine") -> ContentDigest:
    made = ContentDigest(Shape(DIMENSION, metric))
    for table in tables:
        made.add(table)
    return made


def with_value(table: pa.Table, column: str, row: int, value: Any) -> pa.Table:
    values = table.column(column).to_pylist()
    values[row] = value
    at = table.schema.get_field_index(column)
    return table.set_column(at, column, pa.array(values, table.schema.field(column).type))


FLOATS = "sha256:f6412762345947c1ccd1030faeb640f4ebd699ce5fabfb2ad3f94ce14469cf05"


@pytest.mark.parametrize(
    ("metric", "digest"),
    [
        ("cosine", "sha256:27a78b745dbabadadf58df2c481695649c29047aa559a81e69496c1c82b6fdd9"),
        ("dot", FLOATS),
        ("l2", FLOATS),
    ],
)
def test_the_digest_stands_still(metric: Metric, digest: str) -> None:
    """Seals hold it: another one for the same rows, and every index would be said to be changed."""
    made = contents(rows(), metric=metric)
    assert (made.digest(), made.rows, made.documents) == (digest, COUNT, COUNT // 2)
    assert contents().digest() == "sha256:7a221d85a5e8ffbf2f042ba911378c7fe873c576e889c5661f77b5e61d4e60cf"


def test_how_the_rows_come_by_does_not_matter() -> None:
    table = rows()
    pieces = [table.slice(120, 80), table.slice(0, 120), table.slice(200), table.slice(0, 0)]
    in_chunks = pa.concat_tables([table.slice(7), table.slice(0, 7)])
    made = contents(*pieces)
    assert made.digest() == contents(in_chunks).digest() == contents(table).digest()
    assert made.ids == sorted(bytes.fromhex(each) for each in table.column("snippet_id").to_pylist())


@pytest.mark.parametrize("column", PAYLOAD)
def test_a_change_in_any_column_changes_the_digest(column: str) -> None:
    table = rows()
    old = table.column(column)[200].as_py()
    new = "f" * 32 if column == "snippet_id" else f"{old}x" if isinstance(old, str) else old + 1
    assert contents(with_value(table, column, 200, new)).digest() != contents(table).digest()


def test_a_change_in_a_vector_changes_the_digest() -> None:
    table = rows()
    vector = table.column("vector")[200].as_py()
    vector[1] += 1
    assert contents(with_value(table, "vector", 200, vector)).digest() != contents(table).digest()


def test_a_row_that_comes_twice_is_two_rows() -> None:
    table = rows()
    twice = contents(table, table.slice(3, 1))
    assert twice.rows == COUNT + 1
    assert twice.digest() != contents(table).digest()
    assert len(twice.ids) == COUNT + 1


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("snippet_id", "ab"),
        ("snippet_id", "é" * 16),
        ("snippet_id", "z" * 32),
        ("snippet_id", " " * 32),
        ("snippet_id", None),
        ("text", None),
        ("start", None),
        ("vector", [1.0, float("nan"), 0.0, 0.0]),
        ("vector", None),
    ],
)
def test_rows_that_no_build_has_are_refused(column: str, value: Any) -> None:
    with pytest.raises(BuildUnverified):
        contents(with_value(rows(), column, 17, value))
