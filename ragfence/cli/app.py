"""All commands, and how each of them ends: with a message and a hint instead of a traceback."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ragfence.cli import output
from ragfence.cli.aliases import alias, reconcile, rollback, search, swap
from ragfence.cli.apikeys import apikeys
from ragfence.cli.audit import audit
from ragfence.cli.decisions import decisions, drain
from ragfence.cli.doctor import doctor
from ragfence.cli.documents import compact, content_hash, purge, retract, snippets, verify
from ragfence.cli.explain import explain
from ragfence.cli.indexes import build, builds, gc
from ragfence.cli.ingest import ingest
from ragfence.cli.keys import keys
from ragfence.cli.maintenance import hydrate, journal, purge_expired
from ragfence.cli.notify import notify
from ragfence.cli.options import JSON_REQUESTED, StoreCommands
from ragfence.cli.outbox import outbox
from ragfence.cli.policy import policy
from ragfence.cli.queues import consume, enqueue, queue
from ragfence.cli.release import release
from ragfence.cli.serve import serve
from ragfence.cli.status import status
from ragfence.cli.tenants import tenants
from ragfence.cli.webhooks import inbox, webhooks
from ragfence.core.urls import looks_like_url, show_url
from ragfence.errors import RagfenceError

_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # which typer does not export
_WORDS = "ragfence-words"
"""The key in a context's `meta` for the words of the command line."""


@contextlib.contextmanager
def _without_passwords(words: list[str]) -> Iterator[None]:
    """A usage error quotes the words that were wrong. A URL among them is shown without its password."""
    try:
        yield
    except _USAGE_ERROR as wrong:
        for word in sorted(filter(looks_like_url, words), key=len, reverse=True):
            for part in (word, word.partition("=")[2] if word.startswith("-") else ""):
                if part:
                    wrong.message = wrong.message.replace(part, show_url(part))
        wrong.args = (wrong.message,)
        wrong.__cause__ = wrong.__context__ = None  # pydantic's message quotes the value
        raise


class Commands(TyperGroup):
    """Expected errors exit with 1, wrong usage with 2, Ctrl-C with 130, and a closed pipe silently."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = ctx.meta[_WORDS] = list(args)
        with _without_passwords(words):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _without_passwords(ctx.meta[_WORDS]):
                result = super().invoke(ctx)
            sys.stdout.flush()  # a closed pipe must be noticed here, not when the interpreter exits
        except RagfenceError as error:
            output.print_error(error, as_json=ctx.meta.get(JSON_REQUESTED, False))
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        return result


app = StoreCommands(
    cls=Commands,
    help="Ingest documents, build indexes and run any effect once per key, and see what happened to each of them.",
    epilog="Try it in an empty folder: [bold]ragfence ingest FOLDER[/bold], [bold]ragfence build[/bold], "
    "[bold]ragfence swap docs latest[/bold], [bold]ragfence search docs 'a question'[/bold]. Without --store and "
    "--objects, and without RAGFENCE_STORE and RAGFENCE_OBJECTS, everything is stored under .ragfence/ in the "
    "working folder.",
    no_args_is_help=True,
    add_completion=False,
    # Its frames show local variables, which may hold credentials.
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(requested: bool) -> None:
    if requested:
        from ragfence._version import __version__

        typer.echo(f"ragfence {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


DOCUMENTS, INDEXES, KEYS, EVENTS, STORES, SERVER = (
    "Documents",
    "Indexes and aliases",
    "Keys and decisions",
    "Events",
    "Stores",
    "Server",
)

app.command("ingest", rich_help_panel=DOCUMENTS)(ingest)
app.command("snippets", rich_help_panel=DOCUMENTS)(snippets)
app.command("retract", rich_help_panel=DOCUMENTS)(retract)
app.command("purge", rich_help_panel=DOCUMENTS)(purge)
app.command("verify", rich_help_panel=DOCUMENTS)(verify)
app.command("compact", rich_help_panel=DOCUMENTS)(compact)
app.command("content-hash", rich_help_panel=DOCUMENTS)(content_hash)
app.command("build", rich_help_panel=INDEXES)(build)
app.command("builds", rich_help_panel=INDEXES)(builds)
app.command("swap", rich_help_panel=INDEXES)(swap)
app.command("rollback", rich_help_panel=INDEXES)(rollback)
app.command("alias", rich_help_panel=INDEXES)(alias)
app.command("search", rich_help_panel=INDEXES)(search)
app.command("reconcile", rich_help_panel=INDEXES)(reconcile)
app.command("gc", rich_help_panel=INDEXES)(gc)
app.command("status", rich_help_panel=KEYS)(status)
app.command("keys", rich_help_panel=KEYS)(keys)
app.command("explain", rich_help_panel=KEYS)(explain)
app.command("release", rich_help_panel=KEYS)(release)
app.command("decisions", rich_help_panel=KEYS)(decisions)
app.add_typer(audit, name="audit", rich_help_panel=KEYS)
app.command("drain", rich_help_panel=KEYS)(drain)
app.command("consume", rich_help_panel=EVENTS)(consume)
app.command("enqueue", rich_help_panel=EVENTS)(enqueue)
app.add_typer(queue, name="queue", rich_help_panel=EVENTS)
app.command("inbox", rich_help_panel=EVENTS)(inbox)
app.command("doctor", rich_help_panel=STORES)(doctor)
app.command("hydrate", rich_help_panel=STORES)(hydrate)
app.command("purge-expired", rich_help_panel=STORES)(purge_expired)
app.add_typer(journal, name="journal", rich_help_panel=STORES)
app.add_typer(policy, name="policy", rich_help_panel=STORES)
app.add_typer(outbox, name="outbox", rich_help_panel=EVENTS)
app.command("notify", rich_help_panel=EVENTS)(notify)
app.command("serve", rich_help_panel=SERVER)(serve)
app.add_typer(webhooks, name="webhooks", rich_help_panel=EVENTS)
app.add_typer(apikeys, name="apikeys", rich_help_panel=SERVER)
app.add_typer(tenants, name="tenants", rich_help_panel=SERVER)
