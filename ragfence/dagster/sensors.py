"""Sensors for folders and buckets. They over-deliver and let the fence dedupe.

The cursor is a digest of the whole listing (names and states), so files that are deleted, that have equal timestamps or
go back to what they were all count as a change, and a change is all that it has to know. What has no state (a line of a
.jsonl file, a file written this very second) is read instead. There is no run_key: a run too many costs a listing, a
run too few would cost documents.

A run that was requested may fail, and then the listing is no other than before: it is requested again, a few times.
"""

from collections.abc import Callable
from typing import Any

import dagster as dg

from ragfence.core.hashing import digest
from ragfence.dagster.ingest_asset import made_of
from ragfence.documents.sources import Item, source_of
from ragfence.errors import DocumentInvalid

LISTING_TAG = "ragfence/listing"
"""of a run that a sensor requested: the listing that it saw"""
TRY_TAG = "ragfence/try"
"""of a run that was requested again: which one it is since the listing was seen to change"""


def build_source_sensor(
    source: Any,
    target: Any,
    *,
    name: str = "documents_changed",
    minimum_interval_seconds: int = 30,
    running: bool = False,
    tries: int = 3,
    **sensor: Any,
) -> dg.SensorDefinition:
    """Requests a run of `target` (a job, or assets) whenever the listing of a folder or an s3:// prefix has changed.

    `source` is what `fence.documents.sync` takes, or a callable that makes it at each tick. `tries`: so often a run is
    requested for one listing, if it fails.
    """
    target_of: dict[str, Any] = {"job": target} if isinstance(target, dg.JobDefinition) else {"target": target}

    def evaluate(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        seen = listing_digest(source)
        tags = {LISTING_TAG: seen}
        if seen != context.cursor:
            return dg.SensorResult(run_requests=[dg.RunRequest(tags=tags)], cursor=seen)
        # The newest alone: a listing may come back, and runs of the last time say nothing of this one. A run that
        # somebody cancelled was meant to end.
        for run in context.instance.get_runs(dg.RunsFilter(tags=tags), limit=1):
            following = int(run.tags.get(TRY_TAG, "1")) + 1
            if run.status is dg.DagsterRunStatus.FAILURE and following <= tries:
                again = dg.RunRequest(tags={**tags, TRY_TAG: str(following)})
                return dg.SensorResult(run_requests=[again], cursor=seen)
        return dg.SkipReason("nothing has changed since the last look")

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
    """Of the names and states of everything in a source."""
    given = made_of(source)
    found = source_of(given)
    try:
        lines = sorted(part for item in found.items() for part in [_line(item)])
    finally:
        if found is not source and callable(close := getattr(found, "close", None)):
            close()
    return digest("ragfence/listing/1", *lines).hex()


def _line(item: Item) -> bytes:
    doc_id = item.doc_id.encode(errors="surrogatepass")
    return digest("ragfence/listed/1", doc_id, (item.state or _content(item)).encode(errors="surrogatepass"))


def _content(item: Item) -> str:
    try:
        return repr(item.load())
    except (DocumentInvalid, OSError) as unreadable:  # the run will say so
        return repr(unreadable)
