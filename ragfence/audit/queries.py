"""Questions that people ask the decision rows: how many, who waited for whom, where do conflicts come
from. Everything is computed day by day from a few columns, so a ledger of any size is answered in bounded memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragfence.audit.ledger import Wanted
from ragfence.audit.row_reader import Rows
from ragfence.audit.timeline import TimelineEvent, tell
from ragfence.core.decision_rows import ANSWER_PHASES

if TYPE_CHECKING:
    import pyarrow


HOTTEST = 10


@dataclass(frozen=True, slots=True)
class ConflictCase:
    """A payload that was refused, because its key is known with another one."""

    ts_ms: int
    key: str
    kind: str
    source_id: str
    owner: str
    payload_hash: str
    first_payload_hash: str
    """of what was sealed, or is being performed, under the key; empty when no row tells"""
    diff: tuple[dict[str, Any], ...] | None
    """RFC 6902, from the first payload to this one, both redacted; None unless the policy has `include_diff`"""
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
    """effects that were performed twice: an owner outlived its lease"""


@dataclass(frozen=True, slots=True)
class Contention:
    kinds: tuple[KindContention, ...]
    hottest: tuple[tuple[str, str, int], ...]
    """(kind, source_id, milliseconds waited for it), most first"""


@dataclass(frozen=True, slots=True)
class Occurrence:
    key: str
    revision: str
    event: TimelineEvent


def counts(rows: Rows, wanted: Wanted, by: Sequence[str]) -> pyarrow.Table:
    """How many answers, by day and by columns: day, then `by`, then `count`. Every row, if `by` tells the phase."""
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
    days = rows.by_day(wanted, needed, counted, coded=names)
    tables = [
        table.rename_columns([*names, "count"]).add_column(0, "day", pa.array([day] * table.num_rows, pa.string()))
        for day, table in days.items()
        if table.num_rows
    ]
    if not tables:
        fields = [("day", pa.string()), *((name, pa.string()) for name in names), ("count", pa.int64())]
        return pa.schema(fields).empty_table()
    return pa.concat_tables(tables).sort_by([(name, "ascending") for name in ("day", *names)])


def conflicts(rows: Rows, wanted: Wanted) -> list[ConflictCase]:
    """Oldest first."""
    names = ["row_id", "ts", "idempotency_key", "kind", "source_id", "owner", "payload_hash", "diff", "diff_size"]
    refused = rows.table(wanted._replace(values=(*wanted.values, ("decision", "conflict"))), names).to_pylist()
    granted: dict[str, list[dict[str, Any]]] = {}
    for key in {row["idempotency_key"] for row in refused}:
        shard = bytes.fromhex(key)[0]
        known = Wanted(shards=range(shard, shard + 1), values=(("idempotency_key", key), ("decision", "new")))
        granted[key] = rows.table(known, ["row_id", "ts", "payload_hash"]).to_pylist()
    return [
        ConflictCase(
            ts_ms=int(row["ts"].timestamp() * 1000),
            key=row["idempotency_key"],
            kind=row["kind"] or "",
            source_id=row["source_id"] or "",
            owner=row["owner"] or "",
            payload_hash=row["payload_hash"],
            first_payload_hash=_known_before(row, granted[row["idempotency_key"]]),
            diff=tuple(json.loads(row["diff"])) if row["diff"] else None,
            diff_size=row["diff_size"] or 0,
        )
        for row in refused
    ]


def _known_before(refused: dict[str, Any], granted: list[dict[str, Any]]) -> str:
    """The payload that stood: that of the newest attempt before. Earlier lives of the key may have had another."""
    before = (each for each in reversed(granted) if each["ts"] <= refused["ts"])
    return next((each["payload_hash"] for each in before if each["row_id"][:24] != refused["row_id"][:24]), "")


def timeline(rows: Rows, wanted: Wanted, *, every: bool) -> list[Occurrence]:
    """What happened to all revisions of a source, in the order in which it happened."""
    found = [
        Occurrence(story.key, story.revision, event)
        for story in tell(rows.rows(wanted), every=every)
        for event in story.events
    ]
    return sorted(found, key=lambda each: each.event.ts_ms)


def contention(rows: Rows, wanted: Wanted) -> Contention:
    import pyarrow as pa
    import pyarrow.compute as pc

    names = ["row_id", "kind", "source_id", "decision", "flags", "waited_ms"]
    days = rows.by_day(wanted, names, _waits_in)
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


def _waits_in(table: pyarrow.Table) -> pyarrow.Table:
    """One line per call: all rows of a call have its token, and the last of them the longest wait."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def number(mask: Any) -> Any:
        return pc.cast(mask, pa.int64())

    decision = table.column("decision")
    told = pa.table(
        {
            "token": pc.utf8_slice_codeunits(table.column("row_id"), 0, 24),
            "kind": pc.fill_null(table.column("kind"), ""),
            "source_id": table.column("source_id"),
            "waited_ms": table.column("waited_ms"),
            "in_flight": number(pc.equal(decision, "in_flight")),
            "takeovers": number(pc.and_(pc.equal(decision, "new"), _flagged(table, "takeover"))),
            "fenced_out": number(_flagged(table, "fenced_out")),
        }
    )
    summed = [(name, "max") for name in ("waited_ms", "in_flight", "takeovers", "fenced_out")]
    calls = told.group_by(["token", "kind", "source_id"]).aggregate(summed)
    return calls.select(["kind", "source_id", *(f"{name}_max" for name, _ in summed)]).rename_columns(
        ["kind", "source_id", *(name for name, _ in summed)]
    )


def _flagged(table: pyarrow.Table, flag: str) -> Any:
    import pyarrow.compute as pc

    return pc.match_substring(pc.binary_join(table.column("flags"), " "), flag)
