"""The commit point of arbitrary effects: one create-only object per key.

    <tenant>/sealed/<kind>/<source>/<key>             the outcome, committed by the one put_new that won
    <tenant>/sealed/<kind>/<source>/<key>@<sequence>  the same outcome, claimed again with a higher sequence

Such an object proves that the effect happened, whatever the fence store has lost. `EarlierCommits` looks for commits
by owners that died, and for those that the fence store has lost.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from urllib.parse import unquote

from ragfence.core.decision_rows import row_for_answer
from ragfence.core.decisions import Claim, Mode
from ragfence.core.layout import RowKind, State
from ragfence.core.operations import KEY_BYTES, SEQUENCE_MIN, FenceNumber, Operation, encoded
from ragfence.core.records import Head, KeyRecord
from ragfence.engine.refusals import Refusals
from ragfence.engine.requests import Request
from ragfence.errors import FormatCorrupt, FormatTooNew, ValidationError
from ragfence.stores.fences import FenceStore, Lookup
from ragfence.stores.objects import ObjectEntry, ObjectStore

VERSION = 1

_PLACE = re.compile(rf"([^/]+)/([0-9a-f]{{64}})/([0-9a-f]{{{2 * KEY_BYTES}}})(?:@([0-9]{{20}}))?")


@dataclass(frozen=True, slots=True)
class Commit:
    key: str
    fingerprint: str
    token: str
    fence: str
    attempt: int
    first_seen_ms: int
    sealed_at_ms: int
    sequence: int | None
    failed: bool
    error: str
    effect_id: str
    result: bytes

    def encode(self) -> bytes:
        values = {name: getattr(self, name) for name in self.__slots__} | {"result": b64encode(self.result).decode()}
        return json.dumps({"version": VERSION, **values}, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def decode(cls, name: str, data: bytes) -> Commit:
        try:
            values = json.loads(data)
            if values["version"] > VERSION:
                raise FormatTooNew(f"{name} has format {values['version']}; this ragfence knows {VERSION}")
            return cls(**{field: values[field] for field in cls.__slots__} | {"result": b64decode(values["result"])})
        except (ValueError, KeyError, TypeError) as broken:
            raise FormatCorrupt(f"the object {name} is not a valid commit: {broken!r}") from broken

    def record(self) -> KeyRecord:
        epoch, _, counter = self.fence.partition(".")
        return KeyRecord(
            state=State.FAILED if self.failed else State.SEALED,
            fingerprint=bytes.fromhex(self.fingerprint),
            token=bytes.fromhex(self.token),
            fence=FenceNumber(int(epoch), int(counter)),
            attempt=self.attempt,
            first_seen_ms=self.first_seen_ms,
            when_ms=self.sealed_at_ms,
            error=self.error,
            effect_id=self.effect_id,
            result=self.result,
        )

    @classmethod
    def of(cls, key: str, record: KeyRecord, sequence: int | None) -> Commit:
        """Returns the commit that an ended record stands for: the inverse of `record`."""
        return cls(
            key=key,
            fingerprint=record.fingerprint.hex(),
            token=record.token.hex(),
            fence=str(record.fence),
            attempt=record.attempt,
            first_seen_ms=record.first_seen_ms,
            sealed_at_ms=record.when_ms,
            sequence=sequence,
            failed=record.state is State.FAILED,
            error=record.error,
            effect_id=record.effect_id,
            result=record.result,
        )


@dataclass(frozen=True, slots=True)
class Mark:
    sequence: int
    entry: ObjectEntry


@dataclass(frozen=True, slots=True)
class KeyCommits:
    """The objects of one key, as far as a page shows them."""

    kind: str
    source: str
    key: str
    commit: ObjectEntry | None
    marks: tuple[Mark, ...]
    """the lowest sequence first"""
    goes_on: bool
    """a higher mark is on the next page"""

    @property
    def entries(self) -> tuple[ObjectEntry, ...]:
        return (*((self.commit,) if self.commit else ()), *(mark.entry for mark in self.marks))


@dataclass(frozen=True, slots=True)
class CommitPage:
    kept: tuple[KeyCommits, ...]
    scanned: int
    after: str
    """where the next page begins; empty after the last page"""


class Commits:
    """The commits of one tenant."""

    def __init__(self, tenant: str, objects: ObjectStore) -> None:
        self._root = f"{encoded(tenant)}/sealed"
        self._objects = objects

    def find(self, operation: Operation) -> Commit | None:
        return self._at(self._name(operation))

    def put(self, operation: Operation, commit: Commit) -> Commit | None:
        """Commits. Returns None if this commit won, or the winner's commit if it lost."""
        name = self._name(operation)
        outcome = self._objects.put_new(name, commit.encode())
        if outcome.won:
            return None
        if outcome.existing is None:
            raise FormatCorrupt(f"the object store said {name} exists but did not show it")
        winner = Commit.decode(name, outcome.existing)
        # Our own put whose reply was lost: the token shows it.
        return None if winner.token == commit.token else winner

    def raise_sequence(self, operation: Operation, sequence: int) -> None:
        body = json.dumps({"version": VERSION, "sequence": sequence}).encode()
        self._objects.put_new(f"{self._name(operation)}@{sequence - SEQUENCE_MIN:020d}", body)

    def list_source(self, operation: Operation) -> Iterator[tuple[str, int | None]]:
        """Yields (key, sequence) of each object of the source; None if the sequence is inside the object."""
        folder = self._folder(operation)
        for entry in self._objects.list(f"{folder}/"):
            key, mark, number = entry.name[len(folder) + 1 :].partition("@")
            yield key, int(number) + SEQUENCE_MIN if mark else None

    def read(self, operation: Operation, key: str) -> Commit | None:
        return self._at(f"{self._folder(operation)}/{key}")

    def delete(self, operation: Operation, *also: str) -> None:
        """Deletes a commit. `also`: other objects of the same key, in the same request."""
        self._objects.delete([self._name(operation), *also])

    def exists(self, kind: str, source: str, key: str) -> bool:
        name = f"{self._root}/{encoded(kind)}/{source}/{key}"
        return any(entry.name == name for entry in self._objects.list(name, limit=1))

    def page(self, after: str, limit: int) -> CommitPage:
        """Returns the next `limit` objects after the name `after`, grouped by key.

        A last key that does not fit is left to the next page; one that fits no page is returned in parts.
        """
        if after and not after.startswith(f"{self._root}/"):
            raise ValidationError(
                f"{after[:120]!r} is not a place among the commits of this tenant",
                hint="pass the `after` of the previous call; leave it out to start at the beginning",
            )
        # One more than requested shows whether the last key continues.
        found = list(self._objects.list(f"{self._root}/", start_after=after, limit=limit + 1))
        shown, beyond = found[:limit], found[limit:]
        keys = [list(entries) for _, entries in groupby(shown, _unmarked)]
        cut = bool(beyond) and _unmarked(beyond[0]) == _unmarked(shown[-1])
        if cut and len(keys) > 1:
            del keys[-1]
            cut = False
        kept = [made for entries in keys if (made := self._kept(entries, goes_on=cut))]
        scanned = sum(map(len, keys))
        return CommitPage(tuple(kept), scanned, shown[scanned - 1].name if beyond else "")

    def of(self, kept: KeyCommits) -> Commit | None:
        """Returns the commit itself. None: there is none, or it was deleted since it was listed."""
        return self._at(kept.commit.name) if kept.commit else None

    def find_other(self, kept: KeyCommits) -> tuple[int | None, str] | None:
        """Returns sequence and key of the first other object of the source. None: there are none.

        A new mark of the same key is returned without a sequence: it supersedes no other key.
        """
        folder, own = f"{self._folder_of(kept)}/", {entry.name for entry in kept.entries}
        # Two more than its own: a commit may have a mark, which is its sequence then.
        shown = [entry for entry in self._objects.list(folder, limit=len(own) + 2) if entry.name not in own]
        if not shown:
            return None
        key = _unmarked(shown[0]).removeprefix(folder)
        if key == kept.key:
            return None, key
        known = [self._sequence_at(entry) for entry in shown if _unmarked(entry) == f"{folder}{key}"]
        return max((number for number in known if number is not None), default=None), key

    def remove(self, entries: Sequence[ObjectEntry], *also: str) -> None:
        """Deletes in two steps, so that no crash leaves a commit without the mark that makes older events stale.

        `also`: other objects of the same key, which are deleted with its commit, not after it.
        """
        marks = [entry.name for entry in entries if "@" in entry.name]
        commits = [entry.name for entry in entries if "@" not in entry.name]
        for names in ([*also, *commits] if commits else [], marks):
            if names:
                self._objects.delete(names)

    def restore(self, kept: KeyCommits, commit: Commit) -> None:
        """Writes the commit again, unless there is one."""
        self._objects.put_new(f"{self._folder_of(kept)}/{kept.key}", commit.encode())

    def _at(self, name: str) -> Commit | None:
        data = self._objects.get(name)
        return Commit.decode(name, data) if data is not None else None

    def _sequence_at(self, entry: ObjectEntry) -> int | None:
        _, mark, number = entry.name.partition("@")
        if mark:
            return int(number) + SEQUENCE_MIN
        commit = self._at(entry.name)
        return commit.sequence if commit else None

    def _kept(self, entries: Sequence[ObjectEntry], *, goes_on: bool) -> KeyCommits | None:
        """Returns the objects of a key. None: their names are not ragfence's."""
        first, commit, marks = None, None, []
        for entry in entries:
            if place := _PLACE.fullmatch(entry.name, len(self._root) + 1):
                first = first or place
                if place[4] is None:
                    commit = entry
                else:
                    marks.append(Mark(int(place[4]) + SEQUENCE_MIN, entry))
        if first is None:
            return None
        return KeyCommits(unquote(first[1]), first[2], first[3], commit, tuple(marks), goes_on)

    def _folder_of(self, kept: KeyCommits) -> str:
        return f"{self._root}/{encoded(kept.kind)}/{kept.source}"

    def _folder(self, operation: Operation) -> str:
        return f"{self._root}/{encoded(operation.kind)}/{operation.source}"

    def _name(self, operation: Operation) -> str:
        return f"{self._folder(operation)}/{operation.key.hex()}"


def _unmarked(entry: ObjectEntry) -> str:
    return entry.name.partition("@")[0]


class EarlierCommits:
    def __init__(self, fences: FenceStore, commits: Commits, refusals: Refusals) -> None:
        self._fences = fences
        self._commits = commits
        self._refusals = refusals

    def find(self, request: Request, head: Head | None, claim: Claim) -> Commit | None:
        """Returns the commit of this operation. Raises what a claim would: conflict, or stale."""
        if request.mode is Mode.KEYED:
            found = self._commits.find(request.operation)
        else:
            found = self._newest_of_source(request, head, claim)
        if found is not None and found.fingerprint != request.fingerprint.hex():
            raise self._refusals.conflict(request, claim, found.record())
        return found

    def _newest_of_source(self, request: Request, head: Head | None, claim: Claim) -> Commit | None:
        """Returns the commit of this operation, if any. A higher sequence anywhere in the source makes it stale."""
        commits, own, sequence = self._commits, None, request.operation.sequence
        assert sequence is not None
        listed = list(commits.list_source(request.operation))
        names = sorted({key for key, _ in listed})
        known = self._fences.read([Lookup(bytes.fromhex(key), Mode.SEQUENCED, request.source) for key in names])
        top: tuple[int, str] | None = None
        if head is not None and head.sequence is not None:
            top = (head.sequence, (request.key[:1] + head.digest).hex())
        has_head = top is not None
        for key, marked in listed:
            number = marked
            if marked is None:
                if key == request.key_text:
                    own = commits.read(request.operation, key)
                    number = own.sequence if own else None
                elif not has_head or not _sealed_here(known[names.index(key)].record):
                    # The head covers all that this store has sealed; only other objects have to be read. Without a
                    # head (the store has restarted) its records cover nothing, however many are sealed.
                    other = commits.read(request.operation, key)
                    number = other.sequence if other else None
            if number is not None and (top is None or number > top[0]):
                top = (number, key)
        if top is not None and top[0] > sequence:
            self._fences.record([row_for_answer(claim, RowKind.STALE, None, self._fences.now_ms())])
            raise self._refusals.stale(request, top[0])
        if top is not None and top[0] == sequence and top[1] != request.key_text:
            raise self._refusals.conflict(request, claim, None)
        return own


def _sealed_here(record: KeyRecord | None) -> bool:
    return record is not None and record.ended
