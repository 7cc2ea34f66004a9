"""The indexes that a backend can make, their parameters, and the checks of shapes and searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

from ragfence.errors import ValidationError
from ragfence.indexes.backends.backend import Metric, Shape
from ragfence.indexes.embedders.embedder import find_undirected

MAX_DIMENSION = 65_536
MAX_K = 10_000
METRICS: tuple[Metric, ...] = get_args(Metric)


class Between(NamedTuple):
    """A range of whole numbers, both ends included."""

    low: int
    high: int


Kinds = Mapping[str, Mapping[str, Between]]
"""name of an index -> its parameters and their ranges"""


def check_shape(backend: str, kinds: Kinds, shape: Shape) -> None:
    if not 1 <= shape.dimension <= MAX_DIMENSION:
        raise ValidationError(f"the dimension of an index must be 1 to {MAX_DIMENSION:,}, not {shape.dimension}")
    if shape.metric not in METRICS:
        raise ValidationError(f"{shape.metric!r} is not a metric", hint=f"use one of: {', '.join(METRICS)}")
    known = kinds.get(shape.index)
    if known is None:
        raise ValidationError(f"{backend} has no index {shape.index!r}", hint=f"use one of: {', '.join(kinds)}")
    for name, value in shape.parameters.items():
        _check_parameter(f"{backend} {shape.index}", known, name, value)


def _check_parameter(where: str, known: Mapping[str, Between], name: str, value: Any) -> None:
    limits = known.get(name)
    if limits is None:
        takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        raise ValidationError(f"{where} has no parameter {name!r}", hint=takes)
    if isinstance(value, bool) or not isinstance(value, int) or not limits.low <= value <= limits.high:
        raise ValidationError(
            f"{where}: {name} must be a whole number of {limits.low} to {limits.high:,}, not {value!r}"
        )


def check_search(dimension: int, metric: Metric, vector: Any, k: int) -> None:
    """Refuses a query that cannot be searched: backends answer it with anything from a panic to a wrong result.

    Raises:
        ValidationError: The vector has another dimension or, for cosine, no direction; or k is out of range.
    """
    if vector.shape != (dimension,):
        raise ValidationError(
            f"the index has {dimension} dimensions, and the vector has the shape {vector.shape}",
            hint="search with the embedder the index was built with",
        )
    if not 1 <= k <= MAX_K:
        raise ValidationError(f"k must be 1 to {MAX_K:,}, not {k}")
    if metric == "cosine" and (wrong := find_undirected(vector[None])):
        raise ValidationError(
            f"the query was embedded as {wrong[1]}, which has no direction: by cosine, nothing is near to it",
            hint="search for another text, or build the index with the metric dot or l2",
        )


def select_schema(schema: Any, columns: Sequence[str] | None) -> Any:
    """Returns the schema of these columns of a row, or of all."""
    import pyarrow as pa

    wanted = schema.names if columns is None else columns
    unknown = set(wanted) - set(schema.names)
    if unknown:
        raise ValidationError(
            f"rows have no column {', '.join(sorted(unknown))}", hint=f"use {', '.join(schema.names)}"
        )
    return pa.schema([schema.field(name) for name in wanted])
