"""`ragfence audit`: checks, sums and reports from the decision rows, and their export to files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Kind, Limit, Since, StoreCommands, StoreOptions, Stores, open_fence

if TYPE_CHECKING:
    import pyarrow

    from ragfence.audit.savings import Savings

audit = StoreCommands(
    no_args_is_help=True, help="Check the decisions, sum up savings, and find conflicts and anomalies."
)

BARS = "▁▂▃▄▅▆▇█"


@audit.command("check")
def check(
    *,
    stores: Stores,
    as_json: Json = False,
) -> None:
    """Replay all decision rows and check every guarantee. Exits with 1 and the findings if one is broken."""
    with open_fence(stores) as fence, output.progress("checking rows") as advance:
        report = fence.audit.check(advance)
    if as_json:
        findings = [asdict(finding) for finding in report.findings]
        output.print_json({"ok": report.ok, "rows": report.rows, "keys": report.keys, "findings": findings})
    else:
        checked = f"{output.pluralize(report.rows, 'row')} over {output.pluralize(report.keys, 'key')}"
        output.echo(f"{checked}: {_verdict(len(report.findings))}")
        for finding in report.findings:
            output.echo(f"  {finding.invariant} {finding.key}\n    {finding.text} (rows {', '.join(finding.rows)})")
    if not report.ok:
        raise typer.Exit(1)


@audit.command("savings")
def savings(
    *,
    stores: Stores,
    as_json: Json = False,
    since: Since = "30d",
) -> None:
    """Show how many calls were answered without running an effect, by kind of operation."""
    with open_fence(stores) as fence, output.progress("reading rows"):
        found = fence.audit.savings(since)
    if as_json:
        output.print_json(_savings_document(found))
        return
    if not found.kinds:
        output.echo(f"no decisions since {since}")
        return
    console = output.out()
    right = {"right": True}
    listing = output.Listing(
        console,
        "kind",
        output.Column("executed", **right),
        output.Column("saved", **right),
        output.Column("share", **right),
        output.Column("median time", **right),
        output.Column("time saved", **right),
    )
    for kind in found.kinds:
        took = "-" if kind.effect_ms is None else output.span(kind.effect_ms)
        saved = "-" if kind.effect_ms is None else output.span(kind.saved_ms)
        listing.add(kind.kind, f"{kind.performed:,}", f"{kind.saved:,}", f"{kind.share:.1%}", took, saved)
    listing.print()
    if found.characters:
        unknown = f", and those of {found.unknown_documents:,} deleted" if found.unknown_documents else ""
        saved = f"{output.pluralize(found.snippets, 'snippet')} ({output.pluralize(found.characters, 'character')})"
        console.print(f"documents: {saved} not embedded again{unknown}")
    if len(found.days) > 1:
        calls = [day.performed + day.saved for day in found.days]
        shares = [day.saved / count if count else 0.0 for day, count in zip(found.days, calls, strict=True)]
        console.print(f"share by day, {found.days[0].day} to {found.days[-1].day}: {bars(shares)}", soft_wrap=True)


@audit.command("conflicts")
def conflicts(
    *,
    stores: Stores,
    as_json: Json = False,
    since: Since = "7d",
    kind: Kind = None,
    limit: Limit = 100,
) -> None:
    """List payloads that were refused because their key was used with another payload, and what differs."""
    with open_fence(stores) as fence, output.progress("reading rows"):
        found = fence.audit.conflicts(since, kind=kind)
    shown = found[max(len(found) - limit, 0) if limit else 0 :]
    if as_json:
        cases = [{**asdict(case), "ts": output.iso(case.ts_ms)} for case in shown]
        output.print_json({"of": len(found), "conflicts": cases})
        return
    if not shown:
        output.echo(f"no conflicts since {since}")
        return
    console = output.out()
    listing = output.Listing(
        console,
        output.Column("when", whole=True),
        output.Column("kind", whole=True),
        output.Column("source_id", cut=True),
        output.Column("key", whole=True),
        output.Column("owner", wide=True),
        "what differs",
    )
    for case in shown:
        listing.add(
            output.time_cell(case.ts_ms, console=console),
            case.kind,
            case.source_id,
            output.key(case.key, console=console),
            case.owner,
            _differs(case.diff, case.diff_size),
        )
    listing.print()
    if len(shown) < len(found):
        console.print(f"the newest {len(shown)} of {len(found):,}; show all with --limit 0")


@audit.command("anomalies")
def anomalies(
    *,
    stores: Stores,
    as_json: Json = False,
    since: Since = "28d",
) -> None:
    """List what needs attention: falling hit rates, effects that ran twice, lifetimes too short, stuck keys."""
    with open_fence(stores) as fence, output.progress("reading rows"):
        found = fence.audit.anomalies(since)
    if as_json:
        output.print_json({"anomalies": [asdict(each) for each in found]})
        return
    for each in found:
        of_kind = f" ({each.kind})" if each.kind else ""
        output.echo(f"{each.what}{of_kind}: {each.text}" + "".join(f"\n  {key}" for key in each.examples))
    if not found:
        output.echo(f"no anomalies since {since}")


@audit.command("export")
def export(
    *,
    stores: Stores,
    as_json: Json = False,
    since: Since = "36500d",
    parquet: Annotated[Path | None, typer.Option("--parquet", metavar="FILE", help="Write a Parquet file.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write a CSV file.")] = None,
    outcomes: Annotated[
        bool, typer.Option("--outcomes", help="Only what each call was answered with, in six columns.")
    ] = False,
) -> None:
    """Write every decision to a file, once, oldest day first."""
    if (parquet is None) == (csv is None):
        raise typer.BadParameter("give either --parquet FILE or --csv FILE")
    target = parquet or csv
    assert target is not None
    if target.is_dir() or not target.parent.is_dir():
        why = "is a folder" if target.is_dir() else "is in a folder that does not exist"
        raise typer.BadParameter(f"{target} {why}; name a file")
    part = target.with_name(f"{target.name}.part")
    try:
        rows = _export(stores, since, part, as_csv=csv is not None, outcomes=outcomes)
        part.replace(target)  # an incomplete export never gets this name
    finally:
        part.unlink(missing_ok=True)
    if as_json:
        output.print_json({"rows": rows, "file": str(target), "bytes": target.stat().st_size})
    else:
        what = "outcome" if outcomes else "decision"
        output.echo(f"{output.pluralize(rows, what)} in {target} ({output.size(target.stat().st_size)})")


def _export(stores: StoreOptions, since: str, part: Path, *, as_csv: bool, outcomes: bool) -> int:
    rows = 0
    with open_fence(stores) as fence, output.progress("writing rows") as advance:
        from ragfence.audit import queries
        from ragfence.audit.columns import decision_names, schema

        empty = schema().empty_table().select(decision_names())
        shape = (queries.outcomes(empty, set()) if outcomes else empty).schema
        with _writer(part, shape, as_csv=as_csv) as writer:
            for table in fence.audit.outcomes(since) if outcomes else fence.audit.batches(since):
                writer.write_table(_flat(table) if as_csv else table)
                rows += table.num_rows
                advance(rows)
    return rows


def _writer(path: Path, shape: pyarrow.Schema, *, as_csv: bool) -> Any:
    if as_csv:
        import pyarrow.csv

        return pyarrow.csv.CSVWriter(path, _flat(shape.empty_table()).schema)
    import pyarrow.parquet

    return pyarrow.parquet.ParquetWriter(path, shape, compression="zstd")


def _flat(table: pyarrow.Table) -> pyarrow.Table:
    """The table with its lists joined to strings, because CSV has no lists."""
    import pyarrow.compute as pc

    at = table.schema.get_field_index("flags")
    if at < 0:
        return table
    return table.set_column(at, "flags", pc.binary_join(table.column("flags"), " "))


def bars(shares: list[float]) -> str:
    """A line of bars, scaled between the lowest and the highest share."""
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
        return f"{size} bytes of diff" if size else "not stored (policy: on_conflict.include_diff)"
    return "; ".join(f"{step.get('op')} {step.get('path') or '/'}" for step in diff[:4]) + (" ..." if diff[4:] else "")


def _verdict(findings: int) -> str:
    return output.pluralize(findings, "finding") if findings else "every promise kept"
