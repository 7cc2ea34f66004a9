"""Measures an old tree and the new one in one run, in turns: the CPU time per item, as a ratio new / old.

    python -m tests.bench.trees --old REV                 against this working tree
    python -m tests.bench.trees --old REV --new REV       two commits
    python -m tests.bench.trees --old REV --only once     workloads whose name contains the word

Both trees run in the same environment (the packages of .venv), in processes that live for one pair. A pair measures one
batch of a workload in one tree, then in the other, whose order alternates, so what else the machine does touches both
alike. A ratio belongs to the two batches of one turn; printed are the median and the middle half of all turns. CPU time
is `getrusage` of the process, not the time on a clock, and with the server: that plus what Valkey used.
Writes out/bench-trees.json, of which a run with --only replaces its own workloads, so that several short runs make one
table; `python -m tests.bench --write-docs` puts it into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests import servers

ROOT = Path(__file__).resolve().parent.parent.parent
WORKER = Path(__file__).with_name("trees_worker.py")
OUT = Path("out/bench-trees.json")
LIMIT = 1.05

Turn = dict[str, dict[str, float]]
"""what one batch used in each tree: {"old": {...}, "new": {...}}"""


class Worker:
    """A process that runs batches in one tree."""

    def __init__(self, tree: Path, folder: Path, url: str, seed: int) -> None:
        folder.mkdir(parents=True)
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), str(folder), url, str(tree)],
            cwd=folder,
            env={**_environment(), "PYTHONPATH": str(tree), "PYTHONHASHSEED": str(seed)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.workloads: list[str] = self._read()["workloads"]

    def run(self, workload: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(workload + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        with self._process:  # closes the pipes
            self._process.stdin.close()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with {self._process.wait()}; its words are above")
        reply: dict[str, Any] = json.loads(line)
        return reply


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RAGFENCE_")}


@contextlib.contextmanager
def checkout(revision: str, folder: Path) -> Iterator[Path]:
    """A worktree of `revision`, removed at the end."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), revision], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def measure(
    trees: dict[str, Path], *, pairs: int, rounds: int, words: list[str], console: Console
) -> tuple[dict[str, list[Turn]], dict[str, str]]:
    """The turns of each workload, and the error of each that a tree could not run."""
    turns: dict[str, list[Turn]] = {}
    failed: dict[str, str] = {}
    for pair in range(pairs):
        with tempfile.TemporaryDirectory(prefix="ragfence-trees-") as temporary, servers.valkey() as server:
            # As long as each other: a path is part of what is hashed and stored.
            seed = random.Random(pair).randrange(1, 2**32)
            with contextlib.ExitStack() as stack:
                workers = {}
                for which in ("old", "new") if pair % 2 == 0 else ("new", "old"):
                    workers[which] = Worker(trees[which], Path(temporary) / which, server.url, seed)
                    stack.callback(workers[which].close)
                wanted = [name for name in workers["new"].workloads if not words or any(word in name for word in words)]
                for name in wanted:
                    for turn in range(rounds):
                        order = ("old", "new") if (turn + pair) % 2 == 0 else ("new", "old")
                        result = {which: workers[which].run(name) for which in order}
                        error = next(
                            (f"{which}: {one['error']}" for which, one in result.items() if "error" in one), None
                        )
                        if error is not None:
                            failed[name] = error
                            break
                        turns.setdefault(name, []).append(result)
                    console.print(f"pair {pair + 1}/{pairs}  {name}", highlight=False)
    return {name: turns[name] for name in turns if name not in failed}, failed


def ratios(turns: list[Turn], *, with_server: bool = False) -> list[float]:
    """new / old of each turn."""

    def used(one: dict[str, float]) -> float:
        return (one["cpu_s"] + (one["server_cpu_s"] if with_server else 0)) / one["items"]

    return [used(turn["new"]) / used(turn["old"]) for turn in turns]


def summary(turns: list[Turn]) -> dict[str, float]:
    figures = {"turns": float(len(turns))}
    for name, values in (("ratio", ratios(turns)), ("with server", ratios(turns, with_server=True))):
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        figures |= {name: middle, f"{name} low": low, f"{name} high": high}
    for which in ("old", "new"):
        figures[f"{which} us"] = statistics.median(1e6 * one[which]["cpu_s"] / one[which]["items"] for one in turns)
    return figures


def show(console: Console, figures: dict[str, dict[str, float]], failed: dict[str, str]) -> None:
    table = Table(
        "workload", "old, µs CPU", "new, µs CPU", "new / old", "middle half", "with the server", "middle half", "turns"
    )
    for name, one in figures.items():
        mark = " [bold]ABOVE[/bold]" if one["with server"] > LIMIT or one["ratio"] > LIMIT else ""
        table.add_row(
            name,
            f"{one['old us']:,.0f}",
            f"{one['new us']:,.0f}",
            f"{one['ratio']:.3f}{mark}",
            f"{one['ratio low']:.3f} to {one['ratio high']:.3f}",
            f"{one['with server']:.3f}",
            f"{one['with server low']:.3f} to {one['with server high']:.3f}",
            f"{one['turns']:.0f}",
        )
    console.print(table)
    for name, error in failed.items():
        console.print(f"not measured: {name}: {error}", highlight=False, markup=False)


def merged(
    known: dict[str, Any] | None, old: str, new: str, turns: dict[str, list[Turn]], failed: dict[str, str]
) -> dict[str, Any]:
    """What is written: these turns, and those of other workloads from an earlier run of the same trees."""
    if known is not None and (known["old"], known["new"]) == (old, new):
        measured = turns.keys() | failed.keys()
        turns = {name: of for name, of in known["turns"].items() if name not in measured} | turns
        failed = {name: error for name, error in known["failed"].items() if name not in measured} | failed
    figures = {name: summary(of) for name, of in turns.items()}
    return {"old": old, "new": new, "figures": figures, "failed": failed, "turns": turns}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.trees", description=__doc__.partition("\n")[0])
    parser.add_argument("--old", required=True, help="the commit to compare with")
    parser.add_argument("--new", help="the other commit; without it, the working tree")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of processes")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each workload in each pair")
    parser.add_argument("--only", action="append", default=[], help="a word in the name of the workloads to run")
    parser.add_argument("--json", type=Path, default=OUT)
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragfence-trees-")))
        trees = {"old": stack.enter_context(checkout(options.old, temporary / "old")), "new": ROOT}
        if options.new is not None:
            trees["new"] = stack.enter_context(checkout(options.new, temporary / "new"))
        turns, failed = measure(trees, pairs=options.pairs, rounds=options.rounds, words=options.only, console=console)
    show(console, {name: summary(of) for name, of in turns.items()}, failed)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(options.json.read_text()) if options.only and options.json.exists() else None
    written = merged(known, options.old, options.new or "working tree", turns, failed)
    options.json.write_text(json.dumps(written, indent=1) + "\n")
    console.print(f"written to {options.json}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
