"""A fence store across tenants; a fence sees only one tenant.

Which tenants there are, without reading all their names.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import quote, unquote

from ragfence._open import _backend, _is_server, _sqlite_path
from ragfence.core.operations import encoded
from ragfence.errors import FormatTooNew, StoreUnavailable
from ragfence.server.apikeys import FOLDER as APIKEYS
from ragfence.stores.objects import ObjectEntry, ObjectStore

BATCH = 1000
"""Items deleted at a time."""

Progress = Callable[[int], None]
"""Called with the number of items done so far."""


class TenantHoldings(NamedTuple):
    """The contents of a fence store for one tenant."""

    sources: int = 0
    """Documents, and other sources with an order."""
    records: int = 0
    """Records of keys: pending, sealed, and the receipts of earlier revisions."""


class TenantStore(Protocol):
    """A fence store as a whole."""

    def tenants(self) -> dict[str, TenantHoldings]: ...

    def count(self, tenant: str) -> int:
        """Returns how many items `drop` would remove."""
        ...

    def drop(self, tenant: str, progress: Progress) -> int:
        """Removes all items of a tenant, the markers first, in bounded steps. Returns their number."""
        ...


@contextlib.contextmanager
def standing(where: str | os.PathLike[str]) -> Iterator[TenantStore]:
    """Opens the fence store at a URL or path, as `ragfence.open` takes it. Does not create a missing file."""
    if _is_server(where):
        link = _backend("ragfence.stores.redis.server_urls", "redis").open_link(
            os.fspath(where), timeout_s=5.0, hash_tags=()
        )
        with contextlib.closing(link):
            yield _Redis(link)
    else:
        yield _Sqlite(_sqlite_path(where))


def tenant_in(part: str) -> str:
    """Returns "" for names of backends and probes, which begin with a dot."""
    name = unquote(part)
    return name if encoded(name) == part else ""


# The markers first: a shard without one does not answer.
_TABLES: Final = {
    "markers": "tenant, shard",
    "sources": "tenant, shard, source",
    "records": "tenant, key",
    "decision_rows": "seq",
    "counters": "tenant, shard",
    "moves": "tenant, shard",
    "documents": "tenant, shard",
    "tallies": "tenant, hour, label",
    "row_counts": "tenant",
    "locks": "tenant, name",
}
"""and what tells their rows apart"""


class _Sqlite:
    def __init__(self, path: Path) -> None:
        self._path = path

    def tenants(self) -> dict[str, TenantHoldings]:
        with self._opened() as db:
            found = {name for table in self._tables(db) for name in self._names(db, table)}
            return {
                name: TenantHoldings(self._count(db, "sources", name), self._count(db, "records", name))
                for name in found
            }

    def count(self, tenant: str) -> int:
        with self._opened() as db:
            return sum(self._count(db, table, tenant) for table in self._tables(db))

    def drop(self, tenant: str, progress: Progress) -> int:
        done = 0
        with self._opened() as db:
            db.execute("PRAGMA secure_delete = ON")  # or the text would stay readable in free pages of the file
            for table in self._tables(db):
                key = _TABLES[table]
                chosen = f"SELECT {key} FROM {table} WHERE tenant = ? LIMIT {BATCH}"
                while removed := db.execute(f"DELETE FROM {table} WHERE ({key}) IN ({chosen})", (tenant,)).rowcount:
                    done += removed
                    progress(done)
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return done

    def _count(self, db: sqlite3.Connection, table: str, tenant: str) -> int:
        return int(db.execute(f"SELECT count(*) FROM {table} WHERE tenant = ?", (tenant,)).fetchone()[0])

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        db = None
        try:
            # Does not create the file. Each statement is a transaction, so that other processes are not blocked.
            if not self._path.exists():
                db = sqlite3.connect(":memory:")
            else:
                db = sqlite3.connect(
                    f"file:{quote(str(self._path))}?mode=rw", uri=True, timeout=30.0, isolation_level=None
                )
            yield db
        except sqlite3.Error as broken:
            raise StoreUnavailable(
                f"the fence file {self._path} did not answer: {broken}", hint="check the file, then run it again"
            ) from broken
        finally:
            if db is not None:
                db.close()

    def _tables(self, db: sqlite3.Connection) -> Sequence[str]:
        from ragfence.stores.sqlite import SCHEMA_VERSION

        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise FormatTooNew(f"{self._path} has schema {version}; this ragfence knows {SCHEMA_VERSION}")
        # A file of an older schema lacks some tables until a fence opens it.
        present = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        return tuple(table for table in _TABLES if table in present)

    def _names(self, db: sqlite3.Connection, table: str) -> Iterator[str]:
        """Goes from one tenant to the next by the index, however many rows each of them has."""
        name = ""
        while row := db.execute(f"SELECT min(tenant) FROM {table} WHERE tenant > ?", (name,)).fetchone():
            if row[0] is None:
                return
            name = row[0]
            yield name


class _Redis:
    _NAME = re.compile(rb"rf\{([A-Za-z0-9_.%-]+)(?::[0-9a-f]{2})?\}(.)", re.DOTALL)

    def __init__(self, link: Any) -> None:
        self._link = link

    def tenants(self) -> dict[str, TenantHoldings]:
        found: dict[str, list[int]] = {}
        for _, name in self._scan(b"rf{*"):
            if (parts := self._NAME.match(name)) and (tenant := tenant_in(parts[1].decode())):
                counted = found.setdefault(tenant, [0, 0])
                if (at := b"sk".find(parts[2])) >= 0:
                    counted[at] += 1
        return {tenant: TenantHoldings(*counted) for tenant, counted in found.items()}

    def count(self, tenant: str) -> int:
        return sum(1 for pattern in self._patterns(tenant) for _ in self._scan(pattern))

    def drop(self, tenant: str, progress: Progress) -> int:
        from ragfence.stores.redis.codec import Names
        from ragfence.stores.redis.replies import understood

        done = 0
        with understood(self._link.url):
            for marker in Names(tenant).markers:  # a shard without one does not answer
                done += self._link.client.unlink(marker)
        for pattern in self._patterns(tenant):
            names = self._scan(pattern)
            while batch := list(islice(names, BATCH)):
                with understood(self._link.url):
                    done += self._unlinked(batch)
                progress(done)
        return done

    def _unlinked(self, batch: list[tuple[Any, bytes]]) -> int:
        """Groups names by server and hash tag: a cluster accepts several names only if they have the same slot."""
        groups: dict[tuple[int, bytes], list[bytes]] = {}
        clients = {id(client): client for client, _ in batch}
        for client, name in batch:
            groups.setdefault((id(client), name[: name.index(b"}")]), []).append(name)
        return sum(clients[server].unlink(*names) for (server, _), names in groups.items())

    def _scan(self, pattern: bytes) -> Iterator[tuple[Any, bytes]]:
        """A name may occur twice, as with SCAN."""
        from ragfence.stores.redis.replies import understood

        with understood(self._link.url):
            for _, client in self._link.primaries():
                for name in client.scan_iter(pattern, count=BATCH):
                    yield client, name

    @staticmethod
    def _patterns(tenant: str) -> tuple[bytes, bytes]:
        # An encoded tenant contains no special characters of SCAN.
        tag = encoded(tenant).encode()
        return b"rf{%s:??}*" % tag, b"rf{%s}l*" % tag


@dataclass(frozen=True, slots=True)
class TenantState:
    name: str
    held: TenantHoldings | None
    """None: the fence store has no data of the tenant."""
    folders: tuple[str, ...]
    """The kinds of its objects."""
    apikeys: int = 0
    """Including revoked ones."""
    objects: int | None = None
    bytes: int | None = None
    """Only with `sizes`, which requires listing every name."""


def tenants(fences: TenantStore, objects: ObjectStore | None, *, sizes: bool = False) -> Iterator[TenantState]:
    """Returns every tenant of either store, by name. Without `sizes` only the folders of objects are listed."""
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
    """Yields the names directly below `root`, with one request each, instead of listing all names."""
    after = ""
    while entry := next(iter(objects.list(root, start_after=after, limit=1)), None):
        part = entry.name[len(root) :].partition("/")[0]
        yield part
        after = f"{root}{part}0"  # "0" follows "/"


def size_of(entries: Iterator[ObjectEntry]) -> tuple[int, int]:
    count = size = 0
    for entry in entries:
        count, size = count + 1, size + entry.size
    return count, size
