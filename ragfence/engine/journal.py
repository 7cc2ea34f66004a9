"""The journal of effects that ran while the fence store was down (`on_store_error: open`, for `once` only).

Every entry is on disk before the caller has its receipt. `reconcile` seals the entries once the store is back; an
entry whose key somebody else sealed meanwhile is a double effect, and is reported as one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragfence.core.operations import Operation, encoded, key_to_text
from ragfence.core.receipts import Decision, Flags, Receipt, default_effect_id
from ragfence.engine.results import Results
from ragfence.errors import StoreUnavailable

VERSION = 1


@dataclass(frozen=True, slots=True)
class Entry:
    operation: Operation
    fingerprint: bytes
    token: bytes
    effect_id: str
    result: bytes
    at_ms: int

    def line(self) -> str:
        return json.dumps(
            {
                "version": VERSION,
                "operation": asdict(self.operation),
                "fingerprint": self.fingerprint.hex(),
                "token": self.token.hex(),
                "effect_id": self.effect_id,
                "result": b64encode(self.result).decode(),
                "at_ms": self.at_ms,
            },
            separators=(",", ":"),
        )

    @classmethod
    def parse(cls, line: str) -> Entry:
        values: dict[str, Any] = json.loads(line)
        return cls(
            Operation(**values["operation"]),
            bytes.fromhex(values["fingerprint"]),
            bytes.fromhex(values["token"]),
            values["effect_id"],
            b64decode(values["result"]),
            values["at_ms"],
        )


@dataclass(frozen=True, slots=True)
class Reconciled:
    sealed: tuple[str, ...]
    """keys that are sealed now with what the journal held"""
    doubled: tuple[str, ...]
    """keys somebody else had sealed: their effect happened twice"""
    left: tuple[str, ...]
    """keys that could not be settled yet"""


class Journal:
    def __init__(self, folder: Path, tenant: str, results: Results) -> None:
        self._file = folder / f"{encoded(tenant)}.jsonl"
        self._results = results

    def add(self, operation: Operation, fingerprint: bytes, effect_id: str, result: bytes) -> Receipt:
        entry = Entry(operation, fingerprint, os.urandom(16), effect_id, result, time.time_ns() // 1_000_000)
        with self._locked() as file:
            file.seek(0, os.SEEK_END)
            file.write(entry.line() + "\n")
            file.flush()
            os.fsync(file.fileno())
        return self._receipt(entry, Decision.NEW)

    def find(self, operation: Operation, fingerprint: bytes) -> Receipt | None:
        """The receipt of an effect that ran on this machine while the store was down."""
        if not self._file.exists():
            return None
        for entry in self.entries():
            if entry.operation.key == operation.key and entry.fingerprint == fingerprint:
                return self._receipt(entry, Decision.DUPLICATE)
        return None

    def entries(self) -> list[Entry]:
        if not self._file.exists():
            return []
        with self._locked() as file:
            return _parsed(file.read())

    def drop(self, tokens: set[bytes]) -> None:
        """Takes settled entries out; whoever adds one meanwhile waits for the lock."""
        with self._locked() as file:
            kept = [entry for entry in _parsed(file.read()) if entry.token not in tokens]
            fresh = self._file.with_suffix(".new")
            fresh.write_text("".join(entry.line() + "\n" for entry in kept))
            with fresh.open() as written:
                os.fsync(written.fileno())
            # In place, under the lock: a rename would leave waiting writers with the old file.
            file.seek(0)
            file.truncate()
            file.write(fresh.read_text())
            file.flush()
            os.fsync(file.fileno())
            fresh.unlink()

    def _receipt(self, entry: Entry, decision: Decision) -> Receipt:
        key = entry.operation.key
        return Receipt(
            key=key_to_text(key),
            effect_id=entry.effect_id or default_effect_id(key),
            result=self._results.load(entry.result),
            decision=decision,
            flags=Flags(journaled=True),
            first_seen_ms=entry.at_ms,
        )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Any]:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                yield file
        except OSError as broken:
            raise StoreUnavailable(
                f"the journal {self._file} cannot be written: {broken}",
                hint="with on_store_error: open every effect must reach the journal; free disk space or fix its folder",
            ) from broken


def _parsed(text: str) -> list[Entry]:
    # A line without its end was cut off by a crash before its caller had an answer.
    complete = text[: text.rfind("\n") + 1]
    return [Entry.parse(line) for line in complete.splitlines() if line]
