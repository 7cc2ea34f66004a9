"""Part 8, one run: what grows with the store, and searches in a large index, as one mapping that JSON can hold."""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict
from typing import Any

from tests.bench import indexes_search, machine, size_asked
from tests.bench.documents_ours import OBJECTS
from tests.bench.machine import redis_server
from tests.bench.run import Say, as_told
from tests.bench.size_goals import verdicts
from tests.bench.size_scale import SizeScale


def measure(scale: SizeScale, say: Say = lambda _: None) -> dict[str, Any]:
    measured: dict[str, Any] = {"scale": asdict(scale) | {"full": scale.is_full}, "objects": OBJECTS}
    with redis_server() as server:
        measured["machine"] = machine.facts(server.url)
    measured["asked"] = size_asked.measure(scale, say)
    say(f"searching {scale.rows:,} rows")
    measured["search"] = indexes_search.measure(scale.rows)
    measured["search"]["lancedb"] = importlib.metadata.version("lancedb")
    measured["machine"]["load_after"] = machine.load()
    measured["goals"] = as_told(verdicts(measured))
    return measured
