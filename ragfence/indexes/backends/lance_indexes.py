"""The indexes that LanceDB can make, and how each one is searched.

With too few rows to train (ivf_pq needs 256), LanceDB makes an empty index and compares with every row instead, which
is exact. So no index is refused for being small.
"""

from __future__ import annotations

from typing import Any

from ragfence.errors import ValidationError
from ragfence.indexes.backends.backend import Shape
from ragfence.indexes.backends.shapes import Between, Kinds, check_shape

_TRAINING = {
    "num_partitions": Between(1, 100_000),
    "max_iterations": Between(1, 1_000),
    "sample_rate": Between(2, 65_536),
}
_PROBING = {"nprobes": Between(1, 100_000)}
_REFINING = {"refine_factor": Between(1, 1_000)}

KINDS: Kinds = {
    "flat": {},
    "ivf_flat": {**_TRAINING, **_PROBING},
    "ivf_pq": {
        **_TRAINING,
        **_PROBING,
        **_REFINING,
        "num_sub_vectors": Between(1, 65_536),
        "num_bits": Between(4, 8),
    },
    "ivf_hnsw_sq": {
        **_TRAINING,
        **_PROBING,
        **_REFINING,
        "m": Between(2, 2_048),
        "ef_construction": Between(2, 100_000),
        "ef": Between(1, 100_000),
    },
}
_FOR_SEARCH = frozenset({"nprobes", "refine_factor", "ef"})


def check(shape: Shape) -> None:
    check_shape("lance", KINDS, shape)
    parts = shape.parameters.get("num_sub_vectors", 1)
    if shape.dimension % parts:
        raise ValidationError(f"num_sub_vectors must divide the dimension {shape.dimension}, which {parts} does not")
    if shape.parameters.get("num_bits", 8) not in (4, 8):
        raise ValidationError("lance ivf_pq: num_bits is 4 or 8")


def approximate(rows: int, dimension: int) -> tuple[str, dict[str, int]]:
    """About as many partitions as the square root of the rows, a twelfth of which is searched. 8 numbers are stored in
    a byte, and ten times k rows are compared by their full vectors. Training, most of the cost, uses a sample.
    """
    partitions = max(1, round(rows**0.5))
    sub_vectors = next(each for each in range(max(1, dimension // 8), 0, -1) if dimension % each == 0)
    return "ivf_pq", {
        "num_partitions": partitions,
        "sample_rate": 64,
        "max_iterations": 16,
        "num_sub_vectors": sub_vectors,
        "nprobes": min(partitions, max(20, partitions // 12)),
        "refine_factor": 10,
    }


def config(shape: Shape) -> Any:
    """The argument of `create_index`."""
    from lancedb.index import HnswSq, IvfFlat, IvfPq

    made = {"ivf_flat": IvfFlat, "ivf_pq": IvfPq, "ivf_hnsw_sq": HnswSq}[shape.index]
    given = {name: value for name, value in shape.parameters.items() if name not in _FOR_SEARCH}
    return made(distance_type=shape.metric, **given)


def tune(query: Any, shape: Shape) -> Any:
    """Sets the metric of a vector query, and the parameters with which its index is searched."""
    query = query.distance_type(shape.metric)
    if "nprobes" in shape.parameters:
        query = query.nprobes(shape.parameters["nprobes"])
    if "ef" in shape.parameters:
        query = query.ef(shape.parameters["ef"])
    if "refine_factor" in KINDS[shape.index]:
        # A compressed index returns estimated distances: refined, the scores are those of the full vectors.
        query = query.refine_factor(shape.parameters.get("refine_factor", 1))
    return query


def score(metric: str, distance: float) -> float:
    """Converts LanceDB's distance (1 - cosine, 1 - dot, or the squared distance) to a score."""
    if distance != distance:  # NaN: a vector of length 0 has no direction
        return 0.0
    return -distance if metric == "l2" else 1.0 - distance
