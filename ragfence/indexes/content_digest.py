"""The content_digest of a physical index: a digest of its rows as they are read.

It is a Merkle tree over the sorted (snippet_id, hash of the vector, hash of the payload), with 256 branches by the
first byte of the id. Vectors are hashed after canonicalisation: for "cosine" they are scaled to length 1 and rounded,
because a backend may store them scaled (Qdrant does); otherwise the bits of the floats are hashed.

Every build reads and hashes all its rows, and a build that starts from another one hashes those, too. So a row costs
two calls of sha256, and everything else is done for a whole table at once.
"""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Iterable
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ragfence.core.hashing import digest
from ragfence.documents.identity import SNIPPET_BYTES
from ragfence.errors import BuildUnverified
from ragfence.indexes.backends.backend import PAYLOAD, Shape

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Vectors

HASH_BYTES = 16
_STEPS = 1 << 14
"""steps to which a coordinate of a vector of length 1 is rounded"""


class ContentDigest:
    """Computes the digest of rows from their tables, and counts rows and documents."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._leaves: list[bytes] = []
        self._documents: set[str] = set()
        self.rows = 0

    def add(self, table: Any) -> None:
        import numpy as np

        if not table.num_rows:
            return
        vectors = matrix(table, self._shape.dimension)
        if not np.isfinite(vectors).all():
            raise BuildUnverified("vectors with NaN or infinity were read back")
        ids = id_bytes(table)
        canonical = _canonical(vectors, self._shape.metric)
        width = canonical.dtype.itemsize * canonical.shape[1]
        of_vectors = _hashes(memoryview(canonical).cast("B"), range(0, canonical.nbytes + 1, width))
        self._leaves += _rows_of(ids, of_vectors, _payload_hashes(table))
        self._documents.update(table.column("doc_id").unique().to_pylist())
        self.rows += table.num_rows

    @property
    def documents(self) -> int:
        return len(self._documents)

    @property
    def ids(self) -> list[bytes]:
        """The snippet_ids, sorted."""
        self._leaves.sort()
        return [leaf[:SNIPPET_BYTES] for leaf in self._leaves]

    def digest(self) -> str:
        branches: list[list[bytes]] = [[] for _ in range(256)]
        self._leaves.sort()
        for leaf in self._leaves:
            branches[leaf[0]].append(leaf)
        made = [digest("ragfence/index-branch/1", *branch) for branch in branches]
        return f"sha256:{digest('ragfence/index-content/1', *made).hex()}"


def matrix(table: Any, dimension: int) -> Vectors:
    """Returns the vectors of a table as an array."""
    import numpy as np

    chunks = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table.column("vector").chunks]
    flat = chunks[0] if len(chunks) == 1 else np.concatenate(chunks) if chunks else np.zeros(0)
    if len(flat) != table.num_rows * dimension:
        raise BuildUnverified(f"vectors that do not have {dimension} dimensions were read back")
    return np.ascontiguousarray(flat, dtype=np.float32).reshape(-1, dimension)


def _canonical(vectors: Vectors, metric: str) -> Any:
    import numpy as np

    if metric != "cosine":
        return vectors
    length = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    length[length == 0] = 1
    scaled = vectors * (_STEPS / length).astype(np.float32)[:, None]
    return np.rint(scaled, out=scaled).astype("<i2")


def id_bytes(table: Any) -> bytes:
    """Returns the snippet_ids of a table, concatenated."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = _one_array(table, "snippet_id").cast(pa.binary())
    lengths = pc.min_max(pc.binary_length(column)).as_py()
    if column.null_count or lengths != {"min": 2 * SNIPPET_BYTES, "max": 2 * SNIPPET_BYTES}:
        raise BuildUnverified("rows without a valid snippet_id were read back")
    digits = column.buffers()[2].slice(_offsets(column)[0], len(column) * 2 * SNIPPET_BYTES).to_pybytes()
    try:
        return unhexlify(digits)
    except ValueError as broken:
        raise BuildUnverified("rows without a valid snippet_id were read back") from broken


def _payload_hashes(table: Any) -> bytes:
    """The hashes, concatenated. A text is hashed after its length, so different payloads are different as bytes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parts: list[Any] = []
    for name in PAYLOAD:
        column = _one_array(table, name)
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            parts += [pc.binary_length(column).cast(pa.string()), column.cast(pa.string())]
        else:
            parts.append(column.cast(pa.string()))
    joined = pc.binary_join_element_wise(*parts, ":")
    if joined.null_count:
        raise BuildUnverified("rows with missing values were read back")
    return _hashes(memoryview(joined.buffers()[2]), _offsets(joined))


def _one_array(table: Any, name: str) -> Any:
    return table.column(name).combine_chunks()


def _offsets(texts: Any) -> list[int]:
    """The start of each text in its buffer, and the end of the last one."""
    return memoryview(texts.buffers()[1]).cast("i")[texts.offset : texts.offset + len(texts) + 1].tolist()


def _hashes(buffer: memoryview, offsets: Iterable[int]) -> bytes:
    """The truncated hashes of the bytes between each two offsets, concatenated."""
    import numpy as np

    hashes = b"".join([sha256(buffer[start:end]).digest() for start, end in pairwise(offsets)])
    return np.frombuffer(hashes, np.uint8).reshape(-1, sha256().digest_size)[:, :HASH_BYTES].tobytes()


def _rows_of(*columns: bytes) -> list[bytes]:
    """Joins columns of `HASH_BYTES` each, row by row."""
    import numpy as np

    rows = np.hstack([np.frombuffer(column, np.uint8).reshape(-1, HASH_BYTES) for column in columns])
    data, width = rows.tobytes(), rows.shape[1]
    return [data[at : at + width] for at in range(0, len(data), width)]
