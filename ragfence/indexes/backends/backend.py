"""The protocol of a backend: it stores rows under physical names that are written once, and searches them.

A backend decides nothing. The catalog says which physical index is live, and the log of builds which one is complete.
`ragfence.testing.contracts.backends` checks the promises made here; docs/backends.md shows how to write a backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Vectors

Metric = Literal["cosine", "dot", "l2"]
SCHEMA_VERSION = 1
"""of the rows; part of the INDEX_HASH"""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a physical index."""

    dimension: int
    metric: Metric = "cosine"
    index: str = "flat"
    """"flat" compares with every row; all others are approximate and differ between backends"""
    parameters: Mapping[str, Any] = field(default_factory=dict)


class FoundRow(NamedTuple):
    """A row found by a search, without its vector."""

    snippet_id: str
    doc_id: str
    section_id: str
    ordinal: int
    start: int
    end: int
    tokens: int
    text: str
    source_url: str
    metadata: str
    """as JSON"""
    score: float
    """higher is nearer: cosine similarity, dot product, or the negative squared distance"""


class NearRow(NamedTuple):
    """A row found by one of several searches."""

    snippet_id: str
    score: float


class Pointer(NamedTuple):
    """A backend's own alias: a cache of the catalog, for readers that do not use ragfence."""

    physical: str
    generation: int | None
    """of the catalog; None if the backend cannot store it"""


class Backend(Protocol):
    """Stores and searches rows, which are Arrow tables with the columns of `row_schema`. Used by several threads.

    Methods raise `BuildMissing` if the physical index does not exist, and `StoreUnavailable` if the backend does not
    answer. `check` raises `ValidationError` for a shape that the backend cannot have.
    """

    name: str

    @property
    def url(self) -> str:
        """Where the backend is, for messages; never contains credentials."""
        ...

    def check(self, shape: Shape) -> None:
        """Refuses a shape that cannot be built, before anything is written."""
        ...

    def approximate(self, rows: int, dimension: int) -> tuple[str, dict[str, Any]] | None:
        """Returns the approximate index, and its parameters, that suits this many rows best; None if only "flat" does.

        Must return the same for the same numbers in every version, because it is part of the INDEX_HASH.
        """
        ...

    def write(self, physical: str, shape: Shape, tables: Iterable[Any]) -> int:
        """Creates the physical index with these rows, which are made while they are written. Returns their number.

        The name must be new. After an interrupted write, a part of the index may exist.

        Raises:
            ValidationError: The name exists.
        """
        ...

    def finish(self, physical: str, shape: Shape) -> None:
        """Builds what approximate search needs. Does nothing for "flat"."""
        ...

    def exists(self, physical: str) -> bool: ...

    def count(self, physical: str) -> int: ...

    def read(self, physical: str, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Yields all rows as Arrow tables of some thousand rows, in any order, with all or the given columns."""
        ...

    def remove(self, physical: str, doc_ids: Sequence[str]) -> None:
        """Deletes all rows of these documents permanently: no older version may keep them."""
        ...

    def search(self, physical: str, vector: Vectors, k: int) -> list[FoundRow]:
        """Returns the k nearest rows, nearest first."""
        ...

    def drop(self, physical: str) -> None:
        """Deletes the physical index. Does nothing if it does not exist."""
        ...

    def physicals(self) -> list[str]:
        """Lists every physical index whose name starts with `PREFIX`, also what an interrupted writer left.

        Must not list what was dropped: gc would drop it again and again.
        """
        ...

    def point(self, alias: str, physical: str, generation: int) -> None:
        """Sets the backend's own alias; if the backend can, only if its generation is not above this one."""
        ...

    def pointer(self, alias: str) -> Pointer | None: ...

    def unpoint(self, alias: str) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class BatchSearch(Protocol):
    """What a backend may have besides: many searches in one call, which need not cost as much as many calls."""

    def search_many(self, physical: str, vectors: Vectors, k: int) -> list[list[NearRow]]:
        """Returns what `search` finds for each vector, nearest first."""
        ...


PREFIX = "rf-"
"""of physical names; the rest consists of letters, digits and '-'"""


def row_schema(dimension: int) -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            ("snippet_id", pa.string()),
            ("doc_id", pa.string()),
            ("section_id", pa.string()),
            ("ordinal", pa.int32()),
            ("start", pa.int64()),
            ("end", pa.int64()),
            ("tokens", pa.int32()),
            ("text", pa.string()),
            ("source_url", pa.string()),
            ("metadata", pa.string()),
            ("vector", pa.list_(pa.float32(), dimension)),
        ]
    )


PAYLOAD = (
    "snippet_id",
    "doc_id",
    "section_id",
    "ordinal",
    "start",
    "end",
    "tokens",
    "text",
    "source_url",
    "metadata",
)
"""the columns of a row without its vector"""
