"""Removes everything of a tenant.

The removal has this order; it may be killed at any point and run again:

    1. API keys: requests are refused, once the caches of the servers have expired
    2. the fence store: nothing is answered from objects that are about to be deleted
    3. epochs: a process that hydrates after this finds an empty tenant
    4. the fence store again: records that were hydrated between 2 and 3
    5. the physical indexes, while the log of builds still names them
    6. all other objects
    7. both stores again, for what was written meanwhile

Writers without an API key (loaders, jobs) have to be stopped first; what they write meanwhile is removed in 7 and
counted as late.
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
from ragfence.server.tenants.stores import BATCH, Progress, TenantStore, parts_of, size_of

if TYPE_CHECKING:
    from ragfence.fence import Fence
    from ragfence.indexes.backends.backend import Backend

PASSES = 5


@dataclass(slots=True)
class TenantDropped:
    """What was removed; in a dry run, what would be removed."""

    tenant: str
    dry_run: bool
    apikeys: int = 0
    fences: int = 0
    """Records, heads, decision rows, markers and counters."""
    indexes: list[str] = field(default_factory=list)
    """Physical indexes."""
    objects: int = 0
    bytes: int = 0
    journaled: int = 0
    """Effects in the journal of this machine, which cannot be sealed any more."""
    late: int = 0
    """What was written during the removal. It is removed as well, unless its writer is still running."""

    @property
    def nothing(self) -> bool:
        return not (self.apikeys or self.fences or self.indexes or self.objects or self.journaled)


class TenantRemoval:
    """Removes one tenant, in the order described in this module."""

    def __init__(
        self,
        fence: Fence,
        fences: TenantStore,
        *,
        leave_indexes: bool = False,
        servers_notice_s: float = FRESH_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`leave_indexes`: for backends that do not exist any more. `servers_notice_s`: the cache time of keys."""
        self._fence = fence
        self._fences = fences
        self._objects = fence.inspector.objects
        self._journal = fence.inspector.journal
        self._root = f"{encoded(fence.tenant)}/"
        self._leave_indexes = leave_indexes
        self._servers_notice_s = servers_notice_s
        self._sleep = sleep

    def look(self) -> TenantDropped:
        """Returns what would be removed. Changes nothing."""
        tenant = self._fence.tenant
        report = TenantDropped(tenant, True, fences=self._fences.count(tenant), journaled=len(self._journal.entries()))
        if self._objects is not None:
            report.apikeys = sum(1 for _ in parts_of(self._objects, f"{self._root}{APIKEYS}/"))
            with self._name_backend_errors():
                report.indexes = [physical for backend, physical in self._indexes() if backend.exists(physical)]
            report.objects, report.bytes = size_of(self._objects.list(self._root))
        return report

    def run(self, progress: Progress = lambda done: None) -> TenantDropped:
        tenant = self._fence.tenant
        report = TenantDropped(tenant, False)

        def report_progress(more: int = 0) -> None:
            progress(report.fences + report.objects + more)

        if self._objects is not None:
            self._drop_apikeys(report)
        report.fences = self._fences.drop(tenant, report_progress)
        if self._objects is not None:
            for _ in range(PASSES):
                self._delete("epochs/", report, report_progress)
                if not (filled := self._fences.drop(tenant, report_progress)):
                    break
                report.late += filled  # another process hydrated, in an epoch that may not have been listed
            self._drop_indexes(report)
            self._delete("", report, report_progress)
            removed = report.objects
            self._delete("", report, report_progress)
            report.late += report.objects - removed + self._fences.drop(tenant, report_progress)
        if entries := self._journal.entries():
            self._journal.drop({entry.token for entry in entries})
            report.journaled = len(entries)
        return report

    def _drop_apikeys(self, report: TenantDropped) -> None:
        assert self._objects is not None
        entries = list(self._objects.list(f"{self._root}{APIKEYS}/"))
        # A key whose revocation is deleted first would be accepted again.
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
        with self._name_backend_errors():
            for alias, held in Catalog(self._fence.tenant, self._objects).head().state.aliases.items():
                backend = self._fence.indexes.backend(held.target.backend)
                backend.unpoint(pointer_name(self._fence.tenant, alias))
            for backend, physical in self._indexes():
                if backend.exists(physical):
                    report.indexes.append(physical)
                backend.drop(physical)  # also an unfinished one, which does not exist for the backend

    def _indexes(self) -> Iterator[tuple[Backend, str]]:
        """Yields every physical index that was ever started, once each; most of them may not exist any more."""
        if self._leave_indexes:
            return
        log = self._fence.indexes.builds_log
        started = [(attempt.backend, attempt.physical) for attempt in log.attempts()]
        sealed = [entry.seal for index_hash in log.hashes() for entry in log.history(index_hash) if entry.seal]
        for name, physical in dict.fromkeys((*started, *((seal.backend, seal.physical) for seal in sealed))):
            yield self._fence.indexes.backend(name), physical

    @contextlib.contextmanager
    def _name_backend_errors(self) -> Iterator[None]:
        try:
            yield
        except RagfenceError as broken:
            raise StoreUnavailable(
                f"the indexes of tenant {self._fence.tenant!r} cannot be dropped: {broken.message}",
                hint="its objects still exist and name the indexes: drop the tenant again when the backend is back, "
                "or with --leave-indexes if it will never be",
            ) from broken

    def _delete(self, folder: str, report: TenantDropped, report_progress: Callable[[], None]) -> None:
        assert self._objects is not None
        entries = self._objects.list(f"{self._root}{folder}")
        while batch := list(islice(entries, BATCH)):
            self._objects.delete([entry.name for entry in batch])
            report.objects += len(batch)
            report.bytes += sum(entry.size for entry in batch)
            report_progress()
