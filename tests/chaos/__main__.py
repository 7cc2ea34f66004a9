"""Runs the attack and prints what came of it.

python -m tests.chaos --seed 1                            everything
python -m tests.chaos --seed 1 --short                    what a landing must pass
python -m tests.chaos --seed 1 --only "SIGSTOP / valkey"  scenarios whose name has these words
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from tests.chaos import report
from tests.chaos.running import outcomes
from tests.chaos.scenarios import Outcome, Scenario, all_scenarios


def main() -> int:
    options = _options()
    console = Console(soft_wrap=False, width=None if sys.stdout.isatty() else 150)
    chosen = _chosen(options)
    if not chosen:
        console.print(f"no scenario has {options.only!r} in its name")
        return 2
    try:
        told = list(_outcomes(chosen, options, console))
    except KeyboardInterrupt:
        console.print("interrupted; every process has been stopped")
        return 130
    told.sort(key=lambda outcome: chosen.index(outcome.scenario))
    report.print_table(console, told)
    bad = [outcome for outcome in told if not outcome.ok]
    for outcome in bad:
        report.print_problems(console, outcome, options.seed)
    if options.json:
        report.write_json(options.json, told, options.seed)
    violations = sum(len(outcome.evidence.problems) for outcome in bad)
    console.print(f"chaos: {len(told)} scenarios, {violations} violations, seed {options.seed}")
    return 1 if bad else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="a representative part, for every landing")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--json", type=Path, help="write the outcome there, too")
    parser.add_argument("--jobs", type=int, default=3, help="scenarios at a time; most of them wait most of the time")
    parser.add_argument("--keep", type=Path, help="keep the workers' files of violated scenarios in this folder")
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> list[Scenario]:
    """By a part of the name; a whole name, as in the replay of a violation, means that one alone."""
    known = [scenario for scenario in all_scenarios() if scenario.short or not options.short]
    exact = [scenario for scenario in known if scenario.name == options.only]
    return exact or [scenario for scenario in known if options.only in scenario.name]


def _outcomes(chosen: list[Scenario], options: argparse.Namespace, console: Console) -> Iterator[Outcome]:
    ended = outcomes(chosen, seed=options.seed, jobs=options.jobs, keep=options.keep)
    for done, outcome in enumerate(ended, 1):
        words = f"{outcome.scenario.name}: {report.verdict(outcome)}, {outcome.seconds:.1f} s"
        console.print(f"[{done}/{len(chosen)}] {words}", style=None if outcome.ok else "bold red", markup=False)
        yield outcome


if __name__ == "__main__":
    sys.exit(main())
