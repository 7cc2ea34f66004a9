"""Shows what events promise, on real servers, with real processes, counted past ragfence.

python -m tests.acceptance                     a million events; writes out/acceptance.json
python -m tests.acceptance --short             thousands: some minutes
python -m tests.acceptance --events 200000     another number
python -m tests.acceptance --write-docs        docs/acceptance.md out of that file; runs nothing
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from tests.acceptance import flood, locks, report, scenarios
from tests.acceptance.flood import FloodScale
from tests.acceptance.ground import Ground, prepared
from tests.acceptance.promise import Promise, Verdict

FULL = FloodScale(events=1_000_000, kills=60, warm_up=10_000)
SHORT = FloodScale(events=4_000, kills=4, warm_up=800)
PARTS = ("scenarios", "flood", "locks")


def main() -> int:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 170)
    if options.write_docs:
        return report.write_docs(json.loads(options.json.read_text()))
    logging.getLogger("ragfence").setLevel(logging.ERROR)  # handlers fail on purpose
    began = time.monotonic()
    load = os.getloadavg()[0]
    found = []
    try:
        with prepared() as ground:
            for promise in _promises(ground, options, console):
                found.append(promise)
                report.say(console, promise)
    except KeyboardInterrupt:
        console.print("interrupted; every process has been stopped")
        return 130
    seconds = time.monotonic() - began
    report.print_table(console, found)
    measured = {
        "seed": options.seed,
        "scale": asdict(_scale(options)),
        "full": not options.short and options.events is None and options.only is None,
        "seconds": round(seconds),
        "cores": os.cpu_count(),
        "load_before": round(load, 1),
        "promises": [asdict(promise) for promise in found],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(measured, indent=1) + "\n")
    broken = sum(promise.verdict is Verdict.BROKEN for promise in found)
    console.print(
        f"acceptance: {len(found)} rows, {broken} of them broken, seed {options.seed}, {seconds:,.0f} s; "
        f"written to {options.json}"
    )
    return 1 if broken else 0


def _promises(ground: Ground, options: argparse.Namespace, console: Console) -> Iterator[Promise]:
    chosen = options.only or PARTS
    if "scenarios" in chosen:
        yield from scenarios.run(ground, random.Random(options.seed), keys=20 if options.short else 200)
    if "flood" in chosen:
        scale = _scale(options)
        found = flood.flood(ground, scale, options.seed, lambda text: console.print(text, style="dim", highlight=False))
        yield from flood.promises(found)
    if "locks" in chosen:
        yield from locks.run(ground, options.seed, locks=300 if options.short else 1_000)


def _scale(options: argparse.Namespace) -> FloodScale:
    scale = SHORT if options.short else FULL
    if options.events is None:
        return scale
    kills = max(4, FULL.kills * options.events // FULL.events)
    warm_up = min(FULL.warm_up, max(200, options.events // 10))
    return FloodScale(events=options.events, kills=kills, warm_up=warm_up)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.acceptance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="the same with fewer events")
    parser.add_argument("--events", type=int, help="how many events the flood has")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; may be given several times")
    parser.add_argument("--json", type=Path, default=Path("out/acceptance.json"))
    parser.add_argument("--write-docs", action="store_true", help="write the table of a run into docs/acceptance.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
