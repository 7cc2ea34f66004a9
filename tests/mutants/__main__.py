"""`python -m tests.mutants [word ...]`: runs the mutants whose name contains one of the words, or all, on all cores."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from rich.console import Console
from rich.table import Table

from tests.mutants import MUTANTS
from tests.mutants.mutant import Mutant, run

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(words: list[str]) -> int:
    wanted = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    # First, every selection of tests must pass without a mutant: a test that always fails would catch everything.
    controls = [
        Mutant("nothing", "pyproject.toml", "", "", tests) for tests in dict.fromkeys(one.tests for one in wanted)
    ]
    console = Console()
    verdicts: dict[Mutant, str] = {}
    with ThreadPoolExecutor(CORES) as pool:
        for progress, control, verdict in _run_all(pool, controls):
            if verdict != "SURVIVED":
                pool.shutdown(wait=False, cancel_futures=True)
                console.print(f"without any mutant, {' '.join(control.tests)} must pass, but: {verdict}")
                return 2
            console.print(f"{progress}     passes  {' '.join(control.tests)}", highlight=False, markup=False)
        for progress, mutant, verdict in _run_all(pool, wanted):
            verdicts[mutant] = verdict
            console.print(f"{progress} {verdict:>10}  {mutant.name}", highlight=False, markup=False)
    table = Table("mutant", "caught by", "verdict", title="deliberately broken variants")
    for mutant in wanted:
        table.add_row(mutant.name, " ".join(mutant.tests), verdicts[mutant])
    console.print(table)
    caught = sum(verdict == "caught" for verdict in verdicts.values())
    console.print(f"{caught} of {len(wanted)}")
    return 0 if caught == len(wanted) else 1


def _run_all(pool: ThreadPoolExecutor, mutants: Sequence[Mutant]) -> Iterator[tuple[str, Mutant, str]]:
    """Yields each mutant as soon as it is done, with how far the run is: `[  3/247   41 s]`."""
    began = time.monotonic()
    futures = {pool.submit(run, mutant): mutant for mutant in mutants}
    for done, future in enumerate(as_completed(futures), start=1):
        yield f"[{done:>3}/{len(mutants)} {time.monotonic() - began:>4.0f} s]", futures[future], future.result()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
