"""`ragfence decisions`: the decision rows, as a table or as JSON, and as they come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.audit import audit
from ragfence.cli.options import Json, Objects, PolicyFile, Since, Store, StoreOptions, Tenant, opened
from ragfence.core.decision_rows import Phase

if TYPE_CHECKING:
    import pyarrow

    from ragfence.fence import Fence

__all__ = ["audit", "decisions"]

EVERY_S = 1.0
OVERLAP = timedelta(seconds=10)
"""rows of one moment may come one after the other, from several shards"""


class DecisionName(StrEnum):
    NEW = "new"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    IN_FLIGHT = "in_flight"
    STALE = "stale"
    ENDED = "ended"


def decisions(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    since: Since = "24h",
    kind: Annotated[str | None, typer.Option("--kind", help="Only this kind of operation.")] = None,
    decision: Annotated[DecisionName | None, typer.Option("--decision", help="Only such decisions.")] = None,
    phase: Annotated[
        Phase | None,
        typer.Option("--phase", help="Only rows of this phase: a claim and its seal are two rows."),
    ] = None,
    source_id: Annotated[str | None, typer.Option("--source-id", help="Only of this source.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="At most so many, the newest; 0 for all.")] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what comes, a line each, until Ctrl-C.")
    ] = False,
) -> None:
    """The decision rows, newest last."""
    wanted = {"kind": kind, "decision": decision, "phase": phase, "source_id": source_id}
    with opened(StoreOptions(store, objects, tenant, policy)) as fence:
        with output.progress("reading rows"):
            table = fence.audit.decisions(since, **wanted)
        shown = table.slice(max(table.num_rows - limit, 0) if limit else 0).to_pylist()
        if follow:
            for row in _following(fence, shown, table, wanted):
                _tell(row, as_json)
            return
    if as_json:
        output.document({"of": table.num_rows, "decisions": [_jsonable(row) for row in shown]})
        return
    console = output.out()
    listing = output.Listing(
        console,
        output.Column("when", whole=True),
        output.Column("decision", whole=True),
        output.Column("phase", whole=True),
        "kind",
        "source_id",
        output.Column("key", whole=True),
        output.Column("revision", wide=True),
        output.Column("attempt", right=True, wide=True),
        output.Column("owner", wide=True),
        output.Column("flags", wide=True),
        output.Column("error", wide=True),
    )
    for row in shown:
        listing.add(
            output.moment(int(row["ts"].timestamp() * 1000)),
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
        console.print(f"the newest {len(shown)} of {table.num_rows:,}; --limit 0 shows all")


def _following(
    fence: Fence, shown: list[dict[str, Any]], known: pyarrow.Table, wanted: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """What is to be shown, then what comes. It may be drained between two looks: the ledger is looked at, too.

    What is known and not shown is above the limit, and does not come.
    """
    yield from shown
    told = dict(zip(known["row_id"].to_pylist(), known["ts"].to_pylist(), strict=True))
    since = known["ts"][-1].as_py() if known.num_rows else None
    while True:
        time.sleep(EVERY_S)
        for row in fence.audit.decisions(since - OVERLAP if since else OVERLAP, **wanted).to_pylist():
            if row["row_id"] not in told:
                told[row["row_id"]] = row["ts"]
                since = max(since or row["ts"], row["ts"])
                yield row
        told = {row_id: ts for row_id, ts in told.items() if since is None or ts >= since - 2 * OVERLAP}


def _tell(row: dict[str, Any], as_json: bool) -> None:
    if as_json:
        output.document(_jsonable(row))
    else:
        more = [f"attempt {row['attempt']}", *row["flags"], row["error_code"] or ""]
        line = [output.moment(int(row["ts"].timestamp() * 1000)), row["decision"], row["phase"]]
        line += [row["kind"], row["source_id"]]
        line += [row["idempotency_key"][: output.KEY_DIGITS], *more]
        output.say(" ".join(str(cell or "-") for cell in line if cell != ""))
    # Whoever reads a pipe wants the line now.
    import sys

    sys.stdout.flush()


def _jsonable(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: output.iso(int(value.timestamp() * 1000)) if hasattr(value, "timestamp") else value
        for name, value in row.items()
    }
