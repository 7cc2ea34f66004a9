"""All commands, and how every one of them ends: a message and a hint instead of a traceback."""

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
from ragfence.cli.decisions import decisions
from ragfence.cli.doctor import doctor
from ragfence.cli.documents import compact, purge, retract, snippets, verify
from ragfence.cli.drain import drain
from ragfence.cli.explain import explain
from ragfence.cli.indexes import build, builds, gc
from ragfence.cli.ingest import ingest
from ragfence.cli.keys import keys
from ragfence.cli.maintenance import hydrate, journal, purge_expired
from ragfence.cli.options import JSON_WANTED, StoreCommands
from ragfence.cli.policy import policy
from ragfence.cli.release import release
from ragfence.cli.serve import serve
from ragfence.cli.status import status
from ragfence.cli.tenants import tenants
from ragfence.core.urls import looks_like_url, show_url
from ragfence.errors import RagfenceError

_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # which typer does not export
_WORDS = "ragfence-words"
"""in the context of a call: its command line"""


@contextlib.contextmanager
def _without_passwords(words: list[str]) -> Iterator[None]:
    """Wrong usage is told with the words that were wrong: a URL that stood in the wrong place is not quoted whole."""
    try:
        yield
    except _USAGE_ERROR as wrong:
        for word in sorted(filter(looks_like_url, words), key=len, reverse=True):
            for part in (word, word.partition("=")[2] if word.startswith("-") else ""):
                if part:
                    wrong.message = wrong.message.replace(part, show_url(part))
        wrong.args = (wrong.message,)
        wrong.__cause__ = wrong.__context__ = None  # what pydantic said of the value quotes it
        raise


class Commands(TyperGroup):
    """Expected errors end with 1, wrong usage with 2, Ctrl-C with 130, and a closed pipe in silence."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = ctx.meta[_WORDS] = list(args)
        with _without_passwords(words):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _without_passwords(ctx.meta[_WORDS]):
                result = super().invoke(ctx)
            sys.stdout.flush()  # here a closed pipe is still somebody's business
        except RagfenceError as error:
            output.error(error, as_json=ctx.meta.get(JSON_WANTED, False))
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        return result


app = StoreCommands(
    cls=Commands,
    help="One effect per key: look at the fences, find out what happened, and set right what got stuck.",
    epilog="Stores come from --store (--store-env, --store-file) and --objects, or RAGFENCE_STORE, "
    "RAGFENCE_OBJECTS, RAGFENCE_TENANT, RAGFENCE_POLICY. Without any: SQLite and a folder under .ragfence/.",
    no_args_is_help=True,
    add_completion=False,
    # Its frames show local variables, which may hold credentials.
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        from ragfence._version import __version__

        typer.echo(f"ragfence {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("ingest")(ingest)
app.command("retract")(retract)
app.command("snippets")(snippets)
app.command("purge")(purge)
app.command("build")(build)
app.command("builds")(builds)
app.command("swap")(swap)
app.command("rollback")(rollback)
app.command("alias")(alias)
app.command("search")(search)
app.command("reconcile")(reconcile)
app.command("gc")(gc)
app.command("status")(status)
app.command("keys")(keys)
app.command("explain")(explain)
app.command("release")(release)
app.command("decisions")(decisions)
app.add_typer(audit, name="audit")
app.command("drain")(drain)
app.command("doctor")(doctor)
app.command("hydrate")(hydrate)
app.command("verify")(verify)
app.command("compact")(compact)
app.command("purge-expired")(purge_expired)
app.add_typer(journal, name="journal")
app.add_typer(policy, name="policy")
app.command("serve")(serve)
app.add_typer(apikeys, name="apikeys")
app.add_typer(tenants, name="tenants")
