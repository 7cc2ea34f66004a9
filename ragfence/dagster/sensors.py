"""Sensors for folders and buckets. They may request too many runs, because the fence deduplicates.

The cursor is a digest of the whole listing (names and states). So deleted files, files with equal timestamps, and files
that go back to an earlier content all count as a change. An item without a state (a line of a .jsonl file, a file
written in the last second) is read instead. There is no run_key: an extra run costs a listing, but a missing run would
cost documents.

If a requested run fails, the listing has not changed, so the run is requested again, a few times.
"""

from typing import Any

import dagster as dg

from ragfence.core.hashing import digest
from ragfence.dagster._factory import make_sensor
from ragfence.dagster.ingest_asset import resolve_source
from ragfence.documents.sources import Item, source_of
from ragfence.errors import DocumentInvalid

LISTING_TAG = "ragfence/listing"
"""The tag of a requested run with the digest of the listing."""
TRY_TAG = "ragfence/try"
"""The tag of a run that was requested again with the number of the attempt."""


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

    Args:
        source: What `fence.documents.sync` takes, or a callable that returns it at each tick.
        target: A job, or assets.
        name: The name of the sensor.
        minimum_interval_seconds: How often to look.
        running: Start the sensor with the code location.
        tries: How often a failing run is requested for the same listing.
        sensor: Any other argument of `@dg.sensor`.
    """

    def evaluate(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        seen = listing_digest(source)
        tags = {LISTING_TAG: seen}
        if seen != context.cursor:
            return dg.SensorResult(run_requests=[dg.RunRequest(tags=tags)], cursor=seen)
        # Only the newest run counts: a listing may come back, and older runs say nothing about it. A run that was
        # cancelled is not requested again.
        for run in context.instance.get_runs(dg.RunsFilter(tags=tags), limit=1):
            following = int(run.tags.get(TRY_TAG, "1")) + 1
            if run.status is dg.DagsterRunStatus.FAILURE and following <= tries:
                again = dg.RunRequest(tags={**tags, TRY_TAG: str(following)})
                return dg.SensorResult(run_requests=[again], cursor=seen)
        return dg.SkipReason("the listing has not changed since the last tick")

    return make_sensor(
        evaluate, target, running=running, name=name, minimum_interval_seconds=minimum_interval_seconds, **sensor
    )


def listing_digest(source: Any) -> str:
    """A digest of the names and states of all items of a source."""
    given = resolve_source(source)
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
    except (DocumentInvalid, OSError) as unreadable:  # the run will report it
        return repr(unreadable)
