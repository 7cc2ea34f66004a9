"""Verifies a build: reads its rows back from the backend and compares them with what was to be built.

Every row is read and hashed, and every vector is compared with the one that was written, by a few sums of it, because a
copy of all vectors would not fit into memory. Meanwhile the next rows are read and a sample of the rows is searched
for: the backend reads and searches while we hash.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from ragfence.core.policy import IndexRules
from ragfence.documents.identity import SNIPPET_BYTES
from ragfence.errors import BuildUnverified
from ragfence.indexes.backends.backend import Backend, BatchSearch, NearRow, Shape
from ragfence.indexes.content_digest import ContentDigest, id_bytes, matrix
from ragfence.indexes.prefetch import Prefetch
from ragfence.indexes.snapshots import Snapshot
from ragfence.indexes.spec import EXACT

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Vectors

SELF_RECALL_K = 10
RECALL_K = 10
NEIGHBOURS = 2 * RECALL_K
"""nearest rows that are remembered for each search"""
NEAR = 1e-4
"""tolerance for a sum of a vector that was read back, scaled to length 1"""
LEAST_SAMPLE = 4
COMPARED_ROWS = 2_000_000
"""comparisons in all searches of the sample together, if each search compares with every row"""
SEARCHES = 64
"""in one call, if the backend can answer many at once"""


def sample_size(rows: int, most: int, *, exact: bool) -> int:
    """How many rows are searched for. If a search compares with every row, the number falls with the size of the index:
    such a search finds what is there, and reading the rows proves that all vectors are there."""
    if exact and rows:
        most = min(most, max(LEAST_SAMPLE, COMPARED_ROWS // rows))
    return min(most, rows)


class VectorSums:
    """Two sums of every vector along fixed directions, and its length if the metric depends on lengths.

    A different vector has the same sums about once in ten million cases. A backend that stores what it was given, or
    normalises it for cosine, changes them by less than `NEAR`.
    """

    def __init__(self, dimension: int, metric: str) -> None:
        import numpy as np

        self._lengths_count = metric != "cosine"
        self._directions = np.random.default_rng(0).standard_normal((dimension, 2)).astype(np.float32)
        self._ids: list[bytes] = []
        self._sums: list[Any] = []

    def add(self, table: Any) -> None:
        import numpy as np

        if not table.num_rows:
            return
        vectors = matrix(table, len(self._directions))
        lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
        sums = (vectors @ self._directions) / np.where(lengths == 0, 1, lengths)[:, None]
        self._ids.append(id_bytes(table))
        self._sums.append(np.column_stack([sums, lengths if self._lengths_count else np.ones_like(lengths)]))

    def equal(self, read_back: VectorSums) -> int:
        """How many of these vectors are equal in the other sums; 0 if the ids differ."""
        import numpy as np

        ids, sums = self._ordered()
        other_ids, others = read_back._ordered()
        if not np.array_equal(ids, other_ids):
            return 0
        apart = np.abs(sums - others)
        apart[:, -1] /= np.maximum(sums[:, -1], 1e-30)
        return int((apart < NEAR).all(axis=1).sum())

    def _ordered(self) -> tuple[Any, Any]:
        import numpy as np

        ids = np.frombuffer(b"".join(self._ids), f"S{SNIPPET_BYTES}")
        order = np.argsort(ids, kind="stable")
        return ids[order], (np.concatenate(self._sums) if self._sums else np.zeros((0, 3)))[order]


@dataclass(slots=True)
class Sample:
    """An evenly spread sample of the written vectors, to be searched for, and the sums of all of them."""

    size: int
    total: int
    sums: VectorSums | None
    vectors: dict[str, Vectors] = field(default_factory=dict)

    def watch(self, tables: Iterator[Any]) -> Generator[Any, None, None]:
        """Passes the tables on unchanged, and takes the sample and the sums from them."""
        step, seen = max(1, -(-self.total // self.size)) if self.size else 0, 0
        for table in tables:
            rows = table.num_rows
            if step and (picked := list(range(-seen % step, rows, step))):
                some = table.take(picked)
                width = some.schema.field("vector").type.list_size
                self.vectors |= zip(some.column("snippet_id").to_pylist(), matrix(some, width), strict=True)
            if self.sums is not None:
                self.sums.add(table)
            seen += rows
            yield table


@dataclass(frozen=True, slots=True)
class VerifiedBuild:
    content_digest: str
    rows: int
    documents: int
    checks: dict[str, Any]


def verify_build(
    backend: Backend, physical: str, shape: Shape, snapshot: Snapshot, sample: Sample, rules: IndexRules
) -> VerifiedBuild:
    """Reads everything back and compares it with the snapshot. Of an approximate index, also measures the recall,
    which the gate of a swap judges.

    Raises:
        BuildUnverified: The rows are not those of the snapshot; the error has the numbers.
    """
    own = dict(islice(sample.vectors.items(), rules.max_self_recall_sample))
    neighbours = ExactNeighbours(shape.metric, sample.vectors) if shape.index != EXACT else None
    with ThreadPoolExecutor(1, thread_name_prefix="ragfence-recall") as pool:
        searched = pool.submit(self_recall, backend, physical, shape.metric, own)
        checked = _read_back(backend, physical, shape, snapshot, sample, neighbours)
        # Only now: if the index lacks rows, the error must say so, and not that they were not found.
        recall = searched.result()
    checks = checked.checks | {"self_recall": round(recall, 4), "self_recall_of": len(own)}
    if neighbours is not None:
        checks |= neighbours.measure(backend, physical)
    if recall < rules.min_self_recall:
        raise BuildUnverified(
            f"{physical} finds only {recall:.1%} of its own vectors; {rules.min_self_recall:.1%} are required",
            hint="make the index more exact (its parameters), or lower min_self_recall in the policy",
            checks=checks,
        )
    return replace(checked, checks=checks)


def _read_back(
    backend: Backend,
    physical: str,
    shape: Shape,
    snapshot: Snapshot,
    sample: Sample,
    neighbours: ExactNeighbours | None,
) -> VerifiedBuild:
    contents = ContentDigest(shape)
    sums = VectorSums(shape.dimension, shape.metric)
    with Prefetch(backend.read(physical)) as tables:
        for table in tables:
            contents.add(table)
            sums.add(table)
            if neighbours is not None:
                neighbours.add(table)
    wanted = sorted(snapshot.ids())
    found = contents.ids
    checks: dict[str, Any] = {
        "rows": contents.rows,
        "rows_wanted": len(wanted),
        "documents": contents.documents,
        "dimension": shape.dimension,
        "vectors_compared": contents.rows,
    }
    if found != wanted:
        checks |= {"missing": len(set(wanted) - set(found)), "foreign": len(set(found) - set(wanted))}
        raise BuildUnverified(
            f"{physical} has {contents.rows:,} rows; {checks['missing']:,} of {len(wanted):,} snippets are missing, "
            f"{checks['foreign']:,} do not belong to this corpus",
            checks=checks,
        )
    assert sample.sums is not None
    checks["vectors_equal"] = equal = sample.sums.equal(sums)
    if equal < contents.rows:
        raise BuildUnverified(
            f"{physical}: only {equal:,} of {contents.rows:,} vectors are as they were written",
            checks=checks,
        )
    return VerifiedBuild(contents.digest(), contents.rows, contents.documents, checks)


class ExactNeighbours:
    """Finds what an exact search would return for the vectors of some rows, while all rows are read.

    A row does not count for its own vector, because any index finds it. Rows that are as near as the last one that
    counts are as good, because texts may be equal.
    """

    def __init__(self, metric: str, vectors: dict[str, Vectors]) -> None:
        import numpy as np

        self._metric = metric
        self._vectors = vectors
        self._queries = self._scaled(np.stack(list(vectors.values()))) if vectors else None
        self._ids = np.zeros((0, len(vectors)), f"S{2 * SNIPPET_BYTES}")
        self._scores = np.zeros((0, len(vectors)), np.float32)

    def add(self, table: Any) -> None:
        import numpy as np

        if self._queries is None or not table.num_rows:
            return
        rows = self._scaled(matrix(table, self._queries.shape[1]))
        scores = rows @ self._queries.T
        if self._metric == "l2":
            scores = 2 * scores - (rows * rows).sum(axis=1)[:, None] - (self._queries * self._queries).sum(axis=1)
        ids = np.array(table.column("snippet_id").to_pylist(), self._ids.dtype)
        scores = np.concatenate([self._scores, scores])
        ids = np.concatenate([self._ids, np.broadcast_to(ids[:, None], (len(ids), scores.shape[1]))])
        if len(scores) > NEIGHBOURS:
            best = np.argpartition(-scores, NEIGHBOURS, axis=0)[:NEIGHBOURS]
            scores, ids = np.take_along_axis(scores, best, axis=0), np.take_along_axis(ids, best, axis=0)
        self._scores, self._ids = scores, ids

    def measure(self, backend: Backend, physical: str) -> dict[str, Any]:
        """The share of the exact results that the index finds, as stored in the checks of a seal."""
        found = wanted = 0
        for at, (own, nearest) in enumerate(_search_all(backend, physical, self._vectors, RECALL_K)):
            others = self._ids[:, at] != own.encode()
            scores, ids = self._scores[others, at], self._ids[others, at]
            count = min(RECALL_K - 1, len(scores))
            if not count:
                continue
            least = float(-sorted(-scores)[count - 1])
            least -= 1e-5 * max(1.0, abs(least))
            near = {each.decode() for each in ids[scores >= least]}
            seen = [each for each in nearest if each.snippet_id != own]
            # There may be more rows that are as near than are remembered here.
            found += sum(each.snippet_id in near or each.score >= least for each in seen[:count])
            wanted += count
        recall = round(found / wanted, 4) if wanted else 1.0
        return {"recall": recall, "recall_of": len(self._vectors), "recall_k": RECALL_K}

    def _scaled(self, vectors: Vectors) -> Any:
        import numpy as np

        if self._metric != "cosine":
            return vectors
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.where(lengths == 0, 1, lengths)


def measured_recall(backend: Backend, physical: str, metric: str, size: int, rows: int) -> dict[str, Any]:
    """Measures the recall of an index that was sealed by a version that did not. Reads all vectors twice."""
    sample = Sample(min(size, rows), rows, None)
    for _ in sample.watch(backend.read(physical, ["snippet_id", "vector"])):
        pass
    neighbours = ExactNeighbours(metric, sample.vectors)
    for table in backend.read(physical, ["snippet_id", "vector"]):
        neighbours.add(table)
    return neighbours.measure(backend, physical)


def self_recall(backend: Backend, physical: str, metric: str, vectors: dict[str, Vectors]) -> float:
    """The share of rows that are found by their own vector. Finding only rows that are as near counts, too: texts may
    be equal, and by dot product longer vectors are nearer than the row itself."""
    if not vectors:
        return 1.0
    hits = 0
    for snippet_id, found in _search_all(backend, physical, vectors, SELF_RECALL_K):
        own = _own_score(metric, vectors[snippet_id])
        least = own - NEAR * max(1.0, abs(own))
        crowded = len(found) == SELF_RECALL_K and all(each.score >= least for each in found)
        hits += crowded or any(each.snippet_id == snippet_id for each in found)
    return hits / len(vectors)


def _search_all(
    backend: Backend, physical: str, vectors: dict[str, Vectors], k: int
) -> Iterator[tuple[str, list[NearRow]]]:
    """Yields the id of each vector, and what is found for it."""
    if not isinstance(backend, BatchSearch):
        for own, vector in vectors.items():
            yield own, [NearRow(each.snippet_id, each.score) for each in backend.search(physical, vector, k)]
        return
    import numpy as np

    listed = iter(vectors.items())
    while some := dict(islice(listed, SEARCHES)):
        yield from zip(some, backend.search_many(physical, np.stack(list(some.values())), k), strict=True)


def _own_score(metric: str, vector: Vectors) -> float:
    """The score of a row for its own vector."""
    if metric == "dot":
        return float(vector.astype("f8") @ vector.astype("f8"))
    return 1.0 if metric == "cosine" else 0.0
