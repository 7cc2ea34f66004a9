"""`ragfence ingest`: the documents of a folder, a file or a bucket. Only those that changed are read."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, StoreOptions, Stores
from ragfence.errors import RagfenceError, ValidationError

if TYPE_CHECKING:
    from ragfence.documents.sources import Source
    from ragfence.documents.sync.report import SyncReport
    from ragfence.fence import Fence

SHOWN = 20
"""How many failures are printed. --json has more of them."""


class PruneName(StrEnum):
    SCOPED = "scoped"
    FULL = "full"


def ingest(
    what: Annotated[
        str,
        typer.Argument(metavar="PATH|URL", help="A folder, a text file, a .jsonl file, or s3://bucket/prefix."),
    ],
    *,
    stores: Stores,
    as_json: Json = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would happen; change nothing.")] = False,
    prune: Annotated[
        PruneName | None,
        typer.Option(
            "--prune",
            help="Retract documents that the source no longer has: those that came from it (scoped), or all (full).",
        ),
    ] = None,
    max_prune_share: Annotated[
        float | None,
        typer.Option(
            "--max-prune-share",
            metavar="SHARE",
            min=0,
            max=1,
            help="The largest share of the live documents that --prune may retract; 1 allows all.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="The name of this source; by default its path or URL."),
    ] = None,
    origin: Annotated[
        str | None,
        typer.Option("--origin", metavar="NAME", help="The owner of these documents; by default the source."),
    ] = None,
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="TEXT", help="Put this in front of every doc_id, to keep sources apart.")
    ] = "",
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Replace documents that another source owns, and become their owner.")
    ] = False,
    ext: Annotated[
        list[str] | None, typer.Option("--ext", metavar="EXT", help="Only files with this extension; may be repeated.")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="PATTERN", help="Skip matching files, as in .gitignore; may be repeated."),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option("--encoding", metavar="NAME", help="The encoding of the files, if not utf-8.")
    ] = None,
    allow_empty_text: Annotated[
        bool, typer.Option("--allow-empty-text", help="Accept documents without text, or with white space only.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 if files were skipped because they cannot be read.")
    ] = False,
) -> None:
    """Ingest new and changed documents of a folder, a file or a bucket.

    Unchanged files are not read. The stores are created if they do not exist.

    Exits with 0 on success, 1 if some documents failed (with --strict: or were skipped), 2 if nothing was done.
    """
    from ragfence.documents.sync.report import describe_skipped

    # Whatever a sync logs is also in its report, which is printed below.
    logging.getLogger("ragfence.documents").addHandler(logging.NullHandler())
    reading: dict[str, Any] = {"extensions": ext, "ignore": ignore, "encoding": encoding}
    try:
        with contextlib.ExitStack() as stack:
            # Before any store is opened, so that a mistyped path does not create one.
            source = _source(what, name, {option: value for option, value in reading.items() if value})
            if callable(close := getattr(source, "close", None)):
                stack.callback(close)
            fresh = _stores_are_missing(stores)
            fence = stack.enter_context(_open_or_create(stores, temporary=fresh and dry_run))
            if fresh and not dry_run and not as_json:
                output.err().print(output.plain(f"created a new fence store: {fence.inspector.fences.url}"))
            advance = stack.enter_context(output.progress("ingesting"))
            report = fence.documents.using(allow_empty_text=allow_empty_text or None).sync(
                source,
                prune=prune.value if prune else False,
                max_prune_share=max_prune_share,
                progress=advance,
                dry_run=dry_run,
                origin=origin,
                prefix=prefix,
                take_over=take_over,
            )
            if not report.listed and not report.pruned:
                skipped = f": skipped {describe_skipped(report)}" if report.skipped else ""
                raise ValidationError(
                    f"{report.source} contains no documents{skipped}",
                    hint="use `--ext EXT` for files with other extensions; hidden and ignored files are skipped",
                )
            urls = _urls(fence)
    except RagfenceError as error:
        _fail(error, as_json=as_json)
    if as_json:
        output.print_json({**_as_json(report), **urls})
    else:
        _print(report)
        if fresh and not dry_run:
            output.suggest("`ragfence build` builds an index of them")
    if not report.ok or (strict and report.skipped):
        raise typer.Exit(1)


@contextlib.contextmanager
def _open_or_create(stores: StoreOptions, *, temporary: bool) -> Iterator[Fence]:
    """Unlike other commands, this one creates the stores if they do not exist.

    Args:
        stores: The options of the command.
        temporary: For a dry run, which must not create stores: opens empty ones that are deleted afterwards.
    """
    import ragfence

    store, objects = stores.store, stores.objects
    with contextlib.ExitStack() as stack:
        if temporary:
            store = stack.enter_context(tempfile.TemporaryDirectory())
            objects = os.path.join(store, "objects")
        fence = ragfence.open(store, objects=objects, tenant=stores.tenant, policy=stores.policy)
        yield stack.enter_context(fence)


def _stores_are_missing(stores: StoreOptions) -> bool:
    """True if no store exists yet. A store on a server always counts as existing."""
    fences, folder = stores.sqlite_file(), stores.objects_folder()
    return fences is not None and folder is not None and not fences.exists() and not folder.exists()


def _source(what: str, name: str | None, reading: dict[str, Any]) -> Source:
    from ragfence.documents.sources import FileSource, FolderSource, S3Source, source_of
    from ragfence.documents.sources.registry import _JSONL
    from ragfence.documents.sources.s3 import parse_url

    if not reading:
        return source_of(what, name=name)
    if what.startswith("s3://"):
        place = parse_url(what)
        return S3Source(
            place.bucket, place.prefix, endpoint_url=place.endpoint_url, region=place.region, name=name, **reading
        )
    if os.path.isdir(what):
        return FolderSource(what, name=name, **reading)
    if os.path.isfile(what) and not what.lower().endswith(_JSONL) and "ignore" not in reading:
        return FileSource(what, name=name, **reading)
    source_of(what, name=name)  # which raises if the path is wrong
    raise typer.BadParameter("--ext, --ignore and --encoding apply to the files of a folder or a bucket")


def _urls(fence: Fence) -> dict[str, str | None]:
    inspector = fence.inspector
    return {"store": inspector.fences.url, "objects": inspector.objects.url if inspector.objects is not None else None}


def _fail(error: RagfenceError, *, as_json: bool) -> None:
    """Exits with 2 if nothing was done, and with 1 if the error came after some documents were ingested."""
    report: SyncReport | None = error.details.get("report")
    done = report is not None and sum((*report.decisions.values(), report.failed, report.pruned)) > 0
    if report is not None and done and as_json:
        output.print_json({"error": output.error_document(error), "report": _as_json(report)})
    else:
        if report is not None and done:
            _print(report)
        output.print_error(error, as_json=as_json)
    raise typer.Exit(1 if done else 2)


def _as_json(report: SyncReport) -> dict[str, Any]:
    """The report without its table, which no command prints."""
    return {name: value for name, value in asdict(report).items() if name != "table"}


def _print(report: SyncReport) -> None:
    from ragfence.documents.sync.report import describe_skipped

    console = output.out()
    verb = "would be " if report.dry_run else ""
    output.echo(
        f"{report.source}: {output.pluralize(report.listed, 'document')} in {output.span(report.seconds * 1000)}"
    )
    listing = output.Listing(console, "decision", output.Column("documents", right=True), "")
    for decision, count in report.decisions.items():
        if count or decision in ("new", "duplicate"):
            listing.add(decision, f"{count:,}", _details(report).get(decision, " "))
    failed = report.failed - sum(report.decisions[decision] for decision in ("conflict", "in_flight", "refused"))
    if failed > 0:
        listing.add("not retracted", f"{failed:,}", " ")
    if report.pruned:
        listing.add(
            f"{verb}retracted",
            f"{report.pruned:,}",
            f"no longer in the source: {_few(report.pruned_ids, report.pruned)}",
        )
    listing.print()
    if report.snippets_saved:
        output.echo(
            f"saved: {output.pluralize(report.snippets_saved, 'snippet')} "
            f"({output.pluralize(report.characters_saved, 'character')}) need not be embedded again"
        )
    if report.skipped:
        output.echo(
            f"skipped: {describe_skipped(report)}; --ext EXT reads other text files, --ignore PATTERN skips silently"
        )
    if report.dry_run:
        output.echo("dry run: nothing was changed")
    _warn(report)


def _details(report: SyncReport) -> dict[str, str]:
    counts = (
        (report.unread, "unchanged, not read"),
        (report.revived, "revived"),
        (report.metadata_updated, "with new metadata"),
    )
    known = ", ".join(f"{count:,} {text}" for count, text in counts if count)
    new = output.pluralize(report.snippets_made, "snippet") if report.snippets_made else " "
    return {"new": new, "duplicate": known or " "}


def _warn(report: SyncReport) -> None:
    from ragfence.documents.sync.report import describe_random_ids

    console = output.err()
    if report.repeated:
        console.print(
            output.plain(
                f"warning: {_documents_have(report.repeated)} a doc_id that the source lists more than once "
                f"({_few(report.repeated_ids, report.repeated)}); the first one counts"
            )
        )
    if report.kept:
        one = report.kept == 1
        count = "1 document was" if one else f"{report.kept:,} documents were"
        them, have = ("it", "another source still has it") if one else ("them", "other sources still have them")
        console.print(output.plain(f"{count} not pruned: this source does not own {them}, or {have}"))
    if report.random_ids:
        console.print(output.plain(f"warning: {describe_random_ids(report.random_ids)}"))
        console.print(f"  -> {output.format_hint(report.random_ids_hint)}")
    if report.not_pruned:
        console.print(output.plain(f"warning: nothing was pruned: {report.not_pruned}"))
    for failure in report.failures[:SHOWN]:
        named = "" if failure.doc_id in failure.message else f"{failure.doc_id}: "
        console.print(f"failed: {output.plain(named + failure.message)}")
        if failure.hint:
            console.print(f"  -> {output.format_hint(failure.hint)}")
    if report.failed > SHOWN:
        console.print(f"and {report.failed - SHOWN:,} more failed; --json lists them")


def _few(doc_ids: tuple[str, ...], count: int) -> str:
    shown = ", ".join(doc_ids[:5])
    return f"{shown} ..." if count > min(5, len(doc_ids)) else shown


def _documents_have(count: int) -> str:
    return "1 document has" if count == 1 else f"{count:,} documents have"
