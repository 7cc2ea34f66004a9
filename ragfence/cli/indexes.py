"""`ragfence build`, `builds` and `gc`: indexes built, listed, and dropped when no alias can reach them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragfence.cli import output
from ragfence.cli.options import Json, Stores, check_moment, open_fence, to_ms
from ragfence.errors import BuildRetired

# Needed at run time: typer derives the choices of --metric from it.
from ragfence.indexes.backends.backend import Metric

if TYPE_CHECKING:
    from ragfence._progress import Gauge
    from ragfence.fence import Fence
    from ragfence.indexes.build import Build
    from ragfence.indexes.build_log import Attempt
    from ragfence.indexes.gc import GcReport
    from ragfence.indexes.indexes import BuildState
    from ragfence.indexes.spec import Explanation, IndexSpec


def _parameters(given: list[str] | None) -> list[str] | None:
    """Checks the parameters before any store is opened."""
    names = [each.partition("=")[0].strip() for each in given or ()]
    for each, name in zip(given or (), names, strict=True):
        if "=" not in each or not name:
            raise typer.BadParameter(f"{each!r} is not NAME=VALUE")
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise typer.BadParameter(f"{', '.join(repeated)} was given more than once")
    return given


def build(
    *,
    stores: Stores,
    as_json: Json = False,
    embedder: Annotated[
        str,
        typer.Option(
            "--embedder",
            metavar="NAME",
            help="The embedder: wordllama, minilm, openai:<model>, ... (docs/embedders.md).",
        ),
    ] = "wordllama",
    backend: Annotated[
        str,
        typer.Option(
            "--backend", metavar="NAME|URL", help="Where the index is stored: lance (next to the objects), or a URL."
        ),
    ] = "lance",
    metric: Annotated[Metric, typer.Option("--metric", help="The distance between vectors.")] = "cosine",
    index: Annotated[
        str,
        typer.Option(
            "--index",
            metavar="NAME",
            help="The type of index. flat compares every row, others are approximate; auto follows the policy.",
        ),
    ] = "auto",
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            metavar="NAME=VALUE",
            callback=_parameters,
            help="A parameter of the index, as JSON; may be repeated.",
        ),
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait", metavar="SECONDS", min=0, help="How long to wait if another process is building the same index."
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the inputs of the INDEX_HASH and what changed; build nothing.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="ALIAS|HASH",
            help="With --explain: compare with this build. By default, with the only alias.",
        ),
    ] = None,
) -> None:
    """Build an index of all live documents, or print the one that exists already for the same inputs."""
    if against is not None and not explain:
        raise typer.BadParameter("--against needs --explain")
    with open_fence(stores) as fence:
        spec = _spec(embedder, backend, metric, index, param)
        if explain:
            alias, index_hash = _compared_with(fence, against)
            explained = fence.indexes.explain(spec, against=index_hash)
            if index_hash and explained.against is None:
                raise BuildRetired(
                    f"{index_hash} was retired, and its inputs are no longer stored",
                    hint="compare with another build; `ragfence builds` lists them",
                )
            if as_json:
                output.print_json({**asdict(explained), "alias": alias})
            else:
                _print_explained(explained, alias, fence)
            return
        began, began_ms = time.monotonic(), fence.inspector.now_ms()
        with _progress() as gauge:
            built = fence.indexes.build(spec, wait_s=wait, progress=gauge)
        seconds = time.monotonic() - began
    # A build that another process sealed cost nothing now, even if that process died before it could report it.
    here = built.decision == "new" and built.sealed_at_ms >= began_ms
    if as_json:
        output.print_json(_build_document(built, seconds, here=here))
        return
    _print_build(built, seconds, here=here)
    if here:
        output.suggest(f"`ragfence swap ALIAS {built.index_hash[: output.NARROW_KEY_DIGITS]}` lets searches use it")


def builds(
    *,
    stores: Stores,
    as_json: Json = False,
) -> None:
    """List all builds, in the order in which they were sealed."""
    from ragfence.cli.build_lookup import sealed_at_ms

    with open_fence(stores) as fence:
        now_ms, head, log = fence.inspector.now_ms(), fence.aliases.head(), fence.indexes.builds_log
        states = list(output.track(fence.indexes.builds(), "reading builds"))
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
        output.print_json({"builds": found, "attempts": [_attempt(each) for each in attempts]})
    else:
        _print_builds(found, attempts, now_ms)


def gc(
    *,
    stores: Stores,
    as_json: Json = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Retire and drop them. Without --yes, only list what would be done.")
    ] = False,
    min_age: Annotated[
        str,
        typer.Option(
            "--min-age", metavar="SPAN", callback=check_moment, help="Keep builds sealed within this time: 1h, 7d."
        ),
    ] = "1h",
) -> None:
    """Drop builds that no alias can reach, and the remains of attempts that were given up. Lists them without --yes."""
    with open_fence(stores) as fence:
        now_ms = fence.inspector.now_ms()
        age_s = max(now_ms - to_ms(min_age, now_ms, now_ms), 0) / 1000
        report = fence.indexes.gc(dry_run=not yes, min_age_s=age_s)
    ok = not report.failed and not report.missing
    if as_json:
        output.print_json({"ok": ok, **asdict(report)})
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
    """Shows rows done, rows per second and the time left on stderr, if that is a terminal."""
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

        def advance(done: int, total: int | None) -> None:
            speed = shown.tasks[0].speed
            shown.update(task, completed=done, total=total, rate=f"{speed:,.0f}/s" if speed else "")

        yield advance


def _compared_with(fence: Fence, against: str | None) -> tuple[str | None, str | None]:
    """The alias and the INDEX_HASH to compare with. The name of an alias wins over a prefix of an INDEX_HASH."""
    from ragfence.cli.build_lookup import find_build

    aliases = fence.aliases.head().state.aliases
    if against is None and len(aliases) == 1:
        (against,) = aliases
    if against is None:
        return None, None
    if against in aliases:
        return against, aliases[against].target.index_hash
    return None, find_build(fence, against)


def _print_explained(explained: Explanation, alias: str | None, fence: Fence) -> None:
    now, before = _flat(explained.inputs), _flat(explained.before or explained.inputs)
    columns = (
        output.Column("input", whole=True),
        output.Column("now", cut=True),
        "",
        output.Column(alias or "before", cut=True),
    )
    compared = explained.before is not None
    listing = output.Listing(output.out(), *(columns if compared else columns[:2]))
    for name in {**now, **before}:
        changed = now.get(name) != before.get(name)
        cells = (name, now.get(name), "changed" if changed else " ", before.get(name) if changed else " ")
        listing.add(*(cells if compared else cells[:2]))
    listing.print()
    output.echo(f"{explained.index_hash}: {explained.state}")
    if explained.against is None:
        count = len(fence.aliases.names())
        why = f"there are {count} aliases" if count else "there is no alias yet"
        output.echo(f"not compared with another build: {why}; name one with --against ALIAS|HASH")
        return
    name = f"{alias}, {explained.against}" if alias else explained.against
    output.echo(f"changed since {name}: {', '.join(explained.differing) or 'nothing'}")
    if documents := explained.documents:
        output.echo(
            f"documents: {documents.added:,} added, {documents.removed:,} removed, {documents.changed:,} changed, "
            f"{documents.unchanged:,} unchanged"
        )
    elif "corpus" in explained.differing:
        output.echo("documents: the list of the earlier build is no longer stored")


def _flat(inputs: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """One entry per value, such as `embedder.revision`."""
    lines: dict[str, str] = {}
    for name, value in inputs.items():
        if isinstance(value, Mapping) and value:
            lines |= _flat(value, f"{above}{name}.")
        else:
            lines[above + name] = value if isinstance(value, str) else json.dumps(value)
    return lines


def _build_document(build: Build, seconds: float, *, here: bool) -> dict[str, Any]:
    flags = build.receipt.flags
    return {
        "decision": build.decision.value,
        "embedded": build.seal.made.get("embedded", 0) if here else 0,
        "seconds": round(seconds, 3),
        "waited_ms": flags.waited_ms,
        "takeover": flags.takeover,
        "sealed_at": output.iso(build.sealed_at_ms),
        "number": build.number,
        **asdict(build.seal),
    }


def _print_build(build: Build, seconds: float, *, here: bool) -> None:
    seal, how = build.seal, build.seal.made
    embedded = f"{how.get('embedded', 0):,} of {output.pluralize(seal.rows, 'snippet')}" if here else "nothing"
    listing = output.Listing(output.out(), output.Column("INDEX_HASH", whole=True), build.index_hash)
    listing.add("decision", build.decision.value)
    listing.add("rows", f"{seal.rows:,}")
    listing.add("documents", f"{seal.documents:,}")
    listing.add("embedded now", embedded)
    listing.add("started from", how.get("base") or "no other build")
    listing.add("verified", _checks(seal.checks))
    listing.add("index", str(seal.inputs.get("index", "-")))
    listing.add("recall", _recall(seal.checks))
    listing.add("sealed", output.moment(build.sealed_at_ms))
    parts = (
        f" (writing {output.span(how['write_ms'])}, verifying {output.span(how['verify_ms'])})" if here and how else ""
    )
    listing.add("time", f"{output.span(seconds * 1000)}{parts}")
    listing.print()
    if not seal.documents:
        output.err().print(
            "warning: the index is empty, because there are no documents; `ragfence ingest PATH` adds some"
        )


def _checks(checks: Mapping[str, Any]) -> str:
    """The result of the verification in a line."""
    if not checks:
        return "-"
    rows, compared, searched = checks["rows_wanted"], checks["vectors_compared"], checks["self_recall_of"]
    vectors = f"{checks['vectors_equal']:,} of {compared:,} vectors as written"
    if compared < rows:  # a build of an earlier version, or one from which documents were purged later
        vectors += f" (a sample of {compared:,} of {rows:,})"
    searches = "every row" if searched == rows else f"a sample of {searched:,} of {output.pluralize(rows, 'row')}"
    found = f"{checks['rows']:,} of {output.pluralize(rows, 'row')}"
    return f"{found}, {vectors}, self-recall {checks['self_recall']:.1%} of {searches}"


def _recall(checks: Mapping[str, Any]) -> str:
    if "recall" not in checks:
        return "exact (every row is compared)"
    share, searches, k = checks["recall"], checks["recall_of"], checks["recall_k"]
    return f"{share:.1%} of the {k} nearest rows of exact search, in a sample of {output.pluralize(searches, 'search')}"


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
        output.Column("sealed at", whole=True),
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
            output.time_cell(one["at_ms"], console=console) if sealed else None,
            ", ".join(one["aliases"]),
        )
    if found:
        listing.print()
    else:
        output.echo("there is no build yet; `ragfence build` builds one")
    for attempt in attempts:
        index_hash = output.key(attempt.index_hash, console=console)
        output.echo(f"not sealed: {index_hash}, started by {attempt.owner} {output.ago(attempt.at_ms, now_ms)}")


def _print_gc(report: GcReport) -> None:
    console = output.out()
    listing = output.Listing(console, output.Column("what", whole=True), output.Column("name", whole=True), "why")
    would = "would be " if report.dry_run else ""
    for names, what, why in (
        (report.retired, f"{would}retired", "no alias points at it or can be rolled back to it"),
        (report.dropped, f"{would}dropped", "its build is retired, or its attempt was given up"),
        (report.revived, "revived", "an alias was pointed at it in the meantime"),
        (report.young, "kept", "sealed within --min-age"),
        (report.pending, "kept", "its attempt may still be running"),
        (report.unknown, "left alone", "it belongs to no known build or attempt"),
    ):
        for name in names:
            listing.add(what, name, why)
    if any((report.retired, report.dropped, report.revived, report.young, report.pending, report.unknown)):
        listing.print()
    output.echo(
        f"{would}retired: {output.pluralize(len(report.retired), 'build')}; "
        f"{would}dropped: {output.pluralize(len(report.dropped), 'physical index')}; "
        f"kept: {output.pluralize(len(report.kept), 'build')}"
    )
    if report.dry_run:
        output.echo(
            "dry run: nothing was changed; do it with --yes" if report.retired or report.dropped else "nothing to do"
        )
    for index_hash in report.missing:
        output.err().print(f"missing: {index_hash} is kept for an alias, but its rows are not in the backend")
        output.err().print(
            "  -> build it again with `ragfence build`, or move the alias with `ragfence rollback ALIAS`"
        )
    for failure in report.failed:
        output.err().print(f"failed: {output.plain(failure)}")
