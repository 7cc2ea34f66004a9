"""Chunkers whose work is easy to follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragfence.documents.chunking.chunker import Piece


@dataclass
class Paragraphs:
    """A piece for every paragraph. Keeps what it was given to cut."""

    version: str = "1"
    name: str = "paragraphs"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)

    def split(self, text: str) -> Sequence[Piece]:
        self.cut.append(text)
        pieces, at = [], 0
        for paragraph in text.split("\n\n"):
            if paragraph.strip():
                pieces.append(Piece(at, at + len(paragraph), ""))
            at += len(paragraph) + 2
        return pieces


@dataclass
class Failing(Paragraphs):
    """Fails for texts that say so."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self._error = error or RuntimeError("the chunker cannot read this")

    def split(self, text: str) -> Sequence[Piece]:
        if "fail" in text:
            raise self._error
        return super().split(text)
