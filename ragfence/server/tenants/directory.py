"""Which tenants there are, without reading all their names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ragfence.server.apikeys import FOLDER as APIKEYS
from ragfence.server.tenants.stores import Held, Standing, tenant_in
from ragfence.stores.objects import Entry, ObjectStore


@dataclass(frozen=True, slots=True)
class TenantState:
    name: str
    held: Held | None
    """None: the fence store knows nothing of it"""
    folders: tuple[str, ...]
    """what kinds of objects it has"""
    apikeys: int = 0
    """also revoked ones"""
    objects: int | None = None
    bytes: int | None = None
    """only where sizes were asked for: every name has to be listed for that"""


def tenants(fences: Standing, objects: ObjectStore | None, *, sizes: bool = False) -> Iterator[TenantState]:
    """Every tenant of either store, by name. Of the objects only the folders are looked at, unless `sizes`."""
    known = fences.tenants()
    stored = {} if objects is None else {tenant: part for part in parts_of(objects, "") if (tenant := tenant_in(part))}
    for name in sorted({*known, *stored}):
        if objects is None or name not in stored:
            yield TenantState(name, known.get(name), ())
            continue
        root = f"{stored[name]}/"
        folders, keys = tuple(parts_of(objects, root)), sum(1 for _ in parts_of(objects, f"{root}{APIKEYS}/"))
        counted = sized = None
        if sizes:
            counted, sized = size_of(objects.list(root))
        yield TenantState(name, known.get(name), folders, keys, counted, sized)


def parts_of(objects: ObjectStore, root: str) -> Iterator[str]:
    """The names right below, each by a request of its own: nobody reads all names to learn the first parts."""
    after = ""
    while entry := next(iter(objects.list(root, start_after=after, limit=1)), None):
        part = entry.name[len(root) :].partition("/")[0]
        yield part
        after = f"{root}{part}0"  # "0" follows "/"


def size_of(entries: Iterator[Entry]) -> tuple[int, int]:
    count = size = 0
    for entry in entries:
        count, size = count + 1, size + entry.size
    return count, size
