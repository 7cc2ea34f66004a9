"""`ragfence audit`: proofs and sums from the decision rows, and the rows themselves for other programs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Objects, PolicyFile, Since, Store, StoreCommands, StoreOptions, Tenant, opened

if TYPE_CHECKING:
    import pyarrow

    from ragfence.audit.savings import Savings

audit = StoreCommands(no_args_is_help=True, help="Proofs and sums from the decision rows.")

BARS = "▁▂▃▄▅▆▇█"


@audit.command("check")
def check(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
) -> None:
    """Replays all decision rows and proves the promises; ends with 1 and the findings when one is broken."""
    with opened(StoreOptions(store, objects, tenant, policy)) as fence, output.progress("checking rows") as told:
        report = fence.audit.check(told)
    if as_json:
        findings = [asdict(finding) for finding in report.findings]
        output.document({"ok": report.ok, "rows": report.rows, "keys": report.keys, "findings": findings})
    else:
        over = f"{output.many(report.rows, 'row')} over {output.many(report.keys, 'key')}"
        output.say(f"{over}: {_verdict(len(report.findings))}")
        for finding in report.findings:
            output.say(f"  {finding.invariant} {finding.key}\n    {finding.text} (rows {', '.join(finding.rows)})")
    if not report.ok:
        raise typer.Exit(1)


@audit.command("savings")
def savings(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    since: Since = "30d",
) -> None:
    """What was answered without performing an effect: by kind, and for documents in characters and snippets."""
    with opened(StoreOptions(store, objects, tenant, policy)) as fence, output.progress("reading rows"):
        found = fence.audit.savings(since)
    if as_json:
        output.document(_savings_document(found))
        return
    console = output.out()
    right = {"right": True}
    listing = output.Listing(
        console,
        "kind",
        output.Column("performed", **right),
        output.Column("saved", **right),
        output.Column("share", **right),
        output.Column("an effect", **right),
        output.Column("time saved", **right),
    )
    for kind in found.kinds:
        took = "-" if kind.effect_ms is None else output.span(kind.effect_ms)
        saved = "-" if kind.effect_ms is None else output.span(kind.saved_ms)
        listing.add(kind.kind, f"{kind.performed:,}", f"{kind.saved:,}", f"{kind.share:.1%}", took, saved)
    listing.print()
    if found.characters:
        unknown = f", and those of {found.unknown_documents:,} that are gone" if found.unknown_documents else ""
        spared = f"{output.many(found.snippets, 'snippet')} ({output.many(found.characters, 'character')})"
        console.print(f"documents: {spared} not embedded{unknown}")
    if len(found.days) > 1:
        asked = [day.performed + day.saved for day in found.days]
        shares = [day.saved / calls if calls else 0.0 for day, calls in zip(found.days, asked, strict=True)]
        console.print(f"share by day, {found.days[0].day} to {found.days[-1].day}: {bars(shares)}", soft_wrap=True)


@audit.command("conflicts")
def conflicts(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    since: Since = "7d",
    kind: Annotated[str | None, typer.Option("--kind", help="Only this kind of operation.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="At most so many, the newest; 0 for all.")] = 100,
) -> None:
    """Payloads that were refused because their key is known with another one, and what differs."""
    with opened(StoreOptions(store, objects, tenant, policy)) as fence, output.progress("reading rows"):
        found = fence.audit.conflicts(since, kind=kind)
    shown = found[max(len(found) - limit, 0) if limit else 0 :]
    if as_json:
        cases = [{**asdict(case), "ts": output.iso(case.ts_ms)} for case in shown]
        output.document({"of": len(found), "conflicts": cases})
        return
    console = output.out()
    listing = output.Listing(
        console,
        output.Column("when", whole=True),
        "kind",
        "source_id",
        output.Column("key", whole=True),
        output.Column("owner", wide=True),
        "what differs",
    )
    for case in shown:
        listing.add(
            output.moment(case.ts_ms),
            case.kind,
            case.source_id,
            output.key(case.key, console=console),
            case.owner,
            _differs(case.diff, case.diff_size),
        )
    listing.print()
    if len(shown) < len(found):
        console.print(f"the newest {len(shown)} of {len(found):,}; --limit 0 shows all")


@audit.command("anomalies")
def anomalies(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    since: Since = "28d",
) -> None:
    """What somebody should look at: hit rates that dropped, effects done twice, lifetimes too short, what is stuck."""
    with opened(StoreOptions(store, objects, tenant, policy)) as fence, output.progress("reading rows"):
        found = fence.audit.anomalies(since)
    if as_json:
        output.document({"anomalies": [asdict(each) for each in found]})
        return
    for each in found:
        of_kind = f" ({each.kind})" if each.kind else ""
        output.say(f"{each.what}{of_kind}: {each.text}" + "".join(f"\n  {key}" for key in each.examples))
    if not found:
        output.say("nothing to look at")


@audit.command("export")
def export(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    since: Since = "36500d",
    parquet: Annotated[Path | None, typer.Option("--parquet", metavar="FILE", help="Write Parquet here.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write CSV here.")] = None,
) -> None:
    """Every decision since a moment into a file, each once, oldest day first."""
    if (parquet is None) == (csv is None):
        raise typer.BadParameter("give one of --parquet FILE and --csv FILE")
    target = parquet or csv
    assert target is not None
    if target.is_dir() or not target.parent.is_dir():
        why = "is a folder" if target.is_dir() else "is in a folder that is not there"
        raise typer.BadParameter(f"{target} {why}; name a file")
    part = target.with_name(f"{target.name}.part")
    try:
        rows = _exported(StoreOptions(store, objects, tenant, policy), since, part, as_csv=csv is not None)
        part.replace(target)  # half an export never has its name
    finally:
        part.unlink(missing_ok=True)
    if as_json:
        output.document({"rows": rows, "file": str(target), "bytes": target.stat().st_size})
    else:
        output.say(f"{output.many(rows, 'decision')} in {target} ({output.size(target.stat().st_size)})")


def _exported(place: StoreOptions, since: str, part: Path, *, as_csv: bool) -> int:
    rows = 0
    with opened(place) as fence, output.progress("writing rows") as told:
        from ragfence.audit.columns import decision_names, schema

        shape = schema().empty_table().select(decision_names()).schema
        with _writer(part, shape, as_csv=as_csv) as writer:
            for table in fence.audit.batches(since):
                writer.write_table(_flat(table) if as_csv else table)
                rows += table.num_rows
                told(rows)
    return rows


def _writer(path: Path, shape: pyarrow.Schema, *, as_csv: bool) -> Any:
    if as_csv:
        import pyarrow.csv

        return pyarrow.csv.CSVWriter(path, _flat(shape.empty_table()).schema)
    import pyarrow.parquet

    return pyarrow.parquet.ParquetWriter(path, shape, compression="zstd")


def _flat(table: pyarrow.Table) -> pyarrow.Table:
    """CSV has no lists."""
    import pyarrow.compute as pc

    at = table.schema.get_field_index("flags")
    return table.set_column(at, "flags", pc.binary_join(table.column("flags"), " "))


def bars(shares: list[float]) -> str:
    """A line of bars, between the lowest and the highest."""
    low, high = min(shares), max(shares)
    if high == low:
        return BARS[len(BARS) // 2] * len(shares)
    return "".join(BARS[round((share - low) / (high - low) * (len(BARS) - 1))] for share in shares)


def _savings_document(found: Savings) -> dict[str, Any]:
    return {
        "performed": found.performed,
        "saved": found.saved,
        "kinds": [{**asdict(kind), "share": kind.share, "saved_ms": kind.saved_ms} for kind in found.kinds],
        "documents": {
            "characters": found.characters,
            "snippets": found.snippets,
            "unknown": found.unknown_documents,
        },
        "days": [asdict(day) for day in found.days],
        "sources": [asdict(source) for source in found.sources],
    }


def _differs(diff: tuple[dict[str, Any], ...] | None, size: int) -> str:
    if diff is None:
        return f"{size} bytes of diff" if size else "not kept (on_conflict.include_diff)"
    return "; ".join(f"{step.get('op')} {step.get('path') or '/'}" for step in diff[:4]) + (" ..." if diff[4:] else "")


def _verdict(findings: int) -> str:
    return output.many(findings, "finding") if findings else "every promise kept"
