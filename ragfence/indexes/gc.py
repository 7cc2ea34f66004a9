"""gc: drops builds that no alias can reach, and attempts that can no longer be sealed, from the backend.

    catalog "retire" -> builds "retired", at the number after the seal -> the physical index is dropped

A swap to a build and its retirement exclude each other by the next number of the catalog; a restored build and its
retirement by the next number of the build's log. Nothing is dropped before both numbers are won. A gc that is killed in
between is completed by the next one. An attempt is dropped only when the number at which it would be sealed is taken,
so a builder that wakes up late can never seal what is gone.

A build that was made again has a new physical index, and aliases serve the old one until they are swapped. The old one
is dropped when no alias serves it, through the catalog too: a swap that still targets it loses the number.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ragfence.engine import crash_points
from ragfence.engine.engine import Engine
from ragfence.errors import BuildRetired, InFlight, NotSealed, ObjectsRequired, RagfenceError
from ragfence.indexes.backends.backend import Backend
from ragfence.indexes.build_log import Attempt, BuildEntry, BuildLog, next_repeated, next_retired, replaced_seals
from ragfence.indexes.catalog import Catalog, CatalogEntry, Change, Target, next_entry

AFTER_RETIRE = "after_retire"
AFTER_RETIRED = "after_retired"
GC_POINTS = (AFTER_RETIRE, AFTER_RETIRED)
"""in the order in which gc reaches them"""

ATTEMPTS = 64
LONGEST_PAUSE_S = 0.25


@dataclass(slots=True)
class GcReport:
    """What gc did, or with `dry_run` would do."""

    dry_run: bool
    retired: list[str] = field(default_factory=list)
    """the index_hash of builds that no alias can reach"""
    dropped: list[str] = field(default_factory=list)
    """physical indexes"""
    kept: list[str] = field(default_factory=list)
    """the index_hash of builds that an alias uses, or may be rolled back to"""
    young: list[str] = field(default_factory=list)
    """the index_hash of builds sealed too recently to be retired"""
    revived: list[str] = field(default_factory=list)
    """the index_hash of builds that were to be retired, but were used, restored or purged meanwhile"""
    pending: list[str] = field(default_factory=list)
    """physical indexes of attempts that may still be running"""
    missing: list[str] = field(default_factory=list)
    """the index_hash of builds in use whose rows are not in the backend"""
    unknown: list[str] = field(default_factory=list)
    """physical indexes that belong to no build and no attempt; they are left alone"""
    failed: list[str] = field(default_factory=list)
    """what could not be done, and why; the next gc tries again"""


class BuildCollector:
    def __init__(
        self,
        engine: Engine,
        builds: BuildLog,
        backend_of: Callable[[str], Backend],
        *,
        has_expired: Callable[[Attempt], bool] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`has_expired` returns whether the lease of an attempt has ended; without it, the attempt's age decides."""
        if engine.objects is None:
            raise ObjectsRequired("index builds need an object store, and this fence was opened without one")
        self._engine = engine
        self._builds = builds
        self._catalog = Catalog(engine.tenant, engine.objects)
        self._backend_of = backend_of
        self._has_expired = has_expired
        self._sleep = sleep
        self._keep = engine.policy.indexes.keep_targets

    def gc(self, dry_run: bool = True, *, min_age_s: float = 0.0) -> GcReport:
        """Retires and drops what no alias can reach. Builds younger than `min_age_s` are kept: a swap may follow.

        Several processes may run it at once, and it may be killed anywhere.
        """
        report = GcReport(dry_run)
        now_ms = self._engine.fences.now_ms()
        present = _BackendContents(self._backend_of, report)
        for index_hash in list(self._builds.hashes()):
            with _collect_errors(report, index_hash):
                self._collect(index_hash, report, present, sealed_before_ms=now_ms - round(min_age_s * 1000))
        with _collect_errors(report, "attempts"):
            for attempt in self._builds.attempts():
                with _collect_errors(report, attempt.physical):
                    self._settle(attempt, report, now_ms)
            self._find_unknown(report, present)
        return report

    def restore(self, index_hash: str) -> BuildEntry:
        """Keeps a build that is being retired, by sealing it again at the number that gc would take.

        Returns:
            The current seal.

        Raises:
            BuildRetired: gc was faster; build it again.
        """
        head = self._catalog.head()  # read before the build's log, as everywhere
        entry = self._builds.newest(index_hash)
        if entry is None:
            raise NotSealed(f"this tenant has no build {index_hash}", index_hash=index_hash)
        if entry.usable and head.state.retires(entry, index_hash):
            kept = next_repeated(entry, at_ms=self._engine.fences.now_ms(), owner=self._engine.owner, reason="restored")
            if self._builds.append(index_hash, kept):
                # For the history only: readers of the catalog already see that the seal is newer than the retirement.
                self._append("restore", kept, "restored", lambda head: index_hash in head.state.retiring)
                return kept
            entry = self._builds.newest(index_hash)
        if entry is None or not entry.usable:
            raise BuildRetired(f"{index_hash} was retired by gc", index_hash=index_hash)
        return entry

    def _collect(self, index_hash: str, report: GcReport, present: _BackendContents, *, sealed_before_ms: int) -> None:
        head = self._catalog.head()
        history = self._builds.history(index_hash)
        newest = history[0]
        if newest.seal is not None:
            backend, physical = newest.seal.backend, newest.seal.physical
            if head.state.users(index_hash, self._keep):
                report.kept.append(index_hash)
                if not present.has(backend, physical) and not self._backend_of(backend).exists(physical):
                    report.missing.append(index_hash)
            elif newest.at_ms > sealed_before_ms and not head.state.retires(newest, index_hash):
                report.young.append(index_hash)
            elif report.dry_run or self._retire(newest):
                report.retired.append(index_hash)
                self._drop(backend, physical, report)
            else:
                report.revived.append(index_hash)
        for seal in replaced_seals(history):
            target = Target.of(seal)
            if present.has(target.backend, target.physical) and self._is_there(target.backend, target.physical):
                self._drop_replaced(seal, report)

    def _drop_replaced(self, seal: BuildEntry, report: GcReport) -> None:
        """Drops a physical index that was replaced, or whose build was retired, unless an alias serves it."""
        target = Target.of(seal)

        def wanted(head: CatalogEntry) -> bool:
            if any(alias.target.same_build(target) for alias in head.state.aliases.values()):
                raise _StillUsed
            # A swap that read the build before it was made again may be in progress: it loses its number to this entry.
            # If the catalog has the retirement of this very seal, that swap has lost already.
            return not head.state.retires(seal, target.index_hash)

        try:
            # What cannot be opened cannot be served, so the rest of an interrupted drop needs no entry. Else every gc
            # would append one for a backend that lists what was dropped.
            if report.dry_run or not self._backend_of(target.backend).exists(target.physical):
                wanted(self._catalog.head())
            else:
                self._append("retire", seal, "its build was made again, or ended", wanted)
        except _StillUsed:
            return
        self._drop(target.backend, target.physical, report)

    def _retire(self, seal: BuildEntry) -> bool:
        """Retires the seal in the catalog, then in its own log. Returns False if it is used."""
        index_hash, why = Target.of(seal).index_hash, "no alias can reach it"

        def wanted(head: CatalogEntry) -> bool:
            if head.state.users(index_hash, self._keep):
                raise _StillUsed
            newest = self._builds.newest(index_hash)
            if newest is None or (newest.usable and newest.number != seal.number):
                raise _StillUsed
            # Another gc may be retiring it, or done.
            return newest.usable and not head.state.retires(newest, index_hash)

        try:
            self._append("retire", seal, why, wanted)
        except _StillUsed:
            return False
        crash_points.reach(AFTER_RETIRE)
        end = next_retired(seal, at_ms=self._engine.fences.now_ms(), owner=self._engine.owner, reason=why)
        if not self._builds.append(index_hash, end):
            other = self._builds.at(index_hash, end.number)
            if other is None or other.usable:
                return False  # restored, or purged
        crash_points.reach(AFTER_RETIRED)
        return True

    def _append(self, change: Change, seal: BuildEntry, reason: str, wanted: Callable[[CatalogEntry], bool]) -> None:
        """Appends the change to the catalog. `wanted` is called with every head, and returns False if it is done."""
        for attempt in range(ATTEMPTS):
            head = self._catalog.head()
            if not wanted(head):
                return
            entry = CatalogEntry(
                number=0,
                change=change,
                at_ms=self._engine.fences.now_ms(),
                target=Target.of(seal),
                actor=self._engine.owner,
                reason=reason,
            )
            if self._catalog.append(next_entry(head, entry, self._builds, keep=self._keep)):
                return
            self._sleep(random.uniform(0, min(LONGEST_PAUSE_S, 0.002 * 2**attempt)))
        raise InFlight(f"other processes changed the catalog {ATTEMPTS} times", hint="try again")

    def _settle(self, attempt: Attempt, report: GcReport, now_ms: int) -> None:
        history = self._builds.history(attempt.index_hash)
        if any(entry.usable and entry.token == attempt.token for entry in history):
            if not report.dry_run:
                self._builds.forget_attempt(attempt)  # sealed: from now on its build decides
            return
        newest = history[0] if history else None
        taken = newest.number if newest else 0
        over = self._expired(attempt, now_ms)
        if attempt.number > taken:
            # A sealed build ends only through the catalog: nothing may be appended to its log here.
            free = attempt.number == taken + 1 and not (newest and newest.usable)
            if not over or not free or self._contended(attempt, now_ms):
                report.pending.append(attempt.physical)
                return
            if not report.dry_run and not self._take_number(attempt, newest):
                report.pending.append(attempt.physical)  # its builder sealed it after all, or another gc was faster
                return
        self._drop(attempt.backend, attempt.physical, report)
        # A builder that is still running may write more before it notices that it lost: the next gc looks again.
        if over and not report.dry_run:
            self._builds.forget_attempt(attempt)

    def _contended(self, attempt: Attempt, now_ms: int) -> bool:
        """Whether another attempt may be sealed at the same number; its work would be lost with this one."""
        others = self._builds.attempts(attempt.index_hash)
        return any(each.number == attempt.number and not self._expired(each, now_ms) for each in others)

    def _take_number(self, attempt: Attempt, newest: BuildEntry | None) -> bool:
        reason = f"the attempt of {attempt.owner} was abandoned"
        end = next_retired(newest, at_ms=self._engine.fences.now_ms(), owner=self._engine.owner, reason=reason)
        taken = self._builds.append(attempt.index_hash, end)
        crash_points.reach(AFTER_RETIRED)
        return taken

    def _expired(self, attempt: Attempt, now_ms: int) -> bool:
        if self._has_expired is not None and self._has_expired(attempt):
            return True
        rules = self._engine.policy.for_kind("index")
        return now_ms - attempt.at_ms > rules.max_runtime_ms + rules.lease_ms

    def _drop(self, backend: str, physical: str, report: GcReport) -> None:
        if self._is_there(backend, physical):
            if not report.dry_run:
                self._backend_of(backend).drop(physical)
            report.dropped.append(physical)

    def _is_there(self, backend: str, physical: str) -> bool:
        held = self._backend_of(backend)
        # What an interrupted writer left is listed, but cannot be opened.
        return held.exists(physical) or physical in held.physicals()

    def _find_unknown(self, report: GcReport, present: _BackendContents) -> None:
        # Listed before builds and attempts are read: an attempt that began meanwhile is not in the listing.
        strange = present.listed() - {attempt.physical for attempt in self._builds.attempts()}
        for index_hash in self._builds.hashes() if strange else ():
            strange -= {entry.seal.physical for entry in self._builds.history(index_hash) if entry.seal}
        report.unknown = sorted(physical for physical in strange if present.still(physical))


class _StillUsed(Exception):
    """The build is used, so it must not be retired."""


@contextlib.contextmanager
def _collect_errors(report: GcReport, what: str) -> Iterator[None]:
    """Notes an error and goes on: one unreadable build or unreachable backend must not block the rest."""
    try:
        yield
    except RagfenceError as broken:
        report.failed.append(f"{what}: {broken.message}")


class _BackendContents:
    """The physical indexes of each backend, listed once."""

    def __init__(self, backend_of: Callable[[str], Backend], report: GcReport) -> None:
        self._backend_of = backend_of
        self._report = report
        self._held: dict[str, set[str] | None] = {}

    def has(self, backend: str, physical: str) -> bool:
        """Whether it may be there; the contents of an unreachable backend are unknown."""
        held = self._of(backend)
        return held is None or physical in held

    def listed(self) -> set[str]:
        return set().union(*(held for held in self._held.values() if held))

    def still(self, physical: str) -> bool:
        return any(
            self._backend_of(name).exists(physical) for name, held in self._held.items() if physical in (held or ())
        )

    def _of(self, backend: str) -> set[str] | None:
        if backend not in self._held:
            try:
                self._held[backend] = set(self._backend_of(backend).physicals())
            except RagfenceError as away:
                self._report.failed.append(f"{backend}: {away.message}")
                self._held[backend] = None
        return self._held[backend]
