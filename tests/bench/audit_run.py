"""Part 6, one run: questions to a large ledger, and what the rows cost those who are only told what is known."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench import audit_cost, audit_queries, machine
from tests.bench.audit_goals import verdicts
from tests.bench.audit_scale import AuditScale
from tests.bench.machine import redis_server
from tests.bench.rounds import interleave
from tests.bench.run import Say, as_told


def measure(scale: AuditScale, say: Say = lambda _: None, *, ledger: Path | None = None) -> dict[str, Any]:
    """`ledger`: a folder that keeps the rows for the next run; they take a while to make."""
    measured: dict[str, Any] = {"scale": asdict(scale) | {"full": scale.is_full}}
    with redis_server() as server:
        measured["machine"] = machine.facts(server.url)
        with audit_cost.subjects(server, scale) as subjects:
            measured["rates"] = interleave(subjects, scale.rounds, lambda text: say(f"with and without audit, {text}"))
    measured["queries"] = audit_queries.measure(scale, say, folder=ledger)
    measured["machine"]["load_after"] = machine.load()
    measured["goals"] = as_told(verdicts(measured))
    return measured
