"""`ragfence retract`, `snippets`, `purge`, `verify` and `compact`: documents taken away, looked at, kept in order."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Objects, PolicyFile, Store, StoreOptions, Tenant, opened
from ragfence.errors import Conflict, DocumentInvalid, InFlight, Quarantined, RagfenceError, Stale, ValidationError

if TYPE_CHECKING:
    from ragfence.documents.findings import Finding, Verification

TEXT_SHOWN = 72
"""as much of a snippet's text fits a line"""

DocId = Annotated[str, typer.Argument(metavar="DOC_ID", help="As the document was ingested; for a file its path.")]
DocIds = Annotated[
    list[str], typer.Argument(metavar="DOC_ID...", help="As the documents were ingested; for a file its path.")
]


def retract(
    doc_ids: DocIds,
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    sequence: Annotated[
        int | None, typer.Option("--sequence", help="Where the retraction stands among the revisions.")
    ] = None,
) -> None:
    """Takes documents away. The same content, ingested again, brings them back with their snippet_ids."""
    told: list[dict[str, Any]] = []
    with opened(StoreOptions(store, objects, tenant, policy)) as fence:
        for doc_id in doc_ids:
            error: RagfenceError | None = None
            retracted = False
            try:
                retracted = fence.documents.retract(doc_id, sequence=sequence).is_new
            except (Stale, Conflict, InFlight, Quarantined, DocumentInvalid) as refused:
                error = refused  # of this one; the others are not concerned
            told.append({"doc_id": doc_id, "retracted": retracted, "error": output.as_told(error) if error else None})
            if error and not as_json:
                output.error(error, as_json=False)
    if as_json:
        output.document({"documents": told})
    else:
        for one in told:
            if not one["error"]:
                output.say(f"{one['doc_id']}: {'retracted' if one['retracted'] else 'was not there'}")
    if any(one["error"] for one in told):
        raise typer.Exit(1)


def snippets(
    doc_id: DocId,
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
) -> None:
    """The snippets of a document, with their places in its text."""
    with opened(StoreOptions(store, objects, tenant, policy)) as fence:
        document, found = fence.documents.get(doc_id), fence.documents.snippets(doc_id)
    if document is None:
        raise ValidationError(
            f"there is no live document {doc_id!r}",
            hint=f"`ragfence explain {doc_id!r}` tells what happened to it, if anything did",
        )
    if as_json:
        output.document({**asdict(document), "snippets": [asdict(snippet) for snippet in found]})
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
    output.say(f"{doc_id}: {output.many(len(found), 'snippet')} of {document.size:,} bytes, {document.content_hash}")


def purge(
    doc_id: DocId,
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Removes the text and the metadata of a document for good; only a tombstone stays."""
    with opened(StoreOptions(store, objects, tenant, policy)) as fence:
        if not yes:
            if as_json or not output.is_interactive():
                raise ValidationError("nothing was purged: it cannot be undone", hint="say that you mean it: --yes")
            if not typer.confirm(f"Remove {output.plain(doc_id)} for good?", err=True):
                output.err().print("nothing was purged")
                raise typer.Exit(1)
        with output.progress("purging"):
            report = fence.documents.purge(doc_id)
    if as_json:
        output.document(asdict(report))
    elif report.known:
        output.say(
            f"{report.doc_id}: purged; {output.many(report.rows, 'row')} and "
            f"{output.many(report.deleted.objects, 'object')}"
            f" ({output.size(report.deleted.bytes)}) are gone"
        )
    else:
        output.say(f"{report.doc_id}: nothing is known of it")
    if not report.known:
        raise typer.Exit(1)


def compact(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
) -> None:
    """Rewrites the log of documents into few large objects, without what was superseded long ago."""
    with opened(StoreOptions(store, objects, tenant, policy)) as fence, output.progress("compacting") as told:
        report = fence.documents.compact(progress=told)
    if as_json:
        output.document(asdict(report))
        return
    if not report.epoch:
        there = f"{output.many(report.segments_before, 'segment')} with {output.many(report.rows_before, 'row')}"
        output.say(f"nothing to gain: {there}")
        return
    listing = output.Listing(
        output.out(), f"epoch {report.epoch}", output.Column("before", right=True), output.Column("after", right=True)
    )
    listing.add("segments", f"{report.segments_before:,}", f"{report.segments_after:,}")
    listing.add("rows", f"{report.rows_before:,}", f"{report.rows_after:,}")
    listing.add("snippets", f"{report.snippets_before:,}", f"{report.snippets_after:,}")
    listing.add("size", output.size(report.bytes_before), output.size(report.bytes_after))
    listing.print()
    output.say(
        f"{output.many(report.dropped_revisions, 'superseded revision')} dropped, "
        f"{output.many(report.deleted.objects, 'object')} deleted"
        f" ({output.size(report.deleted.bytes)})"
    )


def verify(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    repair: Annotated[bool, typer.Option("--repair", help="Repair what can be repaired.")] = False,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="With --repair: give up segments that cannot be read, and what only they know. Ingest again then.",
        ),
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Show at most so many findings; 0 for all.")] = 100,
) -> None:
    """Compares fence store, log and snippets; ends with 1 and the findings when they do not tell the same story."""
    if accept_loss and not repair:
        raise typer.BadParameter("--accept-loss needs --repair")
    # A fence file that is gone is one of the things to be found.
    with (
        opened(StoreOptions(store, objects, tenant, policy), rebuild=True) as fence,
        output.progress("verifying") as told,
    ):
        report = fence.documents.verify(repair, accept_loss=accept_loss, progress=told)
    if as_json:
        repaired = [_finding(finding) for finding in report.repaired]
        findings = [_finding(finding) for finding in report.findings]
        output.document({"ok": report.ok, **asdict(report), "findings": findings, "repaired": repaired})
    else:
        _print_verification(report, limit)
    if not report.ok:
        raise typer.Exit(1)


def _print_verification(report: Verification, limit: int) -> None:
    output.say(
        f"epoch {report.epoch}: {output.many(report.documents, 'document')}, {output.many(report.rows, 'row')} and "
        f"{output.many(report.snippets, 'snippet')} in {output.many(report.segments, 'segment')}: {_verdict(report)}"
    )
    if not report.findings:
        return
    listing = output.Listing(output.out(), output.Column("trouble", whole=True), "what", "place")
    for finding in report.findings[: limit or None]:
        listing.add(finding.trouble.value, finding.what, finding.place)
    listing.print()
    if limit and len(report.findings) > limit:
        output.say(f"the first {limit} of {len(report.findings):,}; --limit 0 shows all")
    for trouble, to_do in {finding.trouble.value: finding.to_do for finding in report.findings}.items():
        output.say(f"{trouble}\n  -> {output.advice(to_do)}")


def _verdict(report: Verification) -> str:
    mended = f"{len(report.repaired):,} mended, " if report.repaired else ""
    return mended + (output.many(len(report.findings), "finding") if report.findings else "all is as it should be")


def _finding(finding: Finding) -> dict[str, Any]:
    return {**asdict(finding), "to_do": output.advice(finding.to_do)}


def _line(text: str) -> str:
    """The beginning of a text, on one line."""
    words = " ".join(text.split())
    return words if len(words) <= TEXT_SHOWN else f"{words[: TEXT_SHOWN - 3]}..."
