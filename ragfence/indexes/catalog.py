"""The catalog: one log per tenant that says where every alias points, and which builds are being retired.

    <tenant>/catalog/<10^20 - 1 - n>

Each entry is a change and the whole state after it, so its head, found in one request, is all that a reader needs. A
writer reads the head first, then whatever else its decision depends on, and puts its entry at the next number: if it
gets the number, what it read of the catalog still holds. The order matters: a build that is read before the head may be
retired, and the retirement removed from the catalog, by the time the head is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Literal, get_args

from ragfence.core.operations import encoded
from ragfence.errors import BuildRetired, FormatCorrupt, FormatTooNew, Hint, NotSealed, ValidationError
from ragfence.indexes.build_log import BuildEntry, BuildLog
from ragfence.stores.object_log import Numbered, NumberedLog
from ragfence.stores.objects import ObjectStore

VERSION = 1
MAX_ALIASES = 1_000
MAX_REASON, MAX_ACTOR = 1_000, 255
SHORTEST_HISTORY = 10
STEPS = 16
"""how many entries are followed one by one from a known head; after that, a LIST is cheaper"""

Change = Literal["swap", "rollback", "retire", "restore", "remove"]

_ALIAS = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class Target:
    """A sealed build, and the generation in which an alias was pointed at it."""

    index_hash: str
    seal: int
    """the number of the seal in the log of the build"""
    physical: str
    backend: str
    generation: int = 0
    """the number of the catalog entry that set it; 0: no alias points at it"""

    @classmethod
    def of(cls, entry: BuildEntry, generation: int = 0) -> Target:
        assert entry.seal is not None
        return cls(entry.seal.index_hash, entry.number, entry.seal.physical, entry.seal.backend, generation)

    def same_build(self, other: Target) -> bool:
        """Whether both have the same physical index. A purge makes a new seal of the same one."""
        return (self.index_hash, self.physical) == (other.index_hash, other.physical)


@dataclass(frozen=True, slots=True)
class Alias:
    target: Target
    history: tuple[Target, ...] = ()
    """earlier targets, newest first, each build once"""

    def move_to(self, target: Target, keep: int) -> Alias:
        gone = {target.index_hash, self.target.index_hash}
        history = (self.target, *(each for each in self.history if each.index_hash not in gone))
        if self.target.index_hash == target.index_hash:  # the same hash, sealed again
            history = history[1:]
        return Alias(target, history[: max(SHORTEST_HISTORY, keep)])


@dataclass(frozen=True, slots=True)
class CatalogState:
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    retiring: Mapping[str, int] = field(default_factory=dict)
    """index_hash: the number of the seal that is being retired"""

    def users(self, index_hash: str, keep: int) -> list[str]:
        """The aliases that point at the build, or can be rolled back to it."""
        return [
            name
            for name, alias in self.aliases.items()
            if any(each.index_hash == index_hash for each in (alias.target, *alias.history[:keep]))
        ]

    def retires(self, entry: BuildEntry, index_hash: str) -> bool:
        """Whether this seal is being retired; a newer seal of the same build is not."""
        return self.retiring.get(index_hash, 0) >= entry.number


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    number: int
    change: Change
    at_ms: int
    alias: str = ""
    """empty for retire and restore"""
    target: Target | None = None
    previous: Target | None = None
    actor: str = ""
    reason: str = ""
    gates: tuple[Mapping[str, Any], ...] = ()
    forced: bool = False
    cause: str = ""
    """the key of the operation that it is a part of, if any: a retry of that operation finds it done"""
    state: CatalogState = CatalogState()

    def encode(self) -> bytes:
        values = asdict(self)
        del values["number"]
        return json.dumps({"version": VERSION, **values}, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def decode(cls, name: str, numbered: Numbered) -> CatalogEntry:
        try:
            values = json.loads(numbered.data)
            if values.pop("version") > VERSION:
                raise FormatTooNew(f"{name} has a newer format than this version of ragfence reads ({VERSION})")
            entry = cls(
                number=numbered.number,
                target=_target(values.pop("target")),
                previous=_target(values.pop("previous")),
                gates=tuple(values.pop("gates")),
                state=_state(values.pop("state")),
                **values,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as broken:
            raise _corrupt(name, repr(broken)) from broken
        if entry.change not in get_args(Change):
            raise _corrupt(name, f"{entry.change!r} is not a change")
        return entry


EMPTY_HEAD = CatalogEntry(number=0, change="swap", at_ms=0)
"""the head of an empty catalog"""


def _target(values: Any) -> Target | None:
    return None if values is None else Target(**values)


def _state(values: Any) -> CatalogState:
    aliases = {
        name: Alias(Target(**alias["target"]), tuple(Target(**each) for each in alias["history"]))
        for name, alias in values["aliases"].items()
    }
    return CatalogState(aliases, {str(index_hash): int(seal) for index_hash, seal in values["retiring"].items()})


def _corrupt(name: str, why: str) -> FormatCorrupt:
    return FormatCorrupt(
        f"{name} is not a valid entry of the catalog: {why}",
        hint="nothing was changed, and no alias can be moved until the object is restored, for example from a backup",
    )


class Catalog:
    """The catalog of one tenant, as the object store has it."""

    def __init__(self, tenant: str, objects: ObjectStore) -> None:
        self._log = NumberedLog(objects, f"{encoded(tenant)}/catalog")

    def head(self, known: CatalogEntry | None = None) -> CatalogEntry:
        """The newest entry: costs one LIST and one GET, or one GET if the `known` head has not moved."""
        if known is None:
            found = self._log.newest()
            return EMPTY_HEAD if found is None else self._decode(found)
        at, newest = known.number, None
        while (data := self._log.get(at + 1)) is not None:
            at, newest = at + 1, Numbered(at + 1, data)
            if at - known.number == STEPS:
                newest = self._log.newest() or newest
                at = newest.number
        return known if newest is None else self._decode(newest)

    def at(self, number: int) -> CatalogEntry | None:
        data = self._log.get(number)
        return None if data is None else self._decode(Numbered(number, data))

    def append(self, entry: CatalogEntry) -> bool:
        """Returns False if the number is taken; then what the entry was decided upon may have changed."""
        return self._log.append(entry.number, entry.encode())

    def entries(self, limit: int | None = None) -> Iterator[CatalogEntry]:
        """Yields entries, newest first."""
        return (self._decode(each) for each in islice(self._log.entries(), limit))

    def _decode(self, numbered: Numbered) -> CatalogEntry:
        return CatalogEntry.decode(self._log.name(numbered.number), numbered)


def next_entry(head: CatalogEntry, change: CatalogEntry, builds: BuildLog, *, keep: int) -> CatalogEntry:
    """Returns the change as the entry that follows this head, with the state after it."""
    entry = replace(
        change,
        number=head.number + 1,
        target=change.target and replace(change.target, generation=head.number + 1 if change.alias else 0),
        reason=_check_length("reason", change.reason, MAX_REASON),
        actor=_check_length("actor", change.actor, MAX_ACTOR),
    )
    state = state_after(head.state, entry, keep=keep)
    if len(state.aliases) > MAX_ALIASES:
        raise ValidationError(
            f"there are {MAX_ALIASES:,} aliases already",
            hint="remove one, or use another tenant: every entry of the catalog holds all aliases",
        )
    return replace(entry, state=replace(state, retiring=open_retirements(state.retiring, builds)))


def state_after(state: CatalogState, entry: CatalogEntry, *, keep: int) -> CatalogState:
    """Applies an entry to the state before it. Pure; the auditor computes it again."""
    aliases, retiring = dict(state.aliases), dict(state.retiring)
    target = entry.target
    match entry.change:
        case "swap" | "rollback":
            assert target is not None
            before = aliases.get(entry.alias)
            aliases[entry.alias] = before.move_to(target, keep) if before else Alias(target)
        case "remove":
            aliases.pop(entry.alias, None)
        case "retire":
            assert target is not None
            retiring[target.index_hash] = target.seal
        case "restore":
            assert target is not None
            retiring.pop(target.index_hash, None)
    return CatalogState(aliases, retiring)


def open_retirements(retiring: Mapping[str, int], builds: BuildLog) -> dict[str, int]:
    """The retirements whose build has no newer entry; with one (retired or sealed), the log of the build decides."""
    left = {}
    for index_hash, seal in retiring.items():
        try:
            entry = builds.newest(index_hash)
        except FormatCorrupt:  # one broken log must not stop all aliases
            entry = None
        if entry is None or entry.number <= seal:
            left[index_hash] = seal
    return left


def sealed_build(builds: BuildLog, index_hash: str, head: CatalogEntry) -> BuildEntry:
    """Returns the current seal of a build, which an alias needs to point at it. `head` must be read before, see above.

    Raises:
        NotSealed: The build was never sealed.
        BuildRetired: It was retired, or is being retired.
        FormatCorrupt: The seal cannot be read or is of another build.
    """
    entry = builds.newest(index_hash)
    if entry is None:
        raise _never_sealed(builds, index_hash)
    if entry.seal is None:
        if any(each.usable for each in builds.history(index_hash)):
            raise BuildRetired(f"{index_hash} was retired ({entry.reason or 'by gc'})", index_hash=index_hash)
        raise _never_sealed(builds, index_hash)
    if entry.seal.index_hash != index_hash:
        raise FormatCorrupt(f"the seal of {index_hash} belongs to {entry.seal.index_hash}", hint="build it again")
    if head.state.retires(entry, index_hash):
        raise BuildRetired(f"{index_hash} is being retired by gc", index_hash=index_hash)
    return entry


def _never_sealed(builds: BuildLog, index_hash: str) -> NotSealed:
    attempts = builds.attempts(index_hash)
    if not attempts:
        return NotSealed(f"this tenant has no build {index_hash}", index_hash=index_hash)
    newest = max(attempts, key=lambda each: each.at_ms)
    return NotSealed(
        f"{index_hash} is not sealed: {newest.owner} began to build it, and has not finished or has failed",
        hint=Hint(
            "wait for it, or call build() again: it joins a running build, and takes over one that died",
            cli="wait for it, or run `ragfence build` again: it joins a running build, and takes over one that died",
            http="wait for it, or POST /v1/builds again: it joins a running build, and takes over one that died",
        ),
        index_hash=index_hash,
    )


def check_alias(alias: object) -> str:
    if not isinstance(alias, str) or not _ALIAS.fullmatch(alias):
        raise ValidationError(
            f"{alias!r:.100} is not a valid name for an alias",
            hint="1 to 64 of the characters a-z 0-9 _ . -, starting with a letter or a digit",
        )
    return alias


def _check_length(field: str, text: str, most: int) -> str:
    if len(text) > most:
        raise ValidationError(f"{field} may have at most {most:,} characters: every entry of the log keeps it")
    return text
