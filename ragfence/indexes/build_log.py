"""The log of builds, and the seal.

    <tenant>/builds/<INDEX_HASH>/<10^20 - 1 - n>   sealed | retired | purged; the newest entry decides
    <tenant>/attempts/<INDEX_HASH>/<token>         a builder is writing, or wrote, into this physical index

A build is sealed by `put_new` at the number that followed the newest entry when it was claimed. The first process that
seals or retires it gets the number. A `purged` entry is a seal, too, of the same physical index with fewer rows; the
removed rows may still be there until the purge is completed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from ragfence.core.operations import encoded
from ragfence.errors import FormatCorrupt, FormatTooNew
from ragfence.stores.object_log import Numbered, NumberedLog
from ragfence.stores.objects import ObjectStore

VERSION = 1
SEALED: Final = "sealed"
RETIRED: Final = "retired"
PURGED: Final = "purged"


@dataclass(frozen=True, slots=True)
class BuildSeal:
    """A build whose rows were read back and verified."""

    index_hash: str
    physical: str
    """the name in the backend, made of the hash and the token of the lease; never used again"""
    backend: str
    """the spec's backend: a name, or a URL without credentials"""
    rows: int
    documents: int
    dimension: int
    metric: str
    content_digest: str
    """of the rows as read back: Merkle over the sorted (snippet_id, vector, payload)"""
    corpus_digest: str
    inputs: dict[str, Any] = field(default_factory=dict)
    """of the INDEX_HASH, by name"""
    checks: dict[str, Any] = field(default_factory=dict)
    """the numbers of the verification"""
    made: dict[str, Any] = field(default_factory=dict)
    """how it was made: the snippets that were embedded, the build it started from, milliseconds"""


@dataclass(frozen=True, slots=True)
class BuildEntry:
    """One entry of a build's log."""

    number: int
    kind: Literal["sealed", "retired", "purged"]
    at_ms: int
    owner: str
    token: str
    """of the attempt that sealed"""
    seal: BuildSeal | None = None
    """None: retired"""
    reason: str = ""

    @property
    def usable(self) -> bool:
        return self.seal is not None

    def encode(self) -> bytes:
        values = asdict(self)
        del values["number"]
        return json.dumps({"version": VERSION, **values}, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def decode(cls, name: str, numbered: Numbered) -> BuildEntry:
        try:
            values = json.loads(numbered.data)
            if values.pop("version") > VERSION:
                raise FormatTooNew(f"{name} has a newer format than this version of ragfence reads ({VERSION})")
            seal = values.pop("seal")
            entry = cls(number=numbered.number, seal=BuildSeal(**seal) if seal else None, **values)
        except (ValueError, KeyError, TypeError) as broken:
            raise FormatCorrupt(
                f"{name} is not a valid entry of a build: {broken!r}", hint="build it again"
            ) from broken
        if entry.kind not in (SEALED, RETIRED, PURGED) or (entry.seal is None) != (entry.kind == RETIRED):
            raise FormatCorrupt(f"{name} is not a valid entry of a build: {entry.kind!r}", hint="build it again")
        return entry


@dataclass(frozen=True, slots=True)
class Attempt:
    """A builder began to write a physical index, which may be dropped once it can no longer be sealed."""

    index_hash: str
    token: str
    physical: str
    backend: str
    number: int
    """the number at which it would be sealed"""
    at_ms: int
    owner: str

    def encode(self) -> bytes:
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def decode(cls, name: str, data: bytes) -> Attempt:
        try:
            values = json.loads(data)
            if values.pop("version") > VERSION:
                raise FormatTooNew(f"{name} has a newer format than this version of ragfence reads ({VERSION})")
            return cls(**values)
        except (ValueError, KeyError, TypeError) as broken:
            raise FormatCorrupt(f"{name} is not a valid attempt of a build: {broken!r}") from broken


class BuildLog:
    """The builds of one tenant in the object store."""

    def __init__(self, tenant: str, objects: ObjectStore) -> None:
        self._objects = objects
        self._root = f"{encoded(tenant)}/builds"
        self._attempts = f"{encoded(tenant)}/attempts"

    def newest(self, index_hash: str) -> BuildEntry | None:
        log = self._log(index_hash)
        found = log.newest()
        return BuildEntry.decode(log.name(found.number), found) if found else None

    def at(self, index_hash: str, number: int) -> BuildEntry | None:
        log = self._log(index_hash)
        data = log.get(number)
        return BuildEntry.decode(log.name(number), Numbered(number, data)) if data is not None else None

    def append(self, index_hash: str, entry: BuildEntry) -> bool:
        """Returns False if the number is taken."""
        return self._log(index_hash).append(entry.number, entry.encode())

    def history(self, index_hash: str) -> list[BuildEntry]:
        """All entries of a build, newest first."""
        log = self._log(index_hash)
        return [BuildEntry.decode(log.name(each.number), each) for each in log.entries()]

    def hashes(self) -> Iterator[str]:
        """Every INDEX_HASH that was ever sealed or retired, sorted."""
        return self._folders(self._root)

    def begin(self, attempt: Attempt) -> None:
        self._objects.put_new(self._attempt_name(attempt.index_hash, attempt.token), attempt.encode())

    def attempts(self, index_hash: str | None = None) -> list[Attempt]:
        prefix = f"{self._attempts}/" if index_hash is None else f"{self._attempts}/{index_hash}/"
        read = ((entry.name, self._objects.get(entry.name)) for entry in self._objects.list(prefix))
        return [Attempt.decode(name, data) for name, data in read if data is not None]

    def forget_attempt(self, attempt: Attempt) -> None:
        """Deletes an attempt whose physical index was dropped or sealed."""
        self._objects.delete([self._attempt_name(attempt.index_hash, attempt.token)])

    def _log(self, index_hash: str) -> NumberedLog:
        return NumberedLog(self._objects, f"{self._root}/{index_hash}")

    def _attempt_name(self, index_hash: str, token: str) -> str:
        return f"{self._attempts}/{index_hash}/{token}"

    def _folders(self, root: str) -> Iterator[str]:
        """The names right below a folder, one request for each: a log may be long."""
        after = ""
        while entry := next(iter(self._objects.list(f"{root}/", start_after=after, limit=1)), None):
            name = entry.name[len(root) + 1 :].partition("/")[0]
            yield name
            after = f"{root}/{name}/~"


def next_retired(entry: BuildEntry | None, *, at_ms: int, owner: str, reason: str) -> BuildEntry:
    """Returns the entry that follows this one and retires its build."""
    return BuildEntry((entry.number if entry else 0) + 1, "retired", at_ms, owner, "", None, reason)


def next_purged(
    entry: BuildEntry, *, rows: int, documents: int, content_digest: str, at_ms: int, owner: str
) -> BuildEntry:
    """Returns the entry after a seal whose physical index has lost rows; `documents` counts those that have rows."""
    seal = entry.seal
    assert seal is not None
    # A seal also counts documents without snippets, which have no rows.
    without_rows = seal.documents - int(seal.checks.get("documents", seal.documents))
    after = replace(
        seal,
        rows=rows,
        documents=documents + without_rows,
        content_digest=content_digest,
        checks={**seal.checks, "rows": rows, "documents": documents},
    )
    return BuildEntry(entry.number + 1, PURGED, at_ms, owner, entry.token, after, "a document was purged")


def next_repeated(entry: BuildEntry, *, at_ms: int, owner: str, reason: str) -> BuildEntry:
    """Returns a copy of the entry with the next number, which it takes; nothing else changes."""
    return replace(entry, number=entry.number + 1, at_ms=at_ms, owner=owner, reason=reason)


def replaced_seals(history: Sequence[BuildEntry]) -> Iterator[BuildEntry]:
    """Yields the last seal of each earlier physical index of a build, which an alias may still serve.

    `history` is sorted newest first.
    """
    seen = {entry.seal.physical for entry in history[:1] if entry.seal}
    for entry in history:
        if entry.seal is not None and entry.seal.physical not in seen:
            seen.add(entry.seal.physical)
            yield entry
