"""Checks of the auditor on aliases: every entry of the catalog is compared with the log of its build.

sealed_before   every target was sealed before it was named, at its number and with its physical index
no_gap          the numbers of entries start at 1 and have no gap
state_follows   the state of an entry follows from its change and the state before
not_retired     no alias points at a retired build
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ragfence.errors import FormatCorrupt
from ragfence.indexes.build_log import BuildEntry, BuildLog
from ragfence.indexes.catalog import (
    EMPTY_HEAD,
    SHORTEST_HISTORY,
    Alias,
    Catalog,
    CatalogEntry,
    CatalogState,
    Target,
    state_after,
)

EVERYTHING = 10**9


class AliasFinding(NamedTuple):
    invariant: str
    alias: str
    """the index_hash, if the finding is not about an alias"""
    generation: int
    text: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.alias}@{self.generation}: {self.text}"


def alias_findings(catalog: Catalog, builds: BuildLog) -> Iterator[AliasFinding]:
    """Yields every broken invariant."""
    seen = _SealCache(builds)
    before: CatalogEntry | None = None
    for entry in _oldest_first(catalog):
        last = before or EMPTY_HEAD
        if entry.number != last.number + 1:
            text = f"{last.number} is followed by {entry.number}"
            yield AliasFinding("no_gap", entry.alias, entry.number, text)
        else:
            yield from _state_follows(last.state, entry, builds)
        if entry.target is not None:
            yield from _sealed_before(entry, entry.target, seen)
        before = entry
    if before is not None:
        for name, alias in before.state.aliases.items():
            newest = builds.newest(alias.target.index_hash)
            if newest is None or not newest.usable:
                text = f"{alias.target.index_hash} is retired, or has no log"
                yield AliasFinding("not_retired", name, before.number, text)


def _oldest_first(catalog: Catalog) -> list[CatalogEntry]:
    return list(catalog.entries())[::-1]


class _SealCache:
    """Reads each entry of a build once: aliases move between few builds."""

    def __init__(self, builds: BuildLog) -> None:
        self._builds = builds
        self._entries: dict[tuple[str, int], BuildEntry | None] = {}

    def at(self, target: Target) -> BuildEntry | None:
        spot = target.index_hash, target.seal
        if spot not in self._entries:
            self._entries[spot] = self._builds.at(*spot)
        return self._entries[spot]


def _sealed_before(entry: CatalogEntry, target: Target, seen: _SealCache) -> Iterator[AliasFinding]:
    why = ""
    try:
        sealed = seen.at(target)
    except FormatCorrupt as corrupt:
        sealed, why = None, corrupt.message
    if sealed is None or sealed.seal is None:
        why = why or f"{target.index_hash} is not sealed at {target.seal}"
    elif (sealed.seal.physical, sealed.seal.backend) != (target.physical, target.backend):
        why = f"{target.index_hash} was sealed as {sealed.seal.physical}, not as {target.physical}"
    elif sealed.at_ms > entry.at_ms:
        why = f"{target.index_hash} was sealed {sealed.at_ms - entry.at_ms} ms after the alias was moved to it"
    if why:
        yield AliasFinding("sealed_before", entry.alias or target.index_hash, entry.number, why)


def _state_follows(before: CatalogState, entry: CatalogEntry, builds: BuildLog) -> Iterator[AliasFinding]:
    derived = state_after(before, entry, keep=EVERYTHING)
    for name in sorted({*derived.aliases, *entry.state.aliases}):
        if not _agree(derived.aliases.get(name), entry.state.aliases.get(name)):
            yield AliasFinding("state_follows", name, entry.number, f"does not follow from the {entry.change}")
    if entry.alias and entry.target and entry.target.generation != entry.number:
        text = f"its target has generation {entry.target.generation}"
        yield AliasFinding("state_follows", entry.alias, entry.number, text)
    yield from _retiring_follows(derived.retiring, entry, builds)


def _agree(derived: Alias | None, kept: Alias | None) -> bool:
    """Whether both are the same alias. Histories are cut as the policy of their time said, but to a minimum length."""
    if derived is None or kept is None:
        return derived is kept
    least = min(len(derived.history), SHORTEST_HISTORY)
    return (
        derived.target == kept.target
        and len(kept.history) >= least
        and derived.history[: len(kept.history)] == kept.history
    )


def _retiring_follows(derived: Mapping[str, int], entry: CatalogEntry, builds: BuildLog) -> Iterator[AliasFinding]:
    """A retirement may only disappear after the log of its build has a newer entry."""
    for index_hash in sorted({*derived, *entry.state.retiring}):
        wanted, kept = derived.get(index_hash), entry.state.retiring.get(index_hash)
        if wanted == kept:
            continue
        newest = builds.newest(index_hash) if kept is None and wanted is not None else None
        if newest is None or wanted is None or newest.number <= wanted:
            text = f"retiring is {kept}, not {wanted}"
            yield AliasFinding("state_follows", index_hash, entry.number, text)
