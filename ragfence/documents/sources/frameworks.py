"""Documents in memory: those of ragfence, and of LangChain and LlamaIndex, which are recognised by their attributes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

from ragfence.core.document import Document
from ragfence.documents.readers.content import as_doc_id
from ragfence.documents.sources.source import Item
from ragfence.errors import DocumentInvalid, ValidationError

_LANGCHAIN_IDS = ("doc_id", "id")
_PARTS = {"page": "page", "page_label": "page", "row": "row"}
"""metadata of loaders that names a part of a source (a page of a PDF, a row of a table), and its name in ids"""
_LLAMA_IDS = ("doc_id", "id_", "node_id")
_URLS = ("source_url", "url", "source")
_GIVE_ONE = "give every document an id of its own, or pass doc_id=lambda document: ..."


class DocumentsSource:
    """The documents of an iterable, in its order; they have no state, so each is read every time.

    LangChain's are named by `.id`, or `doc_id` or `id` in their metadata, or `source` in their metadata, with the page
    or row where there is one (`a.pdf#page=3`), since loaders give all pages of a file the same `source`. LlamaIndex's
    are named by `doc_id`, `id_` or `node_id`, if one was given: otherwise LlamaIndex generates a random id, which would
    be a new document in every run. Such a document is named by the `file_path` in its metadata, with the page or row,
    and with its number (`a.md#part=1`) where there are several of one name. Pass `doc_id=` where that is not enough.

    >>> DocumentsSource(pages, doc_id=lambda p: f"{p.metadata['source']}#{p.metadata['page']}")  # doctest: +SKIP
    """

    def __init__(
        self,
        documents: Iterable[Any],
        *,
        name: str | None = None,
        doc_id: Callable[[Any], str] | None = None,
    ) -> None:
        self._documents = documents
        self._name = name or "documents"
        self._doc_id = doc_id
        self._read = False

    @property
    def name(self) -> str:
        return self._name

    def items(self) -> Iterator[Item]:
        documents = iter(self._documents)
        if documents is self._documents:
            # It would yield nothing, as if everything had been deleted.
            if self._read:
                raise ValidationError(
                    f"{self._name}: these documents come from an iterator, which was already read",
                    hint="pass a list, or make a new source",
                )
            self._read = True
        parts: Counter[str] = Counter()
        for position, document in enumerate(documents):
            yield self._item(position, document, parts)

    def _item(self, position: int, given: Any, parts: Counter[str]) -> Item:
        if isinstance(given, Document):
            # Its validation reports what is wrong with its id.
            return Item(as_doc_id(given.doc_id) or self._place(position), "", _InMemoryItem(given))
        if not _is_langchain(given) and not _is_llama(given):
            return self._bad(
                position,
                f"is not a document but {type(given).__name__}",
                "known: ragfence.Document, LangChain's and LlamaIndex's documents",
            )
        try:
            found = self._doc_id(given) if self._doc_id else _own_id(given, parts)
        except Exception as failed:  # noqa: BLE001  # the caller's function failed for this document only
            return self._bad(position, f"got no id: doc_id= raised {failed!r}", _GIVE_ONE, failed)
        doc_id = as_doc_id(found)
        if doc_id is None:
            return self._bad(
                position, "has no id" if found is None else f"has an unusable id: {found!r:.80}", _GIVE_ONE
            )
        return Item(doc_id, "", partial(self._converted, position, doc_id, given))

    def _converted(self, position: int, doc_id: str, given: Any) -> Document:
        try:
            text = given.page_content if _is_langchain(given) else _llama_text(given)
        except Exception as failed:  # the framework's own: an image without a text, for instance
            raise DocumentInvalid(
                f"{doc_id} ({self._place(position)}) gives no text: {failed!r}",
                hint="exclude it, or turn it into text first",
                doc_id=doc_id,
            ) from failed
        metadata = given.metadata
        return Document(doc_id, text, {} if metadata is None else metadata, source_url=_url_in(metadata))

    def _bad(self, position: int, problem: str, hint: str, cause: Exception | None = None) -> Item:
        def load() -> NoReturn:
            raise DocumentInvalid(f"{self._place(position)} {problem}", hint=hint) from cause

        return Item(self._place(position), "", load)

    def _place(self, position: int) -> str:
        return f"{self._name}[{position}]"


class _InMemoryItem:
    """A document in memory. One object instead of the three of a closure: a page of a sync holds many."""

    __slots__ = ("_document",)

    def __init__(self, document: Document) -> None:
        self._document = document

    def __call__(self) -> Document:
        return self._document


def _is_langchain(given: object) -> bool:
    return hasattr(given, "page_content") and hasattr(given, "metadata")


def _is_llama(given: object) -> bool:
    has_text = callable(getattr(given, "get_content", None)) or hasattr(given, "text")
    return has_text and hasattr(given, "metadata") and any(hasattr(given, name) for name in _LLAMA_IDS)


def _own_id(given: Any, parts: Counter[str]) -> object:
    metadata = given.metadata if isinstance(given.metadata, Mapping) else {}
    if _is_langchain(given):
        found = [
            getattr(given, "id", None),
            *(metadata.get(name) for name in _LANGCHAIN_IDS),
            _part_of(metadata, "source"),
        ]
    elif _has_made_up_id(given) and isinstance(part := _part_of(metadata, "file_path"), str) and part:
        # Loaders split a file without saying where: what comes again under a name is numbered.
        number = parts[part]
        parts[part] += 1
        return f"{part}#part={number}" if number else part
    else:
        found = [getattr(given, name, None) for name in _LLAMA_IDS]
    return next((value for value in found if value not in (None, "")), None)


def _has_made_up_id(given: Any) -> bool:
    """Whether the id of a LlamaIndex document was generated: pydantic knows which fields were set."""
    fields = getattr(given, "model_fields_set", None)
    return isinstance(fields, set | frozenset) and "id_" not in fields


def _part_of(metadata: Mapping[Any, Any], key: str) -> object:
    """Returns the source, with the page or row of the document."""
    source = metadata.get(key)
    if not isinstance(source, str) or not source:
        return source
    for name, printable in _PARTS.items():
        number = metadata.get(name)
        if isinstance(number, int | str) and not isinstance(number, bool) and number != "":
            return f"{source}#{printable}={number}"
    return source


def _llama_text(given: Any) -> Any:
    get_content = getattr(given, "get_content", None)
    return get_content() if callable(get_content) else given.text


def _url_in(metadata: object) -> str:
    """Returns a URL, and no path: a `source` is often a path of the machine that loaded the document."""
    if not isinstance(metadata, Mapping):
        return ""
    found = (metadata.get(name) for name in _URLS)
    return next((value for value in found if isinstance(value, str) and "://" in value), "")
