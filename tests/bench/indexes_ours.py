"""ragfence's indexes as the benchmark uses them: embedders that count, and builds whose time is told in its parts."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from hashlib import shake_256
from typing import Any, NamedTuple

import numpy as np

import ragfence
from ragfence.indexes.build import Build
from ragfence.indexes.embedders.embedder import Embedder
from ragfence.indexes.spec import IndexSpec


class Drawn:
    """Vectors drawn by a digest of the text: they cost next to nothing, and no two texts have the same."""

    name, revision = "bench-drawn", "1"

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension

    def embed(self, texts: Sequence[str]) -> Any:
        drawn = b"".join(shake_256(text.encode()).digest(2 * self.dimension) for text in texts)
        return np.frombuffer(drawn, dtype="<i2").reshape(-1, self.dimension).astype(np.float32)


class Counted:
    """An embedder as it is. Counts, outside ragfence, the texts that it was given."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.name, self.revision, self.dimension = embedder.name, embedder.revision, embedder.dimension
        self.normalised = bool(getattr(embedder, "normalised", False))
        self.batch = getattr(embedder, "batch", 256)
        self.texts = 0

    def embed(self, texts: Sequence[str]) -> Any:
        self.texts += len(texts)
        return self._embedder.embed(texts)


class Timed(NamedTuple):
    """A build, and what its call took. The parts are those that the build notes of itself, without the claim, the
    snapshot and the seal."""

    build: Build
    seconds: float

    @property
    def writing(self) -> float:
        return float(self.build.seal.made["write_ms"]) / 1_000

    @property
    def verifying(self) -> float:
        return float(self.build.seal.made["verify_ms"]) / 1_000


def built(fence: ragfence.Fence, spec: IndexSpec) -> Timed:
    """A build that nobody made before."""
    gc.collect()  # as in `rounds.clocked`
    started = time.perf_counter()
    build = fence.indexes.build(spec)
    taken = time.perf_counter() - started
    if build.decision is not ragfence.Decision.NEW:
        raise RuntimeError(f"the build was not new: {build.decision}")
    return Timed(build, taken)
