"""Asset checks: they compare the vector store and the corpus with what was sealed."""

from collections import Counter
from typing import Any

import dagster as dg

from ragfence.dagster import _metadata
from ragfence.dagster._event_log import index_hash_at
from ragfence.dagster.assets import Wanted, use_embedder
from ragfence.dagster.resource import FENCE, open_fence
from ragfence.errors import BuildMissing, NotSealed
from ragfence.fence import Fence
from ragfence.indexes.build_log import SEALED, BuildSeal

SHOWN = 20


def no_duplicate_effects(
    asset: Any = "vector_index", *, resource_key: str = FENCE, **check: Any
) -> dg.AssetChecksDefinition:
    """Fails if an id in the vector store is duplicated, unknown or missing, or if a guarantee is broken."""
    key = _key(asset)

    def no_duplicate_effects(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        with open_fence(context, resource_key) as fence:
            report = fence.audit.check()
            _, seal = _sealed(fence, index_hash_at(context, key))
            try:
                stored = Counter(_ids(fence, seal))
            except BuildMissing as missing:
                return dg.AssetCheckResult(passed=False, description=missing.message)
            wanted = fence.indexes.snippet_ids(seal)
            doubled = [each for each, count in stored.items() if count > 1]
            foreign = set(stored) - wanted
            # Rows of documents that were purged later are gone. The seal has the number of rows that remain.
            missing_ids = wanted - set(stored) if stored.total() != seal.rows else set()
            findings = [
                {"invariant": each.invariant, "key": each.key, "text": each.text} for each in report.findings[:SHOWN]
            ]
            return dg.AssetCheckResult(
                passed=report.ok and not (doubled or foreign or missing_ids),
                description=f"{report}; {stored.total():,} ids in the vector store, {len(doubled)} duplicated, "
                f"{len(foreign)} unknown, {len(missing_ids)} missing",
                metadata={
                    "rows_audited": report.rows,
                    "ids": stored.total(),
                    "duplicated": len(doubled),
                    "unknown": len(foreign),
                    "missing": len(missing_ids),
                    "findings": _metadata.table(findings, {"invariant": "string", "key": "string", "text": "string"}),
                },
            )

    check.setdefault(
        "description", "The vector store contains each sealed snippet_id once, and no guarantee is broken."
    )
    return _check(no_duplicate_effects, key, resource_key, check)


def corpus_matches_index(
    asset: Any = "vector_index", *, resource_key: str = FENCE, **check: Any
) -> dg.AssetChecksDefinition:
    """Warns if documents have changed since the index was built."""
    key = _key(asset)

    def corpus_matches_index(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        with open_fence(context, resource_key) as fence:
            now = fence.documents.corpus_digest()
            # Read after the digest, because a purged document that came back makes the digest equal to the sealed one.
            kind, seal = _sealed(fence, index_hash_at(context, key))
            wrong = ""
            if now != seal.corpus_digest:
                wrong = "documents have changed since the index was built; materialize the index again"
            elif kind != SEALED:
                wrong = "a document that was purged from the index is live again; materialize the index again"
            try:
                coverage = fence.indexes.coverage(seal)
            except BuildMissing as missing:
                wrong, coverage = missing.message, 0.0
            return dg.AssetCheckResult(
                passed=not wrong,
                severity=dg.AssetCheckSeverity.WARN,
                description=wrong,
                metadata={"corpus": now, "indexed": seal.corpus_digest, "coverage": coverage},
            )

    check.setdefault("description", "The index contains the current documents.")
    return _check(corpus_matches_index, key, resource_key, check)


def golden_queries(
    golden: Any,
    asset: Any = "vector_index",
    *,
    min_recall: float | None = None,
    spec: Wanted = None,
    resource_key: str = FENCE,
    **check: Any,
) -> dg.AssetChecksDefinition:
    """A blocking check: unless the golden queries find what they must, nothing downstream runs and no alias moves.

    Args:
        golden: A golden.jsonl, or queries; see docs/aliases.md.
        asset: The index asset.
        min_recall: The share of the queries that must succeed; by default that of the policy.
        spec: The spec of the index, if its embedder cannot be opened by its name.
        resource_key: The FenceResource to use, if there are several.
        check: Any other argument of `@dg.asset_check`.
    """
    key = _key(asset)
    check.setdefault("blocking", True)

    def golden_queries(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        index_hash = index_hash_at(context, key)
        with open_fence(context, resource_key) as fence:
            use_embedder(fence, spec)
            try:
                result = fence.indexes.judge_golden(index_hash, golden, min_recall=min_recall)
            except NotSealed as missing:
                return dg.AssetCheckResult(passed=False, description=missing.message)
            return dg.AssetCheckResult(
                passed=result.ok,
                description=result.detail,
                metadata={"index_hash": index_hash, "golden": _metadata.gates([result])},
            )

    check.setdefault("description", "The golden queries find what they must. Otherwise no alias moves.")
    return _check(golden_queries, key, resource_key, check)


def _key(asset: Any) -> dg.AssetKey:
    return asset.key if isinstance(asset, dg.AssetsDefinition) else dg.AssetKey.from_coercible(asset)


def _check(compute: Any, key: dg.AssetKey, resource_key: str, check: dict[str, Any]) -> dg.AssetChecksDefinition:
    required = {resource_key, *(check.pop("required_resource_keys", None) or ())}
    made = dg.asset_check(asset=key, required_resource_keys=required, **check)(compute)
    assert isinstance(made, dg.AssetChecksDefinition)
    return made


def _sealed(fence: Fence, index_hash: str) -> tuple[str, BuildSeal]:
    """The seal, and its kind: as it was sealed, or with rows purged later."""
    entry = fence.indexes.get(index_hash)
    if entry is None or entry.seal is None:
        raise dg.Failure(description=f"build {index_hash} is no longer sealed; materialize the index again")
    return entry.kind, entry.seal


def _ids(fence: Fence, seal: BuildSeal) -> list[str]:
    tables = fence.indexes.backend(seal.backend).read(seal.physical, ["snippet_id"])
    return [each for table in tables for each in table.column("snippet_id").to_pylist()]
