"""From a name to an embedder, and from what a build noted of its embedder back to that embedder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ragfence.core.urls import HIDDEN, show_url
from ragfence.errors import EmbedderInvalid, EmbedderUnknown
from ragfence.indexes.embedders.embedder import Embedder, EmbedderId

DEFAULT = "wordllama"
FORMS = (
    "wordllama",
    "minilm",
    "openai:<model>",
    "openai+<url>#<model>",
    "sentence-transformers:<model or path>",
)


def open_embedder(name: str) -> Embedder:
    """The embedder of that name.

    >>> open_embedder("wordllama").dimension
    256
    """
    return _opened(name, None)


def to_embedder(given: str | Embedder | None) -> Embedder:
    """An embedder, from whatever a caller may give for one; None is the default."""
    if given is None or isinstance(given, str):
        return open_embedder(given or DEFAULT)
    if not callable(getattr(given, "embed", None)):
        raise EmbedderInvalid(
            f"{type(given).__name__} is no embedder: it has no embed(texts)",
            hint="give a name, or FunctionEmbedder(function, name=..., revision=..., dimension=...)",
        )
    return given


def reopen_embedder(known: EmbedderId, registered: Mapping[str, Embedder]) -> Embedder:
    """The embedder that a build noted: one that is `registered` (by EmbedderId.digest), or opened by its name.

    Never one with another revision: a query embedded by it would be compared with vectors it did not make.
    """
    if (found := registered.get(known.digest)) is not None:
        return found
    try:
        opened = _opened(known.name, known.dimension)
    except EmbedderUnknown as unknown:
        raise EmbedderUnknown(
            f"the index was built with {known}, which cannot be opened by its name",
            hint="give this process the embedder that the index was built with",
        ) from unknown
    there = EmbedderId.of(opened)
    if there != known:
        _close(opened)
        raise EmbedderInvalid(
            f"the index was built with {_full(known)}, and here is {_full(there)}",
            hint="give this process the embedder that the index was built with, or build the index again",
        )
    return opened


def _opened(name: str, dimension: int | None) -> Embedder:
    if name == "wordllama":
        from ragfence.indexes.embedders.wordllama import WordLlamaEmbedder

        return WordLlamaEmbedder()
    if name == "minilm":
        from ragfence.indexes.embedders.minilm import MiniLMEmbedder

        return MiniLMEmbedder()
    scheme, _, rest = name.partition(":")
    if rest and (scheme == "openai" or scheme.startswith("openai+")):
        return _endpoint(name, dimension)
    if rest and scheme == "sentence-transformers":
        from ragfence.indexes.embedders.sentence_transformers import SentenceTransformersEmbedder

        return SentenceTransformersEmbedder(rest)
    # What follows a plus is meant as a URL, which may hold a password.
    kind, plus, _ = name.partition("+")
    shown = show_url(name) if "://" in name else f"{kind}+{HIDDEN}" if plus else name
    raise EmbedderUnknown(f"nobody knows the embedder {shown!r}", hint=f"the known ones: {', '.join(FORMS)}")


def _endpoint(name: str, dimension: int | None) -> Embedder:
    """With the dimension that a build noted a search need not ask for it; an answer of another one is refused."""
    from ragfence.indexes.embedders.endpoint import OPENAI, EndpointEmbedder

    if name.startswith("openai:"):
        return EndpointEmbedder(OPENAI, name.removeprefix("openai:"), dimension=dimension)
    url, _, model = name.removeprefix("openai+").partition("#")
    # A name out of a stored build was written by whoever can write there: the key goes to no address but our own.
    ours = dimension is None or url.rstrip("/") == os.environ.get("OPENAI_BASE_URL", "").rstrip("/")
    return EndpointEmbedder(url, model, dimension=dimension, api_key=None if ours else "")


def _full(known: EmbedderId) -> str:
    return f"{known}, {'of length 1' if known.normalised else 'of any length'}"


def _close(embedder: Embedder) -> None:
    close: Callable[[], Any] | None = getattr(embedder, "close", None)
    if close is not None:
        close()
