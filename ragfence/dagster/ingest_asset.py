"""The asset that ingests what changed in a source. Its DataVersion is the corpus digest."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unicodedata import normalize

import dagster as dg

from ragfence.core.hashing import SHARDS, digest, shard_of
from ragfence.dagster import _metadata
from ragfence.dagster._factory import SHOWN, asset_key, make_asset, progress_logger
from ragfence.dagster.resource import FENCE, open_fence
from ragfence.dagster.table_io import REFERENCE, table_io_manager
from ragfence.documents.sources import Item, PrefixedSource, Source, source_of
from ragfence.documents.sync.ingest_table import COLUMNS, IngestTable
from ragfence.documents.sync.prune_plan import Prune
from ragfence.documents.sync.report import SyncReport, describe_random_ids, describe_skipped
from ragfence.errors import ValidationError
from ragfence.fence import Fence

SHARD_PARTITIONS = dg.StaticPartitionsDefinition([f"{shard:02d}" for shard in range(SHARDS)])
"""The 64 shards of the fence. One partition per document would be too many for Dagster."""
EVERY_DOCUMENT = "every_document_ingested"
TABLE_TYPE = dg.PythonObjectDagsterType(IngestTable, name="IngestTable")
"""Shared, because Dagster refuses two types with the same name in a code location."""
ROWS_SHOWN = 10
"""How many rows of the table the metadata of a materialization shows."""
IDS_SHOWN = 3
"""How many snippet_ids of each of these rows are shown."""

Given = Any | Callable[[], Any]
"""A source (a folder, a URL, documents, a `Source`), or a callable that makes one in the run."""


class ShardSource:
    """The documents of a source that are in one shard.

    Each shard has a sync state of its own, so that a run may have any combination of partitions.
    """

    def __init__(self, whole: Source, shard: int, items: Callable[[], Iterator[Item]]) -> None:
        self.name = f"{whole.name}#{shard:02d}"
        self.origin: str = getattr(whole, "origin", whole.name)
        former: str = getattr(whole, "former_name", "")
        self.former_name = f"{former}#{shard:02d}" if former else ""
        self.items = items
        self._whole = whole

    @property
    def skipped(self) -> Any:
        """The count for the whole source, because a file without a reader is in no shard."""
        return getattr(self._whole, "skipped", None)


def build_ingest_asset(
    source: Given,
    *,
    name: str = "documents",
    prune: Prune = False,
    max_prune_share: float | None = None,
    allow_empty_text: bool = False,
    origin: str | None = None,
    prefix: str = "",
    take_over: bool = False,
    shards: bool = False,
    using: Callable[[Fence], Any] = lambda fence: fence.documents,
    resource_key: str = FENCE,
    **asset: Any,
) -> dg.AssetsDefinition:
    """An asset that ingests what changed in a source, once. Its DataVersion is the corpus digest.

    Its value is an `IngestTable` with doc_id, content_hash, decision and snippet_ids of every document of the source.
    The snippet_ids are always those of the first run. A downstream asset takes the table as a parameter, annotated with
    IngestTable, pyarrow.Table or pandas.DataFrame.

    A document that cannot be ingested fails the check `every_document_ingested`; the others are ingested.

    Args:
        source: A folder, a file, s3://bucket/prefix, documents, a `Source`, or a callable that returns one of these.
        name: The name of the asset.
        prune: Retract documents that the source no longer has: "scoped" or "full", as for `sync`.
        max_prune_share: The largest share of the live documents that a prune may retract.
        allow_empty_text: Accept documents without text, whatever the policy says.
        origin: The owner of the documents, as for `sync`.
        prefix: Put in front of every doc_id, as for `sync`.
        take_over: Become the owner of documents of another source, as for `sync`.
        shards: Partition the asset by the 64 shards. A backfill may run them in any order, in parallel, and again.
        using: Another chunker or a sink: `lambda fence: fence.documents.using(sink=...)`.
        resource_key: The FenceResource to use, if there are several.
        asset: Any other argument of `@dg.asset`.
    """
    if shards and prune == "full":
        raise ValidationError(
            'prune="full" with shards=True would retract the documents of all other shards',
            hint='use prune="scoped", or shards=False',
        )
    asset.setdefault("kinds", {"ragfence"})
    asset.setdefault("description", "Documents, ingested once per doc_id and content.")

    partitions_per_run = SHARDS
    if {"io_manager_key", "io_manager_def"} & asset.keys():
        partitions_per_run = 1  # Dagster's own IO manager takes one partition per run, and so do most others
    else:
        asset["io_manager_def"] = table_io_manager

    def documents(context: dg.AssetExecutionContext) -> dg.MaterializeResult[IngestTable]:
        with open_fence(context, resource_key) as fence, ExitStack() as closing:
            guard = using(fence)
            if allow_empty_text:
                guard = guard.using(allow_empty_text=True)
            given = resolve_source(source)
            found = source_of(given)
            if found is not source and callable(close := getattr(found, "close", None)):
                closing.callback(close)
            if prefix:  # before sharding, because the shard depends on the whole doc_id
                found = PrefixedSource(found, prefix)
            chosen = sorted(int(key) for key in context.partition_keys) if shards else []
            parts = _in_shards(found, fence.tenant, chosen) if chosen else [found]
            log_progress = progress_logger(context, "documents")
            reports = [
                guard.sync(
                    part,
                    prune,
                    max_prune_share=max_prune_share,
                    progress=log_progress,
                    table=True,
                    origin=origin,
                    take_over=take_over,
                )
                for part in parts
            ]
            report = _merge(reports, found.name)
            table = report.table or IngestTable()
            version = _digest(fence, chosen)
            _log(context, report)
            for shard, part in zip(chosen, reports, strict=False):  # one table per partition
                reference = (part.table or IngestTable()).to_json()
                context.add_asset_metadata({REFERENCE: reference}, partition_key=f"{shard:02d}")
            return dg.MaterializeResult(
                value=table,
                data_version=dg.DataVersion(version),
                metadata=_report_metadata(report)
                | _table_metadata(table)
                | {"corpus_digest": version}
                | ({} if chosen else {REFERENCE: table.to_json()}),
                check_results=[_check_result(report)],
            )

    # Dagster would use the annotation for all outputs, and the check is one of them. The type is given below.
    del documents.__annotations__["return"]
    key = dg.AssetKey.from_coercible(asset["key"]) if "key" in asset else asset_key(name, asset)
    return make_asset(
        documents,
        name,
        resource_key,
        asset,
        partitions_def=SHARD_PARTITIONS if shards else None,
        backfill_policy=dg.BackfillPolicy.multi_run(max_partitions_per_run=partitions_per_run) if shards else None,
        dagster_type=TABLE_TYPE,
        check_specs=[dg.AssetCheckSpec(EVERY_DOCUMENT, asset=key)],
    )


def resolve_source(source: Given) -> Any:
    """The source itself, or what it returns if it is a callable."""
    return source() if callable(source) and not isinstance(source, Source) else source


def _in_shards(source: Source, tenant: str, chosen: Sequence[int]) -> list[Source]:
    if len(chosen) == 1:
        (only,) = chosen
        return [
            ShardSource(source, only, lambda: (item for item in source.items() if _shard(tenant, item.doc_id) == only))
        ]
    by_shard: defaultdict[int, list[Item]] = defaultdict(list)  # one listing for all shards
    for item in source.items():
        by_shard[_shard(tenant, item.doc_id)].append(item)
    return [ShardSource(source, shard, lambda items=by_shard[shard]: iter(items)) for shard in chosen]  # type: ignore[misc]


def _shard(tenant: str, doc_id: str) -> int:
    """The shard of a doc_id in NFC, as it is stored: another form would give another shard."""
    return shard_of(tenant, normalize("NFC", doc_id))


def _merge(reports: Sequence[SyncReport], source: str) -> SyncReport:
    """One report for all shards of a run."""
    if len(reports) == 1:
        return reports[0]
    sums = {
        name: sum(getattr(report, name) for report in reports)
        for name in (
            "listed",
            "unread",
            "revived",
            "metadata_updated",
            "failed",
            "pruned",
            "kept",
            "repeated",
            "random_ids",
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
        random_ids_hint=next((report.random_ids_hint for report in reports if report.random_ids_hint), ""),
        table=IngestTable.join(report.table for report in reports if report.table),
        **sums,
    )


def _digest(fence: Fence, chosen: Sequence[int]) -> str:
    """The DataVersion. For some partitions only their shards count, so that other shards do not change it."""
    if not chosen or len(chosen) == SHARDS:
        return fence.indexes.corpus_digest()
    digests = [fence.documents.corpus_digest(shard) for shard in chosen]
    return str(
        digests[0] if len(digests) == 1 else digest("ragfence/shards/1", *(each.encode() for each in digests)).hex()
    )


def _report_metadata(report: SyncReport) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "decisions": _metadata.decisions(report.decisions | {"retracted": report.pruned, "failed": report.failed}),
        "listed": report.listed,
        "unread": report.unread,
        "skipped": report.skipped,
        "snippets_made": report.snippets_made,
        "snippets_saved": report.snippets_saved,
        "characters_saved": report.characters_saved,
        "seconds": round(report.seconds, 3),
        "chart": _metadata.chart(
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
        metadata["failures"] = _metadata.table(rows, {"doc_id": "string", "code": "string", "message": "string"})
    if report.not_pruned:
        metadata["not_pruned"] = report.not_pruned
    if report.kept:
        metadata["kept"] = report.kept
    if report.random_ids:
        metadata["random_ids"] = report.random_ids
        metadata["random_ids_hint"] = report.random_ids_hint
    if report.skipped:
        metadata["skipped_extensions"] = report.skipped_extensions
        metadata["skipped_special"] = report.skipped_special
    return metadata


def _table_metadata(table: IngestTable) -> dict[str, Any]:
    rows = [
        {**row, "snippet_ids": ", ".join(row["snippet_ids"][:IDS_SHOWN]), "snippets": len(row["snippet_ids"])}
        for row in table.head(ROWS_SHOWN)
    ]
    text, number = "string", "int"
    columns = {"doc_id": text, "content_hash": text, "decision": text, "snippets": number, "snippet_ids": text}
    schema = [dg.TableColumn(name, "array<string>" if name == "snippet_ids" else text) for name in COLUMNS]
    return {
        "preview": _metadata.table(rows, columns),
        "snippets": table.snippets,
        "dagster/column_schema": dg.TableSchema(columns=schema),
        "dagster/row_count": table.rows,
    }


def _check_result(report: SyncReport) -> dg.AssetCheckResult:
    failed = f"{report.failed} {'document was' if report.failed == 1 else 'documents were'} not ingested"
    return dg.AssetCheckResult(
        check_name=EVERY_DOCUMENT,
        passed=report.ok,
        severity=dg.AssetCheckSeverity.WARN,
        description=report.not_pruned or (failed if report.failed else ""),
        metadata={"failed": report.failed, "listed": report.listed, "skipped": report.skipped},
    )


def _log(context: dg.AssetExecutionContext, report: SyncReport) -> None:
    counts = ", ".join(f"{count} {name}" for name, count in report.decisions.items() if count) or "nothing"
    context.log.info("%s: %s; %d unchanged and not read", report.source, counts, report.unread)
    for each in report.failures[:SHOWN]:
        context.log.warning("%s: %s [%s]", each.doc_id, each.message, each.code)
    if report.random_ids:
        problem = describe_random_ids(report.random_ids)
        context.log.warning("%s: %s; %s", report.source, problem, report.random_ids_hint)
    if report.skipped:
        context.log.warning("%s: skipped %s", report.source, describe_skipped(report))
