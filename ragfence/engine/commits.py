"""The commit point of arbitrary effects: one create-only object per key.

    <tenant>/sealed/<kind>/<source>/<key>             the outcome, committed by the one put_new that won
    <tenant>/sealed/<kind>/<source>/<key>@<sequence>  the same outcome, asked for again with a higher sequence

Whoever finds such an object knows the effect happened, whatever the fence store has forgotten.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass

from ragfence.core.operations import SEQUENCE_MIN, Fence, Operation, encoded
from ragfence.core.records import KeyRecord, State
from ragfence.errors import FormatCorrupt, FormatTooNew
from ragfence.stores.objects import ObjectStore

VERSION = 1


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
            raise FormatCorrupt(f"the object {name} is no commit: {broken!r}") from broken

    def record(self) -> KeyRecord:
        epoch, _, counter = self.fence.partition(".")
        return KeyRecord(
            state=State.FAILED if self.failed else State.SEALED,
            fingerprint=bytes.fromhex(self.fingerprint),
            token=bytes.fromhex(self.token),
            fence=Fence(int(epoch), int(counter)),
            attempt=self.attempt,
            first_seen_ms=self.first_seen_ms,
            when_ms=self.sealed_at_ms,
            error=self.error,
            effect_id=self.effect_id,
            result=self.result,
        )


class Commits:
    """The commits of one tenant."""

    def __init__(self, tenant: str, objects: ObjectStore) -> None:
        self._root = f"{encoded(tenant)}/sealed"
        self._objects = objects

    def find(self, operation: Operation) -> Commit | None:
        name = self._name(operation)
        data = self._objects.get(name)
        return Commit.decode(name, data) if data is not None else None

    def put(self, operation: Operation, commit: Commit) -> Commit | None:
        """None when this commit won; the winner's commit when it lost."""
        name = self._name(operation)
        outcome = self._objects.put_new(name, commit.encode())
        if outcome.won:
            return None
        if outcome.existing is None:
            raise FormatCorrupt(f"the object store said {name} exists but did not show it")
        winner = Commit.decode(name, outcome.existing)
        # Our own put whose reply was lost: the token says so, whoever answered.
        return None if winner.token == commit.token else winner

    def raise_sequence(self, operation: Operation, sequence: int) -> None:
        body = json.dumps({"version": VERSION, "sequence": sequence}).encode()
        self._objects.put_new(f"{self._name(operation)}@{sequence - SEQUENCE_MIN:020d}", body)

    def of_source(self, operation: Operation) -> Iterator[tuple[str, int | None]]:
        """(key, sequence) of each object of the source; None where only reading the object tells."""
        folder = self._folder(operation)
        for entry in self._objects.list(f"{folder}/"):
            key, mark, number = entry.name[len(folder) + 1 :].partition("@")
            yield key, int(number) + SEQUENCE_MIN if mark else None

    def read(self, operation: Operation, key: str) -> Commit | None:
        name = f"{self._folder(operation)}/{key}"
        data = self._objects.get(name)
        return Commit.decode(name, data) if data is not None else None

    def delete(self, operation: Operation) -> None:
        self._objects.delete([self._name(operation)])

    def _folder(self, operation: Operation) -> str:
        return f"{self._root}/{encoded(operation.kind)}/{operation.source}"

    def _name(self, operation: Operation) -> str:
        return f"{self._folder(operation)}/{operation.key.hex()}"
