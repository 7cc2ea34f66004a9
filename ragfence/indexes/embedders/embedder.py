"""What an embedder is, and how its vectors are checked before anything is kept of them."""

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
    """Turns texts into vectors. The same revision makes the same vector of the same text, for ever.

    name        which model
    revision    changes whenever its vectors do: a version, or a digest of its weights
    dimension   of every vector
    embed       one vector for each text, in their order: an array (n, dimension), or lists of numbers

    Optional: `normalised` (True: every vector has length 1), `batch` (so many texts at once are best; 256), `close()`.
    May be called from several threads at once.
    """

    name: str
    revision: str
    dimension: int

    def embed(self, texts: Sequence[str]) -> Any: ...


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


class EmbedderId(NamedTuple):
    """What of an embedder decides whether vectors are the same."""

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
                f"{type(embedder).__name__} is no embedder: {missing}",
                hint="an embedder has name, revision, dimension and embed(texts); see docs/embedders.md",
            ) from missing
        name, revision = _checked_text("name", name), _checked_text("revision", revision)
        if isinstance(dimension, bool) or not isinstance(dimension, int) or not 1 <= dimension <= MAX_DIMENSION:
            raise EmbedderInvalid(f"the dimension of {name} is 1 to {MAX_DIMENSION:,}, not {dimension!r}")
        return cls(name, revision, dimension, bool(getattr(embedder, "normalised", False)))

    @property
    def digest(self) -> str:
        parts = (self.name.encode(), self.revision.encode(), str(self.dimension).encode(), b"%d" % self.normalised)
        return digest("ragfence/embedder/1", *parts)[:16].hex()

    def __str__(self) -> str:
        return f"{self.name}@{self.revision} ({self.dimension})"


def _checked_text(field: str, value: object) -> str:
    if not isinstance(value, str) or not value or len(value) > 255 or not value.isprintable():
        raise EmbedderInvalid(f"the {field} of an embedder is 1 to 255 printable characters, not {value!r}")
    return value


def embed_texts(embedder: Embedder, known: EmbedderId, texts: Sequence[str]) -> Vectors:
    """The vectors of the texts: as many as texts, of the right dimension, finite, of the revision that is `known`."""
    import numpy as np

    if not texts:
        return np.zeros((0, known.dimension), dtype=np.float32)
    try:
        made = embedder.embed(texts)
    except StopIteration as stopped:  # in a generator around us it would look like its end, or like a fault of ours
        raise EmbedderInvalid(f"{known} raised StopIteration", hint="return an array with a row per text") from stopped
    if (now := EmbedderId.of(embedder)) != known:
        raise EmbedderInvalid(
            f"{known} became {now} while it was embedding", hint="start again: vectors of two revisions do not compare"
        )
    try:
        vectors: Vectors = np.ascontiguousarray(made, dtype=np.float32)
    except (TypeError, ValueError) as ragged:
        raise EmbedderInvalid(f"{known} did not return vectors of equal length: {ragged}") from ragged
    if vectors.ndim != 2 or vectors.shape[0] != len(texts):
        raise EmbedderInvalid(f"{known} returned an array {vectors.shape} for {len(texts)} texts")
    if vectors.shape[1] != known.dimension:
        raise EmbedderInvalid(
            f"{known} returned vectors of {vectors.shape[1]} dimensions",
            hint="set its dimension to what the model returns",
        )
    if not np.isfinite(vectors).all():
        at = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
        raise EmbedderInvalid(
            f"{known} returned NaN or infinity for a text of {len(texts[at])} characters (number {at})"
        )
    return vectors


def find_undirected(vectors: Vectors) -> tuple[int, str] | None:
    """The first of the vectors that cosine cannot compare with anything, and why; None: it can compare them all.

    Backends square and add in float32. A length that is 0 there, or none, makes NaN of every score: LanceDB then never
    finds the row, whatever is asked for.
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
