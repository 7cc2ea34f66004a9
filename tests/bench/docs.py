"""`docs/benchmarks.md`, made of `out/bench.json` and the files of the other parts beside it, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.bench.goals import Measured, Verdict, verdicts
from tests.bench.report import Named, notes, seen, spread_of, summary, wanted, what_of
from tests.bench.rounds import Spread, ratios
from tests.bench.scale import note_on

PAGE = """\
# Benchmarks

<!-- Made by `python -m tests.bench --write-docs` out of out/bench*.json: change those, not this. -->

Measured on a shared {cores}-core machine: ratios, not absolute rates. Every subject ran in each of {rounds} rounds, in
another order every time; a ratio is taken within a round, and the median of the rounds is judged. {server} with
{allocator}, on loopback, Python {python}, redis-py {redis_py} with hiredis {hiredis}; compared with
{peer}.
The audit is on: every decision leaves its row in the server before the caller has its answer. The machine's load
average was {load_before} before the rounds and {load_after} at the end, after the contending processes.{scale_note}

```console
$ make bench
$ .venv/bin/python -m tests.bench --write-docs
```

The first measures, prints, and writes `out/bench.json`, and `out/bench-*.json` for the other parts, with every round's
rates and the machine's load; the second writes this page. `python -m tests.bench --quick` takes less time, with fewer
rounds and smaller stores; `--part 1` measures operations alone, `--part 2` [documents](#documents), `--part 3`
[indexes](#indexes), `--part 4` Dagster, `--part 5` the HTTP API, `--part 6` the audit, `--part 7`
[one tenant next to a hostile one](#one-tenant-next-to-a-hostile-one), `--part 8`
[what grows with the store](#what-grows-with-the-store), `--part 9` [events](#events).

## Goals: {summary}

Redis alone, no object store.

{goals}

## Other figures

{notes}

## With an object store behind Redis

Not judged. A replay never asks the object store; a new operation looks there for an earlier commit and adds its own,
which waits for the disk.

{objects}

## What is compared

- **replay, new**: a function behind `@fence.once`, called again with the same payload, or with a fresh key (claim,
  effect, seal). The payload is a dict of two fields, the result has 36 characters, the effect does nothing.
- **raw GET**: redis-py's `get` of a 100-byte value, one by one. No decision, no row, no receipt.
- **Powertools**: `idempotent_function` of AWS Lambda Powertools on the same server and the same payload, set up for
  speed: no JMESPath, no payload validation, no Lambda context, its cache inside the process off as by default. It runs
  in an environment and a process of its own and has its own clock. It keeps no decision rows and compares no payloads.
- **bulk replay, bulk new**: `store.claim(claims)` of {batch} keys and a receipt for each, or claim and seal of as many.
  The claims are made ready before the clock starts, and so are keys and values of the `SET NX`.
- **round trips**: turns on the wire, counted by a relay between client and server.
- **a sealed record**: `MEMORY USAGE key SAMPLES 0`, mean of a sample of the records.
- **large and small store**: two servers, the same keys requested on both, ratio of the medians. The server's allocator
  decides here: with that of libc, replays in the large store ran at 0.76x and 0.87x in two earlier runs.
- **processes**: every process wants every key, in a shuffled order of its own, all start at once; the effect sleeps
  1 ms. A claim waits if another owner has the lease. Times are those of the decision rows, on the server's clock.
{documents}"""


def page(measured: Measured, documents: str = "") -> str:
    """`documents`: the sections about parts 2 and 3, as far as they were measured."""
    machine, scale, peer = measured["machine"], measured["scale"], measured["peer"]
    found = verdicts(measured)
    note = note_on(scale["full"])
    return PAGE.format(
        cores=machine["cores"],
        rounds=scale["rounds"],
        server=machine["server"],
        allocator=_allocator(machine),
        python=machine["python"],
        redis_py=machine["redis-py"],
        hiredis=machine["hiredis"],
        peer=_peer(peer) if peer else "no peer: it was not measured",
        load_before=machine["load_before"][0],
        load_after=machine["load_after"][0],
        scale_note=note,
        summary=summary(found),
        goals=goals_lines(found, lambda goal: what_of(goal, measured)),
        notes="\n".join(f"- {line}" for line in [*_built_too(measured), *notes(measured)]),
        objects=_objects(measured),
        batch=scale["batch"],
        documents=documents,
    )


def _allocator(machine: Mapping[str, Any]) -> str:
    """JSON of before this was told: the wheel's own."""
    return {"jemalloc": "jemalloc, as packaged servers have"}.get(machine.get("allocator", ""), "the allocator of libc")


def _peer(versions: Mapping[str, str]) -> str:
    name = f"AWS Lambda Powertools {versions['aws-lambda-powertools']}"
    return f"{name}, with redis-py {versions['redis']} and hiredis {versions['hiredis']}"


def goals_lines(found: Sequence[Verdict], named: Named) -> str:
    lines = [
        "| | what | compared with | goal | measured | middle half | lowest to highest | verdict |",
        "|---" * 8 + "|",
    ]
    for verdict in found:
        goal, spread = verdict.goal, verdict.spread
        figure = seen(goal, spread.middle) if spread else "-"
        half, all_of_it = spread_of(goal, spread) if spread else ("", "")
        what, beside = named(goal)
        cells = (goal.letter, what, beside, wanted(goal), figure, half, all_of_it, f"**{verdict.outcome.value}**")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _built_too(measured: Measured) -> list[str]:
    rates = measured["rates"]["redis"]
    spread = Spread.of(ratios(rates["bulk replay, claims built too"], rates["pipelined SET NX"]))
    return [f"Bulk replay with the creation of the claims included: {spread.middle:.2f}x of pipelined SET NX."]


def _objects(measured: Measured) -> str:
    rates = measured["rates"]["objects"]
    lines = ["| object store | replay / raw GET | replay / Redis alone | new / Redis alone |", "|---|---|---|---|"]
    for store in measured["scale"]["object_stores"]:
        cells = [
            Spread.of(ratios(rates[f"{ours}, {store}"], rates[theirs]))
            for ours, theirs in (
                ("replay", "raw GET"),
                ("replay", "replay, Redis alone"),
                ("new", "new, Redis alone"),
            )
        ]
        shown = (f"{cell.middle:.3g}x ({cell.lowest:.3g} to {cell.highest:.3g})" for cell in cells)
        lines.append(f"| {store} | {' | '.join(shown)} |")
    return "\n".join(lines)
