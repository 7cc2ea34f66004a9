"""`ragfence notify`: announces what ragfence did to a webhook or a queue."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Stores, open_fence
from ragfence.core.urls import holds_password, looks_like_url

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
        str | None, typer.Option("--to-env", metavar="NAME", help="The environment variable that holds its URL.")
    ] = None,
    secret_env: Annotated[
        list[str] | None,
        typer.Option("--secret-env", metavar="NAME", help="The variable with a secret (whsec_...) to sign with."),
    ] = None,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="The memory to use: one for each receiver.")
    ] = "default",
    once: Annotated[bool, typer.Option("--once", help="Send what happened until now, and end.")] = False,
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

    At least once, in order per source, with ids that never change. The first time it begins with what happens from then
    on, unless --history is given. With --once, exits with 1 if something could not be sent.
    """
    from ragfence.notify import Notifier
    from ragfence.notify.announcements import EVENT_TYPES

    for wrong in sorted(set(event_type or ()) - set(EVENT_TYPES)):
        raise typer.BadParameter(f"{wrong!r} is not a type; there are {', '.join(EVENT_TYPES)}", param_hint="--type")
    secrets = [_variable(each, "--secret-env") for each in secret_env or ()]
    totals = {"sent": 0, "failed": 0, "dropped": 0}
    last: NotifyReport | None = None
    with (
        open_fence(stores) as fence,
        _receiver(_address(to, to_env), secrets, allow_http) as receiver,
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


def _address(to: str | None, variable: str | None) -> str:
    if (to is None) == (variable is None):
        raise typer.BadParameter("give --to or --to-env, one of the two", param_hint="--to")
    if to is None:
        assert variable is not None
        return _variable(variable, "--to-env")
    if holds_password(to):
        output.err().print(
            "WARNING: the password in --to can be read by every user of this machine (ps); use --to-env NAME."
        )
    return to


def _variable(name: str, option: str) -> str:
    if looks_like_url(name) or name.startswith("whsec_"):
        raise typer.BadParameter("it takes the name of a variable, not its value", param_hint=option)
    value = os.environ.get(name, "").strip()
    if not value:
        raise typer.BadParameter(f"the environment variable {name} is not set, or empty", param_hint=option)
    return value
