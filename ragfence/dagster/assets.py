"""documents -> vector_index -> live_alias: assets whose work is fenced.

Each returns a MaterializeResult with the DataVersion of what is sealed, also when there was nothing to do: the corpus
digest, the INDEX_HASH, the generation of the alias. So downstream automation sees a change exactly when there is one.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

import dagster as dg

from ragfence.core.hashing import SHARDS, digest, shard_of
from ragfence.dagster import telling
from ragfence.dagster.resource import FENCE, opened_in
from ragfence.dagster.versions import index_hash_at, recorded_version
from ragfence.documents.sources import Item, Source, source_of
from ragfence.documents.sync import Prune, SyncReport
from ragfence.errors import GateFailed, RagfenceError, ValidationError
from ragfence.fence import Fence
from ragfence.indexes.gates import GateResult, Gates
from ragfence.indexes.spec import IndexSpec

SHARD_PARTITIONS = dg.StaticPartitionsDefinition([f"{shard:02d}" for shard in range(SHARDS)])
"""Never one partition for each document: the 64 shards that the fence has anyway."""
EVERY_DOCUMENT = "every_document_ingested"
SHOWN = 50

Wanted = IndexSpec | Callable[[], IndexSpec] | None
Given = Any | Callable[[], Any]
"""a source (a folder, a URL, documents, a `Source`), or a callable that makes one in the run"""


class InShard:
    """The documents of a source that fall into one shard, with a memory of their own: a run of any partitions, with
    any others or alone, finds what the last one knew of each."""

    def __init__(self, name: str, shard: int, items: Callable[[], Iterator[Item]]) -> None:
        self.name = f"{name}#{shard:02d}"
        self.items = items


def build_ingest_asset(
    source: Given,
    *,
    name: str = "documents",
    prune: Prune = False,
    max_prune_share: float | None = None,
    shards: bool = False,
    using: Callable[[Fence], Any] = lambda fence: fence.documents,
    resource_key: str = FENCE,
    **asset: Any,
) -> dg.AssetsDefinition:
    """An asset that ingests what changed in a source, once. Its DataVersion is the corpus digest.

    shards  partitioned by the 64 shards; a backfill may run them in any order, in parallel, and again
    using   another chunker or a sink: `lambda fence: fence.documents.using(sink=...)`
    asset   whatever else `@dg.asset` takes

    `resource_key` names the FenceResource, here and below, where there are several.
    A document that cannot be ingested fails the check `every_document_ingested` and spoils nothing else.
    """
    if shards and prune == "full":
        raise ValidationError(
            'prune="full" with shards=True would retract the documents of all other shards',
            hint='prune="scoped", or no shards',
        )
    asset.setdefault("kinds", {"ragfence"})
    asset.setdefault("description", "Documents, ingested once per doc_id and content.")

    def documents(context: dg.AssetExecutionContext) -> dg.MaterializeResult:  # type: ignore[type-arg]
        with opened_in(context, resource_key) as opened, ExitStack() as closing:
            guard = using(opened)
            given = made_of(source)
            found = source_of(given)
            if found is not source and callable(close := getattr(found, "close", None)):
                closing.callback(close)
            chosen = sorted(int(key) for key in context.partition_keys) if shards else []
            parts = _in_shards(found, opened.tenant, chosen) if chosen else [found]
            told = _told(context, "documents")
            report = _together(
                [guard.sync(part, prune, max_prune_share=max_prune_share, progress=told) for part in parts],
                found.name,
            )
            version = _digest(opened, chosen)
            _log(context, report)
            return dg.MaterializeResult(
                data_version=dg.DataVersion(version),
                metadata=_of_report(report) | {"corpus_digest": version},
                check_results=[_every_document(report)],
            )

    key = dg.AssetKey.from_coercible(asset["key"]) if "key" in asset else _key(name, asset)
    return _asset(
        documents,
        name,
        resource_key,
        asset,
        partitions_def=SHARD_PARTITIONS if shards else None,
        backfill_policy=dg.BackfillPolicy.multi_run(max_partitions_per_run=SHARDS) if shards else None,
        check_specs=[dg.AssetCheckSpec(EVERY_DOCUMENT, asset=key)],
    )


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
            build = opened.indexes.build(wanted, wait_s=wait_s, progress=_told_of_total(context))
            made, seal = build.seal.made, build.seal
            context.log.info(
                "%s: %s, %d rows, %d embedded", build.index_hash, build.decision, build.rows, made["embedded"]
            )
            embedded = made["embedded"] if build.decision == "new" else 0
            return dg.MaterializeResult(
                data_version=dg.DataVersion(build.index_hash),
                metadata={
                    **telling.answer(build.receipt),
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

    return _asset(vector_index, name, resource_key, asset, deps=list(deps))


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
                        "gates": telling.gates([GateResult(**each) for each in failed.report]),
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

    return _asset(live_alias, name, resource_key, asset, deps=[index_key, *asset.pop("deps", ())])


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


def made_of(source: Given) -> Any:
    """The source itself, or what a callable makes of it now."""
    return source() if callable(source) and not isinstance(source, Source) else source


def _asset(
    compute: Callable[..., Any], name: str, resource_key: str, given: Mapping[str, Any], **own: Any
) -> dg.AssetsDefinition:
    named = {} if "key" in given else {"name": name}
    required = {resource_key, *(given.get("required_resource_keys") or ())}
    with warnings.catch_warnings():
        # Backfill policies are in beta; whoever uses an asset of ours has not chosen to use one.
        warnings.simplefilter("ignore", dg.BetaWarning)
        made = dg.asset(**{**named, **given, **own, "required_resource_keys": required})(compute)
    assert isinstance(made, dg.AssetsDefinition)
    return made


def _in_shards(source: Source, tenant: str, chosen: Sequence[int]) -> list[Source]:
    if len(chosen) == 1:
        (only,) = chosen
        return [
            InShard(
                source.name, only, lambda: (item for item in source.items() if shard_of(tenant, item.doc_id) == only)
            )
        ]
    by_shard: defaultdict[int, list[Item]] = defaultdict(list)  # it is listed once for all of them
    for item in source.items():
        by_shard[shard_of(tenant, item.doc_id)].append(item)
    return [InShard(source.name, shard, lambda items=by_shard[shard]: iter(items)) for shard in chosen]  # type: ignore[misc]


def _together(reports: Sequence[SyncReport], source: str) -> SyncReport:
    """One report for all the shards of a run."""
    if len(reports) == 1:
        return reports[0]
    counted = {
        name: sum(getattr(report, name) for report in reports)
        for name in (
            "listed",
            "unread",
            "revived",
            "metadata_updated",
            "failed",
            "pruned",
            "repeated",
            "snippets_made",
            "snippets_saved",
            "characters_saved",
            "seconds",
        )
    }
    decisions: Counter[str] = Counter()
    for report in reports:
        decisions.update(report.decisions)
    return replace(
        reports[0],
        source=source,
        decisions={name: decisions[name] for name in reports[0].decisions},
        failures=tuple(each for report in reports for each in report.failures),
        pruned_ids=tuple(each for report in reports for each in report.pruned_ids),
        repeated_ids=tuple(each for report in reports for each in report.repeated_ids),
        not_pruned=next((report.not_pruned for report in reports if report.not_pruned), ""),
        **counted,
    )


def _digest(fence: Fence, chosen: Sequence[int]) -> str:
    """Of some partitions, that of their shards: that of the whole would change with every other."""
    if not chosen or len(chosen) == SHARDS:
        return fence.indexes.corpus_digest()
    digests = [fence.documents.corpus_digest(shard) for shard in chosen]
    return str(
        digests[0] if len(digests) == 1 else digest("ragfence/shards/1", *(each.encode() for each in digests)).hex()
    )


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
