"""vector_index -> live_alias, behind the documents of `ingest.py`: assets whose work is fenced.

Each returns a MaterializeResult with the DataVersion of what is sealed, also when there was nothing to do: the corpus
digest, the INDEX_HASH, the generation of the alias. So downstream automation sees a change exactly when there is one.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import dagster as dg

from ragfence.dagster import _metadata
from ragfence.dagster._factory import SHOWN, asset_made, said_now_and_then
from ragfence.dagster.resource import FENCE, opened_in
from ragfence.dagster.versions import index_hash_at, recorded_version
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

    `spec`: what the index is to be; a callable makes it in the run, for embedders that cannot be named.
    """
    asset.setdefault("kinds", {"ragfence"})
    asset.setdefault("description", "An index of all live documents, built once per INDEX_HASH, read back and sealed.")

    def vector_index(context: dg.AssetExecutionContext) -> dg.MaterializeResult:  # type: ignore[type-arg]
        with opened_in(context, resource_key) as opened:
            wanted = spec() if callable(spec) else spec
            before = recorded_version(context.instance, context.asset_key)
            told = said_now_and_then(context, "rows")
            build = opened.indexes.build(wanted, wait_s=wait_s, progress=lambda done, total: told(done))
            made, seal = build.seal.made, build.seal
            embedded = made["embedded"] if build.decision == "new" else 0
            context.log.info("%s: %s, %d rows, %d embedded", build.index_hash, build.decision, build.rows, embedded)
            return dg.MaterializeResult(
                data_version=dg.DataVersion(build.index_hash),
                metadata={
                    **_metadata.answer(build.receipt),
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
                    "inputs": _inputs(opened, wanted, before if before != build.index_hash else None),
                    "chart": _metadata.chart(
                        "snippets", {"embedded now": embedded, "embedded before": build.rows - embedded}
                    ),
                },
            )

    return asset_made(vector_index, name, resource_key, asset, deps=list(deps))


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
    """An asset that points an alias at the build its index asset recorded, if the gates let it.

    Its DataVersion is the generation of the alias. It is automated: it runs when the DataVersion of the index has
    changed, not when that was merely materialized. A failing blocking check of the index keeps it from running.
    `spec`: as for the index, if gates ask queries of an embedder that cannot be opened by its name.
    """
    asset.setdefault("kinds", {"ragfence"})
    asset.setdefault("description", f"The alias {alias!r}: it points at a build that is sealed and passed its gates.")
    asset.setdefault("automation_condition", ON_NEW_VERSION)
    index_key = index.key if isinstance(index, dg.AssetsDefinition) else dg.AssetKey.from_coercible(index)

    def live_alias(context: dg.AssetExecutionContext) -> dg.MaterializeResult:  # type: ignore[type-arg]
        index_hash = index_hash_at(context, index_key)
        with opened_in(context, resource_key) as opened:
            use_embedder(opened, spec)
            try:
                swap = opened.aliases.swap(
                    alias, index_hash, gates=gates, actor=f"dagster:{context.run.run_id}", reason="materialized"
                )
            except GateFailed as failed:
                raise dg.Failure(
                    description=f"{failed.message} The alias is where it was.",
                    metadata={
                        "gates": _metadata.gates([GateResult(**each) for each in failed.report]),
                        "index_hash": index_hash,
                    },
                    allow_retries=False,
                ) from failed
            history = opened.aliases.history(alias, limit=SHOWN)
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

    return asset_made(live_alias, name, resource_key, asset, deps=[index_key, *asset.pop("deps", ())])


ON_NEW_VERSION = (
    (
        dg.AutomationCondition.any_deps_match(dg.AutomationCondition.data_version_changed()).since_last_handled()
        # When it is first looked at, nobody knows what has changed: then it runs if it never has.
        | (dg.AutomationCondition.initial_evaluation() & dg.AutomationCondition.missing())
    )
    & ~dg.AutomationCondition.any_deps_missing()
    & ~dg.AutomationCondition.in_progress()
).with_label("the DataVersion of a dependency has changed")


def use_embedder(fence: Fence, spec: Wanted) -> None:
    """An embedder that is an object has no name by which queries could open it again."""
    wanted = spec() if callable(spec) else spec
    if wanted is not None and not isinstance(wanted.embedder, str):
        fence.indexes.use(wanted.embedder)


def _inputs(fence: Fence, spec: IndexSpec | None, before: str | None) -> dg.TableMetadataValue:
    """Each input of the INDEX_HASH; beside it what it was in the build before, if that is still known."""
    try:
        explained = fence.indexes.explain(spec, against=before)
    except RagfenceError:  # it was retired; what was before is of no use for the build of now
        explained = fence.indexes.explain(spec)
    earlier = explained.before or {}
    rows = [
        {"input": each, "now": str(value), "before": str(earlier[each]) if each in explained.differing else ""}
        for each, value in explained.inputs.items()
    ]
    if told := explained.documents:
        what = f"{told.added} added, {told.removed} removed, {told.changed} changed, {told.unchanged} unchanged"
        rows.append({"input": "documents", "now": what, "before": ""})
    return _metadata.table(rows, {"input": "string", "now": "string", "before": "string"})
