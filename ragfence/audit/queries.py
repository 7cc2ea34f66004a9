"""Queries over decision rows: counts, waits, conflicts, and what happened to a source.

Everything is computed day by day from a few columns, so memory is bounded whatever the size of the ledger.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragfence.audit.ledger import RowQuery
from ragfence.audit.row_reader import RowReader
from ragfence.audit.timeline import TimelineEvent, build_timelines
from ragfence.core.decision_rows import ANSWER_PHASES, DECISION_TEXT
from ragfence.core.layout import BATCH_BYTES, RowKind
from ragfence.core.operations import FenceNumber
from ragfence.documents.rewrite import EndedRevision, RevisionFact

if TYPE_CHECKING:
    import pyarrow


HOTTEST = 10


@dataclass(frozen=True, slots=True)
class ConflictCase:
    """A payload that was refused, because its key is known with another payload."""

    ts_ms: int
    key: str
    kind: str
    source_id: str
    owner: str
    payload_hash: str
    first_payload_hash: str
    """of the operation that was sealed or is running under the key; empty if no row has it"""
    diff: tuple[dict[str, Any], ...] | None
    """JSON Patch (RFC 6902) from the first payload to this one, both redacted; None unless the policy keeps it"""
    diff_size: int


@dataclass(frozen=True, slots=True)
class KindContention:
    kind: str
    calls: int
    waited: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    longest_ms: int
    in_flight: int
    takeovers: int
    fenced_out: int
    """effects that ran twice, because an owner outlived its lease"""


@dataclass(frozen=True, slots=True)
class Contention:
    kinds: tuple[KindContention, ...]
    hottest: tuple[tuple[str, str, int], ...]
    """(kind, source_id, milliseconds waited), longest first"""


@dataclass(frozen=True, slots=True)
class Occurrence:
    key: str
    revision: str
    event: TimelineEvent


def counts(rows: RowReader, query: RowQuery, by: Sequence[str]) -> pyarrow.Table:
    """Counts answers by day and columns: day, then `by`, then `count`. Counts every row if `by` has the phase."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names = list(by)
    answers = pa.array([phase.value for phase in ANSWER_PHASES])

    def counted(table: pyarrow.Table) -> pyarrow.Table:
        if "phase" not in names:
            table = table.filter(pc.is_in(table.column("phase"), answers)).select(names)
        found = table.group_by(names).aggregate([([], "count_all")])
        return found.cast(pa.schema([*((name, pa.string()) for name in names), ("count_all", pa.int64())]))

    needed = list(dict.fromkeys((*names, "phase")))
    days = rows.map_days(query, needed, counted, dictionaries=names)
    tables = [
        table.rename_columns([*names, "count"]).add_column(0, "day", pa.array([day] * table.num_rows, pa.string()))
        for day, table in days.items()
        if table.num_rows
    ]
    if not tables:
        fields = [("day", pa.string()), *((name, pa.string()) for name in names), ("count", pa.int64())]
        return pa.schema(fields).empty_table()
    return pa.concat_tables(tables).sort_by([(name, "ascending") for name in ("day", *names)])


_OUTCOMES = {
    "seal": ("complete", 201, "created"),
    "replay": ("complete", 201, "replayed"),
    "conflict": ("conflict", 409, "payload mismatch"),
    "in_flight": ("in_progress", 202, "another call is executing the operation"),
    "stale": ("stale", 409, "a newer sequence was applied before"),
}


def outcomes(
    decisions: pyarrow.Table, failed: set[str], *, conflict_status: int = 409, in_flight_status: int = 202
) -> pyarrow.Table:
    """What each call was answered with: key, payload_hash, status, http_code, result_id, notes.

    Args:
        decisions: Decision rows, as `fence.audit.decisions()` returns them.
        failed: The keys that were sealed as failures before these rows; those of these rows are added. The row of a
            replay does not say what was replayed.
        conflict_status: The HTTP status of a conflict, by the policy.
        in_flight_status: The HTTP status while another call is executing the operation, by the policy.
    """
    import pyarrow as pa

    codes = {409: conflict_status, 202: in_flight_status}
    answers: list[tuple[str | None, str | None, str, int | None, str | None, str]] = []
    names = ("phase", "decision", "idempotency_key", "payload_hash", "effect_id", "error_code")
    for values in zip(*(decisions.column(name).to_pylist() for name in names), strict=True):
        phase, decision, key, payload_hash, effect_id, error_code = values
        if phase not in _OUTCOMES:
            continue
        status, code, notes = _OUTCOMES[phase]
        if phase == "seal":
            (failed.add if error_code else failed.discard)(key)
        if status == "complete" and key in failed:
            answers.append((key, payload_hash, "failed", None, None, error_code or notes))
            continue
        if phase == "seal" and decision == "duplicate":  # the effect ran, and an earlier one counts
            notes = "replayed"
        answered = effect_id if status == "complete" else None
        http_code = code if phase == "stale" else codes.get(code, code)
        answers.append((key, payload_hash, status, http_code, answered, error_code or notes))
    text = pa.string()
    shape = pa.schema(
        [
            ("key", text),
            ("payload_hash", text),
            ("status", text),
            ("http_code", pa.int64()),
            ("result_id", text),
            ("notes", text),
        ]
    )
    columns = list(zip(*answers, strict=True)) or [() for _ in shape]
    return pa.Table.from_arrays(
        [pa.array(column, one.type) for column, one in zip(columns, shape, strict=True)], schema=shape
    )


def conflicts(rows: RowReader, query: RowQuery) -> list[ConflictCase]:
    """Returns the refused payloads, oldest first."""
    names = ["row_id", "ts", "idempotency_key", "kind", "source_id", "owner", "payload_hash", "diff", "diff_size"]
    refused = rows.table(query._replace(values=(*query.values, ("decision", "conflict"))), names).to_pylist()
    granted: dict[str, list[dict[str, Any]]] = {}
    for key in {row["idempotency_key"] for row in refused}:
        shard = bytes.fromhex(key)[0]
        known = RowQuery(shards=range(shard, shard + 1), values=(("idempotency_key", key), ("decision", "new")))
        granted[key] = rows.table(known, ["row_id", "ts", "payload_hash"]).to_pylist()
    return [
        ConflictCase(
            ts_ms=int(row["ts"].timestamp() * 1000),
            key=row["idempotency_key"],
            kind=row["kind"] or "",
            source_id=row["source_id"] or "",
            owner=row["owner"] or "",
            payload_hash=row["payload_hash"],
            first_payload_hash=_payload_before(row, granted[row["idempotency_key"]]),
            diff=tuple(json.loads(row["diff"])) if row["diff"] else None,
            diff_size=row["diff_size"] or 0,
        )
        for row in refused
    ]


def _payload_before(refused: dict[str, Any], granted: list[dict[str, Any]]) -> str:
    """The payload of the newest attempt before the refusal. Earlier lives of the key may have had another one."""
    before = (each for each in reversed(granted) if each["ts"] <= refused["ts"])
    return next((each["payload_hash"] for each in before if each["row_id"][:24] != refused["row_id"][:24]), "")


def timeline(rows: RowReader, query: RowQuery, *, every: bool) -> list[Occurrence]:
    """Returns the events of all revisions of a source, in order."""
    found = [
        Occurrence(story.key, story.revision, event)
        for story in build_timelines(rows.rows(query), every=every)
        for event in story.events
    ]
    return sorted(found, key=lambda each: each.event.ts_ms)


def contention(rows: RowReader, query: RowQuery) -> Contention:
    import pyarrow as pa
    import pyarrow.compute as pc

    names = ["row_id", "kind", "source_id", "decision", "flags", "waited_ms"]
    days = rows.map_days(query, names, _call_waits)
    if not days:
        return Contention((), ())
    calls = pa.concat_tables(days.values())
    kinds = []
    for kind in sorted(pc.unique(calls.column("kind")).to_pylist()):
        of_kind = calls.filter(pc.equal(calls.column("kind"), kind))
        waits = of_kind.column("waited_ms").filter(pc.greater(of_kind.column("waited_ms"), 0))
        p50, p95, p99 = pc.quantile(waits, [0.5, 0.95, 0.99]).to_pylist() if len(waits) else (0.0, 0.0, 0.0)
        kinds.append(
            KindContention(
                kind,
                of_kind.num_rows,
                len(waits),
                p50,
                p95,
                p99,
                pc.max(of_kind.column("waited_ms")).as_py() or 0,
                *(pc.sum(of_kind.column(name)).as_py() or 0 for name in ("in_flight", "takeovers", "fenced_out")),
            )
        )
    by_source = calls.group_by(["kind", "source_id"]).aggregate([("waited_ms", "sum")])
    by_source = by_source.filter(pc.greater(by_source.column("waited_ms_sum"), 0))
    hottest = by_source.sort_by([("waited_ms_sum", "descending")]).slice(0, HOTTEST).to_pylist()
    return Contention(
        tuple(kinds), tuple((each["kind"], each["source_id"] or "", each["waited_ms_sum"]) for each in hottest)
    )


def _call_waits(table: pyarrow.Table) -> pyarrow.Table:
    """One row per call: all rows of a call have its token, and the last one has the longest wait."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def number(mask: Any) -> Any:
        return pc.cast(mask, pa.int64())

    decision = table.column("decision")
    attempts = pa.table(
        {
            "token": pc.utf8_slice_codeunits(table.column("row_id"), 0, 24),
            "kind": pc.fill_null(table.column("kind"), ""),
            "source_id": table.column("source_id"),
            "waited_ms": table.column("waited_ms"),
            "in_flight": number(pc.equal(decision, "in_flight")),
            "takeovers": number(pc.and_(pc.equal(decision, "new"), has_flag(table, "takeover"))),
            "fenced_out": number(has_flag(table, "fenced_out")),
        }
    )
    summed = [(name, "max") for name in ("waited_ms", "in_flight", "takeovers", "fenced_out")]
    calls = attempts.group_by(["token", "kind", "source_id"]).aggregate(summed)
    return calls.select(["kind", "source_id", *(f"{name}_max" for name, _ in summed)]).rename_columns(
        ["kind", "source_id", *(name for name, _ in summed)]
    )


def has_flag(table: pyarrow.Table, flag: str) -> Any:
    import pyarrow.compute as pc

    return pc.match_substring(pc.binary_join(table.column("flags"), " "), flag)


_NAMES = ("idempotency_key", "source_id", "decision", "winner", "fence", "sealed_at")
_INGESTIONS = RowQuery(values=(("kind", "document"), ("action", "ingest")))


def revision_facts(rows: RowReader, concerned: Callable[[int, bytes], bool]) -> list[RevisionFact]:
    """Returns which revisions of documents were sealed or ended in certain segments, according to the decision rows.

    The fence number and the token of a sealed document name the segment that it was committed in, so the rows still
    show what was in a segment that cannot be read any more. Reads a day at a time.

    Args:
        rows: The decision rows.
        concerned: Called once per day and segment with its epoch and batch; returns whether it is wanted.
    """
    days = rows.map_days(_INGESTIONS, _NAMES, lambda table: _facts_of_day(table, concerned))
    return [fact for day in days.values() for fact in day]


def _facts_of_day(table: pyarrow.Table, concerned: Callable[[int, bytes], bool]) -> list[RevisionFact]:
    import pyarrow as pa
    import pyarrow.compute as pc

    ended = pc.equal(table.column("decision"), DECISION_TEXT[RowKind.ENDED])
    outcome = pc.and_(pc.is_valid(table.column("winner")), pc.is_valid(table.column("fence")))
    table = table.filter(pc.and_(outcome, pc.or_(ended, pc.is_valid(table.column("sealed_at")))))
    epochs = pc.list_element(pc.split_pattern(table.column("fence"), ".", max_splits=1), 0)
    batches = pc.utf8_slice_codeunits(table.column("winner"), 0, 2 * BATCH_BYTES)
    segments = pc.binary_join_element_wise(epochs, batches, ".")
    asked = [text for text in pc.unique(segments).to_pylist() if _is_concerned(text, concerned)]
    table = table.filter(pc.is_in(segments, pa.array(asked, pa.string())))
    sealed_at = table.column("sealed_at").cast(pa.int64()).to_pylist()
    columns = (table.column(name).to_pylist() for name in _NAMES[:-1])
    return [
        RevisionFact(
            EndedRevision(source_id or "", bytes.fromhex(key), bytes.fromhex(winner), _fence(fence), at_ms or 0),
            decision == DECISION_TEXT[RowKind.ENDED],
        )
        for key, source_id, decision, winner, fence, at_ms in zip(*columns, sealed_at, strict=True)
    ]


def _is_concerned(text: str, concerned: Callable[[int, bytes], bool]) -> bool:
    epoch, _, batch = text.partition(".")
    return concerned(int(epoch), bytes.fromhex(batch))


def _fence(text: str) -> FenceNumber:
    epoch, _, counter = text.partition(".")
    return FenceNumber(int(epoch), int(counter))
