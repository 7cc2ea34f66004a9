"""`ragfence build`, `builds` and `gc`: indexes made, looked at, and taken away when nobody can reach them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Objects, PolicyFile, Store, StoreOptions, Tenant, _moment, opened
from ragfence.errors import BuildRetired

# Not only for type checkers: typer makes the choices of --metric out of it.
from ragfence.indexes.backends.backend import Metric

if TYPE_CHECKING:
    from ragfence._progress import Gauge
    from ragfence.fence import Fence
    from ragfence.indexes.build import Build
    from ragfence.indexes.build_log import Attempt
    from ragfence.indexes.gc import GcReport
    from ragfence.indexes.indexes import BuildState
    from ragfence.indexes.spec import Explained, IndexSpec


def _parameters(given: list[str] | None) -> list[str] | None:
    """Checked before anything is opened."""
    names = [each.partition("=")[0].strip() for each in given or ()]
    for each, name in zip(given or (), names, strict=True):
        if "=" not in each or not name:
            raise typer.BadParameter(f"{each!r} is no name=value")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise typer.BadParameter(f"{', '.join(twice)} was given twice")
    return given


def build(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    embedder: Annotated[
        str,
        typer.Option("--embedder", metavar="NAME", help="wordllama, minilm, openai:<model>, ... (docs/embedders.md)"),
    ] = "wordllama",
    backend: Annotated[
        str, typer.Option("--backend", metavar="NAME|URL", help="lance, beside the objects, or the URL of another.")
    ] = "lance",
    metric: Annotated[Metric, typer.Option("--metric", help="How distance is measured.")] = "cosine",
    index: Annotated[
        str,
        typer.Option(
            "--index",
            metavar="NAME",
            help="flat compares with every row; others are approximate; auto goes by the policy.",
        ),
    ] = "auto",
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            metavar="NAME=VALUE",
            callback=_parameters,
            help="Of the index; repeat for more. Values are JSON.",
        ),
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait", metavar="SECONDS", min=0, help="How long to wait for another process that builds the same index."
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what the INDEX_HASH is made of and what changed; build nothing.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="ALIAS|HASH", help="With --explain: compare with this build; else with the only alias."
        ),
    ] = None,
) -> None:
    """Builds an index of all live documents. If that index exists already, it is only named."""
    if against is not None and not explain:
        raise typer.BadParameter("--against goes with --explain")
    with opened(StoreOptions(store, objects, tenant, policy)) as fence:
        spec = _spec(embedder, backend, metric, index, param)
        if explain:
            alias, index_hash = _compared_with(fence, against)
            explained = fence.indexes.explain(spec, against=index_hash)
            if index_hash and explained.against is None:
                raise BuildRetired(
                    f"{index_hash} was retired, and what it was made of is not known any more",
                    hint="compare with another one; `ragfence builds` lists them",
                )
            if as_json:
                output.document({**asdict(explained), "alias": alias})
            else:
                _print_explained(explained, alias, fence)
            return
        began, began_ms = time.monotonic(), fence.inspector.now_ms()
        with _progress() as told:
            made = fence.indexes.build(spec, wait_s=wait, progress=told)
        seconds = time.monotonic() - began
    # What somebody else sealed, also one who died before he could say so, cost nothing now.
    here = made.decision == "new" and made.sealed_at_ms >= began_ms
    if as_json:
        output.document(_told(made, seconds, here=here))
    else:
        _print_build(made, seconds, here=here)


def builds(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
) -> None:
    """Every build there is, the one sealed last at the end."""
    from ragfence.cli.build_lookup import sealed_at_ms

    with opened(StoreOptions(store, objects, tenant, policy)) as fence:
        now_ms, head, log = fence.inspector.now_ms(), fence.aliases.head(), fence.indexes.builds_log
        states = list(output.counted(fence.indexes.builds(), "reading builds"))
        sealed = {(build.index_hash, build.entry.token) for build in states}
        attempts = [each for each in log.attempts() if (each.index_hash, each.token) not in sealed]
        found = [
            _columns(
                build,
                sealed_at_ms(fence, build.index_hash, build.entry),
                retiring=build.entry.usable and head.state.retires(build.entry, build.index_hash),
            )
            for build in states
        ]
    found.sort(key=lambda one: (one["at_ms"], one["index_hash"]))
    if as_json:
        for one in found:
            one["sealed_at"] = output.iso(one.pop("at_ms")) if one["rows"] is not None else None
        output.document({"builds": found, "attempts": [_attempt(each) for each in attempts]})
    else:
        _print_builds(found, attempts, now_ms)


def gc(
    store: Store = None,
    objects: Objects = None,
    tenant: Tenant = None,
    policy: PolicyFile = None,
    as_json: Json = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do it. Without it, only what would be done is said.")
    ] = False,
    min_age: Annotated[
        str, typer.Option("--min-age", metavar="SPAN", callback=_moment, help="Spare builds sealed since: 1h, 7d.")
    ] = "1h",
) -> None:
    """Retires and drops builds that no alias can reach, and what attempts left that nobody can seal any more."""
    from ragfence.audit.audit import _moment_ms

    with opened(StoreOptions(store, objects, tenant, policy)) as fence:
        now_ms = fence.inspector.now_ms()
        age_s = max(now_ms - _moment_ms(min_age, now_ms, now_ms), 0) / 1000
        report = fence.indexes.gc(dry_run=not yes, min_age_s=age_s)
    ok = not report.failed and not report.missing
    if as_json:
        output.document({"ok": ok, **asdict(report)})
    else:
        _print_gc(report)
    if not ok:
        raise typer.Exit(1)


def _spec(embedder: str, backend: str, metric: Metric, index: str, param: list[str] | None) -> IndexSpec:
    from ragfence.indexes.spec import IndexSpec

    parameters = {name.strip(): _value(text) for name, _, text in (each.partition("=") for each in param or ())}
    return IndexSpec(embedder=embedder, backend=backend, metric=metric, index=index, parameters=parameters)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@contextlib.contextmanager
def _progress() -> Iterator[Gauge]:
    """Rows by now, how fast, and how long it will take; on stderr, where somebody sits in front of it."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = output.err()
    columns = (
        TextColumn("building"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} rows"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("building", total=None, rate="")

        def told(done: int, total: int | None) -> None:
            speed = shown.tasks[0].speed
            shown.update(task, completed=done, total=total, rate=f"{speed:,.0f}/s" if speed else "")

        yield told


def _compared_with(fence: Fence, against: str | None) -> tuple[str | None, str | None]:
    """The alias, and the INDEX_HASH; a name that an alias has is taken for the alias."""
    from ragfence.cli.build_lookup import pick

    aliases = fence.aliases.head().state.aliases
    if against is None and len(aliases) == 1:
        (against,) = aliases
    if against is None:
        return None, None
    if against in aliases:
        return against, aliases[against].target.index_hash
    return None, pick(fence, against)


def _print_explained(told: Explained, alias: str | None, fence: Fence) -> None:
    now, before = _flat(told.inputs), _flat(told.before or told.inputs)
    columns = (output.Column("input", whole=True), "now", "", alias or "before")
    compared = told.before is not None
    listing = output.Listing(output.out(), *(columns if compared else columns[:2]))
    for name in {**now, **before}:
        changed = now.get(name) != before.get(name)
        cells = (name, now.get(name), "changed" if changed else " ", before.get(name) if changed else " ")
        listing.add(*(cells if compared else cells[:2]))
    listing.print()
    output.say(f"{told.index_hash}: {told.state}")
    if told.against is None:
        count = len(fence.aliases.names())
        why = f"there are {count} aliases" if count else "there is no alias yet"
        output.say(f"compared with no build: {why}; --against ALIAS|HASH names one")
        return
    name = f"{alias}, {told.against}" if alias else told.against
    output.say(f"changed since {name}: {', '.join(told.differing) or 'nothing'}")
    if documents := told.documents:
        output.say(
            f"documents: {documents.added:,} added, {documents.removed:,} removed, {documents.changed:,} changed, "
            f"{documents.unchanged:,} as before"
        )
    elif "corpus" in told.differing:
        output.say("documents: which ones is not known any more")


def _flat(inputs: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """One line per value: `embedder.revision`."""
    lines: dict[str, str] = {}
    for name, value in inputs.items():
        if isinstance(value, Mapping) and value:
            lines |= _flat(value, f"{above}{name}.")
        else:
            lines[above + name] = value if isinstance(value, str) else json.dumps(value)
    return lines


def _told(made: Build, seconds: float, *, here: bool) -> dict[str, Any]:
    flags = made.receipt.flags
    return {
        "decision": made.decision.value,
        "embedded": made.seal.made.get("embedded", 0) if here else 0,
        "seconds": round(seconds, 3),
        "waited_ms": flags.waited_ms,
        "takeover": flags.takeover,
        "sealed_at": output.iso(made.sealed_at_ms),
        "number": made.number,
        **asdict(made.seal),
    }


def _print_build(made: Build, seconds: float, *, here: bool) -> None:
    seal, how = made.seal, made.seal.made
    embedded = f"{how.get('embedded', 0):,} of {output.many(seal.rows, 'snippet')}" if here else "nothing"
    listing = output.Listing(output.out(), output.Column("INDEX_HASH", whole=True), made.index_hash)
    listing.add("decision", made.decision.value)
    listing.add("rows", f"{seal.rows:,}")
    listing.add("documents", f"{seal.documents:,}")
    listing.add("embedded now", embedded)
    listing.add("taken from", how.get("base") or "no other build")
    listing.add("verified", _checks(seal.checks))
    listing.add("index", str(seal.inputs.get("index", "-")))
    listing.add("recall", _recall(seal.checks))
    listing.add("sealed", output.moment(made.sealed_at_ms))
    parts = (
        f" (writing {output.span(how['write_ms'])}, verifying {output.span(how['verify_ms'])})" if here and how else ""
    )
    listing.add("time", f"{output.span(seconds * 1000)}{parts}")
    listing.print()
    if not seal.documents:
        output.err().print("warning: there are no documents in it; `ragfence ingest PATH` brings some")


def _checks(checks: Mapping[str, Any]) -> str:
    """What the verification saw, in a line."""
    if not checks:
        return "-"
    rows, compared, searched = checks["rows_wanted"], checks["vectors_compared"], checks["self_recall_of"]
    vectors = f"{checks['vectors_equal']:,} of {compared:,} vectors as written"
    if compared < rows:  # a build of an earlier version, or one from which documents were purged since
        vectors += f" (a sample of {compared:,} of {rows:,})"
    searches = "every row" if searched == rows else f"a sample of {searched:,} of {output.many(rows, 'row')}"
    found = f"{checks['rows']:,} of {output.many(rows, 'row')}"
    return f"{found}, {vectors}, self-recall {checks['self_recall']:.1%} of {searches}"


def _recall(checks: Mapping[str, Any]) -> str:
    if "recall" not in checks:
        return "every search is exact"
    share, searches, k = checks["recall"], checks["recall_of"], checks["recall_k"]
    return f"{share:.1%} of the {k} nearest rows of exact search, in a sample of {output.many(searches, 'search')}"


def _columns(build: BuildState, at_ms: int, *, retiring: bool) -> dict[str, Any]:
    entry = build.entry
    seal = entry.seal
    return {
        "index_hash": build.index_hash,
        "state": "retiring" if retiring else entry.kind,
        "number": entry.number,
        "rows": seal.rows if seal else None,
        "documents": seal.documents if seal else None,
        "embedder": seal.inputs.get("embedder", {}).get("name") if seal else None,
        "backend": seal.backend if seal else None,
        "metric": seal.metric if seal else None,
        "index": seal.inputs.get("index") if seal else None,
        "recall": seal.checks.get("recall") if seal else None,
        "physical": seal.physical if seal else None,
        "content_digest": seal.content_digest if seal else None,
        "aliases": list(build.aliases),
        "reason": entry.reason or None,
        "at_ms": at_ms,
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "index_hash": attempt.index_hash,
        "physical": attempt.physical,
        "backend": attempt.backend,
        "owner": attempt.owner,
        "began": output.iso(attempt.at_ms),
    }


def _print_builds(found: list[dict[str, Any]], attempts: list[Attempt], now_ms: int) -> None:
    console = output.out()
    listing = output.Listing(
        console,
        output.Column("hash", whole=True),
        output.Column("state", whole=True),
        output.Column("rows", right=True, whole=True),
        output.Column("documents", right=True, whole=True),
        output.Column("embedder", wide=True),
        output.Column("backend", wide=True),
        "sealed at",
        "aliases",
    )
    for one in found:
        sealed = one["rows"] is not None
        listing.add(
            output.key(one["index_hash"], console=console),
            one["state"],
            f"{one['rows']:,}" if sealed else None,
            f"{one['documents']:,}" if sealed else None,
            one["embedder"],
            one["backend"],
            output.moment(one["at_ms"]) if sealed else None,
            ", ".join(one["aliases"]),
        )
    if found:
        listing.print()
    else:
        output.say("there is no build yet; `ragfence build` makes one")
    for attempt in attempts:
        index_hash = output.key(attempt.index_hash, console=console)
        output.say(f"not sealed: {index_hash}, begun by {attempt.owner} {output.ago(attempt.at_ms, now_ms)}")


def _print_gc(report: GcReport) -> None:
    console = output.out()
    listing = output.Listing(console, output.Column("what", whole=True), output.Column("name", whole=True), "why")
    would = "would be " if report.dry_run else ""
    for names, what, why in (
        (report.retired, f"{would}retired", "no alias points at it, or may be rolled back to it"),
        (report.dropped, f"{would}dropped", "of a build that is retired, or of an attempt that was given up"),
        (report.revived, "revived", "somebody wanted it meanwhile"),
        (report.young, "spared", "sealed since --min-age"),
        (report.pending, "spared", "of an attempt that may be at work"),
        (report.unknown, "left alone", "neither a build nor an attempt knows it"),
    ):
        for name in names:
            listing.add(what, name, why)
    if any((report.retired, report.dropped, report.revived, report.young, report.pending, report.unknown)):
        listing.print()
    output.say(
        f"{would}retired: {output.many(len(report.retired), 'build')}; "
        f"{would}dropped: {output.many(len(report.dropped), 'physical index')}; "
        f"kept: {output.many(len(report.kept), 'build')}"
    )
    if report.dry_run:
        output.say(
            "a dry run: nothing was changed; --yes does it" if report.retired or report.dropped else "nothing to do"
        )
    for index_hash in report.missing:
        output.err().print(f"missing: {index_hash} is kept for an alias, but its rows are not in the backend")
        output.err().print("  -> build it again, or move the alias: `ragfence rollback ALIAS`")
    for failure in report.failed:
        output.err().print(f"failed: {output.plain(failure)}")
