"""Documents in memory: ragfence's own, and classes of the same shape as those of LangChain and LlamaIndex."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragfence.core.document import Document
from ragfence.documents.sources import DocumentsSource
from ragfence.errors import DocumentInvalid, ValidationError


@dataclass
class LangChainDocument:
    """As langchain_core.documents.Document (1.x): an optional id, and everything else in the metadata."""

    page_content: str
    metadata: dict[str, Any] = field(default_factory=dict)
    id: str | None = None
    type: str = "Document"


@dataclass
class LlamaNode:
    """As llama_index.core.schema.TextNode (0.14): an id is made up if none is given."""

    text: str
    metadata: dict[str, Any] = field(default_factory=dict)
    id_: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def node_id(self) -> str:
        return self.id_

    def get_content(self, metadata_mode: str = "none") -> str:
        return self.text


class LlamaDocument(LlamaNode):
    @property
    def doc_id(self) -> str:
        return self.id_


def documents(source: DocumentsSource) -> list[Document]:
    return [item.load() for item in source.items()]


def refusal(thing: object, **options: Any) -> DocumentInvalid:
    good = Document("good", "x")
    first, item, last = DocumentsSource([good, thing, good], **options).items()
    assert first.load() is last.load() is good
    assert item.state == ""
    with pytest.raises(DocumentInvalid) as error:
        item.load()
    return error.value


def test_ragfences_own_documents_are_passed_on_as_they_are() -> None:
    given = [Document("a", "one"), Document("b", "two", {"k": 1}, "https://example.com", 3, "text/markdown")]
    items = list(DocumentsSource(given).items())
    assert [(item.doc_id, item.state) for item in items] == [("a", ""), ("b", "")]
    assert [item.load() for item in items] == given


def test_a_document_of_langchain_is_known_by_its_shape() -> None:
    (document,) = documents(DocumentsSource([LangChainDocument("hello", {"lang": "en"}, id="a")]))
    assert document == Document("a", "hello", {"lang": "en"})


@pytest.mark.parametrize(
    ("given", "doc_id"),
    [
        (LangChainDocument("x", {"doc_id": "m", "id": "n", "source": "s"}, id="a"), "a"),
        (LangChainDocument("x", {"doc_id": "m", "id": "n", "source": "s"}), "m"),
        (LangChainDocument("x", {"doc_id": "", "id": 17, "source": "s"}), "17"),
        (LangChainDocument("x", {"source": "guide/a.md"}), "guide/a.md"),
        (LlamaDocument("x", {"id": "not this"}, id_="a"), "a"),
        (LlamaNode("x", id_="b"), "b"),
        (SimpleNamespace(text="x", metadata={}, doc_id=None, node_id="c"), "c"),
    ],
)
def test_the_id_is_the_first_that_is_there(given: object, doc_id: str) -> None:
    (item,) = DocumentsSource([given]).items()
    assert item.doc_id == item.load().doc_id == doc_id


def test_a_document_of_llamaindex_is_known_by_its_shape() -> None:
    given = [LlamaDocument("one", {"k": 1}, "a"), LlamaNode("two", {}, "b")]
    assert documents(DocumentsSource(given)) == [Document("a", "one", {"k": 1}), Document("b", "two")]


def test_the_text_of_llamaindex_is_asked_for_before_it_is_looked_up() -> None:
    given = SimpleNamespace(get_content=lambda: "asked", text="looked up", metadata=None, id_="a")
    assert documents(DocumentsSource([given])) == [Document("a", "asked", {})]


def test_the_id_can_be_made_by_a_function() -> None:
    pages = [LangChainDocument(f"page {page}", {"source": "a.pdf", "page": page}) for page in range(2)]
    source = DocumentsSource(pages, doc_id=lambda d: f"{d.metadata['source']}#{d.metadata['page']}")
    assert [item.doc_id for item in source.items()] == ["a.pdf#0", "a.pdf#1"]


@pytest.mark.parametrize(
    ("metadata", "url"),
    [
        ({"source_url": "https://a.example", "url": "https://b.example"}, "https://a.example"),
        ({"url": "https://b.example", "source": "https://c.example"}, "https://b.example"),
        ({"source": "https://c.example"}, "https://c.example"),
        ({"source": "/home/somebody/private/a.md"}, ""),
        ({"source": 5}, ""),
    ],
)
def test_the_source_url_is_what_is_a_url_in_the_metadata(metadata: dict[str, Any], url: str) -> None:
    (document,) = documents(DocumentsSource([LangChainDocument("x", metadata, id="a")]))
    assert document.source_url == url


def test_a_document_without_an_id_is_told_by_its_position_with_a_way_out() -> None:
    error = refusal(LangChainDocument("x", {"page": 1}))
    assert error.message == "documents[1] has no id"
    assert "doc_id=lambda document: ..." in error.hint
    assert error.doc_id is None


def test_an_id_that_cannot_be_one_is_told_by_its_position() -> None:
    assert refusal(LangChainDocument("x", id="\ud800")).message == "documents[1] has an unusable id: '\\ud800'"
    assert refusal(LlamaNode("x", id_=1.5), name="crawl").message == "crawl[1] has an unusable id: 1.5"  # type: ignore[arg-type]
    error = refusal(LangChainDocument("x"), doc_id=lambda d: d.metadata["sku"])
    assert error.message == "documents[1] got no id: doc_id= raised KeyError('sku')"


@pytest.mark.parametrize("thing", ["text", 5, None, {"id": "a", "text": "x"}, SimpleNamespace(text="x", metadata={})])
def test_what_is_no_document_is_told_by_its_position(thing: object) -> None:
    assert refusal(thing).message == f"documents[1] is not a document but {type(thing).__name__}"


def test_a_document_whose_framework_cannot_give_its_text_is_told_by_its_id() -> None:
    def get_content() -> str:
        raise ValueError("an image has no text")

    error = refusal(SimpleNamespace(get_content=get_content, metadata={}, id_="a"))
    assert error.message == "a (documents[1]) gives no text: ValueError('an image has no text')"
    assert error.doc_id == "a"


def test_documents_are_taken_from_a_generator_one_by_one() -> None:
    taken: list[int] = []

    def generated() -> Iterable[Document]:
        for number in range(3):
            taken.append(number)
            yield Document(str(number), "")

    items = DocumentsSource(generated()).items()
    assert next(items).doc_id == "0"
    assert taken == [0]
    assert [item.doc_id for item in items] == ["1", "2"]


def test_a_list_can_be_read_again_and_an_iterator_that_was_read_is_refused_instead_of_empty() -> None:
    given = [Document("a", "x")]
    again = DocumentsSource(given)
    assert len(list(again.items())) == len(list(again.items())) == 1
    once = DocumentsSource(iter(given))
    assert len(list(once.items())) == 1
    with pytest.raises(ValidationError, match="documents: these documents come from an iterator"):
        next(once.items())


def test_the_name_can_be_given() -> None:
    assert DocumentsSource([]).name == "documents"
    assert DocumentsSource([], name="crawl").name == "crawl"


def test_the_pages_and_rows_of_a_loader_have_ids_of_their_own() -> None:
    class Loaded:
        id = None

        def __init__(self, **metadata: object) -> None:
            self.page_content, self.metadata = "text", metadata

    given = [
        Loaded(source="a.pdf", page=0),
        Loaded(source="a.pdf", page=1, page_label="2"),
        Loaded(source="b.csv", row=7),
        Loaded(source="c.txt", page=None),
        Loaded(source="c.txt", page=True),
        Loaded(source="d.pdf", page=3, doc_id="chosen"),
    ]
    found = [item.doc_id for item in DocumentsSource(given).items()]
    assert found == ["a.pdf#page=0", "a.pdf#page=1", "b.csv#row=7", "c.txt", "c.txt", "chosen"]


class Pydantic(LlamaDocument):
    """As those of LlamaIndex, which know whether their id was given."""

    @property
    def model_fields_set(self) -> set[str]:
        return {"text", "metadata"}


def test_a_made_up_id_gives_way_to_the_file_with_its_page_row_or_number() -> None:
    given = [
        Pydantic("x", {"file_path": "a.pdf", "page_label": "iv"}),
        Pydantic("x", {"file_path": "a.pdf", "page_label": "1"}),
        Pydantic("x", {"file_path": "a.pdf", "page_label": "1"}),
        Pydantic("x", {"file_path": "b.csv", "row": 7}),
        Pydantic("x", {"file_path": "c.md"}),
        Pydantic("x", {"file_path": "c.md"}),
        Pydantic("x", {"file_path": "c.md"}),
        Pydantic("x", {"file_path": ""}, id_="made up"),
        LlamaDocument("x", {"file_path": "d.md"}, id_="given"),
    ]
    source = DocumentsSource(given)
    found = ["a.pdf#page=iv", "a.pdf#page=1", "a.pdf#page=1#part=1", "b.csv#row=7"]
    found += ["c.md", "c.md#part=1", "c.md#part=2", "made up", "given"]
    assert [item.doc_id for item in source.items()] == [item.doc_id for item in source.items()] == found


def test_llamaindex_itself_gives_every_part_of_a_file_the_same_id_in_every_run(tmp_path: Path) -> None:
    llama = pytest.importorskip("llama_index.core")
    reader = pytest.importorskip("llama_index.core.readers.base").BaseReader

    class Paged(reader):  # type: ignore[misc, valid-type]
        def load_data(self, file: Path, extra_info: dict[str, Any] | None = None, fs: Any = None) -> list[Any]:
            texts = enumerate(Path(file).read_text().split("---"), 1)
            return [
                llama.Document(text=text, metadata={"page_label": str(at), **(extra_info or {})}) for at, text in texts
            ]

    (tmp_path / "a.txt").write_text("one file")
    (tmp_path / "b.pages").write_text("first---second")

    def ids(**options: Any) -> list[str]:
        loaded = llama.SimpleDirectoryReader(str(tmp_path), file_extractor={".pages": Paged()}, **options).load_data()
        return [item.load().doc_id.removeprefix(f"{tmp_path}/") for item in DocumentsSource(loaded).items()]

    assert ids() == ids() == ["a.txt", "b.pages#page=1", "b.pages#page=2"]
    assert ids(filename_as_id=True) == ["a.txt", "b.pages_part_0", "b.pages_part_1"]
    given = [llama.Document(text="x", doc_id="mine", metadata={"file_path": "a.txt"}), llama.Document(text="x")]
    mine, made_up = DocumentsSource(given).items()
    assert mine.doc_id == "mine"
    assert made_up.doc_id == given[1].doc_id
