"""What every command shares: the options that say which fence is meant, and how it is opened.

`--store-env` and `--store-file`: the URL of the store, off the command line that every user can read in `ps`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.core.urls import holds_password, looks_like_url, show_url
from ragfence.errors import UnknownStore

if TYPE_CHECKING:
    from pathlib import Path

    from ragfence.fence import Fence

JSON_WANTED = "ragfence-json"
"""in the context of a call: errors are told as JSON, too"""


def _remember(ctx: typer.Context, wanted: bool) -> bool:
    ctx.meta[JSON_WANTED] = wanted
    return wanted


def _moment(text: str | None) -> str | None:
    """A span or a time that the audit understands; else wrong usage, before anything is opened."""
    from ragfence.audit.audit import _moment_ms
    from ragfence.cli import output
    from ragfence.errors import ValidationError

    try:
        _moment_ms(text, 0, 0)
    except ValidationError as wrong:
        raise typer.BadParameter(f"{wrong.message}: {output.advice(wrong.hint)}") from None
    return text


Store = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="URL of the fence store. [dim]env: RAGFENCE_STORE[/dim]"),
]
Objects = Annotated[
    str | None,
    typer.Option("--objects", metavar="URL", help="URL of the object store. [dim]env: RAGFENCE_OBJECTS[/dim]"),
]
Tenant = Annotated[
    str | None, typer.Option("--tenant", metavar="NAME", help="The tenant. [dim]env: RAGFENCE_TENANT[/dim]")
]
PolicyFile = Annotated[
    str | None,
    typer.Option("--policy", metavar="FILE", help="The policy file, a ragfence.yml. [dim]env: RAGFENCE_POLICY[/dim]"),
]
Json = Annotated[
    bool,
    typer.Option("--json", callback=_remember, is_eager=True, help="JSON on stdout, and nothing else there."),
]
Since = Annotated[
    str, typer.Option("--since", metavar="SPAN", callback=_moment, help="24h, 7d, or a time such as 2026-01-31T12:00.")
]


@dataclass(frozen=True, slots=True, repr=False)
class StoreOptions:
    """Which fence; what is None comes from the environment, as in `ragfence.open`."""

    store: str | None = None
    objects: str | None = None
    tenant: str | None = None
    policy: str | None = None

    def __repr__(self) -> str:
        from ragfence.core.settings import repr_without_passwords

        return repr_without_passwords(self)

    @property
    def tenant_name(self) -> str:
        from ragfence.core.settings import Settings

        return self.tenant or Settings.from_env().tenant

    @property
    def fences_at(self) -> str | Path:
        from ragfence._open import EMBEDDED
        from ragfence.core.settings import Settings

        return self.store or Settings.from_env().store or EMBEDDED

    @property
    def objects_at(self) -> str | Path | None:
        from ragfence.core.settings import Settings

        named = self.objects or Settings.from_env().objects
        file = None if named else self.sqlite_file()
        return file.parent / "objects" if file else named

    def sqlite_file(self) -> Path | None:
        """The file of an embedded store; None when the fences are on a server."""
        from ragfence._open import _is_server, _sqlite_path

        return None if _is_server(self.fences_at) else _sqlite_path(self.fences_at)

    def objects_folder(self) -> Path | None:
        """The folder of the objects; None when they are elsewhere, or there are none."""
        from pathlib import Path

        from ragfence._open import OBJECT_FORMS, _file_path, _scheme

        where = self.objects_at
        if where is None or (scheme := _scheme(where, OBJECT_FORMS)) not in ("", "file"):
            return None
        return _file_path(str(where)) if scheme else Path(where).absolute()


@contextlib.contextmanager
def opened(place: StoreOptions, *, rebuild: bool = False) -> Iterator[Fence]:
    """The fence of a command. None makes a new, empty store where somebody mistyped a path.

    `rebuild`: its objects are enough, the fence file may be gone.
    """
    import ragfence

    needed = place.objects_folder() if rebuild else place.sqlite_file()
    if needed is not None and not needed.exists():
        raise UnknownStore(
            f"there is no {'folder of objects' if rebuild else 'fence store'} at {needed}",
            hint="go to the folder that has the .ragfence/, or name the stores (--store, --objects, RAGFENCE_STORE)",
        )
    fence = ragfence.open(place.store, objects=place.objects, tenant=place.tenant, policy=place.policy)
    with fence:
        yield fence


MAX_FILE_BYTES = 64 * 1024

StoreEnv = Annotated[
    str | None,
    typer.Option("--store-env", metavar="NAME", help="The environment variable that holds the URL of --store."),
]
StoreFile = Annotated[
    str | None,
    typer.Option("--store-file", metavar="FILE", help="The file whose only line is the URL of --store."),
]


class StoreCommands(typer.Typer):
    """Commands of which each that takes --store takes --store-env and --store-file, too."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        register = super().command(name, **settings)

        def add(function: Any) -> Any:
            register(with_store_options(function))
            return function

        return add


def with_store_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with two more options; it gets what they come to as `store`."""
    signature = inspect.signature(function, eval_str=True)
    if "store" not in signature.parameters:
        return function

    @functools.wraps(function)
    def called(
        *arguments: Any,
        store: str | None = None,
        store_env: str | None = None,
        store_file: str | None = None,
        **others: Any,
    ) -> Any:
        return function(*arguments, store=choose_store(store, store_env, store_file), **others)

    more = {"store_env": StoreEnv, "store_file": StoreFile}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        parameters.append(parameter)
        if parameter.name == "store":
            parameters += [parameter.replace(name=name, annotation=kind, default=None) for name, kind in more.items()]
    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def choose_store(store: str | None, variable: str | None, file: str | None) -> str | None:
    """The URL that is meant, from whichever of the three options was given; None when none was."""
    if sum(given is not None for given in (store, variable, file)) > 1:
        raise typer.BadParameter("give one of --store, --store-env and --store-file, not several")
    if variable is not None:
        return _from_environment(variable)
    if file is not None:
        return _from_file(file)
    if store is not None and holds_password(store):
        output.err().print(
            "WARNING: the password in --store can be read by every user of this machine (ps); "
            "use --store-env NAME, --store-file FILE, or RAGFENCE_STORE instead."
        )
    return store


def _from_environment(name: str) -> str:
    if looks_like_url(name):
        raise typer.BadParameter("it takes the name of a variable, not a URL", param_hint="--store-env")
    url = os.environ.get(name, "").strip()
    if not url:
        raise typer.BadParameter(f"the environment variable {name} is not set, or empty", param_hint="--store-env")
    return url


def _from_file(path: str) -> str:
    from ragfence.core.text_files import UnreadableFile, read_text_file

    try:
        lines = read_text_file(os.path.expanduser(path), MAX_FILE_BYTES).split()
    except UnreadableFile as refused:
        raise typer.BadParameter(f"{show_url(path)} {refused}", param_hint="--store-file") from None
    except OSError as refused:
        raise typer.BadParameter(f"{show_url(path)}: {refused.strerror}", param_hint="--store-file") from None
    if len(lines) != 1:
        raise typer.BadParameter(
            f"{path} holds {'nothing' if not lines else 'more than one word'}; its only line is a URL",
            param_hint="--store-file",
        )
    return lines[0]
