"""Opens embedders by name, and the embedder of an existing build."""

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
    """Opens an embedder by name.

    Raises:
        EmbedderUnknown: There is no embedder with this name.

    >>> open_embedder("wordllama").dimension
    256
    """
    return _open_by_name(name, None)


def to_embedder(given: str | Embedder | None) -> Embedder:
    """Returns an embedder for a name or an embedder; None is the default."""
    if given is None or isinstance(given, str):
        return open_embedder(given or DEFAULT)
    if not callable(getattr(given, "embed", None)):
        raise EmbedderInvalid(
            f"{type(given).__name__} is not an embedder: it has no embed(texts)",
            hint="pass a name, or FunctionEmbedder(function, name=..., revision=..., dimension=...)",
        )
    return given


def reopen_embedder(known: EmbedderId, registered: Mapping[str, Embedder]) -> Embedder:
    """Returns the embedder of a build: one that is `registered` by its EmbedderId.digest, or one opened by name.

    Never one with another revision: its query would be compared with vectors that it did not make.

    Raises:
        EmbedderUnknown: It is not registered and cannot be opened by its name.
        EmbedderInvalid: The embedder of this name has another revision here.
    """
    if (found := registered.get(known.digest)) is not None:
        return found
    try:
        opened = _open_by_name(known.name, known.dimension)
    except EmbedderUnknown as unknown:
        raise EmbedderUnknown(
            f"the index was built with {known}, which cannot be opened by its name",
            hint="register the embedder that the index was built with: fence.indexes.use(embedder)",
        ) from unknown
    there = EmbedderId.of(opened)
    if there != known:
        _close(opened)
        raise EmbedderInvalid(
            f"the index was built with {_describe(known)}, but here it is {_describe(there)}",
            hint="use the embedder that the index was built with, or build the index again",
        )
    return opened


def _open_by_name(name: str, dimension: int | None) -> Embedder:
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
    raise EmbedderUnknown(f"{shown!r} is not a known embedder", hint=f"use one of: {', '.join(FORMS)}")


def _endpoint(name: str, dimension: int | None) -> Embedder:
    """`dimension`: that of a build, so that a search need not find it out; responses with another one are refused."""
    from ragfence.indexes.embedders.endpoint import OPENAI, EndpointEmbedder

    if name.startswith("openai:"):
        return EndpointEmbedder(OPENAI, name.removeprefix("openai:"), dimension=dimension)
    url, _, model = name.removeprefix("openai+").partition("#")
    # The name in a stored build could be forged: send the API key only to the address set in the environment.
    ours = dimension is None or url.rstrip("/") == os.environ.get("OPENAI_BASE_URL", "").rstrip("/")
    return EndpointEmbedder(url, model, dimension=dimension, api_key=None if ours else "")


def _describe(known: EmbedderId) -> str:
    return f"{known}, {'of length 1' if known.normalised else 'of any length'}"


def _close(embedder: Embedder) -> None:
    close: Callable[[], Any] | None = getattr(embedder, "close", None)
    if close is not None:
        close()
