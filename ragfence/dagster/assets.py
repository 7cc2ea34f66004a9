"""documents -> vector_index -> live_alias: assets whose work is fenced.

Each returns a MaterializeResult with the DataVersion of what is sealed, also when there was nothing to do: the corpus
digest, the INDEX_HASH, the generation of the alias. So downstream automation sees a change exactly when there is one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import dagster as dg

from ragfence.core.hashing import SHARDS, shard_of
from ragfence.dagster import telling
from ragfence.dagster.resource import FenceResource
from ragfence.dagster.versions import index_hash_at, recorded_version
from ragfence.documents.sources import Item, Source, source_of
from ragfence.documents.sync import Prune, SyncReport
from ragfence.errors import GateFailed, RagfenceError
from ragfence.fence import Fence
from ragfence.indexes.gates import Gates
from ragfence.indexes.spec import IndexSpec

SHARD_PARTITIONS = dg.StaticPartitionsDefinition([f"{shard:02d}" for shard in range(SHARDS)])
"""Never one partition for each document: the 64 shards that the fence has anyway."""
EVERY_DOCUMENT = "every_document_ingested"
SHOWN = 50

Given = Any | Callable[[], Any]
"""a source (a folder, a URL, documents, a `Source`), or a callable that makes one in the run"""


class InShards:
    """The documents of a source that fall into some of the shards, with a memory of their own."""

    def __init__(self, source: Source, tenant: str, shards: Sequence[int]) -> None:
        self._source = source
        self._tenant = tenant
        self._shards = frozenset(shards)
        self.name = f"{source.name}#{','.join(f'{shard:02d}' for shard in sorted(shards))}"

    def items(self) -> Iterator[Item]:
        return (item for item in self._source.items() if shard_of(self._tenant, item.doc_id) in self._shards)


def build_ingest_asset(
    source: Given,
    *,
    name: str = "documents",
    prune: Prune = False,
    max_prune_share: float | None = None,
    shards: bool = False,
    using: Callable[[Fence], Any] = lambda fence: fence.documents,
    **asset: Any,
) -> dg.AssetsDefinition:
    """An asset that ingests what changed in a source, once. Its DataVersion is the corpus digest.

    shards  partitioned by the 64 shards; a backfill may run them in any order, in parallel, and again
    using   another chunker or a sink: `lambda fence: fence.documents.using(sink=...)`
    asset   whatever else `@dg.asset` takes

    A document that cannot be ingested fails the check `every_document_ingested` and spoils nothing else.
    """
    asset.setdefault("kinds", {"ragfence"})
    asset.setdefault("description", "Documents, ingested once per doc_id and content.")

    def documents(context: dg.AssetExecutionContext, fence: FenceResource) -> dg.MaterializeResult:  # type: ignore[type-arg]
        with fence.opened(context) as opened:
            guard = using(opened)
            found = source_of(source() if callable(source) and not isinstance(source, Source) else source)
            chosen = [int(key) for key in context.partition_keys] if shards else []
            if chosen:
                found = InShards(found, opened.tenant, chosen)
            report = guard.sync(found, prune, max_prune_share=max_prune_share, progress=_told(context, "documents"))
            # Of one partition the digest of its shard: that of the whole would change with every other.
            digest = guard.corpus_digest(chosen[0] if len(chosen) == 1 else None)
            _log(context, report)
            return dg.MaterializeResult(
                data_version=dg.DataVersion(digest),
                metadata=_of_report(report) | {"corpus_digest": digest},
                check_results=[_every_document(report)],
            )

    return _asset(
        documents,
        name=name,
        partitions_def=SHARD_PARTITIONS if shards else None,
        backfill_policy=dg.BackfillPolicy.multi_run(max_partitions_per_run=SHARDS) if shards else None,
        check_specs=[dg.AssetCheckSpec(EVERY_DOCUMENT, asset=asset.get("key") or _key(name, asset))],
        **asset,
    )


def build_index_asset(
    spec: IndexSpec | Callable[[], IndexSpec] | None = None,
    *,
    name: str = "vector_index",
    deps: Sequence[Any] = ("documents",),
    wait_s: float | None = None,
    **asset: Any,
) -> dg.AssetsDefinition:
    """An asset that builds an index of all live documents, once per INDEX_HASH, which is its DataVersion.

    `spec`: what the index is to be; a callable makes it in the run, for embedders that cannot be named.
    """
    asset.setdefault("kinds", {"ragfence"})
    asset.setdefault("description", "An index of all live documents, built once per INDEX_HASH, read back and sealed.")

    def vector_index(context: dg.AssetExecutionContext, fence: FenceResource) -> dg.MaterializeResult:  # type: ignore[type-arg]
        with fence.opened(context) as opened:
            wanted = spec() if callable(spec) else spec
            before = recorded_version(context.instance, context.asset_key)
            build = opened.indexes.build(wanted, wait_s=wait_s, progress=_told_of_total(context))
            made, seal = build.seal.made, build.seal
            context.log.info(
                "%s: %s, %d rows, %d embedded", build.index_hash, build.decision, build.rows, made["embedded"]
            )
            embedded = made["embedded"] if build.decision == "new" else 0
            return dg.MaterializeResult(
                data_version=dg.DataVersion(build.index_hash),
                metadata={
                    "decision": str(build.decision),
                    "index_hash": build.index_hash,
                    "rows": build.rows,
                    "documents": build.documents,
                    "embedded": embedded,
                    "embedded_before": build.rows - embedded,
                    "started_from": made["base"] or "no other build",
                    "content_digest": build.content_digest,
                    "physical": build.physical,
                    "checks": telling.table(
                        [{"check": each, "value": str(value)} for each, value in seal.checks.items()],
                        {"check": "string", "value": "string"},
                    ),
                    "inputs": _inputs(opened, wanted, before if before != build.index_hash else None),
                    "chart": telling.chart(
                        "snippets", {"embedded now": embedded, "embedded before": build.rows - embedded}
                    ),
                },
            )

    return _asset(vector_index, name=name, deps=list(deps), **asset)


def build_alias_asset(
    alias: str,
    *,
    index: Any = "vector_index",
    name: str = "live_alias",
    gates: Gates | None = None,
    **asset: Any,
) -> dg.AssetsDefinition:
    """An asset that points an alias at the build its index asset recorded, if the gates let it.

    Its DataVersion is the generation of the alias. It is automated: it runs when the DataVersion of the index has
    changed, not when that was merely materialized. A failing blocking check of the index keeps it from running.
    """
    asset.setdefault("kinds", {"ragfence"})
    asset.setdefault("description", f"The alias {alias!r}: it points at a build that is sealed and passed its gates.")
    asset.setdefault("automation_condition", ON_NEW_VERSION)
    index_key = index.key if isinstance(index, dg.AssetsDefinition) else dg.AssetKey.from_coercible(index)

    def live_alias(context: dg.AssetExecutionContext, fence: FenceResource) -> dg.MaterializeResult:  # type: ignore[type-arg]
        index_hash = index_hash_at(context, index_key)
        with fence.opened(context) as opened:
            try:
                swap = opened.aliases.swap(
                    alias, index_hash, gates=gates, actor=f"dagster:{context.run.run_id}", reason="materialized"
                )
            except GateFailed as failed:
                raise dg.Failure(
                    description=f"{failed.message} The alias is where it was.",
                    metadata={"gates": telling.gates(failed.report or ()), "index_hash": index_hash},
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
                    "gates": telling.gates(swap.gates),
                    "history": telling.table(
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

    return _asset(live_alias, name=name, deps=[index_key], **asset)


ON_NEW_VERSION = (
    dg.AutomationCondition.any_deps_match(dg.AutomationCondition.data_version_changed()).since_last_handled()
    & ~dg.AutomationCondition.any_deps_missing()
    & ~dg.AutomationCondition.in_progress()
).with_label("the DataVersion of a dependency has changed")


def _asset(compute: Callable[..., Any], **asset: Any) -> dg.AssetsDefinition:
    made = dg.asset(**asset)(compute)
    assert isinstance(made, dg.AssetsDefinition)
    return made


def _key(name: str, asset: Mapping[str, Any]) -> dg.AssetKey:
    prefix = asset.get("key_prefix") or []
    return dg.AssetKey([*([prefix] if isinstance(prefix, str) else prefix), name])


def _of_report(report: SyncReport) -> dict[str, Any]:
    told: dict[str, Any] = {
        "decisions": telling.decisions(report.decisions | {"retracted": report.pruned, "failed": report.failed}),
        "listed": report.listed,
        "not_even_read": report.unread,
        "snippets_made": report.snippets_made,
        "snippets_saved": report.snippets_saved,
        "characters_saved": report.characters_saved,
        "seconds": report.seconds,
        "chart": telling.chart(
            "documents",
            {
                "new": report.decisions.get("new", 0),
                "unread": report.unread,
                "duplicate": report.decisions.get("duplicate", 0) - report.unread,
                "retracted": report.pruned,
                "failed": report.failed,
            },
        ),
    }
    if report.failures:
        rows = [{"doc_id": each.doc_id, "code": each.code, "message": each.message} for each in report.failures[:SHOWN]]
        told["failures"] = telling.table(rows, {"doc_id": "string", "code": "string", "message": "string"})
    if report.not_pruned:
        told["not_pruned"] = report.not_pruned
    return told


def _every_document(report: SyncReport) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        check_name=EVERY_DOCUMENT,
        passed=report.ok,
        severity=dg.AssetCheckSeverity.WARN,
        description=report.not_pruned or (f"{report.failed} documents were not ingested" if report.failed else ""),
        metadata={"failed": report.failed, "listed": report.listed},
    )


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
    return telling.table(rows, {"input": "string", "now": "string", "before": "string"})


def _told(context: dg.AssetExecutionContext, what: str) -> Callable[[int], None]:
    said = [0]

    def told(done: int) -> None:
        if done >= said[0] + 5000:
            said[0] = done
            context.log.info("%d %s", done, what)

    return told


def _told_of_total(context: dg.AssetExecutionContext) -> Callable[[int, int | None], None]:
    told = _told(context, "rows")
    return lambda done, total: told(done)


def _log(context: dg.AssetExecutionContext, report: SyncReport) -> None:
    counted = ", ".join(f"{count} {name}" for name, count in report.decisions.items() if count) or "nothing"
    context.log.info("%s: %s; %d not even read", report.source, counted, report.unread)
    for each in report.failures[:SHOWN]:
        context.log.warning("%s: %s [%s]", each.doc_id, each.message, each.code)
