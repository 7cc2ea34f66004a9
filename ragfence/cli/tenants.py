"""`ragfence tenants`: which there are, a copy of one, and its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Objects, PolicyFile, Store, StoreCommands, StoreOptions, opened
from ragfence.errors import UnknownStore

if TYPE_CHECKING:
    from ragfence.fence import Fence
    from ragfence.server.tenants.removal import TenantDropped
    from ragfence.stores.objects import ObjectStore

tenants = StoreCommands(no_args_is_help=True, help="Whole tenants: list, export, drop.")

Name = Annotated[str, typer.Argument(metavar="TENANT", help="As `tenants list` has it.")]


@tenants.command("list")
def list_tenants(
    store: Store = None,
    objects: Objects = None,
    as_json: Json = False,
    sizes: Annotated[
        bool, typer.Option("--sizes", help="Count objects and bytes, too: lists every name there is.")
    ] = False,
) -> None:
    """Every tenant of either store."""
    from ragfence.server.tenants.stores import standing
    from ragfence.server.tenants.stores import tenants as found_in

    place = StoreOptions(store, objects)
    with standing(place.fences_at) as fences, _objects(place) as held, output.progress("looking"):
        found = list(found_in(fences, held, sizes=sizes))
    if as_json:
        output.document(
            {
                "tenants": [
                    {
                        "tenant": each.name,
                        "sources": each.held.sources if each.held else None,
                        "records": each.held.records if each.held else None,
                        "apikeys": each.apikeys,
                        "has": list(each.folders),
                        "objects": each.objects,
                        "bytes": each.bytes,
                    }
                    for each in found
                ]
            }
        )
        return
    right = [output.Column(name, right=True) for name in ("sources", "records", "API keys", "objects", "size")]
    listing = output.Listing(output.out(), "tenant", *right, output.Column("has", wide=True))
    for each in found:
        listing.add(
            each.name,
            f"{each.held.sources:,}" if each.held else None,
            f"{each.held.records:,}" if each.held else None,
            f"{each.apikeys:,}",
            "-" if each.objects is None else f"{each.objects:,}",
            output.size(each.bytes),
            " ".join(each.folders),
        )
    listing.print()


@tenants.command("export")
def export(
    tenant: Name,
    to: Annotated[
        str, typer.Option("--to", metavar="FOLDER", help="A new folder, or one of an export that was cut off.")
    ],
    store: Store = None,
    objects: Objects = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    with_apikeys: Annotated[
        bool, typer.Option("--with-apikeys", help="Also its API keys: they let in wherever the copy is served.")
    ] = False,
) -> None:
    """Copies all objects and decision rows of a tenant to a folder that can be opened as its object store."""
    from ragfence.server.tenants.export import TenantExport

    began = time.monotonic()
    with _of(tenant, store, objects, policy) as (fence, _), output.progress("copying") as told:
        report = TenantExport(fence, to, with_apikeys=with_apikeys).run(told)
    if as_json:
        output.document({**asdict(report), "seconds": round(time.monotonic() - began, 3)})
        return
    output.say(
        f"{report.tenant}: {output.many(report.objects, 'object')} ({output.size(report.bytes)}) and "
        f"{output.many(report.rows, 'decision row')} in "
        f"{report.folder}; {report.copied:,} copied now\n"
        f"  -> `ragfence hydrate --tenant {report.tenant} --store NEW --objects {report.folder}` opens it"
    )


@tenants.command("drop")
def drop(
    tenant: Name,
    store: Store = None,
    objects: Objects = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    yes_drop: Annotated[
        str | None, typer.Option("--yes-drop", metavar="TENANT", help="Do it; the name once more, so that it is meant.")
    ] = None,
    leave_indexes: Annotated[
        bool, typer.Option("--leave-indexes", help="Forget physical indexes whose backend is gone for good.")
    ] = False,
) -> None:
    """Removes everything of a tenant from both stores; without --yes-drop, says what that would be.

    Stop its writers first. May be killed and run again.
    """
    from ragfence.server.tenants.removal import TenantRemoval
    from ragfence.server.tenants.stores import standing

    if yes_drop is not None and yes_drop != tenant:
        raise typer.BadParameter(f"{yes_drop!r} is not {tenant!r}: nothing was dropped", param_hint="--yes-drop")

    def wait(seconds: float) -> None:
        if not as_json:
            output.err().print(f"waiting {seconds:.0f} s, until every server has noticed that the API keys are gone")
        time.sleep(seconds)

    what = "looking" if yes_drop is None else "dropping"
    with (
        _of(tenant, store, objects, policy) as (fence, place),
        standing(place.fences_at) as fences,
        output.progress(what) as told,
    ):
        work = TenantRemoval(fence, fences, leave_indexes=leave_indexes, sleep=wait)
        report = work.look() if yes_drop is None else work.run(told)
    if as_json:
        output.document(asdict(report))
    else:
        _print(report)
    if report.nothing:
        raise typer.Exit(1)


def _print(report: TenantDropped) -> None:
    if report.nothing:
        output.say(f"{report.tenant}: nothing is known of it")
        return
    listing = output.Listing(
        output.out(), report.tenant, output.Column("would go" if report.dry_run else "gone", right=True)
    )
    listing.add("API keys", f"{report.apikeys:,}")
    listing.add("entries of the fence store", f"{report.fences:,}")
    listing.add("physical indexes", f"{len(report.indexes):,}")
    listing.add("objects", f"{report.objects:,} ({output.size(report.bytes)})")
    if report.journaled:
        listing.add("effects in the journal here", f"{report.journaled:,}")
    listing.print()
    if report.dry_run:
        output.say(
            f"nothing was changed\n  -> `ragfence tenants drop {report.tenant} --yes-drop {report.tenant}` does it"
        )
    elif report.late:
        output.say(
            f"somebody still wrote meanwhile: {report.late:,} things came late, and are gone, too\n"
            "  -> stop who writes, and drop it once more"
        )


@contextlib.contextmanager
def _of(
    tenant: str, store: str | None, objects: str | None, policy: str | None
) -> Iterator[tuple[Fence, StoreOptions]]:
    place = StoreOptions(store, objects, tenant, policy)
    file = place.sqlite_file()
    # One of the two stores may be gone: that is no reason to keep the other, or not to copy it.
    with opened(place, rebuild=file is not None and not file.exists()) as fence:
        yield fence, place


@contextlib.contextmanager
def _objects(place: StoreOptions) -> Iterator[ObjectStore | None]:
    from ragfence._open import _open_objects

    where, folder, file = place.objects_at, place.objects_folder(), place.sqlite_file()
    if folder is not None and not folder.exists():
        if file is not None and not file.exists():
            raise UnknownStore(
                f"there is neither a fence store at {file} nor objects at {folder}",
                hint="go to the folder that has the .ragfence/, or name the stores: --store, --objects, RAGFENCE_STORE",
            )
        where = None
    if where is None:
        yield None
        return
    with contextlib.closing(_open_objects(where)) as held:
        yield held
