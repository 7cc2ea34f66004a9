"""`fence.audit`: what was decided, why, and what it saved. Every decision is a row, and each row counts once.

Rows are written to the fence store; `drain` moves them into the ledger. All queries read both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING
from unicodedata import normalize

from ragfence._progress import without_stop_iteration
from ragfence.audit import columns
from ragfence.audit.auditor import AuditFinding, AuditReport, check, keys_in_log
from ragfence.audit.ledger import Ledger, RowQuery
from ragfence.audit.row_reader import RowReader
from ragfence.audit.timeline import Timeline, build_timelines
from ragfence.core.decision_rows import Row
from ragfence.core.hashing import SHARDS, shard_of
from ragfence.core.layout import FENCED_OUT, SEAL_POSITION, RowKind
from ragfence.core.moments import Moment, parse_moment
from ragfence.core.operations import Operation, key_from_text
from ragfence.core.policy import Policy
from ragfence.documents.rewrite import RevisionFact
from ragfence.errors import Hint, ObjectsRequired, ValidationError
from ragfence.stores.fences import FenceStore
from ragfence.stores.objects import ObjectStore

if TYPE_CHECKING:
    import pyarrow

    from ragfence.audit.anomalies import Anomaly
    from ragfence.audit.deliveries import InboxEvent
    from ragfence.audit.drain import DrainReport
    from ragfence.audit.queries import ConflictCase, Contention, Occurrence
    from ragfence.audit.savings import Savings

CHECKED_BYTES = 32 << 20
"""how much of the ledger is audited at a time; in memory, its rows take about twenty times as much"""


class Audit:
    def __init__(self, fences: FenceStore, objects: ObjectStore | None = None, policy: Policy | None = None) -> None:
        self._fences = fences
        self._objects = objects
        self._policy = policy or Policy()

    def drain(self, *, every_day: bool = False) -> DrainReport:
        """Moves decision rows from the fence store into the ledger, compacts it, and deletes expired days.

        Run it regularly. It may be killed anywhere, and several processes may run it at once.

        Args:
            every_day: Also compact days that are older than a week.

        Raises:
            ObjectsRequired: The fence has no object store.

        >>> fence.audit.drain().rows  # doctest: +SKIP
        """
        from ragfence.audit.drain import Drainer

        if self._rows.ledger is None:
            raise ObjectsRequired("drain needs an object store, and this fence was opened without one")
        return Drainer(self._fences, self._rows.ledger, self._policy.audit).drain(every_day=every_day)

    def rows(self, since: Moment = None, until: Moment = None) -> Iterator[Row]:
        """Yields every row once, oldest first, however often it was written."""
        return self._rows.rows(self._query(since, until))

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
        """Returns the decision rows as a pyarrow Table, oldest first.

        A call that runs an effect leaves two rows with the decision `new`: one for its claim, one for its seal. `phase`
        tells them apart. To count answers, use `counts`.

        Args:
            since: "24h", "7d", an ISO time, a datetime, or a timedelta back from now. Earlier days are not read.
            until: As `since`; rows at or after this moment are left out.
            tenant: Must be the tenant of this fence, if given.
            kind: Only operations of this kind.
            decision: Only rows with this decision, such as "duplicate".
            phase: Only rows of this phase, such as "seal".
            source_id: Only rows of this source. For documents, the doc_id.

        >>> fence.audit.decisions(since="24h").num_rows  # doctest: +SKIP
        """
        if tenant not in (None, self._fences.tenant):
            raise ValidationError(
                f"this fence has the decisions of {self._fences.tenant!r}, not of {tenant!r}",
                hint=Hint(
                    "open a fence of that tenant: ragfence.open(..., tenant=...)", cli="name that tenant: --tenant"
                ),
            )
        query = self._query(since, until, kind=kind, decision=decision, phase=phase, source_id=source_id)
        return self._rows.table(query, columns.decision_names())

    def check(self, progress: Callable[[int], None] = lambda rows: None) -> AuditReport:
        """Replays all rows and the log of the aliases, and reports every invariant that they break.

        Works on a few shards at a time, so memory does not grow with the ledger; no invariant spans two shards.

        Args:
            progress: Called with the number of rows checked so far.
        """
        progress = without_stop_iteration(progress)
        count = 1
        while count < SHARDS and self._rows.ledger_bytes() > count * CHECKED_BYTES:
            count *= 2
        report = AuditReport(0, 0)
        for start in range(0, SHARDS, SHARDS // count):
            # The last portion includes shards above 64. No key should have one, but the auditor leaves no row out.
            end = start + SHARDS // count
            rows = self._rows.rows(RowQuery(shards=range(start, end if end < SHARDS else 256)))
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
        """Returns what happened to a key, in order. The timeline has no events if no row names the key.

        Args:
            key: The idempotency key in hex.
            every: Return every answer, instead of one event with a count for equal answers in a row.
        """
        query = key_from_text(key)
        timelines = build_timelines(self._rows.rows(_of_key(query)), every=every)
        return timelines[0] if timelines else Timeline(query.hex())

    def operation_of(self, key: bytes) -> Operation:
        """Returns the operation of a key, found in its rows.

        Raises:
            ValidationError: No row names the key.
        """

        def named(row: Row) -> Operation | None:
            values = row.columns()
            if not values["source_id"]:  # written by a purge, which knows only the digest of the source
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
                cli="check the key: `ragfence keys` lists all keys",
                http="check the key: GET /v1/keys lists all keys",
            ),
        )

    def find_cause(self, source_id: str, event_id: str) -> Row | None:
        """Returns the row of the event that changed a document; None if it changed nothing or has no row any more."""

        def sealed(row: Row) -> Row | None:
            return row if row.position == SEAL_POSITION and row.sealed_at_ms and not row.flags & FENCED_OUT else None

        found: Row | None = self._rows.first(self._query(None, None, source_id=source_id, event_id=event_id), sealed)
        return found

    def counts(
        self, since: Moment = None, until: Moment = None, *, by: Sequence[str] = ("kind", "decision")
    ) -> pyarrow.Table:
        """Counts answers by day and by text columns. The columns of the table are day, then `by`, then `count`.

        Answers are rows whose phase is seal, replay, conflict, in_flight or stale, so a call that ran an effect counts
        once, not once for its claim and once for its seal. With "phase" in `by`, every row is counted.

        Raises:
            ValidationError: `by` names a column that is unknown or not text.
        """
        from ragfence.audit import queries

        unknown = set(by) - set(columns.text_names())
        if unknown:
            raise ValidationError(
                f"decisions cannot be counted by {', '.join(sorted(unknown))}",
                hint=f"count by any of {', '.join(columns.text_names())}",
            )
        return queries.counts(self._rows, self._query(since, until), by)

    def savings(self, since: Moment = None, until: Moment = None) -> Savings:
        """Returns what was answered without an effect: by kind, and for documents in characters and snippets."""
        from ragfence.audit.savings import savings

        return savings(self._rows, self._query(since, until), self._objects, self._fences.tenant)

    def conflicts(self, since: Moment = None, until: Moment = None, *, kind: str | None = None) -> list[ConflictCase]:
        """Returns the refused payloads, oldest first, with their difference if the policy keeps it."""
        from ragfence.audit import queries

        return queries.conflicts(self._rows, self._query(since, until, kind=kind))

    def inbox(self, since: Moment = None, until: Moment = None, *, source: str | None = None) -> list[InboxEvent]:
        """Returns the events that webhooks and queues received, each once, with what became of it, oldest first.

        Args:
            since: As for `decisions`. An event is included if any of its deliveries was answered in this time.
            until: As for `decisions`.
            source: Only events of this provider or queue.

        >>> fence.audit.inbox(since="24h")[0].result  # doctest: +SKIP
        """
        from ragfence.audit.deliveries import inbox

        found = inbox(self._rows, self._query(since, until))
        return [event for event in found if source in (None, event.source)]

    def timeline(self, source_id: str, since: Moment = None, *, every: bool = False) -> list[Occurrence]:
        """Returns what happened to all revisions of a source, in order. `every`: equal answers are not collapsed."""
        from ragfence.audit import queries

        return queries.timeline(self._rows, self._query(since, None, source_id=source_id), every=every)

    def contention(self, since: Moment = None, until: Moment = None) -> Contention:
        """Returns how long calls waited for leases of others, and how many leases expired."""
        from ragfence.audit import queries

        return queries.contention(self._rows, self._query(since, until))

    def anomalies(self, since: Moment = "28d") -> list[Anomaly]:
        """Returns what deserves attention, such as a drop of the hit rate; see `ragfence.audit.anomalies`."""
        from ragfence.audit.anomalies import anomalies

        return anomalies(self._rows, self._query(since, None), self._fences, self._policy)

    def revision_facts(self, concerned: Callable[[int, bytes], bool]) -> list[RevisionFact]:
        """Returns which revisions were sealed or ended in certain segments, according to the rows.

        Args:
            concerned: Called with the epoch and batch of a segment; returns whether its revisions are wanted.
        """
        from ragfence.audit.queries import revision_facts

        return revision_facts(self._rows, concerned)

    def batches(self, since: Moment = None, until: Moment = None) -> Iterator[pyarrow.Table]:
        """Yields the decisions as one table per day, oldest first, for more rows than fit into memory."""
        query = self._query(since, until)
        for day in self._rows.days(query):
            of_day = query.limit_to_day(day)
            if (table := self._rows.table(of_day, columns.decision_names())).num_rows:
                yield table

    def outcomes(self, since: Moment = None, until: Moment = None) -> Iterator[pyarrow.Table]:
        """Yields what each call was answered with, as one table per day, oldest first.

        The columns are key, payload_hash, status (`complete`, `failed`, `conflict`, `in_progress`, `stale`), http_code
        (what the HTTP API answers in this case), result_id and notes. A replay of a failure that was sealed before
        `since` counts as `complete`, because only the row of its seal says so.
        """
        from ragfence.audit import queries

        policy = self._policy
        failed: set[str] = set()
        for table in self.batches(since, until):
            yield queries.outcomes(
                table, failed, conflict_status=policy.on_conflict.status, in_flight_status=policy.http.in_progress
            )

    def _newest_epoch(self) -> int:
        from ragfence.engine.epochs import Epochs

        if self._objects is None:
            return 0
        known = Epochs(self._fences.tenant, self._objects).known()
        return max(known.newest_begun, known.newest_complete)

    def _unknown(self, unproven: Sequence[AuditFinding]) -> Iterator[AuditFinding]:
        """Yields findings about documents that are not in the log and never left it: what leaves has an `ended` row."""
        if not unproven or self._objects is None:
            return
        query = {bytes.fromhex(finding.key) for finding in unproven}
        gone = query - keys_in_log(self._fences.tenant, self._objects, query)
        left = {key for key in gone if any(row.kind is RowKind.ENDED for row in self._rows.rows(_of_key(key)))}
        for finding in unproven:
            if bytes.fromhex(finding.key) in gone - left:
                yield finding

    @cached_property
    def _rows(self) -> RowReader:
        ledger = Ledger(self._fences.tenant, self._objects) if self._objects is not None else None
        return RowReader(self._fences, ledger)

    def _query(self, since: Moment, until: Moment, **values: str | None) -> RowQuery:
        now_ms, shards = self._fences.now_ms(), range(256)
        # Normalized as operations are: macOS writes the same file name with other code points.
        filters = {name: normalize("NFC", str(value)) for name, value in values.items() if value is not None}
        if (source_id := filters.get("source_id")) is not None:
            shard = shard_of(self._fences.tenant, source_id)
            shards = range(shard, shard + 1)
        return RowQuery(
            parse_moment(since, now_ms, 0), parse_moment(until, now_ms, 2**62), shards, tuple(filters.items())
        )


def _of_key(key: bytes) -> RowQuery:
    return RowQuery(shards=range(key[0], key[0] + 1), values=(("idempotency_key", key.hex()),))
