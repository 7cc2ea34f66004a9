"""`ragfence hydrate`, `ragfence purge-expired` and `ragfence journal reconcile`: what a store needs now and then."""

from __future__ import annotations

from typing import Annotated

import typer

from ragfence.cli import output
from ragfence.cli.options import (
    Json,
    Objects,
    PolicyFile,
    Store,
    StoreCommands,
    StoreOptions,
    Tenant,
    opened,
)

journal = StoreCommands(no_args_is_help=True)


def hydrate(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
) -> None:
    """Rebuilds the fence store from the object store; happens by itself, but for a file restored in place."""
    loaded = 0
    # A fence file that is gone is what this is for.
    with (
        opened(StoreOptions(store, objects, tenant, policy), rebuild=True) as fence,
        output.progress("loading") as told,
    ):

        def progress(done: int) -> None:
            nonlocal loaded
            loaded = done
            told(done)

        fence.hydrate(progress)
        markers = [marker for marker in fence.inspector.markers() if marker is not None]
        epoch = max((marker.epoch for marker in markers), default=0)
        ready = sum(marker.usable for marker in markers)
    if as_json:
        output.document({"epoch": epoch, "ready": ready, "loaded": loaded})
    else:
        output.say(f"epoch {epoch}: {ready} shards ready, {loaded:,} heads and receipts loaded")


def purge_expired(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    batch: Annotated[int, typer.Option("--batch", min=1, help="How much is looked at in one step.")] = 1000,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most so many steps.")] = None,
) -> None:
    """Deletes what had its time: records, and the commits behind them. Their keys may be new again."""
    from ragfence.engine.expiry import Purged

    total, steps, more = Purged(0, 0, 0, ""), 0, True
    with opened(StoreOptions(store, objects, tenant, policy)) as fence, output.progress("purging") as told:
        while more and (limit is None or steps < limit):
            if steps and not total.after:  # the objects are done; the fence file may hold more than a step took
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
            # Ending the life of a key leaves a record that is over at once.
            more = bool(purged.after) or purged.records >= batch or purged.objects > 0
            told(total.records + total.scanned)
    if as_json:
        told_as = {"records": total.records, "objects": total.objects, "scanned": total.scanned}
        output.document({**told_as, "steps": steps, "complete": not more})
    else:
        rest = "; there is more, which --limit left" if more else ""
        output.say(
            f"deleted {output.many(total.records, 'record')}, and {total.objects:,} of "
            f"{output.many(total.scanned, 'object')} looked at{rest}"
        )


@journal.callback()
def _journal() -> None:
    """The journal of effects that ran while the fence store was down (`on_store_error: open`)."""


@journal.command("reconcile")
def reconcile_journal(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
) -> None:
    """Seals the effects that ran while the fence store was down; ends with 1 if some ran twice or are left."""
    with opened(StoreOptions(store, objects, tenant, policy)) as fence:
        done = fence.reconcile_journal()
    if as_json:
        output.document({"sealed": list(done.sealed), "doubled": list(done.doubled), "left": list(done.left)})
    else:
        output.say(f"{len(done.sealed):,} sealed, {len(done.doubled):,} ran twice, {len(done.left):,} left")
        for key in done.doubled:
            output.say(f"ran twice: {key}")
    if done.doubled or done.left:
        raise typer.Exit(1)
