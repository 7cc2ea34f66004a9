"""`fence.audit`: the decision rows as a table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from ragfence.audit.checking import Finding, Report, check
from ragfence.audit.story import Story, tell
from ragfence.core.decisions import NOBODY
from ragfence.core.operations import Operation, key_from_text
from ragfence.core.receipts import default_effect_id
from ragfence.core.rows import Row
from ragfence.errors import ValidationError
from ragfence.stores.fences import FenceStore
from ragfence.stores.objects import ObjectStore

if TYPE_CHECKING:
    import pyarrow

Moment = str | datetime | timedelta | None

_SPAN = re.compile(r"(\d+)\s*(ms|s|m|h|d)")
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class Audit:
    def __init__(self, fences: FenceStore, objects: ObjectStore | None = None) -> None:
        self._fences = fences
        self._objects = objects

    def rows(self, since: Moment = None, until: Moment = None) -> Iterator[Row]:
        """Every row once, oldest first, however often it was written."""
        now_ms = self._fences.now_ms()
        first, last = _moment_ms(since, now_ms, 0), _moment_ms(until, now_ms, 2**62)
        seen = {row.row_id: row for row in self._fences.rows(first) if row.ts_ms < last}
        yield from sorted(seen.values(), key=lambda row: (row.ts_ms, row.fence, row.position))

    def decisions(
        self,
        since: Moment = None,
        until: Moment = None,
        *,
        kind: str | None = None,
        decision: str | None = None,
        source_id: str | None = None,
    ) -> pyarrow.Table:
        """The decisions as a pyarrow Table, oldest first.

        `since` and `until` take "24h", "7d", an ISO time, a datetime or a timedelta back from now.
        """
        import pyarrow

        wanted = {"kind": kind, "decision": decision, "source_id": source_id}
        columns = [
            values
            for values in (self._columns(row) for row in self.rows(since, until))
            if all(value is None or values[name] == value for name, value in wanted.items())
        ]
        return pyarrow.Table.from_pylist(columns, schema=_schema())

    def check(self) -> Report:
        """Replays all rows, and the log of the aliases, and proves the invariants, or names what breaks them."""
        report = check(self.rows())
        if self._objects is None:
            return report
        from ragfence.indexes.alias_checks import alias_findings
        from ragfence.indexes.builds import Builds
        from ragfence.indexes.catalog import Catalog

        tenant = self._fences.tenant
        found = alias_findings(Catalog(tenant, self._objects), Builds(tenant, self._objects))
        aliases = tuple(Finding(each.invariant, f"{each.alias}@{each.generation}", each.text, ()) for each in found)
        return replace(report, findings=(*report.findings, *aliases))

    def explain(self, key: str, *, every: bool = False) -> Story:
        """What happened to a key, in the order in which it happened; without events when no row names it.

        Answers that repeat each other are told once, with their count; `every=True` tells each.
        """
        wanted = key_from_text(key)
        stories = tell((row for row in self._fences.rows() if row.key == wanted), every=every)
        return stories[0] if stories else Story(wanted.hex())

    def operation_of(self, key: bytes) -> Operation:
        """The operation behind a key, from its rows."""
        for row in self._fences.rows():
            if row.key == key:
                values = row.columns()
                if not values["source_id"]:  # written by a purge, which knows only its digest
                    continue
                names = ("kind", "source_type", "source_id", "revision", "index_hash", "action")
                sequence = values.get("sequence")
                operation = Operation(
                    **{name: values[name] or "" for name in names},
                    sequence=int(sequence) if sequence else None,
                    tenant=self._fences.tenant,
                )
                if operation.key == key:
                    return operation
        raise ValidationError(
            f"no decision row names the key {key.hex()}",
            hint="pass the Operation itself: fence.release(Operation(...))",
        )

    def _columns(self, row: Row) -> dict[str, Any]:
        values = row.columns()
        values["tenant"] = self._fences.tenant
        for name in ("ts", "first_seen", "sealed_at", "expires_at"):
            if values[name] is not None:
                values[name] = datetime.fromtimestamp(values[name] / 1000, UTC)
        if values["effect_id"] is None and row.sealed_at_ms and row.winner != NOBODY:
            values["effect_id"] = default_effect_id(row.key)
        return values


def _schema() -> pyarrow.Schema:
    import pyarrow as pa

    text, number, time = pa.string(), pa.int64(), pa.timestamp("ms", tz="UTC")
    return pa.schema(
        [
            ("row_id", text),
            ("ts", time),
            ("tenant", text),
            ("kind", text),
            ("decision", text),
            ("flags", pa.list_(text)),
            ("idempotency_key", text),
            ("payload_hash", text),
            ("effect_id", text),
            ("source_type", text),
            ("source_id", text),
            ("revision", text),
            ("index_hash", text),
            ("action", text),
            ("event_id", text),
            ("correlation_id", text),
            ("attempt", number),
            ("fence", text),
            ("owner", text),
            ("run_id", text),
            ("route", text),
            ("winner", text),
            ("first_seen", time),
            ("sealed_at", time),
            ("expires_at", time),
            ("waited_ms", number),
            ("error_code", text),
            ("diff_size", number),
            ("saved", number),
        ]
    )


def _moment_ms(moment: Moment, now_ms: int, default: int) -> int:
    if moment is None:
        return default
    wrong = ValidationError(f"{moment!r} is no moment", hint='"24h", "7d", "2026-01-31T12:00:00+00:00", or a datetime')
    if isinstance(moment, timedelta):
        return now_ms - int(moment.total_seconds() * 1000)
    if isinstance(moment, str):
        if span := _SPAN.fullmatch(moment):
            return now_ms - int(span[1]) * _UNIT_MS[span[2]]
        try:
            moment = datetime.fromisoformat(moment)
        except ValueError:
            raise wrong from None
    if not isinstance(moment, datetime):
        raise wrong
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)
