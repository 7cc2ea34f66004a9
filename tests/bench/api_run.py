"""Part 5, one run: everything that is measured of the HTTP API, as one mapping that JSON can hold."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench import api_rates, api_scenarios, machine
from tests.bench.api_goals import verdicts
from tests.bench.api_load import BODY_BYTES, KNOWN
from tests.bench.api_scale import ApiScale
from tests.bench.documents_ours import OBJECTS
from tests.bench.machine import redis_server
from tests.bench.run import Say, as_told


def measure(scale: ApiScale, python: Path | None, say: Say = lambda _: None) -> dict[str, Any]:
    """`python`: the interpreter of the environment that has asgi-idempotency-header, if there is one."""
    measured: dict[str, Any] = {
        "scale": asdict(scale) | {"full": scale.is_full, "body_bytes": BODY_BYTES, "known": KNOWN},
        "objects": OBJECTS,
        "lease_s": api_scenarios.LEASE_S,
        "kept_s": api_scenarios.KEPT_S,
    }
    with redis_server() as server:
        measured["machine"] = machine.facts(server.url)
        measured["scenarios"] = api_scenarios.measure(server.folder, server, python, scale, say)
        measured |= api_rates.measure(server.folder, server, python, scale, say)
    measured["machine"]["load_after"] = machine.load()
    measured["goals"] = as_told(verdicts(measured))
    return measured
