"""Measures ragfence beside what one would use instead, and says which goals are met.

    part 1   operations, beside raw redis-py and AWS Lambda Powertools
    part 2   documents, beside LangChain and LlamaIndex
    part 3   indexes, beside plain LanceDB and Qdrant
    part 4   the ingest asset of Dagster, beside the bare call
    part 5   the HTTP API, beside a FastAPI route that does nothing and asgi-idempotency-header
    part 6   the audit: questions to a large ledger, and what the rows cost
    part 7   one tenant while another attacks the server, beside an unrelated process of the same load
    part 8   what grows with the store: status, statistics and metrics; and searches in a large index
    part 9   events: consumers beside a bare loop, webhooks beside a route that only verifies

python -m tests.bench                 all; writes out/bench.json, and out/bench-*.json for the other parts
python -m tests.bench --part 2        one of them
python -m tests.bench --quick         fewer rounds, smaller stores
python -m tests.bench --write-docs    docs/benchmarks.md out of these files; measures nothing
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tests.bench import (
    audit_report,
    audit_run,
    audit_scale,
    docs,
    documents_report,
    documents_run,
    documents_scale,
    indexes_report,
    indexes_run,
    indexes_scale,
    report,
    run,
)
from tests.bench.peers.process import DOCUMENTS, ENVIRONMENTS, POWERTOOLS, python_of
from tests.bench.scale import FULL, QUICK

PAGE = Path("docs/benchmarks.md")


def main() -> int:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 150)
    if options.write_docs:
        return _write_docs(options.json, console)
    parts: dict[int, Callable[[argparse.Namespace, Console], None]] = {
        1: _operations,
        2: _documents,
        3: _indexes,
        4: _dagster,
        5: _api,
        6: _audit,
        7: _tenants,
        8: _size,
        9: _events,
    }
    for part in [options.part] if options.part else parts:
        parts[part](options, console)
    return 0


def _operations(options: argparse.Namespace, console: Console) -> None:
    scale = QUICK if options.quick else FULL
    if options.rounds is not None:
        scale = replace(scale, rounds=options.rounds)
    if options.quick:
        console.print(
            f"quick: {scale.rounds} rounds, {scale.many:,} records in the large store instead of {FULL.many:,}"
        )
    measured = run.measure(scale, _peer(options, POWERTOOLS, console), _dim(console))
    run.write(options.json, measured)
    report.show(console, measured)
    console.print(f"written to {options.json}")


def _documents(options: argparse.Namespace, console: Console) -> None:
    scale = documents_scale.QUICK if options.quick else documents_scale.FULL
    if options.rounds is not None:
        scale = replace(scale, rounds=options.rounds)
    if options.quick:
        console.print(
            f"quick: {scale.rounds} rounds, {scale.documents:,} documents instead of "
            f"{documents_scale.FULL.documents:,}, {scale.streamed:,} streamed"
        )
    measured = documents_run.measure(scale, _peer(options, DOCUMENTS, console), _dim(console))
    run.write(_beside(options.json, "documents"), measured)
    documents_report.show(console, measured)
    console.print(f"written to {_beside(options.json, 'documents')}")


def _indexes(options: argparse.Namespace, console: Console) -> None:
    scale = indexes_scale.QUICK if options.quick else indexes_scale.FULL
    if options.rounds is not None:
        scale = replace(scale, rounds=options.rounds)
    if options.quick:
        console.print(
            f"quick: {scale.rounds} rounds, {scale.rows:,} rows instead of {indexes_scale.FULL.rows:,}, "
            f"{scale.many:,} documents in the large store"
        )
    measured = indexes_run.measure(scale, _dim(console))
    run.write(_beside(options.json, "indexes"), measured)
    indexes_report.show(console, measured)
    console.print(f"written to {_beside(options.json, 'indexes')}")


def _dagster(options: argparse.Namespace, console: Console) -> None:
    from tests.bench import dagster_overhead  # Dagster takes seconds to load, and is in nobody else's way here

    measured = dagster_overhead.measure(quick=options.quick, rounds=options.rounds, say=_dim(console))
    run.write(_beside(options.json, "dagster"), measured)
    dagster_overhead.show(console, measured)
    console.print(f"written to {_beside(options.json, 'dagster')}")


def _api(options: argparse.Namespace, console: Console) -> None:
    from tests.bench import api_report, api_run, api_scale
    from tests.bench.api_servers import API

    scale = api_scale.QUICK if options.quick else api_scale.FULL
    if options.rounds is not None:
        scale = replace(scale, rounds=options.rounds)
    if options.quick:
        console.print(f"quick: {scale.rounds} rounds of {scale.seconds:g} s instead of {api_scale.FULL.seconds:g} s")
    measured = api_run.measure(scale, _peer(options, API, console), _dim(console))
    run.write(_beside(options.json, "api"), measured)
    api_report.show(console, measured)
    console.print(f"written to {_beside(options.json, 'api')}")


def _audit(options: argparse.Namespace, console: Console) -> None:
    scale = audit_scale.QUICK if options.quick else audit_scale.FULL
    if options.rounds is not None:
        scale = replace(scale, rounds=options.rounds)
    if options.quick:
        console.print(f"quick: {scale.rounds} rounds, {scale.rows:,} rows instead of {audit_scale.FULL.rows:,}")
    measured = audit_run.measure(scale, _dim(console), ledger=options.ledger)
    run.write(_beside(options.json, "audit"), measured)
    audit_report.show(console, measured)
    console.print(f"written to {_beside(options.json, 'audit')}")


def _tenants(options: argparse.Namespace, console: Console) -> None:
    from tests.bench import tenants_report, tenants_run, tenants_scale

    scale = tenants_scale.QUICK if options.quick else tenants_scale.FULL
    if options.rounds is not None:
        scale = replace(scale, rounds=options.rounds)
    if options.quick:
        console.print(
            f"quick: {scale.rounds} rounds of {scale.seconds:g} s instead of {tenants_scale.FULL.seconds:g} s"
        )
    measured = tenants_run.measure(scale, _dim(console))
    run.write(_beside(options.json, "tenants"), measured)
    tenants_report.show(console, measured)
    console.print(f"written to {_beside(options.json, 'tenants')}")


def _size(options: argparse.Namespace, console: Console) -> None:
    from tests.bench import size_report, size_run, size_scale

    scale = size_scale.QUICK if options.quick else size_scale.FULL
    if options.rounds is not None:
        scale = replace(scale, rounds=options.rounds)
    if options.documents is not None:
        scale = replace(scale, documents=options.documents)
    if options.quick:
        console.print(f"quick: {scale.rounds} rounds, {scale.documents:,} documents, {scale.rows:,} rows")
    measured = size_run.measure(scale, _dim(console))
    run.write(_beside(options.json, "size"), measured)
    size_report.show(console, measured)
    console.print(f"written to {_beside(options.json, 'size')}")


def _events(options: argparse.Namespace, console: Console) -> None:
    from tests.bench import events_report, events_run, events_scale

    scale = events_scale.QUICK if options.quick else events_scale.FULL
    if options.rounds is not None:
        scale = replace(scale, rounds=options.rounds)
    if options.quick:
        console.print(f"quick: {scale.rounds} rounds, {scale.messages:,} messages, {scale.documents:,} documents")
    measured = events_run.measure(scale, _dim(console))
    run.write(_beside(options.json, "events"), measured)
    events_report.show(console, measured)
    console.print(f"written to {_beside(options.json, 'events')}")


def _peer(options: argparse.Namespace, name: str, console: Console) -> Path | None:
    python = python_of(options.peers / name)
    if python is None:
        console.print(f"peers not measured: `make bench` sets up {options.peers / name}")
    return python


def _dim(console: Console) -> run.Say:
    return lambda text: console.print(text, style="dim", markup=False, highlight=False)


def _beside(operations: Path, part: str) -> Path:
    return operations.with_stem(f"{operations.stem}-{part}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, choices=range(1, 10), help="all, unless given")
    parser.add_argument("--rounds", type=int, help="another number of rounds than the scale says")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("out/bench.json"), help="of part 1; the others lie beside it")
    parser.add_argument("--peers", type=Path, default=ENVIRONMENTS, help="the folder of the peers' environments")
    parser.add_argument("--ledger", type=Path, help="of part 6: a folder that keeps its rows for the next run")
    parser.add_argument("--documents", type=int, help="of part 8: how many the large stores hold")
    parser.add_argument("--write-docs", action="store_true", help=f"write {PAGE} out of the JSON")
    return parser.parse_args()


def _write_docs(operations: Path, console: Console) -> int:
    """The other parts may be missing, part 1 may not: the page is made around it."""
    from tests.bench import api_report, dagster_overhead, events_report, size_report, tenants_report, trees_report

    if not operations.exists():
        console.print(f"{operations} is not there: run `make bench` first")
        return 2
    sections = []
    found = (
        ("documents", documents_report.section),
        ("indexes", indexes_report.section),
        ("dagster", dagster_overhead.section),
        ("api", api_report.section),
        ("audit", audit_report.section),
        ("tenants", tenants_report.section),
        ("size", size_report.section),
        ("trees", trees_report.section),
        ("events", events_report.section),
    )
    unmeasured = {
        "tenants": tenants_report.UNMEASURED,
        "size": size_report.UNMEASURED,
        "events": events_report.UNMEASURED,
    }
    for part, section in found:
        path = _beside(operations, part)
        if path.exists():
            sections.append(section(json.loads(path.read_text())))
        else:
            console.print(f"{path} is not there: the page goes without {part}")
            sections.append(unmeasured.get(part, ""))
    PAGE.write_text(docs.page(json.loads(operations.read_text()), "".join(sections)))
    console.print(f"written to {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
