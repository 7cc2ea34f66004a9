"""Observability: metrics, log lines and traces of what a fence decides. See docs/observability.md.

    ragfence.open(..., observe=("metrics", "logs", "traces"))       or RAGFENCE_OBSERVE=metrics,logs,traces
    ragfence.open(..., observe=(Metrics(registry=mine), MyListener()))

A listener receives every call to the fence store with its answer, and cannot change either. If a listener fails, this
is logged once and the fence continues. If nothing is observed, none of this is loaded and calls have no overhead.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragfence.telemetry.events import Event as Event
    from ragfence.telemetry.events import Listener as Listener
    from ragfence.telemetry.exposition import exposition as exposition
    from ragfence.telemetry.instrumented_store import InstrumentedStore as InstrumentedStore
    from ragfence.telemetry.logs import Logs as Logs
    from ragfence.telemetry.metrics import Metrics as Metrics
    from ragfence.telemetry.traces import Traces as Traces

# Metrics, logs and traces each need a package that may not be installed, so they are imported when first used.
_WHERE = {
    "Event": "events",
    "Listener": "events",
    "Logs": "logs",
    "Metrics": "metrics",
    "InstrumentedStore": "instrumented_store",
    "Traces": "traces",
    "exposition": "exposition",
}

__all__ = ["Event", "InstrumentedStore", "Listener", "Logs", "Metrics", "Traces", "exposition"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ragfence.telemetry' has no attribute {name!r}")
    value = getattr(import_module(f"ragfence.telemetry.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
