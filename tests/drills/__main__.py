"""Runs the failure drills and prints what came of them.

python -m tests.drills                                 everything, some minutes
python -m tests.drills --short                         fewer faults: what a landing must pass
python -m tests.drills --only "Sentinel"               drills whose name has these words
python -m tests.drills --write-docs                    everything, and its table into docs/drills.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from tests.chaos.crew import ROOT
from tests.chaos.running import outcomes
from tests.drills import report
from tests.drills.drills import Drill, Result, all_drills


def main() -> int:
    options = _options()
    console = Console(soft_wrap=False, width=None if sys.stdout.isatty() else 190)
    chosen = _chosen(options)
    if not chosen:
        console.print(f"no drill has {options.only!r} in its name")
        return 2
    try:
        results = list(_results(chosen, options, console))
    except KeyboardInterrupt:
        console.print("interrupted; every process has been stopped")
        return 130
    results.sort(key=lambda result: chosen.index(result.drill))
    report.print_table(console, results)
    bad = [result for result in results if not result.ok]
    for result in bad:
        report.print_problems(console, result, seed=options.seed, short=options.short)
    if options.json:
        report.write_json(options.json, results, seed=options.seed, short=options.short)
    if options.write_docs:
        report.write_docs(ROOT / "docs" / "drills.md", results, seed=options.seed)
    console.print(f"drills: {len(results)} variants, {len(bad)} of them violated, seed {options.seed}")
    return 1 if bad else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.drills", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="the same drills with fewer faults, for every landing")
    parser.add_argument("--only", default="", help="drills whose name contains this")
    parser.add_argument("--json", type=Path, help="write the outcome there, too")
    parser.add_argument("--jobs", type=int, default=3, help="drills at a time; most of them wait most of the time")
    parser.add_argument("--keep", type=Path, help="keep the workers' files of violated drills in this folder")
    parser.add_argument("--write-docs", action="store_true", help="write the table of a full run into docs/drills.md")
    options = parser.parse_args()
    if options.write_docs and (options.short or options.only):
        parser.error("--write-docs wants the whole run: neither --short nor --only")
    return options


def _chosen(options: argparse.Namespace) -> list[Drill]:
    """By a part of the name; a whole name, as in the replay of a violation, means that one alone."""
    known = all_drills(short=options.short)
    exact = [drill for drill in known if drill.name == options.only]
    return exact or [drill for drill in known if options.only in drill.name]


def _results(chosen: list[Drill], options: argparse.Namespace, console: Console) -> Iterator[Result]:
    drills = {drill.name: drill for drill in chosen}
    ended = outcomes([drill.scenario for drill in chosen], seed=options.seed, jobs=options.jobs, keep=options.keep)
    for done, outcome in enumerate(ended, 1):
        result = Result(drills[outcome.scenario.name], outcome)
        words = f"{result.drill.name}: {report.verdict(result)}, {outcome.seconds:.1f} s"
        console.print(f"[{done}/{len(chosen)}] {words}", style=None if result.ok else "bold red", markup=False)
        yield result


if __name__ == "__main__":
    sys.exit(main())
