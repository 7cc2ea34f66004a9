"""Measures ragfence beside raw redis-py and AWS Lambda Powertools, and says which goals are met.

python -m tests.bench                 everything; writes out/bench.json
python -m tests.bench --quick         5 rounds, 100,000 records in the large store
python -m tests.bench --write-docs    docs/benchmarks.md out of out/bench.json; measures nothing
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tests.bench import docs, report, run
from tests.bench.peers.process import ENVIRONMENT, python_of
from tests.bench.scale import FULL, QUICK

DOCS = Path("docs/benchmarks.md")


def main() -> int:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 150)
    if options.write_docs:
        return _write_docs(options.json, console)
    scale = QUICK if options.quick else FULL
    if options.rounds is not None:
        scale = replace(scale, rounds=options.rounds)
    if options.quick:
        console.print(
            f"quick: {scale.rounds} rounds, {scale.many:,} records in the large store instead of {FULL.many:,}"
        )
    peer = python_of(options.peer)
    if peer is None:
        console.print("peer not measured: `make bench` sets up its environment")
    measured = run.measure(scale, peer, lambda text: console.print(text, style="dim", markup=False, highlight=False))
    run.write(options.json, measured)
    report.show(console, measured)
    console.print(f"written to {options.json}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help=f"{FULL.rounds}, or {QUICK.rounds} with --quick, unless given")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("out/bench.json"))
    parser.add_argument("--peer", type=Path, default=ENVIRONMENT, help="the environment that has Powertools")
    parser.add_argument("--write-docs", action="store_true", help=f"write {DOCS} out of the JSON")
    return parser.parse_args()


def _write_docs(measured: Path, console: Console) -> int:
    if not measured.exists():
        console.print(f"{measured} is not there: run `make bench` first")
        return 2
    DOCS.write_text(docs.page(json.loads(measured.read_text())))
    console.print(f"written to {DOCS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
