"""The protocol of an embedder, and the checks of its vectors before any of them is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from ragfence.core.hashing import digest
from ragfence.errors import EmbedderInvalid

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray

    Vectors = NDArray[float32]

MAX_DIMENSION = 65_536


@runtime_checkable
class Embedder(Protocol):
    """Turns texts into vectors. A revision always makes the same vector of the same text.

    Optional attributes: `normalised` (True if every vector has length 1), `batch` (the best number of texts per call;
    256 by default), and `close()`. Called from several threads at once.

    Attributes:
        name: The model.
        revision: Changes whenever its vectors do: a version, or a digest of its weights.
        dimension: Of every vector.
        embed: Returns one vector for each text, in order: an array (n, dimension), or lists of numbers.
    """

    name: str
    revision: str
    dimension: int

    def embed(self, texts: Sequence[str]) -> Any: ...


class FunctionEmbedder:
    """An embedder made from a function that returns the vectors of a list of texts.

    >>> def letters(texts):
    ...     return [[float(text.count(letter)) for letter in "aeiou"] for text in texts]
    >>> embedder = FunctionEmbedder(letters, name="letters", revision="1", dimension=5)

    Change `revision` whenever the function returns other vectors. The function is called from several threads at once.
    It cannot be opened by its name, so every process that searches must pass it to `fence.indexes.use`.
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


class EmbedderId(NamedTuple):
    """What identifies the vectors of an embedder."""

    name: str
    revision: str
    dimension: int
    normalised: bool

    @classmethod
    def of(cls, embedder: Embedder) -> EmbedderId:
        try:
            name: object = embedder.name
            revision: object = embedder.revision
            dimension: object = embedder.dimension
        except AttributeError as missing:
            raise EmbedderInvalid(
                f"{type(embedder).__name__} is not an embedder: {missing}",
                hint="an embedder has name, revision, dimension and embed(texts); see docs/embedders.md",
            ) from missing
        name, revision = _check_text("name", name), _check_text("revision", revision)
        if isinstance(dimension, bool) or not isinstance(dimension, int) or not 1 <= dimension <= MAX_DIMENSION:
            raise EmbedderInvalid(f"the dimension of {name} must be 1 to {MAX_DIMENSION:,}, not {dimension!r}")
        return cls(name, revision, dimension, bool(getattr(embedder, "normalised", False)))

    @property
    def digest(self) -> str:
        parts = (self.name.encode(), self.revision.encode(), str(self.dimension).encode(), b"%d" % self.normalised)
        return digest("ragfence/embedder/1", *parts)[:16].hex()

    def __str__(self) -> str:
        return f"{self.name}@{self.revision} ({self.dimension})"


def _check_text(field: str, value: object) -> str:
    if not isinstance(value, str) or not value or len(value) > 255 or not value.isprintable():
        raise EmbedderInvalid(f"the {field} of an embedder must be 1 to 255 printable characters, not {value!r}")
    return value


def embed_texts(embedder: Embedder, known: EmbedderId, texts: Sequence[str]) -> Vectors:
    """Embeds texts, and checks that there is one finite vector of the right dimension for each.

    Args:
        embedder: Makes the vectors.
        known: The identity that the embedder must still have afterwards.
        texts: The texts.

    Raises:
        EmbedderInvalid: The vectors cannot be used, or the embedder became another one.
    """
    import numpy as np

    if not texts:
        return np.zeros((0, known.dimension), dtype=np.float32)
    try:
        made = embedder.embed(texts)
    except StopIteration as stopped:  # would look like the end of a generator that calls this
        raise EmbedderInvalid(f"{known} raised StopIteration", hint="return an array with a row per text") from stopped
    if (now := EmbedderId.of(embedder)) != known:
        raise EmbedderInvalid(
            f"{known} became {now} while it was embedding",
            hint="start again: vectors of two revisions cannot be compared",
        )
    try:
        vectors: Vectors = np.ascontiguousarray(made, dtype=np.float32)
    except (TypeError, ValueError) as ragged:
        raise EmbedderInvalid(f"{known} did not return vectors of equal length: {ragged}") from ragged
    if vectors.ndim != 2 or vectors.shape[0] != len(texts):
        raise EmbedderInvalid(f"{known} returned an array {vectors.shape} for {len(texts)} texts")
    if vectors.shape[1] != known.dimension:
        raise EmbedderInvalid(
            f"{known} returned vectors with {vectors.shape[1]} dimensions",
            hint="set its dimension to what the model returns",
        )
    if not np.isfinite(vectors).all():
        at = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
        raise EmbedderInvalid(
            f"{known} returned NaN or infinity for text number {at}, which has {len(texts[at])} characters"
        )
    return vectors


def find_undirected(vectors: Vectors) -> tuple[int, str] | None:
    """Returns the first vector that cosine cannot compare, by its position, and why; None if it can compare all.

    Backends square and add in float32. If the length is 0 or not finite there, every score is NaN, and LanceDB never
    finds the row.
    """
    import numpy as np

    with np.errstate(over="ignore", under="ignore"):
        squares = np.einsum("ij,ij->i", vectors, vectors, dtype=np.float32)
    wrong = np.flatnonzero(~((squares >= np.finfo(np.float32).tiny) & np.isfinite(squares)))
    if not len(wrong):
        return None
    at = int(wrong[0])
    if not vectors[at].any():
        return at, "a vector of length 0"
    return at, f"a vector whose length is too {'large' if squares[at] > 1 else 'small'} for a 32-bit float"
