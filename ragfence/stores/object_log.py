"""A log of numbered objects, the newest first: the one way in which something changes in an object store.

    <prefix>/<10^20 - 1 - n>

Names count down, so a LIST of one finds the newest; a reader that knows n gets n + 1, and its absence means unchanged.
If another writer has taken the next number, the compare-and-swap failed. Numbers start at 1, and none is ever left
out: an entry is put at the number after the newest one that was read, and nothing is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ragfence.errors import FormatCorrupt
from ragfence.stores.objects import ObjectStore

_TOP = 10**20 - 1


class Numbered(NamedTuple):
    number: int
    data: bytes


class NumberedLog:
    def __init__(self, objects: ObjectStore, prefix: str) -> None:
        self._objects = objects
        self.prefix = prefix

    def name(self, number: int) -> str:
        return f"{self.prefix}/{_TOP - number:020d}"

    def newest(self, known: Numbered | None = None) -> Numbered | None:
        """The newest entry. With a `known` one it is one request for each that came after it, and one more."""
        if known is None:
            found = next(iter(self._objects.list(f"{self.prefix}/", limit=1)), None)
            if found is None:
                return None
            number = number_in(found.name)
            data = self._objects.get(found.name)
            if data is None:
                raise FormatCorrupt(f"{found.name} is listed but cannot be read", hint="entries are never deleted")
            return Numbered(number, data)
        while (data := self._objects.get(self.name(known.number + 1))) is not None:
            known = Numbered(known.number + 1, data)
        return known

    def append(self, number: int, data: bytes) -> bool:
        """Returns False if another writer has taken this number."""
        return self._objects.put_new(self.name(number), data).won

    def get(self, number: int) -> bytes | None:
        return self._objects.get(self.name(number))

    def entries(self) -> Iterator[Numbered]:
        """All of them, the newest first."""
        for entry in self._objects.list(f"{self.prefix}/"):
            data = self._objects.get(entry.name)
            if data is None:
                raise FormatCorrupt(f"{entry.name} is listed but cannot be read", hint="entries are never deleted")
            yield Numbered(number_in(entry.name), data)


def number_in(name: str) -> int:
    try:
        return _TOP - int(name.rpartition("/")[2])
    except ValueError as broken:
        raise FormatCorrupt(f"{name!r} is not a numbered entry") from broken
