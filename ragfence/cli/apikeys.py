"""`ragfence apikeys`: who may ask a server, for this tenant. The token of a key is shown once, when it is made."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import show
from ragfence.cli.opening import Json, Objects, Place, Store, Tenant
from ragfence.errors import ObjectsRequired, UnknownStore, ValidationError

if TYPE_CHECKING:
    from ragfence.api.apikeys import ApiKey, ApiKeys

apikeys = typer.Typer(no_args_is_help=True, help="Keys of the HTTP API: create, list, revoke.")


class RoleName(StrEnum):
    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


def _span(text: str | None) -> str | None:
    if text is not None:
        _ttl_s(text, 0)
    return text


def _ttl_s(text: str, now_ms: int) -> float:
    """From now until then: "90d", or a time."""
    from ragfence.audit.decisions import _moment_ms

    try:
        moment_ms = _moment_ms(text, 0, 0)
    except ValidationError as wrong:
        raise typer.BadParameter(f"{wrong.message}: {wrong.hint}") from None
    # As it is read elsewhere, a span goes back from now.
    return -moment_ms / 1000 if moment_ms <= 0 else (moment_ms - now_ms) / 1000


@apikeys.command("create")
def create(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    as_json: Json = False,
    role: Annotated[
        RoleName, typer.Option("--role", help="read: look and search; write: ingest and build, too; admin: all.")
    ] = RoleName.WRITE,
    principal: Annotated[
        str,
        typer.Option(
            "--principal", metavar="NAME", help="Whose Idempotency-Keys these are; a rotated key names it again."
        ),
    ] = "",
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="For people: who has it, what for.")] = "",
    expires: Annotated[
        str | None,
        typer.Option("--expires", metavar="SPAN", callback=_span, help="90d, 12h, or a time; without it, never."),
    ] = None,
) -> None:
    """Makes a key, and prints its token: nobody can show it again."""
    place = Place(store, objects, tenant)
    ttl_s = None if expires is None else _ttl_s(expires, time.time_ns() // 1_000_000)
    with _keys(place, make=True) as keys:
        made = keys.create(place.tenant_name, role.value, principal=principal, note=note, ttl_s=ttl_s)
    if as_json:
        show.document(
            {
                "token": made.token,
                "key_id": made.key_id,
                "tenant": made.tenant,
                "role": made.role.value,
                "principal": made.principal,
                "expires": show.iso(made.expires_ms),
            }
        )
        return
    until = f", until {show.moment(made.expires_ms)}" if made.expires_ms else ""
    # The token alone on stdout: `TOKEN=$(ragfence apikeys create)`.
    show.say(made.token)
    told = show.err()
    told.print(show.plain(f"key {made.key_id}: {made.role.value} of tenant {made.tenant}, as {made.principal}{until}"))
    told.print("  keep the token now, it is not shown again; send it as `Authorization: Bearer TOKEN`")
    told.print(f"  `ragfence apikeys revoke {made.key_id}` ends it")


@apikeys.command("list")
def list_keys(store: Store = None, objects: Objects = None, tenant: Tenant = None, as_json: Json = False) -> None:
    """The keys of the tenant, oldest first, also those that ended. Secrets are not stored, so none is shown."""
    place, now_ms = Place(store, objects, tenant), time.time_ns() // 1_000_000
    with _keys(place) as keys:
        found = keys.list(place.tenant_name)
    if as_json:
        show.document({"tenant": place.tenant_name, "keys": [_told(key, now_ms) for key in found]})
        return
    listing = show.Listing(
        show.out(),
        show.Column("key_id", whole=True),
        show.Column("role", whole=True),
        show.Column("state", whole=True),
        "principal",
        "note",
        show.Column("created", whole=True),
        show.Column("expires", wide=True),
    )
    for key in found:
        listing.add(
            key.key_id,
            key.role.value,
            key.state(now_ms),
            key.principal,
            key.note,
            show.moment(key.created_ms),
            show.when(key.expires_ms, now_ms) if key.expires_ms else None,
        )
    if found:
        listing.print()
    else:
        show.say(f"tenant {place.tenant_name} has no API keys\n  -> `ragfence apikeys create` makes one")


@apikeys.command("revoke")
def revoke(
    key: Annotated[
        str, typer.Argument(metavar="KEY_ID|TOKEN", help="As `apikeys list` has it; a leaked token will do.")
    ],
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Ends a key for good."""
    from ragfence.api.apikeys import FRESH_S, parsed

    place, key_id = Place(store, objects, tenant), key
    if (token := parsed(key)) is not None:
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
        revoked = keys.revoke(place.tenant_name, key_id)
    if as_json:
        show.document({"key_id": key_id, "tenant": place.tenant_name, "revoked": revoked, "servers_notice_s": FRESH_S})
    elif revoked:
        show.say(f"revoked {key_id}: every server refuses it within {FRESH_S:.0f} s, and for ever")
    else:
        show.say(f"{key_id} was revoked already")


@contextlib.contextmanager
def _keys(place: Place, *, make: bool = False) -> Iterator[ApiKeys]:
    """`make`: the first key may come before anything else, and makes the folder of the objects."""
    from ragfence.api.apikeys import ApiKeys
    from ragfence.opening import _open_objects

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
        show.err().print(show.plain(f"made a new object store: {folder}"))
    with contextlib.closing(_open_objects(where)) as opened:
        yield ApiKeys(opened)


def _told(key: ApiKey, now_ms: int) -> dict[str, Any]:
    return {
        "key_id": key.key_id,
        "role": key.role.value,
        "state": key.state(now_ms),
        "principal": key.principal,
        "note": key.note or None,
        "created": show.iso(key.created_ms),
        "expires": show.iso(key.expires_ms),
        "revoked": show.iso(key.revoked_ms),
    }
