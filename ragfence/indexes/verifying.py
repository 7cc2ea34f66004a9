"""What is read back out of a backend: is it what was to be built, and what is its digest?

content_digest: Merkle over the sorted (snippet_id, hash of the vector, hash of the payload), in 256 branches by the
first byte of the id. Vectors are hashed after canonicalisation: for "cosine" they are brought to length 1 and rounded,
since a backend may keep them that way (Qdrant does); else the bits of the floats count.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ragfence.core.hashing import digest
from ragfence.errors import BuildUnverified
from ragfence.indexes.backends.protocol import PAYLOAD, Backend, Shape
from ragfence.indexes.corpora import Snapshot

if TYPE_CHECKING:
    from ragfence.indexes.embedders.protocol import Vectors

HASH_BYTES = 16
SELF_RECALL_K = 10
NEAR = 1e-3
"""so far may the vector read back be from the one that was written, both brought to length 1"""
_STEPS = 1 << 14
"""of a coordinate of a vector of length 1, when it is rounded"""


class Contents:
    """The digest of rows that come by in tables, and what there is to count."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._leaves: list[bytes] = []
        self._documents: set[str] = set()
        self.rows = 0

    def add(self, table: Any) -> None:
        import numpy as np

        vectors = matrix(table, self._shape.dimension)
        if not np.isfinite(vectors).all():
            raise BuildUnverified("vectors with NaN or infinity were read back")
        ids = table.column("snippet_id").to_pylist()
        self._documents.update(table.column("doc_id").unique().to_pylist())
        self.rows += len(ids)
        canonical = _canonical(vectors, self._shape.metric)
        held, width = canonical.tobytes(), canonical.dtype.itemsize * canonical.shape[1]
        places = range(0, len(held), width) if width else ()
        self._leaves += [
            bytes.fromhex(each) + sha256(held[at : at + width]).digest()[:HASH_BYTES] + payload
            for each, at, payload in zip(ids, places, _payload_hashes(table), strict=True)
        ]

    @property
    def documents(self) -> int:
        return len(self._documents)

    @property
    def ids(self) -> list[bytes]:
        """In their order."""
        self._leaves.sort()
        return [leaf[: -2 * HASH_BYTES] for leaf in self._leaves]

    def digest(self) -> str:
        branches: list[list[bytes]] = [[] for _ in range(256)]
        self._leaves.sort()
        for leaf in self._leaves:
            branches[leaf[0]].append(leaf)
        made = [digest("ragfence/index-branch/1", *branch) for branch in branches]
        return f"sha256:{digest('ragfence/index-content/1', *made).hex()}"


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
    contents = Contents(shape)
    near = 0
    for table in backend.read(physical):
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
    recall = self_recall(backend, physical, sample.vectors)
    checks |= {"self_recall": round(recall, 4), "self_recall_of": len(sample.vectors)}
    if recall < min_recall:
        raise BuildUnverified(
            f"{physical} finds only {recall:.1%} of its own vectors; {min_recall:.1%} are wanted",
            hint="make the index more exact (its parameters), or lower min_self_recall in the policy",
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


def matrix(table: Any, dimension: int) -> Vectors:
    """The vectors of a table."""
    import numpy as np

    chunks = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table.column("vector").chunks]
    flat = np.concatenate(chunks) if chunks else np.zeros(0)
    if len(flat) != table.num_rows * dimension:
        raise BuildUnverified(f"vectors were read back that are not of {dimension} dimensions")
    return np.ascontiguousarray(flat, dtype=np.float32).reshape(-1, dimension)


def _canonical(vectors: Vectors, metric: str) -> Any:
    import numpy as np

    if metric != "cosine":
        return vectors
    length = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    length[length == 0] = 1
    return np.rint(vectors * (_STEPS / length).astype(np.float32)[:, None]).astype("<i2")


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


def _payload_hashes(table: Any) -> list[bytes]:
    """One for each row. A text is hashed with its length before it, so that no two payloads are alike as bytes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parts: list[Any] = []
    for name in PAYLOAD:
        column = table.column(name).combine_chunks()
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            parts += [pc.binary_length(column).cast(pa.string()), column.cast(pa.string())]
        else:
            parts.append(column.cast(pa.string()))
    joined = pc.binary_join_element_wise(*parts, ":")
    return [sha256(each).digest()[:HASH_BYTES] for each in joined.cast(pa.binary()).to_pylist()]
