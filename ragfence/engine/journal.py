"""The journal of effects that ran while the fence store was down (`on_store_error: open`, for `once` only).

Every entry is on disk before the caller has its receipt. `reconcile` seals the entries once the store is back; an
entry whose key another caller sealed meanwhile is a doubled effect, and is reported as one.

    <tenant>.jsonl   the entries, one a line; a line without its end was cut off before its caller had an answer
    <tenant>.lock    held while the journal is read or written; never replaced, so that all processes lock the same file
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
from typing import IO, Any

from ragfence.core.layout import TOKEN_BYTES
from ragfence.core.operations import Operation, encoded, key_to_text
from ragfence.core.receipts import Decision, Flags, Receipt, default_effect_id
from ragfence.engine.requests import Request
from ragfence.engine.results import Results
from ragfence.engine.runner import EffectOutcome
from ragfence.errors import Conflict, FormatCorrupt, FormatTooNew, StoreUnavailable
from ragfence.stores.file_modes import make_folders, opener

VERSION = 1


@dataclass(frozen=True, slots=True)
class JournalEntry:
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
    def parse(cls, line: str) -> JournalEntry:
        values: dict[str, Any] = json.loads(line)
        if values["version"] > VERSION:
            raise FormatTooNew(f"a journal entry has format {values['version']}; this ragfence knows {VERSION}")
        return cls(
            Operation(**values["operation"]),
            bytes.fromhex(values["fingerprint"]),
            bytes.fromhex(values["token"]),
            values["effect_id"],
            b64decode(values["result"]),
            values["at_ms"],
        )


@dataclass(frozen=True, slots=True)
class JournalReconciled:
    sealed: tuple[str, ...]
    """keys that are now sealed with the journaled outcome"""
    doubled: tuple[str, ...]
    """keys that were sealed by another caller: their effect happened twice"""
    left: tuple[str, ...]
    """keys that could not be sealed yet"""


class Journal:
    def __init__(self, folder: Path, tenant: str, results: Results) -> None:
        self._file = folder / f"{encoded(tenant)}.jsonl"
        self._lock = self._file.with_suffix(".lock")
        self._results = results

    def prepare(self) -> None:
        """Checks, before an effect runs, that it can be journaled."""
        with self._locked():
            pass

    def add(self, request: Request, outcome: EffectOutcome, *, token: bytes | None = None) -> Receipt:
        """Adds an effect. `token` is that of the lease it ran under, if there was one."""
        entry = JournalEntry(
            request.operation,
            request.fingerprint,
            token or os.urandom(TOKEN_BYTES),
            outcome.effect_id,
            outcome.result,
            time.time_ns() // 1_000_000,
        )
        with self._locked():
            fresh = not self._file.exists()
            with open(self._file, "ab+", opener=opener) as file:
                if not self._ends_with_a_line(file):
                    file.truncate(len(self._text()))  # else this entry would continue one that was cut off
                file.write(entry.line().encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            if fresh:
                self._sync_folder()
        return self._receipt(entry, Decision.NEW)

    def find(self, request: Request) -> Receipt | None:
        """Returns the receipt of an effect that ran on this machine while the store was down."""
        for entry in self.entries():
            if entry.operation.key == request.key:
                if entry.fingerprint != request.fingerprint:
                    raise Conflict(
                        f"{request.operation.kind} {request.operation.source_id!r} is in the journal with another "
                        "payload",
                        key=request.key_text,
                    )
                return self._receipt(entry, Decision.DUPLICATE)
        return None

    def entries(self) -> list[JournalEntry]:
        if not self._file.exists():
            return []
        with self._locked():
            return self._parsed()

    def has_entries(self) -> bool:
        try:
            return self._file.stat().st_size > 0
        except OSError:
            return False

    def drop(self, tokens: set[bytes]) -> None:
        """Removes settled entries. All or nothing: a crash leaves the old file or the new one."""
        with self._locked():
            kept = [entry for entry in self._parsed() if entry.token not in tokens]
            fresh = self._file.with_suffix(".new")
            with open(fresh, "wb", opener=opener) as file:
                file.writelines(entry.line().encode() + b"\n" for entry in kept)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._file)
            self._sync_folder()

    def _parsed(self) -> list[JournalEntry]:
        entries = []
        for number, line in enumerate(self._text().decode().splitlines(), start=1):
            try:
                entries.append(JournalEntry.parse(line))
            except (ValueError, KeyError, TypeError) as broken:
                raise FormatCorrupt(
                    f"line {number} of the journal {self._file} is not a valid entry: {broken!r}",
                    hint="the line may be the only record of an effect: repair or move it by hand",
                ) from broken
        return entries

    def _ends_with_a_line(self, file: IO[bytes]) -> bool:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return True
        file.seek(size - 1)
        return file.read(1) == b"\n"

    def _text(self) -> bytes:
        """The complete lines."""
        data = self._file.read_bytes()
        return data[: data.rfind(b"\n") + 1]

    def _receipt(self, entry: JournalEntry, decision: Decision) -> Receipt:
        key = entry.operation.key
        return Receipt(
            key=key_to_text(key),
            effect_id=entry.effect_id or default_effect_id(key),
            result=self._results.load(entry.result),
            decision=decision,
            flags=Flags(journaled=True),
            first_seen_ms=entry.at_ms,
        )

    def _sync_folder(self) -> None:
        folder = os.open(self._file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            make_folders(self._file.parent)
            with open(self._lock, "ab", opener=opener) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as broken:
            raise StoreUnavailable(
                f"the journal {self._file} cannot be used: {broken}",
                hint="with on_store_error: open every effect must reach the journal; free disk space or fix its folder",
            ) from broken
