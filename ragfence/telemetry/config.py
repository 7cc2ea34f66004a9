"""Makes the listeners that `observe=` or RAGFENCE_OBSERVE name."""

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
    """Returns the listeners to notify.

    Args:
        observe: Names, listeners, or both. None reads RAGFENCE_OBSERVE. What is given twice is one listener.
        policy: Chooses the fields of log lines and spans, and redacts them.
        environ: Instead of `os.environ`.

    Raises:
        ValidationError: An entry is neither a known name nor a listener.
    """
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
        f"observe: {wanted!r} is not a listener", hint=f"use {', '.join(NAMES)}, or an object with a method `handle`"
    )
