"""`ragfence hydrate`, `ragfence purge-expired` and `ragfence journal reconcile`: maintenance of the fence store."""

from __future__ import annotations

from typing import Annotated

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, StoreCommands, Stores, open_fence

journal = StoreCommands(no_args_is_help=True)


def hydrate(
    *,
    stores: Stores,
    as_json: Json = False,
) -> None:
    """Rebuild the fence store from the object store.

    This happens automatically, except after the file of an embedded store was restored from a backup.
    """
    loaded = 0
    # The command is meant for a missing fence file.
    with (
        open_fence(stores, rebuild=True) as fence,
        output.progress("loading") as advance,
    ):

        def progress(done: int) -> None:
            nonlocal loaded
            loaded = done
            advance(done)

        fence.hydrate(progress)
        markers = [marker for marker in fence.inspector.markers() if marker is not None]
        epoch = max((marker.epoch for marker in markers), default=0)
        ready = sum(marker.usable for marker in markers)
    if as_json:
        output.print_json({"epoch": epoch, "ready": ready, "loaded": loaded})
    else:
        output.echo(f"epoch {epoch}: {ready} shards ready, {loaded:,} heads and receipts loaded")


def purge_expired(
    *,
    stores: Stores,
    as_json: Json = False,
    batch: Annotated[
        int, typer.Option("--batch", metavar="N", min=1, help="How many entries to check per step.")
    ] = 1000,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="Stop after this many steps.")
    ] = None,
) -> None:
    """Delete expired records and their commits. A key that is deleted is new again."""
    from ragfence.engine.expiry import Purged

    total, steps, more = Purged(0, 0, 0, ""), 0, True
    with open_fence(stores) as fence, output.progress("purging") as advance:
        while more and (limit is None or steps < limit):
            if steps and not total.after:  # the objects are done; the fence store may have more than one step deletes
                purged = Purged(fence.inspector.fences.purge_expired(batch), 0, 0, "")
            else:
                purged = fence.purge_expired(batch, after=total.after)
            steps += 1
            total = Purged(
                total.records + purged.records,
                total.objects + purged.objects,
                total.scanned + purged.scanned,
                purged.after,
            )
            # Deleting a commit leaves a record that has expired already, which the next step deletes.
            more = bool(purged.after) or purged.records >= batch or purged.objects > 0
            advance(total.records + total.scanned)
    if as_json:
        counts = {"records": total.records, "objects": total.objects, "scanned": total.scanned}
        output.print_json({**counts, "steps": steps, "complete": not more})
    else:
        rest = "; there is more, because of --limit" if more else ""
        output.echo(
            f"deleted {output.pluralize(total.records, 'record')} and {total.objects:,} of "
            f"{output.pluralize(total.scanned, 'object')} checked{rest}"
        )


@journal.callback()
def _journal() -> None:
    """Seal effects that ran while the fence store was down (policy: `on_store_error: open`)."""


@journal.command("reconcile")
def reconcile_journal(
    *,
    stores: Stores,
    as_json: Json = False,
) -> None:
    """Seal the effects in the journal. Exits with 1 if some ran twice or could not be sealed."""
    with open_fence(stores) as fence:
        report = fence.reconcile_journal()
    if as_json:
        output.print_json({"sealed": list(report.sealed), "doubled": list(report.doubled), "left": list(report.left)})
    else:
        output.echo(
            f"{len(report.sealed):,} sealed, {len(report.doubled):,} ran twice, "
            f"{len(report.left):,} still in the journal"
        )
        for key in report.doubled:
            output.echo(f"ran twice: {key}")
    if report.doubled or report.left:
        raise typer.Exit(1)
