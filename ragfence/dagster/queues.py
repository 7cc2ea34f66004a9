"""A queue that is drained by runs: a sensor that requests them, and an asset that handles what the queue holds.

Messages are acknowledged after the seal, so a run that fails, is terminated or killed leaves the rest to the next one,
and what it had done is a duplicate there.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import dagster as dg

from ragfence.dagster import _metadata
from ragfence.dagster._factory import SHOWN, asset_key, make_asset, make_sensor, progress_logger
from ragfence.dagster.resource import FENCE, open_fence
from ragfence.queues import Consumer, DocumentConsumer, open_transport
from ragfence.queues.loop import MessageLoop
from ragfence.queues.transport import Depth, Message, Transport

QUEUE_TAG = "ragfence/queue"
"""The tag of a requested run with the name of the queue."""
NO_DEAD_LETTERS = "no_dead_letters"
MAX_MESSAGES = 100_000
MAX_FAILURES = 12
"""Failed runs in a row that the backoff looks at."""
_WAIT_S = 1.0
_ACTIVE = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)

QueueGiven = str | Callable[[], Transport]
"""The URL of a queue, or a callable that opens it."""


def build_queue_asset(
    queue: QueueGiven,
    *,
    name: str = "consumed",
    handle: Callable[[Message], Any] | None = None,
    max_messages: int = MAX_MESSAGES,
    consumer: Mapping[str, Any] | None = None,
    resource_key: str = FENCE,
    **asset: Any,
) -> dg.AssetsDefinition:
    """An asset that handles the messages of a queue, each once, until the queue is empty.

    Its metadata are what became of the messages, and the first dead letters with their reasons. A dead letter also
    fails the check `no_dead_letters`.

    Args:
        queue: The URL of the queue, or a callable that opens it in the run.
        name: The name of the asset.
        handle: Called with each message. None ingests them: each message is a document.
        max_messages: How many messages one run handles at most.
        consumer: Other arguments of `Consumer`, such as `key`, or of `DocumentConsumer`.
        resource_key: The FenceResource to use, if there are several.
        asset: Any other argument of `@dg.asset`.
    """
    asset.setdefault("kinds", {"ragfence"})
    asset.setdefault("description", "Messages of a queue, each handled once.")

    def consumed(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        with closing(_open(queue)) as transport, open_fence(context, resource_key) as fence:
            loop = _loop(fence, transport, handle, consumer or {}, progress_logger(context, "messages"))
            loop.run(until_empty=True, limit=max_messages)
            counts = dict(loop.counts)
            if loop.stopped:
                # Terminated: what was being handled is done, the rest is in the queue.
                raise dg.DagsterExecutionInterruptedError
            depth, letters = transport.depth(), transport.dead_letters(SHOWN) if counts.get("dead") else []
            context.log.info("%s: %s", transport.name, counts or "no messages")
            return dg.MaterializeResult(
                metadata={
                    "queue": transport.name,
                    "messages": sum(counts.values()),
                    "left": depth.visible,
                    "results": _metadata.table(_results(counts), _COLUMNS),
                    "dead_letters": _metadata.table(
                        [{"message_id": each.message.message_id, "reason": each.reason[:200]} for each in letters],
                        {"message_id": "string", "reason": "string"},
                    ),
                },
                check_results=[_check(counts, depth)],
            )

    del consumed.__annotations__["return"]
    key = dg.AssetKey.from_coercible(asset["key"]) if "key" in asset else asset_key(name, asset)
    return make_asset(consumed, name, resource_key, asset, check_specs=[dg.AssetCheckSpec(NO_DEAD_LETTERS, asset=key)])


def build_queue_sensor(
    queue: QueueGiven,
    target: Any,
    *,
    name: str = "queue_has_messages",
    minimum_interval_seconds: int = 30,
    max_backoff_s: float = 3600.0,
    running: bool = False,
    **sensor: Any,
) -> dg.SensorDefinition:
    """Requests a run of `target` (a job, or assets) while a queue has messages, one run at a time.

    After runs that failed, it waits: twice as long after each one, up to `max_backoff_s`.

    Args:
        queue: The URL of the queue, or a callable that opens it at each tick.
        target: A job, or assets.
        name: The name of the sensor.
        minimum_interval_seconds: How often to look.
        max_backoff_s: The longest pause after failed runs.
        running: Start the sensor with the code location.
        sensor: Any other argument of `@dg.sensor`.
    """

    def evaluate(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        with closing(_open(queue)) as transport:
            depth, queue_name = transport.depth(), transport.name
        if not depth.visible:
            return dg.SkipReason(f"{queue_name} has no messages that wait")
        tags = {QUEUE_TAG: queue_name}
        if active := context.instance.get_runs(dg.RunsFilter(tags=tags, statuses=list(_ACTIVE)), limit=1):
            return dg.SkipReason(f"run {active[0].run_id} is consuming {queue_name}")
        if (wait_s := _backoff_s(context.instance, tags, minimum_interval_seconds, max_backoff_s)) > 0:
            return dg.SkipReason(f"the last run failed; the next one is requested in {wait_s:.0f} s")
        # A tick that is evaluated again, because its cursor was not stored, requests the same run.
        number = int(context.cursor or 0) + 1
        request = dg.RunRequest(run_key=f"{name}:{queue_name}:{number}", tags=tags)
        return dg.SensorResult(run_requests=[request], cursor=str(number))

    return make_sensor(
        evaluate, target, running=running, name=name, minimum_interval_seconds=minimum_interval_seconds, **sensor
    )


def _backoff_s(instance: dg.DagsterInstance, tags: Mapping[str, str], first_s: float, longest_s: float) -> float:
    """The seconds until another run may be requested, after runs that failed."""
    failures, ended_at = 0, 0.0
    for record in instance.get_run_records(dg.RunsFilter(tags=tags), limit=MAX_FAILURES):
        if record.dagster_run.status is not dg.DagsterRunStatus.FAILURE:
            break
        failures += 1
        ended_at = max(ended_at, record.end_time or 0.0)
    if not failures:
        return 0.0
    return max(0.0, ended_at + min(longest_s, first_s * 2.0**failures) - time.time())


def _loop(
    fence: Any,
    transport: Transport,
    handle: Callable[[Message], Any] | None,
    options: Mapping[str, Any],
    log_progress: Callable[[int], None],
) -> MessageLoop:
    given: dict[str, Any] = {"wait_s": _WAIT_S, **options}
    on_result = given.pop("on_result", None)
    loop: MessageLoop

    def count(message: Message, result: str, receipt: Any) -> None:
        log_progress(loop.counts.total())
        if on_result is not None:
            on_result(message, result, receipt)

    if handle is None:
        loop = DocumentConsumer(fence, transport, on_result=count, **given)
    else:
        loop = Consumer(fence, transport, handle, on_result=count, **given)
    return loop


def _open(queue: QueueGiven) -> Transport:
    return open_transport(queue) if isinstance(queue, str) else queue()


_COLUMNS = {"result": "string", "messages": "int"}


def _results(counts: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"result": result, "messages": count} for result, count in sorted(counts.items())]


def _check(counts: Mapping[str, int], depth: Depth) -> dg.AssetCheckResult:
    dead = counts.get("dead", 0)
    return dg.AssetCheckResult(
        check_name=NO_DEAD_LETTERS,
        passed=not dead,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={"dead_in_this_run": dead, "dead_in_the_queue": depth.dead},
    )
