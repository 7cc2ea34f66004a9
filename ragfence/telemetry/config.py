"""From what `observe=` or RAGFENCE_OBSERVE says to listeners."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ragfence.core.policy import Policy
from ragfence.errors import ValidationError
from ragfence.telemetry.events import Listener

OBSERVE = "RAGFENCE_OBSERVE"
NAMES = ("metrics", "logs", "traces")


def listeners_of(
    observe: str | Listener | Sequence[str | Listener] | None,
    policy: Policy,
    environ: Mapping[str, str] | None = None,
) -> list[Listener]:
    """None asks the environment. A name twice, or in both ways, is one listener."""
    if observe is None:
        env = os.environ if environ is None else environ
        observe = env.get(OBSERVE, "")
    if isinstance(observe, str):
        observe = [name.strip() for name in observe.split(",") if name.strip()]
    elif isinstance(observe, Listener):
        observe = [observe]
    return [_listener(one, policy) for one in dict.fromkeys(observe)]


def _listener(wanted: str | Listener, policy: Policy) -> Listener:
    match wanted:
        case "metrics":
            from ragfence.telemetry.metrics import Metrics

            return Metrics()
        case "logs":
            from ragfence.telemetry.logs import Logs

            return Logs(policy)
        case "traces":
            from ragfence.telemetry.traces import Traces

            return Traces(policy)
        case Listener():
            return wanted
    raise ValidationError(
        f"observe: {wanted!r} is no listener", hint=f"use {', '.join(NAMES)}, or an object with a method `see`"
    )
