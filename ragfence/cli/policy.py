"""`ragfence policy check`: does a file hold, and what does it come to? For CI."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import show
from ragfence.cli.opening import Json
from ragfence.errors import PolicyError

if TYPE_CHECKING:
    from ragfence.core.policy import Policy

policy = typer.Typer(no_args_is_help=True, help="The policy file.")


@policy.callback()
def _group() -> None:
    """Keeps `check` a command of its own, also while it is the only one."""


@policy.command("check")
def check(
    file: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="A ragfence.yml; without one, the one that would be used here."),
    ] = None,
    as_json: Json = False,
) -> None:
    """The effective settings of a policy; ends with 1 and all problems, one a line, when it is refused."""
    from ragfence.core.settings import load_policy

    used = file or policy_file()
    try:
        rules = load_policy(used)
    except PolicyError as refused:
        problems = refused.details.get("problems")
        if as_json or not problems:
            raise
        for problem in problems:
            show.err().print(show.plain(f"{used}: {problem}"))
        raise typer.Exit(1) from None
    settings = dict(_flat(rules.model_dump(mode="json", by_alias=True)))
    kinds = {kind: _kind(rules, kind) for kind in sorted(rules.kinds)}
    if as_json:
        show.document({"file": used, "settings": rules.model_dump(mode="json", by_alias=True), "kinds": kinds})
        return
    console = show.out()
    show.say(used or "no file: the defaults")
    listing = show.Listing(console, show.Column("setting", whole=True), "value")
    for name, value in settings.items():
        listing.add(name, value)
    listing.print()
    if kinds:
        effective = show.Listing(console, "kind", *next(iter(kinds.values())))
        for kind, values in kinds.items():
            effective.add(kind, *map(_shown, values.values()))
        console.print()
        effective.print()


def policy_file() -> str | None:
    """The file `ragfence.open` would read; None: it would use the defaults."""
    from ragfence.core.settings import POLICY_FILE, Settings

    named = Settings.from_env().policy
    return named or (POLICY_FILE if os.path.isfile(POLICY_FILE) else None)


def _kind(rules: Policy, kind: str) -> dict[str, Any]:
    effective = rules.for_kind(kind)
    return {
        "class": effective.retention_class,
        "ttl_h": effective.ttl_ms / 3_600_000,
        "lease_s": effective.lease_ms / 1000,
        "max_attempts": effective.max_attempts,
        "max_runtime_s": effective.max_runtime_ms / 1000,
        "wait_s": effective.wait_ms / 1000,
    }


def _flat(values: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, str]]:
    """Names with dots, and values as the file would have them."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{place}{name}.")
        elif isinstance(value, list):
            yield f"{place}{name}", ", ".join(map(str, value)) or "none"
        elif value is not None:
            yield f"{place}{name}", json.dumps(value) if isinstance(value, bool) else _shown(value)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
