"""Sensors for folders and buckets. They over-deliver and let the fence dedupe.

The cursor is a digest of the whole listing (names and states), so files that are deleted, that have equal timestamps or
go back to what they were all count as a change, and a change is all that it has to know. There is no run_key: a run too
many costs a listing, a run too few would cost documents.
"""

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import dagster as dg

from ragfence.documents.sources import source_of


def build_source_sensor(
    source: Any,
    target: Any,
    *,
    name: str = "documents_changed",
    minimum_interval_seconds: int = 30,
    running: bool = False,
    **sensor: Any,
) -> dg.SensorDefinition:
    """Requests a run of `target` (a job, or assets) whenever the listing of a folder or an s3:// prefix has changed.

    `source` is what `fence.documents.sync` takes, or a callable that makes it at each tick.
    """
    target_of: dict[str, Any] = {"job": target} if isinstance(target, dg.JobDefinition) else {"target": target}

    def evaluate(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        seen = listing_digest(source)
        if seen == context.cursor:
            return dg.SkipReason("nothing has changed since the last look")
        return dg.SensorResult(run_requests=[dg.RunRequest()], cursor=seen)

    decide: Callable[..., Any] = dg.sensor(
        name=name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING if running else dg.DefaultSensorStatus.STOPPED,
        **target_of,
        **sensor,
    )
    made = decide(evaluate)
    assert isinstance(made, dg.SensorDefinition)
    return made


def listing_digest(source: Any) -> str:
    """Of the names and states of everything in a source. Nothing is read but the listing."""
    found = source_of(source() if callable(source) else source)
    try:
        lines = sorted(f"{item.doc_id}\0{item.state}" for item in found.items())
    finally:
        if callable(close := getattr(found, "close", None)):
            close()
    return sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()
