"""What a search costs in an exact and in an approximate index of the same rows: time and CPU per query, in turns.

`python -m tests.bench.indexes_search 100000 500000` prints a line for each number of rows. Vectors are generated:
clusters of fifty around points without order, 64 numbers each, of length 1.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from ragfence.indexes.backends.backend import Shape, row_schema
from ragfence.indexes.backends.lance import LanceBackend
from ragfence.indexes.verification import measured_recall

DIMENSION = 64
PORTION = 10_000
QUERIES = 20
ROUNDS = 5
K = 10


def measure(rows: int) -> dict[str, Any]:
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        backend = LanceBackend(folder)
        index, parameters = backend.approximate(rows, DIMENSION) or ("flat", {})
        shapes = {
            "rf-exact": Shape(DIMENSION, "cosine", "flat", {}),
            "rf-ann": Shape(DIMENSION, "cosine", index, parameters),
        }
        made: dict[str, float] = {}
        for physical, shape in shapes.items():
            began = time.process_time()
            backend.write(physical, shape, _tables(rows))
            backend.finish(physical, shape)
            made[physical] = time.process_time() - began
        queries = np.random.default_rng(2).standard_normal((QUERIES, DIMENSION)).astype(np.float32)
        cpu: dict[str, list[float]] = {physical: [] for physical in shapes}
        waited: dict[str, list[float]] = {physical: [] for physical in shapes}
        for number in range(ROUNDS + 1):
            for physical, taken in cpu.items():
                began, each = time.process_time(), []
                for query in queries:
                    asked = time.perf_counter()
                    backend.search(physical, query, K)
                    each.append(time.perf_counter() - asked)
                if number:  # the first round opens files
                    taken.append((time.process_time() - began) / QUERIES)
                    waited[physical] += each
        seen = measured_recall(backend, "rf-ann", "cosine", 128, rows)
        backend.close()
    exact, ann = (median(cpu[physical]) for physical in shapes)
    exact_p50, ann_p50 = (median(waited[physical]) for physical in shapes)
    return {
        "rows": rows,
        "index": index,
        "exact_ms": round(1000 * exact, 2),
        "ann_ms": round(1000 * ann, 2),
        "exact_p50_ms": round(1000 * exact_p50, 2),
        "ann_p50_ms": round(1000 * ann_p50, 2),
        "times": round(exact / ann, 1),
        "recall": seen["recall"],
        "index_cpu_s": round(made["rf-ann"] - made["rf-exact"], 1),
    }


def _tables(rows: int) -> Iterator[Any]:
    import numpy as np
    import pyarrow as pa

    schema, rng = row_schema(DIMENSION), np.random.default_rng(1)
    centres = rng.standard_normal((max(1, rows // 50), DIMENSION)).astype(np.float32)
    for start in range(0, rows, PORTION):
        count = min(PORTION, rows - start)
        vectors = centres[rng.integers(0, len(centres), count)]
        vectors = vectors + 0.7 * rng.standard_normal(vectors.shape).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        ids = pa.array([f"{start + at:032x}" for at in range(count)])
        text = pa.array(["about as long as a short sentence of a document"] * count)
        numbers = np.zeros(count, np.int64)
        by_name = {"snippet_id": ids, "text": text, "metadata": pa.array(["{}"] * count)}
        columns = [
            pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), DIMENSION)
            if field.name == "vector"
            else by_name.get(field.name, ids if pa.types.is_string(field.type) else pa.array(numbers)).cast(field.type)
            for field in schema
        ]
        yield pa.Table.from_arrays(columns, schema=schema)


if __name__ == "__main__":
    for given in sys.argv[1:] or ["100000"]:
        print(measure(int(given)), flush=True)
