"""Gates: checks of a build before an alias is moved to it. The log entry of the swap has the numbers of each gate.

sealed      the build is sealed according to its log; the value is the number of the seal
rows        the backend has as many rows as were sealed
dimension   the vectors have the sealed dimension
golden      the golden queries find what they must
recall      the share of what an exact search finds that an approximate index finds; not measured for exact indexes
coverage    the share of the live documents that are in the build
overlap     the share of results in common with the live build, on the golden queries or on texts of the build
shrinkage   the share of the live build's rows that are missing

A gate that cannot fail is not measured if that would cost something: coverage with a limit of 0, and overlap with a
limit of 0 and no golden queries. Shares are compared as they are shown, so a share exactly at its limit passes despite
rounding errors of floats.

Golden queries say what a search must find, whatever the index is made of: one JSON object per line. Empty lines and
lines that begin with # are skipped.

    {"query": "how do leases expire?", "doc_id": "guide/leases.md", "k": 5}
    {"query": "what is a fence number?", "snippet_id": ["9f...", "1c..."], "k": 10, "min_recall": 0.5}
"""

from __future__ import annotations

import heapq
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ragfence.core.policy import IndexRules
from ragfence.core.text_files import UnreadableFile, read_text_file
from ragfence.errors import BuildMissing, RagfenceError, ValidationError
from ragfence.indexes.backends.backend import Backend, FoundRow
from ragfence.indexes.build_log import BuildEntry, BuildSeal
from ragfence.indexes.embedders.embedder import Embedder, EmbedderId, embed_texts
from ragfence.indexes.ranking import find_nearest
from ragfence.indexes.spec import EXACT
from ragfence.indexes.verification import measured_recall

if TYPE_CHECKING:
    from ragfence.indexes.embedders.embedder import Vectors

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
    """of this query; None: it only counts in the mean of all"""

    def recall(self, found: Sequence[FoundRow]) -> float:
        """The share of the expected ids that are among the first k."""
        seen = {getattr(each, self.field) for each in found[: self.k]}
        return len(self.expected & seen) / len(self.expected)


def load_golden(path: str | os.PathLike[str]) -> list[GoldenQuery]:
    """Reads the queries of a file.

    Raises:
        ValidationError: With all mistakes of the file, each with its line.
    """
    file = Path(path)
    try:
        lines = read_text_file(file, MAX_BYTES).splitlines()
    except UnreadableFile as refused:
        hint = "fewer golden queries will do" if refused.limit else "golden queries are JSON Lines in UTF-8"
        raise ValidationError(f"the golden queries {file}: {refused}", hint=hint) from refused
    except (OSError, ValueError) as unreadable:
        raise ValidationError(
            f"cannot read the golden queries {file}: {unreadable}", hint="indexes.golden names the file"
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
        mistakes = ["the file has no queries"]
    if len(queries) > MAX_QUERIES:
        mistakes = [f"{len(queries):,} queries; at most {MAX_QUERIES:,} are allowed"]
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
        raise ValidationError(f"not valid JSON: {broken}") from None
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


ESSENTIAL = frozenset({"sealed", "rows"})
"""the gates that can refuse a rollback, which returns to a build that passed once and must work in an emergency"""
SHOWN = 5
DIGITS = 9
"""of a share: one row of a hundred million counts, but no rounding error of a float does"""


Golden = str | os.PathLike[str] | Sequence[GoldenQuery]


@dataclass(frozen=True, slots=True)
class Gates:
    """The limits of one swap. Those that are None are taken from the policy (`indexes:`).

    >>> fence.aliases.swap("docs", build.index_hash, gates=Gates(min_overlap=0.5))  # doctest: +SKIP
    """

    max_shrinkage: float | None = None
    min_coverage: float | None = None
    min_overlap: float | None = None
    golden: Golden | None = None
    """a file, or queries; an empty string for none"""
    min_recall: float | None = None
    overlap_queries: int | None = None
    min_ann_recall: float | None = None
    """of an approximate index, compared with exact search"""

    def __post_init__(self) -> None:
        for name in ("max_shrinkage", "min_coverage", "min_overlap", "min_recall", "min_ann_recall"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise ValidationError(f"{name} must be 0 to 1, not {share!r}")
        if self.overlap_queries is not None and not 1 <= self.overlap_queries <= 1000:
            raise ValidationError(f"overlap_queries must be 1 to 1000, not {self.overlap_queries!r}")

    def limits(self, rules: IndexRules, *, tolerant: bool = False) -> GateLimits:
        """Fills in the limits of the policy, and reads the golden queries. `tolerant`: a bad file fails its gate."""
        golden = rules.golden if self.golden is None else self.golden
        mistake = ""
        if isinstance(golden, str | os.PathLike):
            try:
                golden = load_golden(golden) if os.fspath(golden) else ()
            except ValidationError as unusable:
                if not tolerant:
                    raise
                golden, mistake = (), unusable.message
        return GateLimits(
            max_shrinkage=_first(self.max_shrinkage, rules.max_shrinkage),
            min_coverage=_first(self.min_coverage, rules.min_coverage),
            min_overlap=_first(self.min_overlap, rules.min_overlap),
            golden=tuple(golden),
            golden_mistake=mistake,
            min_recall=_first(self.min_recall, rules.min_recall),
            overlap_queries=self.overlap_queries or rules.overlap_queries,
            min_ann_recall=_first(self.min_ann_recall, rules.min_ann_recall),
            recall_sample=rules.recall_sample,
        )


class GateLimits(NamedTuple):
    max_shrinkage: float
    min_coverage: float
    min_overlap: float
    golden: tuple[GoldenQuery, ...]
    golden_mistake: str
    min_recall: float
    overlap_queries: int
    min_ann_recall: float
    recall_sample: int


@dataclass(frozen=True, slots=True)
class GateResult:
    gate: str
    ok: bool
    value: float | None = None
    """None: not measured"""
    limit: float | None = None
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Candidate:
    """A build that gates measure: its seal, its rows, and the embedder that its queries need."""

    def __init__(self, entry: BuildEntry, backend: Backend, embedder: Callable[[BuildSeal], Embedder]) -> None:
        assert entry.seal is not None
        self.number, self.seal, self._backend = entry.number, entry.seal, backend
        self._embedder = embedder
        self._vectors: dict[tuple[str, ...], Vectors] = {}

    def rows(self) -> int:
        return self._backend.count(self.seal.physical)

    def dimension(self) -> int | None:
        for table in self._backend.read(self.seal.physical, ["vector"]):
            if table.num_rows:
                return len(table.column("vector")[0].as_py())
        return None

    @property
    def is_approximate(self) -> bool:
        return bool(self.seal.inputs.get("index", EXACT) != EXACT)

    def recall(self, sample: int) -> dict[str, Any]:
        """The recall in the seal; measured now if the version that sealed it did not measure it."""
        if "recall" in self.seal.checks:
            return self.seal.checks
        return measured_recall(self._backend, self.seal.physical, self.seal.metric, sample, self.seal.rows)

    def texts(self, count: int) -> list[str]:
        """A sample that is always the same: ids are digests, so the smallest ones are as good as any."""
        rows: Iterator[tuple[str, str]] = (
            row
            for table in self._backend.read(self.seal.physical, ["snippet_id", "text"])
            for row in zip(table.column("snippet_id").to_pylist(), table.column("text").to_pylist(), strict=True)
        )
        return [text for _, text in heapq.nsmallest(count, rows)]

    def search(self, queries: Sequence[str], ks: Sequence[int]) -> list[list[FoundRow]]:
        queries = tuple(queries)
        if queries not in self._vectors:
            embedder = self._embedder(self.seal)
            self._vectors[queries] = embed_texts(embedder, EmbedderId.of(embedder), queries)
        vectors = self._vectors[queries]
        return [find_nearest(self._backend, self.seal, vector, k) for vector, k in zip(vectors, ks, strict=True)]


def judge(
    limits: GateLimits,
    new: Candidate,
    live: Candidate | None,
    coverage_of: Callable[[BuildSeal], float] | None,
    *,
    tolerant: bool = False,
) -> list[GateResult]:
    """Measures every gate.

    Args:
        limits: The limits of the gates.
        new: The build that the alias would be moved to.
        live: The build that the alias points at.
        coverage_of: Returns the share of live documents in a build; None leaves this gate out.
        tolerant: A gate that cannot be measured fails instead of raising. The rows themselves are never tolerated to be
            missing: `BuildMissing` or an error of the backend is raised.
    """
    gates: list[tuple[str, Callable[[], GateResult]]] = [
        ("sealed", lambda: GateResult("sealed", True, new.number)),
        ("rows", lambda: _rows(new)),
        ("dimension", lambda: _dimension(new)),
    ]
    if new.is_approximate and limits.min_ann_recall > 0:
        gates.append(("recall", lambda: _recall(limits, new)))
    if limits.golden or limits.golden_mistake:
        gates.append(("golden", lambda: golden_gate(limits, new)))
    if coverage_of is not None and limits.min_coverage > 0:
        gates.append(("coverage", lambda: _coverage(limits, coverage_of(new.seal))))
    if live is not None:
        if limits.min_overlap > 0 or limits.golden:
            gates.append(("overlap", lambda: _overlap(limits, new, live)))
        gates.append(("shrinkage", lambda: _shrinkage(limits, new.seal.rows, live.seal.rows)))
    results = []
    for name, measure in gates:
        try:
            results.append(measure())
        except RagfenceError as unmeasured:
            if not tolerant or name in ESSENTIAL:
                raise
            results.append(GateResult(name, False, detail=f"could not be measured: {unmeasured.message}"[:500]))
    return results


def _rows(new: Candidate) -> GateResult:
    found, sealed = new.rows(), new.seal.rows
    return GateResult("rows", found == sealed, found, sealed, "" if found == sealed else "not as many as were sealed")


def _dimension(new: Candidate) -> GateResult:
    found, sealed = new.dimension(), new.seal.dimension
    return GateResult(
        "dimension", found in (sealed, None), found, sealed, "" if found is not None else "there are no rows"
    )


def _recall(limits: GateLimits, new: Candidate) -> GateResult:
    seen = new.recall(limits.recall_sample)
    detail = f"{new.seal.inputs['index']}: {seen['recall_of']} searches for {seen['recall_k']} rows each"
    if not (ok := _is_at_least(seen["recall"], limits.min_ann_recall)):
        detail += '; build it with the index "flat", or with more exact parameters, or lower min_ann_recall'
    return GateResult("recall", ok, seen["recall"], limits.min_ann_recall, detail)


def golden_gate(limits: GateLimits, new: Candidate) -> GateResult:
    queries = limits.golden
    if not queries:
        return GateResult("golden", False, None, limits.min_recall, limits.golden_mistake[:500])
    found = new.search([each.query for each in queries], [each.k for each in queries])
    recalls = [query.recall(hits) for query, hits in zip(queries, found, strict=True)]
    mean = _mean(recalls)
    short = [
        f"{query.query[:60]!r} {recall:.2f} of {query.min_recall:g}"
        for query, recall in zip(queries, recalls, strict=True)
        if query.min_recall is not None and not _is_at_least(recall, query.min_recall)
    ]
    detail = f"{len(queries)} queries"
    if short:
        detail += f", {len(short)} below their own limit: " + "; ".join(short[:SHOWN])
    elif not _is_at_least(mean, limits.min_recall):
        missed = [query.query[:60] for query, recall in zip(queries, recalls, strict=True) if recall < 1]
        detail += f", {len(missed)} incomplete: " + "; ".join(map(repr, missed[:SHOWN]))
    return GateResult("golden", not short and _is_at_least(mean, limits.min_recall), mean, limits.min_recall, detail)


def _coverage(limits: GateLimits, share: float) -> GateResult:
    return GateResult("coverage", _is_at_least(share, limits.min_coverage), round(share, DIGITS), limits.min_coverage)


def _overlap(limits: GateLimits, new: Candidate, live: Candidate) -> GateResult:
    if limits.golden:
        queries, ks = [each.query for each in limits.golden], [each.k for each in limits.golden]
    else:
        queries = new.texts(limits.overlap_queries)
        ks = [DEFAULT_K] * len(queries)
    try:
        if not queries:
            same = live.rows() == 0  # else the swap would silently lose everything that is found now
            return GateResult(
                "overlap", same, None if same else 0.0, limits.min_overlap, "there are no rows to search with"
            )
        before = live.search(queries, ks)
    except BuildMissing:
        # A swap that repairs a broken alias must not be blocked by what is broken.
        return GateResult("overlap", True, None, limits.min_overlap, "the live build is gone: nothing to compare with")
    shares = [_overlap_share(*pair) for pair in zip(new.search(queries, ks), before, strict=True)]
    mean = _mean(shares)
    return GateResult(
        "overlap", _is_at_least(mean, limits.min_overlap), mean, limits.min_overlap, f"{len(queries)} queries"
    )


def _overlap_share(one: Sequence[FoundRow], other: Sequence[FoundRow]) -> float:
    ids, others = {each.snippet_id for each in one}, {each.snippet_id for each in other}
    most = max(len(ids), len(others))
    return len(ids & others) / most if most else 1.0


def _shrinkage(limits: GateLimits, rows: int, before: int) -> GateResult:
    lost = round(max(0.0, (before - rows) / before), DIGITS) if before else 0.0
    return GateResult(
        "shrinkage",
        _is_at_least(limits.max_shrinkage, lost),
        lost,
        limits.max_shrinkage,
        f"{before:,} to {rows:,} rows",
    )


def _mean(shares: Sequence[float]) -> float:
    return round(math.fsum(shares) / len(shares), DIGITS)


def _is_at_least(share: float, least: float) -> bool:
    """Compares rounded values: a limit may have more digits than are shown, such as a third."""
    return round(share, DIGITS) >= round(least, DIGITS)


def _first(own: float | None, general: float) -> float:
    return general if own is None else own
