"""Epochs in the object store: periods in which the fence store is known to be whole.

    <tenant>/epochs/<e>/begun      a process started to hydrate into epoch e
    <tenant>/epochs/<e>/segments   epoch e is complete; the segments of all earlier epochs that count
    <tenant>/segments/<e>/<name>   segments committed while epoch e was current, or rewritten when it began

The truth is the newest completed epoch's list plus the segments named with that epoch. Any other segment is void.

An epoch may rewrite segments: its list then omits those whose rows are now in others (`replaced`), and later lists
name the epoch among their `rewritings`. So a writer can still find out that its own segment counted.
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
"""The version of a list with replaced segments, which older readers would misread."""
REMEMBERED = 10_000
"""Rewritings that a list names, at most."""
LOOKED_BACK = 32
"""Rewritings that are read, at most, if the caller does not say since when."""


@dataclass(frozen=True, slots=True)
class KnownEpochs:
    """The newest epochs in the object store."""

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
        """Whether an epoch above this one has begun. Takes one LIST."""
        after = f"{self._root}/{epoch:020d}/~"
        return next(iter(self._objects.list(f"{self._root}/", start_after=after, limit=1)), None) is not None

    def begin(self, epoch: int, token: str) -> bool:
        name = f"{self._root}/{epoch:020d}/begun"
        return self._objects.put_new(name, json.dumps({"version": VERSION, "by": token}).encode()).won

    def complete(self, epoch: int, segments: list[str], base: EpochBase | None = None) -> list[str]:
        """Completes an epoch. Returns the list that counts: ours, or an earlier one. `base`: what it started from."""
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
        """Returns the segments of earlier epochs whose rows count in a completed one, and those rewritten since.

        `since` is the earliest epoch whose segments are of interest: all rewritings after it are read. Without it, the
        most recent ones are.
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
        """Returns the segments that count now."""
        return self.base().segments

    def truth_below(self, epoch: int) -> list[str]:
        """Returns the segments that count when `epoch` begins: list and segments of the newest completed epoch."""
        return self.base(epoch).segments

    def base(self, below: int | None = None) -> EpochBase:
        newest = self.known(below).newest_complete
        listing = self._listing(newest)
        rewritings = (*listing.rewritings, *((newest,) if listing.replaced else ()))
        return EpochBase(sorted({*listing.segments, *self.committed_in(newest)}), rewritings[-REMEMBERED:])

    def named_in(self, epoch: int) -> Sequence[str]:
        """Returns the list of a completed epoch alone: the segments of earlier epochs that are still to be read."""
        return self._listing(epoch).segments

    def segment_name(self, epoch: int, name: str) -> str:
        return f"{self._segments}/{epoch:020d}/{name}"

    def _list_name(self, epoch: int) -> str:
        return f"{self._root}/{epoch:020d}/segments"

    def _listing(self, epoch: int) -> _Listing:
        """Returns the listing of a completed epoch; empty for epoch 0, which never begins."""
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
        raise FormatCorrupt(f"{name} is not a valid list of segments: {broken!r}") from broken
