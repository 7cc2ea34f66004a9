"""`IndexSpec`, and the INDEX_HASH: a digest of a build's inputs, known before anything is built.

`Explanation` says which inputs an INDEX_HASH was made from, and which of them differ from another build.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, get_args

from ragfence.core.canonical import canonical_json
from ragfence.core.hashing import digest
from ragfence.errors import NotJson, ValidationError
from ragfence.indexes.backends.backend import SCHEMA_VERSION, Backend, Metric, Shape
from ragfence.indexes.build_log import BuildEntry
from ragfence.indexes.embedders.embedder import Embedder, EmbedderId
from ragfence.indexes.snapshots import Snapshots

AUTO = "auto"
EXACT = "flat"
NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """What to build. Everything has a default: `fence.indexes.build()` builds `IndexSpec()`.

    Attributes:
        embedder: A name such as "wordllama", or an `Embedder`.
        backend: "lance" for LanceDB next to the objects, or a URL without credentials. Another place is another index.
        metric: "cosine", "dot" or "l2".
        index: "flat" compares with every row; all others are approximate, see docs/backends.md. "auto" is "flat" up to
            the policy's `ann_above` rows, and above that the index that suits the backend best.
        parameters: Of the index.
        analyzer: Of full-text search. Only "none" so far.

    >>> IndexSpec(metric="dot").index
    'auto'
    """

    embedder: str | Embedder = "wordllama"
    backend: str = "lance"
    metric: Metric = "cosine"
    index: str = AUTO
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_PARAMETERS)
    analyzer: str = "none"

    def __post_init__(self) -> None:
        if self.metric not in get_args(Metric):
            raise ValidationError(f"metric must be one of {', '.join(get_args(Metric))}, not {self.metric!r}")
        if self.analyzer != "none":
            raise ValidationError(f"there is no analyzer {self.analyzer!r} yet", hint='leave it out, or pass "none"')
        for name in ("backend", "index"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValidationError(f"{name} of an index must be a name, not {value!r}")
        if not isinstance(self.parameters, Mapping):
            raise ValidationError(f"parameters of an index must be a mapping, not {type(self.parameters).__name__}")
        if self.index == AUTO and self.parameters:
            raise ValidationError(
                'parameters need a named index, not "auto"', hint='name the index, such as "ivf_pq", or leave them out'
            )
        try:
            canonical_json(dict(self.parameters))
        except NotJson as wrong:
            raise ValidationError(f"parameters of an index must be JSON: {wrong.message}") from wrong

    def resolved(self, rows: int, backend: Backend, embedder: EmbedderId, ann_above: int) -> IndexSpec:
        """Replaces "auto" by an index. It depends on the corpus alone, because the INDEX_HASH names what is built."""
        if self.index != AUTO:
            return self
        # By dot product, the longest vectors are the nearest: an index that partitions by direction does not find them.
        suits = self.metric != "dot" or embedder.normalised
        made = backend.approximate(rows, embedder.dimension) if rows > ann_above and suits else None
        index, parameters = made or (EXACT, NO_PARAMETERS)
        return replace(self, index=index, parameters=parameters)

    def shape(self, dimension: int) -> Shape:
        return Shape(dimension, self.metric, self.index, dict(self.parameters))


def build_inputs(tenant: str, corpus_digest: str, embedder: EmbedderId, spec: IndexSpec) -> dict[str, Any]:
    """Returns the inputs of the INDEX_HASH. The recipe of each document is in the corpus digest, through its key."""
    return {
        "tenant": tenant,
        "corpus": corpus_digest,
        "embedder": {
            "name": embedder.name,
            "revision": embedder.revision,
            "dimension": embedder.dimension,
            "normalised": embedder.normalised,
        },
        "backend": spec.backend,
        "metric": spec.metric,
        "index": spec.index,
        "parameters": dict(spec.parameters),
        "analyzer": spec.analyzer,
        "schema": SCHEMA_VERSION,
    }


def compute_index_hash(inputs: Mapping[str, Any]) -> str:
    parts = [part for name, value in inputs.items() for part in (name.encode(), canonical_json(value))]
    return digest("ragfence/index/1", *parts).hex()


def embedder_in(inputs: Mapping[str, Any]) -> EmbedderId:
    return EmbedderId(**inputs["embedder"])


def shape_in(inputs: Mapping[str, Any]) -> Shape:
    return Shape(inputs["embedder"]["dimension"], inputs["metric"], inputs["index"], inputs["parameters"])


@dataclass(frozen=True, slots=True)
class DocumentChanges:
    """How the documents of two corpora differ, in numbers."""

    added: int
    removed: int
    changed: int
    unchanged: int


@dataclass(frozen=True, slots=True)
class Explanation:
    index_hash: str
    inputs: dict[str, Any]
    state: str
    """"sealed", "retired", "purged" or "not built" """
    against: str | None = None
    """the INDEX_HASH of the build it is compared with"""
    before: dict[str, Any] | None = None
    """the inputs of that build"""
    differing: tuple[str, ...] = ()
    """names of inputs that differ"""
    documents: DocumentChanges | None = None
    """if the corpora differ and both are still stored"""


def explain_build(
    index_hash: str, inputs: dict[str, Any], newest: BuildEntry | None, other: BuildEntry | None, corpora: Snapshots
) -> Explanation:
    state = newest.kind if newest else "not built"
    if other is None or other.seal is None:
        return Explanation(index_hash, inputs, state)
    before = other.seal.inputs
    differing = tuple(name for name in inputs if inputs[name] != before.get(name))
    documents = None
    if "corpus" in differing:
        then, now = corpora.get(before["corpus"]), corpora.get(inputs["corpus"]) or corpora.now()
        if then is not None and now.digest == inputs["corpus"]:
            documents = DocumentChanges(*now.compared_with(then))
    return Explanation(index_hash, inputs, state, other.seal.index_hash, before, differing, documents)
