"""Epochs in the object store: periods in which the fence store is known to be whole.

    <tenant>/epochs/<e>/begun      somebody started to hydrate into epoch e
    <tenant>/epochs/<e>/segments   epoch e is complete; the segments of all earlier epochs that count
    <tenant>/segments/<e>/<name>   segments committed while epoch e was current, or rewritten when it began

The truth is the newest completed epoch's list plus the segments named with that epoch. Any other segment is void.

An epoch may rewrite segments: its list then leaves out those whose rows went into others (`replaced`), and the lists
after it name it among their `rewritings`. So a writer still finds out that a segment of its own had counted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ragfence.core.operations import encoded
from ragfence.errors import FormatCorrupt, FormatTooNew
from ragfence.stores.objects import ObjectStore

VERSION = 1
REWRITTEN_VERSION = 2
"""of a list that somebody who takes it for the whole story would misread"""
REMEMBERED = 10_000
"""so many rewritings a list names"""
LOOKED_BACK = 32
"""so many of them are looked into for whoever does not say since when"""


@dataclass(frozen=True, slots=True)
class KnownEpochs:
    """What the object store says of epochs."""

    newest_begun: int
    newest_complete: int

    @property
    def settled(self) -> bool:
        return self.newest_begun == self.newest_complete


class EpochBase(NamedTuple):
    """What a new epoch starts from."""

    segments: list[str]
    rewritings: tuple[int, ...] = ()
    """the last epochs that rewrote segments, oldest first"""


class _Listing(NamedTuple):
    segments: list[str]
    rewritings: tuple[int, ...] = ()
    replaced: tuple[str, ...] = ()


class Epochs:
    def __init__(self, tenant: str, objects: ObjectStore) -> None:
        self._root = f"{encoded(tenant)}/epochs"
        self._segments = f"{encoded(tenant)}/segments"
        self._objects = objects

    def known(self, below: int | None = None) -> KnownEpochs:
        begun = complete = 0
        for entry in self._objects.list(f"{self._root}/"):
            number, _, what = entry.name[len(self._root) + 1 :].partition("/")
            epoch = int(number)
            if below is not None and epoch >= below:
                break
            if what == "begun":
                begun = max(begun, epoch)
            elif what == "segments":
                complete = max(complete, epoch)
        return KnownEpochs(begun, complete)

    def newer_than(self, epoch: int) -> bool:
        """One LIST: did anybody begin an epoch above this one?"""
        after = f"{self._root}/{epoch:020d}/~"
        return next(iter(self._objects.list(f"{self._root}/", start_after=after, limit=1)), None) is not None

    def begin(self, epoch: int, token: str) -> bool:
        name = f"{self._root}/{epoch:020d}/begun"
        return self._objects.put_new(name, json.dumps({"version": VERSION, "by": token}).encode()).won

    def complete(self, epoch: int, segments: list[str], base: EpochBase | None = None) -> list[str]:
        """The list that counts for the epoch: ours, or the one that was there first. `base`: what was listed before."""
        values: dict[str, Any] = {"version": VERSION, "segments": segments}
        if base is not None:
            named = set(segments)
            replaced = [name for name in base.segments if name not in named]
            if base.rewritings or replaced:
                values |= {"version": REWRITTEN_VERSION, "rewritings": base.rewritings, "replaced": replaced}
        name = self._list_name(epoch)
        outcome = self._objects.put_new(name, json.dumps(values, separators=(",", ":")).encode())
        return segments if outcome.won else _listing_in(name, outcome.existing or b"").segments

    def listed(self, epoch: int, since: int | None = None) -> list[str]:
        """The segments of earlier epochs whose rows count in a completed one, also those that were rewritten since.

        `since`: the earliest epoch whose segments are asked for; only what came after it is looked into, however long
        ago that was. Without it, the last rewritings are.
        """
        listing = self._listing(epoch)
        names = [*listing.segments, *listing.replaced]
        if since is None:
            rewritings = listing.rewritings[-LOOKED_BACK:]
        else:
            rewritings = tuple(each for each in listing.rewritings if each > since)
        for rewriting in rewritings:
            names += self._listing(rewriting).replaced
        return names

    def committed_in(self, epoch: int) -> list[str]:
        if epoch == 0:
            return []
        return [entry.name for entry in self._objects.list(f"{self._segments}/{epoch:020d}/")]

    def truth(self) -> list[str]:
        """The segments that count now."""
        return self.base().segments

    def truth_below(self, epoch: int) -> list[str]:
        """The segments that count when `epoch` begins: the newest completed epoch's list and its own segments."""
        return self.base(epoch).segments

    def base(self, below: int | None = None) -> EpochBase:
        newest = self.known(below).newest_complete
        listing = self._listing(newest)
        rewritings = (*listing.rewritings, *((newest,) if listing.replaced else ()))
        return EpochBase(sorted({*listing.segments, *self.committed_in(newest)}), rewritings[-REMEMBERED:])

    def named_in(self, epoch: int) -> Sequence[str]:
        """The list of a completed epoch, and nothing else: what of earlier epochs is still to be read."""
        return self._listing(epoch).segments

    def segment_name(self, epoch: int, name: str) -> str:
        return f"{self._segments}/{epoch:020d}/{name}"

    def _list_name(self, epoch: int) -> str:
        return f"{self._root}/{epoch:020d}/segments"

    def _listing(self, epoch: int) -> _Listing:
        """Of a completed epoch; empty for epoch 0, which nobody ever began."""
        if epoch == 0:
            return _Listing([])
        name = self._list_name(epoch)
        data = self._objects.get(name)
        if data is None:
            raise FormatCorrupt(f"epoch {epoch} is complete but its list {name} cannot be read")
        return _listing_in(name, data)


def _listing_in(name: str, data: bytes) -> _Listing:
    try:
        values = json.loads(data)
        if values["version"] > REWRITTEN_VERSION:
            raise FormatTooNew(f"{name} has format {values['version']}; this ragfence knows {REWRITTEN_VERSION}")
        return _Listing(
            list(values["segments"]), tuple(values.get("rewritings", ())), tuple(values.get("replaced", ()))
        )
    except (ValueError, KeyError, TypeError) as broken:
        raise FormatCorrupt(f"{name} is no list of segments: {broken!r}") from broken
