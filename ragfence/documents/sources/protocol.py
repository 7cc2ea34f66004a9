"""What a source is: something that yields items, each of which can say whether it changed without being read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from ragfence.documents.document import Document


class Item(NamedTuple):
    """One document of a source, not read yet.

    `load` raises `DocumentInvalid` for a fault of this document, and another `RagfenceError` (`StoreUnavailable`,
    for instance) where the source did not answer. A `DocumentInvalid` without a `doc_id` stands for something whose
    documents could not be told: a line that is no JSON, a folder that cannot be listed. Whoever prunes must not take
    the documents behind it for deleted.
    """

    doc_id: str
    state: str
    """Size and mtime, or an ETag: equal states mean unchanged. Empty where the source cannot tell: read it."""
    load: Callable[[], Document]


@runtime_checkable
class Source(Protocol):
    """Where documents come from.

    A source that cannot be listed raises from `items`; it never yields less instead, since a document that is not
    yielded counts as deleted. Two items may have the same doc_id (two lines of a file, two file names that differ
    only in their Unicode form): both are yielded, and the last one is the one that lasts.
    """

    @property
    def name(self) -> str:
        """The scope of a prune and of the remembered states: the same in every run, and no other source's."""

    def items(self) -> Iterator[Item]:
        """In an order that depends only on what is there; lazily, so that a million documents are no list."""
