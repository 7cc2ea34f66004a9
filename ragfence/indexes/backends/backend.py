"""What a backend is: it holds rows under physical names that are written once, and searches them.

A backend decides nothing. Which physical index is live says the catalog; which one is whole says the log of builds.
`ragfence.testing.contracts.backends` checks what is promised here; docs/backends.md shows how to write one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Vectors

Metric = Literal["cosine", "dot", "l2"]
SCHEMA_VERSION = 1
"""of the rows; part of the INDEX_HASH"""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a physical index is to be."""

    dimension: int
    metric: Metric = "cosine"
    index: str = "flat"
    """"flat" compares with every row; others are approximate, and each backend has its own"""
    parameters: Mapping[str, Any] = field(default_factory=dict)


class FoundRow(NamedTuple):
    """A row that a search found, without its vector."""

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


class Pointer(NamedTuple):
    """A backend's own alias: a cache of the catalog, for readers who know nothing of ragfence."""

    physical: str
    generation: int | None
    """of the catalog; None where the backend has no place for it"""


class Backend(Protocol):
    """Rows are Arrow tables with the columns of `row_schema`. Safe to use from many threads.

    What is not there: `BuildMissing`. A backend that does not answer: `StoreUnavailable`. A shape it cannot have:
    `ValidationError`, raised by `check`.
    """

    name: str

    @property
    def url(self) -> str:
        """For people; never contains credentials."""
        ...

    def check(self, shape: Shape) -> None:
        """Refuses what cannot be built, before anything is."""
        ...

    def approximate(self, rows: int, dimension: int) -> tuple[str, dict[str, Any]] | None:
        """The index, and its parameters, that suits so many rows best if it need not be exact; None: only "flat".

        The same for the same numbers, in every version: it is part of the INDEX_HASH.
        """
        ...

    def write(self, physical: str, shape: Shape, tables: Iterable[Any]) -> int:
        """Creates the physical index with these rows, which are made while they are written. Returns how many.

        The name must be new: `ValidationError` if it exists. Cut off in the middle, a part may be there.
        """
        ...

    def finish(self, physical: str, shape: Shape) -> None:
        """Makes what approximate search needs. Nothing for "flat"."""
        ...

    def exists(self, physical: str) -> bool: ...

    def count(self, physical: str) -> int: ...

    def read(self, physical: str, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """All rows, as Arrow tables of some thousand rows, in no order; all columns, or those asked for."""
        ...

    def remove(self, physical: str, doc_ids: Sequence[str]) -> None:
        """Deletes all rows of these documents, for good: no older version keeps them."""
        ...

    def search(self, physical: str, vector: Vectors, k: int) -> list[FoundRow]:
        """The k nearest rows, the nearest first."""
        ...

    def drop(self, physical: str) -> None:
        """What is absent already is fine."""
        ...

    def physicals(self) -> list[str]:
        """Every physical index whose name starts with `PREFIX`, also what a writer that was cut off has left.

        What was dropped is not listed: gc would drop it again for ever.
        """
        ...

    def point(self, alias: str, physical: str, generation: int) -> None:
        """Sets the backend's own alias; where it can, only if its generation is not above this one."""
        ...

    def pointer(self, alias: str) -> Pointer | None: ...

    def unpoint(self, alias: str) -> None: ...

    def close(self) -> None: ...


PREFIX = "rf-"
"""of physical names; the rest is letters, digits and '-'"""


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
