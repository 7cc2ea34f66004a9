"""The log of swaps that a gate refused. The catalog has what happened; this has what did not.

    <tenant>/gates/<10^20 - 1 - n>

A swap that is tried again with the same result adds no entry. Details of a gate, which may quote documents, stay out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ragfence.core.operations import encoded
from ragfence.errors import FormatCorrupt, FormatTooNew
from ragfence.indexes.gates import GateResult
from ragfence.stores.object_log import Numbered, NumberedLog
from ragfence.stores.objects import ObjectStore

VERSION = 1
ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class GateRefusal:
    """A swap that was refused."""

    alias: str
    index_hash: str
    at_ms: int
    actor: str
    failed: tuple[dict[str, Any], ...]
    """gate, value and limit of each gate that failed"""


class GateLog:
    def __init__(self, tenant: str, objects: ObjectStore) -> None:
        self._log = NumberedLog(objects, f"{encoded(tenant)}/gates")

    def add(self, alias: str, index_hash: str, at_ms: int, actor: str, failed: Sequence[GateResult]) -> None:
        measured = tuple({"gate": each.gate, "value": each.value, "limit": each.limit} for each in failed)
        refusal = GateRefusal(alias, index_hash, at_ms, actor, measured)
        data = json.dumps({"version": VERSION, **asdict(refusal)}, separators=(",", ":"), default=str).encode()
        for _ in range(ATTEMPTS):
            newest = self._log.newest()
            if newest is not None:
                last = self._decode(newest)
                if (last.alias, last.index_hash) == (alias, index_hash) and _same(last.failed, data):
                    return
            if self._log.append(newest.number + 1 if newest else 1, data):
                return

    def at(self, number: int) -> GateRefusal | None:
        data = self._log.get(number)
        return None if data is None else self._decode(Numbered(number, data))

    def head(self) -> int:
        """The number of the newest entry; 0 if there is none."""
        newest = self._log.newest()
        return newest.number if newest else 0

    def _decode(self, numbered: Numbered) -> GateRefusal:
        name = self._log.name(numbered.number)
        try:
            values = json.loads(numbered.data)
            if values.pop("version") > VERSION:
                raise FormatTooNew(f"{name} has a newer format than this version of ragfence reads ({VERSION})")
            return GateRefusal(**{**values, "failed": tuple(values["failed"])})
        except (ValueError, KeyError, TypeError) as broken:
            raise FormatCorrupt(f"{name} is not a valid entry of the gates: {broken!r}") from broken


def _same(failed: Sequence[dict[str, Any]], data: bytes) -> bool:
    """Whether an entry measured the same, as it is stored."""
    return bool(list(failed) == json.loads(data)["failed"])
