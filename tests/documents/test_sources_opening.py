"""What `source_of` makes of what it is given, and that nothing heavy is loaded for it."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragfence.core.document import Document
from ragfence.documents.sources import (
    DocumentsSource,
    FileSource,
    FolderSource,
    Item,
    JsonlSource,
    S3Source,
    Source,
    source_of,
)
from ragfence.documents.sources.s3 import S3Place, parse_url
from ragfence.errors import ValidationError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.md").write_text("hello")
    (tmp_path / "b.jsonl").write_text('{"id": "b", "text": "hello"}\n')
    (tmp_path / "c.JSONL.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "d.pdf").write_bytes(b"%PDF")
    (tmp_path / "s3:").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("path", "kind", "scheme"),
    [
        ("s3:", FolderSource, "folder"),
        ("a.md", FileSource, "file"),
        ("b.jsonl", JsonlSource, "jsonl"),
        ("c.JSONL.gz", JsonlSource, "jsonl"),
    ],
)
def test_a_path_is_a_folder_a_file_or_lines(folder: Path, path: str, kind: type, scheme: str) -> None:
    for given in (folder / path, str(folder / path)):
        source = source_of(given)
        assert type(source) is kind
        assert isinstance(source, Source)
        assert source.name == f"{scheme}:{folder}/{path}"
    assert source_of(folder / path, name="mine").name == f"{scheme}:mine"


def test_an_s3_url_is_a_prefix() -> None:
    source = source_of("s3://bucket/some/prefix/?endpoint_url=http://127.0.0.1:1&region=eu-west-1")
    assert isinstance(source, S3Source)
    assert source.name == "s3://bucket/some/prefix"
    assert source_of("s3://bucket").name == "s3://bucket"
    assert source_of("s3://bucket", name="mine").name == "mine"


def test_an_iterable_is_documents_and_a_source_is_itself() -> None:
    class Own:
        name = "own"

        def items(self) -> Iterator[Item]:
            return iter(())

    own = Own()
    assert source_of(own) is own
    for given in ([Document("a", "x")], (Document("a", "x"),), iter([Document("a", "x")])):
        source = source_of(given, name="batch")
        assert isinstance(source, DocumentsSource)
        assert source.name == "batch"
        assert [item.doc_id for item in source.items()] == ["a"]


@pytest.mark.parametrize(
    ("thing", "told"),
    [
        (5, "from int"),
        (None, "from NoneType"),
        (b"docs", "from bytes"),
        ({"a": "x"}, "from dict"),
        ("https://user:secret@example.com/a.md", "from https:// URLs"),
        ("", "'' is not a valid path"),
        ("nowhere/at/all", "'nowhere/at/all' does not exist"),
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("s3://bucket?colour=red", "unknown colour"),
        ("s3://key:secret@bucket", "must not hold credentials"),
        ("s3://bucket?endpoint_url=http://key:secret@host", "credentials do not belong"),
    ],
)
def test_anything_else_is_refused_and_what_is_known_is_said(thing: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told) as error:
        source_of(thing)
    assert error.value.hint
    assert "secret" not in str(error.value)


def test_a_file_nobody_can_read_is_refused_and_what_is_known_is_said(folder: Path) -> None:
    with pytest.raises(ValidationError, match=r"'d\.pdf'") as error:
        source_of(folder / "d.pdf")
    assert ".htm, .html, .markdown, .md, .txt" in error.value.hint


def test_a_single_document_is_no_source_but_easily_made_one() -> None:
    with pytest.raises(ValidationError, match="a document is not a source") as error:
        source_of(Document("a", "x"))
    assert "[document]" in error.value.hint


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://b", S3Place("b", "")),
        ("s3://b/", S3Place("b", "")),
        ("s3://b/p/q/", S3Place("b", "p/q")),
        ("s3://b/50%25 off#1", S3Place("b", "50%25 off#1")),
        ("s3://b/p?region=", S3Place("b", "p")),
        ("s3://b/p?endpoint_url=http%3A%2F%2Fh%3A9&region=r", S3Place("b", "p", "http://h:9", "r")),
    ],
)
def test_a_url_names_bucket_prefix_endpoint_and_region(url: str, place: S3Place) -> None:
    assert parse_url(url) == place


def test_sources_load_no_backend_until_one_is_used() -> None:
    code = (
        "import sys\n"
        "from ragfence.documents import sources\n"
        "sources.source_of('s3://bucket/prefix')\n"
        "heavy = {'boto3', 'botocore', 'dagster', 'lancedb', 'pyarrow', 'redis'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
