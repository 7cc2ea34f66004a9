"""`--store-env` and `--store-file`: the URL of the store, off the command line that every user can read in `ps`."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ragfence.cli import output
from ragfence.core.urls import holds_password, looks_like_url, show_url

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
