"""`ragfence swap`, `rollback`, `alias`, `reconcile` and `search`: names for builds, and what is found behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Objects, PolicyFile, Store, StoreOptions, Tenant, opened
from ragfence.errors import GateFailed

if TYPE_CHECKING:
    from ragfence.core.aliases import ExpectedTarget, Hit
    from ragfence.fence import Fence
    from ragfence.indexes.aliases import Swap
    from ragfence.indexes.catalog import Alias, CatalogEntry

NO_ALIAS = "none"
INDENT = "    "

Name = Annotated[str, typer.Argument(metavar="ALIAS", help="A name that searches use.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; kept in the log.")]


def swap(
    alias: Name,
    index_hash: Annotated[
        str, typer.Argument(metavar="HASH", help="8 or more digits of an INDEX_HASH, or latest: the one sealed last.")
    ],
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect",
            metavar="HASH|none",
            help="Swap only if the alias points there now; none: only if there is no such alias.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Swap even if a gate fails; needs a --reason.")] = False,
    reason: Reason = "",
    golden: Annotated[
        str | None, typer.Option("--golden", metavar="FILE", help="Golden queries, one JSON object a line.")
    ] = None,
) -> None:
    """Points an alias at a sealed build, if all gates let it."""
    from ragfence.cli.build_lookup import pick_or_latest
    from ragfence.indexes.gates import Gates

    if force and not reason.strip():
        raise typer.BadParameter("--force needs a --reason: it is kept in the log, with the gates that failed")
    with opened(StoreOptions(store, objects, tenant, policy)) as fence:
        wanted, expected = pick_or_latest(fence, index_hash), _expected(fence, expect)
        try:
            done = fence.aliases.swap(
                alias, wanted, expect=expected, force=force, reason=reason, gates=Gates(golden=golden)
            )
        except GateFailed as refused:
            _refused(refused, as_json=as_json)
    _tell_swap(done, as_json=as_json)


def rollback(
    alias: Name,
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    to: Annotated[
        str | None, typer.Option("--to", metavar="HASH", help="A build that it has had; else the one before this.")
    ] = None,
    reason: Reason = "",
) -> None:
    """Points an alias at the build it had before. What was live becomes the one before."""
    from ragfence.cli.build_lookup import pick

    with opened(StoreOptions(store, objects, tenant, policy)) as fence:
        try:
            done = fence.aliases.rollback(alias, to=pick(fence, to) if to else None, reason=reason)
        except GateFailed as refused:
            _refused(refused, as_json=as_json)
    _tell_swap(done, as_json=as_json)


def alias(
    name: Annotated[str | None, typer.Argument(metavar="[ALIAS]", help="Only this one; else all of them.")] = None,
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    history: Annotated[bool, typer.Option("--history", help="With what was done to it, the newest first.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Of the history at most so much; 0 for all.")] = 100,
    remove: Annotated[bool, typer.Option("--remove", help="Take the alias away; needs a --reason.")] = False,
    reason: Reason = "",
) -> None:
    """Where the aliases point, since when, and how they came there."""
    if (history or remove) and name is None:
        raise typer.BadParameter("--history and --remove are about one ALIAS")
    if history and remove:
        raise typer.BadParameter("--history and --remove do not go together")
    if bool(reason.strip()) != remove:
        raise typer.BadParameter(
            "--remove needs a --reason: it is kept in the log" if remove else "--reason goes with --remove"
        )
    with opened(StoreOptions(store, objects, tenant, policy)) as fence:
        if name is None:
            _tell_all(fence, as_json=as_json)
        elif remove:
            _tell_swap(fence.aliases.remove(name, reason), as_json=as_json)
        else:
            _tell_one(fence, name, (limit or 2**31) if history else 0, as_json=as_json)


def reconcile(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
) -> None:
    """Does what a swap that was killed left undone: its decision rows, and the backends' own aliases."""
    with opened(StoreOptions(store, objects, tenant, policy)) as fence:
        report = fence.aliases.reconcile()
    if as_json:
        output.document({"ok": not report.failed, **asdict(report)})
    else:
        listing = output.Listing(output.out(), output.Column("mended", whole=True), "what")
        for names, what in (
            (report.audited, "its decision rows were missing"),
            (report.pointed, "the backend's alias was behind"),
            (report.removed, "a backend had an alias that is not there any more"),
        ):
            for each in names:
                listing.add(each, what)
        mended = len(report.audited) + len(report.pointed) + len(report.removed)
        if mended:
            listing.print()
        output.say(f"generation {report.generation}: {f'{mended:,} mended' if mended else 'all is as it should be'}")
        for failure in report.failed:
            output.err().print(f"failed: {output.plain(failure)}")
    if report.failed:
        raise typer.Exit(1)


def search(
    alias: Name,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What is searched for.")],
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    k: Annotated[int, typer.Option("-k", min=1, max=10_000, help="How many snippets.")] = 5,
) -> None:
    """The nearest snippets of the build that an alias points at, each with what is needed to cite it."""
    with opened(StoreOptions(store, objects, tenant, policy)) as fence:
        hits = fence.search(alias, text, k=k)
        # They name the build they are from; where there is none, it is the one of now.
        target = hits[0] if hits else fence.aliases.resolve(alias)
        index_hash, generation = target.index_hash, target.generation
    if as_json:
        told = {"alias": alias, "text": text, "k": k, "index_hash": index_hash, "generation": generation}
        output.document({**told, "hits": [asdict(hit) for hit in hits]})
        return
    for number, hit in enumerate(hits, start=1):
        _print_hit(number, hit)
    output.say(f"{output.many(len(hits), 'snippet')} from {alias}: INDEX_HASH {index_hash}, generation {generation}")


def _expected(fence: Fence, text: str | None) -> ExpectedTarget:
    from ragfence.cli.build_lookup import pick
    from ragfence.core.aliases import UNSET

    if text is None:
        return UNSET
    return None if text.strip().lower() == NO_ALIAS else pick(fence, text)


def _refused(error: GateFailed, *, as_json: bool) -> NoReturn:
    """All gates, also those that would have let it pass."""
    if as_json:
        told = output.as_told(error)
        output.document({"error": told, "gates": error.report})
    else:
        _print_gates(error.report)
        output.error(error, as_json=False)
    raise typer.Exit(1)


def _tell_swap(done: Swap, *, as_json: bool) -> None:
    if as_json:
        output.document({**asdict(done), "index_hash": done.index_hash})
        return
    if done.gates:
        _print_gates([each.as_dict() for each in done.gates])
    was = f" (was {done.previous.index_hash})" if done.previous and done.changed else ""
    if done.target is None:
        output.say(f"{done.alias}: removed, generation {done.generation}{was}")
    elif done.changed:
        forced = ", forced" if done.forced else ""
        output.say(f"{done.alias} -> {done.index_hash}, generation {done.generation}{forced}{was}")
    else:
        output.say(f"{done.alias} pointed there already: {done.index_hash}, generation {done.generation}")
    if not done.audited:
        output.err().print("warning: the decision could not be written; `ragfence reconcile` does it")
    if not done.applied:
        output.err().print("warning: the backend's own alias is behind; `ragfence reconcile` moves it")


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


def _tell_all(fence: Fence, *, as_json: bool) -> None:
    head, now_ms = fence.aliases.head(), fence.inspector.now_ms()
    found = [_columns(fence, name, held) for name, held in sorted(head.state.aliases.items())]
    if as_json:
        output.document({"generation": head.number, "aliases": [_dated(one) for one in found]})
        return
    if not found:
        output.say("there is no alias yet; `ragfence swap ALIAS HASH` makes one")
        return
    console = output.out()
    listing = output.Listing(
        console,
        "alias",
        output.Column("target", whole=True),
        output.Column("generation", right=True, whole=True),
        output.Column("rows", right=True, whole=True),
        "since",
        output.Column("backend", wide=True),
    )
    for one in found:
        rows = None if one["rows"] is None else f"{one['rows']:,}"
        target = output.key(one["index_hash"], console=console)
        since = output.when(one["since"], now_ms) if one["since"] else None
        listing.add(one["alias"], target, one["generation"], rows, since, one["backend"])
    listing.print()


def _tell_one(fence: Fence, name: str, limit: int, *, as_json: bool) -> None:
    """`limit`: of the history; 0 for none of it."""
    from ragfence.indexes.aliases import unknown
    from ragfence.indexes.catalog import check_alias

    now_ms, held = fence.inspector.now_ms(), fence.aliases.head().state.aliases.get(check_alias(name))
    # An alias that was removed still has its history.
    entries = fence.aliases.history(name, limit) if limit else []
    if held is None and not entries:
        raise unknown(name)
    one = _columns(fence, name, held) if held else None
    if as_json:
        told = _dated(one) if one else {"alias": name, "index_hash": None}
        output.document({**told, "history": [_change(entry) for entry in entries]} if limit else told)
        return
    if one is None:
        output.say(f"{name}: there is no such alias any more")
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
        output.say("")
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
    told = asdict(entry)
    del told["state"], told["at_ms"], told["number"]
    return {"generation": entry.number, "at": output.iso(entry.at_ms), **told}


def _print_history(entries: list[CatalogEntry]) -> None:
    console = output.out()
    listing = output.Listing(
        console,
        output.Column("generation", right=True, whole=True),
        output.Column("change", whole=True),
        "at",
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
            output.moment(entry.at_ms),
            output.key(entry.target.index_hash, console=console) if entry.target else None,
            gates,
            entry.reason,
            entry.actor,
        )
    listing.print()


def _print_hit(number: int, hit: Hit) -> None:
    """Its place whole, so that it can be copied; of its text what fits the line."""
    from rich.text import Text

    section = f"  {hit.section_id}" if hit.section_id else ""
    output.say(f"{number:>2}. {hit.score:.4f}  {hit.doc_id}{section}  {hit.start}-{hit.end}")
    if hit.source_url:
        output.say(f"{INDENT}{hit.source_url}")
    console, line = output.out(), INDENT + " ".join(hit.text.split())
    if console.is_terminal:
        console.print(Text(output.plain(line)), no_wrap=True, overflow="ellipsis")
    else:
        output.say(line)
