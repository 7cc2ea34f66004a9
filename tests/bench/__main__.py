"""Runs the benchmarks, prints rates and ratios with their spread, writes `out/bench.json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench import fence
from tests.bench.rounds import interleave, ratio

PAIRS = [
    ("replay, once", "raw GET"),
    ("new, once", "raw SET NX + SET"),
    ("bulk replay", "pipelined SET NX"),
    ("bulk new", "pipelined SET NX"),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=Path("out/bench.json"))
    options = parser.parse_args()
    with fence.subjects() as subjects:
        measured = interleave(subjects, options.rounds)
    table = Table("ours", "per second", "beside", "per second", "ratio", "lowest", "highest")
    written = []
    for ours, theirs in PAIRS:
        middle, low, high = ratio(measured[ours], measured[theirs])
        mine, other = measured[ours].rate, measured[theirs].rate
        table.add_row(ours, f"{mine:,.0f}", theirs, f"{other:,.0f}", f"{middle:.2f}", f"{low:.2f}", f"{high:.2f}")
        written.append({"ours": ours, "beside": theirs, "ratio": middle, "low": low, "high": high, "rate": mine})
    console = Console()
    console.print("Valkey alone on loopback, audit on")
    console.print(table)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"rounds": options.rounds, "pairs": written}, indent=2))
    console.print(f"written to {options.json}")


if __name__ == "__main__":
    main()
