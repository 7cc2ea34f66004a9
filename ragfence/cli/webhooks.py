"""`ragfence webhooks consume` and `ragfence inbox`: handle what webhooks put into an inbox, and show what came."""

from __future__ import annotations

import contextlib
import csv as csv_files
import sys
import threading
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Limit, Since, StoreCommands, StoreOptions, Stores, open_fence
from ragfence.errors import PolicyError

if TYPE_CHECKING:
    from ragfence.audit.deliveries import InboxEvent
    from ragfence.queues.transport import Transport
    from ragfence.webhooks.policy_hooks import InboxWorker, PolicyHook

webhooks = StoreCommands(no_args_is_help=True, help="Handle the webhooks that a policy puts into an inbox.")

CSV_COLUMNS = (
    *("event_id", "source", "payload_hash", "received_at", "processed_at"),
    *("attempts", "duplicates", "conflicts", "result"),
)


@webhooks.callback()
def _group() -> None:
    """Keeps `consume` a subcommand while it is the only one."""


@webhooks.command("consume")
def consume(
    *,
    stores: Stores,
    as_json: Json = False,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="Handle what waits in the inbox, and exit.")
    ] = False,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, max=64, help="How many events to handle at the same time.")
    ] = 1,
    max_attempts: Annotated[
        int,
        typer.Option(
            "--max-attempts", metavar="N", min=1, help="After this many deliveries, a failing event is a dead letter."
        ),
    ] = 5,
    visibility: Annotated[
        float,
        typer.Option(
            "--visibility",
            metavar="SECONDS",
            min=1,
            help="How long the events of a killed worker are hidden from others; longer than the lease.",
        ),
    ] = 60.0,
) -> None:
    """Handle the events in the inbox of the webhooks with `mode: inbox`, each once. Ends at SIGTERM or Ctrl-C.

    Run as many of these as you like. One that is killed leaves its events to the others.
    """
    from ragfence.core.policy import for_strangers
    from ragfence.core.settings import Settings, load_policy
    from ragfence.queues import open_transport
    from ragfence.webhooks.policy_hooks import Inboxes, load_hooks

    policy = for_strangers(load_policy(stores.policy or Settings.from_env().policy))  # as the server that received them
    hooks = {name: hook for name, hook in load_hooks(policy, stores.tenant_name).items() if hook.inbox_url}
    if not hooks:
        raise PolicyError(
            "the policy has no webhook with an inbox", hint="webhooks: {NAME: {mode: inbox, ...}}; see docs/webhooks.md"
        )
    with contextlib.ExitStack() as opened:
        inboxes = Inboxes(partial(open_transport, visibility_s=visibility))
        opened.callback(inboxes.close)
        workers_of = [
            _worker(stores, policy, hooks, url, inboxes.of(url), opened, workers=workers, max_attempts=max_attempts)
            for url in dict.fromkeys(hook.inbox_url for hook in hooks.values())
        ]
        if not as_json:
            output.echo(f"handling {', '.join(sorted(hooks))}{'' if until_empty else '; stop with Ctrl-C'}")
            sys.stdout.flush()
        _run(workers_of, until_empty=until_empty)
    counts: dict[str, int] = {}
    for worker in workers_of:
        for result, count in worker.consumer.counts.items():
            counts[result] = counts.get(result, 0) + count
    if as_json:
        output.print_json({"events": counts})
    else:
        output.echo(", ".join(f"{count:,} {result}" for result, count in sorted(counts.items())) or "no events")


def _worker(
    stores: StoreOptions,
    policy: Any,
    hooks: dict[str, PolicyHook],
    url: str,
    queue: Transport,
    opened: contextlib.ExitStack,
    **options: Any,
) -> InboxWorker:
    import ragfence
    from ragfence.webhooks.policy_hooks import InboxWorker

    own = {name: hook for name, hook in hooks.items() if hook.inbox_url == url}
    fences = {
        tenant: opened.enter_context(
            ragfence.open(stores.store, objects=stores.objects, tenant=tenant, policy=policy, route="inbox")
        )
        for tenant in sorted({hook.tenant for hook in own.values()})
    }
    keys = {tenant: fence.inspector.content_key() for tenant, fence in fences.items()}
    return InboxWorker(own, fences, queue, content_keys=keys, **options)


def _run(workers: list[InboxWorker], *, until_empty: bool) -> None:
    if until_empty:
        for worker in workers:
            worker.run_until_empty()
        return
    # Signals reach the consumer of the main thread, which ends the others.
    *others, last = workers
    threads = [threading.Thread(target=worker.consumer.run, daemon=True) for worker in others]
    for thread in threads:
        thread.start()
    last.consumer.run()
    for worker in others:
        worker.consumer.stop()
    for thread in threads:
        thread.join()


def inbox(
    *,
    stores: Stores,
    as_json: Json = False,
    since: Since = "24h",
    source: Annotated[
        str | None, typer.Option("--source", metavar="NAME", help="Only events of this webhook or queue.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write all events to this CSV file.")
    ] = None,
    limit: Limit = 100,
) -> None:
    """List the events that webhooks and queues received, each once, and what became of them. The newest comes last.

    Events that still wait in the queue of an inbox are not listed: nothing has claimed them yet.
    """
    if csv is not None and as_json:
        raise typer.BadParameter("give either --json or --csv FILE")
    with open_fence(stores) as fence, output.progress("reading rows"):
        found = fence.audit.inbox(since, source=source)
    shown = found[max(len(found) - limit, 0) if limit else 0 :]
    if csv is not None:
        _write_csv(csv, found)
        output.echo(f"{output.pluralize(len(found), 'event')} in {csv}")
        return
    if as_json:
        output.print_json({"of": len(found), "events": [_document(event) for event in shown]})
        return
    if not shown:
        output.echo(f"no events since {since}")
        return
    console = output.out()
    listing = output.Listing(
        console,
        output.Column("received", whole=True),
        output.Column("source", whole=True),
        output.Column("event_id", cut=True),
        output.Column("result", whole=True),
        output.Column("took", right=True),
        output.Column("attempts", right=True),
        output.Column("duplicates", right=True),
        output.Column("conflicts", right=True, wide=True),
        output.Column("payload_hash", wide=True),
    )
    for event in shown:
        took = "-" if event.processed_ms is None else output.span(event.processed_ms - event.received_ms)
        listing.add(
            output.time_cell(event.received_ms, console=console),
            event.source,
            event.event_id,
            event.result,
            took,
            event.attempts,
            event.duplicates,
            event.conflicts,
            event.payload_hash,
        )
    listing.print()
    if len(shown) < len(found):
        console.print(f"the newest {len(shown)} of {len(found):,}; show all with --limit 0")


def _write_csv(target: Path, events: list[InboxEvent]) -> None:
    if target.is_dir() or not target.parent.is_dir():
        why = "is a folder" if target.is_dir() else "is in a folder that does not exist"
        raise typer.BadParameter(f"{target} {why}; name a file")
    part = target.with_name(f"{target.name}.part")
    try:
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv_files.DictWriter(file, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(map(_document, events))
        part.replace(target)  # an incomplete file never gets this name
    finally:
        part.unlink(missing_ok=True)


def _document(event: InboxEvent) -> dict[str, Any]:
    values = asdict(event)
    received_ms, processed_ms = values.pop("received_ms"), values.pop("processed_ms")
    return values | {"received_at": output.iso(received_ms), "processed_at": output.iso(processed_ms)}
