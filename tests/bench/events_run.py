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

OTHERS = ("outbox", "locks")
"""Modules of this package with a function `measure(rounds=..., say=...)`, which returns what JSON can hold."""


def measure(scale: EventsScale, say: Say = lambda _: None) -> dict[str, Any]:
    measured: dict[str, Any] = {"scale": asdict(scale) | {"full": scale.is_full}}
    with redis_server() as server:
        measured["machine"] = machine.facts(server.url)
    with events_queue.subjects(scale) as queues:
        measured["rates"] = interleave(queues, scale.rounds, lambda text: say(f"consumers, {text}"))
    with events_webhooks.subjects(scale) as routes:
        measured["rates"] |= interleave(routes, scale.rounds, lambda text: say(f"webhooks, {text}"))
    measured["others"] = {name: found for name in OTHERS if (found := _measured(name, scale, say)) is not None}
    measured["machine"]["load_after"] = machine.load()
    measured["goals"] = as_told(verdicts(measured))
    return measured


def _measured(name: str, scale: EventsScale, say: Say) -> Any:
    where = f"tests.bench.{name}"
    if importlib.util.find_spec(where) is None:
        say(f"{where} is not there: not measured")
        return None
    return importlib.import_module(where).measure(rounds=scale.rounds, say=say)
