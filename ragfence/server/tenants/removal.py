"""The end of a tenant.

A drop ends a tenant in this order, and may be killed anywhere and run again:

    1. API keys: nobody is let in any more, once the servers have noticed
    2. the fence store: nothing answers for objects that are about to go
    3. epochs: whoever hydrates from now on finds an empty tenant
    4. the fence store again: what was hydrated between 2 and 3
    5. the physical indexes, while the log of builds still names them
    6. all other objects
    7. both stores again, for what came meanwhile

Writers that hold no API key (loaders, jobs) have to be stopped first; what they write meanwhile is found in 7 and told.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from ragfence.core.operations import encoded
from ragfence.errors import RagfenceError, StoreUnavailable
from ragfence.server.apikeys import FOLDER as APIKEYS
from ragfence.server.apikeys import FRESH_S
from ragfence.server.tenants.stores import BATCH, TenantStore, Told, parts_of, size_of

if TYPE_CHECKING:
    from ragfence.fence import Fence
    from ragfence.indexes.backends.backend import Backend

PASSES = 5


@dataclass(slots=True)
class TenantDropped:
    """What was removed; in a dry run, what would be."""

    tenant: str
    dry_run: bool
    apikeys: int = 0
    fences: int = 0
    """records, heads, decision rows, markers and counters"""
    indexes: list[str] = field(default_factory=list)
    """physical indexes"""
    objects: int = 0
    bytes: int = 0
    journaled: int = 0
    """effects in the journal of this machine, which nobody can seal any more"""
    late: int = 0
    """what was written while the tenant was dropped; it is gone, too, unless its writer is still at work"""

    @property
    def nothing(self) -> bool:
        return not (self.apikeys or self.fences or self.indexes or self.objects or self.journaled)


class TenantRemoval:
    """The end of a tenant; see the top of this module for the order of things."""

    def __init__(
        self,
        fence: Fence,
        fences: TenantStore,
        *,
        leave_indexes: bool = False,
        servers_notice_s: float = FRESH_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`leave_indexes`: for backends that are gone for good. `servers_notice_s`: how long they may know a key."""
        self._fence = fence
        self._fences = fences
        self._objects = fence.inspector.objects
        self._journal = fence.inspector.journal
        self._root = f"{encoded(fence.tenant)}/"
        self._leave_indexes = leave_indexes
        self._servers_notice_s = servers_notice_s
        self._sleep = sleep

    def look(self) -> TenantDropped:
        """What there is, and nothing is changed."""
        tenant = self._fence.tenant
        report = TenantDropped(tenant, True, fences=self._fences.count(tenant), journaled=len(self._journal.entries()))
        if self._objects is not None:
            report.apikeys = sum(1 for _ in parts_of(self._objects, f"{self._root}{APIKEYS}/"))
            with self._told_of_backends():
                report.indexes = [physical for backend, physical in self._indexes() if backend.exists(physical)]
            report.objects, report.bytes = size_of(self._objects.list(self._root))
        return report

    def run(self, told: Told = lambda done: None) -> TenantDropped:
        tenant = self._fence.tenant
        report = TenantDropped(tenant, False)

        def tell(more: int = 0) -> None:
            told(report.fences + report.objects + more)

        if self._objects is not None:
            self._drop_apikeys(report)
        report.fences = self._fences.drop(tenant, tell)
        if self._objects is not None:
            for _ in range(PASSES):
                self._delete("epochs/", report, tell)
                if not (filled := self._fences.drop(tenant, tell)):
                    break
                report.late += filled  # somebody hydrated, and so began an epoch that may not have been listed
            self._drop_indexes(report)
            self._delete("", report, tell)
            removed = report.objects
            self._delete("", report, tell)
            report.late += report.objects - removed + self._fences.drop(tenant, tell)
        if entries := self._journal.entries():
            self._journal.drop({entry.token for entry in entries})
            report.journaled = len(entries)
        return report

    def _drop_apikeys(self, report: TenantDropped) -> None:
        assert self._objects is not None
        entries = list(self._objects.list(f"{self._root}{APIKEYS}/"))
        # A key whose revocation went first would let somebody in again.
        made = [entry.name for entry in entries if entry.name.endswith("/made")]
        self._objects.delete(made)
        self._objects.delete([entry.name for entry in entries])
        report.apikeys = len(made)
        report.objects += len(entries)
        report.bytes += sum(entry.size for entry in entries)
        if made:
            self._sleep(self._servers_notice_s)

    def _drop_indexes(self, report: TenantDropped) -> None:
        from ragfence.indexes.alias_effects import pointer_name
        from ragfence.indexes.catalog import Catalog

        if self._leave_indexes or self._objects is None:
            return
        with self._told_of_backends():
            for alias, held in Catalog(self._fence.tenant, self._objects).head().state.aliases.items():
                backend = self._fence.indexes.backend(held.target.backend)
                backend.unpoint(pointer_name(self._fence.tenant, alias))
            for backend, physical in self._indexes():
                if backend.exists(physical):
                    report.indexes.append(physical)
                backend.drop(physical)  # also a part of one, which does not count as existing

    def _indexes(self) -> Iterator[tuple[Backend, str]]:
        """Every physical index that was ever begun, each once; most may be gone."""
        if self._leave_indexes:
            return
        log = self._fence.indexes.builds_log
        begun = [(attempt.backend, attempt.physical) for attempt in log.attempts()]
        sealed = [entry.seal for index_hash in log.hashes() for entry in log.history(index_hash) if entry.seal]
        for name, physical in dict.fromkeys((*begun, *((seal.backend, seal.physical) for seal in sealed))):
            yield self._fence.indexes.backend(name), physical

    @contextlib.contextmanager
    def _told_of_backends(self) -> Iterator[None]:
        try:
            yield
        except RagfenceError as broken:
            raise StoreUnavailable(
                f"the indexes of tenant {self._fence.tenant!r} cannot be dropped: {broken.message}",
                hint="its objects are still there, and name them: drop it again when the backend is back, or with "
                "--leave-indexes if it never will be",
            ) from broken

    def _delete(self, folder: str, report: TenantDropped, tell: Callable[[], None]) -> None:
        assert self._objects is not None
        entries = self._objects.list(f"{self._root}{folder}")
        while batch := list(islice(entries, BATCH)):
            self._objects.delete([entry.name for entry in batch])
            report.objects += len(batch)
            report.bytes += sum(entry.size for entry in batch)
            tell()
