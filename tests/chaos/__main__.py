"""Runs the attack and prints what came of it.

python -m tests.chaos --seed 1                            everything
python -m tests.chaos --seed 1 --short                    what a landing must pass
python -m tests.chaos --seed 1 --only "SIGSTOP / valkey"  scenarios whose name has these words
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console

from tests import servers
from tests.chaos import crew, report
from tests.chaos.scenarios import Outcome, Scenario, all_scenarios, run
from tests.chaos.sites import VALKEY_S3


def main() -> int:
    options = _options()
    console = Console(soft_wrap=False, width=None if sys.stdout.isatty() else 150)
    chosen = _chosen(options)
    if not chosen:
        console.print(f"no scenario has {options.only!r} in its name")
        return 2
    try:
        outcomes = list(_outcomes(chosen, options, console))
    except KeyboardInterrupt:
        console.print("interrupted; every process has been stopped")
        return 130
    outcomes.sort(key=lambda outcome: chosen.index(outcome.scenario))
    report.print_table(console, outcomes)
    bad = [outcome for outcome in outcomes if not outcome.ok]
    for outcome in bad:
        report.print_problems(console, outcome, options.seed)
    if options.json:
        report.write_json(options.json, outcomes, options.seed)
    violations = sum(len(outcome.evidence.problems) for outcome in bad)
    console.print(f"chaos: {len(outcomes)} scenarios, {violations} violations, seed {options.seed}")
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
    with contextlib.ExitStack() as stack:
        # Servers die with the thread that starts them: the shared one is started here, the others by their scenario.
        needs_s3 = any(scenario.backend == VALKEY_S3 for scenario in chosen)
        s3 = stack.enter_context(servers.seaweedfs()) if needs_s3 else None
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ragfence-chaos-", ignore_cleanup_errors=True))
        nursery = stack.enter_context(crew.nursery(Path(folder)))
        pool = stack.enter_context(ThreadPoolExecutor(options.jobs))
        runs: list[Future[Outcome]] = [
            pool.submit(run, scenario, seed=options.seed, nursery=nursery, s3=s3, keep=options.keep)
            for scenario in chosen
        ]
        try:
            for done, future in enumerate(as_completed(runs), 1):
                outcome = future.result()
                words = f"{outcome.scenario.name}: {report.verdict(outcome)}, {outcome.seconds:.1f} s"
                console.print(f"[{done}/{len(chosen)}] {words}", style=None if outcome.ok else "bold red", markup=False)
                yield outcome
        except BaseException:
            crew.stopping.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


if __name__ == "__main__":
    sys.exit(main())
