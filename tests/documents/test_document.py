"""Documents: what is refused and how it is told, and what is stored of the rest."""

from __future__ import annotations

import copy
import pickle
import unicodedata
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragfence.core.canonical import canonical_json
from ragfence.core.document import CheckedDocument, Document, DocumentLimits, checked, normalised
from ragfence.errors import DocumentInvalid, ValidationError

LIMITS = DocumentLimits(allow_empty_text=True)
SMALL = DocumentLimits(max_text_bytes=10, max_metadata_bytes=20, allow_empty_text=True)

often = settings(max_examples=200, deadline=None)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60) | st.text(
    "ab é e\u0301\u0323 \r\n אב 한글 \u1112\u1161\u11ab 👩🏽‍💻", max_size=60
)
plain_values = st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=20)
values = st.recursive(
    plain_values | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def refused(document: Any, limits: DocumentLimits = LIMITS, position: int | None = None) -> DocumentInvalid:
    with pytest.raises(DocumentInvalid) as caught:
        checked(document, limits, position=position)
    assert caught.value.hint
    assert len(caught.value.message) < 400
    return caught.value


def test_a_document_needs_no_more_than_an_id_and_a_text() -> None:
    document = Document("a", "text")
    assert document == Document(
        doc_id="a", text="text", metadata={}, source_url="", sequence=None, content_type="text/plain"
    )
    assert checked(document, LIMITS) == CheckedDocument("a", "text", b"text", b"{}", "", None, "text/plain")


def test_documents_are_compared_by_value_and_cannot_be_changed() -> None:
    document = Document("a", "text", {"n": 1})
    assert document == Document("a", "text", {"n": 1}) != Document("a", "text", {"n": 2})
    with pytest.raises(AttributeError):
        document.text = "other"  # type: ignore[misc]


def test_documents_without_metadata_do_not_share_what_somebody_writes_into_it() -> None:
    metadata: Any = Document("a", "text").metadata
    writes: list[Callable[[], object]] = [
        lambda: metadata.__setitem__("x", 1),
        lambda: metadata.update(x=1),
        lambda: metadata.setdefault("x", 1),
        lambda: metadata.__ior__({"x": 1}),
    ]
    for write in writes:
        with pytest.raises(TypeError, match="pass metadata="):
            write()
    assert Document("b", "text").metadata == {}


@pytest.mark.parametrize("document", [Document("a", "b"), Document("a", "b", {"n": [1]}, "file:x", 3, "text/html")])
def test_documents_cross_process_boundaries(document: Document) -> None:
    assert pickle.loads(pickle.dumps(document)) == document  # noqa: S301  # our own bytes
    assert copy.deepcopy(document) == document


def test_what_is_stored_is_normalised() -> None:
    stored = checked(
        Document("Cafe\u0301", "e\u0301\r\nb\rc", {"e\u0301": "e\u0301"}, "http://e\u0301", 7, "text/markdown"), LIMITS
    )
    assert stored == CheckedDocument(
        doc_id="Café",
        text="é\nb\nc",
        text_bytes="é\nb\nc".encode(),
        metadata='{"é":"é"}'.encode(),
        source_url="http://é",
        sequence=7,
        content_type="text/markdown",
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Café", "Cafe\u0301"),
        ("a\r\nb", "a\nb"),
        ("a\rb", "a\nb"),
        ("a\r\r\nb", "a\n\nb"),
        ("한", "\u1112\u1161\u11ab"),
        ("e\u0301\r\n", "é\n"),
    ],
)
def test_twins_of_a_text_are_one_text(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)
    assert checked(Document("a", one), LIMITS) == checked(Document("a", other), LIMITS)


@pytest.mark.parametrize(
    "text", ["", " ", "\n", "👩🏽‍💻 שלום العربية", "\x07\x1b[0m", "\ufeffbom", "\u2028", "🇩🇪" * 100]
)
def test_unusual_texts_are_documents_too(text: str) -> None:
    assert checked(Document("a", text), LIMITS).text == text


def test_an_empty_text_is_a_document() -> None:
    assert checked(Document("a", ""), LIMITS).text_bytes == b""


@often
@given(texts)
def test_normalising_twice_changes_nothing_more(text: str) -> None:
    """normalised() is NFC without CR, and a fixed point; the stored bytes are its UTF-8."""
    normal = normalised(text)
    assert normal == unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    assert normalised(normal) == normal
    stored = checked(Document("a", text), LIMITS)
    assert (stored.text, stored.text_bytes) == (normal, normal.encode())


@often
@given(st.dictionaries(st.text('abc"\\/\x1f é', max_size=6), values, max_size=6))
def test_metadata_is_stored_as_canonical_json(metadata: dict[str, Any]) -> None:
    """Whatever way metadata takes, its bytes are those of canonical_json, or both refuse it."""
    try:
        expected = canonical_json(metadata)
    except ValidationError:
        assert "metadata is not JSON" in refused(Document("a", "", metadata)).message
    else:
        assert checked(Document("a", "", metadata), LIMITS).metadata == expected


def test_any_mapping_is_metadata() -> None:
    class Squares(Mapping[str, int]):
        def __getitem__(self, name: str) -> int:
            return len(name) ** 2

        def __iter__(self) -> Any:
            return iter(("aa", "b"))

        def __len__(self) -> int:
            return 2

    assert checked(Document("a", "", Squares()), LIMITS).metadata == b'{"aa":4,"b":1}'
    assert checked(Document("a", "", MappingProxyType({"n": 1})), LIMITS).metadata == b'{"n":1}'
    assert checked(Document("a", "", MappingProxyType({})), LIMITS).metadata == b"{}"


@pytest.mark.parametrize(
    ("doc_id", "told"),
    [
        ("", "doc_id is empty"),
        (None, "doc_id must be text, got NoneType"),
        (7, "doc_id must be text, got int"),
        (b"a", "doc_id must be text, got bytes"),
        ("a\nb", r"doc_id holds the control character '\n'"),
        ("a\0", r"doc_id holds the control character '\x00'"),
        ("a\x85", r"doc_id holds the control character '\x85'"),
        ("a\ud800", r"doc_id holds the control character '\ud800'"),
        ("a" * 1025, "doc_id is longer than 1024 bytes"),
        ("é" * 513, "doc_id is longer than 1024 bytes"),
    ],
)
def test_an_unusable_id_is_told_by_the_position_of_its_document(doc_id: Any, told: str) -> None:
    error = refused(Document(doc_id, "text"), position=41)
    assert error.message.startswith("the document at position 41: its ")
    assert told in error.message
    assert error.doc_id == (doc_id if isinstance(doc_id, str) else None)
    assert refused(Document(doc_id, "text")).message.startswith("a document: its ")


@pytest.mark.parametrize("doc_id", ["a" * 1024, "é" * 512, "e\u0301" * 512, "docs/Ünder ground.md", "https://x/?a=1"])
def test_ids_up_to_the_limit_are_taken(doc_id: str) -> None:
    assert checked(Document(doc_id, ""), LIMITS).doc_id == unicodedata.normalize("NFC", doc_id)


@pytest.mark.parametrize(
    ("fields", "told", "hint"),
    [
        ({"text": None}, "text must be text, got NoneType", "leave the document out"),
        ({"text": b"abc"}, "text must be text, got bytes", "decode"),
        ({"text": "ab\0c"}, "text holds NUL at character 2", "binary"),
        ({"text": "é\r\n\0"}, "text holds NUL at character 3", "binary"),
        ({"text": "abc\udcff"}, "text holds a lone surrogate at character 3", "surrogateescape"),
        ({"text": "e\u0301e\u0301\r\n\ud83d"}, "text holds a lone surrogate at character 6", "UTF-8"),
        ({"metadata": None}, "metadata must be a mapping, got NoneType", "dict"),
        ({"metadata": []}, "metadata must be a mapping, got list", "dict"),
        ({"metadata": "{}"}, "metadata must be a mapping, got str", "dict"),
        ({"metadata": {"n": float("nan")}}, "metadata is not JSON: $.n: nan", "numbers"),
        ({"metadata": {"n": 2**53}}, "metadata is not JSON: $.n: an integer beyond", "text"),
        ({"metadata": {1: "x"}}, "metadata is not JSON: $: a key of type int", "text"),
        ({"metadata": {"a": {"b": object()}}}, "metadata is not JSON: $.a.b: object is not JSON", "dates and paths"),
        ({"metadata": {"e\u0301": 1, "é": 2}}, "metadata is not JSON: $: the key", "text"),
        ({"metadata": {"a": "\ud800"}}, "metadata is not JSON: $.a: a lone surrogate", "text"),
        ({"metadata": {"a": "x" * 2**16}}, "metadata has 65,544 bytes as JSON, and 65,536 are allowed", "filters"),
        ({"source_url": None}, "source_url must be text, got NoneType", "str(source_url)"),
        ({"source_url": "http://x/\n"}, r"source_url holds the control character '\n'", "control characters"),
        ({"source_url": "http://x/" + "a" * 4096}, "source_url is longer than 4096 bytes", "leave source_url out"),
        ({"sequence": "1"}, "sequence must be an integer, got str", "int"),
        ({"sequence": True}, "sequence must be an integer, got bool", "int"),
        ({"sequence": 1.0}, "sequence must be an integer, got float", "int"),
        ({"sequence": 2**63}, "sequence does not fit into 64 bits: it takes 65", "version"),
        ({"sequence": -(2**99_999)}, "sequence does not fit into 64 bits: it takes 100001", "version"),
        ({"content_type": None}, "content_type must be text, got NoneType", "str(content_type)"),
        ({"content_type": "text/" + "x" * 251}, "content_type is longer than 255 bytes", "leave content_type out"),
        ({"content_type": "a\tb"}, r"content_type holds the control character '\t'", "control characters"),
    ],
)
def test_what_is_wrong_with_a_document_is_told_by_its_id(fields: dict[str, Any], told: str, hint: str) -> None:
    error = refused(Document(**{"doc_id": "docs/a.md", "text": "text", **fields}), position=3)
    assert error.message.startswith("document 'docs/a.md': its ")
    assert told in error.message
    assert hint in error.hint
    assert (error.doc_id, error.code) == ("docs/a.md", "VALIDATION.document")


def test_a_column_of_a_data_frame_as_metadata_is_told_like_any_other_thing() -> None:
    class Column:
        def __eq__(self, other: object) -> bool:
            raise ValueError("the truth value is ambiguous")

        def __bool__(self) -> bool:
            raise ValueError("the truth value is ambiguous")

        __hash__ = None  # type: ignore[assignment]

    columns: Any = Column()
    assert "must be a mapping, got Column" in refused(Document("a", "", columns)).message


@pytest.mark.parametrize("thing", [None, {"doc_id": "a", "text": "b"}, ("a", "b", {}, "", None, "text/plain"), "text"])
def test_what_is_no_document_is_refused(thing: object) -> None:
    assert "at position 2" in refused(thing, position=2).message
    assert "ragfence.Document" in refused(thing).hint


def test_a_long_id_is_shortened_in_messages_and_whole_on_the_error() -> None:
    error = refused(Document("a" * 1000, "\0"))
    assert f"document '{'a' * 77}...'" in error.message
    assert error.doc_id == "a" * 1000


@pytest.mark.parametrize("sequence", [0, -1, 2**63 - 1, -(2**63)])
def test_sequences_of_64_bits_are_taken(sequence: int) -> None:
    assert checked(Document("a", "", sequence=sequence), LIMITS).sequence == sequence


@pytest.mark.parametrize("text", ["x" * 10, "ééééé", "e\u0301" * 5, "漢字字a", "\r\n" * 10])
def test_the_size_of_a_text_is_that_of_its_normalised_bytes(text: str) -> None:
    assert len(checked(Document("a", text), SMALL).text_bytes) == 10
    assert "10 are allowed" in refused(Document("a", text + "y"), SMALL).message


@pytest.mark.parametrize("text", ["y" * 21, "é" * 21, "\r\n" * 11, "\r\n" * 1000])
def test_a_text_far_above_the_limit_is_refused(text: str) -> None:
    error = refused(Document("a", text), SMALL)
    assert "10 are allowed" in error.message
    assert "max_text_bytes" in error.hint


def test_metadata_up_to_the_limit_is_taken() -> None:
    assert len(checked(Document("a", "", {"a": "x" * 12}), SMALL).metadata) == 20
    assert "has 21 bytes" in refused(Document("a", "", {"a": "x" * 13}), SMALL).message
