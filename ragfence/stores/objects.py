"""What an object store is: durable bytes under names, written once and never changed.

`put_new` is the only write, and it creates or loses; everything ragfence decides about durability rests on it
alone. A store keeps these promises, which `ragfence.testing.contracts.objects` checks:

- of any number of writers to one name exactly one wins, and every loser gets the winner's bytes;
- `put_new` returns only once an object exists at the name, and no reader ever sees a part of one;
- what was put is in every `get` and `list` that starts afterwards;
- `list` is sorted by name, byte by byte: `a-b` comes before `a/b`, whatever folders the store has inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ragfence.errors import ValidationError

MAX_NAME_BYTES = 900  # S3 takes 1024, of which the store's own prefix needs some
MAX_PART_BYTES = 255  # what a file name may have

_NAME = re.compile(r"[A-Za-z0-9._=@~%-]+(?:/[A-Za-z0-9._=@~%-]+)*")
_PREFIX = re.compile(r"(?:[A-Za-z0-9._=@~%-]+/)*[A-Za-z0-9._=@~%-]*")


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """One line of a listing. `modified_ms` is the store's clock, for people and gc; it decides nothing."""

    name: str
    size: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class Put:
    """The outcome of `put_new`; `existing` is the object at the name, if another writer won."""

    won: bool
    existing: bytes | None = None


class ObjectStore(Protocol):
    """Safe to use from many threads and processes at once."""

    @property
    def url(self) -> str:
        """For people; never contains credentials."""
        ...

    def get(self, name: str) -> bytes | None:
        """The object, or None if there is none."""
        ...

    def put_new(self, name: str, data: bytes) -> Put:
        """Creates the object, or returns the one that exists already.

        `CommitUncertain` means that the outcome is unknown: the object may exist, or may come to exist later. A name
        that is also the folder of others (`a/b` next to `a/b/c`) is a `ValidationError` on the local store
        and has no agreed meaning on S3 servers: never use such names.
        """
        ...

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectEntry]:
        """The objects whose names start with `prefix` and are greater than `start_after`, in byte order.

        Pages are fetched as they are needed. Objects that come or go meanwhile may or may not be listed.
        """
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Absent names are fine, and so are none: what killed writers left half-written goes in any case."""
        ...

    def close(self) -> None: ...


def is_name(name: str) -> bool:
    """Whether an object can have this name: parts of `[A-Za-z0-9._=@~%-]` joined by `/`, none `.` or `..`."""
    if len(name) > MAX_NAME_BYTES or not _NAME.fullmatch(name):
        return False
    return all(len(part) <= MAX_PART_BYTES and part not in (".", "..") for part in name.split("/"))


def check_name(name: str) -> None:
    if not is_name(name):
        shown = name if len(name) <= 120 else f"{name[:120]}..."
        raise ValidationError(
            f"not an object name: {shown!r}",
            hint="use parts of A-Z a-z 0-9 . _ = @ ~ % - joined by '/', none of them empty, '.' or '..'; "
            f"at most {MAX_PART_BYTES} bytes a part and {MAX_NAME_BYTES} in all",
        )


def check_listing(prefix: str, limit: int | None) -> None:
    """A prefix is the beginning of a name, so its last part may be incomplete."""
    folders = prefix.split("/")[:-1]
    if not _PREFIX.fullmatch(prefix) or "." in folders or ".." in folders:
        raise ValidationError(
            f"no object name starts with {prefix[:120]!r}",
            hint="a prefix is the beginning of a name, without a leading '/'",
        )
    if limit is not None and limit < 0:
        raise ValidationError(f"limit must not be negative: {limit}")
