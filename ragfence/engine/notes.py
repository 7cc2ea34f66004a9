"""Notes: which effects on external systems were started, in case the fence store loses its records.

    <tenant>/notes/<kind>/<source>/<key>   written before an effect with `recover=` starts, create-only

The put is also the lookup: an attempt that loses it knows that an earlier one has started the effect, whatever the
fence store has of that attempt, and calls `recover=` first. That call is always safe, so a note may be wrong: that of
an attempt that failed, or was killed before its first step, only costs a call.

A commit makes its note obsolete: every caller is answered from the commit. Obsolete notes are removed in batches.
`purge_expired` removes those left behind, and those without a commit once the TTL of their kind has passed.
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
"""Obsolete notes that are removed in one request."""
FORGOTTEN_AFTER_S = 30.0
"""Older ones are left to `purge_expired`: the key may have been released since, and have a new note."""

_PLACE = re.compile(rf"([^/]+)/([0-9a-f]{{64}})/([0-9a-f]{{{2 * KEY_BYTES}}})")


@dataclass(frozen=True, slots=True)
class EffectNote:
    """Which attempt started the effect, and when. It holds nothing of the payload."""

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
    """A note as it is listed."""

    kind: str
    source: str
    key: str
    entry: ObjectEntry


@dataclass(frozen=True, slots=True)
class NotePage:
    notes: tuple[NotePlace, ...]
    scanned: int
    after: str
    """where the next page begins; empty after the last page"""


class EffectNotes:
    """The notes of one tenant."""

    def __init__(self, tenant: str, objects: ObjectStore) -> None:
        self.root = f"{encoded(tenant)}/notes/"
        self._objects = objects
        self._lock = threading.Lock()
        self._obsolete: list[tuple[str, float]] = []

    def put(self, operation: Operation, note: EffectNote) -> bool:
        """Writes a note. Returns False if an earlier attempt has written one."""
        data = note.encode()
        outcome = self._objects.put_new(self.name(operation), data)
        return outcome.won or outcome.existing == data

    def name(self, operation: Operation) -> str:
        return self.name_of(operation.kind, operation.source, operation.key.hex())

    def name_of(self, kind: str, source: str, key: str) -> str:
        return f"{self.root}{encoded(kind)}/{source}/{key}"

    def discard(self, operation: Operation, *, now: bool) -> None:
        """Removes the note of a key that has a commit, in a batch. `now`: at once, as the key may be released soon."""
        with self._lock:
            self._obsolete.append((self.name(operation), time.monotonic()))
            if len(self._obsolete) < BATCH and not now:
                return
        self.flush()

    def flush(self) -> None:
        """Removes obsolete notes. If the store does not answer, `purge_expired` does it later."""
        with self._lock:
            obsolete, self._obsolete = self._obsolete, []
        oldest = time.monotonic() - FORGOTTEN_AFTER_S
        if names := [name for name, since in obsolete if since >= oldest]:
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
