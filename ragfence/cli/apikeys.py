"""`ragfence apikeys`: the API keys of a tenant. The token of a key is shown once, when it is created."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.options import WHERE_STORES_ARE, Json, StoreCommands, StoreOptions, StoresWithoutPolicy, to_ms
from ragfence.errors import ObjectsRequired, UnknownStore, ValidationError

if TYPE_CHECKING:
    from ragfence.server.apikeys import ApiKey, ApiKeys
    from ragfence.server.scopes import KeyScope

apikeys = StoreCommands(no_args_is_help=True, help="Create, list and revoke API keys of the HTTP server.")


class RoleName(StrEnum):
    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


class ScopeName(StrEnum):
    INGEST = "ingest"
    RETRACT = "retract"
    BUILD = "build"
    SWAP = "swap"
    SEARCH = "search"
    AUDIT = "audit"
    ADMIN = "admin"


def _check_expiry(text: str | None) -> str | None:
    if text is not None:
        _ttl_s(text, 0)
    return text


def _ttl_s(text: str, now_ms: int) -> float:
    """Seconds from now until a moment: "90d", or a time."""
    try:
        moment_ms = to_ms(text, 0, 0)
    except ValidationError as wrong:
        raise typer.BadParameter(f"{wrong.message}: {output.format_hint(wrong.hint)}") from None
    # Elsewhere a span counts back from now, so it is negative.
    return -moment_ms / 1000 if moment_ms <= 0 else (moment_ms - now_ms) / 1000


@apikeys.command("create")
def create(
    *,
    stores: StoresWithoutPolicy,
    as_json: Json = False,
    scope: Annotated[
        list[ScopeName] | None,
        typer.Option("--scope", help="What the key may do; may be repeated. Not with --role."),
    ] = None,
    role: Annotated[
        RoleName | None,
        typer.Option(
            "--role",
            help="A set of scopes. read: search and audit; write, the default: also ingest, retract, build and swap; "
            "admin: everything.",
        ),
    ] = None,
    principal: Annotated[
        str,
        typer.Option(
            "--principal",
            metavar="NAME",
            help="The owner of the Idempotency-Keys. Give a key that replaces another one the same principal.",
        ),
    ] = "",
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="A note: who has the key, and what for.")] = "",
    expires: Annotated[
        str | None,
        typer.Option(
            "--expires",
            metavar="SPAN",
            callback=_check_expiry,
            help="When the key expires: 90d, 12h, or a time. By default never.",
        ),
    ] = None,
) -> None:
    """Create an API key and print its token, which is shown only once."""
    if scope and role:
        raise typer.BadParameter("give either --role or --scope, not both")
    ttl_s = None if expires is None else _ttl_s(expires, time.time_ns() // 1_000_000)
    with _open_keys(stores, create=True) as keys:
        created = keys.create(
            stores.tenant_name,
            role.value if role else None,
            scopes=[each.value for each in scope] if scope else None,
            principal=principal,
            note=note,
            ttl_s=ttl_s,
            by=_who(),
        )
    if as_json:
        output.print_json(
            {
                "token": created.token,
                "key_id": created.key_id,
                "tenant": created.tenant,
                "role": created.role.value if created.role else None,
                "scopes": in_order(created.scopes),
                "principal": created.principal,
                "expires": output.iso(created.expires_ms),
            }
        )
        return
    until = f", until {output.moment(created.expires_ms)}" if created.expires_ms else ""
    # Only the token on stdout, for `TOKEN=$(ragfence apikeys create)`.
    output.echo(created.token)
    granted = created.role.value if created.role else " ".join(in_order(created.scopes))
    console = output.err()
    console.print(
        output.plain(f"key {created.key_id}: {granted} of tenant {created.tenant}, as {created.principal}{until}")
    )
    console.print("  store the token now, it is not shown again; send it as `Authorization: Bearer TOKEN`")
    console.print(f"  revoke it with `ragfence apikeys revoke {created.key_id}`")


@apikeys.command("list")
def list_keys(*, stores: StoresWithoutPolicy, as_json: Json = False) -> None:
    """List the API keys of the tenant, oldest first, including expired and revoked ones. Tokens are not stored."""
    now_ms = time.time_ns() // 1_000_000
    with _open_keys(stores) as keys:
        found = keys.list(stores.tenant_name)
    if as_json:
        output.print_json({"tenant": stores.tenant_name, "keys": [_key_document(key, now_ms) for key in found]})
        return
    console = output.out()
    listing = output.Listing(
        console,
        output.Column("key_id", whole=True),
        "may",
        output.Column("state", whole=True),
        output.Column("principal", cut=True),
        output.Column("note", cut=True),
        output.Column("created", whole=True),
        output.Column("last used", wide=True),
        output.Column("expires", wide=True),
    )
    for key in found:
        listing.add(
            key.key_id,
            key.grants(),
            key.state(now_ms),
            key.principal,
            key.note,
            output.time_cell(key.created_ms, console=console),
            output.time_cell(key.used_ms, console=console) if key.used_ms else None,
            output.when(key.expires_ms, now_ms) if key.expires_ms else None,
        )
    if found:
        listing.print()
    else:
        output.echo(f"tenant {stores.tenant_name} has no API keys\n  -> `ragfence apikeys create` creates one")


@apikeys.command("revoke")
def revoke(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY_ID|TOKEN", help="The key_id from `ragfence apikeys list`, or the token itself if it leaked."
        ),
    ],
    *,
    stores: StoresWithoutPolicy,
    as_json: Json = False,
) -> None:
    """Revoke an API key permanently."""
    from ragfence.server.apikeys import FRESH_S, parse_token

    key_id = key
    if (token := parse_token(key)) is not None:
        if token.tenant != stores.tenant_name:
            raise ValidationError(
                f"this is a token of tenant {token.tenant!r}, not of {stores.tenant_name!r}",
                hint=f"--tenant {token.tenant}",
            )
        key_id = token.key_id
    elif key.startswith("rf_"):
        raise ValidationError(
            "this is not a complete token: its checksum is wrong", hint="use its key_id from `ragfence apikeys list`"
        )
    with _open_keys(stores) as keys:
        revoked = keys.revoke(stores.tenant_name, key_id, by=_who())
    if as_json:
        output.print_json(
            {"key_id": key_id, "tenant": stores.tenant_name, "revoked": revoked, "servers_notice_s": FRESH_S}
        )
    elif revoked:
        output.echo(f"revoked {key_id}: all servers refuse it within {FRESH_S:.0f} s")
    else:
        output.echo(f"{key_id} was already revoked")


@contextlib.contextmanager
def _open_keys(stores: StoreOptions, *, create: bool = False) -> Iterator[ApiKeys]:
    """`create`: the first key may be created before anything else, and then creates the folder of the objects."""
    from ragfence._open import _open_objects
    from ragfence.server.apikeys import ApiKeys

    where, folder = stores.objects_location, stores.objects_folder()
    if where is None:
        raise ObjectsRequired(
            "API keys are stored in the object store, and none is named",
            hint="name it with --objects or RAGFENCE_OBJECTS",
        )
    if folder is not None and not folder.exists():
        if not create:
            raise UnknownStore(
                f"there is no folder of objects at {folder}",
                hint=WHERE_STORES_ARE,
            )
        output.err().print(output.plain(f"created a new object store: {folder}"))
    with contextlib.closing(_open_objects(where)) as store:
        yield ApiKeys(store)


def _who() -> str:
    """User and host of the command, for the decision row."""
    import getpass
    import socket

    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a container without users
        return socket.gethostname()


def in_order(scopes: Collection[KeyScope]) -> list[str]:
    """The scopes in the order in which they are documented."""
    return [name.value for name in ScopeName if name.value in scopes]


def _key_document(key: ApiKey, now_ms: int) -> dict[str, Any]:
    return {
        "key_id": key.key_id,
        "role": key.role.value if key.role else None,
        "scopes": in_order(key.scopes),
        "state": key.state(now_ms),
        "principal": key.principal,
        "note": key.note or None,
        "created": output.iso(key.created_ms),
        "expires": output.iso(key.expires_ms),
        "revoked": output.iso(key.revoked_ms),
        "last_used": output.iso(key.used_ms),
    }
