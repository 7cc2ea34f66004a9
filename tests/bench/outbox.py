"""Events a second of a relay, against the loop that people write by hand: SELECT ... SKIP LOCKED, publish, UPDATE.

    python -m tests.bench.outbox [--events 10000] [--rounds 7] [--sent 100000] [--json FILE]

Both drain the same table of PostgreSQL into a function that does nothing, in turns. The loop keeps no order, counts no
attempts and gives nothing up. The ratio of each round counts; the goal is 0.7.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from ragfence.outbox import Outbox, Relay
from ragfence.queues.sql import open_engine
from tests.servers.postgres import postgres

GOAL = 0.7
BATCH = 100
KEYS = 1_000


def fill(outbox: Outbox, count: int, state: str) -> None:
    """Adds events by one statement; those that were sent are what a table holds for a month."""
    statement = sa.text(
        "INSERT INTO ragfence_outbox (event_id, topic, key, payload, state, attempts, created_ms, next_ms, sent_ms) "
        "SELECT gen_random_uuid()::text, 'orders', 'k' || (n % :keys), '{\"n\":' || n || '}', :state, 0, 1, :next, 1 "
        "FROM generate_series(1, :count) n"
    )
    values = {"keys": KEYS, "state": state, "count": count, "next": 2**42 if state == "sent" else 1}
    with outbox.engine.begin() as tx:
        tx.execute(statement, values)
    with outbox.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("VACUUM ANALYZE ragfence_outbox")


def by_hand(outbox: Outbox, publish: Callable[[Any], None]) -> None:
    take = sa.text(
        "SELECT id, event_id, topic, key, payload FROM ragfence_outbox WHERE state = 'pending' "
        "ORDER BY id LIMIT :batch FOR UPDATE SKIP LOCKED"
    )
    mark = sa.text("UPDATE ragfence_outbox SET state = 'sent', sent_ms = 1 WHERE id = ANY(:ids)")
    while True:
        with outbox.engine.begin() as tx:
            rows = tx.execute(take, {"batch": BATCH}).all()
            if not rows:
                return
            for row in rows:
                json.loads(row.payload)
                publish(row)
            tx.execute(mark, {"ids": [row.id for row in rows]})


def ours(outbox: Outbox, publish: Callable[[Any], None]) -> None:
    relay = Relay(outbox, to=publish, batch=BATCH)
    while relay.run_once().sent:
        pass


def measure(events: int, rounds: int, sent: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"relay": [], "by hand": []}
    with postgres() as url:
        outbox = Outbox(open_engine(url))
        fill(outbox, sent, "sent")
        for turn in range(rounds):
            for name in ("relay", "by hand") if turn % 2 else ("by hand", "relay"):
                fill(outbox, events, "pending")
                count = 0

                def publish(row: Any) -> None:
                    nonlocal count
                    count += 1

                started = time.perf_counter()
                (ours if name == "relay" else by_hand)(outbox, publish)
                rates[name].append(events / (time.perf_counter() - started))
                assert count == events
        outbox.engine.dispose()
    ratios = [one / other for one, other in zip(rates["relay"], rates["by hand"], strict=True)]
    return {
        "events": events,
        "sent_before": sent,
        "batch": BATCH,
        "keys": KEYS,
        "relay_per_s": [round(rate) for rate in rates["relay"]],
        "by_hand_per_s": [round(rate) for rate in rates["by hand"]],
        "ratio": round(statistics.median(ratios), 3),
        "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "goal": GOAL,
        "met": statistics.median(ratios) >= GOAL,
    }


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.outbox")
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sent", type=int, default=100_000)
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args(words)
    report = measure(given.events, given.rounds, given.sent)
    text = json.dumps(report, indent=2)
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    print(text)
    print(f"{'MET' if report['met'] else 'MISSED'}: {report['ratio']} of the loop by hand, goal {GOAL}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
