"""Sources: they yield items, whose state shows without a read whether they changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ragfence.core.document import Document
from ragfence.errors import DocumentInvalid


class Item(NamedTuple):
    """A document of a source that is not read yet.

    `load` raises `DocumentInvalid` for a fault of this document, and another `RagfenceError` (`StoreUnavailable`,
    for instance) if the source did not answer. A `DocumentInvalid` without a `doc_id` stands for unknown documents: a
    line that is not valid JSON, a folder that cannot be listed. A prune must not take these documents for deleted.
    """

    doc_id: str
    state: str
    """Size and mtime, or an ETag: equal states mean unchanged. Empty if the source has none: the item is read."""
    load: Callable[[], Document]


@runtime_checkable
class Source(Protocol):
    """Where documents come from.

    A source that cannot be listed raises from `items`; it never yields less instead, since a document that is not
    yielded counts as deleted. Two items may have the same doc_id (two lines of a file, two file names that differ
    only in their Unicode form): both are yielded, and the second is refused unless its content is that of the first.

    A source that skips files without a reader may count those of the last listing in a property `skipped`
    (`ragfence.documents.readers.content.SkippedFiles`).
    """

    @property
    def name(self) -> str:
        """The scope of prunes and of stored states: the same in every run, and different from every other source."""

    def items(self) -> Iterator[Item]:
        """Yields the items, in an order that depends only on the content, and lazily: there may be a million."""


class PrefixedSource:
    """The documents of a source with a prefix in every doc_id, so that two sources never share one."""

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
            return document  # its validation reports what is wrong
        return document._replace(doc_id=self._prefix + document.doc_id)
