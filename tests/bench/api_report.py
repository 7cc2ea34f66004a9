"""A measured run of part 5, on the terminal and as a section of `docs/benchmarks.md`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.api_goals import FLOOR, Side, costs, figure, figures, verdicts
from tests.bench.api_rates import (
    ANY,
    CEILING,
    LATENCIES,
    MIDDLEWARE_SQLITE,
    MIDDLEWARE_VALKEY,
    NEW,
    NOTHING,
    PEER_MEMORY,
    PEER_REDIS,
    REPLAY,
    SERVE_SQLITE,
    SERVE_VALKEY,
    named,
)
from tests.bench.api_scenarios import (
    CRASHED,
    CRASHED_LATE,
    CRASHED_RECOVERED,
    EXPIRED,
    HANDLER_EXCEPTION,
    LOST_REPLY,
    OTHER_PAYLOAD,
    TWINS,
)
from tests.bench.docs import goals_lines
from tests.bench.goals import Goal, Measured
from tests.bench.report import goals_table, summary
from tests.bench.rounds import Spread
from tests.bench.scale import note_on

SECTION = """
## HTTP API

Measured as above, in {rounds} rounds, each of {seconds:g} s per subject and number of connections, from a second
process on loopback; the audit on, a **{objects}** as object store. {versions}
The machine's load average was {load_before} before the rounds and {load_after} at the end.{scale_note}

### Goals: {summary}

{goals}

### Requests per second, latency and cost

Medians of the rounds, latencies in milliseconds, CPU in microseconds of a core that the server's process took for a
request (without that of Redis). To be read as ratios.

{rates}

### Other figures

{notes}

### Six scenarios, effects counted

The same FastAPI route, a payment, behind `ragfence.server.IdempotencyMiddleware` and behind asgi-idempotency-header.
The answers the client got, in their order, and how many payments were made in the end. The client sends the same
request again after 202, 409, 5xx or no answer, for {patience_s:g} s (Retry-After honoured, else every 0.25 s). The
lease of ragfence is {lease_s:g} s.

{scenarios}

{reasons}

### What is compared

- **ragfence serve**: `POST /v1/documents` with a document of {body_bytes:,} bytes, one process, an API key. **new** has
  a fresh key and a fresh document, which is chunked, written and synced before it is answered (documents that arrive
  together share a segment); **replay** is one of {known} earlier requests again, with its key. Every answer is checked:
  201, and stored or replayed as it should be.
- **a route that does nothing**: FastAPI, the same request, no middleware, nothing read, a small JSON answer; uvicorn
  with the same settings (httptools, uvloop, no access log), one process.
- **IdempotencyMiddleware** and **asgi-idempotency-header**: on that same route, which counts its effects; every round
  checks them. On Valkey ragfence has no object store here, so an operation is as durable on both sides. SQLite comes
  with a folder of objects and syncs both; `MemoryBackend` keeps a dict, and loses it with the process.
- **connections**: each has one request at a time. The load is a process of its own on uvloop; **{ceiling}** is what it
  can do: against a server that answers every request with the same bytes.
"""

REASONS: dict[str, str] = {
    OTHER_PAYLOAD: "The key belongs to the first payload. ragfence compares payloads and answers 409; "
    "asgi-idempotency-header does not look at the body, and answers the second amount with the receipt of the first.",
    HANDLER_EXCEPTION: "Nothing happened, so the retry has to execute it. ragfence releases the key; "
    "asgi-idempotency-header leaves it among those in progress, and never removes it.",
    EXPIRED: "An expired key is free. With an object store ragfence answers longer than it promised, until "
    "purge-expired; then, and on Redis alone at once, the key is new. asgi-idempotency-header forgets the answer and "
    "still considers the key in progress.",
    CRASHED: "Nothing happened, and no process is working on it. ragfence's lease expires and the retry takes over; in "
    "Redis asgi-idempotency-header's key has no lease and no expiry; in memory it died with the process.",
    CRASHED_LATE: "A lease gives one effect per key if the effect can be recognised, not one execution: an effect that "
    "cannot be recognised is repeated by the next owner. asgi-idempotency-header does not repeat it on Redis, and "
    "never answers either.",
    CRASHED_RECOVERED: "With `recover=`, ragfence finds the earlier effect and answers with it.",
    TWINS: "Both execute it once. ragfence answers the others with 202 and an address to poll, "
    "asgi-idempotency-header with 409.",
    LOST_REPLY: "Both finish the work for a client that has left, and replay the answer.",
}
_SUBJECTS = (SERVE_SQLITE, SERVE_VALKEY, MIDDLEWARE_SQLITE, MIDDLEWARE_VALKEY, PEER_MEMORY, PEER_REDIS)
_SIDES: tuple[Side, ...] = (
    (ANY, CEILING),
    FLOOR,
    *((REPLAY, subject) for subject in _SUBJECTS),
    *((NEW, subject) for subject in _SUBJECTS),
)


def show(console: Console, measured: Measured) -> None:
    found, scale = verdicts(measured), measured["scale"]
    console.print(goals_table(found, _said))
    for connections in scale["connections"]:
        table = Table(title=f"{connections} connections: requests per second, ms, CPU us", title_justify="left")
        table.add_column("what")
        for name in ("median", "lowest", "highest", "p50", "p95", "p99", "CPU"):
            table.add_column(name, justify="right")
        for what, cells in _cells(measured, connections):
            table.add_row(what, *cells)
        console.print(table)
    table = Table(title="six scenarios: answers, effects", title_justify="left", show_lines=True)
    for name in ("", *_columns(measured)):
        table.add_column(name)
    for scenario, told in measured["scenarios"].items():
        table.add_row(scenario, *(_scenario(told.get(subject)) for subject in _columns(measured)))
    console.print(table)
    for line in notes(measured):
        console.print(line, markup=False, highlight=False)
    console.print(f"bench, HTTP API: {summary(found)}", markup=False, highlight=False)


def section(measured: Measured) -> str:
    machine, scale = measured["machine"], measured["scale"]
    found = verdicts(measured)
    return SECTION.format(
        rounds=scale["rounds"],
        seconds=scale["seconds"],
        objects=measured["objects"],
        versions=_versions(measured["versions"]),
        load_before=machine["load_before"][0],
        load_after=machine["load_after"][0],
        scale_note=note_on(scale["full"]),
        summary=summary(found),
        goals=goals_lines(found, _said),
        rates="\n\n".join(_rates_lines(measured, connections) for connections in scale["connections"]),
        notes="\n".join(f"- {line}" for line in notes(measured)),
        patience_s=scale["patience_s"],
        lease_s=measured["lease_s"],
        scenarios=_scenario_lines(measured),
        reasons="\n".join(f"- **{name}**: {why}" for name, why in REASONS.items()),
        body_bytes=scale["body_bytes"],
        known=scale["known"],
        ceiling=CEILING,
    )


def notes(measured: Measured) -> list[str]:
    """What is reported and not judged, in sentences."""
    most = max(measured["scale"]["connections"])
    alone = statistics.median(measured["rates"][named(CEILING, ANY, most)])
    busy = max(statistics.median(each["busy"]) for name, each in measured["cells"].items() if CEILING not in name)
    found, cost = figures(measured), costs(measured)
    lines = [
        f"The load can do {alone:,.0f} requests/s over {most} connections, on the machine as it was; next to every "
        f"measured server it took at most {100 * busy:.0f} % of a core."
    ]
    for ours, theirs in (
        *(((REPLAY, subject), FLOOR) for subject in (*_SUBJECTS,)),
        ((REPLAY, SERVE_VALKEY), (REPLAY, PEER_REDIS)),
        ((REPLAY, MIDDLEWARE_VALKEY), (REPLAY, PEER_REDIS)),
        ((NEW, MIDDLEWARE_VALKEY), (NEW, PEER_REDIS)),
        ((NEW, SERVE_VALKEY), (NEW, PEER_REDIS)),
        ((REPLAY, SERVE_SQLITE), (REPLAY, PEER_MEMORY)),
        ((NEW, SERVE_SQLITE), (NEW, PEER_MEMORY)),
    ):
        name = figure(ours, theirs, most)
        if name in found:
            lines.append(
                f"{' of '.join(ours)} compared with {' of '.join(theirs)}, {most} connections: "
                f"{_spread(found[name])} of its rate; {_spread(_inverse(cost[name]))} of its CPU for a request."
            )
    return lines


def _said(goal: Goal) -> tuple[str, str]:
    return goal.what, goal.beside


def _spread(spread: Spread) -> str:
    return f"{spread.middle:.2f}x ({spread.lowest:.2f} to {spread.highest:.2f})"


def _inverse(spread: Spread) -> Spread:
    return Spread(1 / spread.middle, 1 / spread.highest, 1 / spread.upper, 1 / spread.lower, 1 / spread.lowest)


def _cells(measured: Measured, connections: int) -> list[tuple[str, list[str]]]:
    rows = []
    for run, subject in _SIDES:
        name = named(subject, run, connections)
        if name not in measured["rates"]:
            continue
        each, cell = measured["rates"][name], measured["cells"][name]
        cells = [f"{value:,.0f}" for value in (statistics.median(each), min(each), max(each))]
        cells += [f"{statistics.median(cell[kind]):,.2f}" for kind in LATENCIES]
        rows.append((f"{run}, {subject}", [*cells, f"{statistics.median(cell['cpu_us']):,.0f}"]))
    return rows


def _rates_lines(measured: Measured, connections: int) -> str:
    title = f"{connections} connection{'s' * (connections > 1)}"
    lines = [f"| {title} | requests/s | lowest | highest | p50 | p95 | p99 | CPU |", "|---" * 8 + "|"]
    lines += [f"| {what} | {' | '.join(cells)} |" for what, cells in _cells(measured, connections)]
    return "\n".join(lines)


def _columns(measured: Measured) -> list[str]:
    known = {subject for told in measured["scenarios"].values() for subject in told}
    return [subject for subject in (MIDDLEWARE_SQLITE, MIDDLEWARE_VALKEY, PEER_MEMORY, PEER_REDIS) if subject in known]


def _scenario_lines(measured: Measured) -> str:
    columns = _columns(measured)
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for scenario, told in measured["scenarios"].items():
        lines.append(f"| {scenario} | {' | '.join(_scenario(told.get(subject)) for subject in columns)} |")
    return "\n".join(lines)


def _scenario(told: Mapping[str, Any] | None) -> str:
    if told is None:
        return "-"
    effects = f"{told['effects']} effect{'s' * (told['effects'] != 1)}"
    return f"{', '.join(told['replies'])}: {effects}" + (f" ({told['note']})" if told["note"] else "")


def _versions(versions: Mapping[str, Mapping[str, str]]) -> str:
    def listed(names: Sequence[tuple[str, str]]) -> str:
        return ", ".join(f"{name} {version}" for name, version in names)

    own = [pair for pair in versions[NOTHING].items() if pair[0] not in ("redis", "hiredis")]
    told = f"{listed(own).capitalize()}."
    if PEER_REDIS in versions:
        known = [pair for pair in versions[PEER_REDIS].items() if pair not in own]
        told += f"\nBeside them {listed(known)}, in an environment of its own, with all else as above."
    return told
