"""`ragfence policy check`: validates a policy file and prints the effective settings. For CI."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.options import Json
from ragfence.errors import PolicyError

if TYPE_CHECKING:
    from ragfence.core.policy import Policy

policy = typer.Typer(no_args_is_help=True, help="Check a policy file.")


@policy.callback()
def _group() -> None:
    """Keeps `check` a subcommand while it is the only one."""


@policy.command("check")
def check(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]", help="The policy file. By default, the one that other commands use in this folder."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a policy file and print the effective settings. Exits with 1 and all problems, one per line."""
    from ragfence.core.settings import load_policy

    used = file or policy_file()
    try:
        rules = load_policy(used)
    except PolicyError as refused:
        problems = refused.details.get("problems")
        if as_json or not problems:
            raise
        for problem in problems:
            output.err().print(output.plain(f"{used}: {problem}"))
        raise typer.Exit(1) from None
    settings = dict(_flat(rules.model_dump(mode="json", by_alias=True)))
    over_http = _over_http(rules, settings)
    kinds = {kind: _kind(rules, kind) for kind in sorted(rules.kinds)}
    secret, hooks = _secret(rules), _webhooks(rules)
    if as_json:
        found: dict[str, Any] = {"content_secret": secret} if secret else {}
        found |= {"webhooks": hooks} if hooks else {}
        found |= {"over_http": over_http} if over_http else {}
        settings_of = rules.model_dump(mode="json", by_alias=True)
        output.print_json({"file": used, "settings": settings_of, "kinds": kinds, **found})
        return
    console = output.out()
    output.echo(used or "no policy file; these are the defaults")
    listing = output.Listing(console, output.Column("setting", whole=True), "value")
    for name, value in settings.items():
        listing.add(name, f"{value} (over HTTP: {over_http[name]})" if name in over_http else value)
    listing.print()
    if kinds:
        effective = output.Listing(console, "kind", *next(iter(kinds.values())))
        for kind, values in kinds.items():
            effective.add(kind, *map(_shown, values.values()))
        console.print()
        effective.print()
    if secret:
        output.echo(secret)
    for line in hooks:
        output.echo(line)


def policy_file() -> str | None:
    """The file that `ragfence.open` would read, or None if it would use the defaults."""
    from ragfence.core.settings import POLICY_FILE, Settings

    named = Settings.from_env().policy
    return named or (POLICY_FILE if os.path.lexists(POLICY_FILE) else None)


def _secret(rules: Policy) -> str:
    """Whether the secret that the policy needs exists here. In CI it need not exist."""
    from ragfence.core.settings import Settings, load_secret

    if rules.content_hash != "hmac":
        return ""
    tenant = Settings.from_env().tenant
    try:
        load_secret(rules.content_secret, tenant)
    except PolicyError as refused:
        return f"{refused.message}: writes of this tenant would be refused here"
    return f"The secret of tenant {tenant!r} is found, and long enough."


def _webhooks(rules: Policy) -> list[str]:
    """Whether the secrets of each webhook exist here. In CI they need not exist."""
    from ragfence.core.settings import load_webhook_secrets

    lines = []
    for name, webhook in rules.webhooks.items():
        try:
            count = len(load_webhook_secrets(name, webhook).secrets)
        except PolicyError as refused:
            lines.append(f"{refused.message}: `ragfence serve` would not start here")
        else:
            lines.append(f"The webhook {name!r}: {output.pluralize(count, 'secret')} found.")
    return lines


def _over_http(rules: Policy, settings: Mapping[str, str]) -> dict[str, str]:
    """Settings that `ragfence serve` changes, unless the file sets them."""
    from ragfence.core.policy import for_strangers

    served = _flat(for_strangers(rules).model_dump(mode="json", by_alias=True))
    return {name: value for name, value in served if settings.get(name) != value}


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
    """Names with dots, and values as written in the file."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{place}{name}.")
        elif isinstance(value, list):
            yield f"{place}{name}", ", ".join(map(str, value)) or "none"
        elif value is not None:
            yield f"{place}{name}", json.dumps(value) if isinstance(value, bool) else _shown(value)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
