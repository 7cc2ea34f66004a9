"""Part 1, one run: everything that is measured of operations, as one mapping that JSON can hold."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench import bulk, contention, growth, machine, memory, objects, single, trips
from tests.bench.goals import Verdict, verdicts
from tests.bench.machine import redis_server
from tests.bench.peers.process import powertools
from tests.bench.rounds import interleave
from tests.bench.scale import Scale

Say = Callable[[str], None]


def measure(scale: Scale, peer: Path | None, say: Say = lambda _: None) -> dict[str, Any]:
    """`peer`: the interpreter of the environment in which Powertools is installed, if there is one."""
    measured: dict[str, Any] = {"scale": asdict(scale) | {"full": scale.is_full}}
    say("counting round trips")
    measured["trips"] = trips.measure(scale, peer)
    say(f"weighing {scale.records:,} records")
    measured["memory"] = memory.measure(scale, peer)
    measured |= _redis_alone(scale, peer, say)
    say(f"starting {' and '.join(scale.object_stores)}")
    with objects.subjects(scale) as subjects:
        measured["rates"]["objects"] = interleave(subjects, scale.rounds, lambda text: say(f"with objects, {text}"))
    say(f"{scale.processes} processes contend for {scale.keys:,} keys")
    measured["contention"] = contention.measure(scale)
    measured["machine"]["load_after"] = machine.load()
    measured["goals"] = as_told(verdicts(measured))
    return measured


def as_told(found: Sequence[Verdict]) -> list[dict[str, Any]]:
    return [
        {
            **asdict(verdict.goal),
            "measured": asdict(verdict.spread) if verdict.spread else None,
            "outcome": verdict.outcome.value,
        }
        for verdict in found
    ]


def _redis_alone(scale: Scale, peer: Path | None, say: Say) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(redis_server())
        facts = machine.facts(server.url)
        subjects = [
            *stack.enter_context(single.subjects(server.url, server.folder, scale)),
            *stack.enter_context(bulk.subjects(server.url, scale)),
            *stack.enter_context(growth.subjects(scale, say)),
        ]
        other = stack.enter_context(powertools(peer, server.url)) if peer else None
        if other:
            subjects += [other.subject("replay", scale.replays), other.subject("new", scale.news)]
        rates = interleave(subjects, scale.rounds, lambda text: say(f"Redis alone, {text}"))
        return {"machine": facts, "peer": other.versions if other else None, "rates": {"redis": rates}}


def write(path: Path, measured: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(measured, indent=1) + "\n")
