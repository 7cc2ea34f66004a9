"""`fence.aliases`: names for builds, moved only to what was sealed.

    gates -> put_new catalog/<n + 1> -> the swap as an audited operation -> the backend's own alias

The catalog decides: the entry at the next number is the swap. The steps after it only publish it. A process that is
killed in between has swapped, and `reconcile`, or the next swap, does the rest. Readers resolve an alias once per
request and search the physical index it names, so no answer mixes two builds.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from ragfence.core.aliases import UNSET, ExpectedTarget
from ragfence.engine import crash_points
from ragfence.engine.engine import Engine
from ragfence.engine.leases import innermost_lease
from ragfence.errors import (
    AliasMoved,
    AliasUnknown,
    BuildMissing,
    FormatCorrupt,
    GateFailed,
    InFlight,
    NotSealed,
    ObjectsRequired,
    TransientError,
    ValidationError,
)
from ragfence.indexes.alias_effects import AliasEffects, AliasReconcileReport
from ragfence.indexes.backends.backend import Backend
from ragfence.indexes.build_log import BuildEntry, BuildLog, BuildSeal
from ragfence.indexes.catalog import (
    MAX_REASON,
    Alias,
    Catalog,
    CatalogEntry,
    Change,
    Target,
    check_alias,
    next_entry,
    sealed_build,
)
from ragfence.indexes.embedders.embedder import Embedder
from ragfence.indexes.gate_log import GateLog
from ragfence.indexes.gates import ESSENTIAL, Candidate, GateResult, Gates, judge
from ragfence.stores.objects import is_name

AFTER_CATALOG = "after_catalog"
AFTER_AUDIT = "after_audit"
AFTER_POINT = "after_point"
ALIAS_POINTS = (AFTER_CATALOG, AFTER_AUDIT, AFTER_POINT)
"""in the order in which a swap reaches them"""

ATTEMPTS = 64
LOOKED_BACK = 200
"""entries of the catalog that are searched for the move of an interrupted attempt"""
LONGEST_PAUSE_S = 0.25


@dataclass(frozen=True, slots=True)
class Swap:
    """The result of moving or removing an alias."""

    alias: str
    target: Target | None
    """None: the alias was removed"""
    previous: Target | None
    generation: int
    """the number of the entry in the catalog"""
    changed: bool = True
    """False: the alias already pointed at the target"""
    forced: bool = False
    gates: tuple[GateResult, ...] = ()
    audited: bool = True
    """False: the decision rows could not be written; `reconcile` writes them"""
    applied: bool = True
    """False: the backend's own alias was not moved; `reconcile` moves it. Searches through ragfence see the target"""

    @property
    def index_hash(self) -> str | None:
        return self.target.index_hash if self.target else None


class AliasMove(NamedTuple):
    """A requested move of an alias."""

    kind: Change
    index_hash: str | None
    """None: the build before the current one"""

    def is_done_by(self, entry: CatalogEntry) -> bool:
        """Whether the entry is this move: an operation may move an alias several times, to different builds."""
        target = entry.target.index_hash if entry.target else None
        return entry.change == self.kind and self.index_hash in (None, target)


Choose = Callable[[CatalogEntry, Alias | None], BuildEntry]
"""Chooses the build for an alias, given the head of the catalog; called again if the head has moved."""


class Aliases:
    def __init__(
        self,
        engine: Engine,
        builds: BuildLog,
        backend_of: Callable[[str], Backend],
        embedder_of: Callable[[BuildSeal], Embedder],
        coverage_of: Callable[[BuildSeal], float] | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`backend_of` opens the backend of a seal; `coverage_of` returns a build's share of the live documents."""
        if engine.objects is None:
            raise ObjectsRequired("aliases need an object store, and this fence was opened without one")
        self.catalog = Catalog(engine.tenant, engine.objects)
        self._refusals = GateLog(engine.tenant, engine.objects)
        self._engine = engine
        self._builds = builds
        self._backend_of = backend_of
        self._embedder_of = embedder_of
        self._coverage_of = coverage_of
        self._sleep = sleep
        self._head: CatalogEntry | None = None
        self._effects = AliasEffects(engine, self.head, backend_of)

    def swap(
        self,
        alias: str,
        index_hash: str,
        *,
        expect: ExpectedTarget = UNSET,
        force: bool = False,
        reason: str = "",
        gates: Gates | None = None,
        actor: str = "",
    ) -> Swap:
        """Points the alias at a sealed build.

        Args:
            alias: The name to move; made if it does not exist.
            index_hash: The build.
            expect: The index_hash that the alias must point at now; None if it must not exist.
            force: Swap even if a gate fails. Needs a reason and is recorded. An unsealed build is still refused.
            reason: Stored with the entry.
            gates: Limits of the gates; by default those of the policy.
            actor: Stored with the entry; by default the owner of this fence.

        Raises:
            NotSealed: The build is not sealed; `BuildRetired` if it was retired.
            GateFailed: A gate failed; the error has the report.
            AliasMoved: The alias does not point at `expect`.

        >>> fence.aliases.swap("docs", build.index_hash, expect=live)  # doctest: +SKIP
        """
        if force and not reason.strip():
            raise ValidationError("a forced swap needs a reason", hint="it is logged together with the failed gates")
        checked = check_hash(index_hash)

        def choose(head: CatalogEntry, current: Alias | None) -> BuildEntry:
            return sealed_build(self._builds, checked, head)

        move = AliasMove("swap", checked)
        return self._move(alias, move, choose, expect, gates, forced=force, reason=reason, actor=actor)

    def rollback(
        self, alias: str, *, to: str | None = None, expect: ExpectedTarget = UNSET, reason: str = "", actor: str = ""
    ) -> Swap:
        """Points the alias at its newest earlier build that is still sealed, or at a certain earlier one.

        The current build becomes the previous one, so a second rollback returns to it. All gates are measured and
        logged, but only `sealed` and `rows` can refuse a rollback.

        Args:
            alias: The name to move.
            to: The index_hash of an earlier build of this alias.
            expect: The index_hash that the alias must point at now.
            reason: Stored with the entry.
            actor: Stored with the entry; by default the owner of this fence.

        Raises:
            AliasUnknown: There is no such alias.
            NotSealed: No earlier build is still sealed.
            AliasMoved: The alias does not point at `expect`.
        """

        def choose(head: CatalogEntry, current: Alias | None) -> BuildEntry:
            if current is None:
                raise unknown_alias(alias)
            return (
                self._sealed_before(alias, current, head) if to is None else self._find_target(alias, current, to, head)
            )

        move = AliasMove("rollback", to)
        return self._move(alias, move, choose, expect, None, forced=False, reason=reason, actor=actor)

    def remove(self, alias: str, reason: str = "", *, expect: ExpectedTarget = UNSET, actor: str = "") -> Swap:
        """Removes the alias. Afterwards gc may retire builds that only this alias used."""
        check_alias(alias)
        reason = self._redact(reason)
        for attempt in range(ATTEMPTS):
            head = self.head()
            current = head.state.aliases.get(alias)
            if current is None:
                raise unknown_alias(alias)
            _check_expected(alias, current, expect)
            change = CatalogEntry(
                0, "remove", self._now_ms(head.at_ms), alias, None, current.target, actor or self._engine.owner, reason
            )
            if appended := self._append(head, change):
                return self._after(appended, ())
            self._pause(attempt)
        raise _contention(alias)

    def resolve(self, alias: str) -> Target:
        """Returns the build that the alias points at. Costs one request (a 404) as long as nothing has changed.

        Raises:
            AliasUnknown: There is no such alias.

        >>> fence.aliases.resolve("docs").physical  # doctest: +SKIP
        """
        current = self.head().state.aliases.get(check_alias(alias))
        if current is None:
            raise unknown_alias(alias)
        return current.target

    def names(self) -> list[str]:
        return sorted(self.head().state.aliases)

    def history(self, alias: str, limit: int = 100) -> list[CatalogEntry]:
        """Returns the entries of the log about the alias, newest first."""
        check_alias(alias)
        found = []
        for entry in self.catalog.entries():
            if entry.alias == alias:
                found.append(entry)
                if len(found) >= limit:
                    break
        if not found:
            raise unknown_alias(alias)
        return found

    def reconcile(self) -> AliasReconcileReport:
        """Writes missing decision rows, and sets the backends' own aliases as the catalog says."""
        return self._effects.reconcile(self.catalog)

    def head(self) -> CatalogEntry:
        self._head = self.catalog.head(self._head)
        return self._head

    def _sealed_before(self, alias: str, current: Alias, head: CatalogEntry) -> BuildEntry:
        for earlier in current.history:
            try:
                return sealed_build(self._builds, earlier.index_hash, head)
            except NotSealed:
                continue
        raise NotSealed(
            f"{alias!r} has no earlier build that is still sealed", hint="swap it to another build, or build one"
        )

    def _find_target(self, alias: str, current: Alias, to: str, head: CatalogEntry) -> BuildEntry:
        if all(each.index_hash != to for each in (current.target, *current.history)):
            raise ValidationError(
                f"{to!r} is not among the recent builds of {alias!r}", hint="swap to it: a swap checks all gates"
            )
        return sealed_build(self._builds, to, head)

    def _move(
        self,
        alias: str,
        change: AliasMove,
        choose: Choose,
        expect: ExpectedTarget,
        gates: Gates | None,
        *,
        forced: bool,
        reason: str,
        actor: str,
    ) -> Swap:
        check_alias(alias)
        reason = self._redact(reason)
        lease = innermost_lease()
        if lease and lease.may_have_happened and (earlier := self._caused_by(alias, change, lease.key)):
            return self._after(earlier, tuple(GateResult(**each) for each in earlier.gates))
        judged_for: tuple[Target, Target | None] | None = None
        report: tuple[GateResult, ...] = ()
        enforced = ESSENTIAL if change.kind == "rollback" else None
        for attempt in range(ATTEMPTS):
            head = self.head()
            current = head.state.aliases.get(alias)
            _check_expected(alias, current, expect)
            entry = choose(head, current)
            target, live = Target.of(entry), current.target if current else None
            if current is not None and current.target.same_build(target):
                return self._confirm(alias, current.target)
            if judged_for != (target, live):  # gates are expensive: once for this build, compared with that one
                failed: list[GateResult] = []
                try:
                    report = self._run_gates(entry, live, gates, tolerant=forced or change.kind == "rollback")
                    failed = [each for each in report if not each.ok and (enforced is None or each.gate in enforced)]
                    if failed and not forced:
                        raise _gate_failure(alias, target, failed, report)
                except (BuildMissing, GateFailed):
                    if self._builds.newest(target.index_hash) != entry:
                        continue  # retired or purged meanwhile: report that, or measure again
                    if failed:
                        self._record_refusal(alias, target, failed, actor, max(entry.at_ms, head.at_ms))
                    raise
                judged_for = target, live
            appended = self._append(
                head,
                CatalogEntry(
                    number=0,
                    change=change.kind,
                    at_ms=self._now_ms(max(entry.at_ms, head.at_ms)),
                    alias=alias,
                    target=target,
                    previous=live,
                    actor=actor or self._engine.owner,
                    reason=reason,
                    gates=tuple(each.as_dict() for each in report),
                    forced=forced and any(not each.ok for each in report),
                    cause=lease.key if lease is not None else "",
                ),
            )
            if appended:
                return self._after(appended, report)
            self._pause(attempt)
        raise _contention(alias)

    def _record_refusal(self, alias: str, target: Target, failed: list[GateResult], actor: str, floor_ms: int) -> None:
        """Leaves an entry for `ragfence notify`. Nothing was swapped, so an outage must not hide why."""
        with contextlib.suppress(TransientError, FormatCorrupt):
            self._refusals.add(alias, target.index_hash, self._now_ms(floor_ms), actor or self._engine.owner, failed)

    def _caused_by(self, alias: str, change: AliasMove, cause: str) -> CatalogEntry | None:
        """The move that an earlier, interrupted attempt of the operation made."""
        for entry in islice(self.catalog.entries(), LOOKED_BACK):
            if (entry.alias, entry.cause) == (alias, cause) and change.is_done_by(entry):
                return entry
        return None

    def _run_gates(
        self, entry: BuildEntry, live: Target | None, gates: Gates | None, *, tolerant: bool
    ) -> tuple[GateResult, ...]:
        new = self._candidate(entry)
        seal = new.seal
        if not self._backend_of(seal.backend).exists(seal.physical):
            raise BuildMissing(
                f"{seal.index_hash} is sealed, but {seal.physical} is not in {seal.backend}", index_hash=seal.index_hash
            )
        limits = (gates or Gates()).limits(self._engine.policy.indexes, tolerant=tolerant)
        before = self._live(live) if live else None
        return tuple(judge(limits, new, before, self._coverage_of, tolerant=tolerant))

    def _live(self, live: Target) -> Candidate | None:
        newest = self._builds.newest(live.index_hash)
        if newest is None or newest.seal is None or newest.seal.physical != live.physical:
            newest = self._builds.at(live.index_hash, live.seal)
        return self._candidate(newest) if newest is not None and newest.usable else None

    def _candidate(self, entry: BuildEntry) -> Candidate:
        assert entry.seal is not None
        return Candidate(entry, self._backend_of(entry.seal.backend), self._embedder_of)

    def _append(self, head: CatalogEntry, change: CatalogEntry) -> CatalogEntry | None:
        entry = next_entry(head, change, self._builds, keep=self._engine.policy.indexes.keep_targets)
        if not self.catalog.append(entry):
            return None
        self._head = entry
        crash_points.reach(AFTER_CATALOG)
        return entry

    def _after(self, appended: CatalogEntry, report: tuple[GateResult, ...]) -> Swap:
        """Publishes the swap. It has happened, so nothing that goes wrong from here on is an error."""
        audited = self._effects.audit(appended)
        crash_points.reach(AFTER_AUDIT)
        applied = self._effects.apply(
            appended.alias, {each.backend for each in (appended.target, appended.previous) if each}
        )
        crash_points.reach(AFTER_POINT)
        return Swap(
            alias=appended.alias,
            target=appended.target,
            previous=appended.previous,
            generation=appended.number,
            forced=appended.forced,
            gates=report,
            audited=audited,
            applied=applied,
        )

    def _confirm(self, alias: str, target: Target) -> Swap:
        """The alias points there already. Publishes the swap again, in case it was killed before."""
        entry = self.catalog.at(target.generation)
        return Swap(
            alias=alias,
            target=target,
            previous=target,
            generation=target.generation,
            changed=False,
            audited=entry is not None and self._effects.audit(entry),
            applied=self._effects.apply(alias, {target.backend}),
        )

    def _redact(self, reason: str) -> str:
        """Removes secrets: the log, the rows and the receipts keep the reason permanently."""
        clean = self._engine.redaction.redact_text(reason)
        # The replacement of a secret may be longer than it: no cause to refuse a reason that was short enough.
        return clean if len(reason) > MAX_REASON else clean[:MAX_REASON]

    def _now_ms(self, floor_ms: int) -> int:
        try:
            return self._engine.fences.now_ms()
        except TransientError:
            # An alias must be movable while the fence store is unreachable: use the clock of this machine, but never a
            # time before that of the entry before.
            return max(time.time_ns() // 1_000_000, floor_ms)

    def _pause(self, attempt: int) -> None:
        self._sleep(random.uniform(0, min(LONGEST_PAUSE_S, 0.002 * 2**attempt)))


def check_hash(index_hash: Any) -> str:
    if not isinstance(index_hash, str) or not is_name(index_hash) or "/" in index_hash:
        raise ValidationError(f"{index_hash!r:.100} is not a valid INDEX_HASH", hint="use build.index_hash")
    return index_hash


def unknown_alias(alias: str) -> AliasUnknown:
    return AliasUnknown(f"there is no alias {alias!r}")


def _check_expected(alias: str, current: Alias | None, expect: ExpectedTarget) -> None:
    if expect is UNSET:
        return
    index_hash = current.target.index_hash if current else None
    if index_hash != expect:
        found = f"points at {index_hash}" if index_hash else "does not exist"
        raise AliasMoved(
            f"{alias!r} {found}; it was expected " + (f"to point at {expect}" if expect else "not to exist"),
            alias=alias,
            current=index_hash,
            generation=current.target.generation if current else None,
        )


def _gate_failure(alias: str, target: Target, failed: list[GateResult], report: tuple[GateResult, ...]) -> GateFailed:
    why = "; ".join(
        f"{each.gate} {each.value} (limit {each.limit})" + (f": {each.detail}" if each.detail else "")
        for each in failed
    )
    return GateFailed(
        f"{alias!r} was not moved to {target.index_hash}: {why}",
        alias=alias,
        index_hash=target.index_hash,
        report=[each.as_dict() for each in report],
    )


def _contention(alias: str) -> InFlight:
    return InFlight(f"{alias!r} was not moved: other processes changed the catalog {ATTEMPTS} times", hint="try again")
