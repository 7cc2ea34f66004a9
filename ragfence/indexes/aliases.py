"""`fence.aliases`: names for builds, moved only to what was sealed.

    gates -> put_new catalog/<n + 1> -> the swap as an audited operation -> the backend's own alias

The catalog decides; the entry at the next number is the swap. What follows it is told, not decided: whoever is killed
in between has swapped, and `reconcile`, or the next swap, does the rest. Readers resolve an alias once per request and
ask the physical index it names, so that no answer mixes two builds.
"""

from __future__ import annotations

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
    GateFailed,
    InFlight,
    NotSealed,
    ObjectsRequired,
    TransientError,
    ValidationError,
)
from ragfence.indexes.alias_effects import AliasEffects, AliasesReconciled
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
    following,
    sealed_build,
)
from ragfence.indexes.embedders.embedder import Embedder
from ragfence.indexes.gates import ESSENTIAL, Candidate, GateResult, Gates, judge
from ragfence.stores.objects import is_name

AFTER_CATALOG = "after_catalog"
AFTER_AUDIT = "after_audit"
AFTER_POINT = "after_point"
ALIAS_POINTS = (AFTER_CATALOG, AFTER_AUDIT, AFTER_POINT)
"""In the order in which a swap comes by them."""

ATTEMPTS = 64
LOOKED_BACK = 200
"""so many changes of the catalog ago an attempt that was cut off is still found"""
LONGEST_PAUSE_S = 0.25


@dataclass(frozen=True, slots=True)
class Swap:
    """What became of an alias."""

    alias: str
    target: Target | None
    """None: the alias was removed"""
    previous: Target | None
    generation: int
    """the number in the catalog"""
    changed: bool = True
    """False: it pointed there already"""
    forced: bool = False
    gates: tuple[GateResult, ...] = ()
    audited: bool = True
    """False: the fence store did not take the decision rows; `reconcile` writes them"""
    applied: bool = True
    """False: the backend's own alias is behind; `reconcile` moves it. Who reads through ragfence sees the target"""

    @property
    def index_hash(self) -> str | None:
        return self.target.index_hash if self.target else None


class AliasMove(NamedTuple):
    """A move of an alias, as it is asked for."""

    kind: Change
    index_hash: str | None
    """None: whichever build was before"""

    def is_done_by(self, entry: CatalogEntry) -> bool:
        """An operation may move an alias several times: a move to another build is not this one."""
        target = entry.target.index_hash if entry.target else None
        return entry.change == self.kind and self.index_hash in (None, target)


Choose = Callable[[CatalogEntry, Alias | None], BuildEntry]
"""The build that an alias is to have, given a head of the catalog; asked again when the head has moved."""


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
        """`backend_of` knows what stands in `Seal.backend`; `coverage_of` how much of the live documents it has."""
        if engine.objects is None:
            raise ObjectsRequired("aliases need an object store, and this fence was opened without one")
        self.catalog = Catalog(engine.tenant, engine.objects)
        self._engine = engine
        self._builds = builds
        self._backend_of = backend_of
        self._embedder_of = embedder_of
        self._coverage_of = coverage_of
        self._sleep = sleep
        self._known: CatalogEntry | None = None
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

        expect  the index_hash it must have now (None: it must not exist); `AliasMoved` otherwise
        force   also when a gate fails; needs a reason, and is recorded. What is not sealed stays refused

        >>> fence.aliases.swap("docs", build.index_hash, expect=live)  # doctest: +SKIP
        """
        if force and not reason.strip():
            raise ValidationError("a forced swap needs a reason", hint="it is kept in the log, with the failed gates")
        wanted = checked_hash(index_hash)

        def choose(head: CatalogEntry, held: Alias | None) -> BuildEntry:
            return sealed_build(self._builds, wanted, head)

        asked = AliasMove("swap", wanted)
        return self._move(alias, asked, choose, expect, gates, forced=force, reason=reason, actor=actor)

    def rollback(
        self, alias: str, *, to: str | None = None, expect: ExpectedTarget = UNSET, reason: str = "", actor: str = ""
    ) -> Swap:
        """Points the alias at the build before this one that is still sealed, or `to` one that it has had.

        What was live becomes the build before: a second rollback returns to it; `to` goes further back. All gates are
        asked, but only the rows must be right.
        """

        def choose(head: CatalogEntry, held: Alias | None) -> BuildEntry:
            if held is None:
                raise unknown(alias)
            return self._sealed_before(alias, held, head) if to is None else self._had(alias, held, to, head)

        asked = AliasMove("rollback", to)
        return self._move(alias, asked, choose, expect, None, forced=False, reason=reason, actor=actor)

    def remove(self, alias: str, reason: str = "", *, expect: ExpectedTarget = UNSET, actor: str = "") -> Swap:
        """Takes the alias away, and with it its claim on builds: gc may retire what only it has used."""
        check_alias(alias)
        reason = self._kept(reason)
        for attempt in range(ATTEMPTS):
            head = self.head()
            held = head.state.aliases.get(alias)
            if held is None:
                raise unknown(alias)
            _check_expected(alias, held, expect)
            change = CatalogEntry(
                0, "remove", self._now_ms(head.at_ms), alias, None, held.target, actor or self._engine.owner, reason
            )
            if made := self._appended(head, change):
                return self._after(made, ())
            self._pause(attempt)
        raise _crowded(alias)

    def resolve(self, alias: str) -> Target:
        """Where the alias points. One request for an object that is not there, as long as nothing changed.

        >>> fence.aliases.resolve("docs").physical  # doctest: +SKIP
        """
        held = self.head().state.aliases.get(check_alias(alias))
        if held is None:
            raise unknown(alias)
        return held.target

    def names(self) -> list[str]:
        return sorted(self.head().state.aliases)

    def history(self, alias: str, limit: int = 100) -> list[CatalogEntry]:
        """What was done to the alias, the newest first, however long ago: the log is the history."""
        check_alias(alias)
        found = []
        for entry in self.catalog.entries():
            if entry.alias == alias:
                found.append(entry)
                if len(found) >= limit:
                    break
        if not found:
            raise unknown(alias)
        return found

    def reconcile(self) -> AliasesReconciled:
        """Writes the decisions that are missing, and makes every backend's own aliases follow the catalog."""
        return self._effects.reconcile(self.catalog)

    def head(self) -> CatalogEntry:
        self._known = self.catalog.head(self._known)
        return self._known

    def _sealed_before(self, alias: str, held: Alias, head: CatalogEntry) -> BuildEntry:
        for earlier in held.history:
            try:
                return sealed_build(self._builds, earlier.index_hash, head)
            except NotSealed:
                continue
        raise NotSealed(
            f"{alias!r} has no earlier build that is still sealed", hint="swap it to another build, or build one"
        )

    def _had(self, alias: str, held: Alias, to: str, head: CatalogEntry) -> BuildEntry:
        if all(each.index_hash != to for each in (held.target, *held.history)):
            raise ValidationError(
                f"{alias!r} did not point at {to!r} of late", hint="swap it there: a swap asks all gates"
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
        reason = self._kept(reason)
        lease = innermost_lease()
        if lease and lease.may_have_happened and (earlier := self._caused_by(alias, change, lease.key)):
            return self._after(earlier, tuple(GateResult(**each) for each in earlier.gates))
        judged: tuple[Target, Target | None] | None = None
        report: tuple[GateResult, ...] = ()
        enforced = ESSENTIAL if change.kind == "rollback" else None
        for attempt in range(ATTEMPTS):
            head = self.head()
            held = head.state.aliases.get(alias)
            _check_expected(alias, held, expect)
            entry = choose(head, held)
            target, live = Target.of(entry), held.target if held else None
            if held is not None and held.target.same_build(target):
                return self._unchanged(alias, held.target)
            if judged != (target, live):  # gates are dear: once for this build, against that one
                try:
                    report = self._asked(entry, live, gates, tolerant=forced or change.kind == "rollback")
                    failed = [each for each in report if not each.ok and (enforced is None or each.gate in enforced)]
                    if failed and not forced:
                        raise _refused(alias, target, failed, report)
                except (BuildMissing, GateFailed):
                    if self._builds.newest(target.index_hash) != entry:
                        continue  # retired or purged while it was asked: say that, or ask again
                    raise
                judged = target, live
            made = self._appended(
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
            if made:
                return self._after(made, report)
            self._pause(attempt)
        raise _crowded(alias)

    def _caused_by(self, alias: str, change: AliasMove, cause: str) -> CatalogEntry | None:
        """What an earlier attempt of the operation did to the alias before it was cut off."""
        for entry in islice(self.catalog.entries(), LOOKED_BACK):
            if (entry.alias, entry.cause) == (alias, cause) and change.is_done_by(entry):
                return entry
        return None

    def _asked(
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

    def _appended(self, head: CatalogEntry, change: CatalogEntry) -> CatalogEntry | None:
        entry = following(head, change, self._builds, keep=self._engine.policy.indexes.keep_targets)
        if not self.catalog.append(entry):
            return None
        self._known = entry
        crash_points.reach(AFTER_CATALOG)
        return entry

    def _after(self, made: CatalogEntry, report: tuple[GateResult, ...]) -> Swap:
        """The swap has happened; nothing that goes wrong from here on is an error of it."""
        audited = self._effects.audit(made)
        crash_points.reach(AFTER_AUDIT)
        applied = self._effects.apply(made.alias, {each.backend for each in (made.target, made.previous) if each})
        crash_points.reach(AFTER_POINT)
        return Swap(
            alias=made.alias,
            target=made.target,
            previous=made.previous,
            generation=made.number,
            forced=made.forced,
            gates=report,
            audited=audited,
            applied=applied,
        )

    def _unchanged(self, alias: str, target: Target) -> Swap:
        """Nothing to do, unless whoever swapped it was killed before the rest was done."""
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

    def _kept(self, reason: str) -> str:
        """The log, the rows and the receipts have it for ever: without secrets."""
        clean = self._engine.redaction.redact_text(reason)
        # What takes the place of a secret may be longer: no cause to refuse a reason that was short enough.
        return clean if len(reason) > MAX_REASON else clean[:MAX_REASON]

    def _now_ms(self, floor_ms: int) -> int:
        try:
            return self._engine.fences.now_ms()
        except TransientError:
            # An alias must be movable while the fence store is away. By the clock of this machine, but never earlier
            # than what the entry follows.
            return max(time.time_ns() // 1_000_000, floor_ms)

    def _pause(self, attempt: int) -> None:
        self._sleep(random.uniform(0, min(LONGEST_PAUSE_S, 0.002 * 2**attempt)))


def checked_hash(index_hash: Any) -> str:
    if not isinstance(index_hash, str) or not is_name(index_hash) or "/" in index_hash:
        raise ValidationError(f"{index_hash!r:.100} is no INDEX_HASH", hint="build.index_hash has it")
    return index_hash


def unknown(alias: str) -> AliasUnknown:
    return AliasUnknown(f"there is no alias {alias!r}")


def _check_expected(alias: str, held: Alias | None, expect: ExpectedTarget) -> None:
    if expect is UNSET:
        return
    current = held.target.index_hash if held else None
    if current != expect:
        found = f"points at {current}" if current else "does not exist"
        raise AliasMoved(
            f"{alias!r} {found}; it was expected " + (f"to point at {expect}" if expect else "not to exist"),
            alias=alias,
            current=current,
            generation=held.target.generation if held else None,
        )


def _refused(alias: str, target: Target, failed: list[GateResult], report: tuple[GateResult, ...]) -> GateFailed:
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


def _crowded(alias: str) -> InFlight:
    return InFlight(f"{alias!r} was not moved: others changed the catalog {ATTEMPTS} times meanwhile", hint="try again")
