"""`ragfence decisions` and `drain`: the decision rows, listed or followed, and their move into the ledger."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Kind, Limit, Since, SourceId, Stores, open_fence
from ragfence.core.decision_rows import Phase
from ragfence.errors import TransientError

if TYPE_CHECKING:
    import pyarrow

    from ragfence.audit.drain import DrainReport
    from ragfence.fence import Fence

_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)?")
_UNIT_S = {None: 1, "s": 1, "m": 60, "h": 3600}
EVERY_S = 1.0
OVERLAP = timedelta(seconds=10)
"""Rows of the same moment may arrive one after the other, from several shards."""


class DecisionName(StrEnum):
    NEW = "new"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    IN_FLIGHT = "in_flight"
    STALE = "stale"
    ENDED = "ended"


def decisions(
    *,
    stores: Stores,
    as_json: Json = False,
    since: Since = "24h",
    kind: Kind = None,
    decision: Annotated[DecisionName | None, typer.Option("--decision", help="Only this decision.")] = None,
    phase: Annotated[
        Phase | None,
        typer.Option("--phase", help="Only this phase. A claim and its seal are two rows."),
    ] = None,
    source_id: SourceId = None,
    limit: Limit = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new decisions as they are made, until Ctrl-C.")
    ] = False,
) -> None:
    """List the decisions: what every call was answered with. The newest is the last."""
    query = {"kind": kind, "decision": decision, "phase": phase, "source_id": source_id}
    with open_fence(stores) as fence:
        with output.progress("reading rows"):
            table = fence.audit.decisions(since, **query)
        shown = table.slice(max(table.num_rows - limit, 0) if limit else 0).to_pylist()
        if follow:
            for row in _follow(fence, shown, table, query):
                _print_row(row, as_json)
            return
    if as_json:
        output.print_json({"of": table.num_rows, "decisions": [_jsonable(row) for row in shown]})
        return
    if not shown:
        output.echo(f"no decisions since {since}")
        return
    console = output.out()
    listing = output.Listing(
        console,
        output.Column("when", whole=True),
        output.Column("decision", whole=True),
        output.Column("phase", whole=True),
        output.Column("kind", whole=True),
        output.Column("source_id", cut=True),
        output.Column("key", whole=True),
        output.Column("revision", wide=True),
        output.Column("attempt", right=True, wide=True),
        output.Column("owner", wide=True),
        output.Column("flags", wide=True),
        output.Column("error", wide=True),
    )
    for row in shown:
        listing.add(
            output.time_cell(int(row["ts"].timestamp() * 1000), console=console),
            row["decision"],
            row["phase"],
            row["kind"],
            row["source_id"],
            output.key(row["idempotency_key"], console=console),
            row["revision"],
            row["attempt"],
            row["owner"],
            " ".join(row["flags"]),
            row["error_code"],
        )
    listing.print()
    if len(shown) < table.num_rows:
        console.print(f"the newest {len(shown)} of {table.num_rows:,}; show all with --limit 0")


def _follow(
    fence: Fence, shown: list[dict[str, Any]], known: pyarrow.Table, query: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yields the rows in `shown`, then new ones. The ledger is read too, because new rows may be drained at any time.

    Rows of `known` that are not in `shown` are above the limit and are left out.
    """
    yield from shown
    seen = dict(zip(known["row_id"].to_pylist(), known["ts"].to_pylist(), strict=True))
    since = known["ts"][-1].as_py() if known.num_rows else None
    while True:
        time.sleep(EVERY_S)
        for row in fence.audit.decisions(since - OVERLAP if since else OVERLAP, **query).to_pylist():
            if row["row_id"] not in seen:
                seen[row["row_id"]] = row["ts"]
                since = max(since or row["ts"], row["ts"])
                yield row
        seen = {row_id: ts for row_id, ts in seen.items() if since is None or ts >= since - 2 * OVERLAP}


def _print_row(row: dict[str, Any], as_json: bool) -> None:
    if as_json:
        output.print_json(_jsonable(row))
    else:
        more = [f"attempt {row['attempt']}", *row["flags"], row["error_code"] or ""]
        line = [output.moment(int(row["ts"].timestamp() * 1000)), row["decision"], row["phase"]]
        line += [row["kind"], row["source_id"]]
        line += [row["idempotency_key"][: output.KEY_DIGITS], *more]
        output.echo(" ".join(str(cell or "-") for cell in line if cell != ""))
    sys.stdout.flush()  # the reader of a pipe gets the line at once


def _jsonable(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: output.iso(int(value.timestamp() * 1000)) if hasattr(value, "timestamp") else value
        for name, value in row.items()
    }


def _check_span(text: str | None) -> str | None:
    if text is not None and not (_SPAN.fullmatch(text) and _as_seconds(text) > 0):
        raise typer.BadParameter(f"{text!r} is not a span such as 60s, 5m or 1h")
    return text


def drain(
    *,
    stores: Stores,
    as_json: Json = False,
    every: Annotated[
        str | None,
        typer.Option("--every", metavar="SPAN", callback=_check_span, help="Repeat this often, until Ctrl-C: 60s, 5m."),
    ] = None,
    every_day: Annotated[
        bool, typer.Option("--every-day", help="Also compact days without new rows for a week.")
    ] = False,
) -> None:
    """Move decision rows from the fence store into the ledger: Parquet files in the object store, one folder per day.

    Compacts the ledger, and deletes days that have expired.
    """
    with open_fence(stores) as fence:
        audit = fence.audit
        while True:
            try:
                with output.progress("draining"):
                    drained = audit.drain(every_day=every_day)
                _print_drained(drained, as_json)
            except TransientError as error:
                # Nothing is lost: rows that are not in the ledger are still in the fence store.
                if every is None:
                    raise
                output.print_error(error, as_json=as_json)
            if every is None:
                return
            time.sleep(_as_seconds(every))


def _print_drained(drained: DrainReport, as_json: bool) -> None:
    if as_json:
        output.print_json(asdict(drained))
        return
    if drained.busy:
        output.echo("another process is draining; nothing was done")
        return
    parts = [f"{output.pluralize(drained.rows, 'row')} into {output.pluralize(drained.objects, 'object')}"]
    if drained.rows:
        parts.append(f"the oldest was {output.span(drained.lag_ms)} old")
    if drained.compacted:
        parts.append(f"{output.pluralize(drained.compacted, 'small object')} merged into {drained.packed:,}")
    if drained.expired:
        parts.append(f"{output.pluralize(drained.expired, 'object')} of expired days removed")
    output.echo(", ".join(parts))


def _as_seconds(text: str) -> float:
    matched = _SPAN.fullmatch(text)
    assert matched is not None
    return float(matched[1]) * _UNIT_S[matched[2]]
