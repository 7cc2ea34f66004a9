"""`ragfence outbox`: relays the events of a database to a queue, and shows and repairs what was not sent."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Limit, Yes, choose_url
from ragfence.core.urls import show_url
from ragfence.errors import UnknownStore

if TYPE_CHECKING:
    from ragfence.core.policy import OutboxRules
    from ragfence.outbox.outbox import Outbox, OutboxRow
    from ragfence.outbox.relay import RelayReport

outbox = typer.Typer(no_args_is_help=True, help="Relay the events of an outbox, and show what was not sent.")
dead = typer.Typer(
    no_args_is_help=True,
    help="List dead events, send them again, or delete them. Each blocks the later events of its key.",
)
outbox.add_typer(dead, name="dead")

Database = Annotated[
    str | None,
    typer.Argument(
        metavar="URL", help="The database: sqlite:///app.db or postgresql://host/database.", show_default=False
    ),
]
DatabaseEnv = Annotated[
    str | None,
    typer.Option("--database-env", metavar="NAME", help="The environment variable that holds the URL of the database."),
]
DatabaseOrDash = Annotated[
    str, typer.Argument(metavar="URL|-", help="The database, or - with --database-env.", show_default=False)
]
AllDead = Annotated[bool, typer.Option("--all", help="All dead events, instead of some.")]
Topic = Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Only events of this topic.")]
TableName = Annotated[
    str, typer.Option("--table", metavar="NAME", help="The table of the outbox: NAME or SCHEMA.NAME.")
]
PolicyFile = Annotated[
    str | None,
    typer.Option("--policy", metavar="FILE", help="The policy file, a ragfence.yml. [dim]env: RAGFENCE_POLICY[/dim]"),
]
EventIds = Annotated[
    list[str] | None, typer.Argument(metavar="[EVENT_ID]...", help="The ids of the events, as `dead list` shows them.")
]
DEFAULT_TABLE = "ragfence_outbox"


@outbox.command("relay")
def relay(
    database: Database = None,
    *,
    to: Annotated[
        str | None, typer.Option("--to", metavar="URL", help="The queue: sqlite:///q.db?queue=NAME, redis://...")
    ] = None,
    to_env: Annotated[
        str | None,
        typer.Option("--to-env", metavar="NAME", help="The environment variable that holds the URL of the queue."),
    ] = None,
    topic: Topic = None,
    once: Annotated[bool, typer.Option("--once", help="Send what is due now, and exit.")] = False,
    batch: Annotated[
        int, typer.Option("--batch", metavar="N", min=1, max=10_000, help="How many to send in a round.")
    ] = 100,
    database_env: DatabaseEnv = None,
    table: TableName = DEFAULT_TABLE,
    policy: PolicyFile = None,
    as_json: Json = False,
) -> None:
    """Send the events of an outbox to a queue, until SIGTERM.

    At least once, in order per key. Any number of relays may run. With --once, exits with 1 if something failed.
    """
    from ragfence.outbox.relay import Relay
    from ragfence.queues import open_transport

    target = choose_url(to, to_env, "--to", "--to-env")
    rules = _rules(policy)
    totals = {"sent": 0, "failed": 0, "dead": 0}
    with (
        _opened(database, database_env, table) as events,
        contextlib.closing(open_transport(target)) as queue,
        output.progress("relaying") as advance,
    ):

        def count(report: RelayReport) -> None:
            for name, more in report._asdict().items():
                totals[name] += more
            advance(totals["sent"])

        sender = Relay(
            events,
            to=queue,
            topic=topic,
            batch=batch,
            max_attempts=rules.max_attempts,
            keep_days=rules.keep_days,
            on_round=count,
        )
        if once:
            while sender.run_once().sent:
                pass
            sender.close()
        else:
            sender.run()
    if as_json:
        output.print_json(totals)
    else:
        output.echo(
            f"{output.pluralize(totals['sent'], 'event')} sent, {totals['failed']:,} failed, {totals['dead']:,} dead"
        )
    if once and (totals["failed"] or totals["dead"]):
        raise typer.Exit(1)


@outbox.command("status")
def outbox_status(
    database: Database = None,
    *,
    topic: Topic = None,
    database_env: DatabaseEnv = None,
    table: TableName = DEFAULT_TABLE,
    policy: PolicyFile = None,
    as_json: Json = False,
) -> None:
    """Show how many events wait, how many are dead, and how old the oldest is.

    Exits with 1 if the oldest is older than the policy allows (outbox.lag_alert_s, five minutes).
    """
    limit_s = _rules(policy).lag_alert_s
    with _opened(database, database_env, table) as events:
        found = events.status(topic)
    late = found.lag_s > limit_s
    if as_json:
        output.print_json({**found._asdict(), "late": late})
    else:
        output.echo(f"pending  {found.pending:,}")
        output.echo(f"dead     {found.dead:,}")
        output.echo(f"lag      {output.span(1000 * found.lag_s)}{' (too long: is a relay running?)' if late else ''}")
    if late:
        raise typer.Exit(1)


@outbox.command("purge")
def outbox_purge(
    database: Database = None,
    *,
    keep_days: Annotated[
        float | None,
        typer.Option("--keep-days", metavar="DAYS", min=0, help="Instead of `outbox.keep_days` of the policy."),
    ] = None,
    database_env: DatabaseEnv = None,
    table: TableName = DEFAULT_TABLE,
    policy: PolicyFile = None,
    as_json: Json = False,
) -> None:
    """Delete events that were sent long ago. A relay does so as well."""
    days = _rules(policy).keep_days if keep_days is None else keep_days
    gone = 0
    with _opened(database, database_env, table) as events, output.progress("deleting") as advance:
        while some := events.purge(days):
            gone += some
            advance(gone)
    if as_json:
        output.print_json({"deleted": gone})
    else:
        output.echo(f"{output.pluralize(gone, 'event')} deleted")


@outbox.command("audit")
def outbox_audit(
    query: Annotated[
        str, typer.Argument(metavar="QUERY", help='A query of your business rows: "SELECT id FROM orders".')
    ],
    database: Database = None,
    *,
    topic: Annotated[str, typer.Option("--topic", metavar="TOPIC", help="The topic of their events.")],
    limit: Limit = 1000,
    database_env: DatabaseEnv = None,
    table: TableName = DEFAULT_TABLE,
    as_json: Json = False,
) -> None:
    """List the keys that a query returns and that have no event. Exits with 1 if there are any.

    Events that were purged are gone: let the query leave out business rows that are older.
    """
    with _opened(database, database_env, table) as events:
        missing = events.audit(query, topic=topic, limit=limit or None)
    if as_json:
        output.print_json({"missing": missing})
    else:
        for key in missing:
            output.echo(key)
        if sys.stderr.isatty() or not missing:
            output.err().print(f"{output.pluralize(len(missing), 'business row')} without an event")
    if missing:
        raise typer.Exit(1)


@dead.command("list")
def dead_list(
    database: Database = None,
    *,
    topic: Topic = None,
    limit: Limit = 100,
    database_env: DatabaseEnv = None,
    table: TableName = DEFAULT_TABLE,
    as_json: Json = False,
) -> None:
    """List dead events: those that failed too often. The oldest comes first."""
    with _opened(database, database_env, table) as events:
        found = events.dead(limit or 2**31 - 1, topic)
    if as_json:
        output.print_json([{**row._asdict(), "created": output.iso(row.created_ms)} for row in found])
        return
    console = output.out()
    columns = (output.Column("event id", whole=True), "topic", "key", output.Column("attempts", right=True), "error")
    listing = output.Listing(console, "created", *columns)
    for row in found:
        created = output.time_cell(row.created_ms, console=console)
        listing.add(created, row.event_id, row.topic, row.key, row.attempts, row.error)
    if found:
        listing.print()
    else:
        output.echo("no event is dead")


@dead.command("revive")
def dead_revive(
    database: DatabaseOrDash,
    event_ids: EventIds = None,
    *,
    every: AllDead = False,
    topic: Topic = None,
    database_env: DatabaseEnv = None,
    table: TableName = DEFAULT_TABLE,
    as_json: Json = False,
) -> None:
    """Send dead events again, with their attempts reset."""
    with _opened(database, database_env, table) as events:
        changed = events.revive(_chosen(events, event_ids, every, topic))
    _print_changed(changed, "revived", as_json)


@dead.command("drop")
def dead_drop(
    database: DatabaseOrDash,
    event_ids: EventIds = None,
    *,
    every: AllDead = False,
    topic: Topic = None,
    yes: Yes = False,
    database_env: DatabaseEnv = None,
    table: TableName = DEFAULT_TABLE,
    as_json: Json = False,
) -> None:
    """Delete dead events without sending them, so that the later events of their keys are sent."""
    with _opened(database, database_env, table) as events:
        ids = _chosen(events, event_ids, every, topic)
        if not yes and ids:
            output.confirm_deletion(f"delete {output.pluralize(len(ids), 'dead event')}?", as_json=as_json)
        changed = events.drop(ids)
    _print_changed(changed, "dropped", as_json)


def _chosen(events: Outbox, event_ids: list[str] | None, every: bool, topic: str | None) -> list[str]:
    if bool(event_ids) == every:
        raise typer.BadParameter("name the events, or give --all")
    if event_ids:
        return event_ids
    rows: list[OutboxRow] = events.dead(10_000, topic)
    return [row.event_id for row in rows]


def _print_changed(changed: int, what: str, as_json: bool) -> None:
    if as_json:
        output.print_json({what: changed})
    else:
        output.echo(f"{output.pluralize(changed, 'event')} {what}")
    if not changed:
        raise typer.Exit(1)


@contextlib.contextmanager
def _opened(database: str | None, variable: str | None, table: str) -> Iterator[Outbox]:
    """The outbox of a command. A database or a table that was mistyped is not created."""
    import sqlalchemy as sa

    from ragfence.outbox import Outbox
    from ragfence.outbox.outbox import outbox_table
    from ragfence.queues.sql import open_engine

    url = choose_url(None if database == "-" else database, variable, "URL", "--database-env")
    engine = open_engine(url)
    schema, _, name = table.rpartition(".")
    try:
        file = engine.url.database if engine.dialect.name == "sqlite" else None
        if engine.dialect.name == "sqlite" and not (file and os.path.exists(file)):
            raise UnknownStore(
                f"there is no database at {file or ':memory:'}", hint="sqlite:///app.db is a relative path"
            )
        events = Outbox(engine, table=outbox_table(sa.MetaData(), name, schema=schema or None), create=False)
        if not events.exists():
            raise UnknownStore(
                f"{show_url(url)} has no table {table}",
                hint="the program that adds events creates it; is it another database, or another --table?",
            )
        yield events
    finally:
        engine.dispose()


def _rules(file: str | None) -> OutboxRules:
    from ragfence.core.settings import Settings, load_policy

    return load_policy(file or Settings.from_env().policy).outbox
