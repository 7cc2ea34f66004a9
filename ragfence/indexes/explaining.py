"""Why an index has the INDEX_HASH it has, and what made it another one than before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ragfence.indexes.build_log import BuildEntry
from ragfence.indexes.snapshots import Corpora


@dataclass(frozen=True, slots=True)
class Changed:
    """Of the documents of two corpora."""

    added: int
    removed: int
    changed: int
    unchanged: int


@dataclass(frozen=True, slots=True)
class Explained:
    index_hash: str
    inputs: dict[str, Any]
    state: str
    """"sealed", "retired", "purged" or "not built" """
    against: str | None = None
    """the build that it is compared with"""
    before: dict[str, Any] | None = None
    """its inputs"""
    differing: tuple[str, ...] = ()
    """names of inputs that differ"""
    documents: Changed | None = None
    """where the corpus differs, and both are still stored"""


def explained(
    index_hash: str, inputs: dict[str, Any], newest: BuildEntry | None, other: BuildEntry | None, corpora: Corpora
) -> Explained:
    state = newest.kind if newest else "not built"
    if other is None or other.seal is None:
        return Explained(index_hash, inputs, state)
    before = other.seal.inputs
    differing = tuple(name for name in inputs if inputs[name] != before.get(name))
    documents = None
    if "corpus" in differing:
        then, now = corpora.get(before["corpus"]), corpora.get(inputs["corpus"]) or corpora.now()
        if then is not None and now.digest == inputs["corpus"]:
            documents = Changed(*now.compared_with(then))
    return Explained(index_hash, inputs, state, other.seal.index_hash, before, differing, documents)
