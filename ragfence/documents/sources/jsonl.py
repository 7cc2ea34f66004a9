"""Documents in a JSON Lines file: one object per line, plain or gzipped."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, BinaryIO, NoReturn
from unicodedata import normalize

from ragfence.core.document import Document
from ragfence.documents.readers.content import as_doc_id
from ragfence.documents.sources.folder import printable, source_error
from ragfence.documents.sources.regular_files import NotRegularFileError, open_regular_file
from ragfence.documents.sources.source import Item
from ragfence.errors import DocumentInvalid, Hint, ValidationError

FIELDS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "doc_id": ("doc_id", "id"),
        "text": ("text", "content", "page_content"),
        "metadata": ("metadata",),
        "source_url": ("source_url", "url"),
        "sequence": ("sequence",),
        "content_type": ("content_type",),
    }
)
"""The names of a field of a document in a line; the first that exists and is not null counts."""

LINE_BYTES = 32 * 2**20
_SKIP_BYTES = 2**20


class JsonlSource:
    """One document per line. Text is taken as it is, whatever its content_type; other fields are ignored.

    `fields` gives other names to look under: `fields={"doc_id": "sku", "text": ["body", "abstract"]}`. A number as an
    id becomes text. A line that is not a document (no JSON, no id, a key twice, longer than `limit_bytes`) is an item
    `<file>:<line>` whose load raises the error; the lines after it are read. A line has no state: only reading it shows
    whether it changed.
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        *,
        name: str | None = None,
        fields: Mapping[str, str | Sequence[str]] | None = None,
        limit_bytes: int = LINE_BYTES,
    ) -> None:
        self._path = os.path.abspath(file)
        self._file = printable(os.path.basename(self._path))
        self._name = f"jsonl:{name or normalize('NFC', printable(self._path))}"
        self.former_name = "" if name else f"jsonl:{self._file}"
        self._fields = _fields(fields or {})
        self._limit_bytes = limit_bytes

    @property
    def name(self) -> str:
        return self._name

    def items(self) -> Iterator[Item]:
        number = 0
        try:
            with self._opened() as lines:
                # One byte more than the limit, and the line end, so that a longer line is recognised.
                while line := lines.readline(self._limit_bytes + 2):
                    number += 1
                    if len(line.rstrip(b"\r\n")) > self._limit_bytes:
                        _skip_rest(lines, line)
                        yield self._bad(number, f"is longer than {self._limit_bytes:,} bytes", "raise limit_bytes")
                    elif not line.isspace():
                        yield self._item(number, line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as damaged:
            raise ValidationError(
                f"{self._file} is damaged after line {number}: {damaged}",
                hint="copy it again and repeat the sync: documents that are known by then are not ingested twice",
            ) from damaged
        except NotRegularFileError as error:
            raise ValidationError(
                f"{self._name}: {printable(self._path)} is {error.kind}, not a regular file",
                hint="write the lines to a file and read that: pipes and devices are not read",
            ) from error
        except OSError as error:
            raise source_error(error, self._name, self._path) from error

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO | gzip.GzipFile]:
        # Opening a named pipe could wait forever, and its data could not be read a second time.
        with open_regular_file(self._path, follow_links=True) as file:
            if self._path.lower().endswith(".gz"):
                with gzip.GzipFile(fileobj=file, mode="rb") as unpacked:
                    yield unpacked
            else:
                yield file

    def _item(self, number: int, line: bytes) -> Item:
        try:
            value = _read(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
        except UnicodeDecodeError as broken:
            return self._bad(number, f"is not UTF-8 at byte {broken.start}", "save the file as UTF-8")
        except RecursionError:
            return self._bad(number, "is nested too deeply", "flatten it")
        except ValueError as broken:
            return self._bad(number, f"is not valid JSON: {broken}", "write one JSON object per line")
        if not isinstance(value, dict):
            return self._bad(number, "is not a JSON object", 'a line looks like {"doc_id": "a", "text": "..."}')
        doc_id = as_doc_id(self._found(value, "doc_id"))
        if doc_id is None:
            names = " or ".join(self._fields["doc_id"])
            return self._bad(number, f"has no id (text or a whole number) in {names}", _fields_hint("doc_id"))
        return Item(doc_id, "", partial(self._load, number, doc_id, value))

    def _load(self, number: int, doc_id: str, value: dict[str, Any]) -> Document:
        text = self._found(value, "text")
        if not isinstance(text, str):
            names = " or ".join(self._fields["text"])
            raise DocumentInvalid(
                f"{doc_id} (line {number} of {self._file}) has no text in {names}",
                hint=_fields_hint("text"),
                doc_id=doc_id,
            )
        rest = {name: self._found(value, name) for name in ("metadata", "source_url", "sequence", "content_type")}
        return Document(doc_id, text, **{name: given for name, given in rest.items() if given is not None})

    def _found(self, value: dict[str, Any], field: str) -> Any:
        return next((value[name] for name in self._fields[field] if value.get(name) is not None), None)

    def _bad(self, number: int, problem: str, hint: str) -> Item:
        def load() -> NoReturn:
            raise DocumentInvalid(f"line {number} of {self._file} {problem}", hint=hint)

        return Item(f"{self._file}:{number}", "", load)


def _fields(given: Mapping[str, str | Sequence[str]]) -> dict[str, Sequence[str]]:
    unknown = set(given) - set(FIELDS)
    if unknown:
        raise ValidationError(
            f"a document has no {', '.join(sorted(unknown))}", hint=f"fields may name {', '.join(FIELDS)}"
        )
    return {**FIELDS, **{field: (names,) if isinstance(names, str) else tuple(names) for field, names in given.items()}}


def _skip_rest(lines: BinaryIO | gzip.GzipFile, line: bytes) -> None:
    """Reads to the end of the line and discards it."""
    while line and not line.endswith(b"\n"):
        line = lines.readline(_SKIP_BYTES)


def _read(line: bytes) -> Any:
    return _decoder.decode(line.decode())


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise ValueError(f"the key {twice[:60]!r} is duplicated")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_number)


def _fields_hint(field: str) -> Hint:
    return Hint(
        f'pass fields={{"{field}": ...}}', cli=f'a line looks like {{"doc_id": "a", "text": "..."}}: add "{field}"'
    )
