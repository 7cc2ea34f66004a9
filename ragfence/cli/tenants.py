"""`ragfence tenants`: lists tenants, exports one, or drops one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from ragfence.cli import output
from ragfence.cli.options import (
    WHERE_STORES_ARE,
    Json,
    StoreCommands,
    StoreOptions,
    StoresOfAllTenants,
    StoresOfTenant,
    open_fence,
)
from ragfence.errors import UnknownStore

if TYPE_CHECKING:
    from ragfence.fence import Fence
    from ragfence.server.tenants.removal import TenantDropped
    from ragfence.stores.objects import ObjectStore

tenants = StoreCommands(no_args_is_help=True, help="List, export and drop whole tenants.")

Name = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant, as in `ragfence tenants list`.")]


@tenants.command("list")
def list_tenants(
    *,
    stores: StoresOfAllTenants,
    as_json: Json = False,
    sizes: Annotated[
        bool, typer.Option("--sizes", help="Also count objects and bytes, which lists the whole object store.")
    ] = False,
) -> None:
    """List the tenants of the fence store and of the object store."""
    from ragfence.server.tenants.stores import standing
    from ragfence.server.tenants.stores import tenants as found_in

    with standing(stores.fences_location) as fences, _open_objects(stores) as objects, output.progress("counting"):
        found = list(found_in(fences, objects, sizes=sizes))
    if as_json:
        output.print_json(
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
    listing = output.Listing(output.out(), "tenant", *right, output.Column("contains", wide=True))
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
        str,
        typer.Option("--to", metavar="FOLDER", help="A new folder, or the folder of an export that did not finish."),
    ],
    *,
    stores: StoresOfTenant,
    as_json: Json = False,
    with_apikeys: Annotated[
        bool,
        typer.Option("--with-apikeys", help="Also export its API keys, which are valid wherever the copy is served."),
    ] = False,
) -> None:
    """Copy all objects and decision rows of a tenant to a folder, which can be opened as its object store."""
    from ragfence.server.tenants.export import TenantExport

    began = time.monotonic()
    with _open_tenant(replace(stores, tenant=tenant)) as fence, output.progress("copying") as advance:
        report = TenantExport(fence, to, with_apikeys=with_apikeys).run(advance)
    if as_json:
        output.print_json({**asdict(report), "seconds": round(time.monotonic() - began, 3)})
        return
    output.echo(
        f"{report.tenant}: {output.pluralize(report.objects, 'object')} ({output.size(report.bytes)}) and "
        f"{output.pluralize(report.rows, 'decision row')} in "
        f"{report.folder}; {report.copied:,} copied now\n"
        f"  -> open it with `ragfence hydrate --tenant {report.tenant} --store NEW --objects {report.folder}`"
    )


@tenants.command("drop")
def drop(
    tenant: Name,
    *,
    stores: StoresOfTenant,
    as_json: Json = False,
    yes_drop: Annotated[
        str | None, typer.Option("--yes-drop", metavar="TENANT", help="Drop it. Repeat the name to confirm.")
    ] = None,
    leave_indexes: Annotated[
        bool, typer.Option("--leave-indexes", help="Skip physical indexes whose backend no longer exists.")
    ] = False,
) -> None:
    """Delete everything of a tenant from both stores. Without --yes-drop, only show what would be deleted.

    Stop its writers first. The command may be interrupted and run again.
    """
    from ragfence.server.tenants.removal import TenantRemoval
    from ragfence.server.tenants.stores import standing

    if yes_drop is not None and yes_drop != tenant:
        raise typer.BadParameter(f"{yes_drop!r} is not {tenant!r}: nothing was dropped", param_hint="--yes-drop")

    def wait(seconds: float) -> None:
        if not as_json:
            output.err().print(
                f"waiting {seconds:.0f} s, until every server has noticed that the API keys were revoked"
            )
        time.sleep(seconds)

    stores = replace(stores, tenant=tenant)
    what = "counting" if yes_drop is None else "dropping"
    with (
        _open_tenant(stores) as fence,
        standing(stores.fences_location) as fences,
        output.progress(what) as advance,
    ):
        work = TenantRemoval(fence, fences, leave_indexes=leave_indexes, sleep=wait)
        report = work.look() if yes_drop is None else work.run(advance)
    if as_json:
        output.print_json(asdict(report))
    else:
        _print(report)
    if report.nothing:
        raise typer.Exit(1)


def _print(report: TenantDropped) -> None:
    if report.nothing:
        output.echo(f"{report.tenant}: there is no such tenant")
        return
    listing = output.Listing(
        output.out(), report.tenant, output.Column("would be deleted" if report.dry_run else "deleted", right=True)
    )
    listing.add("API keys", f"{report.apikeys:,}")
    listing.add("entries of the fence store", f"{report.fences:,}")
    listing.add("physical indexes", f"{len(report.indexes):,}")
    listing.add("objects", f"{report.objects:,} ({output.size(report.bytes)})")
    if report.journaled:
        listing.add("effects in the local journal", f"{report.journaled:,}")
    listing.print()
    if report.dry_run:
        output.echo(
            "dry run: nothing was changed\n"
            f"  -> delete it with `ragfence tenants drop {report.tenant} --yes-drop {report.tenant}`"
        )
    elif report.late:
        output.echo(
            f"another process wrote at the same time: {output.pluralize(report.late, 'late entry')}, also deleted\n"
            "  -> stop its writers and drop it again"
        )


@contextlib.contextmanager
def _open_tenant(stores: StoreOptions) -> Iterator[Fence]:
    """Opens the stores of a tenant even if one of the two is missing: the other can still be exported or dropped."""
    file = stores.sqlite_file()
    with open_fence(stores, rebuild=file is not None and not file.exists()) as fence:
        yield fence


@contextlib.contextmanager
def _open_objects(stores: StoreOptions) -> Iterator[ObjectStore | None]:
    from ragfence import _open

    where, folder, file = stores.objects_location, stores.objects_folder(), stores.sqlite_file()
    if folder is not None and not folder.exists():
        if file is not None and not file.exists():
            raise UnknownStore(
                f"there is neither a fence store at {file} nor objects at {folder}",
                hint=WHERE_STORES_ARE,
            )
        where = None
    if where is None:
        yield None
        return
    with contextlib.closing(_open._open_objects(where)) as objects:
        yield objects
