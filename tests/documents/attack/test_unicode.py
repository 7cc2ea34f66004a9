"""Every row of the table in docs/documents.md, "Text of every kind", as it is stated there."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ragfence import Document
from ragfence.documents.chunking.chunker import MarkdownChunker, Piece, TextChunker
from ragfence.documents.documents import Documents
from ragfence.errors import DocumentInvalid
from tests.documents.attack.places import Place, in_folder, in_memory
from tests.machine.lineages import RedisLineages, SqliteLineages

FAMILY = "👩‍👩‍👧‍👦"
"""seven code points, one character to people"""


@pytest.fixture(params=["memory", "sqlite", "valkey"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "memory":
        made = in_memory()
    elif request.param == "sqlite":
        made = in_folder(SqliteLineages(tmp_path), tmp_path)
    else:
        made = in_folder(RedisLineages(request.getfixturevalue("valkey_server").url), tmp_path)
    yield made
    made.close()


@pytest.fixture
def documents(place: Place) -> Documents:
    return place.writer(chunker=TextChunker(size=40)).documents


def read(documents: Documents, doc_id: str, text: str) -> list[str]:
    """The snippets, each in its place in the normalised text."""
    normal = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    snippets = documents.snippets(doc_id)
    assert [snippet.text for snippet in snippets] == [normal[each.start : each.end] for each in snippets]
    assert "".join("".join(each.text for each in snippets).split()) == "".join(normal.split())
    return [snippet.text for snippet in snippets]


def test_nfc_and_nfd_of_a_text_are_one_content(documents: Documents) -> None:
    composed, decomposed = (
        "Crème brûlée à Zürich.\n\nAmélie.",
        "Cre\u0300me bru\u0302le\u0301e a\u0300 Zu\u0308rich.\n\nAme\u0301lie.",
    )
    assert composed != decomposed
    first = documents.ingest(Document("a", decomposed))
    again = documents.ingest(Document("a", composed))
    assert (again, again.decision) == (first, "duplicate")
    assert read(documents, "a", composed) == composed.split("\n\n") or len(first.snippet_ids) == 1
    assert all(unicodedata.is_normalized("NFC", snippet.text) for snippet in documents.snippets("a"))


def test_nfc_and_nfd_of_a_doc_id_are_one_document(documents: Documents) -> None:
    composed, decomposed = "men\u00fc/caf\u00e9", "menu\u0308/cafe\u0301"
    first = documents.ingest(Document(decomposed, "text"))
    assert documents.ingest(Document(composed, "text")).decision == "duplicate"
    for name in (composed, decomposed):
        described = documents.get(name)
        assert described is not None
        assert (described.doc_id, described.snippet_ids) == (composed, first.snippet_ids)
        assert [snippet.text for snippet in documents.snippets(name)] == ["text"]
    documents.retract(decomposed)
    assert documents.get(composed) is None


def test_nfc_and_nfd_in_metadata_are_one_description(documents: Documents) -> None:
    documents.ingest(Document("a", "text", {"city": "Zu\u0308rich"}))
    again = documents.ingest(Document("a", "text", {"city": "Z\u00fcrich"}))
    assert (again.decision, again.flags.metadata_updated) == ("duplicate", False)


def test_the_order_of_keys_in_metadata_is_no_change(documents: Documents) -> None:
    documents.ingest(Document("a", "text", {"one": 1, "two": {"x": 1, "y": 2}}))
    again = documents.ingest(Document("a", "text", {"two": {"y": 2, "x": 1}, "one": 1}))
    assert (again.decision, again.flags.metadata_updated) == ("duplicate", False)


def test_what_only_looks_alike_is_not_the_same(documents: Documents) -> None:
    """NFC joins what Unicode calls canonically equal, and no more: ligatures, full width letters, homoglyphs stay."""
    documents.ingest(Document("a", "file"))
    for other in ("ﬁle", "ｆile", "fіle", "FILE"):
        assert documents.ingest(Document("a", other)).decision == "new"


@pytest.mark.parametrize("ends", ["\r\n", "\r"])
def test_line_ends_are_no_content_and_offsets_count_lf(documents: Documents, ends: str) -> None:
    text = "First line.\nSecond line.\n\nAnother paragraph, long enough to stand alone.\n"
    first = documents.ingest(Document("a", text.replace("\n", ends)))
    again = documents.ingest(Document("a", text))
    assert (again, again.decision) == (first, "duplicate")
    read(documents, "a", text)
    described = documents.get("a")
    assert described is not None
    assert described.size == len(text)


def test_emoji_are_kept_and_offsets_count_code_points(documents: Documents) -> None:
    text = f"Hello {FAMILY} and 🦊🇨🇭 👍🏽.\n\nA paragraph behind them, as a proof of offsets."
    documents.ingest(Document("a", text))
    assert "".join(read(documents, "a", text)).count(FAMILY) == 1
    last = documents.snippets("a")[-1]
    assert text[last.start : last.end] == last.text
    assert last.end <= len(text) < len(text.encode())


def test_right_to_left_text_is_kept_in_its_logical_order(documents: Documents) -> None:
    text = "שלום עולם, זה מסמך בעברית.\n\nمرحبا بالعالم، هذه وثيقة.\n\nmixed \u202bעברית\u202c and English, with marks."
    first = documents.ingest(Document("מסמך", text))
    read(documents, "מסמך", text)
    assert documents.ingest(Document("מסמך", text)) == first


def test_an_empty_text_is_a_live_document_without_snippets_where_allowed(place: Place, documents: Documents) -> None:
    with pytest.raises(DocumentInvalid, match="its text is empty"):
        documents.ingest(Document("a", ""))
    documents = documents.using(allow_empty_text=True)
    first = documents.ingest(Document("a", "", {"kept": True}))
    assert (first.decision, first.snippet_ids) == ("new", ())
    place.forget()
    described = documents.get("a")
    assert described is not None
    assert (described.size, described.metadata) == (0, {"kept": True})
    assert documents.snippets("a") == []
    assert documents.ingest(Document("a", "", {"kept": True})).decision == "duplicate"
    documents.ingest(Document("a", "no longer empty"))
    back = documents.ingest(Document("a", ""))
    assert (back, back.flags.revived) == (first, True)
    assert documents.snippets("a") == []


@pytest.mark.parametrize("text", [" ", "\n\n\n", "\t \u2003\n"])
def test_white_space_alone_is_a_content_of_its_own_without_snippets(documents: Documents, text: str) -> None:
    with pytest.raises(DocumentInvalid, match="its text is only white space"):
        documents.ingest(Document("a", text))
    documents = documents.using(allow_empty_text=True)
    assert documents.ingest(Document("a", "")).decision == "new"
    receipt = documents.ingest(Document("a", text))
    assert (receipt.decision, receipt.snippet_ids) == ("new", ())


@pytest.mark.parametrize("text", ["half a pair: \ud83d", "padded\0"])
def test_lone_surrogates_and_nul_are_refused_and_spoil_nothing(documents: Documents, text: str) -> None:
    with pytest.raises(DocumentInvalid, match="'bad'"):
        documents.ingest(Document("bad", text))
    refused, taken = documents.ingest_many([Document("bad", text), Document("good", "text")])
    assert refused.failure is not None
    assert refused.failure["code"] == "VALIDATION.document"
    assert taken.decision == "new"
    assert documents.get("bad") is None


class Windows:
    """As many characters as fit, and no look at what they are: what takes time here is ragfence alone."""

    name, version = "windows", "1"
    parameters = {"size": 1000}  # noqa: RUF012

    def split(self, text: str) -> Sequence[Piece]:
        return [Piece(start, min(start + 1000, len(text))) for start in range(0, len(text), 1000)]


BIG = 50 * 2**20


@pytest.fixture(scope="module")
def big_text() -> str:
    line = "Fifty megabytes of prose with an umlaut (ü), line after line. "
    return "".join(f"{number:08d} {line}\n" for number in range(BIG // (len(line.encode()) + 10)))


def test_fifty_megabytes_are_refused_by_default_with_the_limit_named(big_text: str) -> None:
    documents = in_memory().writer().documents
    with pytest.raises(DocumentInvalid, match=r"'big'.*16,777,216") as refused:
        documents.ingest(Document("big", big_text))
    assert "max_text_bytes" in refused.value.hint
    refusal, taken = documents.ingest_many([Document("big", big_text), Document("small", "text")])
    assert (refusal.failed, taken.failed) == (True, False)


def test_fifty_megabytes_are_ingested_whole_where_the_policy_allows_them(big_text: str) -> None:
    place = in_memory()
    documents = place.writer(chunker=Windows(), documents={"max_text_bytes": 64 * 2**20}).documents
    first = documents.ingest(Document("big", big_text))
    assert len(first.snippet_ids) == len(set(first.snippet_ids)) == -(-len(big_text) // 1000)
    assert documents.ingest(Document("big", big_text)).decision == "duplicate"
    snippets = documents.snippets("big")
    assert "".join(snippet.text for snippet in snippets) == big_text
    place.forget()
    edited = documents.ingest(Document("big", big_text[:-5] + "edit\n"))
    assert len(set(edited.snippet_ids) - set(first.snippet_ids)) == 1


def test_markdown_of_any_script_is_cut_by_its_headings(place: Place) -> None:
    text = "# Über uns\n\nErste Zeile.\n\n## 日本語 🗾\n\n本文です。\n\n# שלום\n\nסוף."
    documents = place.writer(chunker=MarkdownChunker(size=30)).documents
    documents.ingest(Document("a", text, content_type="text/markdown"))
    sections = {snippet.section_id for snippet in documents.snippets("a")}
    assert {"Über uns", "Über uns/日本語 🗾", "שלום"} == sections
