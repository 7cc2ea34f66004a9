"""What a notifier has announced, in the object store: a log of numbered entries, as in `stores/object_log.py`.

    <tenant>/notify/<name>/<10^20 - 1 - n>   what was announced since the entry before, or a checkpoint: all of it

An entry is written after its events were delivered, so a notifier that is killed delivers some of them again. The next
number taken by somebody else means that another notifier of this name is at work.

Of documents, the memory holds per source the fence number of the last announced move of the current epoch, and the
names of the segments that are done. No doc_id and no text is in it, so a purge need not rewrite it.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from typing import Any, Final

from ragfence.core.operations import FenceNumber, encoded
from ragfence.errors import FormatCorrupt, FormatTooNew, ValidationError
from ragfence.stores.object_log import Numbered, NumberedLog
from ragfence.stores.objects import ObjectStore

VERSION: Final = 1
SMALL_BYTES: Final = 64 << 10
"""Below this, entries are not worth a checkpoint."""
SOURCE: Final = 20
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


@dataclass
class AnnouncedState:
    """All that was announced."""

    epoch: int = -1
    """The epoch whose segments are followed. -1: nothing was announced yet"""
    moves: dict[bytes, FenceNumber] = field(default_factory=dict)
    """Per source: the last announced move."""
    segments: set[str] = field(default_factory=set)
    """Segments of the epoch that are done."""
    open: set[str] = field(default_factory=set)
    """Segments of earlier epochs with moves that could not be delivered."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Per log: the last entry that was looked at."""
    left: dict[str, list[int]] = field(default_factory=dict)
    """Per log: earlier entries that could not be delivered."""
    builds: dict[str, int] = field(default_factory=dict)
    parts: dict[str, set[str]] = field(default_factory=dict)
    """Per day: the files of the ledger that are done."""
    rows: dict[str, set[str]] = field(default_factory=dict)
    """Per day: the decision rows that were announced."""
    held: dict[str, int] = field(default_factory=dict)
    """Per source whose event could not be delivered: since when, in milliseconds."""
    dropped: int = 0
    """Events that were given up."""

    def encode(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "moves": _pack(self.moves),
            "segments": sorted(self.segments),
            "open": sorted(self.open),
            "numbers": self.numbers,
            "left": self.left,
            "builds": self.builds,
            "parts": {day: sorted(names) for day, names in self.parts.items()},
            "rows": {day: sorted(names) for day, names in self.rows.items()},
            "held": self.held,
            "dropped": self.dropped,
        }

    @classmethod
    def decode(cls, values: dict[str, Any]) -> AnnouncedState:
        return cls(
            epoch=values["epoch"],
            moves=dict(_unpack(values["moves"])),
            segments=set(values["segments"]),
            open=set(values["open"]),
            numbers=dict(values["numbers"]),
            left={log: list(left) for log, left in values["left"].items()},
            builds=dict(values["builds"]),
            parts={day: set(names) for day, names in values["parts"].items()},
            rows={day: set(names) for day, names in values["rows"].items()},
            held=dict(values["held"]),
            dropped=values["dropped"],
        )

    def apply(self, delta: dict[str, Any]) -> None:
        self.moves.update(_unpack(delta["moves"]))
        self.segments.update(delta["segments"])
        for day, names in delta["parts"].items():
            self.parts.setdefault(day, set()).update(names)
        for day, names in delta["rows"].items():
            self.rows.setdefault(day, set()).update(names)
        self.builds.update(delta["builds"])
        # These are small, and stand whole in every entry.
        self.numbers, self.left = dict(delta["numbers"]), {log: list(left) for log, left in delta["left"].items()}
        self.open, self.held, self.dropped = set(delta["open"]), dict(delta["held"]), delta["dropped"]


def _pack(moves: dict[bytes, FenceNumber]) -> str:
    packed = (
        source + fence.epoch.to_bytes(8, "big") + fence.counter.to_bytes(8, "big") for source, fence in moves.items()
    )
    return b64encode(b"".join(packed)).decode()


def _unpack(text: str) -> list[tuple[bytes, FenceNumber]]:
    data, size = b64decode(text), SOURCE + 16
    found = []
    for at in range(0, len(data), size):
        numbers = data[at + SOURCE : at + size]
        fence = FenceNumber(int.from_bytes(numbers[:8], "big"), int.from_bytes(numbers[8:], "big"))
        found.append((data[at : at + SOURCE], fence))
    return found


class NotifyMemory:
    """The memory of one notifier. Change it through its methods, then `save`."""

    def __init__(self, tenant: str, objects: ObjectStore, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ValidationError(
                f"{name!r:.100} is not a valid name for a notifier", hint="1 to 64 of the characters a-z 0-9 _ -"
            )
        self._objects = objects
        self._log = NumberedLog(objects, f"{encoded(tenant)}/notify/{name}")
        self.state = AnnouncedState()
        self._number = 0
        self._checkpoint = 0
        self._checkpoint_bytes = self._tail_bytes = 0
        self._forget_changes()

    @property
    def is_new(self) -> bool:
        return self._number == 0

    def load(self) -> None:
        """Reads the newest checkpoint and what followed it."""
        found = self._log.newest()
        entries: list[tuple[Numbered, dict[str, Any]]] = []
        while found is not None:
            values = self._decode(found)
            entries.append((found, values))
            if values["kind"] == "checkpoint":
                break
            data = self._log.get(found.number - 1)
            found = None if data is None else Numbered(found.number - 1, data)
        self.state, self._number, self._checkpoint = AnnouncedState(), 0, 0
        self._checkpoint_bytes = self._tail_bytes = 0
        self._forget_changes()
        if not entries:
            return
        oldest, values = entries.pop()
        if values["kind"] != "checkpoint":
            raise FormatCorrupt(f"{self._log.name(oldest.number)} follows an entry that is missing")
        self.state = AnnouncedState.decode(values["state"])
        self._number = self._checkpoint = oldest.number
        self._checkpoint_bytes = len(oldest.data)
        for entry, values in reversed(entries):
            self.state.apply(values["delta"])
            self._number = entry.number
            self._tail_bytes += len(entry.data)

    def moved(self, source: bytes, fence: FenceNumber) -> None:
        self.state.moves[source] = self._moves[source] = fence
        self._dirty = True

    def segment_done(self, name: str) -> None:
        self.state.segments.add(name)
        self._segments.append(name)
        self._dirty = True

    def part_done(self, day: str, name: str) -> None:
        self.state.parts.setdefault(day, set()).add(name)
        self._parts.setdefault(day, []).append(name)
        self._dirty = True

    def row_done(self, day: str, row_id: str) -> None:
        self.state.rows.setdefault(day, set()).add(row_id)
        self._rows.setdefault(day, []).append(row_id)
        self._dirty = True

    def build_done(self, index_hash: str, number: int) -> None:
        self.state.builds[index_hash] = self._builds[index_hash] = number
        self._dirty = True

    def follow(self, log: str, number: int, left: list[int]) -> None:
        if self.state.numbers.get(log) != number or self.state.left.get(log, []) != left:
            self.state.numbers[log], self.state.left[log] = number, left
            self._dirty = True

    def hold(self, source: str, now_ms: int) -> int:
        """Remembers that an event of the source could not be delivered. Returns since when."""
        if source not in self.state.held:
            self.state.held[source] = now_ms
            self._dirty = True
        return self.state.held[source]

    def release(self, source: str) -> None:
        if self.state.held.pop(source, None) is not None:
            self._dirty = True

    def drop(self) -> None:
        self.state.dropped += 1
        self._dirty = True

    def set_open(self, names: set[str]) -> None:
        if names != self.state.open:
            self.state.open = names
            self._dirty = True

    def begin_epoch(self, epoch: int, segments: set[str], moves: dict[bytes, FenceNumber]) -> None:
        """The epoch before is done. What follows is a checkpoint."""
        self.state.epoch, self.state.segments, self.state.moves = epoch, segments, moves
        self._whole = self._dirty = True

    def forget_days(self, before: str) -> None:
        for days in (self.state.parts, self.state.rows):
            for day in [day for day in days if day < before]:
                del days[day]

    def save(self) -> bool:
        """Writes what changed. False: another notifier of this name has written; `load` has to be called."""
        if not self._dirty:
            return True
        whole = self._whole or not self._number or self._tail_bytes > max(SMALL_BYTES, self._checkpoint_bytes)
        if whole:
            values: dict[str, Any] = {"kind": "checkpoint", "state": self.state.encode()}
        else:
            state = self.state
            delta = {
                "moves": _pack(self._moves),
                "segments": self._segments,
                "parts": self._parts,
                "rows": self._rows,
                "builds": self._builds,
                "numbers": state.numbers,
                "left": state.left,
                "open": sorted(state.open),
                "held": state.held,
                "dropped": state.dropped,
            }
            values = {"kind": "delta", "delta": delta}
        data = json.dumps({"version": VERSION, **values}, separators=(",", ":")).encode()
        if not self._log.append(self._number + 1, data):
            return False
        self._number += 1
        if whole:
            before, self._checkpoint = self._checkpoint, self._number
            self._checkpoint_bytes, self._tail_bytes = len(data), 0
            # What is before a checkpoint is not read any more. One checkpoint is kept, for a reader that is at it.
            gone = self._objects.list(f"{self._log.prefix}/", start_after=self._log.name(before), limit=1000)
            self._objects.delete([entry.name for entry in gone] if before else [])
        else:
            self._tail_bytes += len(data)
        self._forget_changes()
        return True

    def _forget_changes(self) -> None:
        self._moves: dict[bytes, FenceNumber] = {}
        self._segments: list[str] = []
        self._parts: dict[str, list[str]] = {}
        self._rows: dict[str, list[str]] = {}
        self._builds: dict[str, int] = {}
        self._whole = self._dirty = False

    def _decode(self, numbered: Numbered) -> dict[str, Any]:
        name = self._log.name(numbered.number)
        try:
            values: dict[str, Any] = json.loads(numbered.data)
            if values["version"] > VERSION:
                raise FormatTooNew(f"{name} has a newer format than this version of ragfence reads ({VERSION})")
            if values["kind"] not in ("checkpoint", "delta"):
                raise ValueError(values["kind"])
        except (ValueError, KeyError, TypeError) as broken:
            raise FormatCorrupt(f"{name} is not a valid entry of a notifier: {broken!r}") from broken
        return values
