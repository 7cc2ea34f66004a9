"""Part 3, one run: everything that is measured of indexes, as one mapping that JSON can hold."""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict
from typing import Any

from tests.bench import indexes_changed, indexes_known, indexes_rates, machine
from tests.bench.documents_ours import OBJECTS
from tests.bench.indexes_goals import verdicts
from tests.bench.indexes_scale import IndexesScale
from tests.bench.machine import redis_server
from tests.bench.run import Say, as_told

_PACKAGES = ("lancedb", "qdrant-client", "wordllama", "pyarrow")


def measure(scale: IndexesScale, say: Say = lambda _: None) -> dict[str, Any]:
    told = asdict(scale) | {"changed": scale.changed, "full": scale.is_full}
    measured: dict[str, Any] = {"scale": told, "objects": OBJECTS}
    measured["versions"] = {name: importlib.metadata.version(name) for name in _PACKAGES}
    say(f"indexes of documents on Redis and a {OBJECTS}, audit on")
    with redis_server() as server:
        measured["machine"] = machine.facts(server.url)
        measured["known"] = indexes_known.measure(scale, say)
        measured["rates"] = indexes_rates.measure(server, scale, say)
        measured["changed"] = indexes_changed.measure(server, scale, say)
    measured["machine"]["load_after"] = machine.load()
    measured["goals"] = as_told(verdicts(measured))
    return measured
