"""What commands share: the options that name the stores and how they are opened, and options of several commands.

`--store-env` and `--store-file` keep the URL of the store off the command line, which every user of the machine can
read in `ps`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer

from ragfence.cli import output
from ragfence.core.urls import holds_password, looks_like_url, show_url
from ragfence.errors import UnknownStore

if TYPE_CHECKING:
    from pathlib import Path

    from ragfence.fence import Fence

JSON_REQUESTED = "ragfence-json"
"""The key in a context's `meta`: with --json, errors are printed as JSON too."""
MAX_FILE_BYTES = 64 * 1024
STORE_PANEL = "Stores"
WHERE_STORES_ARE = (
    "change to the folder that contains .ragfence/, or name the stores: --store, --objects, RAGFENCE_STORE"
)


@dataclass(frozen=True, slots=True, repr=False)
class StoreOptions:
    """Which fence a command uses. What is None comes from the environment, as in `ragfence.open`."""

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
    def fences_location(self) -> str | Path:
        from ragfence._open import EMBEDDED
        from ragfence.core.settings import Settings

        return self.store or Settings.from_env().store or EMBEDDED

    @property
    def objects_location(self) -> str | Path | None:
        from ragfence.core.settings import Settings

        named = self.objects or Settings.from_env().objects
        file = None if named else self.sqlite_file()
        return file.parent / "objects" if file else named

    def sqlite_file(self) -> Path | None:
        """The file of an embedded fence store, or None if the fences are on a server."""
        from ragfence._open import _is_server, _sqlite_path

        return None if _is_server(self.fences_location) else _sqlite_path(self.fences_location)

    def objects_folder(self) -> Path | None:
        """The folder of the objects, or None if they are elsewhere or there are none."""
        from pathlib import Path

        from ragfence._open import OBJECT_FORMS, _file_path, _scheme

        where = self.objects_location
        if where is None or (scheme := _scheme(where, OBJECT_FORMS)) not in ("", "file"):
            return None
        return _file_path(str(where)) if scheme else Path(where).absolute()


Stores = Annotated[StoreOptions, ("store", "objects", "tenant", "policy")]
"""A parameter of this type becomes --store, --store-env, --store-file, --objects, --tenant and --policy."""
StoresWithoutPolicy = Annotated[StoreOptions, ("store", "objects", "tenant")]
StoresOfTenant = Annotated[StoreOptions, ("store", "objects", "policy")]
"""For a command whose argument is the tenant."""
StoresOfAllTenants = Annotated[StoreOptions, ("store", "objects")]


def _store_option(flag: str, metavar: str, help_text: str, variable: str = "") -> Any:
    source = f" [dim]env: {variable}[/dim]" if variable else ""
    option = typer.Option(flag, metavar=metavar, rich_help_panel=STORE_PANEL, help=help_text + source)
    return Annotated[str | None, option]


_STORE_OPTIONS = {
    "store": _store_option("--store", "URL", "The fence store: a folder, or redis://...", "RAGFENCE_STORE"),
    "store_env": _store_option(
        "--store-env", "NAME", "The environment variable that holds the URL of the fence store."
    ),
    "store_file": _store_option("--store-file", "FILE", "The file that holds the URL of the fence store."),
    "objects": _store_option(
        "--objects", "URL", "The object store: a folder, or s3://bucket/prefix.", "RAGFENCE_OBJECTS"
    ),
    "tenant": _store_option("--tenant", "NAME", "The tenant.", "RAGFENCE_TENANT"),
    "policy": _store_option("--policy", "FILE", "The policy file, a ragfence.yml.", "RAGFENCE_POLICY"),
}


def _remember_json(ctx: typer.Context, requested: bool) -> bool:
    ctx.meta[JSON_REQUESTED] = requested
    return requested


def check_moment(text: str | None) -> str | None:
    """Rejects a span or time that the audit does not understand, before any store is opened."""
    from ragfence.errors import ValidationError

    try:
        to_ms(text, 0, 0)
    except ValidationError as wrong:
        raise typer.BadParameter(f"{wrong.message}: {output.format_hint(wrong.hint)}") from None
    return text


def to_ms(text: str | None, now_ms: int, default_ms: int) -> int:
    """Milliseconds since 1970: a span such as "7d" counts back from `now_ms`."""
    from ragfence.core.moments import parse_moment

    return parse_moment(text, now_ms, default_ms)


Json = Annotated[
    bool,
    typer.Option("--json", callback=_remember_json, is_eager=True, help="Print JSON on stdout, and nothing else."),
]
Since = Annotated[
    str,
    typer.Option(
        "--since",
        metavar="SPAN",
        callback=check_moment,
        help="How far back: 24h, 7d, or a time such as 2026-01-31T12:00.",
    ),
]
Kind = Annotated[str | None, typer.Option("--kind", metavar="KIND", help="Only operations of this kind.")]
SourceId = Annotated[str | None, typer.Option("--source-id", metavar="SOURCE_ID", help="Only this source.")]
Limit = Annotated[int, typer.Option("--limit", metavar="N", min=0, help="Show at most this many; 0 for all.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; stored with the change.")]


@contextlib.contextmanager
def open_fence(stores: StoreOptions, *, rebuild: bool = False) -> Iterator[Fence]:
    """Opens the fence of a command. A path that was mistyped does not create a new, empty store.

    Args:
        stores: The options of the command.
        rebuild: Only the objects must exist; the file of the fence store may be missing.
    """
    import ragfence

    needed = stores.objects_folder() if rebuild else stores.sqlite_file()
    if needed is not None and not needed.exists():
        create = "" if rebuild else "`ragfence ingest PATH` creates one here; or "
        raise UnknownStore(
            f"there is no {'folder of objects' if rebuild else 'fence store'} at {needed}",
            hint=create + WHERE_STORES_ARE,
        )
    fence = ragfence.open(stores.store, objects=stores.objects, tenant=stores.tenant, policy=stores.policy)
    with fence:
        yield fence


class StoreCommands(typer.Typer):
    """A group whose commands get the store options in place of a parameter of type `Stores`."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        register = super().command(name, **settings)

        def add(function: Any) -> Any:
            register(with_store_options(function))
            return function

        return add


def with_store_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with one option per store setting instead of its `StoreOptions` parameter."""
    signature = inspect.signature(function, eval_str=True)
    options = {name: get_args(each.annotation) for name, each in signature.parameters.items() if _names_stores(each)}
    if not options:
        return function
    ((parameter, (_, names)),) = options.items()

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        given = {name: values.pop(name, None) for name in names}
        given["store"] = choose_store(given["store"], values.pop("store_env", None), values.pop("store_file", None))
        return function(**values, **{parameter: StoreOptions(**given)})

    expanded = [name for name in _STORE_OPTIONS if name in names or name.startswith("store_")]
    parameters = [each for each in signature.parameters.values() if each.name != parameter]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_STORE_OPTIONS[name])
        for name in expanded
    ]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _names_stores(parameter: inspect.Parameter) -> bool:
    return get_origin(parameter.annotation) is Annotated and get_args(parameter.annotation)[0] is StoreOptions


def choose_store(store: str | None, variable: str | None, file: str | None) -> str | None:
    """The URL from whichever of the three options was given, or None if none was."""
    if sum(given is not None for given in (store, variable, file)) > 1:
        raise typer.BadParameter("give only one of --store, --store-env and --store-file")
    if variable is not None:
        return read_variable(variable, "--store-env")
    if file is not None:
        return _read_url_file(file)
    if store is not None:
        _warn_of_password(store, "--store", "--store-env NAME, --store-file FILE, or RAGFENCE_STORE")
    return store


def choose_url(url: str | None, variable: str | None, option: str, variable_option: str) -> str:
    """The URL that was given, or that of the environment variable that was named instead."""
    if (url is None) == (variable is None):
        raise typer.BadParameter(f"give either {option} or {variable_option}", param_hint=option)
    if variable is not None:
        return read_variable(variable, variable_option)
    assert url is not None
    _warn_of_password(url, option, f"{variable_option} NAME")
    return url


def read_variable(name: str, option: str) -> str:
    """The value of the environment variable that an option names."""
    if looks_like_url(name) or name.startswith("whsec_"):
        raise typer.BadParameter("it takes the name of a variable, not its value", param_hint=option)
    value = os.environ.get(name, "").strip()
    if not value:
        raise typer.BadParameter(f"the environment variable {name} is not set, or empty", param_hint=option)
    return value


def _warn_of_password(url: str, option: str, instead: str) -> None:
    if holds_password(url):
        output.err().print(
            f"WARNING: the password in {option} can be read by every user of this machine (ps); use {instead} instead."
        )


def _read_url_file(path: str) -> str:
    from ragfence.core.text_files import UnreadableFile, read_text_file

    try:
        lines = read_text_file(os.path.expanduser(path), MAX_FILE_BYTES).split()
    except UnreadableFile as refused:
        raise typer.BadParameter(f"{show_url(path)} {refused}", param_hint="--store-file") from None
    except OSError as refused:
        raise typer.BadParameter(f"{show_url(path)}: {refused.strerror}", param_hint="--store-file") from None
    if len(lines) != 1:
        raise typer.BadParameter(
            f"{path} contains {'nothing' if not lines else 'more than one word'}; it must contain one URL",
            param_hint="--store-file",
        )
    return lines[0]
