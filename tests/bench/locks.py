"""Locks: taking and releasing one, beside redis-py's `Lock` on the same server; and many processes that want the same.

    python -m tests.bench.locks            writes out/bench-locks.json
    python -m tests.bench.locks --quick

redis-py's lock is one `SET NX PX` and one script that compares and deletes. Ours also numbers its holders, leaves
decision rows, and is renewed. Contention is measured twice: each process takes the locks in an order of its own
(shuffled), or all in one order (lockstep: everybody asks for the same lock at the same moment).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

import ragfence
from ragfence.core.decision_rows import Phase
from tests import servers
from tests.bench.contention import ROOT, percentile
from tests.bench.machine import redis_server
from tests.bench.rounds import Spread, Subject, clocked

NAME = "reindex:docs"
WAIT_S = 120.0
SHARE_GOAL, P95_GOAL_MS, FLOOR_GOAL = 0.03, 100.0, 0.7
FILE = Path("out/bench-locks.json")


@dataclass(frozen=True, slots=True)
class LockScale:
    rounds: int = 20
    count: int = 400
    """locks in a round, taken and released one after the other"""
    processes: int = 8
    locks: int = 1_000
    """of which each process takes every one, once"""
    hold_ms: float = 2.0


QUICK = LockScale(rounds=5, count=100, processes=4, locks=250)


def measure(scale: LockScale) -> dict[str, Any]:
    with redis_server() as server:
        return {
            "scale": {field: getattr(scale, field) for field in scale.__slots__},
            "alone": _measure_alone(server, scale),
            "shuffled": _measure_contention(server, scale, lockstep=False),
            "lockstep": _measure_contention(server, scale, lockstep=True),
        }


def _measure_alone(server: servers.RedisServer, scale: LockScale) -> dict[str, Any]:
    """Interleaved, so that a noisy machine is noisy for both; the ratio is that of each round."""
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(redis.Redis.from_url(server.url))
        fence = stack.enter_context(ragfence.open(server.url, tenant="alone", journal=server.folder / "journal"))

        def take_theirs(count: int) -> None:
            for _ in range(count):
                with client.lock(NAME, timeout=30):
                    pass

        def take_ours(count: int) -> None:
            for _ in range(count):
                with fence.lock(NAME, ttl_s=30):
                    pass

        subjects = [
            Subject(name, scale.count, clocked(work, prepare=lambda _: scale.count))
            for name, work in (("redis-py", take_theirs), ("ragfence", take_ours))
        ]
        for subject in subjects:
            subject.seconds(-1)
        seconds: dict[str, list[float]] = {subject.name: [] for subject in subjects}
        cpu: dict[str, list[float]] = {subject.name: [] for subject in subjects}
        for number in range(scale.rounds):
            for subject in subjects if number % 2 else reversed(subjects):
                before = _cpu_s(client)
                seconds[subject.name].append(subject.seconds(number))
                cpu[subject.name].append(_cpu_s(client) - before)
    return {
        "microseconds": _per_lock(seconds, scale.count),
        "cpu_microseconds": _per_lock(cpu, scale.count),
        "ratio": _ratio(seconds),
        "cpu_ratio": _ratio(cpu),
    }


def _cpu_s(client: redis.Redis) -> float:
    """What this process and the server have taken: on a busy machine, the time of the clock says little."""
    info: dict[str, Any] = client.info("cpu")
    return time.process_time() + float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def _per_lock(seconds: dict[str, list[float]], count: int) -> dict[str, float]:
    return {name: statistics.median(each) / count * 1e6 for name, each in seconds.items()}


def _ratio(seconds: dict[str, list[float]]) -> dict[str, float]:
    spread = Spread.of([theirs / ours for theirs, ours in zip(seconds["redis-py"], seconds["ragfence"], strict=True)])
    return {field: getattr(spread, field) for field in spread.__slots__}


def _measure_contention(server: servers.RedisServer, scale: LockScale, *, lockstep: bool) -> dict[str, Any]:
    tenant = "lockstep" if lockstep else "shuffled"
    orders = ["one order"] * scale.processes if lockstep else [f"order {at}" for at in range(scale.processes)]
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_worker(server, tenant, scale, order)) for order in orders]
        for worker in workers:
            _read_line(worker)  # "ready"
        for worker in workers:
            assert worker.stdin
            worker.stdin.write("go\n")
            worker.stdin.flush()
        answers = [json.loads(_read_line(worker)) for worker in workers]
    waits_ms = sorted(wait for answer in answers for wait in answer["waits_ms"])
    acquired = scale.processes * scale.locks
    if len(waits_ms) != acquired:
        raise RuntimeError(f"{len(waits_ms)} locks were taken, not {acquired}")
    with ragfence.open(server.url, tenant=tenant, journal=server.folder / "journal") as fence:
        rows = list(fence.audit.rows())
    refused = {row.token for row in rows if row.phase is Phase.IN_FLIGHT}
    return {
        "acquired": acquired,
        "refused_first": len(refused),
        "share": len(refused) / acquired,
        "p50_ms": percentile(waits_ms, 0.5),
        "p95_ms": percentile(waits_ms, 0.95),
        "p99_ms": percentile(waits_ms, 0.99),
        "longest_ms": waits_ms[-1],
        "seconds": max(answer["seconds"] for answer in answers),
    }


@contextlib.contextmanager
def _worker(server: servers.RedisServer, tenant: str, scale: LockScale, order: str) -> Iterator[subprocess.Popen[str]]:
    given = [server.url, tenant, order, str(scale.locks), str(scale.hold_ms), str(server.folder / "journal")]
    command = [sys.executable, "-m", "tests.bench.locks", "--worker", *given]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline()


def _work(url: str, tenant: str, order: str, locks: int, hold_ms: float, journal: str) -> None:
    names = [f"lock-{number}" for number in range(locks)]
    random.Random(order).shuffle(names)
    waits_ms: list[float] = []
    with ragfence.open(url, tenant=tenant, journal=journal) as fence:
        fence.inspector.now_ms()  # connected
        print("ready", flush=True)
        sys.stdin.readline()
        started = time.perf_counter()
        for name in names:
            asked = time.perf_counter()
            with fence.lock(name, ttl_s=30, wait_s=WAIT_S):
                waits_ms.append((time.perf_counter() - asked) * 1000)
                time.sleep(hold_ms / 1000)
        seconds = time.perf_counter() - started
    print(json.dumps({"waits_ms": waits_ms, "seconds": seconds}), flush=True)


def show(measured: dict[str, Any]) -> None:
    scale, alone = measured["scale"], measured["alone"]
    for what, taken, ratio in (
        ("by the clock", alone["microseconds"], alone["ratio"]),
        ("CPU of client and server", alone["cpu_microseconds"], alone["cpu_ratio"]),
    ):
        print(
            f"alone, {what}: redis-py {taken['redis-py']:.0f} us, ragfence {taken['ragfence']:.0f} us per lock taken"
            f" and released; {ratio['middle']:.2f}x of redis-py ({ratio['lower']:.2f} to {ratio['upper']:.2f}, extremes"
            f" {ratio['lowest']:.2f} and {ratio['highest']:.2f}), {_verdict(ratio['middle'] >= FLOOR_GOAL)}"
            f" ({FLOOR_GOAL}x)"
        )
    print(f"{scale['processes']} processes, {scale['locks']:,} locks, each held for {scale['hold_ms']:g} ms:")
    for name in ("shuffled", "lockstep"):
        found = measured[name]
        goals = ""
        if name == "shuffled":
            goals = (
                f"; share {_verdict(found['share'] <= SHARE_GOAL)} ({SHARE_GOAL:.0%}),"
                f" p95 {_verdict(found['p95_ms'] <= P95_GOAL_MS)} ({P95_GOAL_MS:.0f} ms)"
            )
        print(
            f"  {name}: {found['refused_first']:,} of {found['acquired']:,} met a holder ({found['share']:.1%}); until"
            f" it is held: {found['p50_ms']:.1f} ms at the median, {found['p95_ms']:.1f} ms at p95,"
            f" {found['p99_ms']:.1f} ms at p99, {found['longest_ms']:.0f} ms at most{goals}"
        )


def _verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--worker"]:
        url, tenant, order, locks, hold_ms, journal = arguments[1:]
        _work(url, tenant, order, int(locks), float(hold_ms), journal)
        return
    parser = argparse.ArgumentParser(prog="python -m tests.bench.locks", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    measured = measure(QUICK if options.quick else LockScale())
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(measured, indent=1))
    show(measured)


if __name__ == "__main__":
    main(sys.argv[1:])
