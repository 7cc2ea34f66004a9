"""Many processes want the same operations at once. Judged with an order of its own for each; lockstep beside it.

In lockstep everybody asks for the same key at the same moment, so nearly every claim meets a lease by construction;
that says how the fence waits, not how often. With shuffled orders collisions happen as they do in real work.

What is told of waiting comes from the decision rows, whose times are the server's alone: a claim waited if it left
an `in_flight` row, and its answer's row has both the winner's seal and its own time.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ragfence
from ragfence.core.decision_rows import Row
from ragfence.core.layout import RowKind
from tests import servers
from tests.bench.machine import redis_server
from tests.bench.scale import Scale

ROOT = Path(__file__).resolve().parents[2]
KIND = "contest"


def measure(scale: Scale) -> dict[str, Any]:
    with redis_server() as server:
        return {
            "processes": scale.processes,
            "keys": scale.keys,
            "contests": scale.contests,
            "shuffled": _pooled([_contest(server, scale, number, lockstep=False) for number in range(scale.contests)]),
            "lockstep": _pooled([_contest(server, scale, number, lockstep=True) for number in range(scale.contests)]),
        }


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank: a value that was really seen."""
    if not values:
        return None
    return sorted(values)[math.ceil(len(values) * share) - 1]


def _contest(server: servers.RedisServer, scale: Scale, number: int, *, lockstep: bool) -> dict[str, Any]:
    tenant = f"{'lockstep' if lockstep else 'shuffled'}-{number}"
    seeds = [f"{number}" if lockstep else f"{number}.{process}" for process in range(scale.processes)]
    answers = _race(server, tenant, scale.keys, seeds)
    executed = sorted(number for answer in answers for number in answer["executed"])
    if executed != list(range(scale.keys)):
        raise RuntimeError(f"{len(executed)} effects for {scale.keys} operations")
    if any(answer["right"] != scale.keys for answer in answers):
        raise RuntimeError("a process was answered with another operation's result")
    with ragfence.open(server.url, tenant=tenant, journal=server.folder / "journal") as fence:
        report = fence.audit.check()
        if not report.ok:
            raise RuntimeError(str(report))
        rows = [row for row in fence.audit.rows() if b"warm-up of" not in row.context]
    return _told(rows) | {"seconds": max(answer["seconds"] for answer in answers)}


def _told(rows: Sequence[Row]) -> dict[str, Any]:
    met_a_lease = {row.token for row in rows if row.kind is RowKind.IN_FLIGHT}
    answered = [row for row in rows if row.kind is RowKind.DUPLICATE and row.token in met_a_lease]
    return {
        "claims": len({row.token for row in rows}),
        "waited": len(met_a_lease),
        "conflicts": sum(row.kind is RowKind.CONFLICT for row in rows),
        "answered_after_ms": [row.ts_ms - row.sealed_at_ms for row in answered],
    }


def _pooled(contests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    claims, waited, conflicts = (
        sum(contest[name] for contest in contests) for name in ("claims", "waited", "conflicts")
    )
    after_ms = sorted(after for contest in contests for after in contest["answered_after_ms"])
    return {
        "claims": claims,
        "waited": waited,
        "waiting_share": waited / claims,
        "conflicts": conflicts,
        "answer_p50_ms": percentile(after_ms, 0.5),
        "answer_p95_ms": percentile(after_ms, 0.95),
        "answer_longest_ms": percentile(after_ms, 1.0),
        "seconds": [contest["seconds"] for contest in contests],
    }


def _race(server: servers.RedisServer, tenant: str, keys: int, seeds: Sequence[str]) -> list[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_contender(server, tenant, keys, seed)) for seed in seeds]
        for process in processes:
            _line(process)  # "ready"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [json.loads(_line(process)) for process in processes]


@contextlib.contextmanager
def _contender(server: servers.RedisServer, tenant: str, keys: int, seed: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "tests.bench.contender", server.url, tenant, str(server.folder), str(keys), seed]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a contender ended with {process.wait()}; its words stand above")
    return line
