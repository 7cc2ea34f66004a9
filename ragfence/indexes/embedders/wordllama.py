"""The default embedder: WordLlama's static vectors. Offline, 256 dimensions, thousands of texts per second on one core.

A vector is the mean of the vectors of its tokens. The weights and the tokeniser are read directly from the files of the
installed package: its own loader configures the root logger of the process, imports an HTTP client, and pads each batch
to its longest text, so that one long text makes 63 short ones expensive. The vectors are bit-identical.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ragfence.errors import Unsupported
from ragfence.indexes.embedders.packages import digest_files, find_folder, import_package

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Vectors

INSTALL = "ragfence[lance]"
MODEL = "l2_supercat"
DIMENSION = 256
RECIPE = "mean of all tokens; the unknown token for none/1"

TEXTS_AT_ONCE = 256
"""tokenised together"""
TOKENS_AT_ONCE = 8_192
"""added up together, which takes 8 MB however long a text is"""


class WordLlamaEmbedder:
    """`open_embedder("wordllama")`. The files are hashed at once, and loaded when the first text is embedded."""

    normalised = False
    batch = 1_024

    def __init__(self) -> None:
        folder = find_folder("wordllama", install=INSTALL)
        self._files = WordLlamaFiles(
            folder / "weights" / f"{MODEL}_{DIMENSION}.safetensors",
            folder / "tokenizers" / f"{MODEL}_tokenizer_config.json",
        )
        for file in self._files:
            if not file.is_file():
                raise Unsupported(f"wordllama has no file {file.name}", hint=f"pip install --upgrade '{INSTALL}'")
        self.name = "wordllama"
        self.revision = _revision(self._files)
        self.dimension = DIMENSION

    def embed(self, texts: Sequence[str]) -> Vectors:
        import numpy as np

        model = _load_once(self._files)
        vectors = np.empty((len(texts), DIMENSION), dtype=np.float32)
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            some = list(texts[start : start + TEXTS_AT_ONCE])
            for at, encoding in enumerate(model.tokenizer.encode_batch_fast(some, add_special_tokens=False), start):
                _mean(model.weights, encoding.ids, vectors[at])
        return vectors


class WordLlamaFiles(NamedTuple):
    weights: Path
    tokenizer: Path


class WordLlamaModel(NamedTuple):
    weights: Vectors
    tokenizer: Any


def _mean(weights: Vectors, tokens: list[int], out: Vectors) -> None:
    """Adds row by row in the order of the text, so that the bits depend only on the text."""
    # An empty text has no tokens. A zero vector has no direction, and its cosine is NaN; the model's own vector for
    # "unknown" (token 0) is finite, has a length, and is near to nothing in particular.
    tokens = tokens or [0]
    weights.take(tokens[:TOKENS_AT_ONCE], axis=0).sum(axis=0, out=out)
    for start in range(TOKENS_AT_ONCE, len(tokens), TOKENS_AT_ONCE):
        out += weights.take(tokens[start : start + TOKENS_AT_ONCE], axis=0).sum(axis=0)
    out /= len(tokens)


@cache
def _revision(files: WordLlamaFiles) -> str:
    # Without the version of the package: none of its code is used, and a release with the same weights makes the same
    # vectors. With the version, an upgrade would stop every search until everything is embedded and built again.
    return f"{MODEL}-{digest_files(RECIPE, (('weights', files.weights), ('tokenizer', files.tokenizer)))}"


_loading = threading.Lock()


def _load_once(files: WordLlamaFiles) -> WordLlamaModel:
    with _loading:  # two threads must not load the model twice
        return _load(files)


@cache
def _load(files: WordLlamaFiles) -> WordLlamaModel:
    import numpy as np

    safetensors = import_package("safetensors", install=INSTALL)
    tokenizers = import_package("tokenizers", install=INSTALL)
    with safetensors.safe_open(files.weights, framework="np") as tensors:
        weights: Vectors = np.ascontiguousarray(tensors.get_tensor("embedding.weight"), dtype=np.float32)
    tokenizer = tokenizers.Tokenizer.from_file(str(files.tokenizer))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return WordLlamaModel(weights, tokenizer)
