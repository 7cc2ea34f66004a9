"""Golden queries: what a search must find, whatever the index is made of.

One JSON object a line; empty lines and lines that begin with # are passed over.

    {"query": "how do leases expire?", "doc_id": "guide/leases.md", "k": 5}
    {"query": "what is a fence number?", "snippet_id": ["9f...", "1c..."], "k": 10, "min_recall": 0.5}
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ragfence.core.text_files import UnreadableFile, read_text_file
from ragfence.errors import ValidationError
from ragfence.indexes.backends.backend import Found

DEFAULT_K, MAX_K = 10, 1_000
MAX_QUERIES, MAX_BYTES = 10_000, 16 * 2**20
_FIELDS = frozenset({"query", "doc_id", "snippet_id", "k", "min_recall"})


@dataclass(frozen=True, slots=True)
class GoldenQuery:
    query: str
    expected: frozenset[str]
    field: Literal["doc_id", "snippet_id"] = "doc_id"
    k: int = DEFAULT_K
    min_recall: float | None = None
    """of this one query; None: it counts only together with the others"""

    def recall(self, found: Sequence[Found]) -> float:
        """The share of what was expected that is among the first k."""
        seen = {getattr(each, self.field) for each in found[: self.k]}
        return len(self.expected & seen) / len(self.expected)


def load_golden(path: str | os.PathLike[str]) -> list[GoldenQuery]:
    """The queries of a file. All its mistakes are told at once, each with its line."""
    file = Path(path)
    try:
        lines = read_text_file(file, MAX_BYTES).splitlines()
    except UnreadableFile as refused:
        hint = "fewer golden queries will do" if refused.limit else "golden queries are JSON Lines in UTF-8"
        raise ValidationError(f"the golden queries {file}: {refused}", hint=hint) from refused
    except (OSError, ValueError) as unreadable:
        raise ValidationError(
            f"the golden queries {file} cannot be read: {unreadable}", hint="indexes.golden names the file"
        ) from unreadable
    queries, mistakes = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            queries.append(_query(line))
        except ValidationError as mistake:
            mistakes.append(f"line {number}: {mistake.message}")
    if not queries and not mistakes:
        mistakes = ["there is no query in it"]
    if len(queries) > MAX_QUERIES:
        mistakes = [f"{len(queries):,} queries; at most {MAX_QUERIES:,}"]
    if mistakes:
        shown = mistakes[:20] + ([f"and {len(mistakes) - 20} more"] if len(mistakes) > 20 else [])
        raise ValidationError(
            f"the golden queries {file} have mistakes:\n  " + "\n  ".join(shown),
            hint='{"query": "...", "doc_id": "..." or ["...", ...], "k": 10, "min_recall": 1.0}',
            problems=tuple(mistakes),
        )
    return queries


def _query(line: str) -> GoldenQuery:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as broken:
        raise ValidationError(f"no JSON: {broken}") from None
    if not isinstance(values, dict):
        raise ValidationError(f"must be an object, got {line.strip()[:60]}")
    if strange := sorted(set(values) - _FIELDS):
        raise ValidationError(f"no such field: {', '.join(map(repr, strange))}")
    query = values.get("query")
    if not isinstance(query, str) or not query.strip():
        raise ValidationError("query must be text")
    if ("doc_id" in values) == ("snippet_id" in values):
        raise ValidationError("needs either doc_id or snippet_id")
    field: Literal["doc_id", "snippet_id"] = "doc_id" if "doc_id" in values else "snippet_id"
    expected = _ids(field, values[field])
    k = values.get("k", max(DEFAULT_K, len(expected)))
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_K:
        raise ValidationError(f"k must be 1 to {MAX_K:,}, got {k!r}")
    if k < len(expected):
        raise ValidationError(f"k is {k}, but {len(expected)} ids are expected: they can never all be found")
    return GoldenQuery(query, expected, field, k, _share(values.get("min_recall")))


def _ids(field: str, given: Any) -> frozenset[str]:
    ids = given if isinstance(given, list) else [given]
    if not ids or not all(isinstance(each, str) and each for each in ids):
        raise ValidationError(f"{field} must be an id, or a list of them")
    return frozenset(ids)


def _share(given: Any) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
        raise ValidationError(f"min_recall must be 0 to 1, got {given!r}")
    return float(given)
