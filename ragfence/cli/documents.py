"""`ragfence snippets`, `retract`, `purge`, `verify`, `compact` and `content-hash`: documents shown and maintained."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Limit, Stores, Yes, open_fence
from ragfence.errors import Conflict, DocumentInvalid, InFlight, Quarantined, RagfenceError, Stale, ValidationError

if TYPE_CHECKING:
    from ragfence.documents.findings import Finding, Verification

TEXT_SHOWN = 72
"""How many characters of a snippet are printed."""

DocId = Annotated[
    str, typer.Argument(metavar="DOC_ID", help="The doc_id of the document; for a file, its path in the source.")
]
DocIds = Annotated[
    list[str],
    typer.Argument(metavar="DOC_ID...", help="The doc_ids of the documents; for a file, its path in the source."),
]


def retract(
    doc_ids: DocIds,
    *,
    stores: Stores,
    as_json: Json = False,
    sequence: Annotated[
        int | None,
        typer.Option("--sequence", metavar="N", help="The place of the retraction in the order of the revisions."),
    ] = None,
) -> None:
    """Retract documents. Ingesting the same content again brings them back with the same snippet_ids."""
    results: list[dict[str, Any]] = []
    with open_fence(stores) as fence:
        for doc_id in doc_ids:
            error: RagfenceError | None = None
            retracted = False
            try:
                retracted = fence.documents.retract(doc_id, sequence=sequence).is_new
            except (Stale, Conflict, InFlight, Quarantined, DocumentInvalid) as refused:
                error = refused  # the other documents are retracted all the same
            problem = output.error_document(error) if error else None
            results.append({"doc_id": doc_id, "retracted": retracted, "error": problem})
            if error and not as_json:
                output.print_error(error, as_json=False)
    if as_json:
        output.print_json({"documents": results})
    else:
        for result in results:
            if not result["error"]:
                output.echo(f"{result['doc_id']}: {'retracted' if result['retracted'] else 'not a live document'}")
    if any(result["error"] for result in results):
        raise typer.Exit(1)


def snippets(
    doc_id: DocId,
    *,
    stores: Stores,
    as_json: Json = False,
) -> None:
    """Show the snippets of a document and their positions in its text."""
    with open_fence(stores) as fence:
        document, found = fence.documents.get(doc_id), fence.documents.snippets(doc_id)
    if document is None:
        raise ValidationError(
            f"there is no live document {doc_id!r}",
            hint=f"`ragfence explain {doc_id!r}` shows what happened to it, if it was ever ingested",
        )
    if as_json:
        output.print_json({**asdict(document), "snippets": [asdict(snippet) for snippet in found]})
        return
    console = output.out()
    listing = output.Listing(
        console,
        output.Column("#", right=True, whole=True),
        output.Column("place", right=True, whole=True),
        output.Column("tokens", right=True, whole=True),
        "section",
        "text",
        output.Column("snippet_id", whole=True, wide=True),
    )
    for snippet in found:
        listing.add(
            snippet.ordinal,
            f"{snippet.start}-{snippet.end}",
            snippet.tokens,
            snippet.section_id,
            _line(snippet.text),
            snippet.snippet_id,
        )
    listing.print()
    output.echo(
        f"{doc_id}: {output.pluralize(len(found), 'snippet')} of {document.size:,} bytes, {document.content_hash}"
    )


def purge(
    doc_id: DocId,
    *,
    stores: Stores,
    as_json: Json = False,
    yes: Yes = False,
) -> None:
    """Delete the text and metadata of a document permanently. Only a tombstone remains."""
    with open_fence(stores) as fence:
        if not yes:
            if as_json or not output.is_interactive():
                raise ValidationError("nothing was purged: a purge cannot be undone", hint="confirm it with --yes")
            if not typer.confirm(f"Delete {output.plain(doc_id)} permanently?", err=True):
                output.err().print("nothing was purged")
                raise typer.Exit(1)
        with output.progress("purging"):
            report = fence.documents.purge(doc_id)
    if as_json:
        output.print_json(asdict(report))
    elif report.known:
        output.echo(
            f"{report.doc_id}: purged; {output.pluralize(report.rows, 'row')} and "
            f"{output.pluralize(report.deleted.objects, 'object')}"
            f" ({output.size(report.deleted.bytes)}) were deleted"
        )
    else:
        output.echo(f"{report.doc_id}: no such document, live or retracted")
    if not report.known:
        raise typer.Exit(1)


def content_hash(
    *,
    stores: Stores,
    as_json: Json = False,
    finish: Annotated[
        bool, typer.Option("--finish", help="End the change to the content hash of the policy, if no document is left.")
    ] = False,
) -> None:
    """Count the live documents by content hash. Reads the whole log."""
    with open_fence(stores) as fence:
        documents = fence.documents
        counted = documents.finish_content_hash() if finish else documents.content_hashes()
        wanted = fence.policy.content_hash
    others = {name: count for name, count in counted.items() if name != wanted}
    if as_json:
        output.print_json({"content_hash": wanted, "documents": counted, "finished": finish and not others})
    else:
        for name, count in counted.items():
            output.echo(f"{name}: {output.pluralize(count, 'live document')}")
        if not counted:
            output.echo("no live documents")
        if finish and not others:
            output.echo("finished: content_hash_also may be removed from the policy")
    if finish and others:
        names = " and ".join(others)
        if not as_json:
            output.echo(f"not finished: keep content_hash_also: {names} until no document is known by it")
        raise typer.Exit(1)


def compact(
    *,
    stores: Stores,
    as_json: Json = False,
) -> None:
    """Rewrite the log of documents into a few large objects, without revisions that were superseded long ago."""
    with open_fence(stores) as fence, output.progress("compacting") as advance:
        report = fence.documents.compact(progress=advance)
    if as_json:
        output.print_json(asdict(report))
        return
    if not report.epoch:
        log = (
            f"{output.pluralize(report.segments_before, 'segment')} with {output.pluralize(report.rows_before, 'row')}"
        )
        output.echo(f"nothing to compact: {log}")
        return
    listing = output.Listing(
        output.out(), f"epoch {report.epoch}", output.Column("before", right=True), output.Column("after", right=True)
    )
    listing.add("segments", f"{report.segments_before:,}", f"{report.segments_after:,}")
    listing.add("rows", f"{report.rows_before:,}", f"{report.rows_after:,}")
    listing.add("snippets", f"{report.snippets_before:,}", f"{report.snippets_after:,}")
    listing.add("size", output.size(report.bytes_before), output.size(report.bytes_after))
    listing.print()
    output.echo(
        f"{output.pluralize(report.dropped_revisions, 'superseded revision')} dropped, "
        f"{output.pluralize(report.deleted.objects, 'object')} deleted"
        f" ({output.size(report.deleted.bytes)})"
    )


def verify(
    *,
    stores: Stores,
    as_json: Json = False,
    repair: Annotated[bool, typer.Option("--repair", help="Repair what can be repaired.")] = False,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="With --repair: give up segments that cannot be read. Then ingest their documents again.",
        ),
    ] = False,
    limit: Limit = 100,
) -> None:
    """Compare fence store, log and snippets. Exits with 1 and the findings if they do not agree."""
    if accept_loss and not repair:
        raise typer.BadParameter("--accept-loss needs --repair")
    # A missing fence file is one of the things that this command finds.
    with (
        open_fence(stores, rebuild=True) as fence,
        output.progress("verifying") as advance,
    ):
        report = fence.documents.verify(repair, accept_loss=accept_loss, progress=advance)
    if as_json:
        repaired = [_finding(finding) for finding in report.repaired]
        findings = [_finding(finding) for finding in report.findings]
        output.print_json({"ok": report.ok, **asdict(report), "findings": findings, "repaired": repaired})
    else:
        _print_verification(report, limit)
    if not report.ok:
        raise typer.Exit(1)


def _print_verification(report: Verification, limit: int) -> None:
    documents, rows = output.pluralize(report.documents, "document"), output.pluralize(report.rows, "row")
    snippets, segments = output.pluralize(report.snippets, "snippet"), output.pluralize(report.segments, "segment")
    output.echo(f"epoch {report.epoch}: {documents}, {rows} and {snippets} in {segments}: {_verdict(report)}")
    if not report.findings:
        return
    listing = output.Listing(output.out(), output.Column("finding", whole=True), "what", "where")
    for finding in report.findings[: limit or None]:
        listing.add(finding.trouble.value, finding.what, finding.place)
    listing.print()
    if limit and len(report.findings) > limit:
        output.echo(f"the first {limit} of {len(report.findings):,}; show all with --limit 0")
    for trouble, to_do in {finding.trouble.value: finding.to_do for finding in report.findings}.items():
        output.echo(f"{trouble}\n  -> {output.format_hint(to_do)}")


def _verdict(report: Verification) -> str:
    repaired = f"{len(report.repaired):,} repaired, " if report.repaired else ""
    return repaired + (output.pluralize(len(report.findings), "finding") if report.findings else "all is well")


def _finding(finding: Finding) -> dict[str, Any]:
    return {**asdict(finding), "to_do": output.format_hint(finding.to_do)}


def _line(text: str) -> str:
    """The beginning of a text, on one line."""
    words = " ".join(text.split())
    return words if len(words) <= TEXT_SHOWN else f"{words[: TEXT_SHOWN - 3]}..."
