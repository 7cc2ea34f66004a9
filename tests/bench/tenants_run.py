"""Part 7, one run: what a hostile tenant does to another, as one mapping that JSON can hold."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tests.bench import machine, tenants_rounds
from tests.bench.documents_ours import OBJECTS
from tests.bench.machine import redis_server
from tests.bench.run import Say, as_told
from tests.bench.tenants_goals import verdicts
from tests.bench.tenants_scale import TenantsScale


def measure(scale: TenantsScale, say: Say = lambda _: None) -> dict[str, Any]:
    measured: dict[str, Any] = {"scale": asdict(scale) | {"full": scale.is_full}, "objects": OBJECTS}
    with redis_server() as server:
        measured["machine"] = machine.facts(server.url)
        measured |= tenants_rounds.measure(server.folder, server, scale, say)
    measured["machine"]["load_after"] = machine.load()
    measured["goals"] = as_told(verdicts(measured))
    return measured
