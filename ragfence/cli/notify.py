"""`ragfence notify`: announces what ragfence did to a webhook or a queue."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Stores, choose_url, open_fence, read_variable

if TYPE_CHECKING:
    from ragfence.notify.notifier import NotifyReport


def notify(
    *,
    stores: Stores,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="URL", help="A webhook (https://...) or a queue (sqlite:///q.db?queue=NAME)."),
    ] = None,
    to_env: Annotated[
        str | None,
        typer.Option("--to-env", metavar="NAME", help="The environment variable that holds the URL of the receiver."),
    ] = None,
    secret_env: Annotated[
        list[str] | None,
        typer.Option(
            "--secret-env",
            metavar="NAME",
            help="The environment variable with a secret (whsec_...) to sign with; may be repeated.",
        ),
    ] = None,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="The name of this notifier: use one for each receiver.")
    ] = "default",
    once: Annotated[bool, typer.Option("--once", help="Send what happened until now, and exit.")] = False,
    history: Annotated[bool, typer.Option("--history", help="The first time, also send what happened before.")] = False,
    event_type: Annotated[
        list[str] | None, typer.Option("--type", metavar="TYPE", help="Only events of this type; may be repeated.")
    ] = None,
    sample: Annotated[
        int, typer.Option("--sample", metavar="N", min=0, help="Send one of N duplicates; 0 for none.")
    ] = 100,
    allow_http: Annotated[
        bool, typer.Option("--allow-http", help="Also send over plain http to other machines.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Announce documents, builds, swaps, conflicts and quarantined keys to a webhook or a queue, until SIGTERM.

    Events are sent at least once, in order per source, with ids that never change. A new notifier begins with what
    happens from then on, unless --history is given. With --once, the command exits with 1 if an event was not sent.
    """
    from ragfence.notify import Notifier
    from ragfence.notify.announcements import EVENT_TYPES

    for wrong in sorted(set(event_type or ()) - set(EVENT_TYPES)):
        raise typer.BadParameter(f"{wrong!r} is not a type; there are {', '.join(EVENT_TYPES)}", param_hint="--type")
    secrets = [read_variable(each, "--secret-env") for each in secret_env or ()]
    totals = {"sent": 0, "failed": 0, "dropped": 0}
    last: NotifyReport | None = None
    with (
        open_fence(stores) as fence,
        _receiver(choose_url(to, to_env, "--to", "--to-env"), secrets, allow_http) as receiver,
        output.progress("sending") as advance,
    ):
        notifier = Notifier(
            fence, to=receiver, name=name, history=history, sample=sample, types=tuple(event_type or ())
        )

        def count(report: NotifyReport) -> None:
            nonlocal last
            last = report
            totals["sent"] += report.sent
            totals["failed"] = report.failed
            totals["dropped"] += report.dropped
            advance(totals["sent"])

        if once:
            count(notifier.run_once())
        else:
            notifier.run(count)
    busy, began = last is not None and last.busy, last is not None and last.began
    if as_json:
        output.print_json({**totals, "busy": busy, "began": began})
    else:
        output.echo(
            f"{output.pluralize(totals['sent'], 'event')} sent, "
            f"{totals['failed']:,} left, {totals['dropped']:,} dropped"
        )
        if busy:
            output.echo(f"another notifier named {name!r} is at work; give each receiver a --name of its own")
        if began and once:
            output.echo("this was the first time: events are sent from now on (--history sends earlier ones)")
    if once and (totals["failed"] or totals["dropped"] or busy):
        raise typer.Exit(1)


@contextlib.contextmanager
def _receiver(url: str, secrets: list[str], allow_http: bool) -> Iterator[Any]:
    scheme = url.partition("://")[0]
    receiver: Any
    if scheme in ("http", "https"):
        from ragfence.notify import WebhookReceiver

        receiver = WebhookReceiver(url, *secrets, allow_http=allow_http)
    else:
        from ragfence.queues import open_transport

        if secrets:
            raise typer.BadParameter("only webhooks are signed", param_hint="--secret-env")
        receiver = open_transport(url)
    with contextlib.closing(receiver):
        yield receiver
