"""Notes: which effects on foreign systems were entered, for whoever comes after the fence store forgot.

    <tenant>/notes/<kind>/<source>/<key>   written before an effect with `recover=` is entered, create-only

The put is the lookup, too: an attempt that loses it knows that an earlier one has entered the effect, whatever the
fence store remembers of that, and asks `recover=` first. Asking is always safe, so a note may be wrong: that of an
attempt which failed, or was killed before its first step, only costs a question.

A commit makes its note pointless: everybody is answered with the commit. Such notes are removed many at a time. Those
left behind are removed by `purge_expired`, and those without a commit once the lifetime of their kind is over.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from ragfence.core.operations import KEY_BYTES, Operation, encoded
from ragfence.errors import FormatCorrupt, FormatTooNew, RagfenceError, ValidationError
from ragfence.stores.objects import ObjectEntry, ObjectStore

VERSION = 1
BATCH = 100
"""how many pointless notes are removed in one request"""
FORGOTTEN_AFTER_S = 30.0
"""Older ones are left to `purge_expired`: the key may have been released since, and have a note of its next life."""

_PLACE = re.compile(rf"([^/]+)/([0-9a-f]{{64}})/([0-9a-f]{{{2 * KEY_BYTES}}})")


@dataclass(frozen=True, slots=True)
class EffectNote:
    """Which attempt entered the effect, and when. It holds nothing of the payload."""

    key: str
    token: str
    fence: str
    attempt: int
    at_ms: int

    def encode(self) -> bytes:
        values = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({"version": VERSION, **values}, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def decode(cls, name: str, data: bytes) -> EffectNote:
        try:
            values = json.loads(data)
            if values["version"] > VERSION:
                raise FormatTooNew(f"{name} has format {values['version']}; this ragfence knows {VERSION}")
            return cls(**{field: values[field] for field in cls.__slots__})
        except (ValueError, KeyError, TypeError) as broken:
            raise FormatCorrupt(f"the object {name} is not a note: {broken!r}") from broken


@dataclass(frozen=True, slots=True)
class NotePlace:
    """A note as a listing shows it."""

    kind: str
    source: str
    key: str
    entry: ObjectEntry


@dataclass(frozen=True, slots=True)
class NotePage:
    notes: tuple[NotePlace, ...]
    scanned: int
    after: str
    """where the next page begins; empty: this was the last one"""


class EffectNotes:
    """The notes of one tenant."""

    def __init__(self, tenant: str, objects: ObjectStore) -> None:
        self.root = f"{encoded(tenant)}/notes/"
        self._objects = objects
        self._lock = threading.Lock()
        self._pointless: list[tuple[str, float]] = []

    def put(self, operation: Operation, note: EffectNote) -> bool:
        """False: an earlier attempt has left a note."""
        data = note.encode()
        outcome = self._objects.put_new(self.name(operation), data)
        return outcome.won or outcome.existing == data

    def name(self, operation: Operation) -> str:
        return self.name_of(operation.kind, operation.source, operation.key.hex())

    def name_of(self, kind: str, source: str, key: str) -> str:
        return f"{self.root}{encoded(kind)}/{source}/{key}"

    def drop(self, operation: Operation, *, at_once: bool) -> None:
        """The key has a commit. `at_once`: it is one that may be released soon, for a new life."""
        with self._lock:
            self._pointless.append((self.name(operation), time.monotonic()))
            if len(self._pointless) < BATCH and not at_once:
                return
        self.flush()

    def flush(self) -> None:
        """Removes what has become pointless. If the store does not answer, `purge_expired` does it later."""
        with self._lock:
            pointless, self._pointless = self._pointless, []
        oldest = time.monotonic() - FORGOTTEN_AFTER_S
        if names := [name for name, since in pointless if since >= oldest]:
            with contextlib.suppress(RagfenceError):
                self._objects.delete(names)

    def page(self, after: str, limit: int) -> NotePage:
        if after and not after.startswith(self.root):
            raise ValidationError(f"{after[:120]!r} is not a place among the notes of this tenant")
        found = list(self._objects.list(self.root, start_after=after, limit=limit + 1))
        shown = found[:limit]
        places = tuple(
            NotePlace(unquote(place[1]), place[2], place[3], entry)
            for entry in shown
            if (place := _PLACE.fullmatch(entry.name, len(self.root)))
        )
        return NotePage(places, len(shown), shown[-1].name if len(found) > limit else "")

    def remove(self, notes: Sequence[NotePlace]) -> None:
        if notes:
            self._objects.delete([note.entry.name for note in notes])
