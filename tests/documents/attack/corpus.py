"""The documents of the attack, and a chunker that leaves a trace of every chunking where ragfence does not look."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ragfence
from ragfence import Document
from ragfence.documents.chunking.chunker import Piece
from ragfence.testing.memory import MemoryFences, MemoryObjects

TENANT = "chaos"
"""that of the sites on which the attack takes place"""


class Paragraphs:
    """Cuts at blank lines, and appends a line per chunking to the file of the document: see `chunkings`.

    The name of a document and of its revision is its first line. Where the trace goes is no part of the recipe.
    """

    name = "paragraphs"

    def __init__(self, trace: Path | str | None = None, *, version: str = "1") -> None:
        self.version = version
        self.parameters: Mapping[str, Any] = {}
        self._trace = trace

    def split(self, text: str) -> Sequence[Piece]:
        if self._trace is not None:
            name, _, revision = text.partition("\n")[0].partition(" ")
            name = name or "nameless"
            # One write to a file opened for appending: processes that chunk the same document never mix theirs.
            file = os.open(os.path.join(self._trace, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, f"{revision} {os.getpid()}\n".encode())
            finally:
                os.close(file)
        return list(_paragraphs(text))


def _paragraphs(text: str) -> Iterator[Piece]:
    at = 0
    for paragraph in text.split("\n\n"):
        if paragraph.strip():
            yield Piece(at, at + len(paragraph), "")
        at += len(paragraph) + 2


def chunkings(trace: Path) -> Counter[tuple[str, str]]:
    """How often each revision of each document was chunked, over all processes: (doc_id, revision) -> times."""
    counted: Counter[tuple[str, str]] = Counter()
    for file in trace.iterdir():
        for line in file.read_text().splitlines():
            counted[file.name, line.partition(" ")[0]] += 1
    return counted


def doc_id(number: int) -> str:
    return f"doc-{number:04d}"


def text(number: int, revision: str) -> str:
    """Five snippets: three of the revision, two that all revisions of the document have."""
    name = doc_id(number)
    return "\n\n".join(
        [
            f"{name} {revision}",
            f"What never changes in {name}: café, 🦊, שלום.",
            f"{name} as {revision} has it, first of two." * (1 + len(revision) % 2),
            f"The same end of {name}, always.",
            f"{name} as {revision} has it, second of two.",
        ]
    )


@dataclass(frozen=True, slots=True)
class Part:
    """What is sent in one call of `ingest_many`: documents in a row, all in the same revision."""

    first: int
    count: int
    revision: str = "v1"

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)

    def documents(self) -> list[Document]:
        return [document(number, self.revision) for number in self.numbers]


def document(number: int, revision: str = "v1") -> Document:
    return Document(doc_id(number), text(number, revision), {"number": number}, f"https://example.org/{number}")


def parts(count: int, *, batch: int, revision: str = "v1") -> list[Part]:
    return [Part(first, min(batch, count - first), revision) for first in range(0, count, batch)]


@dataclass(frozen=True, slots=True)
class Expected:
    """As if nothing had happened: what one process gets that sends these parts to stores of its own."""

    ids: dict[tuple[str, str], list[str]]
    """(doc_id, revision) -> snippet_ids"""
    digest: str
    """of the corpus after the last part"""


def expected(sent: Sequence[Part]) -> Expected:
    return _expected(tuple(sent))


@cache
def _expected(sent: tuple[Part, ...]) -> Expected:
    fences, objects = MemoryFences(TENANT), MemoryObjects()
    with ragfence.open(fences, objects=objects, tenant=TENANT, policy=ragfence.Policy()) as fence:
        documents = fence.documents.using(chunker=Paragraphs())
        ids: dict[tuple[str, str], list[str]] = {}
        for part in sent:
            for number, receipt in zip(part.numbers, documents.ingest_many(part.documents()), strict=True):
                assert receipt.failure is None
                ids[doc_id(number), part.revision] = list(receipt.snippet_ids)
        return Expected(ids, documents.corpus_digest())
