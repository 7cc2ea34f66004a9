"""The nearest rows of a build, in the same order for every k: by score, then section_id, then snippet_id.

Many documents may have the same text, and so the same score. Which of them a backend returns among the k nearest is
arbitrary, so more rows are requested; if even the last of these is as near as the k-th, more again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragfence.indexes.backends.backend import Backend, FoundRow
from ragfence.indexes.backends.shapes import MAX_K
from ragfence.indexes.build_log import BuildSeal
from ragfence.indexes.spec import EXACT

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Vectors

MORE = (4, 64, 1_000)
"""rows requested beyond k; after the last step the backend decides, because a text that occurs everywhere must not cost
a read of all rows"""


def find_nearest(backend: Backend, seal: BuildSeal, vector: Vectors, k: int) -> list[FoundRow]:
    # An approximate index does not find all rows that are as near, and LanceDB's HNSW refuses more rows than its `ef`.
    exact = seal.inputs.get("index") == EXACT
    found: list[FoundRow] = []
    for asked in dict.fromkeys(min(k + more, MAX_K) for more in MORE) if exact else (k,):
        found = sorted(backend.search(seal.physical, vector, asked), key=_order)
        if len(found) < asked or found[-1].score < found[k - 1].score:
            break
    return found[:k]


def _order(found: FoundRow) -> tuple[float, str, str]:
    return -found.score, found.section_id, found.snippet_id
