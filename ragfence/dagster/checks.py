"""Asset checks: is what is behind the index what the fence says?"""

from collections import Counter
from typing import Any

import dagster as dg

from ragfence.dagster import _metadata
from ragfence.dagster.assets import Wanted, use_embedder
from ragfence.dagster.resource import FENCE, opened_in
from ragfence.dagster.versions import index_hash_at
from ragfence.errors import BuildMissing, NotSealed
from ragfence.fence import Fence
from ragfence.indexes.build_log import SEALED, BuildSeal

SHOWN = 20


def no_duplicate_effects(
    asset: Any = "vector_index", *, resource_key: str = FENCE, **check: Any
) -> dg.AssetChecksDefinition:
    """The ids in the vector store are those of the sealed snapshot, each once; the auditor finds no promise broken."""
    key = _key(asset)

    def no_duplicate_effects(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        with opened_in(context, resource_key) as opened:
            report = opened.audit.check()
            _, seal = _sealed(opened, index_hash_at(context, key))
            try:
                held = Counter(_ids(opened, seal))
            except BuildMissing as missing:
                return dg.AssetCheckResult(passed=False, description=missing.message)
            wanted = opened.indexes.snippet_ids(seal)
            doubled = [each for each, count in held.items() if count > 1]
            foreign = set(held) - wanted
            # A document that was purged since left the index, and the seal says how many rows are left.
            missing_ids = wanted - set(held) if held.total() != seal.rows else set()
            findings = [
                {"invariant": each.invariant, "key": each.key, "text": each.text} for each in report.findings[:SHOWN]
            ]
            return dg.AssetCheckResult(
                passed=report.ok and not (doubled or foreign or missing_ids),
                description=f"{report}; {held.total():,} ids in the vector store, {len(doubled)} doubled, "
                f"{len(foreign)} foreign, {len(missing_ids)} missing",
                metadata={
                    "rows_audited": report.rows,
                    "ids": held.total(),
                    "doubled": len(doubled),
                    "foreign": len(foreign),
                    "missing": len(missing_ids),
                    "findings": _metadata.table(findings, {"invariant": "string", "key": "string", "text": "string"}),
                },
            )

    check.setdefault("description", "The vector store holds the ids that were sealed, each once; no promise is broken.")
    return _check(no_duplicate_effects, key, resource_key, check)


def corpus_matches_index(
    asset: Any = "vector_index", *, resource_key: str = FENCE, **check: Any
) -> dg.AssetChecksDefinition:
    """The index that was built is of the corpus of now."""
    key = _key(asset)

    def corpus_matches_index(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        with opened_in(context, resource_key) as opened:
            now = opened.documents.corpus_digest()
            # After the digest: a document that was purged and came back makes it the one that was sealed.
            kind, seal = _sealed(opened, index_hash_at(context, key))
            wrong = ""
            if now != seal.corpus_digest:
                wrong = "documents have changed since; materialize the index again"
            elif kind != SEALED:
                wrong = "a document that was purged from the index is live again; materialize the index again"
            try:
                coverage = opened.indexes.coverage(seal)
            except BuildMissing as missing:
                wrong, coverage = missing.message, 0.0
            return dg.AssetCheckResult(
                passed=not wrong,
                severity=dg.AssetCheckSeverity.WARN,
                description=wrong,
                metadata={"corpus": now, "indexed": seal.corpus_digest, "coverage": coverage},
            )

    check.setdefault("description", "The index is of the corpus of now.")
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
    """Blocking: unless the golden queries find what they must, nothing downstream runs, and no alias moves.

    `golden`: a golden.jsonl, or queries; see docs/aliases.md.
    `spec`: as for the index, if its embedder cannot be opened by its name.
    """
    key = _key(asset)
    check.setdefault("blocking", True)

    def golden_queries(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        index_hash = index_hash_at(context, key)
        with opened_in(context, resource_key) as opened:
            use_embedder(opened, spec)
            try:
                result = opened.indexes.judge_golden(index_hash, golden, min_recall=min_recall)
            except NotSealed as missing:
                return dg.AssetCheckResult(passed=False, description=missing.message)
            return dg.AssetCheckResult(
                passed=result.ok,
                description=result.detail,
                metadata={"index_hash": index_hash, "golden": _metadata.gates([result])},
            )

    check.setdefault("description", "The golden queries find what they must; unless they do, no alias moves.")
    return _check(golden_queries, key, resource_key, check)


def _key(asset: Any) -> dg.AssetKey:
    return asset.key if isinstance(asset, dg.AssetsDefinition) else dg.AssetKey.from_coercible(asset)


def _check(compute: Any, key: dg.AssetKey, resource_key: str, check: dict[str, Any]) -> dg.AssetChecksDefinition:
    required = {resource_key, *(check.pop("required_resource_keys", None) or ())}
    made = dg.asset_check(asset=key, required_resource_keys=required, **check)(compute)
    assert isinstance(made, dg.AssetChecksDefinition)
    return made


def _sealed(fence: Fence, index_hash: str) -> tuple[str, BuildSeal]:
    """The seal, and whether it is as it was sealed or rows were purged from it since."""
    entry = fence.indexes.get(index_hash)
    if entry is None or entry.seal is None:
        raise dg.Failure(description=f"build {index_hash} is not sealed any more; materialize the index again")
    return entry.kind, entry.seal


def _ids(fence: Fence, seal: BuildSeal) -> list[str]:
    tables = fence.indexes.backend(seal.backend).read(seal.physical, ["snippet_id"])
    return [each for table in tables for each in table.column("snippet_id").to_pylist()]
