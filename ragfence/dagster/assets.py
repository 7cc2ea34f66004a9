"""The assets vector_index and live_alias, downstream of the documents of `ingest_asset.py`.

Each returns a MaterializeResult with the DataVersion of what is sealed, even if there was nothing to do: the
INDEX_HASH, or the generation of the alias. Downstream automation therefore sees a change exactly when there is one.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import dagster as dg

from ragfence.dagster import _metadata
from ragfence.dagster._event_log import index_hash_at, recorded_version
from ragfence.dagster._factory import SHOWN, make_asset, progress_logger
from ragfence.dagster.resource import FENCE, open_fence
from ragfence.errors import GateFailed, RagfenceError
from ragfence.fence import Fence
from ragfence.indexes.gates import GateResult, Gates
from ragfence.indexes.spec import IndexSpec

Wanted = IndexSpec | Callable[[], IndexSpec] | None


def build_index_asset(
    spec: Wanted = None,
    *,
    name: str = "vector_index",
    deps: Sequence[Any] = ("documents",),
    wait_s: float | None = None,
    resource_key: str = FENCE,
    **asset: Any,
) -> dg.AssetsDefinition:
    """An asset that builds an index of all live documents, once per INDEX_HASH, which is its DataVersion.

    Args:
        spec: The index to build. A callable makes it in the run, for an embedder that cannot be named.
        name: The name of the asset.
        deps: The upstream assets.
        wait_s: How long to wait if another process is building the same index.
        resource_key: The FenceResource to use, if there are several.
        asset: Any other argument of `@dg.asset`.
    """
    asset.setdefault("kinds", {"ragfence"})
    asset.setdefault("description", "An index of all live documents, built once per INDEX_HASH, read back and sealed.")

    def vector_index(context: dg.AssetExecutionContext) -> dg.MaterializeResult:  # type: ignore[type-arg]
        with open_fence(context, resource_key) as fence:
            wanted = spec() if callable(spec) else spec
            before = recorded_version(context.instance, context.asset_key)
            log_progress = progress_logger(context, "rows")
            build = fence.indexes.build(wanted, wait_s=wait_s, progress=lambda done, total: log_progress(done))
            made, seal = build.seal.made, build.seal
            embedded = made["embedded"] if build.decision == "new" else 0
            context.log.info("%s: %s, %d rows, %d embedded", build.index_hash, build.decision, build.rows, embedded)
            return dg.MaterializeResult(
                data_version=dg.DataVersion(build.index_hash),
                metadata={
                    **_metadata.decision(build.receipt),
                    "index_hash": build.index_hash,
                    "rows": build.rows,
                    "documents": build.documents,
                    "embedded": embedded,
                    "embedded_before": build.rows - embedded,
                    "started_from": made["base"] or "no other build",
                    "content_digest": build.content_digest,
                    "physical": build.physical,
                    "index": str(seal.inputs["index"]),
                    **({"recall": seal.checks["recall"]} if "recall" in seal.checks else {}),
                    "checks": _metadata.table(
                        [{"check": each, "value": str(value)} for each, value in seal.checks.items()],
                        {"check": "string", "value": "string"},
                    ),
                    "inputs": _inputs(fence, wanted, before if before != build.index_hash else None),
                    "chart": _metadata.chart(
                        "snippets", {"embedded now": embedded, "embedded before": build.rows - embedded}
                    ),
                },
            )

    return make_asset(vector_index, name, resource_key, asset, deps=list(deps))


def build_alias_asset(
    alias: str,
    *,
    index: Any = "vector_index",
    name: str = "live_alias",
    gates: Gates | None = None,
    spec: Wanted = None,
    resource_key: str = FENCE,
    **asset: Any,
) -> dg.AssetsDefinition:
    """An asset that points an alias at the newest build of its index asset, if the gates pass.

    Its DataVersion is the generation of the alias. It is automated: it runs when the DataVersion of the index has
    changed, not whenever the index is materialized. It does not run if a blocking check of the index fails.

    Args:
        alias: The name that searches use.
        index: The index asset.
        name: The name of this asset.
        gates: What the build must pass.
        spec: The spec of the index, if gates run queries with an embedder that cannot be opened by its name.
        resource_key: The FenceResource to use, if there are several.
        asset: Any other argument of `@dg.asset`.
    """
    asset.setdefault("kinds", {"ragfence"})
    asset.setdefault(
        "description", f"The alias {alias!r}, which points at a build that is sealed and passed its gates."
    )
    asset.setdefault("automation_condition", ON_NEW_VERSION)
    index_key = index.key if isinstance(index, dg.AssetsDefinition) else dg.AssetKey.from_coercible(index)

    def live_alias(context: dg.AssetExecutionContext) -> dg.MaterializeResult:  # type: ignore[type-arg]
        index_hash = index_hash_at(context, index_key)
        with open_fence(context, resource_key) as fence:
            use_embedder(fence, spec)
            try:
                swap = fence.aliases.swap(
                    alias, index_hash, gates=gates, actor=f"dagster:{context.run.run_id}", reason="materialized"
                )
            except GateFailed as failed:
                raise dg.Failure(
                    description=f"{failed.message}. The alias was not moved.",
                    metadata={
                        "gates": _metadata.gates([GateResult(**each) for each in failed.report]),
                        "index_hash": index_hash,
                    },
                    allow_retries=False,
                ) from failed
            history = fence.aliases.history(alias, limit=SHOWN)
            context.log.info("%s -> %s, generation %d", alias, index_hash, swap.generation)
            return dg.MaterializeResult(
                data_version=dg.DataVersion(str(swap.generation)),
                metadata={
                    "alias": alias,
                    "index_hash": index_hash,
                    "generation": swap.generation,
                    "changed": swap.changed,
                    "previous": swap.previous.index_hash if swap.previous else "none",
                    "gates": _metadata.gates(swap.gates),
                    "history": _metadata.table(
                        [
                            {
                                "generation": entry.number,
                                "change": entry.change,
                                "index_hash": entry.target.index_hash if entry.target else "",
                                "actor": entry.actor,
                                "reason": entry.reason,
                            }
                            for entry in islice(history, SHOWN)
                        ],
                        {
                            "generation": "int",
                            "change": "string",
                            "index_hash": "string",
                            "actor": "string",
                            "reason": "string",
                        },
                    ),
                },
            )

    return make_asset(live_alias, name, resource_key, asset, deps=[index_key, *asset.pop("deps", ())])


ON_NEW_VERSION = (
    (
        dg.AutomationCondition.any_deps_match(dg.AutomationCondition.data_version_changed()).since_last_handled()
        # At the first evaluation it is unknown what has changed, so the asset runs if it never has.
        | (dg.AutomationCondition.initial_evaluation() & dg.AutomationCondition.missing())
    )
    & ~dg.AutomationCondition.any_deps_missing()
    & ~dg.AutomationCondition.in_progress()
).with_label("the DataVersion of a dependency has changed")


def use_embedder(fence: Fence, spec: Wanted) -> None:
    """Registers an embedder that is an object, because queries cannot open it by name."""
    wanted = spec() if callable(spec) else spec
    if wanted is not None and not isinstance(wanted.embedder, str):
        fence.indexes.use(wanted.embedder)


def _inputs(fence: Fence, spec: IndexSpec | None, before: str | None) -> dg.TableMetadataValue:
    """Each input of the INDEX_HASH, and what it was in the previous build, if that is still stored."""
    try:
        explained = fence.indexes.explain(spec, against=before)
    except RagfenceError:  # the previous build was retired; the new one is explained without it
        explained = fence.indexes.explain(spec)
    earlier = explained.before or {}
    rows = [
        {"input": each, "now": str(value), "before": str(earlier[each]) if each in explained.differing else ""}
        for each, value in explained.inputs.items()
    ]
    if documents := explained.documents:
        what = (
            f"{documents.added} added, {documents.removed} removed, "
            f"{documents.changed} changed, {documents.unchanged} unchanged"
        )
        rows.append({"input": "documents", "now": what, "before": ""})
    return _metadata.table(rows, {"input": "string", "now": "string", "before": "string"})
