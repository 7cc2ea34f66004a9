"""JSON Lines as a source: every line that is a document, and every way in which one is not."""

from __future__ import annotations

import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragfence.core.document import Document
from ragfence.documents.sources import Item, JsonlSource, source_of
from ragfence.errors import DocumentInvalid, RagfenceError, ValidationError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "docs.jsonl"


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def loaded(items: list[Item]) -> list[tuple[str, str]]:
    """(doc_id, text or what is wrong)"""
    found = []
    for item in items:
        try:
            found.append((item.doc_id, item.load().text))
        except DocumentInvalid as error:
            found.append((item.doc_id, error.message))
    return found


def test_a_line_is_a_document_with_all_its_fields(file: Path) -> None:
    file.write_bytes(
        line(
            doc_id="a",
            text="hello",
            metadata={"lang": "en"},
            source_url="https://example.com/a",
            sequence=3,
            content_type="text/markdown",
            other="passed over",
        )
    )
    (item,) = JsonlSource(file).items()
    assert (item.doc_id, item.state) == ("a", "")
    assert item.load() == Document("a", "hello", {"lang": "en"}, "https://example.com/a", 3, "text/markdown")


def test_the_names_that_others_use_are_known(file: Path) -> None:
    file.write_bytes(
        line(id="a", content="one", url="https://example.com/a")
        + line(id=17, page_content="two", metadata=None)
        + line(doc_id=None, id="c", text="three")
        + line(doc_id="d", id="not this", text="", content="nor this")
    )
    a, b, c, d = (item.load() for item in JsonlSource(file).items())
    assert a == Document("a", "one", source_url="https://example.com/a")
    assert b == Document("17", "two")
    assert c == Document("c", "three")
    assert d == Document("d", "")


def test_other_names_can_be_given(file: Path) -> None:
    file.write_bytes(line(sku="a", abstract="short", id="x") + line(sku="b", body="long", abstract="short"))
    source = JsonlSource(file, fields={"doc_id": "sku", "text": ["body", "abstract"]})
    assert loaded(list(source.items())) == [("a", "short"), ("b", "long")]
    with pytest.raises(ValidationError, match="a document has no colour"):
        JsonlSource(file, fields={"colour": "c"})


def test_a_sequence_may_have_all_of_64_bits(file: Path) -> None:
    file.write_bytes(line(id="a", text="", sequence=2**63 - 1))
    (item,) = JsonlSource(file).items()
    assert item.load().sequence == 2**63 - 1


def test_a_line_that_is_no_document_is_told_by_its_number_and_the_others_are_read(file: Path) -> None:
    lines = [
        line(id="a", text="one"),
        b"{not json}\n",
        b'["a", "list"]\n',
        line(text="no id"),
        line(id="", text="empty id"),
        line(id=True, text="no id either"),
        line(id=1.5, text="nor this"),
        b'{"id": "\\ud800", "text": "half a character"}\n',
        b'{"id": "b", "text": "x", "id": "c"}\n',
        b'{"id": "b", "text": "x", "metadata": {"k": 1, "k": 2}}\n',
        b'{"id": "b", "text": "x", "metadata": {"k": NaN}}\n',
        b'{"id": "b", "text": "caf\xe9"}\n',
        b"[" * 100_000 + b"\n",
        b'{"id": "b", "sequence": ' + b"9" * 5000 + b"}\n",
        b"\n",
        b"  \t\r\n",
        line(id="z", text="last"),
    ]
    file.write_bytes(b"".join(lines))
    items = list(JsonlSource(file).items())
    found = loaded(items)
    assert found[0] == ("a", "one")
    assert found[-1] == ("z", "last")
    assert [doc_id for doc_id, _ in found[1:-1]] == [f"docs.jsonl:{number}" for number in range(2, 15)]
    told = [message.removeprefix("line ").removeprefix(str(at)) for at, (_, message) in enumerate(found[1:-1], 2)]
    assert [message.removeprefix(" of docs.jsonl ")[:40] for message in told] == [
        "is not valid JSON: Expecting property na",
        "is not a JSON object",
        *["has no id (text or a whole number) in do"] * 5,
        "is not valid JSON: the key 'id' is dupli",
        "is not valid JSON: the key 'k' is duplic",
        "is not valid JSON: NaN is not a JSON num",
        "is not UTF-8 at byte 24",
        "is nested too deeply",
        "is not valid JSON: Exceeds the limit (43",
    ]
    for item in items[1:-1]:
        with pytest.raises(DocumentInvalid) as error:
            item.load()
        assert error.value.doc_id is None  # whose line it was is not known


def test_a_line_with_an_id_and_without_a_text_is_told_by_both(file: Path) -> None:
    file.write_bytes(line(id="a") + line(id="b", text=5))
    for number, item in enumerate(JsonlSource(file).items(), 1):
        doc_id = "ab"[number - 1]
        assert item.doc_id == doc_id
        with pytest.raises(DocumentInvalid, match=rf"{doc_id} \(line {number} of docs.jsonl\) has no text") as error:
            item.load()
        assert error.value.doc_id == doc_id


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_a_line_above_the_limit_is_passed_over_and_one_at_the_limit_is_not(file: Path, end: bytes) -> None:
    fits, too_long = line(id="a", text="x" * 60)[:-1], line(id="b", text="x" * 61)[:-1]
    file.write_bytes(fits + b"\n" + too_long + b"\r\n" + too_long * 3000 + b"\n" + fits + end)
    items = list(JsonlSource(file, limit_bytes=len(fits)).items())
    assert loaded(items) == [
        ("a", "x" * 60),
        ("docs.jsonl:2", f"line 2 of docs.jsonl is longer than {len(fits)} bytes"),
        ("docs.jsonl:3", f"line 3 of docs.jsonl is longer than {len(fits)} bytes"),
        ("a", "x" * 60),
    ]


def test_a_line_above_the_limit_at_the_end_of_the_file_is_told_as_well(file: Path) -> None:
    file.write_bytes(b"x" * 3_000_000)
    (item,) = JsonlSource(file, limit_bytes=1000).items()
    with pytest.raises(DocumentInvalid, match=r"line 1 of docs\.jsonl is longer than 1,000 bytes"):
        item.load()


def test_lines_are_read_only_when_they_are_wanted(file: Path) -> None:
    with open(file, "wb", buffering=0) as writer:
        writer.write(line(id="a", text="one"))
        items = JsonlSource(file).items()
        assert next(items).doc_id == "a"
        writer.write(line(id="b", text="two"))
        assert next(items).doc_id == "b"
    assert list(items) == []


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(file: Path) -> None:
    file.write_bytes(b'\xef\xbb\xbf{"id": "a", "text": "one"}\r\n{"id": "b", "text": "a\xe2\x80\xa8b"}\r\n')
    assert loaded(list(JsonlSource(file).items())) == [("a", "one"), ("b", "a\u2028b")]


def test_a_gzipped_file_is_read_as_well(tmp_path: Path) -> None:
    file = tmp_path / "docs.jsonl.gz"
    file.write_bytes(gzip.compress(line(id="a", text="one") + line(id="b", text="two")))
    source = JsonlSource(file)
    assert source.name.endswith("/docs.jsonl.gz")
    assert loaded(list(source.items())) == [("a", "one"), ("b", "two")]


def test_a_packed_file_is_known_by_its_name_in_any_case(tmp_path: Path) -> None:
    file = tmp_path / "A.JSONL.GZ"
    file.write_bytes(gzip.compress(line(id="a", text="one")))
    assert loaded(list(source_of(file).items())) == [("a", "one")]


@pytest.mark.parametrize("damage", ["cut", "garbled", "no gzip"])
def test_a_damaged_gzip_is_an_error_and_not_the_end_of_the_file(tmp_path: Path, damage: str) -> None:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as whole:
        for number in range(20_000):
            whole.write(line(id=number, text=str(number * number)))
    data = bytearray(packed.getvalue())
    if damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "garbled":
        data[len(data) // 2 : len(data) // 2 + 400] = b"\xff" * 400
    else:
        data[:2] = b"no"
    file = tmp_path / "docs.jsonl.gz"
    file.write_bytes(data)
    with pytest.raises(ValidationError, match=r"docs.jsonl.gz is damaged after line \d+"):
        list(JsonlSource(file).items())


def test_a_file_that_is_not_there_is_an_error_and_not_an_empty_source(file: Path) -> None:
    with pytest.raises(ValidationError, match=r"jsonl:/.*docs\.jsonl: cannot read .*No such file"):
        next(JsonlSource(file).items())
    file.mkdir()
    with pytest.raises(RagfenceError, match="Is a directory"):
        next(JsonlSource(file).items())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_pipe_or_a_device_is_refused_and_never_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / f"zero-{name}").symlink_to("/dev/zero")
    for file in (tmp_path / name, tmp_path / f"zero-{name}"):
        with pytest.raises(
            ValidationError, match=rf"{name} is (a named pipe|a device|a socket), not a regular file"
        ) as told:
            next(source_of(file).items())
        assert "write the lines to a file" in told.value.hint


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(line(doc_id="a", text="hello"))
    (tmp_path / "a.jsonl").symlink_to("real")
    assert loaded(list(JsonlSource(tmp_path / "a.jsonl").items())) == [("a", "hello")]


def test_the_name_is_the_path_of_the_file_unless_it_is_given(file: Path) -> None:
    assert JsonlSource(file).name == f"jsonl:{file}"
    assert JsonlSource(file, name="crawl").name == "jsonl:crawl"


@settings(max_examples=100, deadline=None)
@given(
    documents=st.lists(
        st.tuples(st.text(min_size=1), st.text(), st.dictionaries(st.text(), st.text() | st.integers() | st.none()))
    ),
    ascii_only=st.booleans(),
)
def test_what_was_written_is_read(
    documents: list[tuple[str, str, dict[str, Any]]], ascii_only: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("jsonl") / "docs.jsonl"
    with file.open("w", encoding="utf-8", newline="\n") as out:
        for doc_id, text, metadata in documents:
            fields = {"doc_id": doc_id, "text": text, "metadata": metadata}
            out.write(json.dumps(fields, ensure_ascii=ascii_only) + "\n")
    read = [item.load() for item in JsonlSource(file).items()]
    assert read == [Document(*fields) for fields in documents]
