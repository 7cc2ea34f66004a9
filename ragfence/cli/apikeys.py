"""`ragfence apikeys`: who may ask a server, for this tenant. The token of a key is shown once, when it is made."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Objects, Store, StoreCommands, StoreOptions, Tenant
from ragfence.errors import ObjectsRequired, UnknownStore, ValidationError

if TYPE_CHECKING:
    from ragfence.server.apikeys import ApiKey, ApiKeys
    from ragfence.server.scopes import KeyScope

apikeys = StoreCommands(no_args_is_help=True, help="API keys of the HTTP server: create, list, revoke.")


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


def _span(text: str | None) -> str | None:
    if text is not None:
        _ttl_s(text, 0)
    return text


def _ttl_s(text: str, now_ms: int) -> float:
    """From now until then: "90d", or a time."""
    from ragfence.audit.audit import _moment_ms

    try:
        moment_ms = _moment_ms(text, 0, 0)
    except ValidationError as wrong:
        raise typer.BadParameter(f"{wrong.message}: {output.advice(wrong.hint)}") from None
    # As it is read elsewhere, a span goes back from now.
    return -moment_ms / 1000 if moment_ms <= 0 else (moment_ms - now_ms) / 1000


@apikeys.command("create")
def create(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    as_json: Json = False,
    scope: Annotated[
        list[ScopeName] | None,
        typer.Option("--scope", help="What the key may do; give it once for each scope. Not with --role."),
    ] = None,
    role: Annotated[
        RoleName | None,
        typer.Option(
            "--role",
            help="A set of scopes: read is search and audit; write adds ingest, retract, build and swap; admin is all. "
            "Without --role and --scope the key gets write.",
        ),
    ] = None,
    principal: Annotated[
        str,
        typer.Option(
            "--principal",
            metavar="NAME",
            help="Who owns the Idempotency-Keys. Give a new key that replaces an old one the same principal.",
        ),
    ] = "",
    note: Annotated[
        str, typer.Option("--note", metavar="TEXT", help="A note for people: who has the key, and what for.")
    ] = "",
    expires: Annotated[
        str | None,
        typer.Option(
            "--expires", metavar="SPAN", callback=_span, help="When it expires: 90d, 12h, or a time. Without it, never."
        ),
    ] = None,
) -> None:
    """Creates an API key and prints its token. The token is shown only once."""
    if scope and role:
        raise typer.BadParameter("give --role or --scope, not both")
    place = StoreOptions(store, objects, tenant)
    ttl_s = None if expires is None else _ttl_s(expires, time.time_ns() // 1_000_000)
    with _keys(place, make=True) as keys:
        made = keys.create(
            place.tenant_name,
            role.value if role else None,
            scopes=[each.value for each in scope] if scope else None,
            principal=principal,
            note=note,
            ttl_s=ttl_s,
            by=_who(),
        )
    if as_json:
        output.document(
            {
                "token": made.token,
                "key_id": made.key_id,
                "tenant": made.tenant,
                "role": made.role.value if made.role else None,
                "scopes": in_order(made.scopes),
                "principal": made.principal,
                "expires": output.iso(made.expires_ms),
            }
        )
        return
    until = f", until {output.moment(made.expires_ms)}" if made.expires_ms else ""
    # The token alone on stdout: `TOKEN=$(ragfence apikeys create)`.
    output.say(made.token)
    granted = made.role.value if made.role else " ".join(in_order(made.scopes))
    told = output.err()
    told.print(output.plain(f"key {made.key_id}: {granted} of tenant {made.tenant}, as {made.principal}{until}"))
    told.print("  keep the token now, it is not shown again; send it as `Authorization: Bearer TOKEN`")
    told.print(f"  `ragfence apikeys revoke {made.key_id}` ends it")


@apikeys.command("list")
def list_keys(store: Store = None, objects: Objects = None, tenant: Tenant = None, as_json: Json = False) -> None:
    """The API keys of the tenant, oldest first, also those that have ended. Tokens are not stored, so none is shown."""
    place, now_ms = StoreOptions(store, objects, tenant), time.time_ns() // 1_000_000
    with _keys(place) as keys:
        found = keys.list(place.tenant_name)
    if as_json:
        output.document({"tenant": place.tenant_name, "keys": [_told(key, now_ms) for key in found]})
        return
    listing = output.Listing(
        output.out(),
        output.Column("key_id", whole=True),
        "role or scopes",
        output.Column("state", whole=True),
        "principal",
        "note",
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
            output.moment(key.created_ms),
            output.moment(key.used_ms) if key.used_ms else None,
            output.when(key.expires_ms, now_ms) if key.expires_ms else None,
        )
    if found:
        listing.print()
    else:
        output.say(f"tenant {place.tenant_name} has no API keys\n  -> `ragfence apikeys create` makes one")


@apikeys.command("revoke")
def revoke(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY_ID|TOKEN", help="The id that `ragfence apikeys list` shows, or the token itself if it leaked."
        ),
    ],
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Revokes an API key for good."""
    from ragfence.server.apikeys import FRESH_S, parse_token

    place, key_id = StoreOptions(store, objects, tenant), key
    if (token := parse_token(key)) is not None:
        if token.tenant != place.tenant_name:
            raise ValidationError(
                f"this is a token of tenant {token.tenant!r}, not of {place.tenant_name!r}",
                hint=f"--tenant {token.tenant}",
            )
        key_id = token.key_id
    elif key.startswith("rf_"):
        raise ValidationError(
            "this is no whole token: its checksum is wrong", hint="`ragfence apikeys list` has its id"
        )
    with _keys(place) as keys:
        revoked = keys.revoke(place.tenant_name, key_id, by=_who())
    if as_json:
        output.document(
            {"key_id": key_id, "tenant": place.tenant_name, "revoked": revoked, "servers_notice_s": FRESH_S}
        )
    elif revoked:
        output.say(f"revoked {key_id}: every server refuses it within {FRESH_S:.0f} s, and for ever")
    else:
        output.say(f"{key_id} was revoked already")


@contextlib.contextmanager
def _keys(place: StoreOptions, *, make: bool = False) -> Iterator[ApiKeys]:
    """`make`: the first key may come before anything else, and makes the folder of the objects."""
    from ragfence._open import _open_objects
    from ragfence.server.apikeys import ApiKeys

    where, folder = place.objects_at, place.objects_folder()
    if where is None:
        raise ObjectsRequired(
            "API keys live in the object store, and none is named", hint="name it: --objects, or RAGFENCE_OBJECTS"
        )
    if folder is not None and not folder.exists():
        if not make:
            raise UnknownStore(
                f"there is no folder of objects at {folder}",
                hint="go to the folder that has the .ragfence/, or name the stores: --store, --objects, RAGFENCE_STORE",
            )
        output.err().print(output.plain(f"made a new object store: {folder}"))
    with contextlib.closing(_open_objects(where)) as opened:
        yield ApiKeys(opened)


def _who() -> str:
    """For the decision row: who ran the command, and where."""
    import getpass
    import socket

    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a container without users
        return socket.gethostname()


def in_order(scopes: Collection[KeyScope]) -> list[str]:
    """As they are documented."""
    return [name.value for name in ScopeName if name.value in scopes]


def _told(key: ApiKey, now_ms: int) -> dict[str, Any]:
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
