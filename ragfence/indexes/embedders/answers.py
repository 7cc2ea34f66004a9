"""What an OpenAI-compatible endpoint answered: its vectors, in the order of the texts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ragfence.errors import EmbedderInvalid

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Vectors


def vectors_in(body: bytes, count: int, name: str) -> tuple[Vectors, str]:
    """As many vectors as texts, and the model that the answer names ("" where it names none)."""
    import numpy as np

    try:
        answer = json.loads(body)
        items = answer["data"]
        placed = {item.get("index", at): item["embedding"] for at, item in enumerate(items)}
        model = answer.get("model") or ""
    except (ValueError, KeyError, TypeError, AttributeError) as broken:
        raise EmbedderInvalid(
            f"{name} did not answer with embeddings: {type(broken).__name__}: {broken}",
            hint="is this the URL of an OpenAI-compatible endpoint?",
        ) from broken
    if len(items) != count:
        raise EmbedderInvalid(f"{name} returned {len(items)} vectors for {count} texts")
    if placed.keys() != set(range(count)):
        raise EmbedderInvalid(f"{name} numbered its vectors {sorted(map(str, placed))[:5]}, not 0 to {count - 1}")
    try:
        vectors: Vectors = np.array([placed[at] for at in range(count)], dtype=np.float32)
    except (TypeError, ValueError) as ragged:
        raise EmbedderInvalid(f"{name} did not return vectors of equal length: {ragged}") from ragged
    if vectors.ndim != 2 or not vectors.shape[1]:
        raise EmbedderInvalid(f"{name} returned no vectors: an array {vectors.shape}", hint="does it know floats?")
    return vectors, str(model)
