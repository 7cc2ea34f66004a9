"""Any callable as an embedder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class FunctionEmbedder:
    """An embedder made of a function from a list of texts to their vectors.

    >>> def letters(texts):
    ...     return [[float(text.count(letter)) for letter in "aeiou"] for text in texts]
    >>> embedder = FunctionEmbedder(letters, name="letters", revision="1", dimension=5)

    `revision` is a promise: give it another value whenever the function would return other vectors. The function may be
    called from several threads at once. Nobody can open it by its name, so a process that searches has to be given it.
    """

    def __init__(
        self,
        function: Callable[[list[str]], Any],
        *,
        name: str,
        revision: str,
        dimension: int,
        normalised: bool = False,
        batch: int = 256,
    ) -> None:
        self._function = function
        self.name = name
        self.revision = revision
        self.dimension = dimension
        self.normalised = normalised
        self.batch = batch

    def embed(self, texts: Sequence[str]) -> Any:
        return self._function(list(texts))

    def __repr__(self) -> str:
        return f"FunctionEmbedder({self.name!r}, revision={self.revision!r}, dimension={self.dimension})"
