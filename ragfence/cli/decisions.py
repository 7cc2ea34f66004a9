"""`ragfence decisions` and `ragfence audit check`: the decision rows, and the proof that they broke no promise."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer

from ragfence.cli import show
from ragfence.cli.opening import Json, Objects, Place, PolicyFile, Since, Store, Tenant, opened

audit = typer.Typer(no_args_is_help=True, help="Proofs from the decision rows.")


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
    source_id: Annotated[str | None, typer.Option("--source-id", help="Only of this source.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="At most so many, the newest; 0 for all.")] = 100,
) -> None:
    """The decision rows, newest last."""
    with opened(Place(store, objects, tenant, policy)) as fence:
        with show.progress("reading rows"):
            table = fence.audit.decisions(since, kind=kind, decision=decision, source_id=source_id)
        shown = table.slice(max(table.num_rows - limit, 0) if limit else 0).to_pylist()
    if as_json:
        show.document({"of": table.num_rows, "decisions": [_jsonable(row) for row in shown]})
        return
    console = show.out()
    listing = show.Listing(
        console,
        show.Column("when", whole=True),
        show.Column("decision", whole=True),
        "kind",
        "source_id",
        show.Column("key", whole=True),
        show.Column("revision", wide=True),
        show.Column("attempt", right=True, wide=True),
        show.Column("owner", wide=True),
        show.Column("flags", wide=True),
        show.Column("error", wide=True),
    )
    for row in shown:
        listing.add(
            show.moment(int(row["ts"].timestamp() * 1000)),
            row["decision"],
            row["kind"],
            row["source_id"],
            show.key(row["idempotency_key"], console=console),
            row["revision"],
            row["attempt"],
            row["owner"],
            " ".join(row["flags"]),
            row["error_code"],
        )
    listing.print()
    if len(shown) < table.num_rows:
        console.print(f"the newest {len(shown)} of {table.num_rows:,}; --limit 0 shows all")


@audit.command("check")
def check(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
) -> None:
    """Replays all decision rows and proves the promises; ends with 1 and the findings when one is broken."""
    with opened(Place(store, objects, tenant, policy)) as fence, show.progress("checking rows"):
        report = fence.audit.check()
    if as_json:
        findings = [asdict(finding) for finding in report.findings]
        show.document({"ok": report.ok, "rows": report.rows, "keys": report.keys, "findings": findings})
    else:
        show.say(f"{report.rows:,} rows over {report.keys:,} keys: " + _verdict(len(report.findings)))
        for finding in report.findings:
            show.say(f"  {finding.invariant} {finding.key}\n    {finding.text} (rows {', '.join(finding.rows)})")
    if not report.ok:
        raise typer.Exit(1)


def _verdict(findings: int) -> str:
    return f"{findings} findings" if findings else "every promise kept"


def _jsonable(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: show.iso(int(value.timestamp() * 1000)) if hasattr(value, "timestamp") else value
        for name, value in row.items()
    }
