"""`ragfence ingest`: the documents of a folder, a file or a bucket, each read only if it changed."""

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
from ragfence.cli.options import Json, Objects, PolicyFile, Store, StoreOptions, Tenant
from ragfence.errors import RagfenceError, ValidationError

if TYPE_CHECKING:
    from ragfence.documents.sources import Source
    from ragfence.documents.sync.report import SyncReport
    from ragfence.fence import Fence

SHOWN = 20
"""as many failures are told; --json has more of them"""


class PruneName(StrEnum):
    SCOPED = "scoped"
    FULL = "full"


def ingest(
    what: Annotated[
        str,
        typer.Argument(metavar="PATH|URL", help="A folder, a text file, a .jsonl file, or s3://bucket/prefix."),
    ],
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would happen; change nothing.")] = False,
    prune: Annotated[
        PruneName | None,
        typer.Option(
            "--prune",
            help="Retract what is gone: of what this source brought (scoped), or whatever it does not have (full).",
        ),
    ] = None,
    max_prune_share: Annotated[
        float | None,
        typer.Option(
            "--max-prune-share", min=0, max=1, help="How much of the live documents a prune may take; 1 for all."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Tells this source from others; else the path of the folder or file.")
    ] = None,
    origin: Annotated[
        str | None, typer.Option("--origin", help="The owner of these documents, if it is not the source itself.")
    ] = None,
    prefix: Annotated[str, typer.Option("--prefix", help="Put in front of every doc_id, to keep sources apart.")] = "",
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Replace documents that another source owns, and own them from now on.")
    ] = False,
    ext: Annotated[
        list[str] | None, typer.Option("--ext", metavar="EXT", help="Only files with this extension; repeat for more.")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="PATTERN", help="Leave out, as in .gitignore; repeat for more."),
    ] = None,
    encoding: Annotated[str | None, typer.Option("--encoding", help="Of the files, if not utf-8.")] = None,
    allow_empty_text: Annotated[
        bool, typer.Option("--allow-empty-text", help="Accept documents whose text is empty or only white space.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="End with 1 if files were skipped because nothing can read them.")
    ] = False,
) -> None:
    """Ingests what is new or changed, and leaves the rest unread.

    Ends with 0 if all is fine, with 1 if some documents failed (with --strict: or were skipped), with 2 if nothing was
    done.
    """
    from ragfence.documents.sync.report import describe_skipped

    # What is logged of a sync stands in its report, too, and is printed below.
    logging.getLogger("ragfence.documents").addHandler(logging.NullHandler())
    reading: dict[str, Any] = {"extensions": ext, "ignore": ignore, "encoding": encoding}
    try:
        with contextlib.ExitStack() as stack:
            # Before any store is opened: a path that was mistyped makes none.
            source = _source(what, name, {option: value for option, value in reading.items() if value})
            if callable(close := getattr(source, "close", None)):
                stack.callback(close)
            place = StoreOptions(store, objects, tenant, policy)
            fresh = _is_nowhere(place)
            fence = stack.enter_context(_opened(place, in_passing=fresh and dry_run))
            if fresh and not dry_run and not as_json:
                output.err().print(output.plain(f"made a new fence store: {fence.inspector.fences.url}"))
            told = stack.enter_context(output.progress("ingesting"))
            report = fence.documents.using(allow_empty_text=allow_empty_text or None).sync(
                source,
                prune=prune.value if prune else False,
                max_prune_share=max_prune_share,
                progress=told,
                dry_run=dry_run,
                origin=origin,
                prefix=prefix,
                take_over=take_over,
            )
            if not report.listed and not report.pruned:
                skipped = f": skipped {describe_skipped(report)}" if report.skipped else ""
                raise ValidationError(
                    f"{report.source} holds no documents{skipped}",
                    hint="`--ext` takes files with other extensions; hidden files and what is ignored are left out",
                )
            stores = _stores(fence)
    except RagfenceError as error:
        _stopped(error, as_json=as_json)
    if as_json:
        output.document({**_as_json(report), **stores})
    else:
        _print(report)
    if not report.ok or (strict and report.skipped):
        raise typer.Exit(1)


@contextlib.contextmanager
def _opened(place: StoreOptions, *, in_passing: bool) -> Iterator[Fence]:
    """Unlike other commands, this one makes the stores if there are none: somebody has to be the first.

    `in_passing`: for a dry run, which must not. It gets stores that are as empty, and gone afterwards.
    """
    import ragfence

    store, objects = place.store, place.objects
    with contextlib.ExitStack() as stack:
        if in_passing:
            store = stack.enter_context(tempfile.TemporaryDirectory())
            objects = os.path.join(store, "objects")
        fence = ragfence.open(store, objects=objects, tenant=place.tenant, policy=place.policy)
        yield stack.enter_context(fence)


def _is_nowhere(place: StoreOptions) -> bool:
    """There are no stores yet; those on servers count as there."""
    fences, folder = place.sqlite_file(), place.objects_folder()
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
    source_of(what, name=name)  # which says what is wrong with it
    raise typer.BadParameter("--ext, --ignore and --encoding are about the files of a folder or a bucket")


def _stores(fence: Fence) -> dict[str, str | None]:
    inspector = fence.inspector
    return {"store": inspector.fences.url, "objects": inspector.objects.url if inspector.objects is not None else None}


def _stopped(error: RagfenceError, *, as_json: bool) -> None:
    """Nothing was done, unless the error came on the way."""
    report: SyncReport | None = error.details.get("report")
    done = report is not None and sum((*report.decisions.values(), report.failed, report.pruned)) > 0
    if report is not None and done and as_json:
        told = output.as_told(error)
        output.document({"error": told, "report": _as_json(report)})
    else:
        if report is not None and done:
            _print(report)
        output.error(error, as_json=as_json)
    raise typer.Exit(1 if done else 2)


def _as_json(report: SyncReport) -> dict[str, Any]:
    """Without the table, which no command asks for."""
    return {name: value for name, value in asdict(report).items() if name != "table"}


def _print(report: SyncReport) -> None:
    from ragfence.documents.sync.report import describe_skipped

    console = output.out()
    verb = "would be " if report.dry_run else ""
    output.say(f"{report.source}: {output.many(report.listed, 'document')} in {output.span(report.seconds * 1000)}")
    listing = output.Listing(console, "decision", output.Column("documents", right=True), "")
    for decision, count in report.decisions.items():
        if count or decision in ("new", "duplicate"):
            listing.add(decision, f"{count:,}", _remarks(report).get(decision, " "))
    failed = report.failed - sum(report.decisions[decision] for decision in ("conflict", "in_flight", "refused"))
    if failed > 0:
        listing.add("not retracted", f"{failed:,}", " ")
    if report.pruned:
        listing.add(f"{verb}retracted", f"{report.pruned:,}", f"gone: {_few(report.pruned_ids, report.pruned)}")
    listing.print()
    if report.snippets_saved:
        output.say(
            f"saved: {output.many(report.snippets_saved, 'snippet')} need not be embedded again"
            f" ({output.many(report.characters_saved, 'character')} of documents that are known)"
        )
    if report.skipped:
        output.say(
            f"skipped: {describe_skipped(report)}; --ext reads text files of other kinds, --ignore leaves them out"
        )
    if report.dry_run:
        output.say("a dry run: nothing was changed")
    _warn(report)


def _remarks(report: SyncReport) -> dict[str, str]:
    counted = (
        (report.unread, "unread"),
        (report.revived, "revived"),
        (report.metadata_updated, "with other metadata"),
    )
    known = ", ".join(f"{count:,} {text}" for count, text in counted if count)
    made = output.many(report.snippets_made, "snippet") if report.snippets_made else " "
    return {"new": made, "duplicate": known or " "}


def _warn(report: SyncReport) -> None:
    from ragfence.documents.sync.report import describe_random_ids

    console = output.err()
    if report.repeated:
        console.print(
            output.plain(
                f"warning: {_documents_have(report.repeated)} a doc_id that the source had listed before "
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
        console.print(f"  -> {output.advice(report.random_ids_hint)}")
    if report.not_pruned:
        console.print(output.plain(f"warning: nothing was pruned: {report.not_pruned}"))
    for failure in report.failures[:SHOWN]:
        named = "" if failure.doc_id in failure.message else f"{failure.doc_id}: "
        console.print(f"failed: {output.plain(named + failure.message)}")
        if failure.hint:
            console.print(f"  -> {output.advice(failure.hint)}")
    if report.failed > SHOWN:
        console.print(f"and {report.failed - SHOWN:,} more that failed; --json names them")


def _few(doc_ids: tuple[str, ...], count: int) -> str:
    shown = ", ".join(doc_ids[:5])
    return f"{shown} ..." if count > min(5, len(doc_ids)) else shown


def _documents_have(count: int) -> str:
    return "1 document has" if count == 1 else f"{count:,} documents have"
