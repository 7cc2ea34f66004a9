"""What is read back out of a backend: is it what was to be built?

Every row is read and hashed. Meanwhile the next rows are on their way, and the sample is searched for: reading and
searching are the backend's work, hashing is ours.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ragfence.errors import BuildUnverified
from ragfence.indexes.ahead import Ahead
from ragfence.indexes.backends.protocol import Backend, Shape
from ragfence.indexes.contents import Contents, matrix
from ragfence.indexes.corpora import Snapshot

if TYPE_CHECKING:
    from ragfence.indexes.embedders.protocol import Vectors

SELF_RECALL_K = 10
NEAR = 1e-3
"""so far may the vector read back be from the one that was written, both brought to length 1"""


@dataclass(slots=True)
class Sample:
    """Some of the vectors that were written, evenly spread, to be looked for."""

    size: int
    total: int
    vectors: dict[str, Vectors] = field(default_factory=dict)

    def watch(self, tables: Iterator[Any], dimension: int) -> Generator[Any, None, None]:
        """The tables as they are."""
        step, seen = max(1, -(-self.total // self.size)) if self.size else 0, 0
        for table in tables:
            rows = table.num_rows
            if step and (picked := list(range(-seen % step, rows, step))):
                some = table.take(picked)
                self.vectors |= zip(some.column("snippet_id").to_pylist(), matrix(some, dimension), strict=True)
            seen += rows
            yield table


@dataclass(frozen=True, slots=True)
class Verified:
    content_digest: str
    rows: int
    documents: int
    checks: dict[str, Any]


def verified(
    backend: Backend, physical: str, shape: Shape, snapshot: Snapshot, sample: Sample, min_recall: float
) -> Verified:
    """Reads everything back. Raises `BuildUnverified`, with what was seen, unless it is the snapshot."""
    with ThreadPoolExecutor(1, thread_name_prefix="ragfence-recall") as pool:
        searched = pool.submit(self_recall, backend, physical, sample.vectors)
        checked = _read_back(backend, physical, shape, snapshot, sample)
        # Only now: of an index that lacks rows it is said that it does, not that they are not found.
        recall = searched.result()
    checks = checked.checks | {"self_recall": round(recall, 4), "self_recall_of": len(sample.vectors)}
    if recall < min_recall:
        raise BuildUnverified(
            f"{physical} finds only {recall:.1%} of its own vectors; {min_recall:.1%} are wanted",
            hint="make the index more exact (its parameters), or lower min_self_recall in the policy",
            checks=checks,
        )
    return replace(checked, checks=checks)


def _read_back(backend: Backend, physical: str, shape: Shape, snapshot: Snapshot, sample: Sample) -> Verified:
    contents = Contents(shape)
    near = 0
    with Ahead(backend.read(physical)) as tables:
        for table in tables:
            contents.add(table)
            near += _near(table, sample.vectors, shape.dimension)
    wanted = sorted(snapshot.ids())
    found = contents.ids
    checks: dict[str, Any] = {
        "rows": contents.rows,
        "rows_wanted": len(wanted),
        "documents": contents.documents,
        "dimension": shape.dimension,
        "vectors_compared": len(sample.vectors),
        "vectors_equal": near,
    }
    if found != wanted:
        checks |= {"missing": len(set(wanted) - set(found)), "foreign": len(set(found) - set(wanted))}
        raise BuildUnverified(
            f"{physical} has {contents.rows:,} rows; {checks['missing']:,} of {len(wanted):,} snippets are missing, "
            f"{checks['foreign']:,} are not of this corpus",
            checks=checks,
        )
    if near < len(sample.vectors):
        raise BuildUnverified(
            f"{physical}: of {len(sample.vectors)} vectors that were compared, {near} came back as they were written",
            checks=checks,
        )
    return Verified(contents.digest(), contents.rows, contents.documents, checks)


def self_recall(backend: Backend, physical: str, vectors: dict[str, Vectors]) -> float:
    """How often a row is found by its own vector; a row that is as near counts too, since texts may be equal."""
    if not vectors:
        return 1.0
    hits = 0
    for snippet_id, vector in vectors.items():
        found = backend.search(physical, vector, SELF_RECALL_K)
        own = [each.score for each in found if each.snippet_id == snippet_id]
        # So many rows may have the same text that this one is not among the nearest: then those are as near as can be.
        crowded = len(found) == SELF_RECALL_K and len({round(each.score, 5) for each in found}) == 1
        hits += bool(own) or crowded
    return hits / len(vectors)


def _unit(vectors: Vectors) -> Any:
    import numpy as np

    length = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    return vectors / np.where(length == 0, 1, length)


def _near(table: Any, written: dict[str, Vectors], dimension: int) -> int:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if not written:
        return 0
    picked = table.filter(pc.is_in(table.column("snippet_id"), value_set=pa.array(list(written), pa.string())))
    if not picked.num_rows:
        return 0
    there = np.stack([written[each] for each in picked.column("snippet_id").to_pylist()])
    apart = np.abs(_unit(matrix(picked, dimension)) - _unit(there)).max(axis=1)
    return int((apart < NEAR).sum())
