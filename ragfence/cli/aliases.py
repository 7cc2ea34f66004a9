"""`ragfence swap`, `rollback`, `alias`, `reconcile` and `search`: names that point at builds, and searches by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Limit, Reason, Stores, open_fence
from ragfence.errors import GateFailed

if TYPE_CHECKING:
    from ragfence.core.aliases import ExpectedTarget, Hit
    from ragfence.fence import Fence
    from ragfence.indexes.aliases import Swap
    from ragfence.indexes.catalog import Alias, CatalogEntry

NO_ALIAS = "none"
INDENT = "    "

Name = Annotated[str, typer.Argument(metavar="ALIAS", help="The name that searches use.")]


def swap(
    alias: Name,
    index_hash: Annotated[
        str,
        typer.Argument(
            metavar="HASH", help="An INDEX_HASH, its first 8 or more digits, or latest: the build sealed last."
        ),
    ],
    *,
    stores: Stores,
    as_json: Json = False,
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect",
            metavar="HASH|none",
            help="Swap only if the alias points at this build now; none: only if the alias does not exist.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Swap even if a gate fails. Needs --reason.")] = False,
    reason: Reason = "",
    golden: Annotated[
        str | None, typer.Option("--golden", metavar="FILE", help="Golden queries to check, one JSON object per line.")
    ] = None,
) -> None:
    """Point an alias at a sealed build, if all gates pass. Creates the alias if it does not exist."""
    from ragfence.cli.build_lookup import find_build_or_latest
    from ragfence.indexes.gates import Gates

    if force and not reason.strip():
        raise typer.BadParameter("--force needs a --reason, which is stored with the gates that failed")
    with open_fence(stores) as fence:
        wanted, expected = find_build_or_latest(fence, index_hash), _expected(fence, expect)
        try:
            swapped = fence.aliases.swap(
                alias, wanted, expect=expected, force=force, reason=reason, gates=Gates(golden=golden)
            )
        except GateFailed as refused:
            _exit_refused(refused, as_json=as_json)
    _print_swap(swapped, as_json=as_json)


def rollback(
    alias: Name,
    *,
    stores: Stores,
    as_json: Json = False,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="HASH", help="An earlier build of the alias; by default the previous one."),
    ] = None,
    reason: Reason = "",
) -> None:
    """Point an alias at its previous build. A second rollback goes forward again."""
    from ragfence.cli.build_lookup import find_build

    with open_fence(stores) as fence:
        try:
            swapped = fence.aliases.rollback(alias, to=find_build(fence, to) if to else None, reason=reason)
        except GateFailed as refused:
            _exit_refused(refused, as_json=as_json)
    _print_swap(swapped, as_json=as_json)


def alias(
    name: Annotated[str | None, typer.Argument(metavar="[ALIAS]", help="Show only this alias.")] = None,
    *,
    stores: Stores,
    as_json: Json = False,
    history: Annotated[bool, typer.Option("--history", help="Show every change of the alias, newest first.")] = False,
    limit: Limit = 100,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias. Needs --reason.")] = False,
    reason: Reason = "",
) -> None:
    """Show where the aliases point and since when."""
    if (history or remove) and name is None:
        raise typer.BadParameter("--history and --remove need an ALIAS")
    if history and remove:
        raise typer.BadParameter("give either --history or --remove")
    if bool(reason.strip()) != remove:
        raise typer.BadParameter(
            "--remove needs a --reason, which is stored with the change" if remove else "--reason needs --remove"
        )
    with open_fence(stores) as fence:
        if name is None:
            _print_all(fence, as_json=as_json)
        elif remove:
            _print_swap(fence.aliases.remove(name, reason), as_json=as_json)
        else:
            _print_one(fence, name, (limit or 2**31) if history else 0, as_json=as_json)


def reconcile(
    *,
    stores: Stores,
    as_json: Json = False,
) -> None:
    """Complete swaps that were killed: write missing decision rows, correct the backends' own aliases."""
    with open_fence(stores) as fence:
        report = fence.aliases.reconcile()
    if as_json:
        output.print_json({"ok": not report.failed, **asdict(report)})
    else:
        listing = output.Listing(output.out(), output.Column("repaired", whole=True), "what")
        for names, what in (
            (report.audited, "its decision rows were missing"),
            (report.pointed, "the backend's alias was behind"),
            (report.removed, "a backend had an alias that no longer exists"),
        ):
            for each in names:
                listing.add(each, what)
        repaired = len(report.audited) + len(report.pointed) + len(report.removed)
        if repaired:
            listing.print()
        output.echo(f"generation {report.generation}: {f'{repaired:,} repaired' if repaired else 'all is well'}")
        for failure in report.failed:
            output.err().print(f"failed: {output.plain(failure)}")
    if report.failed:
        raise typer.Exit(1)


def search(
    alias: Name,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The question or words to search for.")],
    *,
    stores: Stores,
    as_json: Json = False,
    k: Annotated[int, typer.Option("-k", metavar="N", min=1, max=10_000, help="How many snippets to return.")] = 5,
) -> None:
    """Find the snippets nearest to a text, with everything needed to cite them."""
    with open_fence(stores) as fence:
        hits = fence.search(alias, text, k=k)
        # Hits name their build. Without hits, the alias is resolved once more.
        target = hits[0] if hits else fence.aliases.resolve(alias)
        index_hash, generation = target.index_hash, target.generation
    if as_json:
        query = {"alias": alias, "text": text, "k": k, "index_hash": index_hash, "generation": generation}
        output.print_json({**query, "hits": [asdict(hit) for hit in hits]})
        return
    for number, hit in enumerate(hits, start=1):
        _print_hit(number, hit)
    shown = output.key(index_hash, console=output.out())
    output.echo(f"{output.pluralize(len(hits), 'snippet')} from {alias}: INDEX_HASH {shown}, generation {generation}")


def _expected(fence: Fence, text: str | None) -> ExpectedTarget:
    from ragfence.cli.build_lookup import find_build
    from ragfence.core.aliases import UNSET

    if text is None:
        return UNSET
    return None if text.strip().lower() == NO_ALIAS else find_build(fence, text)


def _exit_refused(error: GateFailed, *, as_json: bool) -> NoReturn:
    """Prints all gates, passed and failed, and exits with 1."""
    if as_json:
        output.print_json({"error": output.error_document(error), "gates": error.report})
    else:
        _print_gates(error.report)
        output.print_error(error, as_json=False)
    raise typer.Exit(1)


def _print_swap(swapped: Swap, *, as_json: bool) -> None:
    if as_json:
        output.print_json({**asdict(swapped), "index_hash": swapped.index_hash})
        return
    if swapped.gates:
        _print_gates([each.as_dict() for each in swapped.gates])
    console = output.out()
    previous = swapped.previous if swapped.changed else None
    was = f" (was {output.key(previous.index_hash, console=console)})" if previous else ""
    target = output.key(swapped.index_hash, console=console) if swapped.index_hash else ""
    if swapped.target is None:
        output.echo(f"{swapped.alias}: removed, generation {swapped.generation}{was}")
    elif swapped.changed:
        forced = ", forced" if swapped.forced else ""
        output.echo(f"{swapped.alias} -> {target}, generation {swapped.generation}{forced}{was}")
        if previous is None:
            output.suggest(f"`ragfence search {swapped.alias} TEXT` searches it")
    else:
        output.echo(f"{swapped.alias} already points at {target}, generation {swapped.generation}")
    if not swapped.audited:
        output.err().print("warning: the decision row is missing; write it with `ragfence reconcile`")
    if not swapped.applied:
        output.err().print("warning: the backend's own alias is behind; move it with `ragfence reconcile`")


def _print_gates(gates: Iterable[Mapping[str, Any]]) -> None:
    listing = output.Listing(
        output.out(),
        output.Column("gate", whole=True),
        output.Column("verdict", whole=True),
        output.Column("value", right=True, whole=True),
        output.Column("limit", right=True, whole=True),
        "detail",
    )
    for gate in gates:
        verdict = "ok" if gate["ok"] else "failed"
        listing.add(gate["gate"], verdict, _number(gate["value"]), _number(gate["limit"]), gate["detail"] or " ")
    listing.print()


def _number(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{int(value):,}" if float(value).is_integer() else f"{value:.4f}".rstrip("0")


def _print_all(fence: Fence, *, as_json: bool) -> None:
    head, now_ms = fence.aliases.head(), fence.inspector.now_ms()
    found = [_columns(fence, name, held) for name, held in sorted(head.state.aliases.items())]
    if as_json:
        output.print_json({"generation": head.number, "aliases": [_dated(one) for one in found]})
        return
    if not found:
        output.echo("there is no alias yet; `ragfence swap ALIAS HASH` creates one")
        return
    console = output.out()
    listing = output.Listing(
        console,
        "alias",
        output.Column("target", whole=True),
        output.Column("generation", right=True, whole=True),
        output.Column("rows", right=True, whole=True),
        output.Column("since", whole=True),
        output.Column("backend", wide=True),
    )
    for one in found:
        rows = None if one["rows"] is None else f"{one['rows']:,}"
        target = output.key(one["index_hash"], console=console)
        since = (
            f"{output.time_cell(one['since'], console=console)} ({output.ago(one['since'], now_ms)})"
            if one["since"]
            else None
        )
        listing.add(one["alias"], target, one["generation"], rows, since, one["backend"])
    listing.print()


def _print_one(fence: Fence, name: str, limit: int, *, as_json: bool) -> None:
    """`limit`: how many changes to show; 0 for none."""
    from ragfence.indexes.aliases import unknown_alias
    from ragfence.indexes.catalog import check_alias

    now_ms, held = fence.inspector.now_ms(), fence.aliases.head().state.aliases.get(check_alias(name))
    # An alias that was removed still has its history.
    entries = fence.aliases.history(name, limit) if limit else []
    if held is None and not entries:
        raise unknown_alias(name)
    one = _columns(fence, name, held) if held else None
    if as_json:
        document = _dated(one) if one else {"alias": name, "index_hash": None}
        output.print_json({**document, "history": [_change(entry) for entry in entries]} if limit else document)
        return
    if one is None:
        output.echo(f"{name}: this alias was removed")
    else:
        listing = output.Listing(output.out(), output.Column("alias", whole=True), name)
        listing.add("target", one["index_hash"])
        listing.add("generation", one["generation"])
        listing.add("since", output.when(one["since"], now_ms) if one["since"] else None)
        listing.add("rows", None if one["rows"] is None else f"{one['rows']:,}")
        listing.add("backend", one["backend"])
        for number, earlier in enumerate(one["before"]):
            listing.add(" " if number else "before", earlier)
        listing.print()
    if entries:
        output.echo("")
        _print_history(entries)


def _columns(fence: Fence, name: str, held: Alias) -> dict[str, Any]:
    target, log = held.target, fence.indexes.builds_log
    entry = log.newest(target.index_hash)
    if entry is None or entry.seal is None or entry.seal.physical != target.physical:
        entry = log.at(target.index_hash, target.seal)
    seal, set_by = entry.seal if entry else None, fence.aliases.catalog.at(target.generation)
    return {
        "alias": name,
        "index_hash": target.index_hash,
        "generation": target.generation,
        "since": set_by.at_ms if set_by else None,
        "rows": seal.rows if seal else None,
        "documents": seal.documents if seal else None,
        "backend": target.backend,
        "physical": target.physical,
        "before": [each.index_hash for each in held.history],
    }


def _dated(one: dict[str, Any]) -> dict[str, Any]:
    return {**one, "since": output.iso(one["since"])}


def _change(entry: CatalogEntry) -> dict[str, Any]:
    document = asdict(entry)
    del document["state"], document["at_ms"], document["number"]
    return {"generation": entry.number, "at": output.iso(entry.at_ms), **document}


def _print_history(entries: list[CatalogEntry]) -> None:
    console = output.out()
    listing = output.Listing(
        console,
        output.Column("generation", right=True, whole=True),
        output.Column("change", whole=True),
        output.Column("at", whole=True),
        output.Column("target", whole=True),
        "gates",
        "reason",
        output.Column("actor", wide=True),
    )
    for entry in entries:
        failed = [str(gate["gate"]) for gate in entry.gates if not gate["ok"]]
        gates = f"failed: {', '.join(failed)}" if failed else f"{len(entry.gates)} ok" if entry.gates else None
        listing.add(
            entry.number,
            f"{entry.change}, forced" if entry.forced else entry.change,
            output.time_cell(entry.at_ms, console=console),
            output.key(entry.target.index_hash, console=console) if entry.target else None,
            gates,
            entry.reason,
            entry.actor,
        )
    listing.print()


def _print_hit(number: int, hit: Hit) -> None:
    """Its position in full, so that it can be copied; as much of its text as fits the line."""
    from rich.text import Text

    section = f"  {hit.section_id}" if hit.section_id else ""
    output.echo(f"{number:>2}. {hit.score:.4f}  {hit.doc_id}{section}  {hit.start}-{hit.end}")
    if hit.source_url and hit.source_url != hit.doc_id:
        output.echo(f"{INDENT}{hit.source_url}")
    console, line = output.out(), INDENT + " ".join(hit.text.split())
    if console.is_terminal:
        console.print(Text(output.plain(line)), no_wrap=True, overflow="ellipsis")
    else:
        output.echo(line)
