"""The effects of an entry of the catalog: its decision rows, and the backends' own aliases.

Both may happen late and repeatedly: the key of the audited operation follows from the entry, and a backend's alias is
always set to what the newest head says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice

from ragfence.core.operations import Operation, encoded
from ragfence.engine.engine import Engine
from ragfence.errors import RagfenceError
from ragfence.indexes.backends.backend import Backend
from ragfence.indexes.catalog import Catalog, CatalogEntry, Target

AUDIT_WAIT_S = 5.0
LOOKS = 8
"""how often a backend's alias is set again because the catalog has moved; the process that moved it sets it, too"""
LOOKED_BACK = 200
"""entries of the catalog that `reconcile` looks at"""


@dataclass(frozen=True, slots=True)
class AliasReconcileReport:
    generation: int
    """the head of the catalog"""
    audited: tuple[str, ...] = ()
    """alias@generation of swaps whose decision rows were missing"""
    pointed: tuple[str, ...] = ()
    """aliases that were outdated in their backend"""
    removed: tuple[str, ...] = ()
    """aliases removed from a backend that should not have them"""
    failed: tuple[str, ...] = ()
    """what could not be repaired, and why"""


class AliasEffects:
    def __init__(self, engine: Engine, head: Callable[[], CatalogEntry], backend_of: Callable[[str], Backend]) -> None:
        self._engine = engine
        self._head = head
        self._backend_of = backend_of

    def audit(self, entry: CatalogEntry) -> bool:
        """Writes the decision rows of the change. Returns False if the fence store did not take them."""
        try:
            self._audit(entry)
        except RagfenceError:  # the swap has already happened
            return False
        return True

    def apply(self, alias: str, touched: Collection[str]) -> bool:
        """Sets the alias in the backends as the head says. Returns False if a backend failed."""
        try:
            self._apply(alias, touched)
        except Exception:  # noqa: BLE001  # the swap has happened, and no error of a backend can undo it
            return False
        return True

    def reconcile(self, catalog: Catalog) -> AliasReconcileReport:
        failed: list[str] = []
        recent = [entry for entry in islice(catalog.entries(), LOOKED_BACK) if entry.alias]
        audited = [f"{entry.alias}@{entry.number}" for entry in reversed(recent) if self._audit_missing(entry, failed)]
        head = self._head()
        backends: dict[str, set[str]] = {name: set() for name in head.state.aliases}
        for entry in recent:
            backends.setdefault(entry.alias, set()).update(_backends(entry.target, entry.previous))
        for name, alias in head.state.aliases.items():
            backends[name].update(_backends(alias.target, *alias.history))
        pointed, removed = [], []
        for name, touched in sorted(backends.items()):
            try:
                behind, strange = self._compare(name, touched)
                if behind or strange:
                    self._apply(name, touched)
            except Exception as broken:  # noqa: BLE001  # one unreachable backend must not block the others
                failed.append(f"{name}: {broken}")
                continue
            pointed += [name] if behind else []
            removed += [name] if strange else []
        return AliasReconcileReport(head.number, tuple(audited), tuple(pointed), tuple(removed), tuple(failed))

    def _audit_missing(self, entry: CatalogEntry, failed: list[str]) -> bool:
        try:
            return self._audit(entry)
        except RagfenceError as unwritten:
            failed.append(f"{entry.alias}@{entry.number}: {unwritten.message}")
            return False

    def _audit(self, entry: CatalogEntry) -> bool:
        """Returns True if the rows were missing."""
        rules = self._engine.policy.for_kind("alias")
        if self._engine.fences.now_ms() >= entry.at_ms + rules.ttl_ms:
            return False  # its record may have expired, and then it would look like a second swap
        index_hash = entry.target.index_hash if entry.target else ""
        change = {
            "alias": entry.alias,
            "generation": entry.number,
            "change": entry.change,
            "index_hash": index_hash,
            "previous": entry.previous.index_hash if entry.previous else "",
            "actor": entry.actor,
            "reason": entry.reason,
            "forced": entry.forced,
        }
        operation = Operation(
            kind="alias",
            source_id=entry.alias,
            revision=str(entry.number),
            index_hash=index_hash,
            action=entry.change,
        )
        request = self._engine.request(operation, change)
        with self._engine.claim(request, wait_s=AUDIT_WAIT_S, verdict=False) as op:
            if op.is_new:
                op.seal(effect_id=f"{entry.alias}@{entry.number}", result=change)
            return op.is_new

    def _name(self, alias: str) -> str:
        return pointer_name(self._engine.tenant, alias)

    def _compare(self, alias: str, touched: Collection[str]) -> tuple[bool, bool]:
        """Whether the backend's alias is not what the head says, and whether another backend has one wrongly."""
        current = self._head().state.aliases.get(alias)
        behind, here = False, ""
        if current is not None:
            backend = self._backend_of(current.target.backend)
            pointer, here = backend.pointer(self._name(alias)), backend.url
            behind = (
                pointer is None
                or pointer.physical != current.target.physical
                or pointer.generation not in (None, current.target.generation)
            )
        others = [self._backend_of(name) for name in touched]
        return behind, any(each.url != here and each.pointer(self._name(alias)) is not None for each in others)

    def _apply(self, alias: str, touched: Collection[str]) -> None:
        for _ in range(LOOKS):
            current = self._head().state.aliases.get(alias)
            here = self._backend_of(current.target.backend) if current else None
            for name in touched:
                other = self._backend_of(name)
                # Two names may mean the same place.
                if (here is None or other.url != here.url) and other.pointer(self._name(alias)) is not None:
                    other.unpoint(self._name(alias))
            if current is not None and here is not None:
                here.point(self._name(alias), current.target.physical, current.target.generation)
            after = self._head().state.aliases.get(alias)
            if (after and after.target) == (current and current.target):
                return
        # The processes that keep moving it apply it, too.


def pointer_name(tenant: str, alias: str) -> str:
    """The name of an alias in a backend, which several tenants may share."""
    return f"{alias}@{encoded(tenant)}"


def _backends(*targets: Target | None) -> set[str]:
    return {target.backend for target in targets if target is not None}
