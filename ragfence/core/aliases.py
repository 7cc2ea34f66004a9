"""What callers pass to aliases and get from a search behind one: values that the library and its HTTP client share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal


class Unset(Enum):
    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET
"""of `expect`: wherever the alias is. None is something else: there must be no such alias"""
ExpectedTarget = str | None | Literal[Unset.UNSET]


@dataclass(frozen=True, slots=True)
class Hit:
    """A snippet, and where it is from: `document_text[start:end]`, in which section of which document and build."""

    snippet_id: str
    doc_id: str
    section_id: str
    ordinal: int
    start: int
    end: int
    tokens: int
    text: str
    source_url: str
    metadata: dict[str, Any]
    score: float
    """higher is nearer"""
    index_hash: str
    generation: int
    """of the catalog"""
