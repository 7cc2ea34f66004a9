"""Part 9, one run: consumers and webhooks beside bare ones; relays and locks, where their benchmarks are there."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import asdict
from typing import Any

from tests.bench import events_queue, events_webhooks, machine
from tests.bench.events_goals import verdicts
from tests.bench.events_scale import EventsScale
from tests.bench.machine import redis_server
from tests.bench.rounds import interleave
from tests.bench.run import Say, as_told


def measure(scale: EventsScale, say: Say = lambda _: None) -> dict[str, Any]:
    measured: dict[str, Any] = {"scale": asdict(scale) | {"full": scale.is_full}}
    with redis_server() as server:
        measured["machine"] = machine.facts(server.url)
    with events_queue.subjects(scale) as queues:
        measured["rates"] = interleave(queues, scale.rounds, lambda text: say(f"consumers, {text}"))
    with events_webhooks.subjects(scale) as routes:
        measured["rates"] |= interleave(routes, scale.rounds, lambda text: say(f"webhooks, {text}"))
    measured["others"] = _others(scale, say)
    measured["machine"]["load_after"] = machine.load()
    measured["goals"] = as_told(verdicts(measured))
    return measured


def _others(scale: EventsScale, say: Say) -> dict[str, Any]:
    """Relays and locks have benchmarks of their own, each beside what one would use instead."""
    found = {}
    if (outbox := _module("outbox")) is not None:
        say("relays")
        events = 10_000 if scale.is_full else 1_000
        found["outbox"] = outbox.measure(events=events, rounds=min(scale.rounds, 7), sent=10 * events)
    if (locks := _module("locks")) is not None:
        say("locks")
        found["locks"] = locks.measure(locks.LockScale(rounds=scale.rounds) if scale.is_full else locks.QUICK)
    return found


def _module(name: str) -> Any:
    where = f"tests.bench.{name}"
    return importlib.import_module(where) if importlib.util.find_spec(where) is not None else None
