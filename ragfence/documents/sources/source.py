"""What a source is: something that yields items, each of which can say whether it changed without being read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ragfence.core.document import Document
from ragfence.errors import DocumentInvalid


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
    only in their Unicode form): both are yielded, and the second is refused unless its content is that of the first.

    A source that leaves out files which it cannot read counts them in a property `skipped`
    (`ragfence.documents.readers.content.Skipped`), that of the last listing. It is optional.
    """

    @property
    def name(self) -> str:
        """The scope of a prune and of the remembered states: the same in every run, and no other source's."""

    def items(self) -> Iterator[Item]:
        """In an order that depends only on what is there; lazily, so that a million documents are no list."""


class PrefixedSource:
    """The documents of a source with something in front of every doc_id, so that two sources never share one."""

    def __init__(self, source: Source, prefix: str) -> None:
        self.name = source.name
        self.origin: str = getattr(source, "origin", source.name)
        self.former_name: str = getattr(source, "former_name", "")
        self._source = source
        self._prefix = prefix

    @property
    def skipped(self) -> Any:
        return getattr(self._source, "skipped", None)

    def items(self) -> Iterator[Item]:
        for doc_id, state, load in self._source.items():
            yield Item(self._prefix + doc_id, state, partial(self._load, load))

    def _load(self, load: Callable[[], Document]) -> Document:
        try:
            document = load()
        except DocumentInvalid as invalid:
            if invalid.doc_id:
                invalid.details["doc_id"] = self._prefix + invalid.doc_id
            raise
        given: object = document
        if not isinstance(given, Document) or type(given.doc_id) is not str:
            return document  # what is wrong with it is said where it is checked
        return document._replace(doc_id=self._prefix + document.doc_id)
