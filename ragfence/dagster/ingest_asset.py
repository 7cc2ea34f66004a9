"""The asset that ingests: what changed in a source, once. Its DataVersion is the corpus digest, whoever made it."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unicodedata import normalize

import dagster as dg

from ragfence.core.hashing import SHARDS, digest, shard_of
from ragfence.dagster import _metadata
from ragfence.dagster._factory import SHOWN, asset_made, said_now_and_then
from ragfence.dagster.resource import FENCE, opened_in
from ragfence.dagster.table_io import REFERENCE, table_io_manager
from ragfence.documents.sources import Item, PrefixedSource, Source, source_of
from ragfence.documents.sync.ingest_table import COLUMNS, IngestTable
from ragfence.documents.sync.prune_plan import Prune
from ragfence.documents.sync.report import SyncReport, describe_random_ids, describe_skipped
from ragfence.errors import ValidationError
from ragfence.fence import Fence

SHARD_PARTITIONS = dg.StaticPartitionsDefinition([f"{shard:02d}" for shard in range(SHARDS)])
"""Never one partition for each document: the 64 shards that the fence has anyway."""
EVERY_DOCUMENT = "every_document_ingested"
TABLE_TYPE = dg.PythonObjectDagsterType(IngestTable, name="IngestTable")
"""One for all: Dagster refuses two types of one name in a code location."""
ROWS_SHOWN = 10
"""of the table, in the metadata of a materialization"""
IDS_SHOWN = 3
"""of each of these rows"""

Given = Any | Callable[[], Any]
"""a source (a folder, a URL, documents, a `Source`), or a callable that makes one in the run"""


class InShard:
    """The documents of a source that fall into one shard, with a memory of their own: a run of any partitions, with
    any others or alone, finds what the last one knew of each."""

    def __init__(self, whole: Source, shard: int, items: Callable[[], Iterator[Item]]) -> None:
        self.name = f"{whole.name}#{shard:02d}"
        self.origin: str = getattr(whole, "origin", whole.name)
        former: str = getattr(whole, "former_name", "")
        self.former_name = f"{former}#{shard:02d}" if former else ""
        self.items = items
        self._whole = whole

    @property
    def skipped(self) -> Any:
        """Of the whole source: a file without a reader is in no shard."""
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

    Its value is an `IngestTable`: doc_id, content_hash, decision and snippet_ids of every document of the source, the
    snippet_ids being those of the first time. An asset downstream takes it as a parameter, annotated with IngestTable,
    pyarrow.Table or pandas.DataFrame.

    allow_empty_text  accept documents whose text is empty or only white space, whatever the policy says
    shards  partitioned by the 64 shards; a backfill may run them in any order, in parallel, and again
    origin, prefix, take_over  whose the documents are, as for `sync`
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

    most = SHARDS
    if {"io_manager_key", "io_manager_def"} & asset.keys():
        most = 1  # Dagster's own IO manager takes one partition per run, and so do most others
    else:
        asset["io_manager_def"] = table_io_manager

    def documents(context: dg.AssetExecutionContext) -> dg.MaterializeResult[IngestTable]:
        with opened_in(context, resource_key) as opened, ExitStack() as closing:
            guard = using(opened)
            if allow_empty_text:
                guard = guard.using(allow_empty_text=True)
            given = made_of(source)
            found = source_of(given)
            if found is not source and callable(close := getattr(found, "close", None)):
                closing.callback(close)
            if prefix:  # before the shards: a document falls into that of its whole doc_id
                found = PrefixedSource(found, prefix)
            chosen = sorted(int(key) for key in context.partition_keys) if shards else []
            parts = _in_shards(found, opened.tenant, chosen) if chosen else [found]
            told = said_now_and_then(context, "documents")
            reports = [
                guard.sync(
                    part,
                    prune,
                    max_prune_share=max_prune_share,
                    progress=told,
                    table=True,
                    origin=origin,
                    take_over=take_over,
                )
                for part in parts
            ]
            report = _together(reports, found.name)
            table = report.table or IngestTable()
            version = _digest(opened, chosen)
            _log(context, report)
            for shard, part in zip(chosen, reports, strict=False):  # each partition has a table of its own
                reference = (part.table or IngestTable()).to_json()
                context.add_asset_metadata({REFERENCE: reference}, partition_key=f"{shard:02d}")
            return dg.MaterializeResult(
                value=table,
                data_version=dg.DataVersion(version),
                metadata=_of_report(report)
                | _of_table(table)
                | {"corpus_digest": version}
                | ({} if chosen else {REFERENCE: table.to_json()}),
                check_results=[_every_document(report)],
            )

    # Dagster takes the annotation for that of all outputs, and a check is one, too; the type is given below.
    del documents.__annotations__["return"]
    key = dg.AssetKey.from_coercible(asset["key"]) if "key" in asset else _key(name, asset)
    return asset_made(
        documents,
        name,
        resource_key,
        asset,
        partitions_def=SHARD_PARTITIONS if shards else None,
        backfill_policy=dg.BackfillPolicy.multi_run(max_partitions_per_run=most) if shards else None,
        dagster_type=TABLE_TYPE,
        check_specs=[dg.AssetCheckSpec(EVERY_DOCUMENT, asset=key)],
    )


def made_of(source: Given) -> Any:
    """The source itself, or what a callable makes of it now."""
    return source() if callable(source) and not isinstance(source, Source) else source


def _in_shards(source: Source, tenant: str, chosen: Sequence[int]) -> list[Source]:
    if len(chosen) == 1:
        (only,) = chosen
        return [InShard(source, only, lambda: (item for item in source.items() if _shard(tenant, item.doc_id) == only))]
    by_shard: defaultdict[int, list[Item]] = defaultdict(list)  # it is listed once for all of them
    for item in source.items():
        by_shard[_shard(tenant, item.doc_id)].append(item)
    return [InShard(source, shard, lambda items=by_shard[shard]: iter(items)) for shard in chosen]  # type: ignore[misc]


def _shard(tenant: str, doc_id: str) -> int:
    """Of the id as it is stored: a source may have it in another form, and that would be of another shard."""
    return shard_of(tenant, normalize("NFC", doc_id))


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
        told["failures"] = _metadata.table(rows, {"doc_id": "string", "code": "string", "message": "string"})
    if report.not_pruned:
        told["not_pruned"] = report.not_pruned
    if report.kept:
        told["kept"] = report.kept
    if report.random_ids:
        told["random_ids"] = report.random_ids
        told["random_ids_hint"] = report.random_ids_hint
    if report.skipped:
        told["skipped_extensions"] = report.skipped_extensions
        told["skipped_special"] = report.skipped_special
    return told


def _of_table(table: IngestTable) -> dict[str, Any]:
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


def _every_document(report: SyncReport) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        check_name=EVERY_DOCUMENT,
        passed=report.ok,
        severity=dg.AssetCheckSeverity.WARN,
        description=report.not_pruned or (f"{report.failed} documents were not ingested" if report.failed else ""),
        metadata={"failed": report.failed, "listed": report.listed, "skipped": report.skipped},
    )


def _log(context: dg.AssetExecutionContext, report: SyncReport) -> None:
    counted = ", ".join(f"{count} {name}" for name, count in report.decisions.items() if count) or "nothing"
    context.log.info("%s: %s; %d unread", report.source, counted, report.unread)
    for each in report.failures[:SHOWN]:
        context.log.warning("%s: %s [%s]", each.doc_id, each.message, each.code)
    if report.random_ids:
        told = describe_random_ids(report.random_ids)
        context.log.warning("%s: %s; %s", report.source, told, report.random_ids_hint)
    if report.skipped:
        context.log.warning("%s: skipped %s", report.source, describe_skipped(report))
