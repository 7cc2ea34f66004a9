"""The nearest rows of a build, in one order however many are asked for: by score, then section_id, then snippet_id.

Many documents may have the same text, and so the same score. Which of them are among the k nearest a backend decides as
it likes, so it is asked for some more; only if even the last of those is as near as the k-th, for more still.
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
"""rows beyond k. Beyond the last the backend decides: a text that is everywhere must not cost a read of everything"""


def nearest(backend: Backend, seal: BuildSeal, vector: Vectors, k: int) -> list[FoundRow]:
    # What is approximate does not know all rows that are as near, and LanceDB's HNSW refuses more rows than its `ef`.
    exact = seal.inputs.get("index") == EXACT
    found: list[FoundRow] = []
    for asked in dict.fromkeys(min(k + more, MAX_K) for more in MORE) if exact else (k,):
        found = sorted(backend.search(seal.physical, vector, asked), key=_order)
        if len(found) < asked or found[-1].score < found[k - 1].score:
            break
    return found[:k]


def _order(found: FoundRow) -> tuple[float, str, str]:
    return -found.score, found.section_id, found.snippet_id
