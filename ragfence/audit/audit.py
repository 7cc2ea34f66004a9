"""`fence.audit`: what was decided, why, and what it saved. Every decision is a row, and none is counted twice.

Rows are in the fence store first; `drain` moves them into the ledger, and everything here reads both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING
from unicodedata import normalize

from ragfence.audit import columns
from ragfence.audit.auditor import AuditFinding, AuditReport, check, keys_in_log
from ragfence.audit.ledger import Ledger, Wanted
from ragfence.audit.row_reader import Rows
from ragfence.audit.timeline import Timeline, tell
from ragfence.core.decision_rows import Row
from ragfence.core.hashing import SHARDS, shard_of
from ragfence.core.layout import FENCED_OUT, SEAL_POSITION, RowKind
from ragfence.core.operations import Operation, key_from_text
from ragfence.core.policy import Policy
from ragfence.documents.rewrite import RevisionFact
from ragfence.errors import Hint, ObjectsRequired, ValidationError
from ragfence.stores.fences import FenceStore
from ragfence.stores.objects import ObjectStore

if TYPE_CHECKING:
    import pyarrow

    from ragfence.audit.anomalies import Anomaly
    from ragfence.audit.drain import Drained
    from ragfence.audit.queries import ConflictCase, Contention, Occurrence
    from ragfence.audit.savings import Savings

Moment = str | datetime | timedelta | None

CHECKED_BYTES = 32 << 20
"""so much of the ledger is audited at a time; as rows it takes some twenty times the room"""

_SPAN = re.compile(r"(\d+)\s*(ms|s|m|h|d)")
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class Audit:
    def __init__(self, fences: FenceStore, objects: ObjectStore | None = None, policy: Policy | None = None) -> None:
        self._fences = fences
        self._objects = objects
        self._policy = policy or Policy()

    def drain(self, *, every_day: bool = False) -> Drained:
        """Moves the decision rows from the fence store into the ledger, compacts it, and removes what is too old.

        Run it now and then; it may be killed anywhere and run by many at once. `every_day` compacts the days, too, that
        were left alone for a week.

        >>> fence.audit.drain().rows  # doctest: +SKIP
        """
        from ragfence.audit.drain import Drainer

        if self._rows.ledger is None:
            raise ObjectsRequired("drain: needs an object store, and this fence was opened without one")
        return Drainer(self._fences, self._rows.ledger, self._policy.audit).drain(every_day=every_day)

    def rows(self, since: Moment = None, until: Moment = None) -> Iterator[Row]:
        """Every row once, oldest first, however often it was written."""
        return self._rows.rows(self._wanted(since, until))

    def decisions(
        self,
        since: Moment = None,
        until: Moment = None,
        *,
        tenant: str | None = None,
        kind: str | None = None,
        decision: str | None = None,
        phase: str | None = None,
        source_id: str | None = None,
    ) -> pyarrow.Table:
        """The decision rows as a pyarrow Table, oldest first.

        `phase` tells a claim from its seal: a call that performs an effect leaves a row of each, both with the decision
        `new`. `counts` counts answers.

        `since` and `until` take "24h", "7d", an ISO time, a datetime or a timedelta back from now. Only the days that
        they name are read. `tenant` is the fence's own.
        """
        if tenant not in (None, self._fences.tenant):
            raise ValidationError(
                f"these are the decisions of {self._fences.tenant!r}, not of {tenant!r}",
                hint=Hint(
                    "open a fence of that tenant: ragfence.open(..., tenant=...)", cli="name that tenant: --tenant"
                ),
            )
        wanted = self._wanted(since, until, kind=kind, decision=decision, phase=phase, source_id=source_id)
        return self._rows.table(wanted, columns.decision_names())

    def check(self, progress: Callable[[int], None] = lambda rows: None) -> AuditReport:
        """Replays all rows, and the log of the aliases, and proves the invariants, or names what breaks them.

        A few shards at a time, whatever the size of the ledger: no promise spans two of them.
        """
        count = 1
        while count < SHARDS and self._rows.ledger_bytes() > count * CHECKED_BYTES:
            count *= 2
        report = AuditReport(0, 0)
        for start in range(0, SHARDS, SHARDS // count):
            # The last share has what no key should have, a shard beyond the 64: the auditor leaves nothing out.
            end = start + SHARDS // count
            rows = self._rows.rows(Wanted(shards=range(start, end if end < SHARDS else 256)))
            report += check(
                rows,
                tenant=self._fences.tenant,
                whole=self._objects is not None,
                newest_epoch=self._newest_epoch,
            )
            progress(report.rows)
        if self._objects is None:
            return report
        report = replace(report, findings=(*report.findings, *self._unknown(report.unproven)), unproven=())
        from ragfence.indexes.alias_checks import alias_findings
        from ragfence.indexes.build_log import BuildLog
        from ragfence.indexes.catalog import Catalog

        tenant = self._fences.tenant
        found = alias_findings(Catalog(tenant, self._objects), BuildLog(tenant, self._objects))
        aliases = tuple(
            AuditFinding(each.invariant, f"{each.alias}@{each.generation}", each.text, ()) for each in found
        )
        return replace(report, findings=(*report.findings, *aliases))

    def explain(self, key: str, *, every: bool = False) -> Timeline:
        """What happened to a key, in the order in which it happened; without events when no row names it.

        Answers that repeat each other are told once, with their count; `every=True` tells each.
        """
        wanted = key_from_text(key)
        stories = tell(self._rows.rows(_of_key(wanted)), every=every)
        return stories[0] if stories else Timeline(wanted.hex())

    def operation_of(self, key: bytes) -> Operation:
        """The operation behind a key, from its rows."""

        def named(row: Row) -> Operation | None:
            values = row.columns()
            if not values["source_id"]:  # written by a purge, which knows only its digest
                return None
            names = ("kind", "source_type", "source_id", "revision", "index_hash", "action")
            sequence = values.get("sequence")
            operation = Operation(
                **{name: values[name] or "" for name in names},
                sequence=int(sequence) if sequence else None,
                tenant=self._fences.tenant,
            )
            return operation if operation.key == key else None

        found: Operation | None = self._rows.first(_of_key(key), named)
        if found is not None:
            return found
        raise ValidationError(
            f"no decision row names the key {key.hex()}",
            hint=Hint(
                "pass the Operation itself: fence.release(Operation(...))",
                cli="check the key: `ragfence keys` lists those there are",
                http="check the key: GET /v1/keys lists those there are",
            ),
        )

    def caused(self, source_id: str, event_id: str) -> Row | None:
        """The row by which an event moved a document; None if it moved nothing, or nobody remembers."""

        def sealed(row: Row) -> Row | None:
            return row if row.position == SEAL_POSITION and row.sealed_at_ms and not row.flags & FENCED_OUT else None

        found: Row | None = self._rows.first(self._wanted(None, None, source_id=source_id, event_id=event_id), sealed)
        return found

    def counts(
        self, since: Moment = None, until: Moment = None, *, by: Sequence[str] = ("kind", "decision")
    ) -> pyarrow.Table:
        """How many answers, by day and by columns that hold text: day, then `by`, then `count`.

        Answers are the rows whose phase is seal, replay, conflict, in_flight or stale: a call that performed an effect
        counts once, not once for its claim and once for its seal. With "phase" in `by`, every row is counted.
        """
        from ragfence.audit import queries

        unknown = set(by) - set(columns.text_names())
        if unknown:
            raise ValidationError(
                f"decisions cannot be counted by {', '.join(sorted(unknown))}",
                hint=f"by any of {', '.join(columns.text_names())}",
            )
        return queries.counts(self._rows, self._wanted(since, until), by)

    def savings(self, since: Moment = None, until: Moment = None) -> Savings:
        """What was answered without an effect: by kind, and for documents in characters and snippets."""
        from ragfence.audit.savings import savings

        return savings(self._rows, self._wanted(since, until), self._objects, self._fences.tenant)

    def conflicts(self, since: Moment = None, until: Moment = None, *, kind: str | None = None) -> list[ConflictCase]:
        """The payloads that were refused, oldest first, with what differs where the policy keeps it."""
        from ragfence.audit import queries

        return queries.conflicts(self._rows, self._wanted(since, until, kind=kind))

    def timeline(self, source_id: str, since: Moment = None, *, every: bool = False) -> list[Occurrence]:
        """What happened to all revisions of a source, in order. `every`: equal answers in a row are not collapsed."""
        from ragfence.audit import queries

        return queries.timeline(self._rows, self._wanted(since, None, source_id=source_id), every=every)

    def contention(self, since: Moment = None, until: Moment = None) -> Contention:
        """Who waited for whom, how long, and whose leases ran out."""
        from ragfence.audit import queries

        return queries.contention(self._rows, self._wanted(since, until))

    def anomalies(self, since: Moment = "28d") -> list[Anomaly]:
        """What somebody should look at: see `ragfence.audit.anomalies`."""
        from ragfence.audit.anomalies import anomalies

        return anomalies(self._rows, self._wanted(since, None), self._fences, self._policy)

    def told_of_documents(self, concerned: Callable[[int, bytes], bool]) -> list[RevisionFact]:
        """What rows tell of contents that were sealed in some segments, by their (epoch, batch), or ended."""
        from ragfence.audit.sealed import told_of_documents

        return told_of_documents(self._rows, concerned)

    def batches(self, since: Moment = None, until: Moment = None) -> Iterator[pyarrow.Table]:
        """The decisions as tables of a day each, oldest first: for what does not fit into memory."""
        wanted = self._wanted(since, until)
        for day in self._rows.days(wanted):
            of_day = wanted.in_day(day)
            if (table := self._rows.table(of_day, columns.decision_names())).num_rows:
                yield table

    def _newest_epoch(self) -> int:
        from ragfence.engine.epochs import Epochs

        if self._objects is None:
            return 0
        known = Epochs(self._fences.tenant, self._objects).known()
        return max(known.newest_begun, known.newest_complete)

    def _unknown(self, unproven: Sequence[AuditFinding]) -> Iterator[AuditFinding]:
        """Those about documents that are not in the log and did not leave it: what leaves it has an `ended` row."""
        if not unproven or self._objects is None:
            return
        wanted = {bytes.fromhex(finding.key) for finding in unproven}
        gone = wanted - keys_in_log(self._fences.tenant, self._objects, wanted)
        left = {key for key in gone if any(row.kind is RowKind.ENDED for row in self._rows.rows(_of_key(key)))}
        for finding in unproven:
            if bytes.fromhex(finding.key) in gone - left:
                yield finding

    @cached_property
    def _rows(self) -> Rows:
        ledger = Ledger(self._fences.tenant, self._objects) if self._objects is not None else None
        return Rows(self._fences, ledger)

    def _wanted(self, since: Moment, until: Moment, **values: str | None) -> Wanted:
        now_ms, shards = self._fences.now_ms(), range(256)
        # As operations have them: a file name from a Mac is the same text in other characters.
        told = {name: normalize("NFC", str(value)) for name, value in values.items() if value is not None}
        if (source_id := told.get("source_id")) is not None:
            shard = shard_of(self._fences.tenant, source_id)
            shards = range(shard, shard + 1)
        return Wanted(_moment_ms(since, now_ms, 0), _moment_ms(until, now_ms, 2**62), shards, tuple(told.items()))


def _of_key(key: bytes) -> Wanted:
    return Wanted(shards=range(key[0], key[0] + 1), values=(("idempotency_key", key.hex()),))


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
