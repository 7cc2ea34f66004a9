"""Models of sentence-transformers, from a folder or from what is already in the local cache. Never downloaded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragfence.errors import EmbedderInvalid
from ragfence.indexes.embedders.packages import digest_files, import_package

PREFIX = "sentence-transformers:"
INSTALL = "sentence-transformers"
"""not an extra of ragfence: it brings PyTorch, and whoever wants it knows which build of it"""

WEIGHTY = (".safetensors", ".bin", ".onnx", ".json", ".txt", ".model")
"""files of a model's folder that decide its vectors; not its README, and not the leavings of a git checkout"""


class SentenceTransformersEmbedder:
    """`open_embedder("sentence-transformers:./models/e5-small")`.

    `revision` may be left out. For a folder it is a digest of its files; for a model of the hub, the commit of the copy
    in the local cache. With `model=` one that is loaded already is used (with a device or settings of its own).
    """

    normalised = True
    batch = 256

    def __init__(self, model_or_path: str, *, revision: str | None = None, model: Any = None) -> None:
        self.name = f"{PREFIX}{model_or_path}"
        folder = Path(model_or_path)
        self._model = model if model is not None else _loaded(model_or_path, None if folder.is_dir() else revision)
        if revision is None and model is None and folder.is_dir():
            revision = f"files-{digest_files('encode, length 1/1', _weighty_files(folder))}"
        self.revision = revision or _commit(self._model) or _unknown_revision(self.name)
        self.dimension = int(self._model.get_sentence_embedding_dimension() or 0)
        # Its tokeniser changes its own padding while it works, and answers a second thread with "Already borrowed".
        self._one_at_a_time = threading.Lock()

    def embed(self, texts: Sequence[str]) -> Any:
        with self._one_at_a_time:
            return self._model.encode(
                list(texts), normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
            )


def _loaded(model_or_path: str, revision: str | None) -> Any:
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
    """Of the hub, as transformers notes it in the configuration of what it loaded."""
    try:
        commit = model[0].auto_model.config._commit_hash
    except (AttributeError, IndexError, KeyError, TypeError):
        return None
    return commit if isinstance(commit, str) and commit else None


def _unknown_revision(name: str) -> str:
    raise EmbedderInvalid(
        f"nobody knows the revision of {name}",
        hint="give SentenceTransformersEmbedder a revision=: the commit of the model on the hub",
    )
