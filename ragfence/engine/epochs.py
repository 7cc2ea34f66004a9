"""Epochs in the object store: periods in which the fence store is known to be whole.

    <tenant>/epochs/<e>/begun      somebody started to hydrate into epoch e
    <tenant>/epochs/<e>/segments   epoch e is complete; the segments of all earlier epochs that count
    <tenant>/segments/<e>/<name>   segments committed while epoch e was current

The truth is the newest completed epoch's list plus the segments named with that epoch. Any other segment is void.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from ragfence.core.operations import encoded
from ragfence.errors import FormatCorrupt, FormatTooNew
from ragfence.stores.objects import ObjectStore

VERSION = 1


@dataclass(frozen=True, slots=True)
class Known:
    """What the object store says of epochs."""

    newest_begun: int
    newest_complete: int

    @property
    def settled(self) -> bool:
        return self.newest_begun == self.newest_complete


class Epochs:
    def __init__(self, tenant: str, objects: ObjectStore) -> None:
        self._root = f"{encoded(tenant)}/epochs"
        self._segments = f"{encoded(tenant)}/segments"
        self._objects = objects

    def known(self, below: int | None = None) -> Known:
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
        return Known(begun, complete)

    def newer_than(self, epoch: int) -> bool:
        """One LIST: did anybody begin an epoch above this one?"""
        after = f"{self._root}/{epoch:020d}/~"
        return next(iter(self._objects.list(f"{self._root}/", start_after=after, limit=1)), None) is not None

    def begin(self, epoch: int, token: str) -> bool:
        name = f"{self._root}/{epoch:020d}/begun"
        return self._objects.put_new(name, json.dumps({"version": VERSION, "by": token}).encode()).won

    def complete(self, epoch: int, segments: list[str]) -> list[str]:
        """The list that counts for the epoch: ours, or the one that was there first."""
        name = f"{self._root}/{epoch:020d}/segments"
        body = json.dumps({"version": VERSION, "segments": segments}, separators=(",", ":")).encode()
        outcome = self._objects.put_new(name, body)
        return segments if outcome.won else _list_in(name, outcome.existing or b"")

    def listed(self, epoch: int) -> list[str]:
        """The list of a completed epoch; empty for epoch 0, which nobody ever began."""
        if epoch == 0:
            return []
        name = f"{self._root}/{epoch:020d}/segments"
        data = self._objects.get(name)
        if data is None:
            raise FormatCorrupt(f"epoch {epoch} is complete but its list {name} cannot be read")
        return _list_in(name, data)

    def committed_in(self, epoch: int) -> list[str]:
        if epoch == 0:
            return []
        return [entry.name for entry in self._objects.list(f"{self._segments}/{epoch:020d}/")]

    def truth(self) -> list[str]:
        """The segments that count now."""
        return self._truth_of(self.known().newest_complete)

    def truth_below(self, epoch: int) -> list[str]:
        """The segments that count when `epoch` begins: the newest completed epoch's list and its own segments."""
        return self._truth_of(self.known(below=epoch).newest_complete)

    def _truth_of(self, newest: int) -> list[str]:
        return sorted({*self.listed(newest), *self.committed_in(newest)})

    def segment_name(self, epoch: int, name: str) -> str:
        return f"{self._segments}/{epoch:020d}/{name}"


def _list_in(name: str, data: bytes) -> list[str]:
    try:
        values = json.loads(data)
        if values["version"] > VERSION:
            raise FormatTooNew(f"{name} has format {values['version']}; this ragfence knows {VERSION}")
        return list(values["segments"])
    except (ValueError, KeyError, TypeError) as broken:
        raise FormatCorrupt(f"{name} is no list of segments: {broken!r}") from broken
