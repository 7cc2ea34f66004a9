"""Models of sentence-transformers, from a folder or from the local cache. Nothing is downloaded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragfence.errors import EmbedderInvalid
from ragfence.indexes.embedders.packages import digest_files, import_package

PREFIX = "sentence-transformers:"
INSTALL = "sentence-transformers"
"""not an extra of ragfence: it depends on PyTorch, whose build the user has to choose"""

WEIGHTY = (".safetensors", ".bin", ".onnx", ".json", ".txt", ".model")
"""files of a model's folder that determine its vectors; not its README or files of a git checkout"""


class SentenceTransformersEmbedder:
    """`open_embedder("sentence-transformers:./models/e5-small")`.

    If `revision` is not given, it is a digest of the files of a folder, or the commit of a model of the hub in the
    local cache. `model` is a model that is already loaded, for instance on another device.
    """

    normalised = True
    batch = 256

    def __init__(self, model_or_path: str, *, revision: str | None = None, model: Any = None) -> None:
        self.name = f"{PREFIX}{model_or_path}"
        folder = Path(model_or_path)
        self._model = model if model is not None else _load_model(model_or_path, None if folder.is_dir() else revision)
        if revision is None and model is None and folder.is_dir():
            revision = f"files-{digest_files('encode, length 1/1', _weighty_files(folder))}"
        self.revision = revision or _commit(self._model) or _unknown_revision(self.name)
        self.dimension = int(self._model.get_sentence_embedding_dimension() or 0)
        # The tokeniser changes its own padding while it works, and fails with "Already borrowed" in a second thread.
        self._one_at_a_time = threading.Lock()

    def embed(self, texts: Sequence[str]) -> Any:
        with self._one_at_a_time:
            return self._model.encode(
                list(texts), normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
            )


def _load_model(model_or_path: str, revision: str | None) -> Any:
    library = import_package("sentence_transformers", install=INSTALL)
    try:
        return library.SentenceTransformer(model_or_path, revision=revision, local_files_only=True)
    except OSError as absent:
        raise EmbedderInvalid(
            f"sentence-transformers cannot load {model_or_path!r} from this machine: {absent}",
            hint="ragfence downloads nothing: fetch the model first, or give the path of its folder",
        ) from absent


def _weighty_files(folder: Path) -> list[tuple[str, Path]]:
    files = (path for path in folder.rglob("*") if path.suffix in WEIGHTY and path.is_file())
    return sorted((path.relative_to(folder).as_posix(), path) for path in files)


def _commit(model: Any) -> str | None:
    """The commit of the hub, which transformers stores in the configuration of a loaded model."""
    try:
        commit = model[0].auto_model.config._commit_hash
    except (AttributeError, IndexError, KeyError, TypeError):
        return None
    return commit if isinstance(commit, str) and commit else None


def _unknown_revision(name: str) -> str:
    raise EmbedderInvalid(
        f"the revision of {name} is unknown",
        hint="pass revision= to SentenceTransformersEmbedder: the commit of the model on the hub",
    )
