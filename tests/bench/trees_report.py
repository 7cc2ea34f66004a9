"""The comparison of two trees as a section of docs/benchmarks.md. Takes nothing but what its file holds."""

from __future__ import annotations

from typing import Any

from tests.bench.trees import LIMIT

TITLE = "\n## Two trees compared\n"
SECTION = (
    TITLE
    + """
CPU time per item before the modules moved (commit `{old}`) and after, measured in turns, so that whatever else the
machine does touches both alike (its load average was 5 to 30, on two cores). A ratio belongs to the two batches of one
turn; the median of all turns is judged. It is the processor time of the process, background threads included; "with the
server" adds what Valkey used. At most {limit:.2f} is the goal.

```console
$ .venv/bin/python -m tests.bench.trees --old {old}
```

{table}

- **Calls** of Python functions per item, which are the same in every run: `ingest_many` of new documents on Valkey 122
  before and 132 after, of known ones 23 and 29; `once` new 331 and 336, replayed 73 and 75; `POST /v1/documents` new
  1,372 and 1,387, replayed 281 and 308. Documents: tuples are built by their constructors, and offsets of records are
  read in one module. Replays over HTTP: `asyncio.timeout`, and claims of an event loop in a module of their own. One
  per cent more calls do not explain 11 % for a new document over HTTP: its six turns are of one pair of processes.
- **build**: 120 to 300 documents of about three snippets, of which 20 are new to each build. Before a build is sealed,
  up to 64 of its rows are searched for: that was most of the processor time. LanceDB now answers these searches in one
  pass over the rows, at the price of about four. A build that searched for four rows only, and compared four vectors
  instead of all (`9f6c8b3`), took 0.77 and 0.88 of today's in two runs.
- **POST /v1/documents** is called in process, on SQLite. What requests cost over sockets on Valkey, where claims of an
  event loop go through threads, is in [the decision about it](adr/0012-no-connection-on-the-event-loop.md): a replay
  over one connection had 2.9 times the rate with a connection on the loop, over eight 1.65 times, over 64 1.18 times.
"""
)
_WITHIN, _MISSED = "**MET**", "**MISSED**"


def section(measured: dict[str, Any]) -> str:
    lines = [
        "| workload | old, µs | new, µs | new / old | middle half | with the server | turns | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in measured["figures"].items():
        verdict = _WITHIN if max(one["ratio"], one["with server"]) <= LIMIT else _MISSED
        cells = (
            name,
            f"{one['old us']:,.0f}",
            f"{one['new us']:,.0f}",
            f"{one['ratio']:.2f}",
            f"{one['ratio low']:.2f} to {one['ratio high']:.2f}",
            f"{one['with server']:.2f}",
            f"{one['turns']:.0f}",
            verdict,
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"| {name} | | | | | | | not measured: {error} |" for name, error in measured["failed"].items()]
    return SECTION.format(old=measured["old"], limit=LIMIT, table="\n".join(lines))
